"""Offers of levers on memory and of other machines to a workload: values for all texts, and their sentences."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.records import Record
from paraplan.units import format_bytes, format_count, format_seconds, gpus

NO_COST = 0.03
"""Share of the step time up to which a lever counts as free."""

MORE_MEMORY = "use GPUs with more memory"
"""Hint where nothing is offered that fits."""


class LeverOffer(Record):
    """Result of a lever, or of more or other machines, for a workload: its best plan, memory and time."""

    name: str
    """Usual name of the lever."""
    options: str
    """The options that ask for it."""
    keeps_training: bool
    """Whether the same parameters train with the same arithmetic."""
    lacking: str | None = None
    """Why the framework cannot do so; nothing is priced then."""
    fits: bool = False
    """Whether a plan fits with it."""
    unloadable: str | None = None
    """Memory that loading takes where there is no room for it."""
    plan: str | None = None
    """The best plan with it, or the nearest where none fits."""
    peak_memory_bytes: int | None = None
    """Memory that this plan needs of the fullest GPU."""
    usable_memory_bytes: int | None = None
    """Memory that a GPU has for it."""
    host_bytes_per_node: int | None = None
    """Bytes in the memory of one machine."""
    offloads_parameters: bool = False
    """Whether its plan keeps parameters on the host, whose pace it then goes at."""
    step_time_s: float | None = None
    """Time of a step."""
    slowdown: float | None = None
    """Time of a step over that without the lever, less 1; None where no plan fits without it."""
    tokens_per_s_per_gpu: float | None = None
    """Tokens of a step by time and GPU."""
    num_gpus: int
    """GPUs that this is for."""
    fewest_gpus: int | None = None
    """The fewest of these machines' GPUs that fit with it, where they were looked for."""
    note: str | None = None
    """Note on the lever: a tool that trains nothing over such weights."""
    found: str | None = None
    """Result of `--find` with the lever."""
    is_simpler: bool = False
    """Whether its plan is simpler than the recommended one without it, which is then to be named."""

    @property
    def is_free(self) -> bool:
        """Whether it leaves the training as it is and costs no time."""
        return self.fits and self.keeps_training and self.slowdown is not None and self.slowdown <= NO_COST

    @property
    def in_words(self) -> str:
        """The offer in one sentence."""
        if self.lacking is not None:
            return f"{self.options} ({self.lacking})"
        peak, usable, step_s, tokens_per_s = (
            each or 0
            for each in (self.peak_memory_bytes, self.usable_memory_bytes, self.step_time_s, self.tokens_per_s_per_gpu)
        )
        if self._fits_but_loading:
            return f"{self.options} (loading takes {self.unloadable})"
        if not self.fits:
            on_host = f"{format_bytes(self.host_bytes_per_node or 0)} on the host"
            return f"{self.options} (needs {format_bytes(peak) if peak > usable else on_host})"
        memory = f"{format_bytes(peak)} of {format_bytes(usable)}"
        rate = format_count(tokens_per_s)
        step = f"{format_seconds(step_s)} a step{self._change}, {rate} tokens/s per GPU"
        note = f"; {self.note}" if self.note else ""
        return f"{self.options}: {self._found}{memory}, {step} ({self.plan}){self._fewer}{note}"

    @property
    def in_short(self) -> str:
        """An offer that fits in a line: its options, memory and time."""
        memory = format_bytes(self.peak_memory_bytes)
        simpler = f", simpler: {self.plan}" if self.is_simpler else ""
        step = self.step_in_words.replace(" (", " a step (")
        return f"{self.options}: {self._found}{memory}, {step}{self._fewer}{simpler}"

    @property
    def _found(self) -> str:
        if not self.found:
            return ""
        return f"{self.found}, " if self.slowdown is None else f"{self.found}; at the size found without it "

    @property
    def _fewer(self) -> str:
        few = self.fewest_gpus
        return f"; {gpus(few)} would do" if few is not None and few < self.num_gpus else ""

    @property
    def _fits_but_loading(self) -> bool:
        within = (self.peak_memory_bytes or 0) <= (self.usable_memory_bytes or 0)
        return not self.fits and self.unloadable is not None and within

    @property
    def step_in_words(self) -> str:
        """The time of a step, and its change where a plan fits without the lever."""
        return f"{format_seconds(self.step_time_s or 0.0)}{self._change}"

    @property
    def _change(self) -> str:
        if self.slowdown is None:
            return ""
        if abs(self.slowdown) < 0.005:
            return " (no slower)"
        return f" ({abs(self.slowdown):.0%} {'slower' if self.slowdown > 0 else 'less time'})"


def offers_in_words(offers: tuple[LeverOffer, ...], *, framework: str, way_out: str = MORE_MEMORY) -> str:
    """Return the offers as the lines of a hint: those that fit in their order, what is not enough, what is lacking.

    `way_out` stands for what fits where nothing does.
    """
    lines = ["one of these fits, the cheapest first:", *(one.in_words for one in offers if one.fits)]
    if len(lines) == 1:
        lines = [way_out]
    return "\n  ".join([*lines, *offers_beside(offers, framework=framework)])


def offers_beside(offers: Sequence[LeverOffer], *, framework: str) -> list[str]:
    """Return what is not enough and what the framework lacks, a line each where there is any."""
    missing = [one for one in offers if not one.fits and one.lacking is None]
    unloaded = [one.options for one in missing if one._fits_but_loading]
    short = [one.in_words for one in missing if not one._fits_but_loading]
    lacking = [one.in_words for one in offers if one.lacking is not None]
    return [
        *([f"not enough: {', '.join(short)}"] if short else []),
        *([f"cannot be loaded: {', '.join(unloaded)}"] if unloaded else []),
        *([f"not in {framework}: {', '.join(lacking)}"] if lacking else []),
    ]
