"""Step times and peaks from the logs that trainers write: transformers, torchtitan, Megatron-LM and DeepSpeed."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any, Literal

from paraplan.errors import PlanError
from paraplan.records import Record

FEWEST_LINES = 2
"""Lines with a time, of which the first is left out: it holds what starts and compiles."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MIB, _GIB = 2**20, 2**30

_TORCHTITAN = re.compile(r"step:\s*\d+\s+loss:.*?memory:\s*[\d.]+GiB\([\d.]+%\)\s+tps:\s*(?P<rate>[\d,]+)")
"""torchtitan/components/metrics.py, `MetricsProcessor.log` (00fbaafa): tokens of one GPU a second since the last line.
Its memory is what is reserved, of which plans know the part that is given out."""
_MEGATRON = re.compile(
    r"iteration\s+\d+/\s*\d+ \|.*?elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r"(?:.*?global batch size:\s*(?P<batch>\d+) \|)?"
)
"""megatron/training/training.py, `training_log`: the mean of the iterations since the last line."""
_MEGATRON_MEMORY = re.compile(r"memory \(MB\) \|.*?max allocated: (?P<mib>[\d.]+)")
"""megatron/training/utils.py, `report_memory`: after some iterations, in MiB."""
_DEEPSPEED = re.compile(
    r"global_step=\d+, RunningAvgSamplesPerSec=[\d.]+, CurrSamplesPerSec=(?P<rate>[\d.]+), "
    r"MemAllocated=[\d.]+GB, MaxMemAllocated=(?P<gib>[\d.]+)GB"
)
"""deepspeed/utils/timer.py, `ThroughputTimer.stop`: samples of the global batch a second, of one step; GB are GiB."""


class LoggedRun(Record):
    """One run as a trainer's log tells it. One of time and rates is there; None is not said."""

    trainer: Literal["transformers", "torchtitan", "Megatron-LM", "DeepSpeed"]
    """Who wrote it."""
    step_time_s: float | None = None
    """Seconds of a step."""
    tokens_per_s_per_gpu: float | None = None
    """Tokens of one GPU a second."""
    sequences_per_s: float | None = None
    """Sequences of the global batch a second."""
    global_batch_size: int | None = None
    """Sequences of a step."""
    peak_memory_bytes: int | None = None
    """The most that torch's allocator has given out on the ranks that told it."""
    num_times: int
    """Times behind the median; 1 for the mean of a whole training."""

    def step_s(self, *, global_batch_size: int, seq_length: int, num_gpus: int) -> float:
        """Return the seconds of a step of a plan. Raises `PlanError` where the log is of another batch."""
        if self.global_batch_size not in (None, global_batch_size):
            raise PlanError(
                f"the log of {self.trainer} is of steps of {self.global_batch_size} sequences, and the plan has "
                f"{global_batch_size}",
                hint=f"say --global-batch {self.global_batch_size}, or give the log of this plan",
            )
        if self.step_time_s is not None:
            return self.step_time_s
        if self.sequences_per_s is not None:
            return global_batch_size / self.sequences_per_s
        assert self.tokens_per_s_per_gpu is not None
        return global_batch_size * seq_length / (self.tokens_per_s_per_gpu * num_gpus)


def read_trainer_log(text: str, *, source: str) -> LoggedRun:
    """Return what a log says: medians over its lines without the first; `source` names it in errors.

    Raises `PlanError` for a text of none of the four trainers, and for a log with too few lines.
    """
    if text.lstrip().startswith("{"):
        return _of_transformers(text, source)
    plain = _COLOR.sub("", text)
    for read in (_of_torchtitan, _of_megatron, _of_deepspeed):
        found = read(plain, source)
        if found is not None:
            return found
    raise PlanError(
        f"{source} has no line with a step time of torchtitan, Megatron-LM or DeepSpeed, and is no trainer_state.json "
        "of transformers",
        hint="give the log that the trainer wrote, or the seconds of a step: --measured 4.2",
    )


def _of_torchtitan(text: str, source: str) -> LoggedRun | None:
    rates = _figures(_TORCHTITAN, text, "rate")
    if not rates:
        return None
    return LoggedRun(trainer="torchtitan", tokens_per_s_per_gpu=_median(rates, source), num_times=len(rates) - 1)


def _of_megatron(text: str, source: str) -> LoggedRun | None:
    times = _figures(_MEGATRON, text, "ms")
    if not times:
        return None
    batches = {int(found["batch"]) for found in _MEGATRON.finditer(text) if found["batch"]}
    if len(batches) > 1:
        sizes = " and ".join(map(str, sorted(batches)))
        raise PlanError(f"{source} has steps of {sizes} sequences", hint="cut it to one batch size")
    peaks = _figures(_MEGATRON_MEMORY, text, "mib")
    return LoggedRun(
        trainer="Megatron-LM",
        step_time_s=_median(times, source) / 1e3,
        global_batch_size=next(iter(batches), None),
        peak_memory_bytes=round(max(peaks) * _MIB) if peaks else None,
        num_times=len(times) - 1,
    )


def _of_deepspeed(text: str, source: str) -> LoggedRun | None:
    rates, peaks = _figures(_DEEPSPEED, text, "rate"), _figures(_DEEPSPEED, text, "gib")
    if not rates:
        return None
    return LoggedRun(
        trainer="DeepSpeed",
        sequences_per_s=_median(rates, source),
        peak_memory_bytes=round(max(peaks) * _GIB) or None,
        num_times=len(rates) - 1,
    )


def _figures(pattern: re.Pattern[str], text: str, group: str) -> list[float]:
    return [float(found[group].replace(",", "").rstrip(".")) for found in pattern.finditer(text)]


def _median(values: list[float], source: str) -> float:
    """Return the median without the first. Raises `PlanError` for too few, and for a figure of nothing."""
    if len(values) < FEWEST_LINES:
        raise PlanError(
            f"{source} has one line with a step time, which holds what starts and compiles",
            hint="let it run for longer, or log more often",
        )
    found = statistics.median(values[1:])
    if found <= 0:
        raise PlanError(f"{source} says that steps took no time", hint="give the log of a run that trained")
    return found


def _of_transformers(text: str, source: str) -> LoggedRun:
    """Read a trainer_state.json, whose `log_history` ends with `speed_metrics` (transformers/trainer_utils.py).

    The time is that of the whole training, its first step among it, without evaluations.
    """
    hint = "give the trainer_state.json that was written after the training had ended, from its first step on"
    try:
        data = json.loads(text)
        history: list[dict[str, Any]] = [entry for entry in data["log_history"] if isinstance(entry, dict)]
        steps = int(data["global_step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PlanError(f"{source} is no trainer_state.json of transformers", hint=hint) from None
    whole = next((entry for entry in reversed(history) if "train_runtime" in entry), None)
    if whole is None or steps <= 0:
        raise PlanError(f"{source} has no train_runtime: the training had not ended", hint=hint)
    try:
        runtime_s = float(whole["train_runtime"])
        evaluations_s = sum(float(entry.get("eval_runtime", 0.0)) for entry in history)
    except (TypeError, ValueError):
        raise PlanError(f"{source} has a runtime that is not a number", hint=hint) from None
    if not 0 <= evaluations_s < runtime_s < float("inf"):
        raise PlanError(f"{source} has {runtime_s:g} s of training and {evaluations_s:g} s of evaluations", hint=hint)
    return LoggedRun(trainer="transformers", step_time_s=(runtime_s - evaluations_s) / steps, num_times=1)
