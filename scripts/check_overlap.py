"""Compare the closed form of ZeRO-3's overlap with streams that are run one event after the other.

    python scripts/check_overlap.py

For models, machines and micro-batches the step of both, and where they differ by more than 2 %. The search prices
thousands of plans at once with the closed form; the streams of one plan are run here.
"""

from __future__ import annotations

import sys

import numpy as np

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.communication.collectives import data_links
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.streams import BlockSeconds, run_streams, sharded_tasks
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

TOLERANCE, MOST = 0.02, 0.05
"""What is shown as a difference, and what this script fails at."""
CASES = (
    ("llama-3-8b", "dgx-h100", 1, 1, 2),
    ("llama-3-8b", "dgx-h100", 8, 1, 2),
    ("llama-3-8b", "dgx-a100", 8, 1, 1),
    ("llama-3-8b", "dgx-a100", 8, 4, 2),
    ("llama-3-70b", "dgx-h100", 16, 1, 2),
    ("gpt2-xl", "dgx-a100", 1, 4, 4),
    ("gpt2-xl", "aws-g5-48xlarge", 1, 4, 2),
    ("mixtral-8x7b", "dgx-h100", 4, 1, 2),
    ("llama-3-8b", "aws-g5-48xlarge", 4, 1, 2),
    ("llama-3-8b", "azure-nd40rs-v2", 4, 2, 2),
)
"""Model, machine, nodes, micro-batch size, micro-batches."""


def compared(model: str, machine: str, nodes: int, size: int, count: int) -> tuple[float, float]:
    """Return the seconds of a step's passes with their communication: of the closed form, and of the streams."""
    cluster = cluster_from_profile(machine, num_nodes=nodes)
    spec = read_model(model)
    length = min(4096, spec.max_seq_length or 4096)
    training = TrainingSpec(global_batch_size=cluster.num_gpus * size * count, seq_length=length, attention="flash")
    made = Workload.of(spec, training, cluster, framework="fsdp")
    plan = ParallelPlan(dp=cluster.num_gpus, zero_stage=3, micro_batch_size=size, num_microbatches=count)
    table = PlanTable.of_plans([plan])
    costs, links = block_costs(made, table), data_links(made, table)[0]
    step = evaluate_plan(made, plan).step
    num_blocks = spec.num_blocks
    # Passes of the closed form, the ends' shares included, divided over the blocks as their own times are.
    each_s = step.compute_s / count / num_blocks
    share = float(np.sum(costs.of_all(costs.forward_s)) / np.sum(costs.of_all(costs.forward_s + costs.backward_s)))
    parameters = spec.parameters.total / num_blocks
    gradient_bytes = made.framework.storage.gradient_bytes
    block = BlockSeconds(
        forward_s=each_s * share,
        backward_s=each_s * (1 - share),
        gather_s=float(links.all_gather_s(np.array([parameters * 2.0]))[0]),
        reduce_s=float(links.reduce_scatter_s(np.array([parameters * gradient_bytes]))[0]),
    )
    tasks = sharded_tasks([block] * num_blocks, num_microbatches=count)
    times = run_streams(tasks, slowdown=made.constants.overlap_slowdown)
    return step.compute_s + step.data_parallel_s, times.total_s


def main() -> int:
    """Compare all cases; 1 where one differs by more than `MOST`."""
    print(f"{'model':<14}{'machine':<18}{'nodes':>5}{'micro-batches':>16}{'closed form':>14}{'streams':>10}{'':>9}")
    agreed = True
    for model, machine, nodes, size, count in CASES:
        closed_s, streams_s = compared(model, machine, nodes, size, count)
        error = closed_s / streams_s - 1
        agreed &= abs(error) <= MOST
        batches = f"{size} x {count}"
        told = f"{closed_s:12.3f} s{streams_s:8.3f} s{error:+9.1%}"
        print(f"{model:<14}{machine:<18}{nodes:>5}{batches:>16}{told}{'' if abs(error) <= TOLERANCE else '  DIFFERS'}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
