"""A tensor that code sees whole while this rank holds its part: how unmodified code runs with split heads.

Attention code writes sizes down (`view(batch, tokens, 3, num_heads, head_size)`), so it cannot be handed a part of a
tensor. A `SplitTensor` has the whole tensor's shape and one rank's values. Every torch function on it runs on the
values; `rules` finds the sizes to pass and the dimension that is split in the result. Where a function would mix
what several ranks hold, a `SplitError` is raised: nothing travels unless a layer of `layers` sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.shards.group import TensorGroup, copy_to_region
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.torch_private import make_wrapper

VOCABULARY = "the vocabulary"  # the source of logits split by class

_KEPT_SPECS = 4096


class SplitError(Exception):
    """A computation that ranks cannot do each on its part. It never leaves the search for a split.

    `source` is the layer whose output was split. `segments` is another way to cut that output, if one may help.
    `is_mixed` says that parts would have to be brought together: the layer may then be left whole.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str,
        segments: tuple[int, ...] | None = None,
        is_mixed: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.source = source
        self.segments = segments
        self.is_mixed = is_mixed


@dataclass(eq=False, slots=True, frozen=True)
class SplitSpec:
    """How parts lie in the wholes of shape `shape`. Of one group, those that are alike are one object.

    `source` names the layer that the tensors are of, or is `VOCABULARY`.
    """

    sharding: Sharding
    group: TensorGroup
    source: str
    shape: torch.Size


def spec_of(local: torch.Tensor, sharding: Sharding, group: TensorGroup, source: str) -> SplitSpec:
    """Return the spec of the whole tensor of which `local` is this rank's part by `sharding`."""
    key = (sharding, local.shape, source)
    known: SplitSpec | None = group.specs.get(key)
    if known is not None:
        return known
    if len(group.specs) >= _KEPT_SPECS:  # sequences of ever other lengths
        group.specs.clear()
    shape = torch.Size(sharding.whole_shape(local.shape))
    made = SplitSpec(sharding, group, source, shape)
    group.specs[key] = made
    return made


class SplitTensor(torch.Tensor):
    """The whole's shape, and in `local` the values of this rank's part. `spec` says which part that is."""

    local: torch.Tensor
    spec: SplitSpec
    run_on_parts: ClassVar[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]]
    """What every torch function runs by. `rules`, which make tensors of this class, set it."""

    @staticmethod
    def __new__(cls, local: torch.Tensor, sharding: Sharding, group: TensorGroup, source: str) -> SplitTensor:
        """Return the whole tensor of which `local` is this rank's part by `sharding`."""
        return cls.of(local, spec_of(local, sharding, group, source))

    # Its arguments are those of the parent, which torch does not type.
    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def of(cls, local: torch.Tensor, spec: SplitSpec) -> SplitTensor:
        """Return the whole tensor of which `local` is this rank's part by `spec`."""
        is_followed = (
            spec.source == VOCABULARY and spec.group.gathers and local.requires_grad and torch.is_grad_enabled()
        )
        whole: SplitTensor = make_wrapper(
            cls, spec.shape, dtype=local.dtype, device=local.device, requires_grad=is_followed
        )
        whole.local, whole.spec = local, spec
        if is_followed:
            with torch.DisableTorchFunctionSubclass():
                whole.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return whole

    @property
    def sharding(self) -> Sharding:
        """How the whole is cut."""
        return self.spec.sharding

    @property
    def group(self) -> TensorGroup:
        """The ranks that hold the parts."""
        return self.spec.group

    @property
    def source(self) -> str:
        """The layer that the tensor is of."""
        return self.spec.source

    # What models ask for most, without the way through __torch_function__.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # torch annotates an attribute
        """The whole tensor's shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]  # torch annotates an attribute
        """The number of dimensions."""
        return len(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # torch annotates an attribute
        """The type of the values."""
        return self.local.dtype

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the first dimension."""
        return iter(self.unbind(0))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.run_on_parts(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raise: every function was to be met by `__torch_function__`."""
        logits = [operand for operand in split_operands(args, kwargs) if operand.source == VOCABULARY]
        if logits and logits[0].group.gathers:
            raise hidden_loss()
        raise SplitError(f"{func} reached a split tensor unseen", source="")


def _refuse_gradient(_: torch.Tensor) -> None:
    """Raise: gradients flow to the parts, unless code of its own (an autograd.Function) was handed the whole."""
    raise hidden_loss()


def hidden_loss() -> UnsupportedPlanError:
    """Return the error for a loss that hands logits, of which each rank of `tp` has a part, to code of its own."""
    return UnsupportedPlanError(
        "loss_fn passes vocabulary-parallel logits to an autograd.Function, which would see the shard of one rank",
        hint="use torch.nn.functional.cross_entropy, or tp=1",
    )


def as_operand(whole: torch.Tensor, like: SplitTensor) -> torch.Tensor:
    """Return what every rank has whole as work on parts like `like` reads it: its gradient is summed over the ranks."""
    if whole.requires_grad and torch.is_grad_enabled():
        return copy_to_region(whole, like.group)
    return whole


def split_operands(*values: Any) -> list[SplitTensor]:
    """Return the split tensors among arguments, those in lists and tuples included."""
    found: list[SplitTensor] = []
    for value in values:
        if isinstance(value, SplitTensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(split_operands(*value))
        elif isinstance(value, dict):
            found.extend(split_operands(*value.values()))
    return found
