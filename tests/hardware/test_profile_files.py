import json
from pathlib import Path

import pytest
from case_selection import with_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paraplan.errors import ProfileError, UsageError
from paraplan.hardware.catalogue.profile_files import (
    cluster_from_profile,
    find_gpu,
    list_gpus,
    list_machines,
    list_networks,
    load_gpu,
    load_machine,
    load_network,
)
from paraplan.hardware.catalogue.real_machines import machine_content, machine_from_topology, save_machine
from paraplan.hardware.profiles import MachineProfile
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology
from paraplan.resources import profiles_folder

MY_GPU = {
    "name": "mine",
    "title": "My GPU",
    "vendor": "nvidia",
    "architecture": "Ampere",
    "memory_bytes": 24 * 2**30,
    "memory_bandwidth_bytes_per_s": 9e11,
    "peak_flops_per_s": {"bf16": 7e13, "fp32": 3e13},
    "nvlink_bandwidth_bytes_per_s": 1.4e10,
    "pcie_bandwidth_bytes_per_s": 2e10,
    "source": "written for a test",
}


def write_machine(folder: Path, **fields: object) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps({"name": "mine", "gpu": "rtx-3090", "num_gpus": 2} | fields))
    return str(path)


def test_every_bundled_profile_is_read_under_its_own_name() -> None:
    for kind, profiles in (("gpus", list_gpus()), ("networks", list_networks()), ("machines", list_machines())):
        stems = sorted(path.stem for path in (profiles_folder() / kind).glob("*.json"))
        assert [profile.name for profile in profiles] == stems
    for rack, rate in (("gb200-nvl72", 50e9), ("gb300-nvl72", 100e9)):
        network = cluster_from_profile(rack, num_nodes=2).network
        assert network is not None
        assert network.node_bandwidth_bytes_per_s == 72 * rate, "one NIC for each GPU of a rack, not those of one tray"


def test_no_two_bundled_profiles_share_a_name_or_an_alias() -> None:
    for profiles in (list_gpus(), list_machines()):
        names = [name for profile in profiles for name in (profile.name, *profile.aliases)]
        assert sorted(names) == sorted(set(names))
        assert all(name == name.lower() and " " not in name for name in names)


def test_an_alias_a_path_and_the_name_give_the_same_machine() -> None:
    path = profiles_folder() / "machines" / "dgx-h100.json"
    assert load_machine("h100") == load_machine("dgx-h100") == load_machine(str(path)) == load_machine("DGX_H100")


def test_a_dgx_h100_is_eight_gpus_of_which_each_pair_has_450_gb_per_s() -> None:
    node = load_machine("dgx-h100").node
    assert node.nvlink_all_to_all
    assert len(node.links) == 28
    assert {link.bandwidth_bytes_per_s for link in node.links} == {450e9}
    assert node.numa_groups == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    assert node.nics[5].gpu_links[5] is LinkType.PXB
    assert node.nics[5].gpu_links[4] is LinkType.NODE
    assert node.nics[5].gpu_links[0] is LinkType.SYS


def test_each_gpu_of_a_dgx_1_has_six_nvlinks_to_four_others() -> None:
    node = load_machine("dgx-1").node
    assert not node.nvlink_all_to_all
    assert node.nvlink_islands == [[0, 1, 2, 3, 4, 5, 6, 7]]
    for gpu in range(8):
        links = [link for link in node.links if gpu in (link.gpu_a, link.gpu_b) and link.link_type is LinkType.NV]
        assert len(links) == 4
        assert sum(link.nvlink_count or 0 for link in links) == 6


def test_a_machine_without_a_bridge_has_no_nvlink() -> None:
    assert load_machine("rtx-3090-x2").node.nvlink_islands == []
    assert load_machine("rtx-3090-x2-nvlink").node.nvlink_islands == [[0, 1]]


def test_an_unknown_name_lists_near_ones() -> None:
    with pytest.raises(ProfileError, match=r"'dgx-h10'.*dgx-h100"):
        load_machine("dgx-h10")
    with pytest.raises(ProfileError, match=r"gpu profile.*'a100sxm80gb'.*a100-sxm-80gb"):
        load_gpu("a100sxm80gb")
    with pytest.raises(ProfileError, match=r"network profile"):
        load_network("carrier-pigeon")


