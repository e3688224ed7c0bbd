"""A block split over `tp` against the same block whole, with numbers: output and every gradient."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.randomness import DROPOUTS
from paraplan.runtime.structure.meta import attributes_kept
from paraplan.runtime.structure.model_structure import BlockCall
from paraplan.runtime.structure.outputs import numbered_outputs
from paraplan.runtime.torch_private import pytree

_SEED = 0
_DOES_NOT_RUN = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
_SDPA = F.scaled_dot_product_attention  # which stands elsewhere while a block runs under context parallelism


@dataclass(frozen=True)
class CheckSetting:
    """How a block is run for a comparison: in training, in evaluation or in both, and in what type."""

    modes: tuple[bool, ...]
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        """The largest relative error that is rounding."""
        # fp32 sums in another order differ by some 1e-6 of the largest element; bf16 has 8 bits of mantissa.
        return 1e-4 if self.dtype == torch.float32 else 3e-2


def setting_of(whole: nn.Module, call: BlockCall) -> CheckSetting:
    """Return how `whole` can be compared, which is left in the type that it is compared in.

    That is fp32, and 16 bits where its code takes nothing else (flash attention). In training dropout lets everything
    pass; blocks that draw random numbers otherwise are compared in evaluation alone. Raises `UnsupportedPlanError`
    where the block does not run by itself.
    """
    own = next((held.dtype for held in whole.parameters() if held.is_floating_point()), torch.float32)
    failures = []
    for dtype in (torch.float32, torch.bfloat16 if own.itemsize > 2 else own):
        try:
            expected_of(whole.to(dtype).eval(), call, dtype)
        except UnsupportedPlanError as error:
            failures.append(error)
            continue
        return CheckSetting(modes=(True, False) if _repeats_in_training(whole, call, dtype) else (False,), dtype=dtype)
    raise failures[0]


def _repeats_in_training(whole: nn.Module, call: BlockCall, dtype: torch.dtype) -> bool:
    """Whether `whole` runs in training mode without random numbers, but those of dropout."""
    device = next(whole.parameters()).device
    try:
        expected_of(whole.train(), call, dtype)
    except UnsupportedPlanError:
        return False
    left = _random_states(device)
    seed_generators(_SEED)
    return all(torch.equal(one, other) for one, other in zip(left, _random_states(device), strict=True))


def _random_states(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def comparable_runs(device: torch.device) -> Iterator[None]:
    """Multiply in fp32 without TF32 or bf16 in this context, which round like an error; random numbers are put back."""
    parts = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul")
    backends: list[Any] = [attrgetter(part)(torch.backends) for part in parts]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def shares_with_blocks(call: BlockCall) -> bool:
    """Whether a block is handed a mapping of its own kind, through which blocks share what they compute (keys)."""
    return any(isinstance(leaf, MutableMapping) for leaf in pytree.tree_leaves((call.args, call.kwargs)))


def check_split(
    whole: nn.Module,
    part: nn.Module,
    shardings: dict[str, Sharding],
    call: BlockCall,
    *,
    group: TensorGroup,
    name: str,
    setting: CheckSetting,
    partial: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the whole parameters of `part` whose gradients are to be summed over the ranks, those in `partial` too.

    Both are on this rank's device in the type of `setting`; `part` holds this rank's share of the parameters in
    `shardings`. They run on random numbers in the shapes of `call`, the same on every rank; only gradients that
    training needs are compared. Raises `UnsupportedPlanError` on every rank where `part` does not compute what `whole`
    does.
    """
    summed = set(partial)
    for training in setting.modes:
        expected, mask = expected_of(whole.train(training), call, setting.dtype)
        found, reason = {}, ""
        try:
            with _NoEmptyAttention():
                found = gradients_of(part.train(training), call, mask=mask, dtype=setting.dtype)
        except _DOES_NOT_RUN as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        errors = errors_of(expected, found, shardings, group)
        if math.isinf(errors[""]):  # on some rank, and so on all
            reason = reason or "its output has another shape, or is not a number"
            raise UnsupportedPlanError(
                f"the split of {name} over tp={group.size} does not run: {reason}", hint="use tp=1 for this model"
            )
        whole_names = dict(part.named_parameters()).keys() - shardings.keys()
        unequal = {key for key in whole_names & expected.keys() if errors[key] > setting.tolerance}
        again = sorted(unequal | summed & expected.keys())
        sums = {key: group.sum(found.get(key, torch.zeros_like(expected[key]))) for key in again}
        errors |= errors_of({key: expected[key] for key in again}, sums, {}, group)
        summed |= unequal
        where = max(errors, key=lambda key: errors[key])
        if errors[where] > setting.tolerance:
            raise UnsupportedPlanError(
                f"{name} split over tp={group.size} does not compute what it computes whole: relative error "
                f"{errors[where]:.1e} in {where or 'its output'}",
                hint="use tp=1 for this model",
            )
    return tuple(sorted(summed))


