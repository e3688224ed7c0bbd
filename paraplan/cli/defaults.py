"""Answers that `paraplan config` keeps: defaults of options of `estimate` and `recommend`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paraplan.cli.terminal import show_note
from paraplan.errors import UsageError

HISTORY = "history"
"""Whether the user's own runs correct predictions: on, or off as --no-history has it."""
OPTIONS = ("profile", "nodes", "precision", "optimizer", "framework", "price", HISTORY)
"""Options that can be kept, by name."""
_OF = {
    "recommend": OPTIONS,
    "estimate": tuple(name for name in OPTIONS if name != "price"),
    "import": (HISTORY,),
    "verify": (HISTORY,),
}
_MACHINE = ("profile", "nodes")
_NAMED_MACHINE = {"--profile", "--gpu", "--num-gpus", "--nodes"}
_OTHER_SOURCE = {"--plan", "--import", "--like", "--help", "-h"}
"""Options with which a file says what is trained on what, and help."""


def config_path() -> Path:
    """Return where the defaults are kept: $PARAPLAN_CONFIG, or a file in the user's folder of settings."""
    named = os.environ.get("PARAPLAN_CONFIG")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "paraplan" / "config.json"


def read_defaults() -> dict[str, str]:
    """Return what is kept, by the options' names; nothing where there is no file.

    Raises `UsageError` for a file that is not what `paraplan config` writes.
    """
    path = config_path()
    try:
        kept = json.loads(path.read_bytes()[:100_000])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UsageError(f"cannot read {path}: {words}", hint="mend or delete it; paraplan config writes it") from None
    is_plain = isinstance(kept, dict) and all(isinstance(each, str) for each in kept.values())
    if not is_plain or not set(kept) <= set(OPTIONS):
        raise UsageError(
            f"{path} has other keys than {', '.join(OPTIONS)}, or values that are not text",
            hint="mend or delete it; paraplan config writes it",
        )
    return {name: kept[name] for name in OPTIONS if name in kept}


def defaults_of(args: Sequence[str]) -> dict[str, Any]:
    """Return the kept defaults of a command line as click's `default_map`, and say on stderr what they are.

    Options on the command line come first, and so do a plan file, $PARAPLAN_PROFILE and other words for machines.
    """
    given = {word.partition("=")[0] for word in args}
    if not args or args[0] not in _OF:
        return {}
    kept = {name: value for name, value in read_defaults().items() if name in _OF[args[0]]}
    is_without_history = kept.pop(HISTORY, "on") == "off"
    if given & _OTHER_SOURCE:
        kept = {}
    if given & _NAMED_MACHINE or os.environ.get("PARAPLAN_PROFILE"):
        kept = _without(kept, _MACHINE)
    kept = _without(kept, [name for name in kept if f"--{name}" in given])
    words = [f"--{name} {value}" for name, value in kept.items()]
    if is_without_history and "--no-history" not in given:
        words.append("--no-history")
    if words:
        show_note(f"{' '.join(words)}, as paraplan config keeps it")
    return {args[0]: kept | ({"no_history": True} if is_without_history else {})}


def _without(kept: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in kept.items() if name not in set(names)}
