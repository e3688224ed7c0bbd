"""State of each GPU at this moment, by NVML: use, power, clocks, PCIe link, what slows it, ECC errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paraplan.hardware.probe.nvml_queries import Questions
from paraplan.records import Record

_CORE_SENSOR = 0  # nvml.h, NVML_TEMPERATURE_GPU
_SM_CLOCK = 1  # nvml.h, NVML_CLOCK_SM
_UNCORRECTED, _SINCE_START = 1, 0  # nvml.h, NVML_MEMORY_ERROR_TYPE_UNCORRECTED and NVML_VOLATILE_ECC

_SLOWED_BY = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
"""nvml.h, nvmlClocksEventReason*; 0x01 is a GPU without work."""


class GpuState(Record):
    """One GPU at one moment. None is what the driver does not say."""

    index: int
    """NVML's number of the GPU."""
    memory_used_bytes: int | None = None
    """Memory of all processes and of the driver."""
    memory_total_bytes: int | None = None
    """Memory of the GPU."""
    busy_share: float | None = None
    """Share of the driver's last sample period (1/6 to 1 s) in which some kernel ran: 1 is no sign of full use."""
    power_w: float | None = None
    """Power that the GPU draws."""
    power_limit_w: float | None = None
    """Power that the GPU may draw."""
    temperature_c: int | None = None
    """Temperature of the chip."""
    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors."""
    sm_clock_max_mhz: int | None = None
    """Their highest."""
    pcie_generation: int | None = None
    """Generation of the PCIe link now: idle GPUs lower it."""
    pcie_generation_max: int | None = None
    """Generation of the PCIe link at best."""
    pcie_width: int | None = None
    """Lanes now."""
    pcie_width_max: int | None = None
    """Lanes at best."""
    slowed_by: tuple[str, ...] = ()
    """Why its clocks are lower than they could be."""
    ecc_errors: int | None = None
    """Memory errors since the driver was loaded that were not corrected."""


@contextmanager
def gpu_states(library: Any | None = None) -> Iterator[GpuStates]:
    """Start NVML, yield what asks it for states, and end its use.

    Raises `NoGpuError` as `read_nvml` does.
    """
    from paraplan.hardware.probe.nvml import started_nvml

    with started_nvml(library) as ask:
        yield GpuStates(ask)


class GpuStates:
    """Asks for the state of all GPUs, as often as somebody wants to know."""

    def __init__(self, ask: Questions) -> None:
        self._ask = ask
        self._handles: dict[int, Any] = {}
        for index in range(ask.machine("number of GPUs", "nvmlDeviceGetCount") or 0):
            handle, _ = ask.code_of("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                self._handles[index] = handle

    def read(self) -> tuple[GpuState, ...]:
        """Return the state of every GPU that can be asked."""
        return tuple(read_state(self._ask, index, handle) for index, handle in self._handles.items())


def read_state(ask: Questions, index: int, handle: Any) -> GpuState:
    """Return the state of one GPU; what it does not support or does not answer is None."""

    def told(function: str, *arguments: Any) -> Any:
        return ask.code_of(function, handle, *arguments)[0]

    memory, use = told("nvmlDeviceGetMemoryInfo"), told("nvmlDeviceGetUtilizationRates")
    power, limit = told("nvmlDeviceGetPowerUsage"), told("nvmlDeviceGetEnforcedPowerLimit")
    reasons = told("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = told("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuState(
        index=index,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        busy_share=None if use is None else use.gpu / 100,
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        temperature_c=told("nvmlDeviceGetTemperature", _CORE_SENSOR),
        sm_clock_mhz=told("nvmlDeviceGetClockInfo", _SM_CLOCK),
        sm_clock_max_mhz=told("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
        pcie_generation=told("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=told("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=told("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=told("nvmlDeviceGetMaxPcieLinkWidth"),
        slowed_by=tuple(words for bit, words in _SLOWED_BY.items() if (reasons or 0) & bit),
        ecc_errors=told("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_START),
    )
