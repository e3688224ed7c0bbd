"""A framework's mixtures of experts: how tokens reach their experts and return, and how these multiply."""

from __future__ import annotations

from math import gcd

from pydantic import Field

from paraplan.cost.implementations import Dispatch, implementations
from paraplan.errors import PlanError
from paraplan.records import Record, Source

_MOST_NAMED = 4
"""Degrees in a hint."""


class ExpertsProfile(Record):
    """Mixtures of experts: how tokens reach their experts and return."""

    dispatcher: Dispatch = Field(default_factory=lambda: implementations().dispatchers["none"])
    """Who sends tokens to them and back (`profiles/implementations.json`)."""
    consecutive_when_even: bool = False
    """Where an even load is forced, the experts of a token stand side by side, on as few ranks as hold them."""
    runs_library_code: bool = False
    """Experts are transformers' modules as they are: those of Llama 4 all compute every token."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """The ZeRO stages beside which experts may go over ranks."""
    over_tensor_ranks: bool = False
    """Experts are whole, and spread over the ranks of tensor parallelism too, each of which sends its own tokens
    (expert_tensor_parallel_size=1): no rows are gathered and summed among these. Without sequence parallelism each
    sends its slice of the tokens that they share, and all gather what comes back."""
    exchange_wait_s: float = 0.0
    """Seconds that a pass over a layer waits for the numbers of tokens by expert before an exchange."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""

    def beside_tensor(self, ep: int, *, tp: int, data_ranks: int, title: str) -> int:
        """Return the `ep` of a plan, ranks of dp and cp alone, for a degree as the framework `title` counts it.

        Where ranks of tp have experts of their own, that counts them too, and divides dp x cp x tp; `data_ranks` are
        dp x cp. Raises `PlanError` for experts on a part of the ranks of tp, and for a degree that counts ranks of tp
        which divide each expert.
        """
        if self.over_tensor_ranks and ep % tp:
            degrees = [tp * share for share in range(1, data_ranks + 1) if data_ranks % share == 0]
            near = sorted(sorted(degrees, key=lambda degree: abs(degree - ep))[:_MOST_NAMED])
            raise PlanError(
                f"ep={ep} of {title} counts the ranks of tp={tp} too, and experts on a part of these are not modelled",
                hint=f"use --ep {' or '.join(map(str, near))}",
            )
        if self.over_tensor_ranks:
            return ep // tp
        if tp > 1 and data_ranks % ep and data_ranks * tp % ep == 0:
            raise PlanError(
                f"ep={ep} does not divide dp x cp={data_ranks}: {title} divides each expert over tp={tp} too",
                hint=f"use --ep {gcd(ep, data_ranks)}, or --framework megatron-bridge, where ranks of tp have experts "
                "of their own (expert_tensor_parallel_size 1)",
            )
        return ep
