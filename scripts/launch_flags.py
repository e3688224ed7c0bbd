"""Write the table of options into the launcher's documentation, from torchrun's parser and ours.

    python scripts/launch_flags.py

A test says whether it has every option of the installed torch.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
from marked import between
from torch.distributed.run import get_args_parser

from paraplan.launch.parser import build_parser

DOCUMENT = Path(__file__).parent.parent / "paraplan" / "docs" / "launch.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"

DIFFERENCES = {
    "nnodes": "default: the plan's, or srun's or mpirun's nodes",
    "nproc_per_node": "default: the plan's, or one for each GPU (torchrun: 1)",
    "start_method": "`exec` is new: torchrun's way of starting; the default forks ranks with torch imported",
    "redirects": "local ranks of two digits too (`10:3`)",
    "tee": "local ranks of two digits too (`10:3`)",
    "shutdown_timeout": "holds however a job ends (torchrun: 30 s when a rank fails)",
    "log_dir": "default: a new folder in `./paraplan-runs`",
    "rdzv_endpoint": ("default for several nodes: from srun's or mpirun's variables"),
    "node_rank": "default for several nodes: from srun's or mpirun's variables",
    "master_addr": "default for several nodes: from srun's or mpirun's variables",
}
"""What an option of torchrun's does here beyond torchrun, by its name in the parser."""


def make_table() -> str:
    """Return the table in Markdown: an option a row, torchrun's first, with PET_ variable and default."""
    torchs = {action.dest: action for action in get_args_parser()._actions if action.dest != "help"}
    ours = {action.dest: action for action in build_parser()._actions if action.dest != "help"}
    rows = [
        f"Made by `scripts/launch_flags.py` from the parsers of torch {torch.__version__.partition('+')[0]} "
        "and paraplan.",
        "",
        "| option | torchrun | paraplan launch | default | what differs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for dest in [*torchs, *(dest for dest in ours if dest not in torchs)]:
        theirs, own = torchs.get(dest), ours.get(dest)
        action = own if own is not None else theirs
        assert action is not None
        names = _names(action)
        note = DIFFERENCES.get(dest, "")
        if theirs is None:
            note = " ".join((action.help or "").split())
        same = _spellings(theirs) <= _spellings(own)
        rows.append(
            f"| {names} | {'yes' if theirs is not None else '-'} | {'yes' if same and own is not None else 'NO'} | "
            f"{_default(theirs if theirs is not None else action)} | {_escaped(note)} |"
        )
    return "\n".join(rows) + "\n"


def _spellings(action: argparse.Action | None) -> set[str]:
    return set(action.option_strings) if action is not None else set()


def _names(action: argparse.Action) -> str:
    """Return the option as it is written; the spelling with underscores goes without saying."""
    names = [name for name in action.option_strings if "_" not in name]
    return ", ".join(f"`{name}`" for name in names) or f"`{action.dest}`"


def _default(action: argparse.Action) -> str:
    if not action.option_strings or action.default in (None, "", [], argparse.SUPPRESS):
        return ""
    return "off" if action.default is False else f"`{action.default}`"


def _escaped(text: str) -> str:
    return re.sub(r"([|<])", r"\\\1", text).replace("%%", "%")


if __name__ == "__main__":
    for variable in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[variable]  # they would be shown as defaults
    DOCUMENT.write_text(between(DOCUMENT.read_text(encoding="utf-8"), BEGIN, END, make_table()), encoding="utf-8")
