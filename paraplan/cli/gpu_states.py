"""State of this machine's GPUs, as a table that `paraplan topo --watch` draws again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from paraplan.api.inspection import watched_gpus
from paraplan.cli.known_columns import known_columns
from paraplan.cli.terminal import make_console

if TYPE_CHECKING:
    from paraplan.hardware.probe.nvml_state import GpuState


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
        "memory used": lambda one: _of(_gib(one.memory_used_bytes), _gib(one.memory_total_bytes), "GiB"),
        "busy": lambda one: None if one.busy_share is None else f"{one.busy_share:.0%}",
        "power": lambda one: _of(one.power_w, one.power_limit_w, "W"),
        "temp": lambda one: None if one.temperature_c is None else f"{one.temperature_c} C",
        "SM clock": lambda one: _of(one.sm_clock_mhz, one.sm_clock_max_mhz, "MHz"),
        "PCIe now": _pcie_now,
        "slowed by": lambda one: ", ".join(one.slowed_by) or None,
        "ECC": lambda one: None if one.ecc_errors is None else str(one.ecc_errors),
    }
    return known_columns(columns, tuple(states), unknown="")


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _of(now: float | None, most: float | None, unit: str) -> str | None:
    if now is None:
        return None
    return f"{now:.0f} {unit}" if most is None else f"{now:.0f} of {most:.0f} {unit}"


def _pcie_now(state: GpuState) -> str | None:
    if state.pcie_generation is None or state.pcie_width is None:
        return None
    now = f"{state.pcie_generation} x{state.pcie_width}"
    if state.pcie_generation_max is None or state.pcie_width_max is None:
        return now
    most = f"{state.pcie_generation_max} x{state.pcie_width_max}"
    return now if now == most else f"{now} of {most}"
