"""Why one plan is recommended over another: the cause that decided, in one place for all texts."""

from __future__ import annotations

from typing import Literal

from paraplan.cost.estimate import PlanEstimate
from paraplan.records import Record
from paraplan.units import format_bytes, format_seconds

Cause = Literal[
    "faster", "memory", "loading", "allocator", "risk", "offload", "unknown", "range", "simplicity", "error"
]
"""Deciding quantity: the time, or the memory where that is the objective; that the other cannot be loaded; what torch's
allocator would take of the GPU; too little memory left; copies to the host; that nobody is known to have run such a
plan at that scale; that another family of plans has to be clearly faster (`results.RANGE`); that the plan is simpler
within the error; that it is as simple and worth as much within the error."""


class Reason(Record):
    """Why a plan is recommended over another one."""

    cause: Cause
    """Deciding quantity."""
    over: str
    """The other plan."""
    gain: float
    """How much less time the other one is predicted to take (or memory, where that is the objective), as a share of its
    own; negative where it takes more."""
    because: str
    """The cause in words."""
    by_memory: bool = False
    """Whether memory is the objective."""

    @property
    def in_words(self) -> str:
        """The reason in a sentence."""
        return f"chosen over {self.over}, predicted {self.comparison}, because {self.because}"

    @property
    def of_the_other(self) -> str:
        """The reason in a sentence about the other one."""
        return f"{self.over}, predicted {self.comparison}: {self.because}"

    @property
    def comparison(self) -> str:
        """How the other plan compares: `9.1% faster`, `8% slower`, `2.4 times as slow`."""
        if self.by_memory:
            share = abs(self.gain)
            return f"{f'{share:.1%}' if share >= 0.001 else 'under 0.1%'} {'less' if self.gain > 0 else 'more'} memory"
        return speed_in_words(1 + self.gain)


def speed_in_words(ratio: float) -> str:
    """Return how much faster a plan is that another takes `ratio` times as long as: never a negative number."""
    if abs(ratio - 1) < 0.001:
        return f"{'under 0.1%'} {'faster' if ratio > 1 else 'slower'}"
    if ratio >= 1:
        return f"{ratio - 1:.1%} faster" if ratio < 2 else f"{ratio:.1f} times as fast"
    slower = 1 / ratio
    return f"{slower - 1:.1%} slower" if slower < 2 else f"{slower:.1f} times as slow"


def allocator_words(estimate: PlanEstimate, gpu_memory_bytes: int) -> str:
    """Return what torch's allocator would take under a plan that it has no room for."""
    taken, there = format_bytes(estimate.cached_device_bytes), format_bytes(gpu_memory_bytes)
    return f"torch's allocator would take {taken} of the GPU's {there} there"


def memory_words(other: PlanEstimate) -> str:
    """Return how full a GPU is under a plan that leaves too little."""
    share = other.peak_memory_bytes / other.usable_memory_bytes
    left = format_bytes(max(0, other.usable_memory_bytes - other.peak_memory_bytes))
    return f"that takes {share:.1%} of the usable memory, and leaves {left}"


def offload_words(other: PlanEstimate) -> str:
    """Return what a plan computes on the host."""
    return f"it needs no offload, whose {format_seconds(other.step.optimizer_s)} on the host are the least sure"
