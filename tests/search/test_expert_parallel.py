from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_selection import with_all

from paraplan.cost.estimate import peak_memory, step_times, why_unsuitable
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import load_framework
from paraplan.cost.plan_table import Floats
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.executor import ANYTHING
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason
from paraplan.report.estimate_json import warnings_of
from paraplan.search.constraints import Constraints
from paraplan.search.degrees import all_degrees
from paraplan.search.lower_bound import least_step_s
from paraplan.search.rank_orders import ORDERS
from paraplan.search.search import search
from paraplan.search.space import PlanSpace

DEEPSPEED_ZERO = load_framework("deepspeed-zero")
MEGATRON_CORE = load_framework("megatron-core")

MakeWorkload = Callable[..., Workload]

SMALL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


@pytest.mark.parametrize(("profile", "nodes", "batch"), [("rtx-3090-x2", 2, 4), *with_all([("aws-g5-12xlarge", 2, 8)])])
def test_the_search_over_experts_loses_nothing_that_brute_force_finds(
    workload: MakeWorkload, mixture: str, profile: str, nodes: int, batch: int
) -> None:
    made = replace(workload(mixture, profile, num_nodes=nodes, global_batch_size=batch), framework=MEGATRON_CORE)
    seconds, peaks = _all_plans(made)
    found = search(made, num_candidates=1000, executor=ANYTHING)
    assert found.candidates[0].step_time_s == pytest.approx(seconds.min())
    assert {one.plan.ep for one in found.candidates} == {1, 2, 4}
    smallest = search(made, objective="memory", executor=ANYTHING)
    assert smallest.candidates[0].peak_memory_bytes == pytest.approx(peaks.min(), rel=1e-6)


def _all_plans(made: Workload) -> tuple[Floats, Floats]:
    """Return seconds and peak bytes of all plans that fit, under every order of ranks; none beats its least time."""
    seconds, peaks = [], []
    for chunk in PlanSpace(made, ANYTHING).chunks():
        peak = peak_memory(made, chunk.table)
        fitting = chunk.table.select(peak <= made.usable_memory_bytes)
        for order in ORDERS:
            times = step_times(made, fitting.ordered(order)).step_time_s
            assert (least_step_s(made, fitting) <= times * (1 + 1e-9)).all()
            seconds.append(times)
            peaks.append(peak[peak <= made.usable_memory_bytes])
    return np.concatenate(seconds), np.concatenate(peaks)


def test_every_degree_of_experts_is_tried_once(workload: MakeWorkload, mixture: str) -> None:
    degrees = list(all_degrees(8, num_experts=4))
    assert len(degrees) == len(set(degrees))
    assert all(one.dp * one.cp % one.ep == 0 and one.ep in (1, 2, 4) for one in degrees)
    assert {one.ep for one in all_degrees(8)} == {1}
    made = replace(workload(mixture, "dgx-h100"), framework=MEGATRON_CORE)
    found = {(plan.dp * plan.cp, plan.ep) for plan in _plans(PlanSpace(made, ANYTHING))}
    assert found == {(1, 1), (2, 1), (2, 2), *((4, ep) for ep in (1, 2, 4)), *((8, ep) for ep in (1, 2, 4))}


@pytest.mark.parametrize("num_experts", [4, 6, 8, 128])
def test_ranks_that_have_experts_of_their_own_are_no_more_than_these(num_experts: int) -> None:
    whole, split = (list(all_degrees(16, num_experts=num_experts, whole_experts=each)) for each in (True, False))
    for one in whole:
        if num_experts % one.tp == 0:  # others are refused for tp
            assert num_experts % one.options["ep"] == 0
            assert (one.dp * one.cp * one.tp) % one.options["ep"] == 0
    assert all(one.options == one.named for one in split)
    assert {one.options["ep"] for one in whole} >= {1, 2, *({4, 8} if num_experts % 8 == 0 else set())}


