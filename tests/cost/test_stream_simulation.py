"""Streams that run beside each other, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.communication.collectives import data_links
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.streams import BlockSeconds, Task, run_streams, sharded_tasks
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec


def test_streams_slow_each_other_while_both_work() -> None:
    both = [Task("compute", 3.0), Task("communication", 1.0)]
    assert run_streams(both, slowdown=1.0).total_s == pytest.approx(3.0)
    times = run_streams(both, slowdown=1.2)
    assert times.total_s == pytest.approx(1.2 + 2.0)
    assert times.busy_s == pytest.approx({"compute": 3.2, "communication": 1.2})
    assert times.ends_s == pytest.approx((3.2, 1.2))


def test_a_task_waits_for_those_that_it_names_and_for_its_stream() -> None:
    tasks = [Task("communication", 1.0), Task("compute", 2.0, after=(0,)), Task("communication", 1.0, after=(1,))]
    assert run_streams(tasks, slowdown=2.0).total_s == pytest.approx(4.0)
    with pytest.raises(ValueError, match=r"tasks \[0, 1\] wait for each other"):
        run_streams([Task("compute", 1.0, after=(1,)), Task("communication", 1.0, after=(0,))], slowdown=1.0)


def test_gathers_hide_behind_the_neighbour_and_the_first_and_the_last_do_not() -> None:
    block = BlockSeconds(forward_s=1.0, backward_s=2.0, gather_s=0.5, reduce_s=0.5)
    tasks = sharded_tasks([block] * 3, num_microbatches=1)
    assert run_streams(tasks, slowdown=1.0).total_s == pytest.approx(0.5 + 3 * 3.0 + 0.5)


@given(
    st.lists(st.tuples(*[st.floats(0.0, 5.0)] * 4), min_size=1, max_size=6),
    st.integers(1, 3),
    st.floats(1.0, 1.5),
)
def test_a_step_is_no_shorter_than_each_stream_and_no_longer_than_all_in_a_row(
    rows: list[tuple[float, float, float, float]], count: int, slowdown: float
) -> None:
    tasks = sharded_tasks([BlockSeconds(*row) for row in rows], num_microbatches=count)
    total_s = run_streams(tasks, slowdown=slowdown).total_s
    by_stream = {name: sum(one.seconds for one in tasks if one.stream == name) for name in ("compute", "communication")}
    assert total_s >= max(by_stream.values()) - 1e-9
    assert total_s <= sum(by_stream.values()) * slowdown + 1e-9


@pytest.mark.parametrize(
    ("model", "machine", "nodes", "micro_batches"),
    [
        ("llama-3-8b", "dgx-h100", 1, (1, 2)),
        ("llama-3-8b", "dgx-h100", 8, (1, 2)),
        ("llama-3-8b", "dgx-a100", 8, (1, 1)),
        ("llama-3-8b", "dgx-a100", 8, (4, 2)),
        ("llama-3-70b", "dgx-h100", 16, (1, 2)),
        ("gpt2-xl", "dgx-a100", 1, (4, 4)),
        ("gpt2-xl", "aws-g5-48xlarge", 1, (4, 2)),
        ("mixtral-8x7b", "dgx-h100", 4, (1, 2)),
        ("llama-3-8b", "aws-g5-48xlarge", 4, (1, 2)),
        ("llama-3-8b", "azure-nd40rs-v2", 4, (2, 2)),
    ],
)
def test_the_closed_form_of_the_search_takes_as_long_as_streams_of_one_plan(
    model: str, machine: str, nodes: int, micro_batches: tuple[int, int]
) -> None:
    """The search prices thousands of plans of ZeRO-3 at once; the streams are run one event after the other."""
    cluster, spec, (size, count) = cluster_from_profile(machine, num_nodes=nodes), read_model(model), micro_batches
    training = TrainingSpec(
        global_batch_size=cluster.num_gpus * size * count,
        seq_length=min(4096, spec.max_seq_length or 4096),
        attention="flash",
    )
    workload = Workload.of(spec, training, cluster, framework="fsdp")
    plan = ParallelPlan(dp=cluster.num_gpus, zero_stage=3, micro_batch_size=size, num_microbatches=count)
    table = PlanTable.of_plans([plan])
    costs, links = block_costs(workload, table), data_links(workload, table)[0]
    step = evaluate_plan(workload, plan).step
    # Passes of the closed form, the ends' shares included, divided over the blocks as their own times are.
    passes_s = step.compute_s / count / spec.num_blocks
    forward_share = np.sum(costs.of_all(costs.forward_s)) / np.sum(costs.of_all(costs.forward_s + costs.backward_s))
    parameters = np.array([spec.parameters.total / spec.num_blocks])
    block = BlockSeconds(
        forward_s=passes_s * float(forward_share),
        backward_s=passes_s * float(1 - forward_share),
        gather_s=float(links.all_gather_s(parameters * 2.0)[0]),
        reduce_s=float(links.reduce_scatter_s(parameters * workload.framework.storage.gradient_bytes)[0]),
    )
    tasks = sharded_tasks([block] * spec.num_blocks, num_microbatches=count)
    streams_s = run_streams(tasks, slowdown=workload.constants.overlap_slowdown).total_s
    assert step.compute_s + step.data_parallel_s == pytest.approx(streams_s, rel=0.05 if "mixtral" in model else 0.015)
