"""Several machines side by side: the best plan on each, and what the training costs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, ParaplanError
from paraplan.hardware.prices import MachinePrice, PriceFile, price_of
from paraplan.records import Record
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.sizes import budget
from paraplan.units import DAYS_OF_A_YEAR, format_days

_DAY_S = 86_400


class MachineOffer(Record):
    """The best plan on one machine. Where none fits, `why_not` says so and figures of the plan are None."""

    machine: str
    profile: str
    num_nodes: int
    num_gpus: int
    gpu: str
    fits: bool
    why_not: str | None = None
    plan: str | None = None
    num_gpus_used: int | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    """Tokens a second of all GPUs together."""
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    usable_memory_bytes: int | None = None
    price_per_gpu_hour: float | None = None
    """None where none is known."""
    price_source: str | None = None
    """Who asks it, for which machine, and when; `--price` where the user said it."""
    rented: MachinePrice | None = None
    """The offer that this price is of."""
    price_url: str | None = None
    seconds: float | None = None
    """Seconds of the run, where its number of tokens is given."""
    cost: float | None = None
    """Cost of the run."""
    cost_per_billion_tokens: float | None = None


class MachineComparison(Record):
    """Machines side by side, the best first: the cheapest where all prices are known, else the fastest."""

    machines: tuple[MachineOffer, ...]
    is_by_cost: bool
    tokens: float | None
    currency: str | None
    too_long: tuple[MachineOffer, ...] = ()
    """Machines that are left out, as they would take over a year, the cheapest first."""

    def cheapest_in_time(self, *, days: float | None, most: int) -> MachineComparison:
        """Return the cheapest size of the `most` cheapest machines that end in `days`, and the fastest of all.

        Without `days` those that take over a year are left out, where some do not, and named apart. Raises
        `NoPlanFitsError` where none ends in time.
        """
        limit_s = (DAYS_OF_A_YEAR if days is None else days) * _DAY_S
        by_cost = sorted((one for one in self.machines if one.cost is not None), key=lambda one: one.cost or 0.0)
        fastest = min(by_cost, key=lambda one: one.seconds or 0.0, default=None)
        hint = "--days says when it has to end, --nodes how many machines it may take"
        if fastest is None:
            raise NoPlanFitsError("no plan fits any machine that a price is known of", hint=hint)
        if days is None:
            limit_s = max(limit_s, fastest.seconds or 0.0)
        if (fastest.seconds or 0.0) > limit_s:
            took = f"the fastest, {fastest.machine}, takes {format_days((fastest.seconds or 0.0) / _DAY_S)}"
            raise NoPlanFitsError(
                f"no machine trains on so many tokens in {format_days(limit_s / _DAY_S)}: {took}", hint=hint
            )
        in_time = [one for one in by_cost if (one.seconds or 0.0) <= limit_s]
        cheapest = {one.profile: one for one in reversed(in_time)}.values()
        shown = [one for one in in_time if one in cheapest][:most]
        later = [one for one in by_cost if days is None and one not in in_time]
        # Larger numbers of a machine that is named may be too slow as well: the cheapest of each says enough.
        too_long = {one.profile: one for one in reversed(later) if one.cost is not None}
        cheaper = [one for one in too_long.values() if not shown or (one.cost or 0.0) < (shown[-1].cost or 0.0)]
        return self.replace(
            machines=(*shown, *([] if fastest in shown else [fastest])),
            is_by_cost=True,
            too_long=tuple(sorted(cheaper, key=lambda one: one.cost or 0.0)),
        )


def compare_machines(
    workloads: Sequence[Workload], request: SearchRequest, prices: Sequence[PriceFile], *, is_spot: bool = False
) -> MachineComparison:
    """Return the best plan on the machines of each workload, best first; machines that no plan fits come last.

    Prices are the request's own, else the cheapest of `prices` for each.
    """
    offers = [_offer(workload, request, prices, is_spot=is_spot) for workload in workloads]
    fitting = [offer for offer in offers if offer.fits]
    is_by_cost = bool(fitting) and all(offer.cost_per_billion_tokens is not None for offer in fitting)
    worst = float("inf")

    def rank(offer: MachineOffer) -> tuple[float, float]:
        return (offer.cost_per_billion_tokens or worst if is_by_cost else 0.0), offer.step_time_s or worst

    currency = prices[0].currency if prices and request.price_per_gpu_hour is None else None
    return MachineComparison(
        machines=tuple(sorted(offers, key=rank)), is_by_cost=is_by_cost, tokens=request.tokens, currency=currency
    )


def _offer(workload: Workload, request: SearchRequest, prices: Sequence[PriceFile], *, is_spot: bool) -> MachineOffer:
    cluster = workload.cluster
    name = f"{cluster.num_nodes} x {cluster.name}" if cluster.num_nodes > 1 else cluster.name
    named = {"machine": name, "profile": cluster.name, "num_nodes": cluster.num_nodes}
    named |= {"num_gpus": cluster.num_gpus, "gpu": cluster.gpu.title}
    try:
        answer = recommendation(workload, replace(request, num_candidates=1))
    except ParaplanError as error:
        return MachineOffer(**named, fits=False, why_not=error.message)
    best, used = answer.result.best, answer.workload.cluster
    price = None if request.price_per_gpu_hour is not None else price_of(used, prices, is_spot=is_spot)
    per_gpu_hour = request.price_per_gpu_hour if price is None else price.per_gpu_hour
    billion = budget(answer.workload, best, tokens=1e9, price_per_gpu_hour=per_gpu_hour)
    run = None
    if request.tokens is not None:
        run = budget(answer.workload, best, tokens=request.tokens, price_per_gpu_hour=per_gpu_hour)
    return MachineOffer(
        **named,
        fits=True,
        plan=f"{best.plan.describe()}{'' if answer.chosen is None else f', {answer.chosen.options}'}",
        num_gpus_used=used.num_gpus,
        step_time_s=best.step.step_time_s,
        tokens_per_s=best.step.tokens_per_s_per_gpu * best.plan.world_size,
        mfu=best.step.mfu,
        peak_memory_bytes=best.peak_memory_bytes,
        usable_memory_bytes=best.usable_memory_bytes,
        price_per_gpu_hour=per_gpu_hour,
        price_source="--price" if price is None and per_gpu_hour is not None else None if price is None else str(price),
        price_url=None if price is None else price.offer.source,
        rented=price,
        seconds=None if run is None else run.seconds,
        cost=None if run is None else run.cost,
        cost_per_billion_tokens=billion.cost,
    )
