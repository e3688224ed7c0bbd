"""`Record`: the frozen, validated value that everything between the layers is made of."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

SourceKind = Literal["documented", "source code", "measured", "assumed", "memory"]
"""How good the source of a figure is: published by its maker or a paper, read in code, measured by somebody, taken from
something like it, or remembered and not verified."""


class Record(BaseModel):
    """A frozen pydantic model that refuses unknown fields.

    Units stand in the names of the fields: `_bytes`, `_s`, `_bytes_per_s`, `_flops`, `_flops_per_s`.
    Unknown is None.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings", defer_build=True
    )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated again (pydantic's `model_copy` validates nothing)."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate(values | changes)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=indent)


class Source(Record):
    """Where the values of a record come from."""

    fields: tuple[str, ...] = ()
    """The values that it covers; none named: all that no other source of the record names."""
    source: str
    """Document, file or measurement."""
    source_kind: SourceKind
    """How good it is."""
