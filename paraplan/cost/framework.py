"""Framework profiles: implementation choices that change memory or step time but are not part of a plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paraplan.cost.framework_experts import ExpertsProfile
from paraplan.cost.framework_fixed import FixedChoices
from paraplan.cost.framework_levers import LeverProfile
from paraplan.cost.framework_loading import LoadingProfile
from paraplan.cost.framework_storage import StorageProfile
from paraplan.cost.implementations import Loss, Sharding, implementations
from paraplan.model.trainable import InputCopy
from paraplan.plan.parallel import ScheduleName
from paraplan.plan.split_rules import SplitRules
from paraplan.plan.stack import RecomputedOps
from paraplan.plan.training import AttentionKind, Fp8Recipe, LossKernel, TrainingSpec
from paraplan.records import Record, Source

OWN_RUNTIME = "paraplan"
"""The profile of paraplan's own runtime."""

FUSED_TRAFFIC = 1.6
"""Bytes that a forward pass of fused kernels moves outside of matmuls for each byte that it saves for the backward
pass, counted by operation: a GPT block moves 54 bytes and saves 34 for each hidden feature."""

COMPILED_TRAFFIC = 1.1
"""Bytes moved for each byte saved of blocks under torch.compile: 1.16 and 1.15 of Llama 1B and 8B, 1.1 of Qwen3 0.6B,
1.0 of GPT-2, from their kernels on an H200 (profiles/measured, kernels-*.json); inductor fuses a norm with the sum
before and the cast after."""

MODULES_BACKWARD_HOST = 2.4
"""How many times as long as for a forward pass the host needs for the backward pass of transformers' modules."""

MODULES_RERUN_HOST = (1.65, 6.2, 2.9)
"""How many times as long for a block that runs again under recompute `selective`, `selective_ops` and `full` by torch's
checkpoints that are not reentrant: hooks see every tensor that is saved, and modes every operation."""

MODULES_COMPILED_HOST = 0.5
"""The share of all this that torch.compile leaves, which compiles hooks and modes as well."""

Checkpoints = Literal["reentrant", "whole", "early"]
"""reentrant: an autograd function that runs all of a block again, without hooks. The others are torch's checkpoints
whose hooks see every tensor that is saved (`use_reentrant=False`). early: they stop where the backward pass has all
that it reads, before a block's last product (`early_stop` in torch/utils/checkpoint.py, the default since 2.1), and so
does what torch.compile or XLA make of any, in which nothing is left that nobody reads. whole: told not to stop."""

_HALF = 2.0
_PURE_STORAGE: dict[str, Any] = {
    "weight_bytes": _HALF,
    "gradient_bytes": _HALF,
    "master_bytes": 0.0,
    "is_autocast": False,
    "accumulates_separately": False,
}
"""Everything in bf16: torch's optimizers keep states in the type of the parameters."""
_STEPS = {
    "adamw": "fused",
    "adamw_foreach": "foreach",
    "adamw_8bit": "fused",
    "adamw_4bit": "for_loop",
    "paged_adamw": "fused",
    "paged_adamw_8bit": "fused",
    "lion": "fused",
    "lion_8bit": "fused",
    "schedule_free_adamw": "foreach",
    "schedule_free_sgd": "foreach",
    "galore_adamw": "for_loop",
}
"""How optimizers go over parameters: bitsandbytes has one kernel for each tensor."""


class _Group(Record):
    """Values that belong together, with their sources. A value that a file leaves out keeps its default."""

    sources: tuple[Source, ...] = Field(min_length=1)
    """Where the values come from; the first that names a value counts."""


