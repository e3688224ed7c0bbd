"""`paraplan explain`: the package's pages in the terminal."""

from __future__ import annotations

import importlib.resources
import json
import sys
from typing import Annotated, NamedTuple

import typer

from paraplan.cli.options import JsonOption
from paraplan.cli.terminal import make_console
from paraplan.errors import UsageError, near_names

app = typer.Typer(add_completion=False)

TOPICS = (
    *(
        "decision-tree",
        "plans-and-ranks",
        "fine-tuning",
        "training",
        "runtime",
        "memory",
        "cost-model",
        "recommendations",
        "reports",
    ),
    *("launch", "faq"),
    *("moving-from-torchrun", "moving-from-accelerate", "moving-from-deepspeed", "moving-from-megatron-lm"),
    *("export", "ci", "calibrate", "validate"),
)
"""The pages in the order in which they are listed; `paraplan/docs/<topic>.md` holds each."""

_OPENS, _CLOSES = "<!-- ", " -->"


class Topic(NamedTuple):
    """A page: `summary` is the comment that it begins with, `text` the Markdown below it."""

    name: str
    summary: str
    text: str


@app.command()
def explain(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="A page, or a part of its name; without it, the list.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a topic: how plans are chosen, priced and run, moving from other launchers, questions and answers.

    Example: paraplan explain plans-and-ranks
    """
    if topic is None:
        _print_list(as_json=as_json)
        return
    page = read_topic(topic)
    if as_json:
        typer.echo(json.dumps(page._asdict(), indent=2))
    elif sys.stdout.isatty():
        _print_formatted(page)
    else:
        typer.echo(page.text)


def read_topic(name: str) -> Topic:
    """Return a page by its name, or by a part of it that no other has. Raises `UsageError` for any other name."""
    wanted = name.lower().removesuffix(".md").replace("_", "-").replace(" ", "-")
    found = [topic for topic in TOPICS if topic == wanted] or [topic for topic in TOPICS if wanted and wanted in topic]
    if len(found) != 1:
        hint = f"did you mean {' or '.join(found)}?" if 1 < len(found) <= 4 else near_names(wanted, TOPICS)
        raise UsageError(f"there is no page {name!r}", hint=hint)
    text = importlib.resources.files("paraplan").joinpath("docs", f"{found[0]}.md").read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    return Topic(found[0], first.removeprefix(_OPENS).removesuffix(_CLOSES), rest.rstrip())


def _print_list(*, as_json: bool) -> None:
    pages = [read_topic(name) for name in TOPICS]
    if as_json:
        typer.echo(json.dumps([{"name": page.name, "summary": page.summary} for page in pages], indent=2))
        return
    width = max(map(len, TOPICS))
    for page in pages:
        typer.echo(f"{page.name:{width}}  {page.summary}")
    typer.echo("\nRead one: paraplan explain TOPIC")


def _print_formatted(page: Topic) -> None:
    from rich.markdown import Markdown
    from rich.theme import Theme

    # rich's own styles put code on black, which a light terminal is not.
    plain = Theme(
        {"markdown.code": "cyan", "markdown.h2": "bold", "markdown.h3": "bold", "markdown.table.border": "dim"}
    )
    console = make_console(theme=plain)
    # Longer lines than these are hard to read.
    text = Markdown(page.text, hyperlinks=False, code_theme="ansi_dark")
    console.print(text, width=min(console.width, 120))
