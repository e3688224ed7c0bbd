"""Memory of a rank, by parts, and the sizes of elements."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.plan_table import Floats

FP32, HALF = 4.0, 2.0


class StageMemory(NamedTuple):
    """Bytes that one rank of a stage allocates at its peak, one entry a plan."""

    parameter_bytes: Floats
    gradient_bytes: Floats
    optimizer_state_bytes: Floats
    activation_bytes: Floats
    workspace_bytes: Floats

    @property
    def total_bytes(self) -> Floats:
        """Sum of the parts."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_state_bytes
        return np.asarray(held + self.activation_bytes + self.workspace_bytes)
