"""The launcher's words on stderr: errors of the user, and the report of a job that failed, in at most ten lines."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from paraplan.errors import ParaplanError
from paraplan.launch.faults import collectives
from paraplan.launch.faults.collectives import Whereabouts, find_timeout
from paraplan.launch.faults.failures import Cause, NodeFailure, RankFailure, first_failure
from paraplan.launch.faults.gpu_errors import abort_reason, advice
from paraplan.launch.ranks import bootstrap
from paraplan.launch.ranks.limits import MemoryKillScope, advice_on_limits
from paraplan.launch.ranks.spawning import signal_name
from paraplan.launch.ranks.stacks import is_library
from paraplan.launch.torch_private import step_hooks
from paraplan.launch.torch_private.texts import OUT_OF_GPU_MEMORY
from paraplan.units import broken_between_words, format_bytes, printable, ranks_in_words

MAX_REPORT_LINES = 10
_MAX_LINE = 200
_MAX_PLACES = 3
_FULL_BYTES = 1 << 20  # for each rank
_TIMED_OUT = "a collective timed out"
_ERROR_WORDS = ("error: ", "hint: ")
_SIGNALS_IN_WORDS = {
    **dict.fromkeys(("SIGSEGV", "SIGFPE"), "a crash in native code"),
    **dict.fromkeys(("SIGKILL", "SIGTERM"), "from outside, or by itself"),
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGABRT": "it aborted itself",
}


@dataclass(frozen=True)
class ReportContext:
    """The circumstances of a failure that the report tells: where it happened, and what is known of the job.

    `coordinates` gives a global rank's place on the axes of the plan, empty without a plan.
    `elapsed_s` counts from the start of the ranks to the first failure. `log_folder` is None where none is kept.
    `memory_kill` says where the kernel has killed a process for want of host memory since the ranks started.
    `is_host_gone` says that the node in whose store the others wrote cannot be reached any more.
    `predicted_peak_bytes` is what the plan expects a GPU to hold at most, `smaller_plan` another plan that needs less,
    in words. `where` is where ranks of this node stood that did not fail by themselves, `places_elsewhere` says it of
    those of other nodes.
    """

    hostname: str
    elapsed_s: float | None = None
    coordinates: Mapping[str, int] | None = None
    log_folder: str | None = None
    memory_kill: MemoryKillScope | None = None
    predicted_peak_bytes: int | None = None
    num_nodes: int = 1
    is_host_gone: bool = False
    smaller_plan: str | None = None
    where: Whereabouts = field(default_factory=Whereabouts)
    stops: tuple[str, ...] = ()
    """A sentence for each other node whose launcher was stopped or is gone."""
    places_elsewhere: tuple[str, ...] = ()
    free_bytes: int | None = None
    """Room on the disk of the logs; None where it is not known."""
    became: str = "had ended well"
    """The end of the ranks of this node where none of them failed."""


def say(text: str) -> None:
    """Write one line of the launcher's own to stderr."""
    write_report(f"paraplan: {text}\n")


def write_report(text: str) -> None:
    """Write lines of the launcher's own to stderr; a terminal gets them broken between words, each as wide as it is.

    A disk that is full or a reader that is gone ends no job: what cannot be written is left out.
    """
    text = printable(text)
    with suppress(OSError):
        if sys.stderr.isatty():
            text = fit_to_width(text, os.get_terminal_size(sys.stderr.fileno()).columns)
        sys.stderr.write(text)
        sys.stderr.flush()


def fit_to_width(text: str, width: int) -> str:
    """Return lines of the launcher's own in at most `width` columns: what is broken goes on further to the right.

    The lines of an error go on at the left, as those of every command do. 0: a terminal that says nothing.
    """
    lines = []
    for line in text.splitlines() if width else ():
        indent = len(line) - len(line.lstrip())
        later_indent = 0 if line.startswith(_ERROR_WORDS) else indent + 4
        words = broken_between_words(line[indent:], width=width, indent=indent, later_indent=later_indent)
        lines.append(" " * indent + words if len(line) > width else line)
    return "".join(f"{line}\n" for line in lines) if lines else text


def render_error(error: ParaplanError) -> str:
    """Return what was wrong and what to do, as every command of paraplan prints it."""
    return f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")


