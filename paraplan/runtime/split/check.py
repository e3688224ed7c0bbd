"""A block split over `tp` against the same block whole, with numbers: output and every gradient."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.anatomy import BlockCall
from paraplan.runtime.split.cut import Cut
from paraplan.runtime.split.group import TensorGroup
from paraplan.runtime.split.outputs import numbered_outputs
from paraplan.runtime.split.split_tensor import SplitError

_TOLERANCE = 1e-4  # fp32 sums in another order differ by some 1e-6 of the largest element


def check_split(
    whole: nn.Module, part: nn.Module, cuts: dict[str, Cut], call: BlockCall, *, group: TensorGroup, name: str
) -> None:
    """Raise `UnsupportedPlanError` on every rank where `part` does not compute what `whole` does.

    Both are in fp32 on this rank's device; `part` holds this rank's share of the parameters in `cuts`. They run on
    random numbers in the shapes of `call`, the same on every rank; only gradients that training needs are compared.
    """
    expected, mask = _expected(whole, call)
    try:
        found = _gradients(part, call, mask=mask)
    except (SplitError, RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedPlanError(
            f"the split of {name} over tp={group.size} does not run: {reason}", hint="use tp=1 for this model"
        ) from error
    errors = _errors(expected, found, cuts, group)
    where = max(errors, key=lambda key: errors[key])
    if errors[where] > _TOLERANCE:
        raise UnsupportedPlanError(
            f"{name} split over tp={group.size} does not compute what it computes whole: relative error "
            f"{errors[where]:.1e} in {where or 'its output'}",
            hint="use tp=1 for this model",
        )


def summed_gradients(
    whole: nn.Module, part: nn.Module, cuts: dict[str, Cut], call: BlockCall, *, group: TensorGroup
) -> tuple[str, ...] | None:
    """Return the whole parameters of `part` whose gradients are right once they are summed over the ranks.

    None where that is not all that is missing, or where the code does not run on plain parts. `part` is split without
    `SplitTensor`s; the rest is as for `check_split`.
    """
    expected, mask = _expected(whole, call)
    try:
        with _NoEmptyAttention():
            found = _gradients(part, call, mask=mask)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None  # sizes that the code names do not fit the parts
    errors = _errors(expected, found, cuts, group)
    unequal = [key for key, error in errors.items() if error > _TOLERANCE]
    parameters = dict(part.named_parameters()).keys() - cuts.keys()
    if any(key not in parameters or key not in found for key in unequal):
        return None
    sums = {key: group.sum(found[key]) for key in unequal}
    errors = _errors({key: expected[key] for key in unequal}, sums, {}, group)
    return tuple(unequal) if all(error <= _TOLERANCE for error in errors.values()) else None


class _NoEmptyAttention(TorchFunctionMode):
    """Refuses attention without heads: torch 2.11 divides by their number, and the process ends by SIGFPE."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        if func is F.scaled_dot_product_attention and any(
            isinstance(value, torch.Tensor) and not value.numel() for value in given
        ):
            raise ValueError("attention without heads")
        return func(*args, **(kwargs or {}))


def _expected(whole: nn.Module, call: BlockCall) -> tuple[dict[str, torch.Tensor], bool]:
    """Return what the whole block computes, and what its masks are filled with: some leave out what is True."""
    try:
        expected = _gradients(whole, call, mask=True)
        if expected[""].isfinite().all():
            return expected, True
        return _gradients(whole, call, mask=False), False
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedPlanError(
            f"a split of {type(whole).__name__} cannot be checked, which does not run by itself: "
            f"{str(error).splitlines()[0]}",
            hint="use tp=1 for this model",
        ) from error


def _errors(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], cuts: dict[str, Cut], group: TensorGroup
) -> dict[str, float]:
    """Return the largest relative error of each tensor over all ranks, infinite where one is missing."""
    if not expected:
        return {}
    scale = max((float(value.abs().max()) for key, value in expected.items() if key), default=0.0)
    errors = []
    for key, value in expected.items():
        reference = max(float(value.abs().max()), 1e-3 * scale, 1e-30)
        mine = cuts[key].part(value, group.index) if key in cuts else value
        fits = key in found and found[key].shape == mine.shape
        error = float((found[key] - mine).abs().max()) / reference if fits else math.inf
        errors.append(math.inf if math.isnan(error) else error)
    agreed = torch.tensor(errors, device=next(iter(expected.values())).device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group.handle)
    return dict(zip(expected, agreed.tolist(), strict=True))


def _gradients(block: nn.Module, call: BlockCall, *, mask: bool) -> dict[str, torch.Tensor]:
    """Return the outputs of `block` that other code reads (the first named ""), and every gradient."""
    block.zero_grad()
    generator = torch.Generator().manual_seed(0)
    inputs: list[torch.Tensor] = []
    device = next(block.parameters()).device
    graded = iter(call.graded)

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wants_gradient = next(graded, True)
        if not leaf.is_floating_point():
            return torch.full(leaf.shape, mask, dtype=leaf.dtype, device=device)
        values = torch.randn(leaf.shape, generator=generator).to(device).requires_grad_(wants_gradient)
        inputs.append(values)
        return values.clone() if wants_gradient else values  # into which code may write

    args, kwargs = pytree.tree_map(filled, copy.deepcopy((call.args, call.kwargs)))
    with torch.enable_grad():
        output = block(*args, **kwargs)
        outputs = {
            f"output {number}" if number else "": tensor
            for number, tensor in numbered_outputs(output).items()
            if not number or number in call.read
        }
        graded_outputs = [tensor for tensor in outputs.values() if tensor.requires_grad]
        weights = [torch.randn(tensor.shape, generator=generator).to(device) for tensor in graded_outputs]
        total = [(tensor * weight).sum() for tensor, weight in zip(graded_outputs, weights, strict=True)]
        torch.autograd.backward(total)
    found = {name: tensor.detach().float() for name, tensor in outputs.items()}
    found |= {f"input {number}": value.grad for number, value in enumerate(inputs) if value.grad is not None}
    return found | {name: value.grad for name, value in block.named_parameters() if value.grad is not None}
