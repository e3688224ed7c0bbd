"""`paraplan launch`: hand the words of the command line to the launcher, as they are."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand

from paraplan.launch.handover import become_launcher

_VALUES = {
    "rdzv_backend": ("c10d", "static", "etcd-v2", "etcd"),
    "start_method": ("spawn", "fork", "forkserver"),
    "nproc_per_node": ("gpu", "cpu", "auto"),
}
"""Words that options of torchrun take whose parser does not list them."""


class RawCommand(TyperCommand):
    """A command whose words, --help and -- too, are parsed by the launcher: torchrun's rules differ from click's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep `args` as they are."""
        ctx.args = list(args)
        return []

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the launcher's options that begin so, and the values of the option before; a shell adds files."""
        from paraplan.launch.parser import known_options

        click = TyperCommand.__mro__[1].__module__.rpartition(".")[0]  # typer's own from 0.29 on
        item = importlib.import_module(f"{click}.shell_completion").CompletionItem
        actions = known_options()
        before = actions.get(ctx.args[-1]) if ctx.args else None
        values = None if before is None else before.choices or _VALUES.get(before.dest)
        if values is not None:
            return [item(str(one)) for one in values if str(one).startswith(incomplete)]
        if not incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [item(option) for option in sorted(actions) if option.startswith(incomplete)]


app = typer.Typer()


@app.command(cls=RawCommand)
def launch(context: typer.Context) -> None:
    """Start the ranks of a training script; takes torchrun's options, and --plan plan.json."""
    become_launcher(context.args)
