"""Rendering of quantities. Values are kept in base units (bytes, seconds, FLOPs); only text is scaled."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}


def format_bytes(num_bytes: float | None) -> str:
    """Return `num_bytes` in binary units with three significant digits, "?" for unknown: `79.6 GiB`."""
    return "?" if num_bytes is None else _bytes_text(num_bytes, 3)


def format_bytes_apart(num_bytes: float, limit_bytes: float) -> tuple[str, str]:
    """Return an amount and its limit as `format_bytes` does, with as many more digits as tell the two apart.

    So a need is never shown as the very limit that it exceeds: `73.94 GiB` of `73.91 GiB`. Equal amounts stay equal.
    """
    for digits in range(3, 13):
        shown = _bytes_text(num_bytes, digits), _bytes_text(limit_bytes, digits)
        if shown[0] != shown[1] or num_bytes == limit_bytes:
            break
    return shown


def format_bandwidth(bytes_per_s: float | None) -> str:
    """Return a rate in decimal gigabytes per second, as data sheets print it: `450 GB/s`."""
    return "?" if bytes_per_s is None else f"{_three_digits(bytes_per_s / 1e9)} GB/s"


def format_share(share: float) -> str:
    """Return a share in whole percent: `85%`, from a hundred times the whole on `over 9999%`."""
    return f"{share:.0%}" if share < 100 else "over 9999%"


DAYS_OF_A_YEAR = 365
_MANY_DAYS = 10


def format_seconds(seconds: float | None) -> str:
    """Return a duration with three significant digits and the unit that suits it: `3.20 ms`."""
    if seconds is None:
        return "?"
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_digits(value: float) -> str:
    """Return a number with three significant digits and no exponent: `5,930` of 5930.4."""
    return f"{float(f'{value:.3g}'):,.15g}"


def format_days(days: float) -> str:
    """Return a number of days: `1 day`, `2.46 days`."""
    text = format_digits(days)
    return f"{text} day" if text == "1" else f"{text} days"


def format_run(seconds: float) -> str:
    """Return how long a training takes: `14 h 05 min`, `25.4 days`, `6.28 years`."""
    days = seconds / 86_400
    if days >= DAYS_OF_A_YEAR:
        return f"{format_digits(days / DAYS_OF_A_YEAR)} years"
    return format_days(days) if days >= _MANY_DAYS else format_seconds(seconds)


def format_count(count: float | None) -> str:
    """Return a count with three significant digits, scaled by thousands: `8.03 B` parameters, `12.4 k` tokens."""
    if count is None:
        return "?"
    count = float(f"{count:.3g}")
    for unit, factor in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(count) >= factor:
            return f"{_three_digits(count / factor)}{unit}"
    return f"{count:g}"


def format_flops(flops_per_s: float | None) -> str:
    """Return a rate of floating-point operations: `412 TFLOP/s`."""
    if flops_per_s is None:
        return "?"
    for unit, factor in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flops_per_s >= factor:
            return f"{_three_digits(flops_per_s / factor)} {unit}"
    return f"{flops_per_s / 1e6:.3g} MFLOP/s"


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as `70GiB`, `80 GB` or `1024`.

    Raises ValueError for anything else, with the units that are known.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is no amount of memory; write a number with B, KB, MB, GB, KiB, MiB or GiB")
    return math.ceil(float(match.group(1)) * _BYTE_UNITS[unit])


def _bytes_text(num_bytes: float, digits: int) -> str:
    size = abs(num_bytes)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{_significant(num_bytes / factor, digits)} {unit}"
    return f"{num_bytes:.0f} B"


def _three_digits(value: float) -> str:
    return _significant(value, 3)


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)) + 1e-9))
    return f"{value:.{decimals}f}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-2, 5`: neighbours joined."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def gpus(count: int) -> str:
    """Return a number of GPUs in words."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def broken_between_words(text: str, *, width: int, indent: int = 0, later_indent: int = 0) -> str:
    """Return a message in lines of at most `width`; names are never broken.

    The first line is `indent` shorter, for what stands before it; later ones begin with `later_indent` spaces.
    """
    import textwrap  # only for messages on a terminal

    return textwrap.fill(
        text,
        width=max(width, 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )[indent:]


def printable(text: str) -> str:
    """Return `text` with a "?" for each character that would steer a terminal: line ends and tabs stay.

    These are the control characters (C0, C1, DEL), those that turn the direction of writing, and what no encoding has.
    """
    return _STEERING.sub("?", text)


_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """Return `text` with everything that is not printable turned into a blank."""
    return "".join(character if character.isprintable() else " " for character in text)
