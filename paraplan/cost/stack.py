"""What settings of a framework's software (`StackSettings`) change of its profile."""

from __future__ import annotations

from functools import cache
from typing import Any

from paraplan.cost.framework import FUSED_TRAFFIC, FrameworkProfile
from paraplan.hardware.profile_json import read_object, validated
from paraplan.model.trainable import ALL_LINEAR
from paraplan.plan.stack import Dispatcher, Graphs, StackSettings
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record
from paraplan.resources import profiles_folder
from paraplan.units import KIB

DETERMINISTIC_WORKSPACE_BYTES = 8 * 4096 * KIB
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, which torch asks for where matmuls must repeat bit by bit."""
_FUSED_LOGIT_BYTES, _UNSLOTH_LOGIT_BYTES = 8.0, 4.0
"""Their cross-entropy makes gradients in the place of logits (unsloth/kernels/cross_entropy_loss.py). transformers'
code gives it fp32 logits and a copy without the last token, unsloth's own models 16-bit ones."""
_ENGINE_LOSS = {"logit_bytes": 2.0, "traffic_per_logit": 10.0, "multiprocessor_bytes_per_s": 20.3e9}
"""Megatron-LM's `--cross-entropy-fusion-impl te`: 16-bit logits are read twice, gradients written in their place and
scaled once more (transformer_engine/common/triton/cross_entropy.py); 3.3 ps a logit on a B200 (SimuMax, as the profile
of Megatron-Core)."""
_COMPILED_LOSS_BYTES_PER_S = 30e9
"""What a multiprocessor moves of a loss under torch.compile in a second at most: as measured on an H200
(profiles/measured, kernels-*.json)."""
_HF_LOSS = {"logit_bytes": 12.0, "in_model": True}
"""The loss of transformers' models, whoever shards them: that of the profile of its Trainer."""


def told_profile(framework: FrameworkProfile, training: TrainingSpec, *, on_gpu: bool) -> FrameworkProfile:
    """Return a framework's profile as the stack of a training tells it, for that training."""
    stack = training.stack
    told = framework.changed(
        storage=_storage(stack),
        kernels=_kernels(stack, training),
        data_parallel=_data_parallel(stack),
        loss=_loss(stack, framework),
        experts=_experts(stack, framework),
    )
    made = told.for_training(training, on_gpu=on_gpu)
    step: dict[str, Any] = _stated(optimizer_step=stack.optimizer_step)
    if stack.steps_in_backward:
        step = {"gradient_bytes": 0.0, "optimizer_step": "fused"}
    return made.changed(storage=step) if step else made


def _storage(stack: StackSettings) -> dict[str, Any]:
    changes: dict[str, Any] = _stated(context_bytes=stack.context_bytes)
    if stack.gradient_bytes is not None:
        changes |= {
            "gradient_bytes": stack.gradient_bytes,
            "bf16_gradient_bytes": None,
            "sharded_gradient_bytes": None,
        }
    return changes


def _kernels(stack: StackSettings, training: TrainingSpec) -> dict[str, Any]:
    changes: dict[str, Any] = _stated(
        dropout=stack.dropout,
        flash_generation=stack.flash_generation,
        recomputed_ops=stack.recomputed_ops,
        ring_attention=stack.ring_attention,
    )
    if stack.cuda_graphs:
        changes["host_s_per_block"] = stack_values().graphs[stack.cuda_graphs].host_s_per_block
    if stack.fused_kernels:
        adapter = training.trainable.adapter
        has_mlp = adapter is not None and not {"gate", "up", "down", ALL_LINEAR}.isdisjoint(adapter.targets)
        changes |= {"fused": True, "writes_out_gates": not (has_mlp or stack.fused_kernels == "all")}
        if adapter is None:  # fused operations with adapters move more than what they save tells
            changes["traffic_per_saved_byte"] = FUSED_TRAFFIC
    return changes


def _data_parallel(stack: StackSettings) -> dict[str, Any]:
    return _stated(
        overlaps_gradients=stack.overlaps_gradients,
        overlaps_zero_1=stack.overlaps_gradients,
        fuses_accumulation=stack.fuses_accumulation,
    )


def _loss(stack: StackSettings, framework: FrameworkProfile) -> dict[str, Any]:
    own, changes = framework.loss, dict[str, Any]()
    if stack.compiled_loss:
        changes = {
            "logit_bytes": own.compiled_logit_bytes,
            "parallel_logit_bytes": None,
            "traffic_per_logit": own.compiled_traffic_per_logit,
            "multiprocessor_bytes_per_s": _COMPILED_LOSS_BYTES_PER_S,
        }
    if stack.engine_loss:
        changes |= _ENGINE_LOSS
    if stack.model_loss:
        changes |= _HF_LOSS
    if stack.fused_kernels:
        is_own = stack.fused_kernels == "unsloth"
        changes["logit_bytes"] = _UNSLOTH_LOGIT_BYTES if is_own else _FUSED_LOGIT_BYTES
    return changes


def _experts(stack: StackSettings, framework: FrameworkProfile) -> dict[str, Any]:
    values, changes = stack_values(), dict[str, Any]()
    if stack.dispatcher:
        changes |= values.dispatchers[stack.dispatcher].model_dump()
    if stack.cuda_graphs:
        graphs = values.graphs[stack.cuda_graphs]
        changes |= _stated(host_s_per_layer=graphs.host_s_per_expert_layer, exchange_wait_s=graphs.exchange_wait_s)
        if graphs.fuses_experts:
            changes |= {"bias_bytes": (0.0, 0.0), "clamp_bytes": (0.0, 0.0), "product_start_s": 0.0}
    if stack.drops_tokens:
        changes["exchange_wait_s"] = 0.0
    if stack.overlaps_experts is not None:
        most = 1.0 if stack.cuda_graphs == "full" else framework.experts.hidden_share_of_overlap
        changes["hidden_share"] = most if stack.overlaps_experts else 0.0
    if stack.etp is not None:
        changes["over_tensor_ranks"] = stack.etp == 1
    return changes


def _stated(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class DispatcherValues(Record):
    """What a dispatcher sets of `ExpertsProfile`."""

    sends_tokens_once: bool
    row_moves: float
    padding_row_moves: float
    link_efficiency: dict[str, float]
    host_s_per_layer: float


class GraphValues(Record):
    """What CUDA graphs leave to the host."""

    host_s_per_block: float
    host_s_per_expert_layer: float | None = None
    """None: as the dispatcher has."""
    exchange_wait_s: float | None = None
    """None: as the framework has."""
    fuses_experts: bool = False
    """Products of experts, their activation and its quantization are one operation."""


class StackValues(Record):
    """What settings are worth, of `profiles/stack.json`."""

    dispatchers: dict[Dispatcher, DispatcherValues]
    dispatchers_source: str
    fp8_attention_speedup: float
    fp8_attention_source: str
    graphs: dict[Graphs, GraphValues]
    graphs_source: str


@cache
def stack_values() -> StackValues:
    """Return what settings are worth."""
    path = profiles_folder() / "stack.json"
    return validated(StackValues, read_object(path), where=str(path))
