"""What files of other tools say of towers for pictures."""

from __future__ import annotations

import pytest

from paraplan.interop.fields import Fields
from paraplan.interop.sources.towers import adapters_of_towers, full_but_towers

KEYS = {"tower": "freeze_vit", "projector": "freeze_aligner", "language": "freeze_llm"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "text"),
        ({"freeze_vit": True}, "text"),
        ({"freeze_llm": False}, "text"),
        ({"freeze_vit": True, "freeze_aligner": False}, "text+projector"),
        ({"freeze_vit": False, "freeze_aligner": False}, None),
    ],
)
def test_a_full_training_leaves_out_what_is_frozen(fields: dict[str, object], words: str | None) -> None:
    assert full_but_towers(Fields(fields, source="file.yaml"), **KEYS) == (words, [])


def test_what_is_not_priced_of_towers_is_noted() -> None:
    _, notes = full_but_towers(Fields({"freeze_llm": True}, source="file.yaml"), **KEYS)
    assert notes == ["freeze_llm: a frozen language model behind a tower that trains is not priced"]
    assert adapters_of_towers(Fields({"freeze_vit": False}, source="file.yaml"), **KEYS) == [
        "freeze_vit: adapters beside the tower's layers are not priced"
    ]
