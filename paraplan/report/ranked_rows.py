"""The rows of a table of ranked plans: the recommended one is always among them."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.search.results import Candidate, SearchResult
from paraplan.search.tree import family


def with_recommended(shown: Sequence[Candidate], result: SearchResult) -> tuple[Candidate, ...]:
    """Return rows of a table and, where it is not among them, the recommended plan as the last one."""
    best = result.best
    if any(one.plan == best.plan for one in shown):
        return tuple(shown)
    recommended = Candidate(
        plan=best.plan,
        in_tree=family(best.plan) in result.families,
        step_time_s=best.step.step_time_s,
        tokens_per_s_per_gpu=best.step.tokens_per_s_per_gpu,
        mfu=best.step.mfu,
        peak_memory_bytes=best.peak_memory_bytes,
    )
    return (*shown, recommended)
