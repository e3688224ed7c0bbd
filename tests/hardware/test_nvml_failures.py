"""Drivers that deny, lack or lose things, as libraries given by argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paraplan.errors import NoGpuError
from paraplan.hardware.probe.nvml import read_nvml, read_this_machine

MIB = 2**20


class NVMLError(Exception):
    """The error of the fake library; `value` is NVML's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Answer:
    """A structure with the fields that NVML fills."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Library:
    """An NVML with `count` plain GPUs; `failures` maps functions, or functions with a GPU, to return codes."""

    NVMLError = NVMLError

    def __init__(self, *, count: int = 2, failures: dict[str | tuple[str, int], int] | None = None) -> None:
        self.count = count
        self.failures = failures or {}
        self.shut_down = False
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: b"550.54.15",
            "nvmlSystemGetCudaDriverVersion": lambda: 12040,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda gpu: "NVIDIA A100-SXM4-80GB",
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetMemoryInfo": lambda gpu: Answer(total=81920 * MIB, used=3 * MIB),
            "nvmlDeviceGetPciInfo": lambda gpu: Answer(busId=f"00000000:{gpu + 7:02X}:00.0"),
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: (8, 0),
            "nvmlDeviceGetEccMode": lambda gpu: [1, 1],
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 400_000,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 4,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetTopologyCommonAncestor": lambda first, second: 30,
            "nvmlDeviceGetP2PStatus": lambda first, second, kind: 0,
        }

    def nvmlShutdown(self) -> None:  # noqa: N802  # the name that pynvml has
        self.shut_down = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.answers:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            gpu = arguments[0] if arguments and isinstance(arguments[0], int) else -1
            code = self.failures.get(name) or self.failures.get((name, gpu))
            if code:
                raise NVMLError(code)
            return self.answers[name](*arguments)

        return call


QUESTIONS = [
    name for name in Library().answers if name not in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
]


def test_a_plain_machine_is_read_without_warnings_and_nvml_is_shut_down() -> None:
    library = Library()
    node = read_nvml(library, source="test")
    assert [gpu.pci_bus_id for gpu in node.gpus] == ["0000:07:00.0", "0000:08:00.0"]
    assert node.gpus[0].memory_used_bytes == 3 * MIB
    assert node.gpus[0].power_limit_w == 400
    assert node.gpus[0].ecc_enabled is True
    assert (node.driver_version, node.cuda_version) == ("550.54.15", "12.4")
    assert node.links[0].link_type == "PHB"
    assert node.peer_access[0].is_allowed
    assert node.warnings == ()
    assert library.shut_down


@pytest.mark.parametrize("question", QUESTIONS)
def test_any_question_may_fail_in_any_way(question: str) -> None:
    for code in (2, 4, 10, 13, 16, 17, 999, 12345):
        node = read_nvml(Library(failures={question: code}), source="test")
        assert len(node.gpus) == 2, code
        absent_is_normal = question in ("nvmlDeviceGetEccMode", "nvmlDeviceGetP2PStatus") and code == 13
        assert bool(node.warnings) != absent_is_normal, code


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_library_may_lack_any_function(question: str) -> None:
    library = Library()
    del library.answers[question]
    assert len(read_nvml(library, source="test").gpus) == 2


def test_memory_that_is_not_supported_is_unknown_and_said() -> None:
    node = read_nvml(Library(failures={("nvmlDeviceGetMemoryInfo", 1): 3}), source="test")
    assert [gpu.memory_total_bytes for gpu in node.gpus] == [81920 * MIB, None]
    assert node.warnings == ("memory unknown for GPU 1: not supported",)


@pytest.mark.parametrize("question", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"])
def test_a_lost_gpu_is_left_out_and_the_others_keep_their_index(question: str) -> None:
    node = read_nvml(Library(count=3, failures={(question, 1): 15}), source="test")
    assert [gpu.index for gpu in node.gpus] == [0, 2]
    assert any("GPU 1 cannot be used" in warning for warning in node.warnings)
    assert any("fell off the bus" in warning for warning in node.warnings)


@pytest.mark.parametrize(
    ("code", "says"), [(12, "no NVIDIA driver"), (9, "not loaded"), (4, "denies access"), (18, "different versions")]
)
def test_a_driver_that_does_not_start_is_said_in_words(code: int, says: str) -> None:
    with pytest.raises(NoGpuError, match=says) as caught:
        read_nvml(Library(failures={"nvmlInit": code}), source="test")
    assert "--profile" in (caught.value.hint or "")
    assert caught.value.exit_status == 3


@pytest.mark.parametrize("library", [Library(count=0), Library(failures={"nvmlDeviceGetHandleByIndex": 15})])
def test_a_driver_that_shows_no_usable_gpu_is_no_gpu(library: Library) -> None:
    with pytest.raises(NoGpuError, match="shows no GPU"):
        read_nvml(library, source="test")
    assert library.shut_down


def test_a_mac_is_told_that_its_gpu_is_not_planned_for() -> None:
    with pytest.raises(NoGpuError, match="Apple's GPUs are not planned for") as caught:
        read_this_machine(platform="darwin")
    assert "explain mac" in (caught.value.hint or "")
