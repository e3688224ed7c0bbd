"""What tells blocks apart: their settings, of which reading one may be refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paraplan.runtime.split.kinds import described


@dataclass
class PerLayer:
    heads: int
    head_dim: int

    def __getattribute__(self, name: str) -> Any:
        if name == "head_dim":
            raise RuntimeError("it varies across layers")
        return super().__getattribute__(name)


@dataclass(slots=True)
class Slotted:
    heads: int


def test_a_configuration_that_refuses_an_attribute_is_described_by_what_it_holds() -> None:
    assert described(PerLayer(4, 16)) == described(PerLayer(4, 16)) != described(PerLayer(4, 32))


def test_dataclasses_with_slots_are_described_by_their_fields() -> None:
    assert described(Slotted(4)) == described(Slotted(4)) != described(Slotted(8))
