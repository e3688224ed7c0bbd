"""Trained parts of a tower for pictures, by the keys of tools that freeze it where nobody says otherwise."""

from __future__ import annotations

from paraplan.interop.fields import Fields


def full_but_towers(fields: Fields, *, tower: str, projector: str, language: str) -> tuple[str | None, list[str]]:
    """Return the words of `--train` for a full training by tools that freeze towers by default, and what to note.

    The keys are those that freeze a tower, its projector and the language model: ms-swift and LLaMA-Factory freeze the
    first two unless told otherwise. A model without towers trains whole by the same words. None trains all.
    """
    notes = []
    if fields.flag(language):
        notes.append(f"{language}: a frozen language model behind a tower that trains is not priced")
    trained = [word for key, word in ((projector, "projector"), (tower, "tower")) if fields.flag(key) is False]
    return None if len(trained) == 2 else "+".join(["text", *trained]), notes


def adapters_of_towers(fields: Fields, *, tower: str, projector: str, language: str) -> list[str]:
    """Return what to note of adapters where a file says that they reach a tower too."""
    fields.flag(language)
    reached = [key for key in (tower, projector) if fields.flag(key) is False]
    return [f"{key}: adapters beside the tower's layers are not priced" for key in reached]
