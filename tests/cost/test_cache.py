from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.cache import BlockCostCache, ShardingKey
from paraplan.cost.cost_model import CostModel
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]


def test_columns_grow_and_keep_what_was_known() -> None:
    known = BlockCostCache()
    for first in range(0, 40, 4):
        shardings: list[ShardingKey] = [(number, 0) for number in range(first, first + 4)]
        assert known.missing(shardings) == [0, 1, 2, 3]
        values = np.arange(first, first + 4, dtype=float)
        known.add(shardings, {"one": values, "many": values[:, None] * np.ones(3)})
        assert known.missing(shardings) == []
    columns = known.columns()
    assert columns["one"].tolist() == list(range(40))
    assert columns["many"][:, 2].tolist() == list(range(40))
    assert known.rows[17, 0] == 17


def test_costs_are_the_same_however_tables_ask_for_them(workload: MakeWorkload) -> None:
    plans = [
        ParallelPlan(tp=tp, micro_batch_size=size, recompute=recompute)
        for tp in (1, 2, 4)
        for size in (1, 3)
        for recompute in ("none", "full")
    ]
    together, apart = (CostModel.of_workload(workload("gpt2")) for _ in range(2))
    whole = block_costs(together, PlanTable.of_plans(plans))
    for row, plan in reversed(list(enumerate(plans))):
        alone = block_costs(apart, PlanTable.of_plans([plan]))
        for name in ("forward_s", "backward_s", "saved_bytes", "parameters"):
            expected = getattr(whole, name)[whole.key[row]]
            assert getattr(alone, name)[alone.key[0]] == pytest.approx(expected, rel=1e-12)
    assert len(apart.cache.blocks.rows) == len(together.cache.blocks.rows) == len(plans)


def test_a_cost_model_shares_costs_of_blocks_with_those_in_which_they_are_the_same(workload: MakeWorkload) -> None:
    plain = workload("gpt2")
    model = CostModel.of_workload(plain)
    assert CostModel.of_workload(model) is model
    block_costs(model, PlanTable.of_plans([ParallelPlan()]))
    rows = model.cache.blocks.rows
    assert len(rows) == 1
    more, longer = (plain.training.replace(**{name: 128}) for name in ("global_batch_size", "seq_length"))
    assert replace(model, cluster=plain.cluster.replace(num_nodes=2)).cache.blocks.rows is rows
    assert replace(model, training=more).cache.blocks.rows is rows
    other = workload("gpt2", "dgx-a100").cluster
    changed = [replace(model, training=longer), replace(model, cluster=other), model.trained_as(longer)]
    assert not any(one.cache.blocks.rows for one in changed)
    assert not CostModel.of_workload(plain).cache.blocks.rows
    assert replace(model, cluster=other).cache.group_speeds is not model.cache.group_speeds