def test_a_kind_of_gpu_named_as_a_machine_is_told_apart_with_the_words_that_do() -> None:
    with pytest.raises(ProfileError, match=r"no machine profile is called 'rtx-4070'") as caught:
        load_machine("rtx-4070")
    assert caught.value.hint == "rtx-4070 is a kind of GPU: say how many, --profile 4xrtx-4070"
    assert cluster_from_profile("4xrtx-4070").gpu == load_gpu("rtx-4070")
    with pytest.raises(ProfileError, match=r"machines with it: .*rtx-4090-x2"):
        load_machine("rtx-4090")


def test_fewer_gpus_of_a_machine_are_its_first_ones() -> None:
    cluster = cluster_from_profile("dgx-h100", num_nodes=2, gpus_per_node=3)
    assert cluster.num_gpus == 6
    assert [gpu.index for gpu in cluster.node.gpus] == [0, 1, 2]
    assert len(cluster.node.links) == 3
    assert all(set(nic.gpu_links) == {0, 1, 2} for nic in cluster.node.nics)


def test_more_gpus_than_a_machine_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"gpus_per_node=9.*8 GPUs.*more nodes"):
        cluster_from_profile("dgx-h100", gpus_per_node=9)
    with pytest.raises(UsageError, match=r"num_nodes=0"):
        cluster_from_profile("dgx-h100", num_nodes=0)


def test_a_machine_without_gpus_takes_any_number_of_ranks_that_share_its_memory() -> None:
    two, eight = cluster_from_profile("cpu"), cluster_from_profile("cpu", gpus_per_node=8)
    assert (two.num_gpus, eight.num_gpus) == (2, 8)
    assert eight.gpu.vendor == "cpu"
    assert two.host_memory_bytes is not None
    assert eight.gpu_memory_bytes * 8 <= two.host_memory_bytes
    assert len(eight.node.links) == 28


def test_another_network_may_be_named() -> None:
    cluster = cluster_from_profile("dgx-h100", num_nodes=2, network="ethernet-10g")
    assert cluster.network == load_network("ethernet-10g")
    for words, rate in (("1g", 1e9), ("2.5GbE", 2.5e9), ("25 Gbps", 25e9)):
        found = cluster_from_profile("dgx-h100", num_nodes=2, network=words).network
        assert found is not None
        assert found.nic_bandwidth_bytes_per_s == rate / 8


def test_a_user_file_may_name_a_bundled_gpu_or_describe_its_own(tmp_path: Path) -> None:
    named = load_machine(write_machine(tmp_path, links=[{"link_type": "NV", "nvlink_count": 4}]))
    assert named.gpu == load_gpu("rtx-3090")
    assert named.node.links[0].bandwidth_bytes_per_s == pytest.approx(4 * 14.0625e9)
    inline = load_machine(write_machine(tmp_path, gpu=MY_GPU, links=[{"link_type": "NV", "nvlink_count": 2}]))
    assert inline.gpu.title == "My GPU"
    assert inline.node.links[0].bandwidth_bytes_per_s == pytest.approx(2.8e10)


def test_a_user_file_may_name_a_gpu_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(json.dumps(MY_GPU))
    assert load_machine(write_machine(tmp_path, gpu="./card.json")).gpu.name == "mine"


