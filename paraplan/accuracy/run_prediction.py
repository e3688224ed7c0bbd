"""Predictions of a measured run, beside its measurements."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paraplan.accuracy.ranges import Evidence, Peak
from paraplan.plan.kept_runs import PlainPrediction
from paraplan.records import Record

MemoryReading = Literal["max_allocated", "max_reserved", "allocated or reserved", "nvidia-smi", "not stated"]

PEAKS: dict[MemoryReading, Peak] = {
    "max_allocated": "allocated",
    "max_reserved": "reserved",
    "allocated or reserved": "reserved",
    "nvidia-smi": "device",
    "not stated": "device",
}
"""The predicted peak that each reading is compared with."""


class RunPrediction(Record):
    """One row of `paraplan validate`. Errors are predicted / measured - 1; what was not measured is None.

    `fits` says whether a run ran (True) or ran out of memory (False), `predicted_fits` whether what torch's allocator
    takes, with what it keeps for later, is less than the GPU has: of what it keeps it gives back whole segments alone.
    `parallelism` names the kinds of splitting without their degrees, `plan` the whole plan; `memory_reading` is what
    the measured peak is.
    Runs of a framework that is not known are modelled as plain PyTorch, with tp or pp as Megatron-Core.
    """

    id: str
    source: str
    gpu: str
    framework: str
    framework_profile: str = ""
    gpu_profile: str = ""
    is_known_framework: bool = True
    parallelism: str = ""
    plan: str = ""
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    step_time_error: float | None = None
    predicted_peak_memory_bytes: int | None = None
    measured_peak_memory_bytes: int | None = None
    memory_error: float | None = None
    memory_reading: MemoryReading | None = None
    fits: bool | None = None
    predicted_fits: bool | None = None
    predicted_step_time_low_s: float | None = None
    """The lower end of the range that holds 80 % of runs, as `paraplan estimate` tells it."""
    predicted_step_time_high_s: float | None = None
    predicted_peak_memory_low_bytes: int | None = None
    """The lower end of the range that holds 80 % of peaks of this reading."""
    predicted_peak_memory_high_bytes: int | None = None
    evidence: Evidence | None = None
    """The measurements that there are of this framework on this GPU; an unknown framework has none."""
    allocator_share: float | None = None
    """The share of the GPU's memory that torch's allocator was predicted to take."""
    out_of_memory_risk: float | None = None
    """The share of measured runs predicted as full that ran out of memory."""
    skipped: str | None = None
    plain: PlainPrediction | None = Field(default=None, exclude=True, repr=False)
    """Where the run stands among others, for `--keep`; None under a calibration."""
