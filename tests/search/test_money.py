"""What money trains on, and machines side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.hardware.prices import load_prices, machines_for_rent
from paraplan.plan.executor import OWN_RUNTIME
from paraplan.plan.goodput import FailureRate
from paraplan.report.machines_page import machine_rows
from paraplan.search.constraints import Constraints
from paraplan.search.machine_comparison import compare_machines
from paraplan.search.money import affords
from paraplan.search.recommendation import SearchRequest, recommendation

MakeWorkload = Callable[..., Workload]
PLAIN = Constraints(tp=1, pp=1, cp=1)
"""Less to search, where any plan will do."""


def test_money_buys_the_tokens_that_cost_it(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b")
    found = recommendation(made, SearchRequest(money=1000, price_per_gpu_hour=2.0, fixed=PLAIN)).bought
    assert found is not None
    assert found.gpu_hours == 500
    assert found.is_compute_optimal
    assert found.wanted_tokens == pytest.approx(20 * made.model.parameters.total)
    again = recommendation(made, SearchRequest(tokens=found.tokens, price_per_gpu_hour=2.0, fixed=PLAIN)).budget
    assert again is not None
    assert again.cost == pytest.approx(1000)
    more = SearchRequest(money=1000, price_per_gpu_hour=2.0, tokens=2 * found.tokens, fixed=PLAIN)
    asked = recommendation(made, more).bought
    assert asked is not None
    assert asked.wanted_cost == pytest.approx(2000)


def test_failures_leave_fewer_tokens_for_the_money(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b")
    asked = SearchRequest(money=1000, price_per_gpu_hour=2.0, fixed=PLAIN)
    whole = recommendation(made, asked).bought
    failing = recommendation(made, replace(asked, failures=FailureRate.parse("2h")))
    assert whole is not None
    assert failing.bought is not None
    assert failing.goodput is not None
    assert failing.bought.tokens == pytest.approx(whole.tokens * failing.goodput.goodput)


def test_more_money_affords_what_less_does(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b")
    cost = recommendation(made, SearchRequest(money=1000, price_per_gpu_hour=2.0, fixed=PLAIN)).bought
    assert cost is not None

    def is_paid(money: float) -> bool:
        return affords(made, money=money, price_per_gpu_hour=2.0, tokens=None, executor=OWN_RUNTIME, fixed=PLAIN)

    assert is_paid(1.01 * cost.wanted_cost)
    assert not is_paid(0.99 * cost.wanted_cost)
    assert not is_paid(1.0)


def test_machines_are_ranked_by_cost_where_all_prices_are_known_and_else_by_time(workload: MakeWorkload) -> None:
    machines = [workload("llama-3-8b", name, seq_length=4096) for name in ("dgx-a100", "rtx-3090-x2", "dgx-h100")]
    found = compare_machines(machines, SearchRequest(tokens=1e9, fixed=PLAIN), load_prices())
    assert found.is_by_cost
    assert [offer.fits for offer in found.machines] == [True, True, False]
    first, second, last = found.machines
    assert (first.cost or 0) < (second.cost or 0)
    assert first.cost == pytest.approx(first.cost_per_billion_tokens)
    assert "no plan fits" in (last.why_not or "")
    assert first.price_url is not None
    unknown = [machines[0], workload("llama-3-8b", "4xl40s", seq_length=4096)]
    by_time = compare_machines(unknown, SearchRequest(fixed=PLAIN), load_prices())
    assert not by_time.is_by_cost
    times = [offer.step_time_s for offer in by_time.machines if offer.step_time_s is not None]
    assert times == sorted(times)
    own = compare_machines(unknown, SearchRequest(price_per_gpu_hour=1.0, fixed=PLAIN), load_prices())
    assert {offer.price_source for offer in own.machines if offer.fits} == {"--price"}


def test_of_machines_anywhere_the_cheapest_size_in_time_and_the_fastest_are_kept(workload: MakeWorkload) -> None:
    rented = machines_for_rent(load_prices(), most_nodes=4)
    assert [size for name, size in rented if name == "aws-p5-48xlarge"] == [1, 2, 4]
    assert [size for name, size in rented if name == "8xh100-pcie-80gb"] == [1], "nobody says how several are connected"
    wanted = [("dgx-a100", 1), ("aws-p5-48xlarge", 1), ("aws-p5-48xlarge", 4)]
    machines = [workload("llama-3-8b", name, num_nodes=size, seq_length=4096) for name, size in wanted]
    found = compare_machines(machines, SearchRequest(tokens=1e9, fixed=PLAIN), load_prices())
    kept = found.cheapest_in_time(days=None, most=1)
    assert [(offer.profile, offer.num_nodes) for offer in kept.machines] == [("dgx-a100", 1), ("aws-p5-48xlarge", 4)]
    slowest, fastest = (offer.seconds or 0.0 for offer in kept.machines)
    in_time = found.cheapest_in_time(days=(fastest + 1) / 86_400, most=5)
    assert [(offer.profile, offer.num_nodes) for offer in in_time.machines] == [("aws-p5-48xlarge", 4)]
    assert slowest > fastest
    with pytest.raises(NoPlanFitsError, match="the fastest, 4 x aws-p5-48xlarge, takes"):
        found.cheapest_in_time(days=fastest / 2 / 86_400, most=5)


def test_machines_that_take_over_a_year_are_named_apart_unless_days_ask_for_them(workload: MakeWorkload) -> None:
    names = ["8xrtx-3090", "8xrtx-4090", "dgx-b200"]
    fields: dict[str, Any] = {"seq_length": 4096, "global_batch_size": 512}
    machines = [workload("llama-3-8b", name, **fields) for name in names]
    found = compare_machines(machines, SearchRequest(tokens=1e12, fixed=PLAIN), load_prices())
    kept = found.cheapest_in_time(days=None, most=5)
    assert [offer.profile for offer in kept.machines] == ["dgx-b200"]
    assert [offer.profile for offer in kept.too_long] == ["8xrtx-3090"], "8 RTX 4090 cost more than what is shown"
    _, _, notes = machine_rows(kept, with_links=False)
    assert any("over a year: 8xrtx-3090, 6." in note and "years for" in note for note in notes)
    late = found.cheapest_in_time(days=365 * 20, most=5)
    assert late.machines[0].profile == "8xrtx-3090"
    assert late.too_long == ()
    _, rows, notes = machine_rows(late, with_links=False)
    assert any(note.startswith("over a year: 8xrtx-3090") for note in notes)
    assert "years" in rows[0].cells[-2]
    slow = compare_machines(machines[:2], SearchRequest(tokens=1e12, fixed=PLAIN), load_prices())
    assert len(slow.cheapest_in_time(days=None, most=5).machines) > 0, "where all take longer the fastest is shown"