def test_a_degree_of_experts_counts_ranks_of_tp_where_the_framework_does(workload: MakeWorkload) -> None:
    bridge, core = (load_framework(name) for name in ("megatron-bridge", "megatron-core"))
    made = replace(workload("mixtral-8x7b", num_nodes=2, seq_length=4096), framework=bridge)
    plans = _plans(PlanSpace(made, ANYTHING, Constraints(tp=2, ep=8)))
    assert {plan.ep for plan in plans} == {4}
    with pytest.raises(PlanError, match="tp=2 and ep=1 do not go together"):
        PlanSpace(made, ANYTHING, Constraints(tp=2, ep=1))
    spread = ParallelPlan(dp=2, tp=8, ep=2, sequence_parallel=True, num_microbatches=32)
    found = why_unsuitable(made, spread)
    assert found is not None
    assert found.message == "ep=16: mixtral-8x7b has 8 experts to a layer"
    divided = replace(made, framework=core)
    assert why_unsuitable(divided, spread) is None

    def asked(profile: FrameworkProfile, ep: int, tp: int = 2) -> int:
        return profile.experts.beside_tensor(ep, tp=tp, data_ranks=16, title=profile.title)

    assert (asked(bridge, 32), asked(core, 16), asked(bridge, 16, tp=1)) == (16, 16, 16)
    with pytest.raises(PlanError, match="counts the ranks of tp=2 too") as refused:
        asked(bridge, 5)
    assert refused.value.hint == "use --ep 2 or 4 or 8 or 16"
    with pytest.raises(PlanError) as refused:  # 8 ranks, of which 4 divide tensors: the recipe of gemma-4-26b-a4b
        bridge.experts.beside_tensor(2, tp=4, data_ranks=2, title=bridge.title)
    assert refused.value.hint == "use --ep 4 or 8"
    with pytest.raises(PlanError, match="Megatron-Core divides each expert over tp=2 too") as refused:
        asked(core, 32)
    assert "use --ep 16, or --framework megatron-bridge" in str(refused.value.hint)


def _plans(space: PlanSpace) -> list[ParallelPlan]:
    return [chunk.table.plan(row) for chunk in space.chunks() for row in range(0, len(chunk.table), 5)]


def test_experts_of_a_large_mixture_are_spread_by_megatron_bridge(workload: MakeWorkload) -> None:
    bridge = load_framework("megatron-bridge")
    made = replace(workload("mixtral-8x7b", num_nodes=2, seq_length=4096), framework=bridge)
    even, uneven = (
        search(replace(made, training=made.training.replace(expert_load=load)), executor=ANYTHING).best.plan
        for load in (1.0, 2.0)
    )
    assert even.ep > 1
    assert uneven.ep < even.ep, "the busiest rank of few experts would keep the others waiting"


def test_who_cannot_spread_experts_has_those_plans_counted_and_left_out(workload: MakeWorkload, mixture: str) -> None:
    made = replace(workload(mixture, "dgx-h100"), framework=load_framework("fsdp"))
    found = search(made, num_candidates=1000, executor=ANYTHING)
    assert {one.plan.ep for one in found.candidates} == {1}
    assert sum(one.count for one in found.rejections if "does not spread" in one.reason) > 1000


def test_the_runtime_is_given_plans_that_spread_experts(workload: MakeWorkload, mixture: str) -> None:
    found = search(workload(mixture, "dgx-h100"), num_candidates=1000)
    assert {one.plan.ep for one in found.candidates} > {1}
    assert all(unsupported_reason(one.plan) is None for one in found.candidates)


@pytest.mark.parametrize(
    ("model", "ep", "message"),
    [
        ("llama-3-8b", 4, "ep=4: llama-3-8b has no experts"),
        ("mixtral-8x7b", 16, "ep=16: mixtral-8x7b has 8 experts to a layer"),
        ("mixtral-8x7b", 3, "ep=3: mixtral-8x7b has 8 experts to a layer"),
    ],
)
def test_an_ep_that_cannot_be_had_is_an_error_with_what_would_do(
    workload: MakeWorkload, model: str, ep: int, message: str
) -> None:
    made = replace(workload(model, num_nodes=2), framework=MEGATRON_CORE)
    with pytest.raises(PlanError) as caught:
        PlanSpace(made, ANYTHING, Constraints(ep=ep))
    assert str(caught.value).startswith(message)
    assert "use --ep 1" in str(caught.value.hint)


def test_an_estimate_says_where_its_framework_does_not_spread_experts_so(workload: MakeWorkload, mixture: str) -> None:
    plan = ParallelPlan(dp=8, ep=2, zero_stage=3)
    made = workload(mixture, "dgx-h100")
    words = {
        name: [note for note in warnings_of(replace(made, framework=load_framework(name)), plan) if "ep=2" in note]
        for name in ("hf", "transformers", "torchtitan", "nemo-automodel", "torchtune")
    }
    assert {name for name, notes in words.items() if notes} == {"hf", "torchtune"}
    assert "paraplan writes no expert parallelism for the Trainer" in words["hf"][0]
    automodel = replace(made, framework=load_framework("nemo-automodel"))
    assert any("ep=2 beside ZeRO-0" in note for note in warnings_of(automodel, plan.replace(zero_stage=0)))
    assert {one.zero_stage for one in _plans(PlanSpace(automodel, ANYTHING)) if one.ep > 1} == {2, 3}
