"""State that optimizers keep of every parameter, and the memory that a step of theirs allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.model.spec import ModelSpec, Parameter
from paraplan.plan.training import OptimizerName

_FP32 = 4.0
# Two quantised states of a byte each, with an fp32 scale for every block of 256 (Dettmers et al. 2022, section 2.1).
# Parameters of fewer elements keep fp32 states (bitsandbytes, `min_8bit_size`).
_STATE_8BIT, _LEAST_8BIT_ELEMENTS = 1 + _FP32 / 256, 4096
# Half a byte, with an fp32 scale for every block of 128 (torchao/optim/subclass_4bit.py).
_STATE_4BIT = 0.5 + _FP32 / 128
# States of an element in bytes. Lion has one momentum (Chen et al. 2023). Paged states lie in memory that CUDA moves
# between GPU and host, which torch's allocator does not see (bitsandbytes/optim/optimizer.py, `get_paged`).
_STATES = {
    "adamw": 2 * _FP32,
    "adamw_foreach": 2 * _FP32,
    "paged_adamw": 0.0,
    "adamw_8bit": 2 * _STATE_8BIT,
    "paged_adamw_8bit": 0.0,
    "adamw_4bit": 2 * _STATE_4BIT,
    "lion": _FP32,
    "lion_8bit": _STATE_8BIT,
    "sgd_momentum": _FP32,
    "sgd": 0.0,
    # The weights that steps are taken on, and AdamW's second moment (Defazio et al. 2024, algorithm 1).
    "schedule_free_adamw": 2 * _FP32,
    "schedule_free_sgd": _FP32,
    "galore_adamw": 2 * _FP32,
}
_GALORE_RANK = 128  # galore_torch's and transformers' default
_QUANTIZED = {"adamw_8bit": 2 * _FP32, "adamw_4bit": 2 * _FP32, "lion_8bit": _FP32}
# bitsandbytes keeps states in fp32 whatever the type of the parameters.
_ALWAYS_FP32 = (*_QUANTIZED, "lion", "paged_adamw", "paged_adamw_8bit")
# What torch's foreach steps allocate, in fp32 copies of all parameters: AdamW the root of the second moment, Adafactor
# the update, SGD nothing (torch.optim, `_multi_tensor_*`; counted on live storages). 8-bit AdamW is one kernel.
_FOREACH_COPIES = {"adamw": 1.0, "adamw_foreach": 1.0, "adafactor": 1.0, "schedule_free_adamw": 1.0}
# The same of a step that goes over one parameter after the other, in copies of the largest: AdamW makes the root and
# its quotient, Adafactor the update, Muon the update, its 16-bit copy and products of the shorter side (the figure is
# that of a matrix four times as long as wide; torch.optim has no foreach Muon), GaLore the update and its square root.
_LOOP_COPIES = {"adamw": 2.0, "adamw_foreach": 2.0, "adamw_4bit": 3.0, "adafactor": 1.0, "muon": 2.25}
_LOOP_COPIES |= {"schedule_free_adamw": 1.0, "galore_adamw": 2.0}
_ONE_BY_ONE = ("muon", "galore_adamw")
# A loop still holds the last tensor of the parameter before.
_LEFT_OVER = {"adamw": 1.0, "adamw_foreach": 1.0, "adafactor": 1.0}


@dataclass(frozen=True)
class OptimizerStates:
    """Bytes of optimizer state for each trained parameter of the embedding, of the blocks on average, and of the head.

    `foreach_copies` is how many fp32 copies of all parameters a foreach step allocates, `loop_copies` how many of the
    largest a loop does, and `left_over` how many of another it still holds. None where an optimizer has no such step.
    """

    embedding: float
    blocks: float
    head: float
    foreach_copies: float | None
    loop_copies: float
    left_over: float


def optimizer_states(model: ModelSpec, optimizer: OptimizerName, state_bytes: float = _FP32) -> OptimizerStates:
    """Return what `optimizer` keeps, each element in `state_bytes` unless it quantises.

    Adafactor keeps a row and a column of each matrix (Shazeer and Stern 2018, algorithm 4, without momentum); Muon one
    momentum for the matrices of the blocks, and AdamW's two for all else (Jordan et al. 2024, torch.optim.Muon). GaLore
    keeps AdamW's two of the blocks' matrices at rank 128 along their shorter side, and a projection (Zhao et al. 2024).
    """
    scale = 1.0 if optimizer in _ALWAYS_FP32 else state_bytes / _FP32
    blocks = [(parameter, run.count) for run in model.runs for parameter in run.block.parameters if parameter.trains]
    embedding, head = (
        [(parameter, 1) for parameter in end.parameters if parameter.trains] for end in (model.embedding, model.head)
    )
    return OptimizerStates(
        embedding=_bytes_each(embedding, optimizer, in_blocks=False) * scale,
        blocks=_bytes_each(blocks, optimizer, in_blocks=True) * scale,
        head=_bytes_each(head, optimizer, in_blocks=False) * scale,
        foreach_copies=None if optimizer in _ONE_BY_ONE else _FOREACH_COPIES.get(optimizer, 0.0),
        loop_copies=_LOOP_COPIES.get(optimizer, 0.0),
        left_over=_LEFT_OVER.get(optimizer, 0.0),
    )


def _bytes_each(parameters: Sequence[tuple[Parameter, int]], optimizer: OptimizerName, *, in_blocks: bool) -> float:
    """Return the mean over the elements of parameters, each with how often it is there."""
    total = sum(parameter.num_elements * count for parameter, count in parameters)
    if not total:
        return 0.0
    each = (_state_bytes(parameter, optimizer, in_blocks=in_blocks) * count for parameter, count in parameters)
    return sum(each) / total


def _state_bytes(parameter: Parameter, optimizer: OptimizerName, *, in_blocks: bool) -> float:
    elements = parameter.num_elements
    is_matrix = len(parameter.shape) >= 2
    if optimizer == "adafactor":
        if not is_matrix:
            return _FP32 * elements
        return _FP32 * (elements / parameter.shape[-1] + elements / parameter.shape[-2])
    if optimizer == "muon":
        return (_FP32 if is_matrix and in_blocks else 2 * _FP32) * elements
    if optimizer == "galore_adamw" and in_blocks and len(parameter.shape) == 2:
        shorter, longer = sorted(parameter.shape)
        rank = min(_GALORE_RANK, shorter)
        return _FP32 * rank * (2 * longer + shorter)
    if optimizer in _QUANTIZED and elements < _LEAST_8BIT_ELEMENTS:
        return _QUANTIZED[optimizer] * elements
    return _STATES[optimizer] * elements
