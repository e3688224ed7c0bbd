"""Profiles on disk: GPUs, networks and machines as JSON, those that come with paraplan and those that users write."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from paraplan.errors import ProfileError, UsageError, near_names
from paraplan.hardware.architecture import load_architecture
from paraplan.hardware.catalogue.composed_machines import (
    HOST_MEMORY_PER_GPU,
    LinkKind,
    composed_machine,
    counted_file,
    counted_gpus,
    mixed_machine,
    plain_name,
    split_link,
    usual_link,
)
from paraplan.hardware.catalogue.machine_files import MachineFile
from paraplan.hardware.catalogue.near_machines import gpu_key, machine_hint, other_maker
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.profile_json import read_bundled, read_object, validated
from paraplan.hardware.profiles import GpuProfile, MachineProfile, NetworkProfile
from paraplan.resources import profiles_folder

_MOST_CARDS = 8
"""GPUs of one machine where no bundled one has more of the kind."""
"""So many GPUs of a kind that a file describes."""


def load_gpu(name_or_path: str, *, beside: Path | None = None) -> GpuProfile:
    """Return a kind of GPU: a bundled one by name or alias, or a file by path, relative to the folder `beside`.

    Raises `ProfileError` for an unknown name (with near ones) and for a file at fault (with the field).
    """
    data, where = _load_named("gpus", name_or_path, beside=beside)
    return _gpu(data, where=where)


def load_network(name_or_path: str, *, beside: Path | None = None) -> NetworkProfile:
    """Return a network between nodes, by name or path. Raises `ProfileError` as `load_gpu` does."""
    data, where = _load_named("networks", name_or_path, beside=beside)
    return validated(NetworkProfile, data, where=where)


def load_machine(name_or_path: str) -> MachineProfile:
    """Return a machine by name, alias or path, or as a number of GPUs of a kind: `8xh100`.

    Its file names its GPU and network, or holds them inline. Raises `ProfileError` as `load_gpu` does.
    """
    return _loaded_machine(name_or_path)[0]


def one_machine(name: str) -> MachineProfile:
    """Return one of the machines that a name means: of `32xh100`, which no machine has, one with 8."""
    return load_machine(_over_machines(name, None, None)[0])


def list_gpus() -> list[GpuProfile]:
    """Return all bundled kinds of GPU, by name."""
    return [*_bundled_gpus()]


@cache
def _bundled_gpus() -> tuple[GpuProfile, ...]:
    return tuple(_gpu(read_bundled(path), where=str(path)) for path in _files("gpus"))


def with_architecture(gpu: GpuProfile, *, beside: Path | None = None) -> GpuProfile:
    """Return a GPU with what its architecture shares, the unknown one where no file describes it."""
    return gpu.replace(architecture_profile=load_architecture(gpu.architecture, beside=beside))


def _gpu(data: dict[str, Any], *, where: str, prefix: str = "") -> GpuProfile:
    return with_architecture(validated(GpuProfile, data, where=where, prefix=prefix), beside=Path(where).parent)


def list_networks() -> list[NetworkProfile]:
    """Return all bundled networks, by name."""
    return [load_network(name) for name in _stems("networks")]


def list_machines() -> list[MachineProfile]:
    """Return all bundled machines, by name."""
    return [load_machine(name) for name in _stems("machines")]


@cache
def profile_names(kind: str) -> frozenset[str]:
    """Return the names and aliases of the bundled profiles of a kind: "gpus", "machines" or "networks"."""
    aliases = (read_bundled(path).get("aliases", ()) for path in _files(kind))
    return frozenset(_stems(kind)).union(*aliases)


def cluster_from_profile(
    name_or_path: str,
    *,
    num_nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    link: LinkKind | None = None,
) -> Cluster:
    """Return `num_nodes` machines of a profile, one by default, each with its first `gpus_per_node` GPUs (or all).

    A machine without GPUs (vendor "cpu") takes any `gpus_per_node`: its ranks are processes that share its memory.
    `8xh100` is a machine with so many GPUs of a kind: the first GPUs of a bundled one that has them, with their share
    of its memory, or a composed one whose GPUs `link` connects. `32xh100`, which no machine has, are several: 4 of 8.
    `network` names another network than the profile's, `10g` is Ethernet.

    Raises `ProfileError` for a profile that cannot be had and `UsageError` for numbers that the machine does not allow.
    """
    for option, number in (("--nodes", num_nodes), ("--gpus-per-node", gpus_per_node)):
        if number is not None and number < 1:
            raise UsageError(f"{option}={number} must be at least 1")
    if link is None:
        name_or_path, num_nodes = _over_machines(name_or_path, num_nodes, gpus_per_node)
    machine, data, where = _loaded_machine(name_or_path, link)
    if gpus_per_node is not None and gpus_per_node != len(machine.node.gpus):
        machine = _resized(machine, data, where=where, num_gpus=gpus_per_node)
    return Cluster(
        name=machine.name,
        gpu=machine.gpu,
        node=machine.node,
        num_nodes=num_nodes or 1,
        network=load_network(_network_name(network)) if network is not None else machine.network,
        host_memory_bytes=machine.host_memory_bytes,
        measured=machine.measured,
    )


def find_gpu(driver_name: str, *, memory_total_bytes: int | None = None) -> GpuProfile | None:
    """Return the bundled kind of GPU that a driver reports as `driver_name`, None if there is none.

    Of kinds that share a name (`Tesla V100-SXM2` came with 16 and 32 GB) the nearest in memory is returned.
    """
    wanted = _driver_key(driver_name)
    found = [
        gpu
        for gpu in _bundled_gpus()
        if wanted in {_driver_key(name) for name in (gpu.name, gpu.title, *gpu.driver_names)}
    ]
    if memory_total_bytes is None:
        return found[0] if found else None
    return min(found, key=lambda gpu: abs(gpu.memory_bytes - memory_total_bytes), default=None)


def profile_name(device: str) -> str:
    """Return the profile's name of a GPU as its driver names it; `device` itself where none knows it, and for cpu."""
    gpu = None if device == "cpu" else find_gpu(device)
    return device if gpu is None else gpu.name


