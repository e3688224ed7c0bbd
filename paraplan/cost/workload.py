"""`Workload`: what plans are priced for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from paraplan.cost.cache import KnownCuts
from paraplan.cost.calibrated import calibrated_constants
from paraplan.cost.constants import CostConstants
from paraplan.cost.framework import OWN_RUNTIME, FrameworkProfile
from paraplan.cost.framework_files import load_framework
from paraplan.hardware.bus_bandwidth import GroupSpeed
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import LinkSpeedTable, load_link_speeds
from paraplan.hardware.profiles import Collective
from paraplan.model.spec import ModelSpec
from paraplan.plan.training import TrainingSpec


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its training, the machines with what their links reach, the framework, and the constants."""

    model: ModelSpec
    training: TrainingSpec
    cluster: Cluster
    links: LinkSpeedTable
    framework: FrameworkProfile
    constants: CostConstants = field(default_factory=CostConstants)
    group_speeds: dict[tuple[int, int, Collective], GroupSpeed] = field(default_factory=dict, init=False, repr=False)
    """What groups of ranks reach, by size, distance and collective, as far as it was asked for."""
    known_cuts: KnownCuts = field(default_factory=KnownCuts, init=False, repr=False)
    """What blocks cost under the cuts that were asked about."""
    known_paddings: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)
    """What shards are larger than even ones, by their number and whether tp divides layers, as far as asked for."""

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        training: TrainingSpec,
        cluster: Cluster,
        links: LinkSpeedTable | None = None,
        *,
        framework: str | FrameworkProfile = OWN_RUNTIME,
    ) -> Self:
        """Return the workload of a framework, paraplan's own runtime by default, with the machine's constants.

        Where the machine was calibrated, what was measured comes before data sheets. `links` are the speeds of links,
        by default those that come with paraplan.
        """
        constants = CostConstants()
        if cluster.gpu.vendor == "cpu":
            constants = constants.for_cpu()
        profile = load_framework(framework) if isinstance(framework, str) else framework
        found = load_link_speeds() if links is None else links
        return cls(model, training, cluster, found, profile, calibrated_constants(constants, cluster.gpu))

    @cached_property
    def has_equal_links(self) -> bool:
        """Whether there is one node whose GPUs all reach each other alike: groups of one size are equal then."""
        node = self.cluster.node
        links = {(link.link_type, link.nvlink_count, link.bandwidth_bytes_per_s) for link in node.links}
        pairs = self.cluster.gpus_per_node * (self.cluster.gpus_per_node - 1) // 2
        is_one = self.cluster.num_nodes == 1 and not node.peer_access
        return is_one and len(links) <= 1 and len(node.links) in (0, pairs)

    @property
    def usable_memory_bytes(self) -> int:
        """What training may allocate on the smallest GPU."""
        return self.constants.usable_memory_bytes(self.cluster.gpu_memory_bytes, num_gpus=self.cluster.num_gpus)

    @property
    def memory_bandwidth_bytes_per_s(self) -> float:
        """What kernels that do nothing but move bytes reach of the GPU's memory."""
        return self.cluster.gpu.memory_bandwidth_bytes_per_s * self.constants.memory_bandwidth_efficiency

    @property
    def is_mixed_precision(self) -> bool:
        """True for training in 16 bits with fp32 master weights."""
        return self.training.precision != "fp32"
