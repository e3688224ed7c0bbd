"""Effects of a few constants multiplied by factors on predicted step times: the knobs of calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paraplan.cost.cost_model import CostModel
from paraplan.cost.estimate import step_times
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.plan_table import Floats, PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import LinkSpeedTable
from paraplan.plan.parallel import ParallelPlan

NETWORK_KINDS = ("rdma", "tcp")

FactorName = Literal[
    "matmul", "attention", "memory", "host", "node_links", "network", "latency", "optimizer", "recompute", "bubble"
]


@dataclass(frozen=True)
class Knob:
    """One constant that a fit may multiply; `log_sd` is the standard deviation of its logarithm before the fit."""

    name: FactorName
    title: str
    log_sd: float
    source: str


KNOBS = (
    Knob("matmul", "matmul efficiency", 0.10, "best matmuls of one kind of GPU differ by 5 to 10 % (ml-engineering)"),
    Knob("attention", "attention kernels", 0.15, "spread of FlashAttention's published rates over shapes"),
    Knob("memory", "memory bandwidth", 0.15, "0.6 to 0.9 of the data sheet for kernels of usual sizes"),
    Knob("host", "host time per block", 0.40, "CPUs and frameworks differ by a factor of two"),
    Knob("node_links", "links inside a node", 0.15, "spread of nccl-tests results on one kind of link"),
    Knob("network", "network between nodes", 0.30, "0.5 to 1 of the NICs' rate, by topology and congestion"),
    Knob("optimizer", "optimizer step", 0.50, "fused, by lists or in a loop: 36 to 100 bytes a parameter"),
)
PARTS: dict[FactorName, str] = {"recompute": "recompute", "bubble": "bubble of the pipeline"}
"""Parts of a step that no constant makes longer by itself, and that `RunPrices` multiplies as they are."""
LATENCY = "latency of the network"
"""The factor `latency`. No calibration has it: runs of whole steps tell it hardly from bandwidth."""


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """One run to fit to."""

    workload: Workload
    plan: ParallelPlan
    measured_step_time_s: float


def scaled(workload: Workload, factors: Mapping[FactorName, float]) -> Workload:
    """Return `workload` with each named constant multiplied; those that are not named stay. Raises nothing."""

    def factor(name: FactorName) -> float:
        return factors.get(name, 1.0)

    constants, framework = workload.constants, workload.framework
    return replace(
        workload,
        constants=constants.replace(
            matmul_efficiency=constants.matmul_efficiency * factor("matmul"),
            plain_matmul_efficiency=constants.plain_matmul_efficiency * factor("matmul"),
            eager_attention_efficiency=constants.eager_attention_efficiency * factor("attention"),
            flash_attention_factor=constants.flash_attention_factor * factor("attention"),
            memory_bandwidth_efficiency=constants.memory_bandwidth_efficiency * factor("memory"),
            mixed_bytes_per_multiprocessor_s=constants.mixed_bytes_per_multiprocessor_s * factor("memory"),
            fused_optimizer_bytes=constants.fused_optimizer_bytes * factor("optimizer"),
            unfused_optimizer_bytes=constants.unfused_optimizer_bytes * factor("optimizer"),
        ),
        framework=_with_host_time(framework, factor("host")),
        links=_scaled_links(workload.links, factors),
        cluster=_scaled_network(workload.cluster, bandwidth=factor("network"), latency=factor("latency")),
    )


def _with_host_time(framework: FrameworkProfile, factor: float) -> FrameworkProfile:
    sharding = framework.data_parallel.sharding
    return framework.changed(
        kernels={
            "host_s_per_block": framework.kernels.host_s_per_block * factor,
            "collective_host_s": framework.kernels.collective_host_s * factor,
        },
        data_parallel={
            "sharding": sharding.replace(
                gather_host_s=sharding.gather_host_s * factor, reduce_host_s=sharding.reduce_host_s * factor
            )
        },
    )


def _scaled_network(cluster: Cluster, *, bandwidth: float, latency: float) -> Cluster:
    """Return the cluster with a network as slow to answer, and with what was measured on it; `links` has its rates."""
    network = cluster.network
    if network is None or bandwidth == latency == 1.0:
        return cluster
    measured = tuple(
        one.replace(
            bus_bandwidth_bytes_per_s={name: rate * bandwidth for name, rate in one.bus_bandwidth_bytes_per_s.items()}
        )
        for one in network.measured
    )
    return cluster.replace(network=network.replace(measured=measured, latency_s=network.latency_s * latency))


class RunPrices:
    """Predicts all runs at once: those that share a workload as one table of plans."""

    def __init__(self, runs: Sequence[CalibrationRun]) -> None:
        groups: dict[tuple[str, ...], list[int]] = {}
        for index, run in enumerate(runs):
            workload = run.workload
            parts = (workload.model, workload.training, workload.cluster, workload.framework, workload.constants)
            groups.setdefault(tuple(part.model_dump_json() for part in parts), []).append(index)
        self._groups = [
            (
                np.array(rows),
                CostModel.of_workload(runs[rows[0]].workload),
                PlanTable.of_plans([runs[row].plan for row in rows]),
            )
            for rows in groups.values()
        ]
        self._count = len(runs)

    def times(self, factors: Mapping[FactorName, float]) -> Floats:
        """Return each run's predicted step time in seconds with constants and parts multiplied by `factors`."""
        times = np.zeros(self._count)
        for rows, workload, table in self._groups:
            step = step_times(scaled(workload, factors), table)
            longer = (factors.get("recompute", 1.0) - 1) * step.recompute_s
            longer = longer + (factors.get("bubble", 1.0) - 1) * step.pipeline_bubble_s
            times[rows] = step.step_time_s + longer
        return times

    def log_times(self, point: Floats) -> Floats:
        """Return the logarithm of each run's predicted step time where the logarithms of `KNOBS` are `point`."""
        return np.log(self.times({knob.name: float(np.exp(value)) for knob, value in zip(KNOBS, point, strict=True)}))


def _scaled_links(links: LinkSpeedTable, factors: Mapping[FactorName, float]) -> LinkSpeedTable:
    kinds = []
    for kind in links.kinds:
        factor = factors.get("network" if kind.kind in NETWORK_KINDS else "node_links", 1.0)
        kinds.append(kind.replace(bus_efficiency={name: rate * factor for name, rate in kind.bus_efficiency.items()}))
    return links.replace(kinds=tuple(kinds))
