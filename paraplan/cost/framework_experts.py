"""What a framework's mixtures of experts do: how tokens reach their experts and return, and how these multiply."""

from __future__ import annotations

from math import gcd

from pydantic import Field

from paraplan.errors import PlanError
from paraplan.records import Record, Source


class ExpertsProfile(Record):
    """Mixtures of experts: how tokens reach their experts and return."""

    sends_tokens_once: bool = False
    """A token goes to a node once, and inside it once to each rank, however many of its experts are there (DeepEP,
    HybridEP); else to each of its experts."""
    consecutive_when_even: bool = False
    """Where an even load is forced, the experts of a token stand side by side, on as few ranks as hold them."""
    link_efficiency: dict[str, float] = Field(default_factory=dict)
    """What its own exchange reaches of the payload of a kind of link (`profiles/links.json`), where that is not what
    NCCL's all-to-all does."""
    dispatched_bytes: float | None = Field(default=None, gt=0)
    """Bytes of an element on its way to experts in a forward pass; None: as activations have."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """The ZeRO stages beside which experts may go over ranks."""
    over_tensor_ranks: bool = False
    """Experts are whole, and spread over the ranks of tensor parallelism too, each of which sends its own tokens
    (expert_tensor_parallel_size=1): no rows are gathered and summed among these. Without sequence parallelism each
    sends its slice of the tokens that they share, and all gather what comes back."""
    hidden_share: float = Field(default=0.0, ge=0, le=1)
    """Share of exchanges that runs beside compute of another micro-batch, which hides it as far as it lasts, and which
    it slows down."""
    hidden_share_of_overlap: float = Field(default=1.0, ge=0, le=1)
    """That share of a run that overlaps them, where no CUDA graph holds the whole iteration."""
    row_moves: float = 0.0
    """How often either pass reads or writes the rows of tokens for their experts, beside what saved tensors tell:
    permutations before and after the exchanges, counted as plain copies."""
    sent_row_moves: float = 0.0
    """The same of what stands around exchanges alone: it is added where ranks share out the experts."""
    padding_row_moves: float = 0.0
    """The same of filling up the rows of each expert to a multiple that products in 8 bits need, and of taking these
    out again."""
    bias_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes that a forward and a backward pass move for each element of experts' outputs where these have a bias."""
    clamp_bytes: tuple[float, float] = (0.0, 0.0)
    """The same for each element of the gates and inner inputs of experts that are clamped, as those with a bias are."""
    product_start_s: float = 0.0
    """Seconds to start the product of each expert, where they are no grouped kernel that is started once."""
    exchange_wait_s: float = 0.0
    """Seconds that a pass over a layer waits for the numbers of tokens by expert before an exchange."""
    host_s_per_layer: float = 0.0
    """Seconds of the host to start what an expert layer has beside a dense one in a pass."""
    unpriced_under_zero_3: str | None = None
    """Why steps of experts under ZeRO-3 take longer than predicted, with what was published; None where they do not."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""

    def beside_tensor(self, ep: int, *, tp: int, data_ranks: int, title: str) -> int:
        """Return the `ep` of a plan, ranks of dp and cp alone, for a degree as the framework `title` counts it.

        Where ranks of tp have experts of their own, that counts them too, and divides dp x cp x tp; `data_ranks` are
        dp x cp. Raises `PlanError` for experts on a part of the ranks of tp, and for a degree that counts ranks of tp
        which divide each expert.
        """
        if self.over_tensor_ranks and ep % tp:
            lower = ep // tp * tp
            raise PlanError(
                f"ep={ep} of {title} counts the ranks of tp={tp} too, and experts on a part of these are not modelled",
                hint=f"use --ep {f'{lower} or ' if lower else ''}{lower + tp}",
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