class KernelProfile(_Group):
    """Kernels of a block: what they fuse, move and keep, and what the host needs to start them."""

    fused: bool
    """Norms, activations and rotary embeddings are fused kernels (`BlockSpec.saved_fused`)."""
    engine: bool = False
    """Linear layers are Transformer Engine's: they keep inputs of products in 8 bits so for the gradients of their
    weights (pytorch/module/linear.py), a 16-bit tensor for each distinct shape of weight where gradients accumulate
    elsewhere, and a cuBLAS workspace of their own (pytorch/module/base.py)."""
    fp8_recipe: Fp8Recipe = "delayed"
    """How operands in fp8 are scaled where the training does not say it."""
    traffic_per_saved_byte: float = 2.6
    """Bytes that a forward pass moves outside of matmuls for each byte that it saves: `FUSED_TRAFFIC` where kernels are
    fused, 2.6 where each operation reads and writes (a Llama block of transformers moves 127 and saves 49)."""
    host_s_per_block: float
    """Seconds of the host to start the kernels of one block's forward pass: a floor under its time."""
    starts_modules: bool = False
    """`host_s_per_block` is that of a Llama block of transformers, and others take as much more or less as they have
    kernels; a backward pass and a block that runs again take as many times as long as theirs (`MODULES_BACKWARD_HOST`,
    `MODULES_RERUN_HOST`), and torch.compile leaves a half."""
    compiles_checkpointed: bool = True
    """Under recompute `full` blocks are compiled as well. Where flash attention breaks their graph they are not: of a
    checkpointed function torch.compile makes one graph or none (tests/cost/test_compiled_checkpoint.py)."""
    checkpoints: Checkpoints = "reentrant"
    """The function that runs a block again."""
    collective_host_s: float = 0.0
    """Seconds of the host to start one collective of tensor parallelism, where `host_s_per_block` holds none."""
    default_attention: AttentionKind = "flash"
    """The attention kernel of runs that do not name one."""
    flash_generation: int | None = None
    """Generation of the FlashAttention kernels; None: what torch's sdpa takes on the GPU, else FlashAttention 2."""
    ring_attention: bool = False
    """Context parallelism passes keys and values around a ring beside the attention core, as Transformer Engine does;
    else it exchanges tokens for heads (Ulysses)."""
    causal_context: bool = False
    """Context parallelism is for attention to all tokens before alone."""
    gathers_keys: bool = False
    """Ranks of context parallelism beyond those that the heads divide over gather keys and values."""
    uses_tf32: bool = False
    """Matmuls of fp32 training run on TF32 tensor cores."""
    fused_softmax_heads: int = 1
    """Eager attention's fused softmax takes heads times sequences that are a multiple of it; others go through torch's
    operations one by one. 1 takes all."""
    writes_out_gelu: bool = True
    """GELUs are transformers' gelu_new where kernels are not fused."""
    writes_out_gates: bool = False
    """Gated activations are not fused where other kernels are, and keep the activated gate too."""
    complex_rotary_bytes: float = 0.0
    """Bytes that either pass under torch.compile moves for each element of queries and keys, beyond what one fused
    operation would, where complex numbers turn them: torch.compile makes no kernels of complex operations."""
    groups_in_sdpa: bool = False
    """Grouped keys and values are given to torch's sdpa as they are, which of its kernels FlashAttention alone and the
    one that writes out all scores take (`enable_gqa` in torch's documentation)."""
    recomputes_ops_by_default: bool = False
    """The framework's own configurations recompute single operations: it makes a plan no harder to run."""
    recomputed_ops: RecomputedOps | None = None
    """Who chooses the operations of `selective_ops`; None: it does not have it."""


class DataParallelProfile(_Group):
    """Data parallelism and ZeRO: what is gathered and reduced when, and what that moves and hides.

    Traffic is in bytes through a GPU's own memory, sizes of buckets are in parameters.
    """

    overlaps_gradients: bool = True
    """Gradient reduction overlaps with the backward pass."""
    overlaps_zero_1: bool = False
    """The distributed optimizer's reduce-scatter and all-gather overlap with compute."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """The ways that it has to shard over data-parallel ranks."""
    default_zero_stages: tuple[int, int] = (0, 0)
    """The ZeRO stage of its own configurations where nobody names one: without a pipeline, and beside one."""
    sharding: Sharding = Field(default_factory=lambda: implementations().sharding["replicas"])
    """Who gathers weights and reduces gradients (`profiles/implementations.json`)."""
    wraps_embedding_and_head: bool = False
    """Embedding and head are FSDP units of their own where they are as large as a block."""
    has_expert_parallel: bool = False
    """Experts may go over ranks of dp and cp, which exchange tokens (`ep` of a plan)."""
    accumulates_whole: bool = False
    """Gradients of all but the last micro-batch of a step stay whole on each rank, in fp32, in which FSDP2 reduces them
    after the last (`set_requires_gradient_sync(False)`; torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
    `to_accumulated_grad_if_needed`)."""
    fuses_accumulation: bool = False
    """The matmul that computes a weight gradient adds it to those of earlier micro-batches."""


class PipelineProfile(_Group):
    """Pipelines: schedules, sends and receive buffers."""

    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
    """The schedules that the framework has."""
    splits_sends: bool = False
    """Each tensor-parallel rank sends its share of a boundary (Narayanan et al. 2021, section 4.1)."""
    overlaps_sends: bool = False
    """An interleaved pipeline sends beside the next chunk's compute, once all its stages are filled."""
    allocates_every_receive: bool = False
    """A rank allocates the receive buffers of all micro-batches at the start."""
    cuts_by_running_cost: bool = False
    """A stage ends with the block that takes the running sum of the matmuls' parameters past its share, the head's
    counted too (`plan.stages.running_split`); else stages have as many blocks as each other."""


