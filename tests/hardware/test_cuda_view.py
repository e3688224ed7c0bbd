import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.errors import UsageError
from paraplan.hardware.probe.cuda_devices import cuda_view, select_gpus, visible_devices
from paraplan.hardware.topology import Gpu, MigInstance


def gpu(index: int, *, uuid: str | None = "given", bus: int | None = None, name: str = "A100", cc: str = "8.0") -> Gpu:
    return Gpu(
        index=index,
        name=name,
        uuid=f"GPU-{index}{index}aa-{index}" if uuid == "given" else uuid,
        pci_bus_id=f"00000000:{(index if bus is None else bus):02X}:00.0",
        compute_capability=cc,
    )


FOUR = [gpu(index) for index in range(4)]


def seen(gpus: list[Gpu], visible: str | None, **environment: str) -> list[int]:
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return [device.nvml_index for device in cuda_view(gpus, environment).devices]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("0,-1,2", [0]),
        ("3,7,1", [3]),
        ("1,2,1,3", [1, 2]),
        ("no", []),
        ("2x,1", [2, 1]),
        ("1,,2", [1]),
        ("GPU-22,0", [2]),
        ("GPU-22aa-2,GPU-00", [2, 0]),
        ("GPU-", []),
        ("GPU-ff,0", []),
        ("gpu-22", []),
        ("2,GPU-22", [2]),
        ("99999999999999999999", []),
    ],
)
def test_the_list_ends_at_the_first_entry_that_is_wrong(visible: str | None, indices: list[int]) -> None:
    assert seen(FOUR, visible) == indices


def test_what_ended_the_list_is_said() -> None:
    assert "'7'" in cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": "3,7,1"}).notes[0]
    assert "already" in cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": "1,1"}).notes[0]
    assert "another form" in cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-22,0"}).notes[0]
    assert "hidden" in cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": ""}).notes[0]
    assert cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": "1,0"}).notes == ()


def test_a_cuda_index_is_the_place_in_the_list() -> None:
    view = cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": "3,1"})
    assert view.cuda_index(3) == 0
    assert view.cuda_index(1) == 1
    assert view.cuda_index(0) is None


MIXED = [gpu(0, name="T400", cc="7.5"), gpu(1, name="H100", cc="9.0"), gpu(2, name="A100", cc="8.0")]


def test_unlike_gpus_come_fastest_first_unless_ordered_by_bus() -> None:
    assert seen(MIXED, None) == [1, 2, 0]
    assert seen(MIXED, "0,1") == [1, 2]
    assert seen(MIXED, None, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1, 2]
    assert "guess" in cuda_view(MIXED, {}).notes[0]
    assert cuda_view(MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes == ()


def test_bus_order_counts_addresses_as_hexadecimal_numbers() -> None:
    gpus = [gpu(0, bus=0xC1), gpu(1, bus=0x0F), gpu(2, bus=0x41)]
    assert seen(gpus, None, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1, 2, 0]


def test_an_order_that_cuda_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="CUDA_DEVICE_ORDER='SLOWEST'"):
        cuda_view(FOUR, {"CUDA_DEVICE_ORDER": "SLOWEST"})


def mig_gpu(index: int, slices: int) -> Gpu:
    instances = tuple(MigInstance(name="1g.10gb", uuid=f"MIG-{index}{part}bb") for part in range(slices))
    return gpu(index).replace(mig_enabled=True, mig_instances=instances)


def test_a_process_sees_one_mig_instance() -> None:
    gpus = [mig_gpu(0, 3), gpu(1)]
    for visible, uuid in (
        ("MIG-02", "MIG-02bb"),
        ("MIG-01bb,MIG-00", "MIG-01bb"),
        ("0,1", "MIG-00bb"),
        (None, "MIG-00bb"),
    ):
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        devices = cuda_view(gpus, environment).devices
        assert [device.mig_uuid for device in devices] == [uuid]
    assert seen(gpus, "MIG-0") == []  # a prefix of three slices
    assert seen(gpus, "GPU-11") == [1]


def test_a_gpu_in_mig_mode_without_instances_is_no_device() -> None:
    assert seen([mig_gpu(0, 0), gpu(1)], None) == [1]
    assert seen([mig_gpu(0, 0), gpu(1)], "0,1") == []


@pytest.mark.parametrize(
    ("request_", "visible", "indices"),
    [
        (None, "3,1", [3, 1]),
        ("2", None, [0, 1]),
        ("2", "3,1,0", [3, 1]),
        ("0,2", None, [0, 2]),
        ("2,0", "3,1,0", [0, 3]),
        ("2,", None, [2]),
        ("GPU-33", None, [3]),
        ("GPU-33,0", None, [3, 0]),
    ],
)
def test_gpus_are_chosen_among_those_that_cuda_shows(
    request_: str | None, visible: str | None, indices: list[int]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [device.nvml_index for device in select_gpus(FOUR, request_, environment)] == indices


@pytest.mark.parametrize("request_", ["5", "0", "", ",", "0,9", "1,1", "-1", "0,x", "GPU-", "GPU-99", "GPU-11,1"])
def test_a_request_that_cannot_be_met_is_refused(request_: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        select_gpus(FOUR, request_, {})


def test_a_child_is_given_uuids_and_without_them_bus_indices() -> None:
    view = cuda_view(FOUR, {})
    assert visible_devices([view.devices[2], view.devices[0]], view) == "GPU-22aa-2,GPU-00aa-0"
    bare = [gpu(index, uuid=None) for index in range(4)]
    view = cuda_view(bare, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"})
    assert visible_devices(view.devices, view) == "3,1"
    with pytest.raises(UsageError, match="PCI_BUS_ID"):
        visible_devices(view.devices, cuda_view(bare, {}))


@given(st.text(alphabet="0123456789,- GPUMIax", max_size=24))
def test_any_text_shows_each_device_at_most_once(visible: str) -> None:
    view = cuda_view(FOUR, {"CUDA_VISIBLE_DEVICES": visible})
    indices = [device.nvml_index for device in view.devices]
    assert len(set(indices)) == len(indices)
    assert [device.cuda_index for device in view.devices] == list(range(len(indices)))
    assert seen(FOUR, visible_devices(view.devices, view)) == indices
