"""What optimizers keep of every parameter, and what a step of theirs allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.model.spec import ModelSpec, Parameter
from paraplan.plan.training import OptimizerName

_FP32 = 4.0
# Two quantised states of a byte each, with an fp32 scale for every block of 256 (Dettmers et al. 2022, section 2.1).
_ADAM_8BIT = 2 * (1 + _FP32 / 256)
# torch's foreach steps allocate, for each parameter: AdamW the root of the second moment; Adafactor the squared
# gradient and the update; SGD nothing (torch.optim, `_multi_tensor_*`). 8-bit AdamW is one kernel.
_FOREACH_COPIES = {"adamw": 1, "adamw_8bit": 0, "adafactor": 2, "muon": 1, "sgd_momentum": 0, "sgd": 0}


@dataclass(frozen=True)
class OptimizerStates:
    """Bytes of optimizer state for each parameter of the embedding, of the blocks on average, and of the head.

    `step_copies` is how many fp32 copies of what it goes over at a time a step allocates.
    """

    embedding: float
    blocks: float
    head: float
    step_copies: int


def optimizer_states(model: ModelSpec, optimizer: OptimizerName, state_bytes: float = _FP32) -> OptimizerStates:
    """Return what `optimizer` keeps, each element in `state_bytes` unless it quantises.

    Adafactor keeps a row and a column of each matrix (Shazeer and Stern 2018, algorithm 4, without momentum); Muon one
    momentum for the matrices of the blocks, and AdamW's two for all else (Jordan et al. 2024, torch.optim.Muon).
    """
    scale = 1.0 if optimizer == "adamw_8bit" else state_bytes / _FP32
    blocks = [parameter for run in model.runs for parameter in run.block.parameters * run.count]
    return OptimizerStates(
        embedding=_bytes_each(model.embedding.parameters, optimizer, in_blocks=False) * scale,
        blocks=_bytes_each(blocks, optimizer, in_blocks=True) * scale,
        head=_bytes_each(model.head.parameters, optimizer, in_blocks=False) * scale,
        step_copies=_FOREACH_COPIES[optimizer],
    )


def _bytes_each(parameters: Sequence[Parameter], optimizer: OptimizerName, *, in_blocks: bool) -> float:
    total = sum(parameter.num_elements for parameter in parameters)
    if not total:
        return 0.0
    return sum(_state_bytes(parameter, optimizer, in_blocks=in_blocks) for parameter in parameters) / total


def _state_bytes(parameter: Parameter, optimizer: OptimizerName, *, in_blocks: bool) -> float:
    elements = parameter.num_elements
    is_matrix = len(parameter.shape) >= 2
    if optimizer == "adafactor":
        if not is_matrix:
            return _FP32 * elements
        return _FP32 * (elements / parameter.shape[-1] + elements / parameter.shape[-2])
    if optimizer == "muon":
        return (_FP32 if is_matrix and in_blocks else 2 * _FP32) * elements
    return {"adamw": 2 * _FP32, "adamw_8bit": _ADAM_8BIT, "sgd_momentum": _FP32, "sgd": 0.0}[optimizer] * elements
