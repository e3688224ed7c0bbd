"""`paraplan explain`: the package's pages in the terminal."""

from __future__ import annotations

import importlib.resources
import json
import re
import sys
from contextlib import nullcontext
from typing import Annotated, NamedTuple

import typer

from paraplan.cli.completion import topics
from paraplan.cli.options import JsonOption
from paraplan.cli.terminal import drawn_output, in_lines, make_console
from paraplan.errors import UsageError, near_names

app = typer.Typer(add_completion=False)

GROUPS = {
    "Start": ("tutorial", "models", "machines", "fine-tuning", "faq", "glossary"),
    "Use": (
        *("training", "launch", "submit", "checking", "ci", "export", "reports", "calibrate", "validate"),
        *("moving-from-torchrun", "moving-from-accelerate", "moving-from-deepspeed", "moving-from-megatron-lm"),
    ),
    "Understand": (
        *("decision-tree", "plans-and-ranks", "memory", "cost-model", "accuracy", "recommendations", "runtime"),
    ),
}
TOPICS = tuple(topic for topics in GROUPS.values() for topic in topics)
"""The pages in the order in which they are listed; `paraplan/docs/<topic>.md` holds each."""

_OPENS, _CLOSES = "<!-- ", " -->"
_MOST_SECTIONS = 3


class Topic(NamedTuple):
    """A page: `summary` is the comment that it begins with, `text` the Markdown below it."""

    name: str
    summary: str
    text: str


@app.command()
def explain(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC|WORD]",
            help="A page, a part of its name, or a word that a page explains; without it, the list.",
            autocompletion=topics,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a topic: how plans are chosen, priced and run, moving from other launchers, questions and answers.

    Example: paraplan explain plans-and-ranks
    """
    if topic is None:
        _print_list(as_json=as_json)
        return
    page = find_topic(topic)
    if as_json:
        typer.echo(json.dumps(page._asdict(), indent=2))
    elif sys.stdout.isatty():
        _print_formatted(page)
    else:
        typer.echo(page.text)


def find_topic(name: str) -> Topic:
    """Return the page of that name, else the sections whose headings have the word, else where pages use it.

    Raises `UsageError` for a word that no page has.
    """
    wanted = name.lower().removesuffix(".md").replace("_", "-").replace(" ", "-")
    begin = [topic for topic in TOPICS if wanted and f"-{topic}".find(f"-{wanted}") >= 0]
    found = [topic for topic in TOPICS if topic == wanted] or begin
    is_word = any(wanted in topic.split("-") for topic in found)
    sections = [] if is_word else _sections(name.lower(), only_headed=bool(found))
    if len(found) == 1 and not sections:
        return read_topic(found[0])
    if found and not sections:
        raise UsageError(f"there is no page {name!r}", hint=f"did you mean {' or '.join(found)}?")
    if not sections:
        raise UsageError(f"there is no page {name!r}, and none has the word", hint=near_names(wanted, TOPICS))
    return Topic(wanted, f"What the pages say of {name}.", "\n\n".join(sections))


def _sections(word: str, *, only_headed: bool) -> list[str]:
    """Return the sections whose heading has the word; else a line for each that uses it, none with `only_headed`."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])", re.IGNORECASE)
    headed, using = [], []
    for topic in ("glossary", *(name for name in TOPICS if name != "glossary")):
        for section in read_topic(topic).text.split("\n## ")[1:]:
            heading, _, text = section.partition("\n")
            if pattern.search(heading):
                headed.append(f"## {heading} ({topic})\n{text.rstrip()}")
            elif pattern.search(text):
                using.append(f"- paraplan explain {topic}: {heading}")
    return headed[:_MOST_SECTIONS] or (["\n".join(using)] if using and not only_headed else [])


def read_topic(name: str) -> Topic:
    """Return a page by its name."""
    text = importlib.resources.files("paraplan").joinpath("docs", f"{name}.md").read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    return Topic(name, first.removeprefix(_OPENS).removesuffix(_CLOSES), rest.rstrip())


def _print_list(*, as_json: bool) -> None:
    pages = [read_topic(name) for name in TOPICS]
    if as_json:
        typer.echo(json.dumps([{"name": page.name, "summary": page.summary} for page in pages], indent=2))
        return
    width = max(map(len, TOPICS))
    for page in pages:
        typer.echo(in_lines(f"{page.name:{width}}  {page.summary}", sys.stdout, later_indent=width + 2))
    typer.echo("\nRead one: paraplan explain TOPIC; or what is said of a word: paraplan explain WORD")


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
    is_long = page.text.count("\n") > console.height
    with drawn_output(), console.pager(styles=True) if is_long else nullcontext():
        console.print(text, width=min(console.width, 120))
