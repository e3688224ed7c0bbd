"""Implementations that frameworks share, by name: who shards weights, who computes the loss, who sends tokens.

A profile names one of each (`"sharding": "deepspeed"`), or states its values itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paraplan.hardware.profile_json import read_object, validated
from paraplan.records import Record
from paraplan.resources import profiles_folder


class ShardingImplementation(Record):
    """Who gathers weights and reduces gradients. Traffic is in bytes through a GPU's own memory."""

    is_fsdp: bool = False
    """Every ZeRO stage keeps fp32 shards of the parameters and gathers 16-bit ones."""
    or_deepspeed: bool = False
    """DeepSpeed's ZeRO may take its place, as a script's configuration says."""
    gather_traffic: float = 0.0
    """Traffic for each gathered 16-bit parameter."""
    reduce_traffic: tuple[float, float] = (0.0, 0.0)
    """Traffic for each gradient that is reduced into shards, in 16 bits and in fp32."""
    replica_traffic: float = 0.0
    """Traffic for each gradient that replicas all-reduce."""
    flat_step_bytes: float = 0.0
    """Copies of the gradient of a rank's own share that an optimizer step makes, all at once."""
    flat_step_elements: float = float("inf")
    """Elements of which ZeRO-3 makes those copies at once, one group of parameters after the other."""
    keeps_gradients_with_optimizer: bool = False
    """Gradients are where the optimizer is: on the host where that is offloaded, to which they go in buckets."""
    gather_host_s: float = 0.0
    """Seconds of the host to gather a block, or a module of it (`gathers_each_weight`)."""
    reduce_host_s: float = 0.0
    """Seconds of the host to reduce gradients of a block, or of a module of it."""
    gathers_each_weight: bool = False
    """ZeRO-3 gathers and scatters the weights of each module by itself, not those of a block together."""
    bucket_elements: float = 0.0
    """Parameters of each of two communication buckets, one to reduce gradients and one to gather parameters."""
    prefetch_elements: float = float("inf")
    """Parameters that ZeRO-3 gathers ahead of their use; the wait for more is exposed."""
    max_live_elements: float = 0.0
    """Parameters that ZeRO-3 leaves gathered at most."""
    source: str
    """Where the values come from."""


class LossImplementation(Record):
    """Who computes the loss on logits."""

    logit_bytes: float
    """Bytes for each logit at the loss's peak under mixed precision."""
    traffic_per_logit: float
    """Bytes that it moves for each logit, forward and backward, counted by operation."""
    multiprocessor_bytes_per_s: float
    """The most of that which a multiprocessor moves in a second: logits are converted to fp32 and back."""
    in_model: bool = False
    """Labels are inputs of the model, which returns its loss and fp32 logits."""
    compiled: str | None = None
    """The loss that torch.compile makes of it."""
    without_logits: str = "cut"
    """The loss that takes its place where no logits are kept (`--loss cut`)."""
    source: str
    """Where the values come from."""


class DispatchImplementation(Record):
    """Who sends tokens to their experts and back."""

    sends_tokens_once: bool = False
    """A token goes to a node once, and inside it once to each rank, however many of its experts are there; else to each
    of its experts."""
    row_moves: float = 0.0
    """How often either pass reads or writes the rows of tokens for their experts, beside what saved tensors tell:
    permutations before and after the exchanges, counted as plain copies."""
    sent_row_moves: float = 0.0
    """How often either pass moves rows around exchanges alone: added where ranks share out the experts."""
    padding_row_moves: float = 0.0
    """How often either pass moves rows to fill up those of each expert to a multiple that products in 8 bits need, and
    to take these out again."""
    link_efficiency: dict[str, float] = Field(default_factory=dict)
    """The share of the payload of a kind of link (`profiles/links.json`) that its own exchange reaches, where that is
    not NCCL's share in an all-to-all."""
    host_s_per_layer: float = 0.0
    """Seconds of the host to start what an expert layer has beside a dense one in a pass."""
    option_of: tuple[str, ...] = ()
    """Frameworks, by the names of their profiles, that have it as an option."""
    architectures: tuple[str, ...] = ()
    """Architectures of the GPUs for which it is built, where it is an option."""
    source: str
    """Where the values come from."""


class Implementations(Record):
    """`profiles/implementations.json`."""

    sharding: dict[str, ShardingImplementation]
    losses: dict[str, LossImplementation]
    dispatchers: dict[str, DispatchImplementation]


@cache
def implementations() -> Implementations:
    """Return the bundled table."""
    path = profiles_folder() / "implementations.json"
    return validated(Implementations, read_object(path), where=str(path))


def _named(kind: str) -> Callable[[Any], Any]:
    def look_up(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        known: dict[str, Record] = getattr(implementations(), kind)
        if value not in known:
            raise ValueError(f"{value!r} is none of {', '.join(sorted(known))} (profiles/implementations.json)")
        return known[value]

    return look_up


Sharding = Annotated[ShardingImplementation, BeforeValidator(_named("sharding"))]
Loss = Annotated[LossImplementation, BeforeValidator(_named("losses"))]
Dispatch = Annotated[DispatchImplementation, BeforeValidator(_named("dispatchers"))]
