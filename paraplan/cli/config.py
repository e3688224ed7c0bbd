"""`paraplan config`: six questions, asked once, whose answers are the defaults of `estimate` and `recommend`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import typer

from paraplan.api.machines import load_cluster
from paraplan.api.workloads import OWN_RUNTIME, check_framework, optimizer_name
from paraplan.cli.defaults import HISTORY, OPTIONS, config_path, read_defaults
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.cli.options import MOST_RANKS, JsonOption, PrecisionName, amount, count
from paraplan.errors import ParaplanError, UsageError, near_names

app = typer.Typer(add_completion=False)


class _Question(NamedTuple):
    text: str
    """Nothing where it is not asked."""
    usual: str
    """Default where nothing is kept, in words."""
    check: Callable[[str], object]


def _switch(value: str) -> str:
    if value not in ("on", "off"):
        raise UsageError(f"history={value} is neither on nor off", hint="history=off predicts without your own runs")
    return value


def _precision(value: str) -> str:
    if value not in list(PrecisionName):
        raise UsageError(f"there is no precision {value!r}", hint=near_names(value, list(PrecisionName)))
    return value


_QUESTIONS: dict[str, _Question] = {
    "profile": _Question("Machine (8xh100, dgx-a100, p5.48xlarge, a file)", "this machine", load_cluster),
    "nodes": _Question("How many of them", "1", count(1, MOST_RANKS)),
    "precision": _Question(f"Precision ({', '.join(PrecisionName)})", "bf16", _precision),
    "optimizer": _Question("Optimizer (adamw, adamw_8bit, ...)", "adamw", optimizer_name),
    "framework": _Question("Framework (torchtitan, deepspeed, megatron-core, ...)", OWN_RUNTIME, check_framework),
    HISTORY: _Question("", "on", _switch),
    "price": _Question("Price of a GPU-hour, in any currency", "none", amount(0, 1e18)),
}


@app.command()
def config(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...", help=f"Keep these without asking: {', '.join(OPTIONS)}. NAME= forgets one."
        ),
    ] = None,
    *,
    show: Annotated[bool, typer.Option("--show", help="Show what is kept, and where.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep defaults: machine, number of machines, precision, optimizer, framework, price, history.

    history=off predicts without what your own runs said.

    Asked once on a terminal. The command line, $PARAPLAN_PROFILE and plan files come before what is kept.

    Example: paraplan config profile=8xh100 nodes=2 price=2.5
    """
    if reset:
        _forget()
    kept = {} if reset else read_defaults()
    if changes:
        kept = _changed(kept, changes)
        _write(kept)
    elif not (show or reset or as_json):
        kept = _asked(kept)
        _write(kept)
    if as_json:
        typer.echo(json.dumps({"path": str(config_path()), "defaults": kept}, indent=2))
        return
    typer.echo(f"{config_path()}:" if kept else f"nothing is kept in {config_path()}")
    for name, value in kept.items():
        typer.echo(f"  {name:<10} {value}")


def _checked(name: str, value: str) -> str:
    """Return a value that the option takes. Raises `ParaplanError` for any other."""
    try:
        _QUESTIONS[name].check(value)
    except typer.BadParameter as error:
        raise UsageError(f"{name}: {error.message}") from None
    return value


def _changed(kept: Mapping[str, str], changes: list[str]) -> dict[str, str]:
    new = dict(kept)
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.removeprefix("--")
        if name not in OPTIONS or not equals:
            raise UsageError(f"{change!r} is not NAME=VALUE", hint=near_names(name, OPTIONS))
        new.pop(name, None)
        if value:
            new[name] = _checked(name, value)
    return {name: new[name] for name in OPTIONS if name in new}


def _asked(kept: Mapping[str, str]) -> dict[str, str]:
    if not sys.stdin.isatty():
        raise UsageError(
            "questions need a terminal",
            hint="paraplan config profile=8xh100 keeps an answer; --show shows what is kept",
        )
    typer.echo("Enter keeps what stands in brackets; a dash forgets it.")
    answers = {HISTORY: kept[HISTORY]} if HISTORY in kept else {}  # which is not asked
    for name, question in ((name, each) for name, each in _QUESTIONS.items() if each.text):
        shown = kept.get(name, question.usual)
        while True:
            answer = str(typer.prompt(question.text, default=shown)).strip()
            if answer in ("-", question.usual) or (answer == shown and name not in kept):
                break
            try:
                answers[name] = _checked(name, answer)
                break
            except ParaplanError as error:
                typer.echo(f"  {error.message}" + (f" ({error.hint})" if error.hint else ""), err=True)
    return answers


def _forget() -> None:
    path = config_path()
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return  # nothing can be kept below a file
    except OSError as error:
        raise UsageError(f"cannot delete {path}: {error.strerror}", hint="delete it yourself") from None


def _write(kept: Mapping[str, str]) -> None:
    path = config_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="PARAPLAN_CONFIG names another file") from None
    write_beside_and_rename(path, json.dumps(dict(kept), indent=2) + "\n")
