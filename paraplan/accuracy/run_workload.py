"""The workload of a measured run: its model, training, machines, framework and plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from paraplan.accuracy.fine_tuning import (
    fine_tuning_fields,
    fine_tuning_stack,
    is_fine_tuning,
    stated_kernels,
    stated_loss,
    with_named_targets,
)
from paraplan.accuracy.machines import DescribedMachines, described_cluster, gpu_by_label
from paraplan.accuracy.measured_runs import SHAPES, MeasuredRun
from paraplan.accuracy.recipes import RecipeTable, load_recipes
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import FALLBACK_FRAMEWORK, FALLBACK_OF_SPLIT_LAYERS, FrameworkCatalog
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.hardware.architecture import FLASH_ATTENTION_2
from paraplan.hardware.catalogue.profile_files import list_gpus
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import LinkSpeedTable, load_link_speeds
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.config_file import ModelConfig
from paraplan.model.named import Fields, named_config
from paraplan.model.reader import read_fields
from paraplan.model.shapes import Activation, TransformerShapes, model_from_shapes
from paraplan.model.spec import BlockSpec, ModelSpec
from paraplan.plan.allocators import grows_segments, tool_allocator
from paraplan.plan.parallel import Offload, ParallelPlan, Recompute
from paraplan.plan.stack import StackSettings
from paraplan.plan.stages import running_split
from paraplan.plan.training import AttentionKind, LinearPrecision, OptimizerName, TrainingPrecision, TrainingSpec

DEFAULT_VOCABULARY = 50304
UNKNOWN_GPUS, UNSTATED_GPU = ("unstated", "not stated", "unknown"), "A100-80GB"
"""The GPU of rows that measured memory and do not say on which."""
OPS_RECOMPUTE = r"""\bop\b["']? (policy|sac)|recompute only norm"""
"""Features of runs whose selective recompute is that of chosen operations (`selective_ops`)."""
MODULES_RECOMPUTE, EXPERTS_RECOMPUTE = "norms and activations recomputed", r"norms and expert(s| layers) recomputed"
"""Features of runs that recompute what Megatron-Core's `--recompute-modules` names."""
NO_HEAD = "no lm head"
"""The feature of runs of models that answer questions or classify, without logits over the vocabulary."""


@dataclass(frozen=True)
class BundledData:
    """Data that descriptions of runs refer to by name."""

    gpus: list[GpuProfile] = field(default_factory=list_gpus)
    """Kinds of GPU."""
    links: LinkSpeedTable = field(default_factory=load_link_speeds)
    """Speeds of links."""
    frameworks: FrameworkCatalog = field(default_factory=FrameworkCatalog)
    """Framework profiles."""
    recipes: RecipeTable = field(default_factory=load_recipes)
    """The options that published recipes switch on."""
    configs: Mapping[str, Fields] = field(default_factory=dict)
    """Configurations of models by name (`model.named.known_configs`)."""
    models: dict[tuple[str, int | None, int, int, int], ModelSpec] = field(default_factory=dict)
    """Models that runs named so far, by name, number of layers, and what runs state of them: many state the same."""

    def completed(self, run: MeasuredRun) -> MeasuredRun:
        """Return a run with what its published recipe says where its own cells are blank."""
        framework = self.frameworks.find(run.framework)
        return run if framework is None else self.recipes.completed(run, framework.name)


_USUAL_DROPOUT = 0.1
"""Dropout rate of GPT-like models whose own is not known."""


def workload_of_run(run: MeasuredRun, data: BundledData) -> Workload:
    """Return what is priced for a run: its model, training, machines, framework and stack, as `Workload.of` takes them.

    Blank cells: what the model of that name in `data` has; else a GELU, a vocabulary of 50304, and what
    `described_cluster` assumes. Where the precision is blank, GPUs without bf16 train in fp16.
    Raises `ParaplanError` for a GPU that no profile describes and for shapes that do not divide.
    """
    cluster, framework = _cluster(run, data), framework_of_run(run, data.frameworks)
    stack = stack_of_run(run, framework)
    model = _named_model(run, data) or model_from_shapes(_shapes(run, framework, stack, data.configs))
    if run.head == "classifier" or NO_HEAD in run.nonstandard_features.lower():
        # A classifier: the vocabulary stays in the embedding alone.
        model = model.replace(head=BlockSpec(kind="classifier"), vocab_size=1)
    training = training_of_run(run, framework).replace(stack=stack)
    if is_fine_tuning(run):
        training = with_named_targets(training.replace(**fine_tuning_fields(run, framework)), model)
    if not run.precision and "bf16" not in cluster.gpu.peak_flops_per_s:
        training = training.replace(precision="fp16")
    return Workload.of(model, training, cluster, data.links, framework=framework)


def _cluster(run: MeasuredRun, data: BundledData) -> Cluster:
    # Memory alone hardly depends on the GPU.
    is_unstated = run.gpu.lower() in UNKNOWN_GPUS and run.measured_step_time_s is None
    machines = DescribedMachines(
        gpu=UNSTATED_GPU if is_unstated else run.gpu,
        num_gpus=run.num_gpus,
        gpus_per_node=run.gpus_per_node,
        link=run.intra_node_link,
        network_bits_per_s_per_gpu=run.inter_node_gbps_per_gpu and run.inter_node_gbps_per_gpu * 1e9,
        network=run.network,
    )
    cluster = described_cluster(machines, data.gpus)
    if run.power_limit_w is not None:
        cluster = cluster.replace(gpu=cluster.gpu.replace(power_limit_w=run.power_limit_w))
    return cluster


def framework_of_run(run: MeasuredRun, frameworks: FrameworkCatalog) -> FrameworkProfile:
    """Return the profile of the framework that a run names, in the release that has what it used.

    A framework that is not known is modelled as plain PyTorch, with tensor or pipeline parallelism as Megatron-Core.
    """
    fallback = FALLBACK_OF_SPLIT_LAYERS if (run.tp or 1) > 1 or (run.pp or 1) > 1 else FALLBACK_FRAMEWORK
    framework = frameworks.find(run.framework) or frameworks.load(fallback)
    later, latest = framework.with_sequence_parallel, framework.with_later_features
    if latest and _has_later_features(run):
        return frameworks.bundled(latest)
    if later and (run.sequence_parallel or run.recompute == "selective"):
        return frameworks.bundled(later)
    return framework


def stack_of_run(run: MeasuredRun, framework: FrameworkProfile) -> StackSettings:
    """Return what a run states of the software, beside what its framework has."""
    own, precision, tool = framework.kernels, run.grad_dtype.lower(), tool_allocator(run.framework)
    is_half = precision.startswith(("bf16", "fp16"))
    is_whole = precision.startswith("fp32") and "reduce" not in precision
    # Published runs are older than torch 2.11, whose sdpa takes other kernels on some GPUs; our runtime's are not.
    usual = None if framework.is_own_runtime else own.flash_generation or FLASH_ATTENTION_2
    # Their AdamW is what the framework took then.
    is_plain = not is_fine_tuning(run) and _optimizer(run.optimizer.lower()) == "adamw"
    return StackSettings.model_validate(
        {
            "dispatcher": run.dispatcher or None,
            "etp": run.etp,
            "overlaps_experts": run.overlaps_experts,
            "drops_tokens": bool(run.capacity_factor),
            "cuda_graphs": run.cuda_graphs or None,
            "fp8_attention": run.fp8_attention,
            "compiled_loss": run.compiled_loss,
            "flash_generation": run.flash_generation or usual,
            "ring_attention": run.cp_exchange == "ring" if run.cp_exchange else None,
            "overlaps_gradients": run.overlaps_gradients,
            "fuses_accumulation": run.fuses_accumulation,
            "overlaps_products": run.overlaps_products,
            "fuses_rotations": run.fuses_rotations,
            "gradient_bytes": 2 if is_half else 4 if is_whole else None,
            "dropout": run.dropout,
            "recomputed_ops": "experts" if re.search(EXPERTS_RECOMPUTE, run.nonstandard_features.lower()) else None,
            "optimizer_step": framework.storage.optimizer_step if is_plain else None,
            "context_bytes": run.context_bytes,
            "expandable_segments": (tool is not None and grows_segments(tool, run.num_gpus)) or None,
            "deterministic": bool(run.deterministic),
        }
        | (fine_tuning_stack(run) if is_fine_tuning(run) else stated_kernels(run))
    )


def _has_later_features(run: MeasuredRun) -> bool:
    """Return whether a run has what Megatron-LM had only once it ran Megatron-Core: it came before GPUs with 8 bits."""
    return (run.ep or 1) > 1 or (run.cp or 1) > 1 or gpu_by_label(run.gpu).shared.fp8_speedup > 1


def training_of_run(run: MeasuredRun, framework: FrameworkProfile) -> TrainingSpec:
    """Return the training of a run. Blank: bf16, AdamW, and the framework's usual attention kernel."""
    precision: TrainingPrecision = "bf16"
    for known in get_args(TrainingPrecision):
        if run.precision.lower() == known:
            precision = known
    attention: AttentionKind = framework.kernels.default_attention
    if run.flash_attention is not None:
        attention = "flash" if run.flash_attention else "eager"
    linear = _linear_precision(run)
    return TrainingSpec(
        global_batch_size=run.global_batch,
        seq_length=run.seq_len,
        sample_length=run.sample_length,
        packs_samples=bool(run.packed and run.sample_length),
        precision=precision,
        optimizer=_optimizer(run.optimizer.lower()),
        attention=attention,
        linear_precision=linear,
        fp8_recipe=(run.fp8_recipe or None) if linear == "fp8" else None,
        compiled=bool(run.torch_compile),
        loss=stated_loss(run.kernels),
        expert_load=_expert_load(run, framework),
    )


def _linear_precision(run: MeasuredRun) -> LinearPrecision:
    narrow: dict[str, LinearPrecision] = {"mxfp8": "mxfp8", "fp8": "fp8", "fp4": "nvfp4"}
    if "fp8" in run.precision and "mx" in run.nonstandard_features.lower():
        return "mxfp8"
    return next((name for word, name in narrow.items() if word in run.precision), "16bit")


def _expert_load(run: MeasuredRun, framework: FrameworkProfile) -> float | Literal["trained"] | None:
    """Return the load of the busiest rank of experts. Blank: published benchmarks force an even one, users do not."""
    if run.capacity_factor:
        return max(1.0, run.capacity_factor)
    if run.routing == "trained":
        return "trained"
    return None if run.routing == "natural" or (framework.is_own_runtime and not run.routing) else 1.0


def _optimizer(words: str) -> OptimizerName:
    if "adam" in words:
        if "8-bit" in words or "8bit" in words:
            return "adamw_8bit"
        return "adamw_foreach" if "foreach" in words else "adamw"
    return next((name for name in ("adafactor", "muon", "sgd") if name in words), "adamw")


def plan_of_run(run: MeasuredRun, framework: FrameworkProfile) -> ParallelPlan:
    """Return the plan of a run. Blank: degrees of 1, dp what is left of the GPUs, micro-batches of 1, 1F1B.

    A blank `sequence_parallel` is what the framework does by default, and so is the number of micro-batches in a
    pipeline.
    Raises `PlanError` or `ValueError` (pydantic's) for degrees and batches that contradict each other.
    """
    tp, pp, cp, ep = run.tp or 1, run.pp or 1, run.cp or 1, run.ep or 1
    dp = run.dp or max(1, run.num_gpus // (tp * pp * cp))
    if dp * tp * pp * cp != run.num_gpus:
        raise PlanError(f"dp={dp} x tp={tp} x pp={pp} x cp={cp} is not num_gpus={run.num_gpus}")
    ep = _replicas_of_experts(run, ep=ep, tp=tp, data_ranks=dp * cp)
    micro_batch = run.micro_batch or 1
    if run.dp and run.micro_batch and run.global_batch < dp * micro_batch and run.num_microbatches is None:
        raise PlanError(
            f"a global batch of {run.global_batch} is less than dp={dp} micro-batches of {micro_batch}",
            hint="one of the three is wrong",
        )
    if not (run.dp or run.tp or run.pp or run.cp or run.num_microbatches) and run.global_batch < dp * micro_batch:
        raise PlanError(
            f"tp, pp and cp are blank, and a global batch of {run.global_batch} is less than one for each of {dp} GPUs",
            hint="say how the model was split",
        )
    zero_stage = (run.zero_stage or 0) if dp * cp > 1 else 0
    virtual = (run.vpp or 1) if pp > 1 else 1
    return ParallelPlan.model_validate(
        {
            "dp": dp,
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "ep": ep,
            "zero_stage": min(zero_stage, 1) if pp > 1 else zero_stage,
            "zero_shards": run.zero_shards if run.zero_shards and zero_stage and run.zero_shards < dp * cp else None,
            "sequence_parallel": tp > 1 and _splits_sequences(run, framework),
            "micro_batch_size": micro_batch,
            "num_microbatches": run.num_microbatches or max(1, round(run.global_batch / dp / micro_batch)),
            "pipeline_schedule": None if pp == 1 else run.schedule or ("interleaved_1f1b" if virtual > 1 else "1f1b"),
            "virtual_pipeline_size": virtual,
            "recompute": _recompute(run),
            "offload": _offload(run),
            "stage_blocks": _stage_blocks(run, framework, num_stages=pp * virtual) if pp > 1 else None,
        }
    )


def _replicas_of_experts(run: MeasuredRun, *, ep: int, tp: int, data_ranks: int) -> int:
    """Return over how many ranks beside those of tp the experts go.

    Where they are whole (`etp` 1), the run's `ep` counts the ranks of tp too: over these they stand as split, which is
    the same share of them. A blank `etp` is 1 where `ep` does not divide the ranks of dp and cp.
    Raises `PlanError` for experts split over some ranks of tp alone, or spread over a share of them.
    """
    etp = run.etp or (1 if data_ranks % ep and ep % tp == 0 else tp)
    if etp == tp:
        return ep
    if etp != 1 or ep % tp:
        raise PlanError(
            f"etp={etp} with tp={tp} and ep={ep} is not modelled",
            hint="etp of tp is, and etp of 1 where tp divides ep",
        )
    return ep // tp


def _stage_blocks(run: MeasuredRun, framework: FrameworkProfile, *, num_stages: int) -> tuple[int, ...] | None:
    """Return the blocks of each stage of a framework that does not divide them evenly, where the run has its shapes.

    What is counted is what nanotron counts, whatever the model: four square matrices and three of the MLP.
    """
    shapes = (run.layers, run.hidden, run.ffn_hidden, run.vocab)
    if not framework.pipeline.cuts_by_running_cost or None in shapes:
        return None
    layers, hidden, inner, vocabulary = (size or 0 for size in shapes)
    block, head = 4 * hidden**2 + 3 * inner * hidden, vocabulary * hidden
    return running_split(layers, num_stages, block_cost=block, head_cost=head)


def _recompute(run: MeasuredRun) -> Recompute:
    """Return the recompute of a run, none where it says nothing.

    Selective recompute is that of the attention core, unless the features name operations that are run again.
    """
    features = run.nonstandard_features.lower()
    if run.recompute == "selective" and re.search(OPS_RECOMPUTE, features):
        return "selective_ops"
    if MODULES_RECOMPUTE in features or re.search(EXPERTS_RECOMPUTE, features):
        return "selective_ops"
    return next((known for known in get_args(Recompute) if run.recompute == known), "none")


def _offload(run: MeasuredRun) -> Offload:
    """Return what a row's `offload` leaves on the host beside activations: ZeRO's are optimizer states."""
    words = run.offload.lower()
    if "param" in words:
        return "parameters"
    return "optimizer" if "optimizer" in words or "zero" in words else "none"


def _splits_sequences(run: MeasuredRun, framework: FrameworkProfile) -> bool:
    """Return whether tensor parallelism divides sequences too.

    Megatron-Core refuses experts over ranks beside tp without it.
    """
    if (run.ep or 1) > 1:
        return True
    if run.sequence_parallel is not None:
        return run.sequence_parallel
    return framework.tensor_parallel.sequence_parallel_by_default


def _named_model(run: MeasuredRun, data: BundledData) -> ModelSpec | None:
    """Return the known model that a run names, None for a run that gives its shapes."""
    blank = [name for name in SHAPES if getattr(run, name) is None]
    fields = named_config(data.configs, run.model_name, num_layers=run.layers)
    has_experts = is_fine_tuning(run) and fields is not None and "num_local_experts" in fields
    if not blank and not has_experts and not _is_whole(run, fields):
        return None
    if fields is None:
        raise PlanError(f"{', '.join(blank)} not given", hint="a model_name that is bundled says them too")
    key = (run.model_name, run.layers, run.mtp_layers or 0, run.vocab or 0, run.seq_len)
    if key not in data.models:
        stated = {"mtp_num_layers": run.mtp_layers or 0} | ({"vocab_size": run.vocab} if run.vocab else {})
        text = fields.get("text_config")
        fields = fields | ({"text_config": text | stated} if text else stated)
        data.models[key] = read_fields(ModelConfig(run.model_name, fields, run.model_name, run.seq_len))
    return data.models[key]


def _is_whole(run: MeasuredRun, fields: Fields | None) -> bool:
    """Return whether a run's shapes are those of the configuration that it names, which says more than they do."""
    if fields is None:
        return False
    stated = {
        "num_hidden_layers": run.layers,
        "hidden_size": run.hidden,
        "num_attention_heads": run.heads,
        "num_key_value_heads": run.kv_heads,
        "intermediate_size": run.ffn_hidden,
    }
    return all(value is None or fields.get(name) == value for name, value in stated.items())


def _shapes(
    run: MeasuredRun, framework: FrameworkProfile, stack: StackSettings, known: Mapping[str, Fields]
) -> TransformerShapes:
    assert run.layers is not None
    assert run.hidden is not None
    assert run.heads is not None
    fields = named_config(known, run.model_name, num_layers=None) or {}
    if fields.get("hidden_size") != run.hidden or fields.get("num_attention_heads") != run.heads:
        fields = {}
    activation: Activation = "swiglu" if fields.get("hidden_act") == "silu" else "gelu"
    for name in get_args(Activation):
        if run.activation.lower() == name:
            activation = name
    tied = run.tied_embeddings
    return TransformerShapes(
        name=run.model_name or run.id,
        num_layers=run.layers,
        hidden_size=run.hidden,
        num_heads=run.heads,
        num_kv_heads=run.kv_heads or fields.get("num_key_value_heads"),
        ffn_hidden_size=run.ffn_hidden or fields.get("intermediate_size"),
        vocab_size=run.vocab or fields.get("vocab_size") or DEFAULT_VOCABULARY,
        max_seq_length=run.seq_len,
        activation=activation,
        tied_embeddings=bool(fields.get("tie_word_embeddings") if tied is None else tied),
        dropout=_USUAL_DROPOUT if stack.dropout is None else stack.dropout,
        writes_out_gelu=framework.kernels.writes_out_gelu,
    )
