"""The words that options take, and single options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paraplan.cli import completion
from paraplan.units import parse_bytes

HARDWARE_PANEL, TRAINING_PANEL, PLAN_PANEL, SEARCH_PANEL = "Hardware", "Training", "Plan", "Search"


class PrecisionName(StrEnum):
    """Values of --precision."""

    bf16 = "bf16"
    bf16_pure = "bf16-pure"
    fp16 = "fp16"
    fp32 = "fp32"
    fp8 = "fp8"
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"


class Fp8RecipeName(StrEnum):
    """Values of --fp8-recipe."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    rowwise = "rowwise"
    rowwise_with_gw_hp = "rowwise_with_gw_hp"
    blockwise = "blockwise"


class LinearPrecisionName(StrEnum):
    """Values of --linear-precision."""

    as_training = "16bit"
    fp8 = "fp8"
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"


class LossName(StrEnum):
    """Values of --loss."""

    plain = "plain"
    chunked = "chunked"
    liger = "liger"
    cut = "cut"


class AttentionName(StrEnum):
    """Values of --attention."""

    flash = "flash"
    sdpa = "sdpa"
    eager = "eager"


class RecomputeName(StrEnum):
    """Values of --recompute."""

    none = "none"
    selective = "selective"
    selective_ops = "selective_ops"
    full = "full"


class ScheduleChoice(StrEnum):
    """Values of --schedule."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved_1f1b"
    zero_bubble = "zero_bubble"


class ObjectiveName(StrEnum):
    """Values of --objective."""

    throughput = "throughput"
    fastest = "fastest"
    memory = "memory"
    cost = "cost"
    simplicity = "simplicity"


class FindName(StrEnum):
    """Values of --find."""

    fewest_gpus = "fewest-gpus"
    by_date = "by-date"
    largest_model = "largest-model"
    largest_batch = "largest-batch"
    longest_sequence = "longest-sequence"


class LinkName(StrEnum):
    """Values of --link."""

    pcie = "pcie"
    nvlink_pairs = "nvlink-pairs"
    nvswitch = "nvswitch"
    no_p2p = "no-p2p"


class OffloadName(StrEnum):
    """Values of --offload."""

    none = "none"
    optimizer = "optimizer"
    parameters = "parameters"


def one_of(values: type[StrEnum]) -> str:
    """Return the values of an option for its help, whose column for them is too narrow on 80 columns."""
    return ", ".join(values)


def _beyond(text: str | float, found: float, least: float, most: float) -> str:
    """Return what is wrong with a number, and the limits: whole ones in digits."""
    low, high = (f"{limit:,}" if isinstance(limit, int) and limit < 1e12 else f"{limit:g}" for limit in (least, most))
    if found < least:
        return f"{str(text)!r} is below the least, {low}: use {low} to {high}"
    if found > most:
        return f"{str(text)!r} is above the most, {high}: use {low} to {high}"
    return f"{str(text)!r} is not a number: use {low} to {high}"


def count(least: int, most: int) -> Callable[[str | int], int]:
    """Return the parser of a whole number from `least` to `most`: help shows `N`, errors the limits."""

    def read(value: str | int) -> int:
        text = str(value)  # a default is a number already
        is_whole = text.isascii() and text.removeprefix("-").isdigit()
        if not is_whole:
            raise typer.BadParameter(f"{text!r} is not a whole number from {least} to {most:,}")
        if not least <= int(text) <= most:
            raise typer.BadParameter(_beyond(text, int(text), least, most))
        return int(text)

    return read


def memory_size(text: str | int) -> int:
    """Return the bytes of an amount of memory: 128GiB, 512GB."""
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def length(text: str | int) -> int:
    """Return the tokens of a sequence: 8192, or 8k and 1M, which people mean as 8 x 1,024 and 1,024 x 1,024."""
    words = str(text).strip()
    unit = {"k": 1024, "m": 1024**2}.get(words[-1:].lower())
    is_short = unit is not None and words[:-1].isascii() and words[:-1].isdigit()
    return count(1, MOST_TOKENS)(str(unit * int(words[:-1])) if is_short and unit else words)


_POWERS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def amount(least: float, most: float) -> Callable[[str | float], float]:
    """Return the parser of a number such as 1e12, 1T, 300B, 2.5 or $2.5."""

    def read(value: str | float) -> float:
        words = str(value).strip().lower().removeprefix("$")
        power = _POWERS.get(words[-1:], 1.0)
        try:
            found = float(words[:-1] if power > 1 else words) * power
        except ValueError:
            found = float("nan")
        if not least <= found <= most:
            example = "1e12 or 1T" if most >= 1e12 else f"{min(least + 0.5, most):g}"
            raise typer.BadParameter(f"{_beyond(value, found, least, most)}, such as {example}")
        return found

    return read


# Far beyond any machine or text, and small enough for sums in 64 bits.
MOST_RANKS, MOST_TOKENS, MOST_SEQUENCES = 10**6, 10**9, 10**9

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json or a folder with one, a bundled name (llama-3-8b), a hub id (owner/name), or "
        "file.py:factory.",
        autocompletion=completion.models,
    ),
]
OptionalModelArgument = Annotated[str | None, *ModelArgument.__metadata__]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="A hardware profile in place of this machine.",
        autocompletion=completion.machines,
        rich_help_panel=HARDWARE_PANEL,
    ),
]
GpusPerNodeOption = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node",
        parser=count(1, MOST_RANKS),
        metavar="N",
        help="Use only so many GPUs of each machine.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        parser=count(1, MOST_RANKS),
        metavar="N",
        help="Number of such machines.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]


def stack_words(text: str) -> str:
    """Return the settings of a stack in their usual form."""
    from paraplan.api.workloads import stack_words as words  # records of trainings, which most commands do without

    return words(text)


StackOption = Annotated[
    str,
    typer.Option(
        "--stack",
        metavar="SETTINGS",
        parser=stack_words,
        autocompletion=completion.stack_settings,
        help="What the framework is told beside all this: dispatcher=deepep,etp=1,cuda_graphs=layers; a name alone "
        "stands for yes.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Predict with constants that paraplan calibrate --runs fitted.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
