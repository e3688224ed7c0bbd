"""Everything that `paraplan topo` tells of a machine: its topology, what CUDA shows of it, how fast its links are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paraplan.errors import ProfileError
from paraplan.hardware.catalogue.real_machines import machine_from_topology
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.interconnect import InterconnectReport, InterconnectThresholds, describe_interconnect
from paraplan.hardware.probe.cuda_devices import PCI_BUS_ID, CudaView, cuda_view, select_gpus
from paraplan.hardware.probe.nvml_state import GpuState
from paraplan.hardware.profiles import MachineProfile
from paraplan.hardware.topology import NodeTopology
from paraplan.records import Record


class MachineSurvey(Record):
    """A machine and what follows from it. None is unknown.

    `cuda` is what CUDA shows to this process, for the machine that it runs on. `machine` and `interconnect` are known
    where the GPUs are of a kind that a profile describes.
    """

    node: NodeTopology
    cuda: CudaView | None = None
    machine: MachineProfile | None = None
    interconnect: InterconnectReport | None = None
    states: tuple[GpuState, ...] = ()
    """States of this machine's GPUs; none for another one."""

    def to_report(self) -> dict[str, Any]:
        """Return the JSON object that `paraplan topo --json` prints."""
        return self.node.to_report() | {
            "cuda": self.cuda.model_dump(mode="json") if self.cuda else None,
            "interconnect": self.interconnect.model_dump(mode="json") if self.interconnect else None,
            "states": [state.model_dump(mode="json") for state in self.states],
        }


def survey_node(
    node: NodeTopology,
    *,
    machine: MachineProfile | None = None,
    environment: Mapping[str, str] | None = None,
    gpus: str | None = None,
    thresholds: InterconnectThresholds | None = None,
) -> MachineSurvey:
    """Return a survey of a machine.

    `machine` is its profile where it came from one. `environment` is given for the machine that this process runs on;
    another machine's GPUs are numbered as they are listed. `gpus` selects and orders them, as CUDA numbers them.
    Raises UsageError for a selection that the machine does not meet.
    """
    cuda = cuda_view(node.gpus, environment) if environment is not None else None
    if gpus is not None:
        rules = environment if environment is not None else {"CUDA_DEVICE_ORDER": PCI_BUS_ID}
        chosen = [device.nvml_index for device in select_gpus(node.gpus, gpus, rules)]
        node = node.only(list(dict.fromkeys(chosen)))
    if machine is None and all(gpu.name for gpu in node.gpus):
        machine = _profile_of(node)
    interconnect = None
    if machine is not None:
        # Two nodes, for the network between nodes is judged only where there is more than one.
        cluster = Cluster(
            name=machine.name,
            gpu=machine.gpu,
            node=node,
            network=machine.network,
            num_nodes=2 if machine.network else 1,
        )
        interconnect = describe_interconnect(cluster, thresholds)
    return MachineSurvey(node=node, cuda=cuda, machine=machine, interconnect=interconnect)


def _profile_of(node: NodeTopology) -> MachineProfile | None:
    """Return the profile of a machine, None where no profile describes its GPUs."""
    try:
        return machine_from_topology(node, name=node.hostname or "this-machine")
    except ProfileError:
        return None