class TensorParallelProfile(_Group):
    """Tensor and sequence parallelism."""

    overlaps_backward: bool = False
    """Collectives of backward passes overlap with the gradients of weights."""
    keeps_gathered_inputs: bool = False
    """Under sequence parallelism matmuls keep their gathered inputs; Megatron-LM keeps a share of them and gathers it
    again (Korthikanti et al. 2022, section 4.2.2)."""
    commands_per_block: float = 0.0
    """Kernels, collectives and events that the host queues in a pass over a block, where tensors of asynchronous
    collectives are freed by torch's `record_stream`; 0 where nothing waits so."""
    has_sequence_parallel: bool = True
    """The framework can split norms along the tokens."""
    sequence_parallel_by_default: bool = False
    """Runs with tp that do not mention sequence parallelism use it."""
    vocabulary_multiple: int = 1
    """The vocabulary is padded to a multiple of this times tp."""
    shares_key_heads: bool = False
    """There may be more ranks than heads of keys and values, where one number divides the other: ranks gather what the
    projections give, and several attend to the same keys."""
    follows_library_plan: bool = False
    """Layers are divided as transformers' plan of the family says, some with whole tensors between their products
    (`profiles/tensor_plans.json`), and the gradient of an input is summed for each product that reads it."""


class LossProfile(_Group):
    """The loss on logits."""

    implementation: Loss = Field(default_factory=lambda: implementations().losses["torch"])
    """Who computes it (`profiles/implementations.json`)."""
    logit_bytes: float | None = None
    """Bytes for each logit at its peak under mixed precision; None: as the implementation has."""
    parallel_logit_bytes: float | None = None
    """Bytes for each logit that tensor parallelism divided, at its peak; None: as for those that it did not."""
    gathers_logits: bool = False
    """Logits that tensor parallelism divided are gathered, and each of its ranks computes the loss of all."""
    recomputes_chunks: bool = False
    """A loss in chunks keeps no logits: backward passes compute those of each chunk again."""

    @property
    def peak_logit_bytes(self) -> float:
        """Bytes for each logit at the loss's peak under mixed precision."""
        return self.implementation.logit_bytes if self.logit_bytes is None else self.logit_bytes


class Tool(Record):
    """A tool that trains by a framework, and what it has beside that."""

    title: str
    """The name in print."""
    loss: LossKernel | None = None
    """The kernel of its loss on given sequences, in place of the plain one."""
    causal_context: bool = False
    """Whether its context parallelism is for attention to all tokens before alone."""
    tiles_mlp: bool = False
    """Whether feed-forward layers may run over tiles of a sequence."""


