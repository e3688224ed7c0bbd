"""Options in groups: a command takes records of options, and typer sees each field of them as an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each parameter that is a dataclass replaced by the fields of that dataclass.

    Fields are annotated as typer's parameters are. The command is called with the records.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    options: dict[str, Parameter] = {}
    for name, parameter in signature(command).parameters.items():
        of_name = _fields(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
        for each in of_name:
            assert each.name not in options, f"two options are called {each.name}"
            options[each.name] = each.replace(kind=Parameter.KEYWORD_ONLY)

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
        command(**values)

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    run.__annotations__ = {name: each.annotation for name, each in options.items()}
    run.__signature__ = signature(command).replace(parameters=list(options.values()))  # type: ignore[attr-defined]
    return run


def _fields(kind: type) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    ]
