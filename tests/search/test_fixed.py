from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from case_selection import with_all

from paraplan.api.executors import executor_of
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search
from paraplan.search.space import PlanSpace

MakeWorkload = Callable[..., Workload]
LLAMA = {"model": "llama-3-8b", "seq_length": 8192, "global_batch_size": 64}


@pytest.mark.parametrize(
    "fixed",
    [
        Constraints(pp=2, schedule="interleaved_1f1b", recompute="full", offload="optimizer"),
        Constraints(dp=2, cp=2, tp=2, zero_stage=3, micro_batch_size=2, sequence_parallel=False),
        *with_all(
            [
                Constraints(tp=4),
                Constraints(pp=2, schedule="interleaved_1f1b"),
                Constraints(zero_stage=3, recompute="full", offload="optimizer"),
                Constraints(dp=2, cp=4, micro_batch_size=2),
                Constraints(tp=2, sequence_parallel=False),
            ]
        ),
    ],
)
def test_a_fixed_space_is_what_is_left_of_the_whole_one(workload: MakeWorkload, fixed: Constraints) -> None:
    made = workload(**LLAMA)
    columns = ("dp", "tp", "pp", "cp", "zero_stage", "micro_batch_size", "schedule", "recompute", "offload", "split")

    def rows(space: PlanSpace) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for chunk in space.chunks():
            plans = [chunk.table.plan(row) for row in range(len(chunk.table))]
            kept = [
                space.fixed is not FREE
                or fixed.allows(
                    **{axis: getattr(plan, axis) for axis in ("dp", "tp", "pp", "cp")},
                    zero_stage=plan.zero_stage,
                    micro_batch_size=plan.micro_batch_size,
                    recompute=plan.recompute,
                    schedule=plan.pipeline_schedule,
                    sequence_parallel=plan.sequence_parallel,
                    offload=plan.offload,
                )
                for plan in plans
            ]
            found += zip(*(getattr(chunk.table, name)[np.array(kept)].tolist() for name in columns), strict=True)
        return sorted(found)

    whole, part = rows(PlanSpace(made)), rows(PlanSpace(made, fixed=fixed))
    # Rows of uneven divisions are numbered as they are found.
    assert [row[:-1] for row in part] == [row[:-1] for row in whole]
    assert part


def test_all_candidates_have_what_is_fixed(workload: MakeWorkload) -> None:
    found = search(workload(**LLAMA), fixed=Constraints(tp=4, zero_stage=1), num_candidates=5)
    assert {(one.plan.tp, one.plan.zero_stage) for one in found.candidates} == {(4, 1)}
    free = search(workload(**LLAMA), num_candidates=100)
    alike = [one for one in free.candidates if (one.plan.tp, one.plan.zero_stage) == (4, 1)]
    assert found.candidates[0].step_time_s == pytest.approx(alike[0].step_time_s)


@pytest.mark.parametrize(
    ("fixed", "message", "hint"),
    [
        (Constraints(tp=3), "--tp 3: 3 does not divide the 32 attention and 8 key", "use --tp 1, 2, 4 or 8"),
        (Constraints(tp=16), "--tp 16: 16 does not divide the 32 attention and 8 key", "use --tp 1, 2, 4 or 8"),
        (Constraints(pp=5), "--pp 5: 5 does not divide 8 GPUs", "use --pp 1, 2, 4 or 8"),
        (Constraints(pp=64), "--pp 64: 64 pipeline stages for the 32 blocks", "use --pp 1, 2, 4 or 8"),
        (Constraints(tp=4, dp=4), "--dp 4 and --tp 4 do not go together on 8 GPUs", "use --dp 1 or 2, or --tp 1 or 2"),
        (Constraints(tp=4, cp=4), "--tp 4 and --cp 4 do not go together", "use --tp 1 or 2, or --cp 1 or 2"),
        (Constraints(micro_batch_size=3), "--micro-batch 3 divides no rank's share", "1, 2, 4, 8, 16, 32 or 64"),
        (Constraints(pp=2, zero_stage=3), "no plan has all of --pp 2, --zero 3", "ZeRO 0 and 1 only"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_would_do(
    workload: MakeWorkload, fixed: Constraints, message: str, hint: str
) -> None:
    with pytest.raises(PlanError) as caught:
        search(workload(**LLAMA), fixed=fixed)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)
    assert caught.value.exit_status == 2


def test_replicas_that_do_not_divide_the_batch_are_refused_with_those_that_do(workload: MakeWorkload) -> None:
    with pytest.raises(PlanError, match="dp=8: dp does not divide the global batch of 12; hint: use dp=1, 2 or 4"):
        search(workload(global_batch_size=12), fixed=Constraints(dp=8))


def test_where_only_what_is_fixed_does_not_fit_the_hint_is_to_leave_it_out(workload: MakeWorkload) -> None:
    few = {"recompute": "full", "micro_batch_size": 1}  # of what is free only what fits soonest
    fixed = Constraints(tp=1, pp=1, cp=1, zero_stage=0, offload="none", **few)  # type: ignore[arg-type]
    with pytest.raises(NoPlanFitsError, match="without tp=1 and zero_stage=0: "):
        recommendation(
            workload("llama-3-70b", num_nodes=2, seq_length=4096, global_batch_size=16), SearchRequest(fixed=fixed)
        )
    with pytest.raises(NoPlanFitsError) as caught:  # here one of them suffices, which has its own plan beside it
        recommendation(
            workload("llama-3.2-3b", "4xrtx-4090", seq_length=1024, global_batch_size=8), SearchRequest(fixed=fixed)
        )
    assert "without tp=1 and" not in str(caught.value)


def test_cpu_processes_offload_nothing(workload: MakeWorkload) -> None:
    made = workload("gpt2", "cpu", global_batch_size=8, seq_length=128)
    found = search(made, num_candidates=100)
    assert {one.plan.offload for one in found.candidates} == {"none"}
    assert search(made, fixed=Constraints(offload="none")).candidates
    with pytest.raises(PlanError, match=r"offload='optimizer': CPU processes have all on the host already"):
        search(made, fixed=Constraints(offload="optimizer"))


def test_one_gpu_gathers_parameters_from_a_host_that_holds_them(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", "1xh100", global_batch_size=8, seq_length=4096)
    found = search(made, num_candidates=20)
    assert found.best.plan.gathers_alone
    assert all(one.plan.gathers_alone or not one.plan.zero_stage for one in found.candidates)
    with pytest.raises(NoPlanFitsError):
        search(made, fixed=Constraints(zero_stage=0))
    for_many_ranks = Workload.of(made.model, made.training, made.cluster, framework="torchtitan")
    with pytest.raises(NoPlanFitsError):
        search(for_many_ranks, executor=executor_of(for_many_ranks))


def test_products_of_axes_without_a_choice_under_what_is_fixed_are_left_out(workload: MakeWorkload) -> None:
    plain = workload("qwen3-235b-a22b", profile="8xh800", num_nodes=32, seq_length=4096, global_batch_size=2048)
    made = Workload.of(plain.model, plain.training, plain.cluster, plain.links, framework="megatron-core")
    fixed = Constraints(zero_stage=1)  # dp 1 has nothing to shard
    assert search(made, num_candidates=1, executor=executor_of(made), fixed=fixed).best.plan.zero_stage == 1