def render_failures(failures: Sequence[RankFailure], context: ReportContext) -> str:
    """Return the report of a failed job: the first failure, what became of the other ranks, and the error itself."""
    first = first_failure(failures)
    if first.cause is Cause.STOPPED and context.stops:  # before a rank noticed that those of another node are gone
        return _render([f"the job ends: {'; '.join(context.stops)}", *_ends_here(failures, context)])
    is_elsewhere = _is_elsewhere(first, context)
    timeouts = _describe_timeouts(first, failures, context)
    head = [_headline(first, failures, context)]
    if timeouts is not None:
        head = [timeouts, *[*context.where.describe(), *context.places_elsewhere][:_MAX_PLACES]]
    elif is_elsewhere:
        says = "; ".join(context.stops) or (
            "the node that hosts the rendezvous is gone" if context.is_host_gone else "see the launcher of another node"
        )
        head.append(f"no rank of this node failed first: {says}")
    elif first.cause is Cause.COMMUNICATION and context.where.ended:
        head.append(_describe_ended(first, context))
    if first.record is not None and first.record.user_hint:
        head.append(f"hint: {first.record.user_hint}")
    if first.record is not None and first.record.is_out_of_gpu_memory:
        head += _memory_advice(first.record.message, context)
    else:
        said = "\n".join([first.record.message if first.record else "", *first.log_tail])
        hint = advice(said) or advice_on_limits(said)
        head += [f"hint: {hint}"] if hint and timeouts is None else []
    head += _full_disk(first, context, num_ranks=len(failures) + len(context.where.ended))
    head.append(_where(first, context))
    alike = _killed_alike(first, failures)
    others = [failure for failure in failures if failure not in alike]
    if others:
        head.append(_consequence(others))
    if context.log_folder:
        head.append(f"logs: {context.log_folder}")
    return _render([*head, *_evidence(first, MAX_REPORT_LINES - len(head))])  # so that the error is the last line


def _full_disk(first: RankFailure, context: ReportContext, *, num_ranks: int) -> list[str]:
    """Return that the disk of the logs is full where a rank that writes to it ended by an error it could not record."""
    left = context.free_bytes  # some room is free again by now: each rank's marks of steps are removed
    if left is None or left >= num_ranks * _FULL_BYTES or first.record is not None or first.exit.code <= 0:
        return []
    where = context.log_folder or "the temporary folder"
    return [f"hint: the disk of {where}, to which ranks write, is full or nearly so: {format_bytes(left)} left"]


def _render(lines: Sequence[str]) -> str:
    return "".join(f"paraplan: {line}\n" if index == 0 else f"  {line}\n" for index, line in enumerate(lines))


def _ends_here(failures: Sequence[RankFailure], context: ReportContext) -> list[str]:
    """Return what became of this node's ranks where the cause is elsewhere, and where their logs are."""
    logs = [f"logs: {context.log_folder}"] if context.log_folder else []
    became = _consequence(failures) if failures else f"all ranks {context.became}"
    return [f"on host {context.hostname} {became}", *logs]


def describe_failures(failures: Sequence[RankFailure], *, num_nodes: int) -> str:
    """Return the failure that the others follow from in one line."""
    if not failures:
        return "ranks have ended"
    return _headline(first_failure(failures), failures, ReportContext(hostname="", num_nodes=num_nodes))


def _headline(first: RankFailure, failures: Sequence[RankFailure], context: ReportContext) -> str:
    is_elsewhere = _is_elsewhere(first, context)
    verb = "lost a connection" if is_elsewhere else "failed first" if len(failures) > 1 else "failed"
    alike = _killed_alike(first, failures)
    if len(alike) > 1:
        what = describe_exit(first.exit.code) if context.memory_kill is None else _what_happened(first, context)
        return f"{ranks_in_words([one.rank for one in alike])} {verb}: each {what}"
    return f"rank {first.rank} {verb}: {_what_happened(first, context)}"


