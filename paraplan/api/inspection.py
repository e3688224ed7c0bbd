"""One machine, or several that ought to be equal, looked at: GPUs, links, network, and what is remarkable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paraplan.errors import UsageError, require_torch

if TYPE_CHECKING:  # each reader is imported where it is asked for
    from paraplan.hardware.interconnect import InterconnectThresholds
    from paraplan.hardware.node_survey import ClusterSurvey
    from paraplan.hardware.probe.nvml_state import GpuState
    from paraplan.hardware.profiles import MachineProfile
    from paraplan.hardware.survey import MachineSurvey
    from paraplan.hardware.topology import NodeTopology


def thresholds_of(**bytes_per_s: float) -> InterconnectThresholds:
    """Return the rates from which links count as fast, those of paraplan where none is given."""
    from paraplan.hardware.interconnect import InterconnectThresholds

    return InterconnectThresholds.model_validate(bytes_per_s)


def inspect_machine(
    *,
    profile: str | None = None,
    path: Path | None = None,
    text: bytes | None = None,
    gpus: str | None = None,
    thresholds: InterconnectThresholds | None = None,
) -> MachineSurvey:
    """Return a machine of a profile, of a saved topology in a file or from standard input, or this one.

    `gpus` names the GPUs to show. Raises `TopologyError`, `ProfileError` and `NoGpuError` for what cannot be read.
    """
    from paraplan.hardware.survey import survey_node

    if profile is not None:
        from paraplan.hardware.catalogue.profile_files import one_machine

        machine = one_machine(profile)
        return survey_node(machine.node, machine=machine, gpus=gpus, thresholds=thresholds)
    if text is not None:
        from paraplan.hardware.readers.any_text import decode_text, read_topology

        node = read_topology(decode_text(text), source="standard input")
        return survey_node(node, gpus=gpus, thresholds=thresholds)
    if path is not None:
        from paraplan.hardware.readers.any_text import read_topology_file

        return survey_node(read_topology_file(path), gpus=gpus, thresholds=thresholds)
    from paraplan.hardware.probe.nvml import read_this_machine

    survey = survey_node(read_this_machine(), environment=os.environ, gpus=gpus, thresholds=thresholds)
    with watched_gpus() as states:
        shown = {gpu.index for gpu in survey.node.gpus}
        return survey.replace(states=tuple(state for state in states() if state.index in shown))


@contextmanager
def watched_gpus() -> Iterator[Callable[[], tuple[GpuState, ...]]]:
    """Yield what returns the present state of this machine's GPUs whenever it is called.

    Raises `NoGpuError` where there is no GPU or no driver to ask.
    """
    from paraplan.hardware.probe.nvml_state import gpu_states

    with gpu_states() as states:
        yield states.read


def save_inspected(survey: MachineSurvey, path: Path) -> MachineProfile:
    """Write a machine as a profile that `load_cluster` reads, and return it."""
    from paraplan.hardware.catalogue.real_machines import machine_from_topology, save_machine
    from paraplan.hardware.cpus import this_cpu

    machine = survey.machine or machine_from_topology(survey.node, name=path.stem)
    is_here = survey.cuda is not None
    machine = machine.replace(name=path.stem, node=survey.node, cpu=this_cpu() if is_here else machine.cpu)
    save_machine(machine, path)
    return machine


def gather_nodes(
    node: NodeTopology,
    *,
    num_nodes: int,
    endpoint: str | None,
    node_rank: int | None,
    wait_s: float,
    thresholds: InterconnectThresholds,
    on_wait: Callable[[str], None],
) -> ClusterSurvey:
    """Return the survey of all nodes, of which this is one; every node must ask for it. `on_wait` is told of waits."""
    if endpoint is None:
        raise UsageError("--nnodes needs --rdzv-endpoint", hint="give HOST:PORT of the first node, the same on all")
    require_torch("a survey of several nodes")
    from paraplan.hardware.node_survey import survey_nodes
    from paraplan.hardware.readers.json_topology import read_json
    from paraplan.launch.nodes.endpoint import Endpoint
    from paraplan.launch.nodes.job_token import job_token
    from paraplan.launch.nodes.rendezvous import exchange_texts

    token = job_token(os.environ, job=f"topology of {num_nodes} nodes")
    texts = exchange_texts(
        json.dumps(node.to_report()),
        rank=node_rank,
        endpoint=Endpoint.parse(endpoint),
        num_nodes=num_nodes,
        timeout_s=wait_s,
        token=token,
        on_wait=on_wait,
    )
    nodes = [read_json(text, source=f"node {rank}") for rank, text in enumerate(texts)]
    return survey_nodes(nodes, thresholds)
