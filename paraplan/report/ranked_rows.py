"""The rows of a table of ranked plans: the recommended one and the baselines are always among them."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.search.results import Candidate, SearchResult
from paraplan.search.tree import family


def table_rows(shown: Sequence[Candidate], result: SearchResult) -> tuple[Candidate, ...]:
    """Return rows of a table, with the recommended plan and the baselines among them, best first."""
    best = result.best
    recommended = Candidate(
        plan=best.plan,
        in_tree=family(best.plan) in result.families,
        step_time_s=best.step.step_time_s,
        tokens_per_s_per_gpu=best.step.tokens_per_s_per_gpu,
        mfu=best.step.mfu,
        peak_memory_bytes=best.peak_memory_bytes,
    )
    rows = {one.plan: one for one in (*shown, recommended, *result.baselines)}
    is_memory = result.objective == "memory"
    return tuple(
        sorted(rows.values(), key=lambda one: (not one.fits, one.peak_memory_bytes if is_memory else one.step_time_s))
    )


BASELINES = {"DDP": "plain DDP", "FSDP": "plain FSDP", "guide": "the guide's choice"}


def words_of(one: Candidate) -> str:
    """Return a plan as a row names it."""
    return one.plan.describe() + (f" ({BASELINES[one.baseline]})" if one.baseline else "")