class FrameworkProfile(Record):
    """One framework's choices, as a file of `profiles/frameworks` describes them."""

    name: str
    """The name of its file."""
    title: str
    """The name in print."""
    aliases: tuple[str, ...] = ()
    """Other names. An alias holds for a text that has all of its words; of several the longest."""
    tools: dict[str, Tool] = Field(default_factory=dict)
    """Tools that train by it, by the aliases that name them."""
    tool: str | None = None
    """The one of these that was asked for."""
    family: str | None = None
    """Frameworks whose predictions err alike; None where no other does."""
    export_target: str | None = None
    """The target of `paraplan export` that writes its configuration: plans for it are those that this can say."""
    alias_targets: tuple[str, ...] = ()
    """Aliases that are targets of `paraplan export` themselves: who asks for plans for them exports to them."""
    task_tools: str | None = None
    """Tools that train tasks beside sft by it, whose files paraplan does not write; None where there are none."""
    with_sequence_parallel: str | None = None
    """The profile of the framework's later releases: runs with sequence parallelism or selective recompute use them."""
    with_later_features: str | None = None
    """The profile of releases later still, for experts, context parallelism and GPUs that multiply in 8 bits."""
    storage: StorageProfile
    """Bytes for each parameter."""
    kernels: KernelProfile
    """Kernels of a block."""
    data_parallel: DataParallelProfile
    """Data parallelism and ZeRO."""
    pipeline: PipelineProfile
    """Pipelines."""
    tensor_parallel: TensorParallelProfile
    """Tensor and sequence parallelism."""
    loss: LossProfile
    """The loss on logits."""
    experts: ExpertsProfile = ExpertsProfile()
    """Mixtures of experts."""
    loading: LoadingProfile = LoadingProfile()
    """How ranks come to their weights."""
    fixed: FixedChoices = FixedChoices()
    """The options that it switches on whatever a training names."""
    levers: LeverProfile = LeverProfile()
    """Options that save memory."""

    def of_tool(self, alias: str) -> FrameworkProfile:
        """Return the profile as the tool has it that an alias names, itself where the alias names none."""
        tool = self.tools.get(alias)
        if tool is None:
            return self
        return self.replace(
            tool=tool.title,
            fixed=self.fixed.replace(loss=tool.loss or self.fixed.loss),
            kernels=self.kernels.replace(causal_context=tool.causal_context),
            levers=self.levers.replace(tiles_mlp=tool.tiles_mlp),
        )

    @property
    def told_as(self) -> str:
        """The tool that was asked for and what it trains by, or that alone."""
        return self.title if self.tool is None else f"{self.tool} ({self.title})"

    @property
    def is_own_runtime(self) -> bool:
        """True where paraplan's own runtime is modelled."""
        return self.name == OWN_RUNTIME

    @property
    def split_rules(self) -> SplitRules:
        """The dimensions that it may divide and others may not."""
        return SplitRules(
            any_context=self.kernels.ring_attention or self.kernels.gathers_keys,
            causal_context=self.kernels.causal_context,
            whole_experts=self.experts.over_tensor_ranks,
            shares_key_heads=self.tensor_parallel.shares_key_heads,
        )

    def changed(self, **groups: dict[str, Any]) -> FrameworkProfile:
        """Return the profile with some values of groups replaced: `changed(storage={"gradient_bytes": 4})`."""
        return self.replace(**{name: getattr(self, name).replace(**values) for name, values in groups.items()})

    def for_training(self, training: TrainingSpec, *, on_gpu: bool = True) -> FrameworkProfile:
        """Return the profile of a training: pure bf16 has no fp32 copies, AdamW's step is fused on a GPU."""
        storage: dict[str, Any] = {}
        if training.precision == "bf16" and self.storage.bf16_gradient_bytes is not None:
            storage["gradient_bytes"] = self.storage.bf16_gradient_bytes
        if training.optimizer in _STEPS and (on_gpu or training.optimizer != "adamw"):
            storage["optimizer_step"] = _STEPS[training.optimizer]
        if training.precision == "bf16-pure":
            storage |= _PURE_STORAGE
        return self.changed(storage=storage) if storage else self

    def input_copies(self, training: TrainingSpec) -> InputCopy:
        """Return what an adapter keeps of its input.

        peft casts it to the adapter's type (peft/tuners/lora/layer.py, `_cast_input_dtype`): to fp32, of which autocast
        makes a 16-bit copy. FSDP gathers adapters in the type of activations, and of 16-bit ones there is no copy.
        """
        if training.stack.fused_kernels not in (None, "liger"):
            return "fused"
        if self.storage.weight_bytes == _HALF:
            return "shared"
        if self.storage.is_autocast:
            return "activation"
        return "shared" if self.data_parallel.sharding.is_fsdp else "fp32"

    def compiled(self) -> FrameworkProfile:
        """Return the profile of blocks under torch.compile, which fuses what stands between matmuls."""
        kernels = self.kernels
        host_s = kernels.host_s_per_block * (MODULES_COMPILED_HOST if kernels.starts_modules else 1.0)
        host = {"host_s_per_block": host_s, "starts_modules": False}
        return self.changed(kernels={"fused": True, "traffic_per_saved_byte": COMPILED_TRAFFIC} | host)