def _resized(machine: MachineProfile, data: dict[str, Any], *, where: str, num_gpus: int) -> MachineProfile:
    have = len(machine.node.gpus)
    if machine.gpu.vendor == "cpu":
        return _machine(data | {"num_gpus": num_gpus}, where=where)
    if num_gpus > have:
        raise UsageError(
            f"--gpus-per-node={num_gpus}, but {machine.name} has {have} GPUs",
            hint=f"use at most {have}, or more nodes with --nodes",
        )
    network = machine.network
    if network is not None:
        # GPUs send through the NICs beside them: those of the GPUs that are left out serve nobody.
        network = network.replace(nics_per_node=-(-network.nics_per_node * num_gpus // have))
    return machine.replace(node=machine.node.first(num_gpus), network=network)


def _machine(data: dict[str, Any], *, where: str) -> MachineProfile:
    rest = dict(data)
    folder = Path(where).parent
    reference = rest.pop("gpu", None)
    if isinstance(reference, str):
        gpu = load_gpu(reference, beside=folder)
    elif isinstance(reference, dict):
        gpu = _gpu(reference, where=where, prefix="gpu.")
    else:
        raise ProfileError(f"{where}: gpu: must name a GPU or describe one", hint="paraplan profiles list shows names")
    network_reference = rest.pop("network", None)
    network = None
    if isinstance(network_reference, str):
        network = load_network(network_reference, beside=folder)
    elif network_reference is not None:
        network = validated(NetworkProfile, network_reference, where=where, prefix="network.")
    machine = validated(MachineFile, rest, where=where)
    return machine.expand(gpu=gpu, network=network, source=f"profile {machine.name}")


def _loaded_machine(name: str, link: LinkKind | None = None) -> tuple[MachineProfile, dict[str, Any], str]:
    """Return a machine, and the content that it was made from with its path."""
    data, where, count = _machine_data(name, link)
    machine = _machine(data, where=where)
    if count is not None and count != len(machine.node.gpus):
        host_memory_bytes = _host_share(machine, count)
        machine = _resized(machine, data, where=where, num_gpus=count).replace(host_memory_bytes=host_memory_bytes)
    return machine, data, where


def _host_share(machine: MachineProfile, num_gpus: int) -> int | None:
    """Return the memory of a machine that was cut to so many GPUs: their share, as clouds rent them."""
    whole = machine.host_memory_bytes
    if whole is None or machine.gpu.vendor == "cpu":
        return whole
    return min(whole, max(whole * num_gpus // len(machine.node.gpus), num_gpus * HOST_MEMORY_PER_GPU))


def _machine_data(name: str, link: LinkKind | None) -> tuple[dict[str, Any], str, int | None]:
    """Return the content of a machine, where it stands, and how many of its GPUs are meant where a name says so."""
    of_file = counted_file(name)
    if of_file is not None:
        gpu_data, where = _load_named("gpus", of_file["gpu"])
        composed = composed_machine(_gpu(gpu_data, where=where), int(of_file["count"]), link)
        return composed | {"gpu": gpu_data}, where, None
    kinds = _mixed_kinds(name)
    if kinds is not None:
        return mixed_machine(kinds[0], link or kinds[1]), str(profiles_folder() / "machines" / name), None
    counted = None if _looks_like_path(name) or plain_name(name) in _stems("machines") else _counted_machine(name)
    if counted is None or (link is None and plain_name(name) in profile_names("machines")):
        if link is not None:
            raise UsageError("--link goes with --gpu, or a profile such as 4xrtx-3090", hint="leave --link out")
        return *_load_named("machines", name), None
    count, gpu, said = counted
    link = link or said
    bundled = None if link not in (None, usual_link(gpu)) else _bundled_with(gpu, count)
    if bundled is not None:
        return read_bundled(bundled), str(bundled), count
    return composed_machine(gpu, count, link), str(profiles_folder() / "machines" / name), None


def _mixed_kinds(name: str) -> tuple[list[tuple[int, GpuProfile]], LinkKind | None] | None:
    """Return the numbers and kinds of GPU of a name such as `rtx-3090+rtx-4090` or `2xrtx-3090+2xrtx-4090`, else None.

    Raises `ProfileError` where one of them is no kind of GPU.
    """
    if "+" not in name or _looks_like_path(name):
        return None
    words, link = split_link(name.strip().lower())
    kinds = []
    for part in words.split("+"):
        count, gpu_name = counted_gpus(part) or (1, part.strip())
        gpu = _gpu_called(gpu_name)
        kinds.append((count, gpu if gpu is not None else load_gpu(gpu_name)))  # which says what is near
    return (kinds, link) if len({gpu.name for _, gpu in kinds}) > 1 else None


def _counted_machine(name: str) -> tuple[int, GpuProfile, LinkKind | None] | None:
    """Return the number, the kind and the links of GPUs where a name says these, as `4xrtx-3090-nvlink-pairs` does.

    A GPU may be called as links are: `4xh100-pcie` are four cards, not SXM modules without NVLink.
    """
    for words, link in ((name.strip().lower(), None), split_link(name.strip().lower())):
        counted = counted_gpus(words)
        gpu = None if counted is None else _gpu_called(counted[1])
        if counted is not None and gpu is not None:
            return counted[0], gpu, link
    return None


def _over_machines(name: str, num_nodes: int | None, gpus_per_node: int | None) -> tuple[str, int | None]:
    """Return the machine and the number of machines of a name such as `32xh100`, whose GPUs no one machine has.

    Of other names these are `name` and `num_nodes`. Raises `UsageError` where the GPUs do not divide over machines.
    """
    of_file = counted_file(name)
    if of_file is not None:
        count, gpu_name, title, most = int(of_file["count"]), of_file["gpu"], of_file["gpu"], _MOST_CARDS
    else:
        if _looks_like_path(name) or plain_name(name) in _stems("machines") or counted_gpus(name) is None:
            return name, num_nodes
        counted = _counted_machine(name)
        is_one = counted and (counted[0] <= _MOST_CARDS or counted[2] is not None or counted[1].vendor == "cpu")
        if is_one or plain_name(name) in profile_names("machines"):
            return name, num_nodes
        if counted is None:
            return _several(name, num_nodes, gpus_per_node)
        count, gpu, _ = counted
        gpu_name, title, most = gpu.name, gpu.title, max([_MOST_CARDS, *_sizes_of_bundled(gpu)])
    if count <= most:
        return name, num_nodes
    nodes = num_nodes or (0 if gpus_per_node is None else count // gpus_per_node)
    if num_nodes is None and gpus_per_node is None:  # as few as hold them, all alike and more than half full
        nodes = next((each for each in range(-(-count // most), -(-2 * count // most)) if count % each == 0), 0)
    if not nodes or count % nodes or count // nodes > most:
        raise UsageError(
            f"{name}: a machine has at most {most} {title}",
            hint=f"name the machines: --profile {most}x{gpu_name} --nodes {count // most}, say",
        )
    return f"{count // nodes}x{gpu_name}", nodes


def _several(name: str, num_nodes: int | None, gpus_per_node: int | None) -> tuple[str, int | None]:
    """Return the machine and the number of machines of a name such as `4xdgx-h100`; of others `name`, `num_nodes`."""
    count, machine = counted_gpus(name) or (0, name)
    is_unclear = re.fullmatch(r"[a-z]\w+[x:]\d+", machine) is not None  # 8xh100x2: eight of two, or two of eight
    if (
        not count
        or is_unclear
        or (plain_name(machine) not in profile_names("machines") and _counted_machine(machine) is None)
    ):
        return name, num_nodes
    if num_nodes not in (None, count):
        raise UsageError(f"{name} are {count} machines, and --nodes={num_nodes}", hint=f"use --profile {machine}")
    machine, nodes = _over_machines(machine, None, gpus_per_node)
    return machine, count * (nodes or 1)


def _sizes_of_bundled(gpu: GpuProfile) -> list[int]:
    """Return the numbers of GPUs of the bundled machines that have a kind."""
    found = map(read_bundled, _files("machines"))
    return [data["num_gpus"] for data in found if data.get("gpu") == gpu.name and "num_gpus" in data]


def _gpu_called(name: str) -> GpuProfile | None:
    known = profile_names("gpus")
    if name not in known:  # rtx4090, h100-sxm5
        name = next((one for one in sorted(known) if gpu_key(one) == gpu_key(name)), name)
    return load_gpu(name) if name in known else find_gpu(name)


def _bundled_with(gpu: GpuProfile, count: int) -> Path | None:
    """Return the smallest bundled machine with `count` GPUs of a kind, linked as usual, a maker's before a cloud's."""
    found = []
    for path in _files("machines"):
        data = read_bundled(path)
        is_bridged = len(data.get("links", ())) != 1 and gpu.vendor == "nvidia" and data.get("num_gpus") != 1
        if data.get("gpu") == gpu.name and data.get("num_gpus", 0) >= count and not is_bridged:
            found.append((data["num_gpus"], path.stem.startswith(("aws", "azure", "gcp", "oci")), path.stem, path))
    return min(found)[-1] if found else None


def _network_name(network: str) -> str:
    """Return the profile of a network; a rate such as `100g` or `10GbE` is Ethernet's."""
    rate = network.strip().lower().replace(" ", "").removesuffix("be").removesuffix("bps").removesuffix("bit")
    return f"ethernet-{rate}" if f"ethernet-{rate}" in _stems("networks") else network


def _looks_like_path(name: str) -> bool:
    return name.endswith(".json") or ("/" in name and " " not in name)  # "InfiniBand, 100 Gb/s a node" is a name


def _load_named(kind: str, name_or_path: str, *, beside: Path | None = None) -> tuple[dict[str, Any], str]:
    """Return the JSON object of a profile and the path that it was read from."""
    if _looks_like_path(name_or_path):
        path = (beside or Path()) / Path(name_or_path).expanduser()
        return read_object(path), str(path)
    folder = profiles_folder() / kind
    name = plain_name(name_or_path) if kind == "machines" else name_or_path.strip().lower().replace("_", "-")
    known = _stems(kind)
    if name in known:
        path = folder / f"{name}.json"
        return read_bundled(path), str(path)
    names = [*known]
    for path in _files(kind):
        data = read_bundled(path)
        names += data.get("aliases", ())
        if name in data.get("aliases", ()):
            return data, str(path)
    if kind == "machines":
        hint = _machine_of_gpu(name) or machine_hint(name, machines=names, gpus=profile_names("gpus"))
    else:
        hint = near_names(name, names)
        if hint.startswith("known"):
            hint = near_names(name, known)  # nothing is near: the names without their aliases are list enough
    other = other_maker(name)
    if other is not None:
        raise ProfileError(
            f"{name_or_path}: {other} are not planned for: ranks run on NVIDIA and AMD GPUs, or on CPUs",
            hint="--profile cpu plans for processes on the CPU; any other profile plans for machines elsewhere",
        )
    raise ProfileError(f"no {kind.removesuffix('s')} profile is called {name_or_path!r}", hint=hint)


def _machine_of_gpu(name: str) -> str | None:
    """Return the hint for the name of a kind of GPU where a machine is asked for, None for other names."""
    if name not in profile_names("gpus"):
        return None
    gpu = load_gpu(name).name
    machines = [path.stem for path in _files("machines") if read_bundled(path).get("gpu") == gpu]
    others = f"; machines with it: {', '.join(machines)}" if machines else ""
    return f"{name} is a kind of GPU: say how many, --profile 4x{gpu}{others}"


@cache
def _files(kind: str) -> tuple[Path, ...]:
    return tuple(sorted((profiles_folder() / kind).glob("*.json"), key=lambda path: path.stem))


@cache
def _stems(kind: str) -> tuple[str, ...]:
    return tuple(path.stem for path in _files(kind))


def _driver_key(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "amd", "tesla", "geforce", "instinct", "graphics"))
