from __future__ import annotations

from pathlib import Path

import pytest

from paraplan.hardware.topology import Gpu, NodeTopology
from paraplan.launch.preflight import (
    check_cuda,
    check_disks,
    check_gpus,
    gpus_of_ranks,
    has_driver,
)

GIB = 1 << 30


def gpu(index: int, **changes: object) -> Gpu:
    values: dict[str, object] = {
        "index": index,
        "name": "H100",
        "uuid": f"GPU-{index}",
        "memory_total_bytes": 80 * GIB,
        "memory_used_bytes": GIB // 2,
        "nvlink_count": 18,
    }
    return Gpu(**(values | changes))  # type: ignore[arg-type]


def test_free_gpus_with_all_links_up_are_fine() -> None:
    found = check_gpus([gpu(0), gpu(1)], peak_bytes=70 * GIB)
    assert (found.problems, found.warnings) == ((), ())


def test_a_gpu_in_use_is_named_and_is_a_problem_where_the_plan_no_longer_fits() -> None:
    gpus = [gpu(0), gpu(1, memory_used_bytes=30 * GIB)]
    assert check_gpus(gpus).warnings == ("GPU 1 is in use: 30.0 GiB of its memory are used",)
    assert check_gpus(gpus[:1]).warnings == ()
    found = check_gpus(gpus, peak_bytes=60 * GIB)
    assert found.problems == ("GPU 1 is in use: 30.0 GiB of its memory are used, and the plan needs 60.0 GiB",)


def test_a_plan_for_larger_gpus_is_a_problem() -> None:
    found = check_gpus([gpu(0)], peak_bytes=90 * GIB)
    assert found.problems == ("the plan needs 90.0 GiB on a GPU, and GPU 0 has 80.0 GiB",)


def test_a_gpu_with_links_down_is_named() -> None:
    found = check_gpus([gpu(0), gpu(1, nvlink_count=16)])
    assert found.warnings == ("GPU 1 has 16 of 18 NVLinks up: it slows every collective",)


@pytest.mark.parametrize(
    ("torch_cuda", "cuda_version", "said"),
    [
        (None, "12.4", "built without CUDA"),
        ("12.8", "12.4", "needs CUDA 12.8, and driver 550 gives 12.4"),
        ("12.4", "12.4", "can use none of them"),
    ],
)
def test_torch_that_sees_no_gpu_is_explained(torch_cuda: str | None, cuda_version: str, said: str) -> None:
    node = NodeTopology(source="test", gpus=(gpu(0), gpu(1)), driver_version="550", cuda_version=cuda_version)
    found = check_cuda(node, torch_version="2.13", torch_cuda=torch_cuda, is_available=False)
    assert said in found.warnings[0]
    assert check_cuda(node, torch_version="2.13", torch_cuda=torch_cuda, is_available=True).warnings == ()


def test_a_disk_too_small_for_a_checkpoint_and_a_small_shared_memory_are_named(tmp_path: Path) -> None:
    found = check_disks(tmp_path, num_ranks=1, num_parameters=10**15, shm=tmp_path / "none")
    assert "a checkpoint needs" in found.warnings[0]
    assert check_disks(tmp_path / "none", num_ranks=1, shm=tmp_path / "none").warnings == ()


def test_the_gpus_of_ranks_come_in_the_order_in_which_cuda_shows_them() -> None:
    node = NodeTopology(source="test", gpus=tuple(gpu(index) for index in range(4)))
    assert [one.index for one in gpus_of_ranks(node, {"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1"})] == [3, 1]


def test_a_machine_without_a_driver_is_not_asked_for_gpus(tmp_path: Path) -> None:
    assert not has_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert has_driver(tmp_path)