def _killed_alike(first: RankFailure, failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the ranks that the same signal has killed as the first: neither is the cause of the other's end."""
    if first.record is not None or first.exit.code >= 0 or first.cause is not Cause.OWN_ERROR:
        return [first]
    alike = (None, first.cause, first.exit.code)
    return [failure for failure in failures if (failure.record, failure.cause, failure.exit.code) == alike]


def _describe_ended(first: RankFailure, context: ReportContext) -> str:
    """Return which ranks had ended well, and the collective in which one waited for them."""
    calls = context.where.calls.get(first.rank)
    call = calls and calls.waits_in(has_failed=True)
    which = f" with {collectives.describe_call(call, calls.groups.get(call.group, ()))}" if calls and call else ""
    ended = ranks_in_words(context.where.ended)
    return f"{ended} had ended with exit code 0, and rank {first.rank} went on{which}"


def _is_elsewhere(first: RankFailure, context: ReportContext) -> bool:
    """Whether the rank that failed first here did so because of a rank of another node."""
    return context.num_nodes > 1 and first.cause is Cause.COMMUNICATION


def _describe_timeouts(first: RankFailure, failures: Sequence[RankFailure], context: ReportContext) -> str | None:
    is_own = first.cause is Cause.OWN_ERROR
    timeouts = None if is_own else collectives.describe_timeouts(failures, context.where.calls)
    return None if timeouts is None else f"{_TIMED_OUT}: {timeouts}"


def as_node_failure(failures: Sequence[RankFailure], context: ReportContext) -> NodeFailure:
    """Return how the ranks of this node failed, for the other nodes."""
    first = first_failure(failures)
    return NodeFailure(
        host=context.hostname,
        rank=first.rank,
        cause=first.cause,
        time_ns=first.time_ns,
        exit_status=first.exit_status,
        what=_describe_timeouts(first, failures, context) or _what_happened(first, context),
        evidence=tuple(_evidence(first, MAX_REPORT_LINES - 3)),
        places=tuple(context.where.describe()[:_MAX_PLACES]),
    )


def render_failure_elsewhere(first: NodeFailure, failures: Sequence[RankFailure], context: ReportContext) -> str:
    """Return the report of a job whose first failure was on another node, with what became of this node's ranks."""
    head = [f"rank {first.rank} failed first, on host {first.host}: {first.what}"]
    if first.what.startswith(_TIMED_OUT):  # who waited is at no fault
        places = [*context.where.describe(), *context.places_elsewhere]
        head = [f"on host {first.host} {first.what}", *places[:_MAX_PLACES]]
    head += _ends_here(failures, context)
    return _render([*head, *_last_lines(list(first.evidence), MAX_REPORT_LINES - len(head))])


def describe_exit(code: int) -> str:
    """Return a rank's exit in words: `exit code 3`, `killed by SIGSEGV (a crash in native code)`."""
    if code >= 0:
        return f"exit code {code}"
    meaning = _SIGNALS_IN_WORDS.get(signal_name(-code))
    return f"killed by {signal_name(-code)}" + (f" ({meaning})" if meaning else "")


def _what_happened(failure: RankFailure, context: ReportContext) -> str:
    record = failure.record
    if record is None:
        if failure.exit.code == -signal.SIGKILL:
            held, scope = failure.exit.max_rss_bytes, context.memory_kill
            what = describe_exit(failure.exit.code)
            if scope == "cgroup":
                what = "killed, out of host memory: the memory limit of its cgroup was hit"
            elif scope == "host":
                what = "killed, probably out of host memory: the kernel has killed a process of this host for it"
            return what + (f"; it had held up to {format_bytes(held)}" if held else "")
        reason = abort_reason(failure.log_tail) if failure.exit.code == -signal.SIGABRT else None
        return describe_exit(failure.exit.code) + (f": {_shortened(reason)}" if reason else "")
    if record.user_message is not None:
        return _shortened(record.user_message)
    if record.exception_type == "SystemExit":
        said = f": {record.exit_message}" if record.exit_message else ""
        return _shortened(f"the script ended itself with {describe_exit(failure.exit_status)}{said}")
    return _shortened(record.message.splitlines()[0] if record.message else record.exception_type or "an error")


def _where(failure: RankFailure, context: ReportContext) -> str:
    parts = [f"host {context.hostname}", f"local rank {failure.exit.local_rank}", f"pid {failure.pid}"]
    if failure.cause is not Cause.STOPPED and not (failure.record and failure.exit.code == -signal.SIGTERM):
        parts.append(describe_exit(failure.exit.code).partition(" (")[0])
    if context.coordinates:
        parts.append(" ".join(f"{axis} {position}" for axis, position in context.coordinates.items()))
    if failure.record is not None and failure.record.step is not None:
        parts.append(f"step {failure.record.step}")
    if context.elapsed_s is not None:
        parts.append(f"{context.elapsed_s:.1f} s after start")
    return ", ".join(parts)


def _memory_advice(message: str, context: ReportContext) -> list[str]:
    numbers, lines = OUT_OF_GPU_MEMORY.search(message), []
    hint = "hint: paraplan recommend MODEL finds plans that fit this GPU"
    if numbers is not None:
        lines.append(f"it asked for {numbers['tried']}; {numbers['free']} of {numbers['total']} were free")
    if context.predicted_peak_bytes is not None:
        lines.append(f"the plan expected at most {format_bytes(context.predicted_peak_bytes)} on a GPU")
        hint = "hint: a smaller micro-batch or recompute full needs less"
    return [*lines, f"hint: a plan that needs less: {context.smaller_plan}" if context.smaller_plan else hint]


def _evidence(failure: RankFailure, room: int) -> list[str]:
    """Return the last lines of the traceback or of the crash's stack, at most `room` of them."""
    record = failure.record
    if record is not None and (record.user_message is not None or record.exception_type == "SystemExit"):
        return []
    if record is not None:
        return _last_lines(_traceback_lines(record.traceback), room)
    if failure.fault:
        frames = [line.strip() for line in failure.fault.splitlines() if line.lstrip().startswith("File ")]
        own = next((index for index, line in enumerate(frames) if bootstrap.__file__ in line), len(frames))
        return frames[: min(room, 3, own)]
    tail = failure.log_tail[-room:] if room > 0 else ()
    return [f"it wrote last: {_shortened(line)}" if index == 0 else _shortened(line) for index, line in enumerate(tail)]


def _last_lines(lines: list[str], room: int) -> list[str]:
    """Return the last `room` lines of a traceback, the innermost frame of the user's own code among them."""
    own = [index for index, line in enumerate(lines) if line.lstrip().startswith("File ") and not is_library(line)]
    if room > 3 and own and own[-1] < len(lines) - room:
        return lines[own[-1] : own[-1] + 2] + _from_a_frame(lines[-(room - 2) :])
    return _from_a_frame(lines[-room:]) if room > 0 else []


def _from_a_frame(lines: list[str]) -> list[str]:
    """Return the lines without the source line of a frame that was cut off above them."""
    is_torn = lines[0].startswith("    ") and any(line.startswith("  File ") for line in lines) if lines else False
    return lines[is_torn:]


def _traceback_lines(text: str) -> list[str]:
    """Return the lines that help: frames, their source, the error; not the marks under expressions, nor our hooks."""
    lines, is_hook = [], False
    for line in text.splitlines():
        if line.startswith("  File "):
            is_hook = step_hooks.__file__ in line  # it stands around torch's own calls
        elif not line.startswith("    "):
            is_hook = False
        if not is_hook and line.strip() and set(line.strip()) - set("^~") and not line.startswith("Traceback "):
            lines.append(_shortened(line.rstrip()))
    return lines


_CONSEQUENCES = {
    Cause.OWN_ERROR: "with an error of its own",
    Cause.ABORT: "by aborting",
    Cause.COMMUNICATION: "because a connection was lost",
    Cause.STOPPED: "because the launcher stopped {}",
}


def _consequence(others: Sequence[RankFailure]) -> str:
    by_cause: dict[str, list[int]] = {}
    for failure in others:
        became = _CONSEQUENCES[failure.cause]
        if failure.cause is Cause.OWN_ERROR and failure.record is None and failure.exit.code < 0:
            became = describe_exit(failure.exit.code).partition(" (")[0]
        if failure.cause in (Cause.ABORT, Cause.COMMUNICATION) and find_timeout(failure) is not None:
            became = f"because {_TIMED_OUT}"
        by_cause.setdefault(became, []).append(failure.rank)
    them = {became: "it" if len(ranks) == 1 else "them" for became, ranks in by_cause.items()}
    parts = [f"{ranks_in_words(ranks)} {became.format(them[became])}" for became, ranks in by_cause.items()]
    return "then ended: " + "; ".join(parts)


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 3] + "..."
