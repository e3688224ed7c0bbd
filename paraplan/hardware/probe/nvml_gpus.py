"""One GPU by NVML: identity, memory, MIG, PCIe, NUMA node, and where each of its NVLinks leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

from paraplan.hardware.pci import normal_bus_id
from paraplan.hardware.probe.nvml_queries import GPU_IS_LOST, NOT_SUPPORTED, Questions
from paraplan.hardware.topology import Gpu, MigInstance

_MOST_NVLINKS = 36
_MOST_CPUS = 4096
_MOST_NUMA_NODES = 1024
_WORD_BITS = 64

# NVML's numbers for NVLink versions (nvml.h, NVML_NVLINK_VERSION_*): 2.0 and 2.2 are both generation 2, and so on.
_NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}

# What is at the far end of a link (nvml.h, nvmlIntNvLinkDeviceType_t).
_TO_GPU, _TO_CPU, _TO_SWITCH = 0, 1, 2
_SCOPE_NODE = 0
_FABRIC_COMPLETED = 3


@dataclass
class NvlinkEnds:
    """Active NVLinks of a GPU: how many lead to each bus id, to NVSwitches, to the CPU, and to who knows where."""

    to_bus_id: Counter[str] = field(default_factory=Counter)
    to_switch: int = 0
    to_cpu: int = 0
    to_unknown: int = 0
    inactive: int = 0
    generation: int | None = None
    is_known: bool = False

    @property
    def active(self) -> int:
        """All active links."""
        return sum(self.to_bus_id.values()) + self.to_switch + self.to_cpu + self.to_unknown


@dataclass
class SeenGpu:
    """A GPU that answered: NVML's handle, what it said, and its NVLinks."""

    handle: Any
    gpu: Gpu
    nvlinks: NvlinkEnds


