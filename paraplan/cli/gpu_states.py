"""What the GPUs of this machine are doing, as a table that `paraplan topo --watch` draws again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.live import Live
from rich.table import Table

from paraplan.api.inspection import watched_gpus
from paraplan.cli.known_columns import known_columns
from paraplan.cli.terminal import make_console
from paraplan.units import format_bytes

if TYPE_CHECKING:
    from paraplan.hardware.probe.nvml_state import GpuState

_Number = TypeVar("_Number", int, float)


def watch(every_s: float) -> None:
    """Draw the states until Ctrl-C; where the output is no terminal, print a table each time."""
    console = make_console()
    with watched_gpus() as states:
        if not console.is_terminal:
            while True:
                console.print(state_table(states()))
                time.sleep(every_s)
        with Live(state_table(states()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(state_table(states()), refresh=True)


def state_table(states: Sequence[GpuState]) -> Table:
    """Return what GPUs are doing, one a row."""
    columns: dict[str, Callable[[GpuState], str | None]] = {
        "GPU": lambda one: str(one.index),
        "memory used": lambda one: _of(one.memory_used_bytes, one.memory_total_bytes, format_bytes),
        "busy": lambda one: None if one.busy_share is None else f"{one.busy_share:.0%}",
        "power": lambda one: _of(one.power_w, one.power_limit_w, lambda watts: f"{watts:.0f} W"),
        "temperature": lambda one: None if one.temperature_c is None else f"{one.temperature_c} C",
        "SM clock": lambda one: _of(one.sm_clock_mhz, one.sm_clock_max_mhz, lambda rate: f"{rate} MHz"),
        "PCIe now": _pcie_now,
        "slowed by": lambda one: ", ".join(one.slowed_by) or None,
        "ECC errors": lambda one: None if one.ecc_errors is None else str(one.ecc_errors),
    }
    return known_columns(columns, tuple(states), unknown="")


def _of(now: _Number | None, most: _Number | None, words: Callable[[_Number], str]) -> str | None:
    if now is None:
        return None
    return words(now) if most is None else f"{words(now)} of {words(most)}"


def _pcie_now(state: GpuState) -> str | None:
    if state.pcie_generation is None or state.pcie_width is None:
        return None
    now = f"{state.pcie_generation} x{state.pcie_width}"
    if state.pcie_generation_max is None or state.pcie_width_max is None:
        return now
    most = f"{state.pcie_generation_max} x{state.pcie_width_max}"
    return now if now == most else f"{now} of {most}"
