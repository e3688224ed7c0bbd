"""Measurements of a run: each step's loss, gradient norm, speed and memory; in the end against the prediction."""

from __future__ import annotations

import contextlib
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import Field

from paraplan.errors import UsageError
from paraplan.hardware.catalogue.profile_files import find_gpu, profile_name
from paraplan.plan.files import PlannedEstimate
from paraplan.plan.kept_runs import MeasuredRun
from paraplan.plan.training import TrainingPrecision
from paraplan.records import Record
from paraplan.runtime.step.clocks import WARM_STEPS, StepClock, clock_of, running_s, without_waits
from paraplan.runtime.torch_private import tensors_in
from paraplan.units import broken_between_words, format_bytes, format_count, format_seconds

_SECONDS_BETWEEN_LINES = 0.25
_BAR_WIDTH = 24


class StepReport(Record):
    """One optimizer step. Tokens and FLOP/s are of all ranks; unknown is None.

    `tokens_per_s` counts sequences where inputs are no token ids. `mfu` is the share of the peak of all devices that
    the model's own FLOPs make up (Chowdhery et al. 2022, appendix B). `peak_memory_bytes` is what torch has allocated
    at most on this rank's GPU, or the largest resident size of its process.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    peak_memory_bytes: int | None
    metrics: dict[str, float] = Field(default_factory=dict)
    """The metrics that `loss_fn` returned beside the loss, over the global batch."""


StepCallback = Callable[[StepReport], object]


@dataclass(frozen=True)
class SpeedBaseline:
    """The baseline of speeds. `peak_flops_per_s` is that of one device; `num_parameters` of the whole model."""

    num_ranks: int
    peak_flops_per_s: float | None = None
    num_parameters: int | None = None
    estimate: PlannedEstimate | None = None

    def mfu(self, *, step_time_s: float, tokens: int) -> float | None:
        """Return the share of the peak that a step of `tokens` reached; None where the device's peak is unknown.

        The model's FLOPs are those of the plan file, else 6 for each parameter and token (Kaplan et al. 2020, table 1),
        without attention's.
        """
        flops = self.estimate.model_flops_per_step if self.estimate is not None else None
        if flops is None and self.num_parameters is not None:
            flops = 6.0 * self.num_parameters * tokens
        if flops is None or self.peak_flops_per_s is None or step_time_s <= 0:
            return None
        return flops / (step_time_s * self.num_ranks * self.peak_flops_per_s)


def peak_flops_per_s(device: torch.device, precision: TrainingPrecision) -> float | None:
    """Return the data sheet's peak of this rank's GPU; None for a CPU or a GPU that no profile knows."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.peak("bf16" if precision == "bf16-pure" else precision)


