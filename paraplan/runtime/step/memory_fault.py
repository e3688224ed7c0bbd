"""Out of memory, said in the parts of the estimate: what the rank held, and which part is more than was predicted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from paraplan.errors import ParaplanError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.torch_private import NO_HOST_MEMORY
from paraplan.units import format_bytes

_TOLERANCE = 1.1  # what counts as more than predicted: the estimate's own parts are good to some percent


class RankMemoryError(ParaplanError):
    """A rank for whose step the memory of its device is too small."""

    exit_status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised `error` because it could not allocate."""
    return isinstance(error, torch.OutOfMemoryError) or NO_HOST_MEMORY in str(error)


def held_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the local parts of `tensors`; None counts nothing."""
    locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in locals_)


def memory_error(
    error: BaseException,
    *,
    parameters: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    plan: ParallelPlan,
    file: PlanFile | None,
    rank: int,
    step: int,
    allocated_bytes: int | None,
) -> RankMemoryError:
    """Return what is said in place of `error`: parts that this rank holds against those of the plan's estimate.

    `allocated_bytes` is the peak of the device, None where it is unknown; what it holds beside the training state are
    activations and workspace.
    """
    held = list(parameters)
    found: dict[str, int | None] = {
        "parameters": held_bytes(held),
        "gradients": held_bytes(parameter.grad for parameter in held),
        "optimizer state": held_bytes(
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ),
    }
    found["activations and workspace"] = None
    if allocated_bytes is not None:
        found["activations and workspace"] = max(0, allocated_bytes - sum(size or 0 for size in found.values()))
    predicted = _predicted(file)
    words = [
        f"{name} {format_bytes(size)}" + (f" ({format_bytes(predicted[name])} predicted)" if name in predicted else "")
        for name, size in found.items()
        if size is not None
    ]
    exceeded = [
        name for name, size in found.items() if size is not None and size > _TOLERANCE * predicted.get(name, size)
    ]
    text = f"rank {rank} is out of memory in step {step}: it held {', '.join(words)}"
    if exceeded:
        text += f"; more than predicted: {' and '.join(exceeded)}"
    return RankMemoryError(f"{text}. {_first_line(error)}", hint=_way_out(plan, file))


def _predicted(file: PlanFile | None) -> dict[str, int]:
    parts = file.estimate.memory if file is not None and file.estimate is not None else None
    if parts is None:
        return {}
    return {
        "parameters": parts.parameter_bytes,
        "gradients": parts.gradient_bytes,
        "optimizer state": parts.optimizer_state_bytes,
        "activations and workspace": parts.activation_bytes + parts.workspace_bytes,
    }


def _way_out(plan: ParallelPlan, file: PlanFile | None) -> str:
    smaller = file.estimate.smaller_plan if file is not None and file.estimate is not None else None
    if smaller is not None:
        return f"a plan that needs less: {smaller}"
    ways = []
    if plan.micro_batch_size > 1:
        ways.append(f"micro_batch_size={plan.micro_batch_size // 2} with twice the micro-batches")
    if plan.recompute != "full":
        ways.append("recompute=full")
    if plan.dp > 1 and plan.zero_stage < (1 if plan.pp > 1 else 3):
        ways.append(f"zero_stage={1 if plan.pp > 1 else 3}")
    return " or ".join(ways) or "more ranks: paraplan recommend says how many"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
