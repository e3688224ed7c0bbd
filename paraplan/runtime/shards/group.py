"""The ranks of a `tp` group as autograd sees them: what travels in the forward pass, and what in the backward pass.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, section 3, f and g; Korthikanti et al. 2022, section 4.2.2, for
sequence parallelism): what is copied forward is summed backward, what is gathered forward is summed and scattered
backward, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paraplan.plan.parallel import Axis
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.seeds import RandomNumbers
from paraplan.runtime.shards.sharding import Sharding, ShardLocation
from paraplan.runtime.torch_private import is_view

# torch 2.13 renamed both, and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class TensorGroup:
    """One rank's view of its `tp` group. Without `handle` nothing travels: shapes alone are followed, without values.

    With `keeps_products` what linear layers return is kept for the backward pass, and is not summed in place.
    With `overlaps` gradients of weights are made while those of inputs travel (`overlap`).
    `num_tokens` are those of whole sequences while a block runs on some of them, of `num_sequences`, and
    `tokens` how these are cut.
    `numbers` says whether ranks draw the same random numbers. `entered` is what a block's region was entered with last,
    whether it has a gradient, and what it has become: query, key and value projections read one tensor, whose gradient
    is summed once for all three.
    """

    size: int
    index: int
    handle: dist.ProcessGroup | None
    keeps_products: bool = False
    overlaps: bool = False
    num_tokens: int = 0
    num_sequences: int = 0
    tokens: Sharding = field(init=False)
    numbers: RandomNumbers = field(init=False)
    entered: tuple[torch.Tensor, bool, torch.Tensor] | None = None

    @classmethod
    def of(cls, mesh: Mesh, axis: Axis, *, keeps_products: bool = False, overlaps: bool = False) -> TensorGroup:
        """Return the group of `axis` of this rank."""
        place, handle = mesh.coordinate(axis), mesh.group(axis)
        return cls(mesh.size(axis), place, handle, keeps_products=keeps_products, overlaps=overlaps)

    def __post_init__(self) -> None:
        self.tokens = Sharding(1, (0,), self.size)
        self.numbers = RandomNumbers(size=self.size, index=self.index)

    def sum(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the sum of `tensor` over the group; `in_place` where nobody else reads it."""
        total = tensor.contiguous() if in_place else tensor.clone(memory_format=torch.contiguous_format)
        if self.handle is not None:
            dist.all_reduce(total, group=self.handle)
        return total

    def gather(self, local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        """Return the whole tensor of which every rank gives its part."""
        if self.handle is None:
            return local.new_empty(sharding.whole_shape(local.shape))
        missing = 0 if sharding.divides else sharding.local_length(sharding.owner or 0) - local.shape[sharding.dim]
        if missing:  # what travels has one length
            local = torch.cat(
                [local, local.new_zeros(*local.shape[: sharding.dim], missing, *local.shape[sharding.dim + 1 :])],
                sharding.dim,
            )
        # One behind the other: a list of tensors would be copied once more.
        gathered = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        _all_gather(gathered, local.contiguous(), group=self.handle)
        parts = list(gathered.chunk(self.size))
        if not sharding.divides:
            parts = [part.narrow(sharding.dim, 0, sharding.local_length(index)) for index, part in enumerate(parts)]
        return torch.cat(parts, sharding.dim) if sharding.is_plain else sharding.join(parts)

    def reduce_scatter(
        self, whole: torch.Tensor, sharding: Sharding, *, async_op: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Return this rank's part of the sum of `whole` over the group, and with `async_op` the work to wait for."""
        if self.handle is None:
            return whole.new_empty(sharding.local_shape(whole.shape)), None
        if sharding.is_plain:
            parts = torch.cat(whole.chunk(self.size, sharding.dim))
        else:
            parts = torch.cat([sharding.part(whole, index) for index in range(self.size)])
        own = parts.new_empty((parts.shape[0] // self.size, *parts.shape[1:]))
        return own, _reduce_scatter(own, parts, group=self.handle, async_op=async_op)

    def part(self, whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        """Return this rank's part of `whole`, which every rank has."""
        return sharding.part(whole, self.index)

    def take_tokens(self, num_tokens: int) -> None:
        """Take note of the tokens of whole sequences, of which the block that runs has some."""
        self.num_tokens, self.tokens = num_tokens, Sharding(1, (num_tokens,), self.size)

    @contextmanager
    def several_parts(self, count: int) -> Iterator[None]:
        """Have the tokens be those of `count` parts of sequences in this context; of each part a rank has its own."""
        before = self.num_tokens, self.tokens
        self.num_tokens, self.tokens = count * before[0], Sharding(1, (before[0],) * count, self.size)
        try:
            yield
        finally:
            self.num_tokens, self.tokens = before

    def part_of_tokens(self, own: torch.Tensor) -> Sharding | None:
        """Return how the tokens of all ranks are cut, of which `own` may have this rank's; None where it has not.

        It is [batch, tokens, hidden] or [batch x tokens, hidden].
        """
        dim, own_tokens = own.ndim - 2, self.num_tokens // self.size
        # A mask is [batch, tokens].
        if dim < 0 or own.shape[dim] != (own_tokens if dim else self.num_sequences * own_tokens):
            return None
        return Sharding(dim, self.tokens.segments, self.size, 1 if dim else own.shape[0] // own_tokens)


def copy_to_region(tensor: torch.Tensor, group: TensorGroup, *, for_products: bool = False) -> torch.Tensor:
    """Return `tensor`, which every rank has; its gradient is the sum of those of the ranks.

    `for_products`: linear layers alone read it, whose backward passes make a gradient of their own to sum in place.
    """
    result: torch.Tensor = _Copy.apply(tensor, group, for_products)  # type: ignore[no-untyped-call]
    return result


def reduce_from_region(tensor: torch.Tensor, group: TensorGroup, *, is_product: bool = False) -> torch.Tensor:
    """Return the sum of `tensor` over the ranks, which all go on with the same.

    `is_product`: it is what a linear layer returned, which nobody else reads, and is summed in place.
    """
    in_place = is_product and group.handle is not None and not group.keeps_products
    # What torch.compile makes of a block decides by itself what is written in place.
    in_place = in_place and not torch.compiler.is_compiling() and tensor.is_contiguous() and not is_view(tensor)
    result: torch.Tensor = _Sum.apply(tensor, group, in_place)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, for_products: bool) -> torch.Tensor:
        ctx.group, ctx.for_products = group, for_products
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.group.sum(gradients[0], in_place=ctx.for_products), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, in_place: bool) -> torch.Tensor:
        if in_place:
            ctx.mark_dirty(tensor)
        else:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if group.handle is not None:
            dist.all_reduce(tensor, group=group.handle)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None, None


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.group.sum(gradients[0]), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sharding: Sharding, group: TensorGroup) -> torch.Tensor:
        ctx.sharding, ctx.group = sharding, group
        return group.gather(local, sharding)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.group.reduce_scatter(gradients[0], ctx.sharding)[0], None, None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, sharding: Sharding, group: TensorGroup) -> torch.Tensor:
        ctx.sharding, ctx.group = sharding, group
        return group.reduce_scatter(whole, sharding)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.group.gather(gradients[0], ctx.sharding), None, None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, sharding: Sharding, group: TensorGroup) -> torch.Tensor:
        ctx.sharding, ctx.group = sharding, group
        return group.part(whole, sharding).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.group.gather(gradients[0], ctx.sharding), None, None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sharding: Sharding, group: TensorGroup) -> torch.Tensor:
        ctx.sharding, ctx.group = sharding, group
        return group.gather(local, sharding)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.group.part(gradients[0], ctx.sharding).contiguous(), None, None


