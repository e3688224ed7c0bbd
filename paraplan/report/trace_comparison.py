"""A predicted step beside a measured one: part by part, the largest differences first."""

from __future__ import annotations

from paraplan.records import Record
from paraplan.report.step_profile import StepProfile
from paraplan.report.timeline_chart import COLLECTIVE_WORDS
from paraplan.units import format_seconds

_WORTH_NAMING = 0.02
"""A difference is named in words where it is at least this share of the longer step."""


class PartDifference(Record):
    """One part of a step, predicted and measured, in seconds. `sums` says that parts like it sum to the step."""

    name: str
    predicted_s: float
    measured_s: float
    sums: bool

    @property
    def difference_s(self) -> float:
        """Seconds that the run takes more than predicted."""
        return self.measured_s - self.predicted_s


class TraceComparison(Record):
    """The step of a prediction and of a run; `parts` sum to it, `collectives` are whole, also what compute hides."""

    predicted: StepProfile
    measured: StepProfile
    parts: tuple[PartDifference, ...]
    collectives: tuple[PartDifference, ...]
    findings: tuple[str, ...]


def compare_steps(predicted: StepProfile, measured: StepProfile) -> TraceComparison:
    """Return the comparison of two steps."""
    parts = (
        PartDifference(name="compute", predicted_s=predicted.compute_s, measured_s=measured.compute_s, sums=True),
        PartDifference(
            name="communication that is waited for",
            predicted_s=predicted.exposed_s,
            measured_s=measured.exposed_s,
            sums=True,
        ),
        PartDifference(name="idle", predicted_s=predicted.idle_s, measured_s=measured.idle_s, sums=True),
    )
    kinds = sorted({*predicted.communication_s, *measured.communication_s})
    collectives = tuple(
        PartDifference(
            name=kind,
            predicted_s=predicted.communication_s.get(kind, 0.0),
            measured_s=measured.communication_s.get(kind, 0.0),
            sums=False,
        )
        for kind in kinds
    )
    return TraceComparison(
        predicted=predicted,
        measured=measured,
        parts=parts,
        collectives=tuple(sorted(collectives, key=lambda part: -abs(part.difference_s))),
        findings=tuple(_findings(predicted, measured, parts, collectives)),
    )


def _findings(
    predicted: StepProfile,
    measured: StepProfile,
    parts: tuple[PartDifference, ...],
    collectives: tuple[PartDifference, ...],
) -> list[str]:
    """Return the largest differences in words, the largest first."""
    longer = max(predicted.step_s, measured.step_s)
    named = [part for part in parts if abs(part.difference_s) >= _WORTH_NAMING * longer]
    found = []
    for part in sorted(named, key=lambda part: -abs(part.difference_s)):
        more = "longer" if part.difference_s > 0 else "less"
        share = f"{abs(part.difference_s) / predicted.step_s:.0%} of the predicted step"
        words = f"{part.name}: {format_seconds(abs(part.difference_s))} {more} than predicted, {share}"
        if part.name.startswith("communication") and collectives:
            most = max(collectives, key=lambda each: abs(each.difference_s))
            sign = "+" if most.difference_s >= 0 else "-"
            name = COLLECTIVE_WORDS.get(most.name, most.name)
            words += f"; most in {name} ({sign}{format_seconds(abs(most.difference_s))})"
        found.append(words)
    unforeseen = [part.name for part in collectives if not part.predicted_s and part.measured_s]
    if unforeseen:
        names = ", ".join(COLLECTIVE_WORDS.get(name, name) for name in unforeseen)
        found.append(f"not predicted at all: {names}")
    missing = [part.name for part in collectives if part.predicted_s and not part.measured_s]
    if missing:
        names = ", ".join(COLLECTIVE_WORDS.get(name, name) for name in missing)
        found.append(f"predicted and not in the run: {names}")
    return found
