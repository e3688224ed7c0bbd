"""`Workload`: what plans are priced for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paraplan.arguments import checked
from paraplan.cost.constants import CostConstants
from paraplan.cost.framework import OWN_RUNTIME, FrameworkProfile, KernelProfile
from paraplan.cost.framework_files import load_framework
from paraplan.cost.plan_table import RECOMPUTES, Floats, Ints, Mask, PlanTable, RecomputeCode
from paraplan.cost.stack import DETERMINISTIC_WORKSPACE_BYTES, told_profile
from paraplan.errors import PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import LinkSpeedTable, load_link_speeds
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.attention import LARGEST_FLASH_HEAD
from paraplan.model.dense_experts import as_routed
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.output_layer import with_one_output, without_output
from paraplan.model.quantizers import quantizer_of, reached_weights
from paraplan.model.reader import read_model
from paraplan.model.spec import BlockSpec, ModelSpec
from paraplan.model.tensor_split import as_planned
from paraplan.model.towers import with_media
from paraplan.plan.parallel import Recompute
from paraplan.plan.training import TrainingSpec

if TYPE_CHECKING:  # what runs were off by, which most workloads do without
    from paraplan.cost.correction import RunCorrection


_PURE_SHARE = 0.5
"""Parameters, gradients and states of 2 bytes for 4: what an optimizer moves where all training is in bf16."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its training, the machines with what their links reach, the framework, and the constants."""

    model: ModelSpec
    training: TrainingSpec
    cluster: Cluster
    links: LinkSpeedTable
    framework: FrameworkProfile
    constants: CostConstants = field(default_factory=CostConstants)
    whole_model: ModelSpec | None = None
    """The model as it was before a part of it was frozen, None where that is `model`."""
    plain_framework: FrameworkProfile | None = None
    """The framework as its file describes it, None where that is `framework`."""
    correction: RunCorrection | None = None
    """The factors of step times, plan by plan, for the errors of measured runs."""
    memory_correction: RunCorrection | None = None
    """The factors of peaks."""
    num_corrected_by: int = 0
    """The user's own runs behind both; 0 for a calibration."""

    @classmethod
    @checked
    def of(
        cls,
        model: ModelSpec,
        training: TrainingSpec,
        cluster: Cluster,
        links: LinkSpeedTable | None = None,
        *,
        framework: str | FrameworkProfile = OWN_RUNTIME,
    ) -> Self:
        """Return the workload of a framework, paraplan's own runtime by default, with the machine's constants.

        Where the machine was calibrated, what was measured comes before data sheets. `links` are the speeds of links,
        by default those that come with paraplan.
        """
        constants = CostConstants()
        if cluster.gpu.vendor == "cpu":
            constants = constants.for_cpu()
        if training.stack.deterministic:
            constants = constants.replace(cublas_workspace_bytes=DETERMINISTIC_WORKSPACE_BYTES)
        profile = load_framework(framework) if isinstance(framework, str) else framework
        found = load_link_speeds() if links is None else links
        constants = calibrated_constants(constants, cluster.gpu)
        return cls(model, training, cluster, found, profile, constants).trained_as(training)

    def trained_as(self, training: TrainingSpec) -> Self:
        """Return the workload of another training: what that freezes and adds, and what it stores.

        Raises `PlanError` for adapters that the model has no layers for.
        """
        model, framework = self.whole_model or self.model, self.plain_framework or self.framework
        training = framework.fixed.applied_to(training)
        profile = told_profile(framework, training, on_gpu=self.cluster.gpu.vendor != "cpu")
        constants = self.constants
        if training.linear_precision != "16bit":
            constants = constants.replace(block_matmul_speedup=narrow_speedup(self.cluster.gpu, training))
            usual = profile.kernels.fp8_recipe if training.linear_precision == "fp8" else None
            constants = constants.with_fp8_recipe(training.fp8_recipe or usual, compiled=training.compiled)
        elif self.training.linear_precision != "16bit":
            constants = constants.replace(block_matmul_speedup=1.0).with_fp8_recipe(None, compiled=False)
        quantizer = training.quantizer or profile.storage.quantizer
        storage = FrozenStorage(
            weights=training.frozen_weights,
            others_in_fp32=training.upcasts_frozen,
            input_copies=profile.input_copies(training),
            keeps_quantized_inputs=training.stack.keeps_quantized_inputs,
            reached=reached_weights(training.frozen_weights, quantizer, model.model_type),
            keeps_copies=quantizer_of(quantizer).keeps_copies,
        )
        trainable = training.trainable
        scored = with_media(model, training.media_tokens, training.seq_length)
        if not profile.experts.runs_library_code:
            scored = as_routed(scored)
        if profile.tensor_parallel.follows_library_plan:
            scored = as_planned(scored)
        if training.learns_from.output == "hidden":
            scored = without_output(scored)
        if training.learns_from.output == "score":
            scored = with_one_output(scored)
            trainable = trainable if trainable.is_full else trainable.replace(head=True)
        return replace(
            self,
            model=freeze(scored, trainable, storage),
            training=training,
            framework=profile,
            constants=constants,
            whole_model=model,
            plain_framework=framework,
        )

    def replace(self, **changes: Any) -> Self:
        """Return the workload with another `model`, `cluster` or `framework`, or with other fields of its training.

        So `job.replace(seq_length=8192, optimizer="lion")`. What layers with a sliding window keep depends on the
        length: such a model is read again. Raises `WrongFieldError` for a field that there is not.
        """
        model = changes.pop("model", self.whole_model or self.model)
        places = {name: changes.pop(name) for name in ("cluster", "framework") if name in changes}
        training = changes.pop("training", self.training).replace(**changes)
        if training.seq_length != self.training.seq_length and model.has_windows:
            model = read_model(model.source, seq_length=training.seq_length)
        if not places:  # a calibration and the user's own runs stay
            return replace(self, model=model, whole_model=model).trained_as(training)
        framework = places.get("framework", self.plain_framework or self.framework)
        return self.of(model, training, places.get("cluster", self.cluster), self.links, framework=framework)

    def __repr__(self) -> str:
        training, model = self.training, self.whole_model or self.model
        batch = f"{training.global_batch_size} sequences of {training.seq_length} tokens"
        return f"<Workload {model.name}, {batch}, {self.cluster}, {self.framework.title}>"

    def padded_vocabulary(self, tp: Ints) -> Ints:
        """Return the rows of the embedding and the head under some degrees of tensor parallelism."""
        unit = self.framework.tensor_parallel.vocabulary_multiple * tp
        size = self.model.vocab_size or 0
        pads = (
            self.training.stack.pads_vocabulary and self.framework.tensor_parallel.vocabulary_multiple > 1 and size > 1
        )
        return -(-size // unit) * unit if pads else np.full_like(unit, size)

    def key_heads(self, tp: Ints) -> Ints:
        """Return the least heads of keys that ranks have together under some degrees, 1 where these divide the model's.

        Where the framework lets several ranks attend to the same keys, each has a copy of one head.
        """
        if not self.framework.tensor_parallel.shares_key_heads:
            return np.ones_like(tp)
        own = [run.block.attention.num_kv_heads for run in self.model.runs if run.block.attention is not None]
        return np.where(tp > min(own, default=np.inf), tp, 1)

    def logits_per_token(self, tp: Ints) -> Ints:
        """Return the outputs of the head for a token over all ranks, under some degrees of tensor parallelism."""
        outputs = self.model.vocabulary
        return self.padded_vocabulary(tp) if outputs == self.model.vocab_size else np.full_like(tp, outputs)

    def compiles(self, recompute: Ints) -> Mask:
        """Return under which kinds of recompute torch.compile compiles the blocks."""
        everything = self.framework.kernels.compiles_checkpointed
        return np.asarray(self.training.compiled & (everything | (recompute != RecomputeCode.FULL)))

    def uncompiled(self) -> Self:
        """Return the workload without torch.compile."""
        return self.trained_as(self.training.replace(compiled=False))

    def casts_shards(self, is_sharded: Mask) -> Mask:
        """Return which plans run without autocast, as their shards are cast where they are gathered."""
        storage = self.framework.storage
        return np.asarray(is_sharded & (storage.is_autocast and not storage.autocasts_shards))

    def without_autocast(self) -> Self:
        """Return the workload of ranks that cast weights where they gather them, and run nothing under autocast."""
        plain = (self.plain_framework or self.framework).changed(storage={"is_autocast": False})
        return replace(self, plain_framework=plain).trained_as(self.training)

    @cached_property
    def writes_out_scores(self) -> bool:
        """Whether torch's sdpa has no fused kernel for this model, as for grouped queries without FlashAttention.

        That takes 16 bits, compute capability 8.0 and heads of at most 256 features. Layers whose window is shorter
        than the sequences give a mask, for which transformers repeats the heads. Attention over compressed keys is
        eager in transformers whatever a script asks for.
        """
        training, gpu = self.training, self.cluster.gpu
        if training.attention != "sdpa" or not self.framework.kernels.groups_in_sdpa or gpu.vendor == "cpu":
            return False
        has_flash = training.precision != "fp32" and gpu.shared.runs_flash
        second = (one for run in self.model.runs if (one := run.block.cross_attention) is not None)
        return any(one.tokens_per_key > 1 for one in second) or any(
            (not has_flash or core.qk_head_dim > LARGEST_FLASH_HEAD) and core.window is None
            for core in (run.block.attention for run in self.model.runs if _gives_groups(run.block))
            if core is not None
        )

    @cached_property
    def kernel_training(self) -> TrainingSpec:
        """The training as kernels of blocks run it."""
        return self.training.replace(attention="eager") if self.writes_out_scores else self.training

    @cached_property
    def block_kernels(self) -> KernelProfile:
        """The framework's kernels of blocks, under torch.compile where the training compiles them."""
        return (self.framework.compiled() if self.training.compiled else self.framework).kernels

    @property
    def keeps_fp32_weights(self) -> bool:
        """Whether all weights are in fp32 under autocast: not where some are frozen in fewer bits."""
        parameters = (parameter for parameter, _ in self.model.all_parameters)
        is_narrow = any(one.frozen_bytes is not None and one.frozen_bytes < 4 * one.num_elements for one in parameters)
        return self.training.precision != "bf16-pure" and not is_narrow

    @cached_property
    def has_equal_links(self) -> bool:
        """Whether there is one node whose GPUs all reach each other alike: groups of one size are equal then."""
        node = self.cluster.node
        links = {(link.link_type, link.nvlink_count, link.bandwidth_bytes_per_s) for link in node.links}
        pairs = self.cluster.gpus_per_node * (self.cluster.gpus_per_node - 1) // 2
        is_one = self.cluster.num_nodes == 1 and not node.peer_access
        return is_one and len(links) <= 1 and len(node.links) in (0, pairs)

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The kinds of recompute worth a comparison: those that the framework has and that differ.

        An attention core that keeps no scores has nothing to drop but a number for each head and token. Megatron-Core's
        modules that drop their outputs are those of experts.
        """
        if self.framework.fixed.recompute is not None:
            return (self.framework.fixed.recompute,)
        dropped: set[Recompute] = set() if self.kernel_training.attention == "eager" else {"selective"}
        kernels = self.framework.kernels
        if kernels.recomputed_ops is None or (kernels.recomputed_ops != "torch" and self.model.num_experts == 1):
            dropped.add("selective_ops")
        return tuple(name for name in RECOMPUTES if name not in dropped)

    @property
    def usable_memory_bytes(self) -> int:
        """The memory for training on the smallest GPU, with one communicator of all; `usable_bytes` is of a plan."""
        return int(self._usable_beside(self._of_group(np.array(self.cluster.num_gpus))))

    def communicators_bytes(self, columns: Mapping[str, Ints]) -> Ints:
        """Return what NCCL keeps in the GPU's memory under each plan, by the communicators that it has.

        Each axis in use has one, the ranks of one replica where tp and pp make it, for the norm of gradients, and all
        ranks where several axes are in use, for barriers (Megatron-LM's parallel_state.py and clip_grads.py, nanotron's
        context.py and trainer.py). `columns` are dp, tp, pp, cp and ep.
        """
        shards = columns["dp"] * columns["cp"]
        replica = columns["tp"] * columns["pp"]
        has_both = (columns["tp"] > 1) & (columns["pp"] > 1)
        is_mixed = (shards > 1) & (replica > 1) | has_both
        groups = [shards, *(columns[name] for name in ("tp", "pp", "cp", "ep"))]
        groups += [np.where(has_both, replica, 1), np.where(is_mixed, shards * replica, 1)]
        return np.asarray(sum(self._of_group(size) for size in groups))

    def usable_bytes(self, columns: Mapping[str, Ints]) -> Floats:
        """Return what training may allocate on the smallest GPU under each plan, by the same columns."""
        return self._usable_beside(self.communicators_bytes(columns))

    def _usable_beside(self, communicators_bytes: Ints) -> Floats:
        """Return what training may allocate, a byte at least, of which a plan's peak is a share.

        What torch's allocator does not see comes off, the CUDA context and NCCL's communicators, and the allocator
        reserves more than is allocated (SimuMax: reserved = allocated / 0.94). `memory_margin` of the rest is kept
        free.
        """
        constants = self.constants
        available = self.cluster.gpu_memory_bytes - constants.context_bytes - communicators_bytes
        usable = np.floor(available * constants.allocated_per_reserved * (1 - constants.memory_margin))
        return np.asarray(np.maximum(usable, 1.0))

    def _of_group(self, size: Ints) -> Ints:
        pair, many = self.constants.pair_communicator_bytes, self.constants.communicator_bytes
        return np.asarray(np.where(size > 2, many, np.where(size == 2, pair, 0)))

    def optimizer_traffic(self, how: str) -> float:
        """Return the bytes that an optimizer step that goes `how` over parameters moves for each of them."""
        traffic = self.constants.optimizer_traffic(how, self.training.optimizer)
        return traffic * (_PURE_SHARE if self.training.precision == "bf16-pure" else 1.0)

    @property
    def memory_bandwidth_bytes_per_s(self) -> float:
        """Return the rate of the GPU's memory that kernels reach which do nothing but move bytes."""
        return self.cluster.gpu.memory_bandwidth_bytes_per_s * self.constants.memory_bandwidth_efficiency

    @cached_property
    def run_kind(self) -> str:
        """The GPU, framework and calibration that runs share where the errors of one say something of another."""
        gpu, framework = self.cluster.gpu, self.framework
        calibrated = "" if gpu.calibration is None else f", {gpu.calibration.source}"
        return f"{gpu.name}, {framework.family or framework.name}{calibrated}"

    def run_sizes(self, table: PlanTable) -> Floats:
        """Return by what plans for this workload are alike or not to plans for it and others (`RunCorrection`)."""
        from paraplan.cost.correction import sizes_of

        training = self.training
        return sizes_of(
            table,
            hidden_size=self.model.hidden_size,
            seq_length=training.seq_length,
            is_fp32=training.precision == "fp32",
            matmul_speedup=self.constants.block_matmul_speedup,
            is_compiled=training.compiled,
            is_frozen=not training.trainable.is_full,
        )

    def time_factors(self, table: PlanTable) -> Floats:
        """Return what the step time of each plan is multiplied by: 1 without runs that say what it is off by."""
        return self._factors(self.correction, table)

    def memory_factors(self, table: PlanTable) -> Floats:
        """Return what the peak of each plan is multiplied by: 1 without runs that say what it is off by."""
        return self._factors(self.memory_correction, table)

    def _factors(self, correction: RunCorrection | None, table: PlanTable) -> Floats:
        if correction is None:
            return np.ones(len(table))
        return correction.factors(self.run_sizes(table), self.run_kind)

    @property
    def is_mixed_precision(self) -> bool:
        """True for training in 16 bits with fp32 master weights."""
        return self.training.precision != "fp32"

    def gradient_bytes(self, zero_stage: Ints | int) -> Floats:
        """Return the bytes of a gradient between micro-batches, and on the wire, by ZeRO stage."""
        storage = self.framework.storage
        whole = storage.gradient_bytes if self.is_mixed_precision else 4.0
        sharded = storage.sharded_gradient_bytes if self.is_mixed_precision else None
        return np.where(np.asarray(zero_stage) >= 2, whole if sharded is None else sharded, whole)


def narrow_speedup(gpu: GpuProfile, training: TrainingSpec) -> float:
    """Return how many times as fast as in 16 bits linear layers multiply; 4 bits are taken for 8.

    Raises `PlanError` for a GPU without such products.
    """
    known = gpu.shared.narrow_precisions
    if training.linear_precision not in known:
        raise PlanError(
            f"{gpu.title} has no matrix products in {training.linear_precision}",
            hint=f"use --precision {' or '.join(['bf16', *known])} in its place",
        )
    return gpu.fp8_speedup


def calibrated_constants(constants: CostConstants, gpu: GpuProfile) -> CostConstants:
    """Return `constants` with those replaced that `paraplan calibrate` measured; all of them where it did not.

    What matmuls and attention reach is read from the calibration itself (`KernelTimes`).
    """
    measured = gpu.calibration
    if measured is None:
        return constants
    changes: dict[str, float] = {}
    moved = measured.moved_bytes_per_s
    if moved is not None:
        changes["memory_bandwidth_efficiency"] = moved / gpu.memory_bandwidth_bytes_per_s
    if measured.optimizer_s_per_parameter is not None:
        # The step is priced as traffic at that bandwidth, so it counts as the traffic that takes as long.
        moved = moved or gpu.memory_bandwidth_bytes_per_s * constants.memory_bandwidth_efficiency
        changes["unfused_optimizer_bytes"] = measured.optimizer_s_per_parameter * moved
    if measured.overlap_slowdown is not None:
        changes["overlap_slowdown"] = measured.overlap_slowdown
    return constants.replace(**changes)


def _gives_groups(block: BlockSpec) -> bool:
    """Whether a block gives torch's sdpa fewer heads of keys than of queries: some repeat them before."""
    core = block.attention
    if core is None:
        return False
    keys = [one.elements_per_token for one in block.saved if one.role == "key" and "sdpa" in (one.kernels or ())]
    return core.num_kv_heads < core.num_heads and max(keys, default=0.0) < core.num_heads * core.qk_head_dim
