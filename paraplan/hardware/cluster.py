"""Several machines of one kind: what a plan is made for."""

from __future__ import annotations

from collections import Counter

from pydantic import Field

from paraplan.hardware.profiles import GpuProfile, MeasuredCollective, NetworkProfile
from paraplan.hardware.topology import NodeTopology
from paraplan.records import Record


class Cluster(Record):
    """`num_nodes` machines with the same topology. `network` is None where nothing is known of it.

    `host_memory_bytes` is that of one node; `measured` is what calibration found, to be preferred to data sheets.

    GPUs are numbered node by node: global GPU `g` is GPU `g % gpus_per_node` of node `g // gpus_per_node`.
    """

    name: str
    gpu: GpuProfile
    node: NodeTopology
    num_nodes: int = Field(default=1, gt=0)
    network: NetworkProfile | None = None
    host_memory_bytes: int | None = None
    measured: tuple[MeasuredCollective, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs of one machine."""
        return len(self.node.gpus)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all machines: the world size of a plan that uses them all."""
        return self.num_nodes * self.gpus_per_node

    def __repr__(self) -> str:
        return f"<Cluster {self}>"

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} x {self.name}" if self.num_nodes > 1 else self.name
        return f"{nodes}: {self.kinds}"

    @property
    def kinds(self) -> str:
        """The number of GPUs of each kind, in words."""
        counts = Counter(gpu.name for gpu in self.node.gpus if gpu.name is not None)
        if len(counts) > 1:
            return " and ".join(f"{self.num_nodes * count} x {name}" for name, count in counts.items())
        return f"{self.num_gpus} x {self.gpu.title}"

    @property
    def gpu_memory_bytes(self) -> int:
        """Bytes that CUDA gives of the smallest GPU's memory: its total less what the driver keeps.

        The total is the driver's figure where it is known, else the profile's.
        """
        reported = [gpu.memory_total_bytes for gpu in self.node.gpus if gpu.memory_total_bytes is not None]
        return min(reported, default=self.gpu.memory_bytes) - self.gpu.reserved_bytes