def test_the_first_rule_that_covers_a_pair_decides_its_link(tmp_path: Path) -> None:
    rules = [{"link_type": "NV", "nvlink_count": 4, "groups": [[0, 2]]}, {"link_type": "SYS"}]
    node = load_machine(write_machine(tmp_path, num_gpus=3, links=rules)).node
    kinds = {(link.gpu_a, link.gpu_b): link.link_type for link in node.links}
    assert kinds == {(0, 1): LinkType.SYS, (0, 2): LinkType.NV, (1, 2): LinkType.SYS}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"gpu": {**MY_GPU, "memory_bytes": 24}},
            r"gpu\.memory_bytes: 24 bytes is outside.*not in a multiple such as GB",
        ),
        ({"gpu": {**MY_GPU, "memory_bandwidth_bytes_per_s": 936}}, r"gpu\.memory_bandwidth_bytes_per_s: 936 bytes/s"),
        ({"gpu": {**MY_GPU, "peak_flops_per_s": {"bf16": 312}}}, r"gpu\.peak_flops_per_s\.bf16: 312 FLOP/s is outside"),
        ({"gpu": {**MY_GPU, "memory_bytes": None}}, r"gpu\.memory_bytes: is null; hint: fill it in"),
        ({"gpu": {k: v for k, v in MY_GPU.items() if k != "memory_bytes"}}, r"gpu\.memory_bytes: is missing"),
        ({"gpu": {**MY_GPU, "memory_gb": 24}}, r"gpu\.memory_gb: no such field.*memory_bytes"),
        ({"gpu": {**MY_GPU, "peak_flops_per_s": {"fp8": 1e15}}}, r"gpu\.peak_flops_per_s\.fp8"),
        ({"gpu": None}, r"gpu: must name a GPU or describe one"),
        ({"gpu": "h1oo-sxm-80gb"}, r"no gpu profile is called 'h1oo-sxm-80gb'.*h100-sxm-80gb"),
        ({"num_gpu": 2}, r"num_gpu: no such field.*num_gpus"),
        ({"num_gpus": 0}, r"num_gpus"),
        ({"num_gpus": 100_000}, r"num_gpus"),
        ({"num_gpus": "two"}, r"num_gpus.*'two'"),
        ({"links": [{"link_type": "NVLINK"}]}, r"links\.0\.link_type.*'NVLINK'"),
        ({"links": [{"link_type": "NV", "groups": [[0, 5]]}]}, r"GPU 5 is named, but num_gpus=2"),
        ({"numa_nodes": {"0": [0, 1], "1": [1]}}, r"numa_nodes names a GPU twice"),
        ({"nics": [{"name": "mlx5_0", "rate_bytes_per_s": 400}]}, r"nics\.0\.rate_bytes_per_s: 400 bytes/s is outside"),
        (
            {"network": {"name": "x", "nic_bandwidth_bytes_per_s": 50}},
            r"network\.nic_bandwidth_bytes_per_s: 50 bytes/s",
        ),
        ({"network": 7}, r"network: must be a JSON object"),
        ({"host_memory_bytes": 1e400}, r"host_memory_bytes: inf"),
    ],
)
def test_a_file_at_fault_is_named_with_its_field(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    path = write_machine(tmp_path, **fields)
    Path(path).write_text(Path(path).read_text().replace("Infinity", "1e400"))
    with pytest.raises(ProfileError, match=message) as caught:
        load_machine(path)
    assert "mine.json" in str(caught.value) or "is called" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'{"name": NaN}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"name": 1' + b"0" * 5000 + b"}",
    ],
)
def test_a_file_that_holds_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"broken\.json"):
        load_machine(str(path))


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path / "folder.json"):
        if path.name == "folder.json":
            path.mkdir()
        with pytest.raises(ProfileError, match=f"cannot read .*{path.name}"):
            load_machine(str(path))


@pytest.mark.parametrize("name", ["dgx-1", "dgx-a100", "cpu", "l40s-x8"])
def test_a_saved_machine_is_read_back_equal(tmp_path: Path, name: str) -> None:
    machine = load_machine(name)
    save_machine(machine, tmp_path / "copy.json")
    assert load_machine(str(tmp_path / "copy.json")) == machine
    assert [path.name for path in tmp_path.iterdir()] == ["copy.json"]


def test_a_machine_saved_into_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot write"):
        save_machine(load_machine("cpu"), tmp_path / "none" / "copy.json")


def real_node(*names: str) -> NodeTopology:
    return NodeTopology(
        source="NVML",
        hostname="secret-host",
        gpus=tuple(
            Gpu(index=index, name=name, uuid=f"GPU-{index}", memory_total_bytes=25_757_220_864, numa_node=0)
            for index, name in enumerate(names)
        ),
        links=(GpuLink(gpu_a=0, gpu_b=1, link_type=LinkType.PHB),) if len(names) > 1 else (),
        nics=(Nic(name="mlx5_0", rate_bytes_per_s=2.5e10, gpu_links={0: LinkType.PIX}),),
    )


def test_a_real_machine_becomes_a_profile_that_names_no_host(tmp_path: Path) -> None:
    machine = machine_from_topology(real_node("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"), name="mine")
    assert machine.gpu == load_gpu("rtx-3090")
    assert machine.network is not None
    assert machine.network.nic_bandwidth_bytes_per_s == pytest.approx(2.5e10)
    assert any("host_memory_bytes" in note for note in machine.notes)
    save_machine(machine, tmp_path / "mine.json")
    text = (tmp_path / "mine.json").read_text()
    assert "secret-host" not in text
    assert "GPU-0" not in text
    again = load_machine(str(tmp_path / "mine.json"))
    assert again.node.links[0].link_type is LinkType.PHB
    assert again.node.links[0].bandwidth_bytes_per_s == load_gpu("rtx-3090").pcie_bandwidth_bytes_per_s
    assert again.notes == machine.notes


