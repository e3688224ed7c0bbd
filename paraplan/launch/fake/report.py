"""The output of a fake launch: memory of each rank by parts beside the estimate, and bytes that it would have sent."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from subprocess import TimeoutExpired

from paraplan.launch.planning import CPU_PROFILE, RunPython, run_python
from paraplan.plan.fake import CountedCollective, FakeRankReport
from paraplan.plan.files import PlanFile
from paraplan.plan.memory_record import MemoryParts
from paraplan.records import Record
from paraplan.units import format_bytes, format_count

_PARTS = ("parameter", "gradient", "optimizer_state", "activation", "workspace")
_WORDS = {"optimizer_state": "optimizer state", "parameter": "parameters", "gradient": "gradients"}
_WORDS |= {"activation": "activations", "total": "peak"}
_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}
_PHASES |= {"building": "the script's start, before the first forward pass"}
_ON_HOST = "in the host's memory"
_SMALL = 1024  # losses, norms and counts: sent in every step, and of no size


class FakeLaunchReport(Record):
    """The ranks that were run, with the estimates of their stages in the same order; none where `no_estimate` says why.

    `gpu_memory_bytes` is that of the GPUs of `profile`, None without one.
    """

    script: str
    ranks: tuple[FakeRankReport, ...]
    estimates: tuple[StageEstimate, ...] = ()
    no_estimate: str | None = None
    gpu_memory_bytes: int | None = None
    profile: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether every rank's peak is less than the memory of a GPU; None where that is not known."""
        if self.gpu_memory_bytes is None:
            return None
        return all(rank.total_bytes < self.gpu_memory_bytes for rank in self.ranks)


def render_report(report: FakeLaunchReport) -> str:
    """Return the report as text of at most 100 columns."""
    first = report.ranks[0]
    lines = [f"{report.script}: {format_count(first.num_parameters)} parameters, {first.precision}"]
    for index, rank in enumerate(report.ranks):
        estimate = report.estimates[index] if report.estimates else None
        lines += ["", *_memory_lines(rank, estimate, report)]
        lines += ["", *_collective_lines(rank.collectives)]
    if report.no_estimate is not None:
        lines += ["", f"Not compared with an estimate: {report.no_estimate}."]
    if first.left_out:
        lines += ["", f"Left out: {', '.join(first.left_out)}."]
    lines += ["", "Not counted: CUDA's context, NCCL's buffers and what the allocator keeps in reserve."]
    return "\n".join(lines) + "\n"


def _memory_lines(rank: FakeRankReport, estimate: StageEstimate | None, report: FakeLaunchReport) -> list[str]:
    is_piped = rank.plan is not None and rank.plan.pp > 1
    stage = f", pipeline stage {rank.pipeline_stage} of {rank.plan.pp}" if rank.plan and is_piped else ""
    title = f"rank {rank.rank} of {rank.world_size}{stage}{', on the CPU' if rank.is_on_cpu else ''}"
    head = f"{title:<44}{'traced':>10}"
    lines = [head if estimate is None else f"{head}{'estimated':>12}{'difference':>12}"]
    for part in (*_PARTS, "total"):
        traced: int = getattr(rank, f"{part}_bytes")
        line = f"  {_WORDS.get(part, part):<42}{format_bytes(traced):>10}"
        if estimate is not None:
            line += _compared(getattr(estimate, f"{part}_bytes"), traced)
        lines.append(line)
    fullest, memory = _PHASES.get(rank.phase, rank.phase), report.gpu_memory_bytes
    if memory is not None:
        fullest += "; within the " if rank.total_bytes < memory else "; MORE than the "
        fullest += f"{format_bytes(memory)} of a GPU of {report.profile}"
    lines.append(f"  fullest in {fullest}")
    if rank.host is not None and rank.plan is not None and rank.plan.offload != "none":
        line = f"  {_ON_HOST:<42}{format_bytes(rank.host.total_bytes):>10}"
        line += _compared(estimate.host_bytes, rank.host.total_bytes) if estimate else ""
        lines += [line, f"    of which {_in_parts(rank.host)}"]
    elif rank.host is not None and rank.host.total_bytes > _SMALL**2 / 2:
        lines.append(f"  {_ON_HOST} at most {format_bytes(rank.host.total_bytes)}: {_in_parts(rank.host)}")
    return lines


def _in_parts(memory: MemoryParts) -> str:
    """Return the parts of which there is more than a little."""
    sizes: dict[str, int] = {part: getattr(memory, f"{part}_bytes") for part in _PARTS}
    small = memory.total_bytes / 100
    return ", ".join(f"{_WORDS.get(part, part)} {format_bytes(size)}" for part, size in sizes.items() if size > small)


def _compared(estimated: int, traced: int) -> str:
    difference = f"{estimated / traced - 1:+.1%}" if traced else "?" if estimated else ""
    return f"{format_bytes(estimated):>12}{difference:>12}"


def _collective_lines(collectives: tuple[CountedCollective, ...]) -> list[str]:
    large = [one for one in collectives if one.total_bytes > _SMALL]
    if not large:
        return ["  sends nothing in a step" + (", but losses and counts" if collectives else "")]
    lines = [f"  {'in a step':<32}{'group':<20}{'calls':>7}{'bytes':>12}"]
    for one in large:
        group = f"{one.group} ({one.num_ranks} ranks)"
        lines.append(f"  {one.operation:<32}{group:<20}{one.count:>7}{format_bytes(one.total_bytes):>12}")
    return lines


class StageEstimate(MemoryParts):
    """The predicted peak of one pipeline stage by parts, in bytes, and what offload puts in the host's memory."""

    host_bytes: int = 0


def estimate_stages(
    file: PlanFile | None, *, plan_path: str | None, profile: str | None, run: RunPython
) -> tuple[Sequence[StageEstimate], str | None]:
    """Return the estimate of each pipeline stage of the plan, or none and the reason.

    Without `profile` it is made for CPUs, on which no CUDA library keeps workspaces; the parts of the model do not
    depend on the machine.
    """
    if file is None or plan_path is None:
        return (), "the launch has neither --model nor --plan, whose file names the model"
    if file.model is None:
        return (), "the plan file names no model"
    model = file.model.source or file.model.name
    command = ["estimate", model, "--plan", plan_path, "--json", "--profile", profile or CPU_PROFILE]
    try:
        done = run_python("paraplan", *command, environment=os.environ, run=run)
    except TimeoutExpired as error:
        return (), f"paraplan estimate {model} was not done after {error.timeout:.0f} s"
    try:
        rows = json.loads(done.stdout)["memory"]
    except (ValueError, KeyError):
        words = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), "error: no result")
        return (), f"paraplan estimate {model}: {words.removeprefix('error: ')}"
    names = StageEstimate.model_fields
    return [StageEstimate(**{name: int(row.get(name, 0)) for name in names}) for row in rows], None