def read_gpu(ask: Questions, index: int) -> SeenGpu | None:
    """Return what NVML says of the GPU of an index, None (and a warning) for one that is lost."""
    handle, code = ask.code_of("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        _note_unusable(ask, index, code or GPU_IS_LOST)
        return None
    name, name_code = ask.code_of("nvmlDeviceGetName", handle)
    memory, memory_code = ask.code_of("nvmlDeviceGetMemoryInfo", handle)
    if GPU_IS_LOST in (name_code, memory_code):
        _note_unusable(ask, index, GPU_IS_LOST)
        return None
    for what, failure in (("name", name_code), ("memory", memory_code)):
        if failure is not None:
            ask.note_failure(index, what, failure)
    nvlinks = read_nvlinks(ask, index, handle)
    pci = ask.gpu(index, "PCI bus id", "nvmlDeviceGetPciInfo", handle)
    capability = ask.gpu(index, "compute capability", "nvmlDeviceGetCudaComputeCapability", handle)
    ecc = ask.gpu(index, "ECC mode", "nvmlDeviceGetEccMode", handle, absent_is_normal=True)
    power = ask.gpu(index, "power limit", "nvmlDeviceGetEnforcedPowerLimit", handle)
    mig = ask.gpu(index, "MIG mode", "nvmlDeviceGetMigMode", handle, absent_is_normal=True)
    gpu = Gpu(
        index=index,
        name=ask.text(name),
        uuid=ask.text(ask.gpu(index, "UUID", "nvmlDeviceGetUUID", handle)),
        pci_bus_id=normal_bus_id(ask.text(pci.busId) or "") if pci is not None else None,
        memory_total_bytes=int(memory.total) if memory is not None else None,
        memory_used_bytes=int(memory.used) if memory is not None else None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        nvlink_count=nvlinks.active if nvlinks.is_known else None,
        nvlink_version=nvlinks.generation,
        nvlink_to_cpu_count=nvlinks.to_cpu or None,
        pcie_generation=ask.gpu(index, "PCIe generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_generation_max=ask.gpu(index, "highest PCIe generation", "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=ask.gpu(index, "PCIe width", "nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_max=ask.gpu(index, "highest PCIe width", "nvmlDeviceGetMaxPcieLinkWidth", handle),
        power_limit_w=power / 1000 if power is not None else None,
        ecc_enabled=bool(ecc[0]) if ecc is not None else None,
        mig_enabled=bool(mig[0]) if mig is not None else None,
        mig_instances=tuple(_read_mig_instances(ask, index, handle)) if mig is not None and mig[0] else (),
        fabric_clique=_read_fabric_clique(ask, index, handle),
    )
    return SeenGpu(handle=handle, gpu=_with_affinity(ask, gpu, handle), nvlinks=nvlinks)


def _note_unusable(ask: Questions, index: int, code: int) -> None:
    ask.note_failure(index, "everything", code)
    ask.note(f"GPU {index} cannot be used and is left out")


def _with_affinity(ask: Questions, gpu: Gpu, handle: Any) -> Gpu:
    """Return a GPU with the NUMA node and the CPUs near it, and the node that its own memory forms (Grace Hopper)."""
    nodes = _affinity(ask, gpu, handle, what="NUMA affinity", most=_MOST_NUMA_NODES)
    cpus = _affinity(ask, gpu, handle, what="CPU affinity", most=_MOST_CPUS)
    own = ask.gpu(gpu.index, "own NUMA node", "nvmlDeviceGetNumaNodeId", handle, absent_is_normal=True)
    return gpu.replace(
        numa_node=nodes[0] if nodes else None,
        memory_numa_node=own if isinstance(own, int) and own >= 0 else None,
        cpu_affinity=_ranges(cpus),
    )


_AFFINITY_FUNCTIONS = {
    "NUMA affinity": "nvmlDeviceGetMemoryAffinity",
    "CPU affinity": "nvmlDeviceGetCpuAffinityWithinScope",
}


def _affinity(ask: Questions, gpu: Gpu, handle: Any, *, what: str, most: int) -> list[int]:
    function = _AFFINITY_FUNCTIONS[what]
    words = ask.gpu(gpu.index, what, function, handle, most // _WORD_BITS, _SCOPE_NODE, absent_is_normal=True)
    return _numbers_of_mask(words)


def read_nvlinks(ask: Questions, index: int, handle: Any) -> NvlinkEnds:
    """Return where the NVLinks of a GPU lead. A GPU without NVLink, or in MIG mode, has none that are known."""
    ends = NvlinkEnds()
    for link in range(_MOST_NVLINKS):
        active, code = ask.code_of("nvmlDeviceGetNvLinkState", handle, link)
        if code == NOT_SUPPORTED:
            continue
        if code is not None:
            if code not in (2, 13):  # 2: no link has such a number
                ask.note_failure(index, "NVLinks", code)
            break
        ends.is_known = True
        if not active:
            ends.inactive += 1
            continue
        _add_end(ask, index, handle, link, ends)
        if ends.generation is None:
            version = ask.gpu(index, "NVLink version", "nvmlDeviceGetNvLinkVersion", handle, link)
            ends.generation = _NVLINK_GENERATIONS.get(version) if version is not None else None
    return ends


def _add_end(ask: Questions, index: int, handle: Any, link: int, ends: NvlinkEnds) -> None:
    kind = ask.gpu(
        index,
        "far ends of NVLinks",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        handle,
        link,
        absent_is_normal=True,
    )
    if kind == _TO_SWITCH:
        ends.to_switch += 1
        return
    if kind == _TO_CPU:
        ends.to_cpu += 1
        return
    pci = ask.gpu(index, "far ends of NVLinks", "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    bus_id = normal_bus_id(ask.text(pci.busId) or "") if pci is not None else None
    if bus_id is None:
        ends.to_unknown += 1
    else:
        ends.to_bus_id[bus_id] += 1


def _read_mig_instances(ask: Questions, index: int, handle: Any) -> Iterator[MigInstance]:
    most = ask.gpu(index, "number of MIG instances", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    for number in range(most):
        instance, code = ask.code_of("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if instance is None:
            if code != 6:  # 6: there is no instance of this number
                ask.note_failure(index, "MIG instances", code or 999)
            continue
        memory = ask.gpu(index, "memory of MIG instances", "nvmlDeviceGetMemoryInfo", instance)
        yield MigInstance(
            name=ask.text(ask.gpu(index, "names of MIG instances", "nvmlDeviceGetName", instance)),
            uuid=ask.text(ask.gpu(index, "UUIDs of MIG instances", "nvmlDeviceGetUUID", instance)),
            memory_total_bytes=int(memory.total) if memory is not None else None,
        )


def _read_fabric_clique(ask: Questions, index: int, handle: Any) -> str | None:
    """Return cluster and clique of a GPU that NVSwitches join with others, None where it is part of no fabric."""
    form = getattr(ask.library, "c_nvmlGpuFabricInfoV_t", None)
    if form is None:
        return None
    info = form()
    done = ask.gpu(index, "fabric", "nvmlDeviceGetGpuFabricInfoV", handle, byref(info), absent_is_normal=True)
    if done is None or info.state != _FABRIC_COMPLETED:
        return None
    return f"{bytes(info.clusterUuid).hex()}.{info.cliqueId}"


def _numbers_of_mask(words: Any) -> list[int]:
    """Return the positions of the bits that are set in an array of 64-bit words, lowest first."""
    if words is None:
        return []
    return [
        number * _WORD_BITS + bit for number, word in enumerate(words) for bit in range(_WORD_BITS) if word >> bit & 1
    ]


def _ranges(numbers: list[int]) -> str | None:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges) or None
