"""Logits of which each rank of a `tp` group has some classes, from the head to the loss: plain tensors, and a mode.

In the mode code sees the sizes of all classes. What works on each entry by itself runs on a rank's own, cross-entropy
is computed in parts (`vocabulary_loss`), and for anything else the logits are gathered, which is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.shards.group import TensorGroup, copy_to_region, gather_from_region
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.cuts import reshaped_sharding
from paraplan.runtime.split.lockstep import function_name
from paraplan.runtime.split.vocabulary_loss import split_cross_entropy
from paraplan.runtime.structure.forwards import DOES_NOT_RUN
from paraplan.runtime.torch_private import pytree, watching_functions

_CALLS_WATCHED = 64
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Classes:
    """How a tensor lies in that of all classes."""

    sharding: Sharding
    group: TensorGroup


def classes_of(tensor: Any) -> Classes | None:
    """Return how `tensor` is split by classes; None for one that is not."""
    return getattr(tensor, "_paraplan_classes", None) if isinstance(tensor, torch.Tensor) else None


def gathered_classes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the logits of all classes, of which `tensor` may have some; its gradient is cut."""
    found = classes_of(tensor)
    if found is None:
        return tensor
    return gather_from_region(tensor.view_as(tensor), found.sharding, found.group)  # no longer known by classes


def _with_classes(tensor: torch.Tensor, classes: Classes) -> torch.Tensor:
    tensor._paraplan_classes = classes  # type: ignore[attr-defined]
    return tensor


class VocabularyLogits:
    """The logits of a rank of `group`: the mode in which code meets them, and when it is on.

    It is on from the head to the end of a pass, and in the loss. A head that is called outside of a pass returns the
    logits of all classes.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.mode = _ByClasses()
        self._pass: ExitStack | None = None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surround a forward pass."""
        try:
            with ExitStack() as self._pass:
                yield
        finally:
            self._pass, self.mode.is_on = None, False

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Surround a loss of what a pass returned."""
        with self.mode:
            yield

    def made(self, local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        """Return what the head made, the logits of some classes."""
        if self._pass is None:
            return gather_from_region(local, sharding, self.group)
        if not self.mode.is_on:
            self.mode.is_on = True
            self._pass.enter_context(self.mode)
        return _with_classes(local, Classes(sharding, self.group))


class _ByClasses(TorchFunctionMode):
    """Meets logits of some classes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self._said: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = _first([*args, *kwargs.values()])
        if first is None:
            return func(*args, **kwargs)
        name, classes = function_name(func), first._paraplan_classes  # type: ignore[attr-defined]
        if name in _OF_THE_WHOLE:
            return func(*_mapped(_on_meta, args), **_mapped(_on_meta, kwargs))
        if name in _OF_THE_PART or (getattr(func, "__name__", "") == "__get__" and name not in _KEEPS):
            return func(*args, **kwargs)
        result = self._of_own(name, func, first, classes, args, kwargs)
        if result is not None:
            return result
        if name not in self._said:
            self._said.add(name)
            if classes.group.index == 0:
                _LOGGER.warning(
                    "tp=%d: %s needs the logits of all ranks, and they are gathered for it; "
                    "torch.nn.functional.cross_entropy does without",
                    *(classes.group.size, name),
                )
        return func(*_mapped(gathered_classes, args), **_mapped(gathered_classes, kwargs))

    def _of_own(
        self,
        name: str,
        func: Callable[..., Any],
        first: torch.Tensor,
        classes: Classes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Return what a function makes of a rank's own classes; None where it needs those of all."""
        if name == "cross_entropy":
            return split_cross_entropy(args, kwargs, classes.sharding, classes.group)
        if name in _RESHAPES:
            return _reshaped(name, first, classes, args[1:], kwargs)
        return _kept(func, first, classes, args, kwargs) if name in _KEEPS else None


def _first(given: list[Any]) -> torch.Tensor | None:
    """Return the first tensor among arguments that has some classes; it is asked of every call in a loss."""
    for one in given:
        if type(one) in (list, tuple):
            given.extend(one)  # and so is looked at later
        elif isinstance(one, torch.Tensor) and hasattr(one, "_paraplan_classes"):
            return one
    return None


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, change, tree)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    classes = classes_of(tensor)
    shape = tensor.shape if classes is None else classes.sharding.whole_shape(tensor.shape)
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _kept(
    func: Callable[..., Any], first: torch.Tensor, classes: Classes, args: Any, kwargs: Any
) -> torch.Tensor | None:
    """Return what a function makes of each entry by itself, or of whole rows of them; None where it does not."""
    cut = classes.sharding

    def operand(one: torch.Tensor) -> torch.Tensor:
        if classes_of(one) is not None:
            return one
        if one.requires_grad and torch.is_grad_enabled():
            one = copy_to_region(one, classes.group)
        dim = cut.dim - first.ndim + one.ndim
        return classes.group.part(one, cut.at(dim)) if dim >= 0 and one.shape[dim] == cut.length else one

    try:
        with torch.no_grad():
            whole = func(*_mapped(_on_meta, args), **_mapped(_on_meta, kwargs))
        result = func(*_mapped(operand, args), **_mapped(operand, kwargs))
    except DOES_NOT_RUN:
        return None
    if not isinstance(result, torch.Tensor) or result.ndim != whole.ndim:
        return None
    differing = [dim for dim, (own, all_) in enumerate(zip(result.shape, whole.shape, strict=True)) if own != all_]
    lengths = (whole.shape[differing[0]], result.shape[differing[0]]) if len(differing) == 1 else None
    if lengths != (cut.length, first.shape[cut.dim]):
        return None
    return _with_classes(result, Classes(cut.at(differing[0]), classes.group))


