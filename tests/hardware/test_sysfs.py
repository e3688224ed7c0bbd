"""What is read from a sysfs that the tests write."""

from __future__ import annotations

from pathlib import Path

from paraplan.hardware.probe.sysfs import add_host_facts, find_device, read_nics
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, NodeTopology

ROOT_PORT, UP, DOWN = "0000:00:01.0", "0000:01:00.0", "0000:02:00.0"


class Machine:
    """Writes devices into a sysfs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)

    def device(self, *way: str, numa: int = 0, cpus: str = "0-15") -> Path:
        """Add a PCI device; the way starts with its host bridge and ends with its bus id."""
        folder = self.root.joinpath("sys/devices", *way)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        (folder / "local_cpulist").write_text(f"{cpus}\n")
        link = self.root / "sys/bus/pci/devices" / way[-1]
        if not link.exists():
            link.symlink_to(folder)
        return folder

    def infiniband(
        self, name: str, device: Path, *, rate: str, state: str = "4: ACTIVE", layer: str = "InfiniBand"
    ) -> None:
        """Add an RDMA device with one port."""
        port = self.root / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("rate", rate), ("state", state), ("link_layer", layer)):
            (port / file).write_text(text + "\n")
        (port.parents[1] / "device").symlink_to(device)

    def ethernet(self, name: str, device: Path | None, *, speed: str = "25000", state: str = "up") -> None:
        """Add a network interface, virtual where it has no device."""
        folder = self.root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(speed + "\n")
        (folder / "operstate").write_text(state + "\n")
        if device is not None:
            (folder / "device").symlink_to(device)


def switched_machine(root: Path) -> Machine:
    """Two GPUs and a NIC behind one switch of socket 0, a GPU behind its own port there, and one on socket 1."""
    machine = Machine(root)
    nic = machine.device("pci0000:00", ROOT_PORT, UP, "0000:02:02.0", "0000:05:00.0")
    machine.device("pci0000:00", ROOT_PORT, UP, DOWN, "0000:03:00.0")
    machine.device("pci0000:00", ROOT_PORT, UP, "0000:02:01.0", "0000:04:00.0")
    machine.device("pci0000:00", "0000:00:02.0", "0000:06:00.0")
    machine.device("pci0000:80", "0000:80:01.0", "0000:81:00.0", numa=1, cpus="16-31")
    far = machine.device("pci0000:80", "0000:80:02.0", "0000:82:00.0", numa=1, cpus="16-31")
    machine.infiniband("mlx5_0", nic, rate="400 Gb/sec (4X NDR)")
    machine.infiniband("mlx5_1", far, rate="10 Gb/sec (4X SDR)", state="1: DOWN", layer="Ethernet")
    return machine


def node(*bus_ids: str) -> NodeTopology:
    return NodeTopology(source="test", gpus=tuple(Gpu(index=i, pci_bus_id=bus) for i, bus in enumerate(bus_ids)))


def machine_of(root: Path) -> NodeTopology:
    switched_machine(root)
    return add_host_facts(node("0000:03:00.0", "0000:04:00.0", "0000:06:00.0", "0000:81:00.0"), root=root)


def test_numa_nodes_and_cpus_come_from_the_gpus_own_devices(tmp_path: Path) -> None:
    found = machine_of(tmp_path)
    assert found.numa_groups == {0: [0, 1, 2], 1: [3]}
    assert [gpu.cpu_affinity for gpu in found.gpus] == ["0-15"] * 3 + ["16-31"]


def test_the_way_between_two_gpus_is_read_from_the_pci_tree(tmp_path: Path) -> None:
    found = machine_of(tmp_path)
    kinds = {(link.gpu_a, link.gpu_b): link.link_type for link in found.links}
    assert kinds[0, 1] is LinkType.PIX
    assert kinds[0, 2] is LinkType.PHB
    assert kinds[2, 3] is LinkType.SYS


def test_nics_have_rate_state_and_their_way_to_each_gpu_and_nic(tmp_path: Path) -> None:
    first, second = machine_of(tmp_path).nics
    assert (first.name, first.rate_bytes_per_s, first.state, first.kind) == ("mlx5_0", 50e9, "active", "InfiniBand")
    assert first.pix_gpus == [0, 1]
    assert first.gpu_links[2] is LinkType.PHB
    assert first.nic_links == {"mlx5_1": LinkType.SYS}
    assert (second.state, second.numa_node) == ("down", 1)


def test_cascaded_switches_are_several(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    below = ("0000:05:00.0", "0000:06:00.0")
    machine.device("pci0000:00", ROOT_PORT, UP, DOWN, *below, "0000:07:00.0")
    machine.device("pci0000:00", ROOT_PORT, UP, "0000:02:01.0", "0000:08:00.0")
    found = add_host_facts(node("0000:07:00.0", "0000:08:00.0"), root=tmp_path)
    assert found.links[0].link_type is LinkType.PXB


def test_host_bridges_of_one_numa_node_are_node_and_unknown_ones_are_left_out(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.device("pci0001:00", "0001:00:00.0")
    machine.device("pci0002:00", "0002:00:00.0")
    machine.device("pci0003:00", "0003:00:00.0", numa=-1)
    found = add_host_facts(node("0001:00:00.0", "0002:00:00.0", "0003:00:00.0"), root=tmp_path)
    assert {(link.gpu_a, link.gpu_b): link.link_type for link in found.links} == {(0, 1): LinkType.NODE}
    assert found.gpus[2].numa_node is None


def test_both_ports_of_one_card_share_a_switch(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for function in (0, 1):
        port = machine.device("pci0000:00", ROOT_PORT, f"0000:01:00.{function}")
        machine.infiniband(f"mlx5_{function}", port, rate="100 Gb/sec")
    first, _ = read_nics(root=tmp_path, gpu_places={})
    assert first.nic_links == {"mlx5_1": LinkType.PIX}


def test_an_interface_with_rdma_is_named_once_and_virtual_ones_never(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    card = machine.device("pci0000:00", ROOT_PORT, "0000:01:00.0")
    plain = machine.device("pci0000:00", "0000:00:03.0", "0000:04:00.0")
    virtual_function = machine.device("pci0000:00", ROOT_PORT, "0000:01:00.2")
    (virtual_function / "physfn").symlink_to(card)
    machine.infiniband("mlx5_0", card, rate="200 Gb/sec")
    for name, device in (("ib0", card), ("eth0", plain), ("eth1", virtual_function), ("lo", None), ("docker0", None)):
        machine.ethernet(name, device)
    assert [nic.name for nic in read_nics(root=tmp_path, gpu_places={})] == ["mlx5_0", "eth0"]


def test_a_link_that_is_down_has_no_rate(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    device = machine.device("pci0000:00", "0000:00:03.0", "0000:04:00.0")
    machine.ethernet("eth0", device, speed="-1", state="down")
    (nic,) = read_nics(root=tmp_path, gpu_places={})
    assert nic.rate_bytes_per_s is None
    assert nic.state == "down"


def test_nics_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for number in (10, 2, 1):
        device = machine.device("pci0000:00", f"0000:00:{number:02x}.0", f"0000:{number:02x}:00.0")
        machine.infiniband(f"mlx5_{number}", device, rate="100 Gb/sec")
    assert [nic.name for nic in read_nics(root=tmp_path, gpu_places={})] == ["mlx5_1", "mlx5_2", "mlx5_10"]


def test_what_the_driver_said_is_kept(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    known = NodeTopology(
        source="test",
        gpus=(
            Gpu(index=0, pci_bus_id="0000:03:00.0", numa_node=7, cpu_affinity="5"),
            Gpu(index=1, pci_bus_id="0000:04:00.0"),
        ),
        links=(GpuLink(gpu_a=0, gpu_b=1, link_type=LinkType.NV, nvlink_count=4),),
    )
    found = add_host_facts(known, root=tmp_path)
    assert (found.gpus[0].numa_node, found.gpus[0].cpu_affinity) == (7, "5")
    assert found.links == known.links


def test_a_machine_without_sysfs_is_returned_as_it_is(tmp_path: Path) -> None:
    plain = node("0000:03:00.0")
    assert add_host_facts(plain, root=tmp_path) == plain
    assert find_device("not a bus id", root=tmp_path) is None
