"""Fused AdamW, which the estimates of plans count on where nothing else was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paraplan.plan.files import PlanFile


def unfused_note(
    optimizers: Sequence[torch.optim.Optimizer], file: PlanFile | None, device: torch.device
) -> str | None:
    """Return a line where `file` counts on fused AdamW on a GPU and AdamW is left to torch's choice; None elsewhere.

    torch takes foreach then, which copies all parameters once more, or a loop for sharded ones
    (`torch.optim.optimizer._default_to_fused_or_foreach`).
    """
    if file is None or file.training is None or file.training.optimizer != "adamw" or device.type != "cuda":
        return None
    groups = [group for one in optimizers if isinstance(one, torch.optim.Adam) for group in one.param_groups]
    if all(group["fused"] or group["foreach"] for group in groups):
        return None
    return (
        "the plan counts on fused AdamW, which allocates nothing in its step, and this one is not: give it fused=True, "
        "or make the plan with --optimizer adamw_foreach"
    )
