"""Write the table of options into the launcher's documentation, from torchrun's parser and ours.

    python scripts/launch_flags.py [--check] [FILE]

FILE is paraplan/docs/launch.md by default. With --check nothing is written: exit status 1 says that the table there is
not what the parsers of the installed torch and of this package give.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import torch
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


def main() -> int:
    """Write the table, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # they would be shown as defaults
    text = options.file.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = before + BEGIN + make_table() + END + after
    if options.check:
        if made != text:
            print(f"{options.file}: the table of options is another one; run scripts/launch_flags.py", file=sys.stderr)
        return int(made != text)
    options.file.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
