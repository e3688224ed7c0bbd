"""`Record`: the frozen, validated value that everything between the layers is made of."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from paraplan.errors import WrongFieldError, near_names

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # which has no public name

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
        own = self.__dict__
        values = {name: own[name] for name in _field_names(type(self))}
        return type(self).model_validate(values | changes)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=indent)


@cache  # pydantic looks `model_fields` up anew each time, which took a third of a replacement
def _field_names(record: type[Record]) -> tuple[str, ...]:
    return tuple(record.model_fields)


class _Told(ModelMetaclass):
    """Makes records whose wrong fields are a `WrongFieldError`."""

    def __call__(self, *values: Any, **fields: Any) -> Any:
        """Return a record of these fields."""
        if values:
            raise _without_name(self, values[0])
        try:
            return super().__call__(*values, **fields)
        except ValidationError as error:
            raise _wrong_field(self, error) from None


class Spec(Record, metaclass=_Told):
    """A record that people write themselves: a wrong field is a `WrongFieldError`, one sentence and a way out."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated again. Raises `WrongFieldError` for what cannot be."""
        try:
            return super().replace(**changes)
        except ValidationError as error:
            raise _wrong_field(type(self), error) from None


def _without_name(record: type[Any], value: object) -> WrongFieldError:
    first = next(iter(record.model_fields))
    title = record.__name__
    return WrongFieldError(f"a {title} takes its fields by name, not {value!r}", hint=f"write {title}({first}=...)")


def _wrong_field(record: type[Any], error: ValidationError) -> WrongFieldError:
    first = error.errors()[0]
    name, kind, title = ".".join(map(str, first["loc"])), first["type"], record.__name__
    said = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind == "missing":
        return WrongFieldError(f"{title} needs {name}", hint=f"give {title}({name}=...)")
    if kind == "extra_forbidden":
        return WrongFieldError(f"{title} has no field {name!r}", hint=near_names(name, record.model_fields))
    if not name:
        return WrongFieldError(said, hint=f"help(paraplan.{title}) says what its fields are")
    wanted = said.replace("Input should be ", "it should be ")
    return WrongFieldError(
        f"{name}={first['input']!r} of a {title}: {wanted}", hint=f"help(paraplan.{title}) says what it means"
    )


def describe_fields(record: type[Any]) -> None:
    """Complete a record's signature, and add to its docstring the fields, each with its own sentence in the source.

    Records are completed when they are first used, and Python keeps no docstring of a field.
    """
    import ast
    import inspect
    import textwrap

    record.model_rebuild()
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    except (OSError, SyntaxError):  # a program without its sources
        return
    assert isinstance(body, ast.ClassDef)
    lines = []
    for line, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            default = record.model_fields[line.target.id]
            value = "" if default.is_required() else f" = {default.get_default(call_default_factory=True)!r}"
            lines.append(f"    {line.target.id}: {ast.unparse(line.annotation)}{value}")
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                lines.append(textwrap.indent(inspect.cleandoc(str(after.value.value)), " " * 8))
    record.__doc__ = "\n".join([inspect.cleandoc(record.__doc__ or ""), "", "Fields:", *lines])


class Source(Record):
    """Where the values of a record come from."""

    fields: tuple[str, ...] = ()
    """The values that it covers; none named: all that no other source of the record names."""
    source: str
    """Document, file or measurement."""
    source_kind: SourceKind
    """How good it is."""
