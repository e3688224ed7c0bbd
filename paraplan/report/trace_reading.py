"""Reading traces in Chrome's format: paraplan's predictions, and what torch.profiler exports."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any, NamedTuple

from pydantic import ValidationError

from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan

_GZIP = b"\x1f\x8b"


class TraceEvent(NamedTuple):
    """Something with a duration, in seconds; `process` is a pipeline rank in a prediction."""

    name: str
    category: str
    process: str
    start_s: float
    end_s: float
    arguments: dict[str, Any]


class Prediction(NamedTuple):
    """Prediction that a trace of paraplan holds."""

    plan: ParallelPlan
    step_time_s: float


class Trace(NamedTuple):
    """A trace: `rank` and `world_size` as the profiler wrote them, None where it did not know."""

    source: str
    events: tuple[TraceEvent, ...]
    rank: int | None
    world_size: int | None
    prediction: Prediction | None


def read_trace(data: bytes, *, source: str) -> Trace:
    """Return a trace from the bytes of its file, packed by gzip or not.

    Raises `PlanError` naming the file for what is no trace, and for a trace without anything that has a duration.
    """
    hint = "export one with torch.profiler's export_chrome_trace, or paraplan estimate --trace"
    text = _unpacked(data, source)
    try:
        document = json.loads(text)
    except ValueError as error:
        where = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "its text"
        raise PlanError(f"{source} is no JSON: at {where}; the file may be cut off", hint=hint) from None
    except RecursionError:
        raise PlanError(f"{source} is nested too deeply for a trace", hint=hint) from None
    head = document if isinstance(document, dict) else {}
    found = head.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(found, list):
        raise PlanError(f"{source} has no list traceEvents: it is no trace in Chrome's format", hint=hint)
    events = tuple(event for each in found if (event := _event(each)) is not None)
    if not events:
        raise PlanError(f"{source} has no events with a duration", hint=hint)
    rank, world_size = _ranks(head)
    return Trace(source, events, rank, world_size, _prediction(head, source))


def _unpacked(data: bytes, source: str) -> str:
    try:
        plain = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error):
        raise PlanError(f"{source} is packed by gzip and damaged or cut off", hint="copy or export it again") from None
    # torch writes names of kernels as they come; a broken character in one of them is no reason to stop.
    return plain.decode("utf-8", errors="replace")


def _event(each: Any) -> TraceEvent | None:
    """Return a complete event; what has no duration, or none that is a number, is passed over."""
    if not isinstance(each, dict) or each.get("ph") != "X":
        return None
    start, length = _number(each.get("ts")), _number(each.get("dur", 0))
    if start is None or length is None or length < 0:
        return None
    arguments = each.get("args")
    return TraceEvent(
        name=str(each.get("name", "")),
        category=str(each.get("cat", "")),
        process=str(each.get("pid", "")),
        start_s=start / 1e6,
        end_s=(start + length) / 1e6,
        arguments=arguments if isinstance(arguments, dict) else {},
    )


def _number(value: Any) -> float | None:
    if isinstance(value, str):  # some writers quote their numbers
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def _ranks(head: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return what the profiler wrote of the job."""
    job = head.get("distributedInfo")
    if not isinstance(job, dict):
        return None, None
    rank, world_size = job.get("rank"), job.get("world_size")
    return rank if isinstance(rank, int) else None, world_size if isinstance(world_size, int) else None


def _prediction(head: dict[str, Any], source: str) -> Prediction | None:
    own = head.get("paraplan")
    if not isinstance(own, dict):
        return None
    seconds = _number(own.get("step_time_s"))
    try:
        plan = ParallelPlan.model_validate(own.get("plan"))
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise PlanError(
            f"{source}: paraplan.plan{'.' + field if field else ''} is broken", hint="write it again"
        ) from None
    if seconds is None or seconds <= 0:
        raise PlanError(f"{source}: paraplan.step_time_s is no time", hint="write it again")
    return Prediction(plan, seconds)
