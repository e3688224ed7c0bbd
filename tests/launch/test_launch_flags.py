"""The table of options in the documentation, made from the parsers of torchrun and of the launcher."""

from __future__ import annotations

from script_module import load_script
from torch.distributed.run import get_args_parser


def test_every_option_of_torchrun_is_in_the_table_and_is_ours_too() -> None:
    script = load_script("launch_flags")
    made, written = script.make_table(), script.DOCUMENT.read_text(encoding="utf-8")
    rows = {line.split(" | ")[0]: line for line in made.splitlines() if line.startswith("| `")}
    for action in get_args_parser()._actions:
        if action.dest == "help":
            continue
        row = rows[f"| {script._names(action)}"]
        assert row.split(" | ")[1:3] == ["yes", "yes"]
        assert all(name in written for name in action.option_strings if "_" not in name)
