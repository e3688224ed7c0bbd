"""How tests wait for what is bound to happen: they look again and again, far longer than the busiest machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")

PATIENCE_S = 600
"""How long a test waits for what is bound to happen: far longer than it takes on the busiest machine.

A machine that others share may stand still for minutes, whatever runs on it.
"""

_PAUSE_S = 0.02


def wait_until(
    event: Callable[[], _Value], *, told: Callable[[], object] | None = None, timeout_s: float = PATIENCE_S
) -> _Value:
    """Return the first value of `event` that is true; where none comes the test fails with what is then `told`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := event()):
        assert time.monotonic() < deadline_s, told() if told else f"this has not come in {timeout_s:g} s"
        time.sleep(_PAUSE_S)
    return value
