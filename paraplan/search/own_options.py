"""Options of the runtime for long sequences, chosen where nothing fits without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paraplan.cost.estimate import PlanEstimate, estimate_plan, leaves_room
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.executor import Executor
from paraplan.progress import say
from paraplan.search.constraints import Constraints
from paraplan.search.levers import Lever, chunked_loss, lacking, tiled_mlp
from paraplan.search.search import search
from paraplan.search.what_fits import some_plan_fits
from paraplan.units import format_bytes


@dataclass(frozen=True, eq=False)
class ChosenOptions:
    """Options that were chosen because nothing fits without: `workload` is the one that has them."""

    workload: Workload
    options: str
    saved_bytes: int
    """Memory that the plan would need beside, on the fullest GPU, without the options."""
    share_of_step: float
    """Share of the step that the options cost."""

    @property
    def in_words(self) -> str:
        """The options and their cost, in one sentence."""
        return (
            f"{self.options} is chosen, without which nothing fits: this plan would need "
            f"{format_bytes(self.saved_bytes)} more; what is computed again takes {self.share_of_step:.1%} of a step"
        )

    @property
    def fields(self) -> dict[str, str | float]:
        """The options and their cost, as JSON has them."""
        return {"options": self.options, "saved_bytes": self.saved_bytes, "share_of_step": self.share_of_step}

    @classmethod
    def of(cls, workload: Workload, executor: Executor, fixed: Constraints) -> ChosenOptions | None:
        """Return the options of the runtime to choose for a workload that nothing fits.

        None where none is enough, and where what is `fixed` is the reason. Those whose best plan needs no offload come
        first, then those that leave room, then the fastest.
        """
        ways = list(_ways(workload, executor)) if executor.is_own else []
        if not ways or (fixed.words and some_plan_fits(workload, executor=executor)):
            return None
        if not some_plan_fits(ways[-1].workload(workload), executor=executor, fixed=fixed):
            return None
        found: list[tuple[Lever, PlanEstimate]] = []
        for way in ways:
            say(f"pricing {way.options}")
            try:
                best = search(way.workload(workload), num_candidates=1, executor=executor, fixed=fixed).best
            except NoPlanFitsError:
                continue
            found.append((way, best))
        if not found:  # it fits, and cannot be loaded
            return None

        def rank(one: tuple[Lever, PlanEstimate]) -> tuple[bool, bool, float]:
            way, best = one
            is_full = not leaves_room(way.workload(workload), best)
            return best.plan.offload != "none", is_full, best.step.step_time_s

        way, best = min(found, key=rank)
        without = estimate_plan(workload, best.plan)
        return cls(
            way.workload(workload),
            way.options,
            saved_bytes=without.peak_memory_bytes - best.peak_memory_bytes,
            share_of_step=max(0.0, 1 - without.step.step_time_s / best.step.step_time_s),
        )


def _ways(workload: Workload, executor: Executor) -> Iterator[Lever]:
    """Yield the options that the training leaves and the runtime has, each alone, then all together."""
    offers = [*chunked_loss(workload), *tiled_mlp(workload)]
    offers = [one for one in offers if lacking(one, workload, executor) is None]
    yield from offers
    if len(offers) > 1:
        yield offers[0].beside(offers[1])
