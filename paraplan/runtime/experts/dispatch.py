"""Experts with stacked weights, of which each rank holds some: their own code runs on the rows that came for them.

What they are called with says how: hidden states with the numbers of the experts that each token goes to and the
weights of these (one row for each pair travels, and the weighted outputs of a token are summed at home), hidden states
with a weight for every expert (each token goes to all ranks), or rows for all experts one behind the other, as many for
each or with the number of each expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.experts.exchange import Rows, row_counts, tell
from paraplan.runtime.experts.layers import ExpertLoad
from paraplan.runtime.shards.group import TensorGroup


class SharedExperts:
    """The forward pass of a module of experts. `inner` is its own, which works on those that this rank holds."""

    def __init__(
        self, name: str, inner: Callable[..., Any], num_experts: int, group: TensorGroup, load: ExpertLoad
    ) -> None:
        self._name = name
        self._inner = inner
        self._num_experts = num_experts
        self._num_local = num_experts // group.size
        self._group = group
        self._load = load

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the experts of all ranks make of what the module was called with."""
        places = [*range(len(args)), *kwargs]
        given = dict(zip(places, [*args, *kwargs.values()], strict=True))
        floats = [place for place, one in given.items() if isinstance(one, torch.Tensor) and one.is_floating_point()]
        numbers = [place for place, one in given.items() if place not in floats and _are_numbers(one)]
        if not floats or len(numbers) > 1 or len(floats) > 2:
            raise self._unknown(given)

        def call(*replaced: Any) -> Any:
            changed = given | dict(zip([*floats[:1], *numbers, *floats[1:]], replaced, strict=True))
            return self._inner(*(changed[place] for place in range(len(args))), **{key: changed[key] for key in kwargs})

        hidden: torch.Tensor = given[floats[0]]
        if len(floats) == 1:
            rest = [one for place, one in given.items() if place not in (*floats, *numbers) and one is not None]
            counts = given[numbers[0]] if numbers else None
            if rest or not self._are_rows(hidden, counts):
                raise self._unknown(given)
            return self._of_all(hidden, call) if counts is None else self._of_sorted(hidden, counts, call)
        weights = given[floats[1]]
        if not numbers:
            if weights.shape != (*hidden.shape[:-1], self._num_experts):
                raise self._unknown(given)
            return self._of_weighed(hidden, weights, call)
        index, num_tokens = given[numbers[0]], hidden.numel() // max(hidden.shape[-1], 1)
        if not isinstance(index, torch.Tensor) or weights.shape != index.shape or index.numel() % max(num_tokens, 1):
            raise self._unknown(given)
        return self._of_chosen(hidden, index, weights, call)

    def _of_chosen(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, call: Callable[..., Any]
    ) -> torch.Tensor:
        """Send each token to the experts that `index` names, and sum what comes back."""
        group, chosen = self._group, index.reshape(-1).long()
        tokens = hidden.reshape(-1, hidden.shape[-1])
        num_pairs = len(chosen)
        pairs = Pairs.of(chosen, num_each=max(num_pairs // max(len(tokens), 1), 1))
        there = chosen.new_zeros(self._num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        coming = tell(group, there).view(group.size, -1)
        self._load.add(self._name, there)
        rows = Rows(
            group,
            sent=row_counts(there.view(group.size, -1).sum(1), num_pairs),
            received=row_counts(coming.sum(1), num_pairs),
        )
        states, scales = rows.exchange(pairs.spread(tokens), weights.reshape(-1)[pairs.order])
        local = self._local_experts(coming, sum(rows.received)).to(index.dtype)
        outputs = self._run(states, local, scales, hidden, index, weights, call)
        (back,) = rows.back.exchange(outputs)
        return pairs.collect(back).reshape(*hidden.shape[:-1], -1)

    def _run(
        self,
        states: torch.Tensor,
        local: torch.Tensor,
        scales: torch.Tensor,
        *whole: Any,
    ) -> torch.Tensor:
        """Run the experts of this rank; where no row has come on one of zeros, so that all ranks do the same."""
        hidden, index, weights, call = whole
        count = len(states)
        if not count:
            states = torch.cat([states, states.new_zeros(1, states.shape[-1])])
            local, scales = local.new_zeros(1), torch.cat([scales, scales.new_zeros(1)])
        outputs = call(
            states.view(*(1,) * (hidden.ndim - 2), -1, hidden.shape[-1]),
            local.view(*_like(index, hidden)),
            scales.view(*_like(weights, hidden)),
        )
        if not isinstance(outputs, torch.Tensor):
            raise UnsupportedPlanError(
                f"ep={self._group.size}: {self._name} returns {type(outputs).__name__}, not a tensor", hint="use ep=1"
            )
        outputs = outputs.reshape(max(count, 1), -1)
        return outputs if count else outputs[:0]

    def _of_weighed(self, hidden: torch.Tensor, weights: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
        """Send each token to all ranks, with the weights of the experts there, and sum what comes back."""
        group = self._group
        tokens = hidden.reshape(-1, hidden.shape[-1])
        coming = tell(group, torch.full((group.size,), len(tokens), device=hidden.device))
        self._load.add(self._name, torch.full((self._num_experts,), len(tokens), device=hidden.device))
        rows = Rows(group, [len(tokens)] * group.size, row_counts(coming, len(tokens) * group.size))
        shares = weights.reshape(-1, group.size, self._num_local).transpose(0, 1).reshape(-1, self._num_local)
        states, scales = rows.exchange(tokens.repeat(group.size, 1), shares)
        ones = (1,) * (hidden.ndim - 2)
        outputs = call(states.view(*ones, *states.shape), scales.view(*ones, *scales.shape))
        (back,) = rows.back.exchange(outputs.reshape(len(states), -1))
        return back.view(group.size, len(tokens), -1).sum(0).to(back.dtype).reshape(*hidden.shape[:-1], -1)

    def _of_all(self, rows: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
        """Send the rows of each expert to its rank; they lie one behind the other, or in a dimension of their own."""
        group, local = self._group, self._num_local
        stacked = rows.reshape(self._num_experts, -1, rows.shape[-1])
        each = stacked.shape[1]
        coming = tell(group, torch.full((group.size,), each, device=rows.device))
        lengths = row_counts(coming, each * group.size)
        self._load.add(self._name, torch.full((self._num_experts,), each, device=rows.device))
        ways = Rows(group, [each * local] * group.size, [length * local for length in lengths])
        (states,) = ways.exchange(stacked.reshape(-1, rows.shape[-1]))
        parts = [part.view(local, -1, rows.shape[-1]) for part in torch.split(states, [*ways.received])]
        joined = torch.cat(parts, dim=1)
        outputs = call(joined if rows.ndim == 3 else joined.reshape(-1, rows.shape[-1]))
        outputs = outputs.reshape(local, joined.shape[1], -1)
        sent = torch.cat([part.reshape(-1, outputs.shape[-1]) for part in torch.split(outputs, lengths, dim=1)])
        (back,) = ways.back.exchange(sent)
        return back.reshape(*rows.shape[:-1], -1)

    def _of_sorted(
        self, rows: torch.Tensor, counts: torch.Tensor | Sequence[int], call: Callable[..., Any]
    ) -> torch.Tensor:
        """Send the rows of each expert to its rank; they lie one behind the other, and `counts` has each one's."""
        group = self._group
        there = torch.as_tensor(counts, device=rows.device).long()
        coming = tell(group, there).view(group.size, -1)
        self._load.add(self._name, there)
        ways = Rows(
            group,
            sent=row_counts(there.view(group.size, -1).sum(1), len(rows)),
            received=row_counts(coming.sum(1), len(rows)),
        )
        (states,) = ways.exchange(rows)
        pairs = Pairs.of(self._local_experts(coming, len(states)), num_each=1)
        local = coming.sum(0)
        outputs = call(pairs.spread(states), local.to(counts) if isinstance(counts, torch.Tensor) else local.tolist())
        (back,) = ways.back.exchange(pairs.collect(outputs))
        return back

    def _local_experts(self, coming: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return which expert of this rank each row is for that has come: `coming` rows [ranks, experts], in order."""
        local = torch.arange(self._num_local, device=coming.device).repeat(self._group.size)
        return torch.repeat_interleave(local, coming.reshape(-1), output_size=num_rows)

    def _are_rows(self, rows: torch.Tensor, counts: torch.Tensor | Sequence[int] | None) -> bool:
        """Whether `rows` are for all experts, one behind the other: as many for each, or those that `counts` has."""
        if counts is None:
            return rows.shape[0] % self._num_experts == 0
        return rows.ndim == 2 and len(counts) == self._num_experts and sum(map(int, counts)) == len(rows)

    def _unknown(self, given: dict[Any, Any]) -> UnsupportedPlanError:
        words = ", ".join(
            f"{one.dtype} {tuple(one.shape)}".removeprefix("torch.")
            if isinstance(one, torch.Tensor)
            else type(one).__name__
            for one in given.values()
        )
        return UnsupportedPlanError(
            f"ep={self._group.size}: {self._name} is called with {words}, and not with hidden states, the numbers of "
            "experts and their weights, nor with rows for all experts",
            hint="use ep=1 for this model",
        )


def _are_numbers(one: Any) -> bool:
    """Whether an argument holds whole numbers: those of experts, or how many rows each has."""
    if isinstance(one, torch.Tensor):
        return not one.is_floating_point()
    return isinstance(one, (list, tuple)) and all(type(number) is int for number in one)


def _like(routing: torch.Tensor, hidden: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of one choice for each row in the form of `routing`, that of all tokens."""
    is_flat = routing.numel() == hidden.numel() // hidden.shape[-1] and routing.ndim == hidden.ndim - 1
    return (*(1,) * (routing.ndim - 1), -1) if is_flat else (*(1,) * (routing.ndim - 2), -1, 1)


def set_number(module: nn.Module, num_experts: int, num_local: int) -> None:
    """Have `module` count the experts of this rank, where it counts them all."""
    for name, value in list(vars(module).items()):
        if isinstance(value, int) and not isinstance(value, bool) and value == num_experts and "expert" in name:
            setattr(module, name, num_local)


@dataclass(frozen=True)
class Pairs:
    """Pairs sorted by expert: `order` has the number of each, `inverse` where each went. A token has `num_each`."""

    order: torch.Tensor
    inverse: torch.Tensor
    num_each: int

    @classmethod
    def of(cls, chosen: torch.Tensor, *, num_each: int) -> Pairs:
        """Return the pairs of tokens with the experts `chosen`, of which each token has `num_each` in a row."""
        order = torch.argsort(chosen, stable=True)
        numbers = torch.arange(len(order), device=order.device)
        return cls(order, torch.empty_like(order).scatter_(0, order, numbers), num_each)

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a row of `tokens` for each pair."""
        rows: torch.Tensor = _Way.apply(tokens, self, True)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the `rows` of each token."""
        tokens: torch.Tensor = _Way.apply(rows, self, False)  # type: ignore[no-untyped-call]
        return tokens

    def copied(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what `spread` does, without a graph."""
        return tokens[self.order // self.num_each]

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `collect` does, without a graph; autocast sums in fp32, and would leave the sum so."""
        return rows[self.inverse].view(-1, self.num_each, rows.shape[-1]).sum(1).to(rows.dtype)


class _Way(torch.autograd.Function):
    """`spread` or `collect`, each of which is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, pairs: Pairs, spreads: bool) -> torch.Tensor:
        ctx.pairs, ctx.spreads = pairs, spreads
        return pairs.copied(rows) if spreads else pairs.summed(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        made = ctx.pairs.summed if ctx.spreads else ctx.pairs.copied
        return made(gradients[0]), None, None
