"""Settings of a framework's software (`StackSettings`), and the changes that they make to its profile."""

from __future__ import annotations

from functools import cache
from typing import Any

from paraplan.cost.framework import FUSED_TRAFFIC, FrameworkProfile
from paraplan.cost.implementations import implementations
from paraplan.hardware.profile_json import read_object, validated
from paraplan.model.trainable import ALL_LINEAR
from paraplan.plan.stack import Graphs, StackSettings
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record
from paraplan.resources import profiles_folder
from paraplan.units import KIB

DETERMINISTIC_WORKSPACE_BYTES = 8 * 4096 * KIB
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, which torch asks for where matmuls must repeat bit by bit."""
_FUSED_LOGIT_BYTES, _UNSLOTH_LOGIT_BYTES = 8.0, 4.0
"""Their cross-entropy makes gradients in the place of logits (unsloth/kernels/cross_entropy_loss.py). transformers'
code gives it fp32 logits and a copy without the last token, unsloth's own models 16-bit ones."""
HIDDEN_SHARE_OF_OVERLAP = 0.62
"""Share of the exchanges of experts that runs beside compute of another micro-batch where they overlap and no graph
holds the iteration: Qwen3-30B-A3B on 16 H100, steps with and without it, 24.71 and 20.99 s with HybridEP, 41.25 and
31.31 s with all-to-all, for which 0.69 and 0.55 of the exchanges as predicted have to hide
(NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap/SKILL.md); the same page counts 37 % of the time
of its communication kernels, which wait for each other, as hidden."""


def told_profile(framework: FrameworkProfile, training: TrainingSpec, *, on_gpu: bool) -> FrameworkProfile:
    """Return a framework's profile as the stack of a training tells it, for that training."""
    stack = training.stack
    told = framework.changed(
        storage=_storage(stack),
        kernels=_kernels(stack, training),
        data_parallel=_data_parallel(stack),
        loss=_loss(training, framework),
        experts=_experts(stack, framework),
    )
    made = told.for_training(training, on_gpu=on_gpu)
    step: dict[str, Any] = _stated(optimizer_step=stack.optimizer_step)
    if stack.steps_in_backward:
        step = {"gradient_bytes": 0.0, "optimizer_step": "fused"}
    return made.changed(storage=step) if step else made


def _storage(stack: StackSettings) -> dict[str, Any]:
    changes: dict[str, Any] = _stated(context_bytes=stack.context_bytes)
    if stack.expandable_segments is not None:
        changes["expandable_segments"] = "yes" if stack.expandable_segments else "no"
    if stack.gradient_bytes is not None:
        changes |= {
            "gradient_bytes": stack.gradient_bytes,
            "bf16_gradient_bytes": None,
            "sharded_gradient_bytes": None,
        }
    return changes


def _kernels(stack: StackSettings, training: TrainingSpec) -> dict[str, Any]:
    changes: dict[str, Any] = _stated(
        flash_generation=stack.flash_generation,
        recomputed_ops=stack.recomputed_ops,
        ring_attention=stack.ring_attention,
    )
    if stack.cuda_graphs:
        changes["host_s_per_block"] = stack_values().graphs[stack.cuda_graphs].host_s_per_block
    if stack.fused_kernels:
        adapter = training.trainable.adapter
        has_mlp = adapter is not None and not {"gate", "up", "down", ALL_LINEAR}.isdisjoint(adapter.targets)
        changes |= {"fused": True, "writes_out_gates": not (has_mlp or stack.fused_kernels in ("liger", "all"))}
        if adapter is None or stack.fused_kernels == "liger":  # fused operations with adapters move more than they save
            changes["traffic_per_saved_byte"] = FUSED_TRAFFIC
    return changes


def _data_parallel(stack: StackSettings) -> dict[str, Any]:
    return _stated(
        overlaps_gradients=stack.overlaps_gradients,
        overlaps_zero_1=stack.overlaps_gradients,
        fuses_accumulation=stack.fuses_accumulation,
    )


def _loss(training: TrainingSpec, framework: FrameworkProfile) -> dict[str, Any]:
    stack = training.stack
    losses, own = implementations().losses, framework.loss.implementation
    chosen = losses[own.compiled] if stack.compiled_loss and own.compiled else own
    if stack.engine_loss:
        chosen = losses["transformer_engine"]
    if stack.model_loss:  # of transformers' models, whoever shards them
        chosen = losses["transformers"]
    if training.loss == "cut":
        chosen = losses[chosen.without_logits]
    changes: dict[str, Any] = {}
    if chosen is not own:
        changes = {"implementation": chosen, "logit_bytes": None}
    if stack.compiled_loss:
        changes["parallel_logit_bytes"] = None
    if stack.fused_kernels and stack.fused_kernels != "liger":
        is_own = stack.fused_kernels == "unsloth"
        changes["logit_bytes"] = _UNSLOTH_LOGIT_BYTES if is_own else _FUSED_LOGIT_BYTES
    return changes


def _experts(stack: StackSettings, framework: FrameworkProfile) -> dict[str, Any]:
    dispatcher, changes = framework.experts.dispatcher, dict[str, Any]()
    if stack.dispatcher:
        dispatcher = implementations().dispatchers[stack.dispatcher]
    if stack.cuda_graphs:
        graphs = stack_values().graphs[stack.cuda_graphs]
        changes |= _stated(exchange_wait_s=graphs.exchange_wait_s)
        dispatcher = dispatcher.replace(**_stated(host_s_per_layer=graphs.host_s_per_expert_layer))
    if stack.drops_tokens:
        changes["exchange_wait_s"] = 0.0
    if stack.etp is not None:
        changes["over_tensor_ranks"] = stack.etp == 1
    return changes | {"dispatcher": dispatcher}


def fuses_experts(stack: StackSettings) -> bool:
    """Return whether products of experts, their activation and its quantization are one operation."""
    return stack.cuda_graphs is not None and stack_values().graphs[stack.cuda_graphs].fuses_experts


def hidden_share(stack: StackSettings) -> float:
    """Return the share of exchanges of experts that runs beside compute of another micro-batch.

    Compute hides it as far as it lasts, and is slowed down by it.
    """
    if not stack.overlaps_experts:
        return 0.0
    return 1.0 if stack.cuda_graphs == "full" else HIDDEN_SHARE_OF_OVERLAP


def _stated(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class GraphValues(Record):
    """The work that CUDA graphs leave to the host."""

    host_s_per_block: float
    host_s_per_expert_layer: float | None = None
    """None: as the dispatcher has."""
    exchange_wait_s: float | None = None
    """None: as the framework has."""
    fuses_experts: bool = False
    """Products of experts, their activation and its quantization are one operation."""


class StackValues(Record):
    """Values of settings, of `profiles/stack.json`."""

    fp8_attention_speedup: float
    fp8_attention_source: str
    graphs: dict[Graphs, GraphValues]
    graphs_source: str


@cache
def stack_values() -> StackValues:
    """Return what settings are worth."""
    path = profiles_folder() / "stack.json"
    return validated(StackValues, read_object(path), where=str(path))