class _NoDropout(TorchFunctionMode):
    """Lets dropout pass everything, so that two runs in training can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is _SDPA:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, dict(kwargs)
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


class _NoEmptyAttention(TorchFunctionMode):
    """Refuses attention without heads: torch 2.11 divides by their number, and the process ends by SIGFPE."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        if func is _SDPA and any(isinstance(value, torch.Tensor) and not value.numel() for value in given):
            raise ValueError("attention without heads")
        return func(*args, **(kwargs or {}))


def expected_of(whole: nn.Module, call: BlockCall, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], bool]:
    """Return what the whole block computes, and what its masks are filled with: some leave out what is True."""
    try:
        expected = gradients_of(whole, call, mask=True, dtype=dtype)
        if expected[""].isfinite().all():
            return expected, True
        return gradients_of(whole, call, mask=False, dtype=dtype), False
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedPlanError(
            f"a split of {type(whole).__name__} cannot be checked, which does not run by itself: "
            f"{str(error).splitlines()[0]}",
            hint="use tp=1 for this model",
        ) from error


def errors_of(
    expected: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    shardings: dict[str, Sharding],
    group: TensorGroup,
) -> dict[str, float]:
    """Return the largest relative error of each tensor over all ranks, infinite where one is missing."""
    if not expected:
        return {}
    scale = max((float(value.abs().max()) for key, value in expected.items() if key), default=0.0)
    errors = []
    for key, value in expected.items():
        reference = max(float(value.abs().max()), 1e-3 * scale, 1e-30)
        mine = shardings[key].part(value, group.index) if key in shardings else value
        fits = key in found and found[key].shape == mine.shape
        error = float((found[key] - mine).abs().max()) / reference if fits else math.inf
        errors.append(math.inf if math.isnan(error) else error)
    agreed = torch.tensor(errors, device=next(iter(expected.values())).device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group.handle)
    return dict(zip(expected, agreed.tolist(), strict=True))


def draws_in_training(whole: nn.Module, call: BlockCall, dtype: torch.dtype) -> bool:
    """Whether a block draws random numbers in training, those of dropout too."""
    device = next(whole.parameters()).device
    with attributes_kept(whole):
        gradients_of(whole.train(), call, mask=True, dtype=dtype, drops=True)
    left = _random_states(device)
    seed_generators(_SEED)
    return not all(torch.equal(one, other) for one, other in zip(left, _random_states(device), strict=True))


