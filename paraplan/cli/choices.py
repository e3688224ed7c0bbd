"""The options that `estimate` and `recommend` share, in groups, and the records that their values become."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paraplan.api.machines import load_cluster, load_cluster_for
from paraplan.api.workloads import (
    MOST_LOAD,
    OPTIMIZERS,
    Cluster,
    StackSettings,
    TrainingSpec,
    Workload,
    optimizer_name,
    task_words,
    trainable_words,
    training_of,
    weight_format,
)
from paraplan.cli import completion
from paraplan.cli.media_options import MediaChoices
from paraplan.cli.options import (
    HARDWARE_PANEL,
    MOST_SEQUENCES,
    TRAINING_PANEL,
    AttentionName,
    CalibrationOption,
    Fp8RecipeName,
    GpusPerNodeOption,
    LinearPrecisionName,
    LinkName,
    LossName,
    NodesOption,
    PrecisionName,
    ProfileOption,
    StackOption,
    amount,
    count,
    length,
    memory_size,
    one_of,
)
from paraplan.cli.terminal import show_note
from paraplan.errors import UsageError

if TYPE_CHECKING:
    from paraplan.model.spec import ModelSpec
    from paraplan.plan.files import PlanFile


_hardware = partial(typer.Option, rich_help_panel=HARDWARE_PANEL)
_training = partial(typer.Option, rich_help_panel=TRAINING_PANEL)


def _load(value: str) -> str:
    """Check a load of experts: a number, or the word for that of trained models. Typer knows no unions."""
    words = value.strip().lower()
    if words == "trained":
        return words
    try:
        return str(amount(1, MOST_LOAD)(words))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, nor the word 'trained'") from None


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """The machines, and what is known of them. $PARAPLAN_PROFILE is the profile where nothing else names one."""

    profile: ProfileOption = None
    nodes: NodesOption = None
    gpus_per_node: GpusPerNodeOption = None
    gpu: Annotated[
        str | None,
        _hardware(
            "--gpu",
            metavar="NAME",
            help="The kind of GPU, with --num-gpus, in place of a profile: rtx-3090, or a file.",
            autocompletion=completion.gpus,
        ),
    ] = None
    num_gpus: Annotated[
        int | None, _hardware("--num-gpus", metavar="N", parser=count(1, 512), help="GPUs of one machine.")
    ] = None
    link: Annotated[
        LinkName | None,
        _hardware("--link", metavar="KIND", help=f"How they are connected: {one_of(LinkName)}; as usual by default."),
    ] = None
    network: Annotated[
        str | None,
        _hardware(
            "--network",
            metavar="NAME",
            help="The network between machines: 10g, or a name of paraplan profiles list.",
            autocompletion=completion.networks,
        ),
    ] = None
    host_memory: Annotated[
        int | None,
        _hardware("--host-memory", metavar="SIZE", parser=memory_size, help="What each machine has of it: 128GiB."),
    ] = None
    calibration: CalibrationOption = None
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            help="Predict without what your own runs on such machines said.",
            rich_help_panel=HARDWARE_PANEL,
        ),
    ] = False

    def cluster(self) -> Cluster:
        """Return the machines. Raises `ProfileError` and `NoGpuError` as `paraplan.load_cluster` does."""
        return load_cluster(self._source(), num_nodes=self.nodes, **self._how())

    def each(self) -> tuple[HardwareOptions, ...]:
        """Return the options for each of several machines that --profile names: `8xh100,dgx-b200`."""
        profile = self.profile
        if profile is None or "," not in profile or Path(profile).exists():
            return (self,)
        return tuple(replace(self, profile=part.strip()) for part in profile.split(",") if part.strip())

    def cluster_for(self, num_ranks: int) -> Cluster:
        """Return the machines, by default as many as `num_ranks` ranks need."""
        return load_cluster_for(num_ranks, self._source(), num_nodes=self.nodes, **self._how())

    def _source(self) -> str | None:
        if len(self.each()) > 1:
            raise UsageError(
                f"--profile {self.profile} names several machines", hint="paraplan recommend compares them"
            )
        if self.gpu is None and self.num_gpus is None:
            return self.profile or os.environ.get("PARAPLAN_PROFILE") or None
        if self.profile is not None or self.gpu is None:
            raise UsageError(
                "--gpu and --num-gpus describe a machine together, in place of --profile",
                hint="for example --gpu rtx-3090 --num-gpus 4",
            )
        return f"{self.num_gpus or 1}x{self.gpu}"

    def _how(self) -> dict[str, Any]:
        return {
            "gpus_per_node": self.gpus_per_node,
            "network": self.network,
            "link": self.link.value if self.link else None,
            "host_memory_bytes": self.host_memory,
        }

    def or_of(self, file: PlanFile) -> HardwareOptions:
        """Return the machines that a plan file was made for where no profile is given, with the options beside it."""
        made = file.cluster
        if self.profile is not None or self.gpu is not None or made is None:
            return self
        return replace(
            self,
            profile=made.name,
            nodes=self.nodes or made.num_nodes,
            gpus_per_node=self.gpus_per_node or made.gpus_per_node,
            host_memory=self.host_memory or made.host_memory_bytes,
        )

    def calibrated(self, workload: Workload) -> Workload:
        """Return a workload with the constants of the calibration file, without one corrected by the user's own runs.

        Runs that do not count are told, and a file that is damaged, by which nothing is corrected.
        """
        if self.calibration is None:
            return workload if self.no_history else _by_own_runs(workload)
        from paraplan.api.calibrations import load_calibration  # readers of runs, which most calls do without

        return load_calibration(self.calibration).applied_to(workload)


def _by_own_runs(workload: Workload) -> Workload:
    from paraplan.api.history import KeptRunsError, has_history, load_history

    if not has_history():
        return workload
    try:
        history = load_history()
    except KeptRunsError as error:
        show_note(f"nothing is corrected by your own runs: {error.message} ({error.hint})")
        return workload
    for sentence in history.left_out(workload):
        show_note(sentence)
    return history.applied_to(workload)


@dataclass(frozen=True, kw_only=True)
class TrainingChoices(MediaChoices):
    """Options of the training: batch, sequences, precision, kernels."""

    global_batch: Annotated[
        int | None,
        _training(
            "--global-batch", metavar="N", parser=count(1, MOST_SEQUENCES), help="Sequences of one step over all GPUs."
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        _training(
            "--seq-len",
            metavar="N",
            parser=length,
            help="Tokens of a sequence, also as 8k; by default the model's longest, at most 4096.",
        ),
    ] = None
    sample_len: Annotated[
        int | None,
        _training(
            "--sample-len",
            metavar="N",
            parser=length,
            help="Mean tokens of a sample, where samples are shorter than a sequence: padded or packed.",
        ),
    ] = None
    packed: Annotated[
        bool, _training("--packed", help="Samples of --sample-len are packed, several to a sequence, not padded.")
    ] = False
    precision: Annotated[
        PrecisionName | None,
        _training(
            "--precision",
            help="bf16 by default, fp16 on GPUs without it: both are mixed, with fp32 master weights. bf16-pure has "
            "everything in bf16; fp8, mxfp8 and nvfp4 are those of linear layers beside bf16.",
        ),
    ] = None
    optimizer: Annotated[
        str,
        _training(
            "--optimizer",
            metavar="NAME",
            parser=optimizer_name,
            autocompletion=completion.optimizers,
            help=f"Decides the optimizer state: {', '.join(OPTIMIZERS)}, or a name of transformers' --optim.",
        ),
    ] = "adamw"
    train: Annotated[
        str,
        _training(
            "--train",
            metavar="WHAT",
            parser=trainable_words,
            autocompletion=completion.trained,
            help="What trains: full, lora:r=16,targets=q|v, qlora, dora, rslora, ia3, head, embeddings, norms, "
            "layers:last4, joined by +.",
        ),
    ] = "full"
    task: Annotated[
        str,
        _training(
            "--task",
            metavar="WHAT",
            parser=task_words,
            autocompletion=completion.tasks,
            help="What a step learns from: sft, dpo, dpo:precomputed, orpo, kto, reward, "
            "grpo:completion=512,reserve=0.5, embedding, reranker. Sequences of pairs count apart.",
        ),
    ] = "sft"
    base_weights: Annotated[
        str | None,
        _training(
            "--base-weights",
            metavar="FORMAT",
            parser=weight_format,
            autocompletion=completion.weight_formats,
            help="How frozen linear layers are stored: bf16, fp32, int8, nf4, nf4:double, fp4, mxfp4.",
        ),
    ] = None
    quantizer: Annotated[
        str | None,
        _training(
            "--quantizer",
            metavar="TOOL",
            autocompletion=completion.quantizers,
            help="What stores them in fewer bits, and so whether experts are: transformers, transformers-4, axolotl, "
            "unsloth, torchao.",
        ),
    ] = None
    loss: Annotated[
        LossName,
        _training(
            "--loss",
            help="Cross-entropy on all logits, in chunks, fused with the head (Liger), or without logits (cut).",
        ),
    ] = LossName.plain
    offload_activations: Annotated[
        bool,
        _training(
            "--offload-activations",
            help="What blocks keep for the backward pass waits in the host's memory (TRL, torchtune, axolotl).",
        ),
    ] = False
    attention: Annotated[
        AttentionName, _training("--attention", help="The attention kernel; eager keeps all scores.")
    ] = AttentionName.sdpa
    linear_precision: Annotated[
        LinearPrecisionName,
        _training(
            "--linear-precision", help="What the linear layers of blocks multiply in, beside 16-bit activations."
        ),
    ] = LinearPrecisionName.as_training
    fp8_recipe: Annotated[
        Fp8RecipeName | None,
        _training("--fp8-recipe", help="How operands in fp8 are scaled, in the words of Megatron-LM and torchao."),
    ] = None
    fp8_gather: Annotated[
        bool,
        _training("--fp8-gather", help="Weights are gathered in fp8 (torchtitan, --fp8-param-gather of Megatron-LM)."),
    ] = False
    expert_load: Annotated[
        str | None,
        _training(
            "--expert-load",
            metavar="X",
            parser=_load,
            help="Rows of the busiest rank of experts over the mean, 1 if even; trained: as released models leave it.",
        ),
    ] = None
    stack: StackOption = ""
    compiled: Annotated[bool, _training("--compile", help="torch.compile compiles the repeated blocks.")] = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a `TrainingSpec` beside batch and length."""
        precision, linear = self._precisions
        return {
            "precision": precision,
            "optimizer": self.optimizer,
            "attention": self.attention,
            "compiled": self.compiled,
            "linear_precision": linear,
            "fp8_recipe": self.fp8_recipe,
            "fp8_gather": self.fp8_gather,
            "expert_load": self.expert_load if self.expert_load in (None, "trained") else float(self.expert_load or 1),
            "train": self.train,
            "task": self.task,
            "sample_length": self.sample_len,
            "packs_samples": self.packed,
            "base_weights": self.base_weights,
            "quantizer": self.quantizer,
            "loss": self.loss,
            "offloads_activations": self.offload_activations,
            **self.media_fields,
            "stack": StackSettings.parse(self.stack),
        }

    def asked(self, given: frozenset[str]) -> dict[str, Any]:
        """Return the fields of a `TrainingSpec` that the options with the names in `given` say."""
        names = {
            "sample_length": "sample_len",
            "packs_samples": "packed",
            "offloads_activations": "offload_activations",
        }
        asked = {field: value for field, value in self.fields.items() if names.get(field, field) in given}
        precision, linear = self._precisions
        if "precision" in given and linear == getattr(self.precision, "value", None):
            asked |= {"precision": precision, "linear_precision": linear}
        return asked

    @property
    def _precisions(self) -> tuple[str, str]:
        """The precision of the training, and that of linear layers: fp8 stands for bf16 with linear layers in fp8."""
        precision, linear = (self.precision or PrecisionName.bf16).value, self.linear_precision.value
        if precision not in list(LinearPrecisionName):
            return precision, linear
        if linear not in (LinearPrecisionName.as_training, precision):
            raise UsageError(
                f"--precision {precision} beside --linear-precision {linear}", hint="leave one of them out"
            )
        return PrecisionName.bf16.value, precision

    def say_length(self, model: ModelSpec, length: int) -> None:
        """Say which length is assumed, where the model takes longer sequences and none was given."""
        if self.seq_len is None and length < (model.max_seq_length or 0):
            assumed = f"sequences of {length} tokens are assumed, of {model.max_seq_length} that the model takes"
            show_note(f"{assumed}: --seq-len says otherwise")

    def or_of(self, file: PlanFile, model: ModelSpec, path: Path, given: frozenset[str]) -> TrainingSpec:
        """Return the training of the plan file at `path`, with the options that are `given` in place of its fields.

        Raises `UsageError` where neither says how large a batch is.
        """
        asked = self.asked(given)
        if file.training is not None:
            sizes = {"global_batch_size": self.global_batch, "seq_length": self.seq_len}
            return file.training.replace(**asked | {name: size for name, size in sizes.items() if size is not None})
        if self.global_batch is None:
            raise UsageError(f"{path} does not say what it trains", hint="give --global-batch and --seq-len")
        return training_of(model, seq_length=self.seq_len, global_batch_size=self.global_batch, **asked)
