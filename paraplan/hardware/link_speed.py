"""Speed of collectives on each kind of link: figures of `profiles/links.json`, each with its source."""

from __future__ import annotations

from pydantic import Field

from paraplan.errors import ProfileError, near_names
from paraplan.hardware.profile_json import read_object, validated
from paraplan.hardware.profiles import Collective
from paraplan.records import Record
from paraplan.resources import profiles_folder


class SwitchReduction(Record):
    """An all-reduce that the switch itself sums (NVLink SHARP): S bytes cross each GPU's links once, whatever n.

    `efficiency` is that crossing's share of the links' payload; NCCL takes this way from `min_ranks` ranks on.
    """

    efficiency: float = Field(gt=0, le=1)
    min_ranks: int = Field(gt=1)


class LinkSpeed(Record):
    """One kind of link: the share of its payload that collectives of large messages reach on the bus.

    A message of S bytes takes `latency_s` more than its bytes, and its bytes count as S + sqrt(S * `ramp_bytes`):
    bandwidth grows with the message over several powers of two, slower than a fixed start-up time explains.
    `send_ramp_bytes` is that of a send to one neighbour where it differs.
    `tree_share` is what an all-reduce by trees keeps of the bus bandwidth of a ring.
    """

    kind: str
    title: str
    bus_efficiency: dict[Collective, float]
    latency_s: float = Field(ge=0)
    ramp_bytes: int = Field(ge=0)
    send_ramp_bytes: int | None = Field(default=None, ge=0)
    tree_share: float = Field(gt=0, le=1)
    switch_reduction: SwitchReduction | None = None
    source: str
    pair_bytes_per_s: float | None = Field(default=None, gt=0)
    """Measured copy rate between two GPUs of a slow host, one direction; None for links that need no host."""
    pair_source: str | None = None
    """Who measured it."""

    def ramp_of(self, collective: Collective) -> int:
        """Return the ramp of a collective, in bytes."""
        is_send = collective == "send_recv" and self.send_ramp_bytes is not None
        return self.send_ramp_bytes or 0 if is_send else self.ramp_bytes


class LinkSpeedTable(Record):
    """All kinds of links. `tree_source` says where the shares of trees are from."""

    kinds: tuple[LinkSpeed, ...]
    tree_source: str

    def speed(self, kind: str) -> LinkSpeed:
        """Return the figures of a kind of link; raise `ProfileError` for a kind that the table lacks."""
        for speed in self.kinds:
            if speed.kind == kind:
                return speed
        raise ProfileError(
            f"no figures for links of kind {kind!r}", hint=near_names(kind, [each.kind for each in self.kinds])
        )


def load_link_speeds() -> LinkSpeedTable:
    """Return the table of the bundled profiles."""
    path = profiles_folder() / "links.json"
    return validated(LinkSpeedTable, read_object(path), where=str(path))