def count_tokens(inputs: Any) -> int:
    """Return the token ids in `inputs`: the elements of its first tensor of whole numbers, else its sequences."""
    leaves = tensors_in(inputs)
    ids = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dtype != torch.bool and leaf.ndim > 1]
    return ids[0].numel() if ids else (leaves[0].shape[0] if leaves else 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Return what torch has allocated at most on a GPU since the start; on a CPU the largest resident size."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class RunWatch:
    """Follows the steps of one engine on one rank, and writes what rank 0 is to write.

    `measured` is the file for what was measured in the end.
    `metrics` is the file for a line of JSON for every `metrics_every` steps; `terminal` is where a bar is drawn;
    `callbacks` are called with the report of every so many steps. Only a step that is reported waits for the device.
    """

    device: torch.device
    baseline: SpeedBaseline
    metrics: Path | None = None
    measured: Path | None = None
    metrics_every: int = 1
    callbacks: list[tuple[int, StepCallback]] = field(default_factory=list)
    terminal: TextIO | None = None
    total_steps: int | None = None
    clock: StepClock | None = None
    last: StepReport | None = None
    _num_read: int = 0
    _tokens: set[int] = field(default_factory=set)
    _shown_s: float = 0.0
    _is_line_open: bool = False

    def begin(self) -> None:
        """Take note of the start of a step."""
        if self.clock is None:
            self.clock = clock_of(self.device)
        self.clock.begin()

    def end(
        self,
        *,
        step: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor | None,
        learning_rate: float,
        tokens: int,
        metrics: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Take note of the end of a step of `tokens` over all ranks, and report it where that is due.

        On a GPU a step that is not reported is not waited for: the time of one that is, is the mean since the last one.
        """
        writes = self.metrics is not None and step % self.metrics_every == 0
        draws = self._is_bar_due(step)
        called = [callback for every, callback in self.callbacks if step % every == 0]
        is_due = writes or draws or bool(called)
        assert self.clock is not None
        self.clock.end()
        self._tokens.add(tokens)
        if not is_due:
            return
        value = loss.item()  # waits for the device
        times_s = self.clock.times_s()
        step_time_s = statistics.fmean(times_s[self._num_read :])
        self._num_read = len(times_s)
        self.last = StepReport(
            step=step,
            loss=value,
            grad_norm=None if grad_norm is None else grad_norm.item(),
            learning_rate=learning_rate,
            step_time_s=step_time_s,
            tokens_per_s=tokens / step_time_s,
            mfu=self.baseline.mfu(step_time_s=step_time_s, tokens=tokens),
            peak_memory_bytes=peak_memory_bytes(self.device),
            metrics={name: value.item() for name, value in (metrics or {}).items()},
        )
        if writes and self.metrics is not None:
            _append(self.metrics, self.last)
        if draws:
            self._draw(self.last)
        for callback in called:
            callback(self.last)

    def finish(self) -> None:
        """End the bar, and say in one line how the run compares with its prediction."""
        if self._is_line_open and self.terminal is not None:
            self.terminal.write("\n")
            self._is_line_open = False
        for name in ("stdout", "stderr"):
            if isinstance(stream := getattr(sys, name), _BesideBar):
                setattr(sys, name, stream.stream)
        line = self.comparison()
        if line is not None:
            text = f"paraplan: {line}"
            if sys.stderr.isatty():
                text = broken_between_words(text, width=shutil.get_terminal_size().columns, later_indent=4)
            sys.stderr.write(f"{text}\n")
        found = None if self.measured is None else self.measured_run()
        if found is not None and self.measured is not None:
            with contextlib.suppress(OSError):  # the launcher then says that nothing was measured
                self.measured.write_text(found.to_json(), encoding="utf-8")
        self.clock, self._num_read = None, 0

    def hide_bar(self) -> None:
        """Clear the line of the bar, for what the script prints; the next report draws it again."""
        if self._is_line_open and self.terminal is not None:
            self.terminal.write("\r\x1b[K")
            self.terminal.flush()
            self._is_line_open = False

    def comparison(self) -> str | None:
        """Return step time and memory, measured against predicted; None without a prediction or without a step."""
        estimate = self.baseline.estimate
        measured = [] if self.clock is None or estimate is None else self.clock.times_s()
        times = measured[WARM_STEPS:] or measured
        if estimate is None or not times:
            return None
        measured_s = statistics.median(times)
        planned_gpu = None if estimate.plain is None else estimate.plain.gpu
        if planned_gpu is not None and planned_gpu != (here := profile_name(self._device_name)):
            said = f"step time {format_seconds(measured_s)} (median of {len(times)}) on {here}"
            return f"{said}, not compared: the plan's prediction is of {planned_gpu}"
        parts = []
        if estimate.step_time_s is not None:
            alone_s, waits = without_waits(self.clock)
            compared_s, of_those = (measured_s, "") if alone_s is None else (alone_s, f" of {format_seconds(alone_s)}")
            parts.append(
                f"step time {format_seconds(measured_s)} (median of {len(times)}){waits}, predicted "
                f"{format_seconds(estimate.step_time_s)} ({estimate.step_time_s / compared_s - 1:+.0%}{of_those})"
            )
        if estimate.peak_memory_bytes is not None and self.device.type == "cuda":
            measured_bytes = peak_memory_bytes(self.device)
            parts.append(
                f"peak memory {format_bytes(measured_bytes)}, predicted {format_bytes(estimate.peak_memory_bytes)} "
                f"({estimate.peak_memory_bytes / measured_bytes - 1:+.0%})"
            )
        elif estimate.peak_memory_bytes is not None:  # a process's resident size is mostly torch's own code
            predicted = format_bytes(estimate.peak_memory_bytes)
            parts.append(f"peak memory of tensors, predicted {predicted}, is not measured on a CPU")
        return "; ".join(parts) or None

    def measured_run(self) -> MeasuredRun | None:
        """Return what was measured of all steps; None without a step."""
        measured = [] if self.clock is None else self.clock.times_s()
        if not measured:
            return None
        on_gpu = self.device.type == "cuda"
        return MeasuredRun(
            step_time_s=running_s(self.clock) or statistics.median(measured[WARM_STEPS:] or measured),
            num_steps=len(measured) - WARM_STEPS,
            peak_memory_bytes=peak_memory_bytes(self.device) if on_gpu else None,
            device=self._device_name,
            tokens_of_steps=tuple(sorted(self._tokens))[:2],
            num_parameters=self.baseline.num_parameters,
        )

    @property
    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def _is_bar_due(self, step: int) -> bool:
        if self.terminal is None:
            return False
        return step == self.total_steps or time.perf_counter() - self._shown_s > _SECONDS_BETWEEN_LINES

    def _draw(self, report: StepReport) -> None:
        assert self.terminal is not None
        self._shown_s = time.perf_counter()
        self._is_line_open = True
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), _BesideBar):
                setattr(sys, name, _BesideBar(stream, self.hide_bar))
        self.terminal.write(f"\r\x1b[K{bar_text(report, self.total_steps, is_resident=self.device.type != 'cuda')}")
        self.terminal.flush()


class _BesideBar:
    """A standard stream while a bar is drawn: what the script writes gets a line of its own."""

    def __init__(self, stream: TextIO, hide_bar: Callable[[], None]) -> None:
        self.stream = stream
        self._hide_bar = hide_bar

    def write(self, text: str) -> int:
        """Write a text where the bar was."""
        self._hide_bar()
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def bar_text(report: StepReport, total_steps: int | None, *, is_resident: bool = False) -> str:
    """Return one line for a terminal: how far the run is, and how the last step went.

    `is_resident` says that its memory is the resident size of the process, not what torch allocated.
    """
    words = [f"step {report.step}"]
    if total_steps:
        filled = min(_BAR_WIDTH, _BAR_WIDTH * report.step // total_steps)
        words = [f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] step {report.step}/{total_steps}"]
    words.append(f"loss {report.loss:.3f}")
    if report.grad_norm is not None:
        words.append(f"grad {report.grad_norm:.2f}")
    words.append(f"{format_count(report.tokens_per_s)} tokens/s")
    if report.mfu is not None:
        words.append(f"MFU {report.mfu:.1%}")
    words.append(format_bytes(report.peak_memory_bytes) + (" resident" if is_resident else ""))
    return "  ".join(words)


def _append(path: Path, report: StepReport) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(report.to_json(indent=None) + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write metrics to {path}: {error.strerror}", hint="choose a folder that exists and is yours"
        ) from None