def test_mixed_kinds_of_gpu_are_said_and_the_slowest_is_planned_with() -> None:
    machine: MachineProfile = machine_from_topology(
        real_node("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"), name="mixed"
    )
    assert machine.gpu.name == "rtx-3090"
    assert any("2 kinds" in note for note in machine.notes)


def test_a_gpu_that_no_profile_describes_says_how_to_describe_it() -> None:
    with pytest.raises(ProfileError, match=r"GPU 0 \(NVIDIA Foo 1\).*--gpu FILE"):
        machine_from_topology(real_node("NVIDIA Foo 1"), name="mine")
    own = load_gpu("t4")
    assert machine_from_topology(real_node("NVIDIA Foo 1"), name="mine", gpu=own).gpu == own
    with pytest.raises(ProfileError, match="without GPUs"):
        machine_from_topology(NodeTopology(source="NVML"), name="mine")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
WHOLE = machine_content(load_machine("dgx-1"))


def paths_of(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in children for found in paths_of(child, (*path, key)))]


@given(st.sampled_from(paths_of(WHOLE)[1:]), JSON_VALUES)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_any_place_is_read_or_refused_in_words(
    tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    content = json.loads(json.dumps(WHOLE))
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    (tmp_path / "fuzzed.json").write_text(json.dumps(content))
    try:
        machine = load_machine(str(tmp_path / "fuzzed.json"))
    except ProfileError:
        return
    assert machine.node.gpus


def test_every_gpu_is_found_by_the_names_that_drivers_report() -> None:
    for gpu in list_gpus():
        for name in gpu.driver_names if with_all([gpu]) else gpu.driver_names[:1]:
            assert find_gpu(name, memory_total_bytes=gpu.memory_bytes) == gpu
    assert find_gpu("NVIDIA Nothing 9000") is None


@pytest.mark.parametrize(
    ("profile", "gpu", "tensor_tflops", "gib"),
    [
        ("8xl20", "l20", 119.5, 45.0),
        ("4xl20", "l20", 119.5, 45.0),
        ("8xb100", "b100-sxm-180gb", 1750, 179),
        ("mi250", "mi250-gcd-64gb", 181, 64),
        ("2xrtx-4090-48gb", "rtx-4090-48gb", 165, 48),
        ("8x4090-48gb", "rtx-4090-48gb", 165, 48),
    ],
)
def test_cards_that_people_rent_are_named_as_they_call_them(
    profile: str, gpu: str, tensor_tflops: float, gib: float
) -> None:
    cluster = cluster_from_profile(profile)
    assert cluster.gpu.name == gpu
    assert cluster.gpu.peak_flops_per_s["bf16"] == pytest.approx(tensor_tflops * 1e12, rel=0.01)
    assert cluster.gpu.memory_bytes / 2**30 == pytest.approx(gib, rel=0.01)


def test_a_name_in_words_is_no_path() -> None:
    with pytest.raises(ProfileError, match="no network profile is called 'InfiniBand EDR 100 Gb/s a node'"):
        load_network("InfiniBand EDR 100 Gb/s a node")
    with pytest.raises(ProfileError, match="no machine profile is called '8 x H100 / node'") as found:
        load_machine("8 x H100 / node")
    assert found.value.hint == "did you mean 8xh100?"


def test_some_gpus_of_a_machine_have_their_share_of_its_memory() -> None:
    whole = cluster_from_profile("dgx-a100").host_memory_bytes or 0
    assert cluster_from_profile("2xa100").host_memory_bytes == whole // 4
    assert cluster_from_profile("8xa100").host_memory_bytes == whole
    assert cluster_from_profile("dgx-a100", gpus_per_node=2).host_memory_bytes == whole  # the rest stays idle
    pair = cluster_from_profile("rtx-3090-x2").host_memory_bytes or 0
    assert cluster_from_profile("1xrtx-3090").host_memory_bytes == min(pair, 64 * 2**30)