def gradients_of(
    block: nn.Module, call: BlockCall, *, mask: bool, dtype: torch.dtype, drops: bool = False
) -> dict[str, torch.Tensor]:
    """Return the outputs of `block` that other code reads (the first named ""), gradients, and buffers that it wrote.

    The buffers are left as they were. Without `drops` dropout lets everything pass.
    """
    block.zero_grad()
    seed_generators(_SEED)  # for code that draws: the caller puts random numbers back
    generator = torch.Generator().manual_seed(0)
    inputs: list[torch.Tensor] = []
    device = next(block.parameters()).device
    graded = iter(call.graded)

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, MutableMapping):  # that blocks share: a copy
            leaf.update({key: pytree.tree_map(lambda one: filled_one(one, True), leaf[key]) for key in leaf})
            return leaf
        return filled_one(leaf, next(graded, True)) if isinstance(leaf, torch.Tensor) else leaf

    def filled_one(leaf: Any, wants_gradient: bool) -> Any:
        if not leaf.is_floating_point():
            return torch.full(leaf.shape, mask, dtype=leaf.dtype, device=device)
        values = torch.randn(leaf.shape, generator=generator).to(device, dtype).requires_grad_(wants_gradient)
        inputs.append(values)
        return values.clone() if wants_gradient else values  # into which code may write

    args, kwargs = pytree.tree_map(filled, copy.deepcopy((call.args, call.kwargs)))
    with torch.enable_grad(), nullcontext() if drops else _NoDropout(), _written_buffers(block) as written:
        output = block(*args, **kwargs)
        outputs = {
            f"output {number}" if number else "": tensor
            for number, tensor in numbered_outputs(output).items()
            if not number or number in call.read
        }
        graded_outputs = [tensor for tensor in outputs.values() if tensor.requires_grad]
        weights = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in graded_outputs]
        total = [(tensor * weight).sum() for tensor, weight in zip(graded_outputs, weights, strict=True)]
        torch.autograd.backward(total)
    found = {name: tensor.detach().float() for name, tensor in outputs.items()} | written
    found |= {f"input {number}": value.grad for number, value in enumerate(inputs) if value.grad is not None}
    return found | {name: value.grad for name, value in block.named_parameters() if value.grad is not None}


@contextmanager
def _written_buffers(block: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the values of the buffers that `block` writes in this context, and put back those of before."""
    held = [
        (f"buffer {path}.{name}", module, name, buffer, buffer.clone())
        for path, module in block.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    written: dict[str, torch.Tensor] = {}
    try:
        yield written
    finally:
        with torch.no_grad():
            for label, module, name, buffer, before in held:
                now = getattr(module, name)
                if now is not None and (now.shape != before.shape or not torch.equal(now, before)):
                    written[label] = now.detach().float().clone()
                setattr(module, name, buffer.copy_(before))


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum, type)
_DEPTH = 4


def described(value: Any, depth: int = _DEPTH) -> Any:
    """Return what an attribute comes to, hashable: plain values, containers, functions with what they enclose.

    Of other objects (a configuration that all blocks share, caches) the type alone counts.
    """
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if depth:
        if isinstance(value, FunctionType):
            enclosed = tuple(_content(cell, depth) for cell in value.__closure__ or ())
            return ("function", value.__code__, described(value.__defaults__, depth - 1), enclosed)
        if isinstance(value, MethodType):
            return ("method", value.__func__.__code__, type(value.__self__).__qualname__)
        if isinstance(value, partial):
            return ("partial", *(described(one, depth - 1) for one in (value.func, value.args, value.keywords)))
        if isinstance(value, Mapping):
            return ("mapping", *((str(key), described(one, depth - 1)) for key, one in value.items()))
        if isinstance(value, (list, tuple)):
            return ("sequence", *(described(one, depth - 1) for one in value))
        if isinstance(value, (set, frozenset)):
            return ("set", *sorted(repr(described(one, depth - 1)) for one in value))
        if is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in fields(value)]
            # What a configuration of transformers holds of each layer on its own, it refuses to give out as one.
            own = vars(value) if hasattr(value, "__dict__") else {name: getattr(value, name, None) for name in names}
            return (type(value).__qualname__, *((name, described(own.get(name), depth - 1)) for name in names))
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if callable(value) and type(value).__name__ in ("builtin_function_or_method", "ufunc"):
        return ("builtin", getattr(value, "__qualname__", ""))
    return type(value).__qualname__


def _content(cell: Any, depth: int) -> Any:
    try:
        return described(cell.cell_contents, depth - 1)
    except ValueError:  # a cell that nothing has filled
        return None
