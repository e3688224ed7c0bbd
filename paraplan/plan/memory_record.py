"""The parts of a rank's memory, as estimates, traces and fake launches name them."""

from __future__ import annotations

from paraplan.records import Record

MEMORY_PARTS = (
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_state_bytes",
    "activation_bytes",
    "workspace_bytes",
)


class MemoryParts(Record):
    """Bytes of one rank at the moment when it holds most, by parts that sum to `total_bytes`.

    A record with more fields names those that stand before the parts in a record of their own, which it lists after
    this one: JSON has the fields of the last base first.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    activation_bytes: int
    workspace_bytes: int
    total_bytes: int
