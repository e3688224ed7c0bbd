"""A block that ranks run on parts against the same block whole, with numbers: output and every gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
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
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.float8 import products_unrounded
from paraplan.runtime.structure.forwards import DOES_NOT_RUN
from paraplan.runtime.structure.meta import attributes_kept, give_random_values
from paraplan.runtime.structure.model_structure import BlockCall
from paraplan.runtime.structure.outputs import numbered_outputs
from paraplan.runtime.structure.shaken_weights import shake
from paraplan.runtime.torch_private import pytree

_SEED = 0
_OUTPUTS = ("output ", "buffer ")
_DROPOUTS = frozenset({"dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"})
_DROPOUTS |= {"feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d"}
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
    try:
        expected_of(whole.train(), call, dtype)
    except UnsupportedPlanError:
        return False
    return not _has_drawn(next(whole.parameters()).device)


def _has_drawn(device: torch.device) -> bool:
    """Whether random numbers were drawn since generators were seeded for a run."""

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    left = states()
    seed_generators(_SEED)
    return not all(map(torch.equal, left, states()))


@contextmanager
def comparable_runs(device: torch.device) -> Iterator[None]:
    """Multiply in fp32 without TF32 or bf16 in this context, which round like an error; random numbers are put back."""
    parts = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul")
    backends: list[Any] = [attrgetter(part)(torch.backends) for part in parts]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with products_unrounded(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def shares_with_blocks(call: BlockCall) -> bool:
    """Whether a block is handed a mapping of its own kind, through which blocks share what they compute (keys)."""
    return any(isinstance(leaf, MutableMapping) for leaf in pytree.tree_leaves((call.args, call.kwargs)))


class BlockDiffersError(Exception):
    """A block that ranks run on parts does not compute what it computes whole; where it does not, it `runs` at all."""

    def __init__(self, reason: str, *, runs: bool) -> None:
        super().__init__(reason)
        self.runs = runs


@dataclass(frozen=True)
class BlockTrial:
    """A block whole, with values on this rank's device. `draws`: it draws random numbers in training."""

    whole: nn.Module
    call: BlockCall
    setting: CheckSetting
    draws: bool

    def compare(
        self,
        part: nn.Module,
        group: TensorGroup,
        shardings: Mapping[str, Sharding],
        partial: Collection[str] | None = (),
    ) -> tuple[str, ...]:
        """Return the whole parameters of `part` whose gradients are summed over the ranks, those in `partial` too.

        `part` holds this rank's share of the parameters in `shardings`. Both run on random numbers in the shapes of the
        call, the same on every rank; only gradients that training needs are compared. With None all gradients are
        partial. Raises `BlockDiffersError` on every rank where `part` does not compute what the whole block does.
        """
        setting, summed = self.setting, set(partial or ())
        with attributes_kept(self.whole):
            for training in setting.modes:
                expected, mask = expected_of(self.whole.train(training), self.call, setting.dtype)
                found, reason = {}, ""
                try:
                    with _NoEmptyAttention():
                        found = gradients_of(part.train(training), self.call, mask=mask, dtype=setting.dtype)
                except DOES_NOT_RUN as error:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                errors = errors_of(expected, found, shardings, group)
                if math.isinf(errors[""]):  # on some rank, and so on all
                    raise BlockDiffersError(reason or "its output has another shape, or is not a number", runs=False)
                names = dict(part.named_parameters()).keys() - shardings.keys()
                summed |= {key for key in names & expected.keys() if errors[key] > setting.tolerance}
                gradients = {key for key in expected if partial is None and not key.startswith(_OUTPUTS) and key}
                again = sorted(gradients | summed & expected.keys())
                sums = {key: group.sum(found.get(key, torch.zeros_like(expected[key]))) for key in again}
                errors |= errors_of({key: expected[key] for key in again}, sums, {}, group)
                where = max(errors, key=lambda key: errors[key])
                if errors[where] > setting.tolerance:
                    reason = f"relative error {errors[where]:.1e} in {where or 'its output'}"
                    raise BlockDiffersError(reason, runs=True)
        return tuple(sorted(summed))


@contextmanager
def block_trial(block: nn.Module, call: BlockCall, device: torch.device) -> Iterator[BlockTrial]:
    """Yield a copy of `block` with values on `device`, to compare with it what ranks run on parts."""
    whole = copy_of(block)
    give_random_values(whole)
    whole = whole.to(device)
    shake(whole)  # what starts at zero hides all that lies behind it
    try:
        with comparable_runs(device):
            with attributes_kept(whole):
                setting = setting_of(whole, call)
                draws = not setting.modes[0] or draws_in_training(whole, call, setting.dtype)
            yield BlockTrial(whole, call, setting, draws)
    finally:
        whole.to("meta")


class _NoDropout(TorchFunctionMode):
    """Lets dropout pass everything, so that two runs in training can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DROPOUTS:
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
    except DOES_NOT_RUN as error:
        raise UnsupportedPlanError(
            f"a split of {type(whole).__name__} cannot be checked, which does not run by itself: "
            f"{str(error).splitlines()[0]}",
            hint="use tp=1 for this model",
        ) from error


def errors_of(
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    shardings: Mapping[str, Sharding],
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
    with attributes_kept(whole):
        gradients_of(whole.train(), call, mask=True, dtype=dtype, drops=True)
    return _has_drawn(next(whole.parameters()).device)


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
