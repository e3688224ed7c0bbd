"""Several machines together: what each has, how they differ, and the cluster that can be planned for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paraplan.errors import ProfileError
from paraplan.hardware.catalogue.real_machines import machine_from_topology
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.interconnect import InterconnectReport, InterconnectThresholds, describe_interconnect
from paraplan.hardware.node_differences import compare_nodes, weakest_node
from paraplan.hardware.topology import NodeTopology
from paraplan.records import Record


class ClusterSurvey(Record):
    """The machines by node rank. `cluster` and `interconnect` are None where no profile describes their GPUs.

    A cluster is machines of one topology: it is made of the weakest, for what that can do all can.
    """

    nodes: tuple[NodeTopology, ...]
    differences: tuple[str, ...]
    cluster: Cluster | None = None
    interconnect: InterconnectReport | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines."""
        return sum(len(node.gpus) for node in self.nodes)

    def to_report(self) -> dict[str, Any]:
        """Return the JSON object that `paraplan topo --nnodes N --json` prints."""
        return {
            "num_nodes": len(self.nodes),
            "num_gpus": self.num_gpus,
            "nodes": [node.to_report() for node in self.nodes],
            "differences": list(self.differences),
            "cluster": self.cluster.model_dump(mode="json") if self.cluster else None,
            "interconnect": self.interconnect.model_dump(mode="json") if self.interconnect else None,
        }


def survey_nodes(nodes: Sequence[NodeTopology], thresholds: InterconnectThresholds | None = None) -> ClusterSurvey:
    """Return what is known of one or more machines together, in the order of their node ranks."""
    cluster = _cluster(nodes)
    return ClusterSurvey(
        nodes=tuple(nodes),
        differences=tuple(compare_nodes(nodes)),
        cluster=cluster,
        interconnect=describe_interconnect(cluster, thresholds) if cluster is not None else None,
    )


def _cluster(nodes: Sequence[NodeTopology]) -> Cluster | None:
    if any(gpu.name is None for node in nodes for gpu in node.gpus):
        return None
    try:
        machines = [machine_from_topology(node, name="these-nodes") for node in nodes]
    except ProfileError:
        return None
    weakest = machines[nodes.index(weakest_node(nodes))]
    return Cluster(
        name="these-nodes",
        gpu=min((machine.gpu for machine in machines), key=lambda gpu: max(gpu.peak_flops_per_s.values())),
        node=weakest.node,
        network=weakest.network,
        num_nodes=len(nodes),
    )