_Exchange = Callable[[torch.Tensor, Sharding, TensorGroup], torch.Tensor]

all_gather: _Exchange = _Gather.apply
"""Returns the whole of what the ranks hold, for each to go its own way with it: gradients are summed, then cut."""
reduce_scatter: _Exchange = _SumAndScatter.apply
"""Returns this rank's part of the sum of a whole tensor over the ranks."""
scatter_to_region: _Exchange = _TakePart.apply
"""Returns this rank's part of what every rank has; its gradient is gathered from all parts."""
gather_from_region: _Exchange = _JoinParts.apply
"""Returns the whole of what the ranks hold, for all to do the same with it: the gradient is cut, not summed."""
sum_both_ways: Callable[[torch.Tensor, TensorGroup], torch.Tensor] = _SumBothWays.apply
"""Returns the sum of a tensor over the ranks, which go on with it each in its own way; so is its gradient."""


@dataclass(frozen=True)
class Shardings:
    """How parameters are cut, by their names: `tensor` over the ranks of `tp`, `expert` over those of `ep`.

    A parameter may be cut over both, each along a dimension of its own.
    """

    tensor: Mapping[str, Sharding] = field(default_factory=dict)
    expert: Mapping[str, Sharding] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The parameters that ranks hold parts of."""
        return frozenset([*self.tensor, *self.expert])

    def whole(self, name: str, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return the whole of `tensor`, cut as `name` is: gathered over `dp` (shards), `tp` and `ep`."""
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for sharding, group in self._cuts(name, mesh):
            whole = group.gather(whole, sharding)
        return whole

    def part(self, name: str, whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's part of `whole`, which is cut as `name` is."""
        for sharding, group in self._cuts(name, mesh):
            whole = group.part(whole, sharding)
        return whole

    def whole_shape(self, name: str, part: torch.Size, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the whole tensor of which `part` is that of this rank's, cut as `name` is."""
        shape = tuple(part)
        for sharding, _ in self._cuts(name, mesh):
            shape = sharding.whole_shape(shape)
        return shape

    def places(self, mesh: Mesh) -> dict[str, list[ShardLocation]]:
        """Return where the parts of this rank lie, by the names of the parameters: the smallest part first."""
        return {
            name: [ShardLocation(sharding, group.index) for sharding, group in self._cuts(name, mesh)]
            for name in sorted(self.names)
        }

    def _cuts(self, name: str, mesh: Mesh) -> list[tuple[Sharding, TensorGroup]]:
        cuts = [(self.tensor[name], TensorGroup.of(mesh, "tp"))] if name in self.tensor else []
        return cuts + ([(self.expert[name], expert_ranks(mesh))] if name in self.expert else [])


def expert_ranks(mesh: Mesh) -> TensorGroup:
    """Return the group of the ranks that share out the experts with this rank."""
    return TensorGroup(size=mesh.ep, index=mesh.expert_place(mesh.world.rank), handle=mesh.expert_group)