def _reshaped(
    name: str, first: torch.Tensor, classes: Classes, given: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return logits in another shape in which classes still are one dimension; None where they are not."""
    whole = classes.sharding.whole_shape(first.shape)
    with torch.no_grad():
        after = getattr(torch.empty(whole, device="meta"), name)(*given, **kwargs).shape
    sharding = reshaped_sharding(classes.sharding, whole, after)
    if sharding is None or sharding.length != classes.sharding.length:
        return None
    sizes = (*after[: sharding.dim], first.shape[classes.sharding.dim], *after[sharding.dim + 1 :])
    return _with_classes(first.reshape(sizes), Classes(sharding, classes.group))


def without_custom_functions(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `loss_fn`, refused where it hands an autograd.Function logits of some classes.

    It runs on the parts, and no mode sees that. The first calls are watched, for which torch is changed: those of the
    checks and of the first steps.
    """
    watched = 0

    def watch(cls: Any, args: Any, kwargs: Any) -> None:
        if _first([*args, *kwargs.values()]) is not None:
            raise UnsupportedPlanError(
                "loss_fn passes vocabulary-parallel logits to an autograd.Function, which would see the shard of one "
                "rank",
                hint="use torch.nn.functional.cross_entropy, or tp=1",
            )

    def loss(outputs: Any, targets: Any) -> Any:
        nonlocal watched
        if watched == _CALLS_WATCHED:
            return loss_fn(outputs, targets)
        watched += 1
        with watching_functions(watch):
            return loss_fn(outputs, targets)

    return loss


_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
_OF_THE_WHOLE = frozenset({"shape", "size", "numel", "nelement", "__len__"})
_OF_THE_PART = frozenset(
    {
        *("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device", "register_hook"),
        *("retain_grad", "stride", "is_contiguous", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty"),
        *("requires_grad_", "data_ptr", "untyped_storage", "storage_offset", "is_inference", "__hash__"),
    }
)
_KEEPS = frozenset(
    {
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub", "neg", "true_divide", "divide"),
        *("multiply", "subtract", "pow", "square", "sqrt", "exp", "log", "abs", "tanh", "sigmoid", "relu", "softplus"),
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
        *("__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__neg__", "maximum", "minimum", "where"),
        *("masked_fill", "masked_fill_", "clamp", "clamp_min", "clamp_max", "nan_to_num", "dropout", "logsigmoid"),
        *("to", "float", "half", "double", "bfloat16", "type", "type_as", "contiguous", "clone", "detach", "data"),
        *("transpose", "permute", "movedim", "unsqueeze", "squeeze", "mT", "T", "__getitem__", "select", "narrow"),
    }
)
"""Functions that work on each entry by itself, or lay entries out otherwise."""
