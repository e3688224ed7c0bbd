"""How unevenly a router's rows fall on the ranks that hold its experts."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from paraplan.cost.constants import CostConstants
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.plan_table import Floats, Ints
from paraplan.cost.slowest import largest_of
from paraplan.plan.training import TrainingSpec

_MEASURED_EXPERTS = 64
"""The experts of the mixtures by which the deviation is known. Of eight, the busiest had 1.03 to 1.22 of the mean
(shawntan/scattermoe issue 10)."""

Counts = TypeVar("Counts", int, Ints, Floats)


def expert_ranks(framework: FrameworkProfile, *, ep: Counts, tp: Counts) -> Counts:
    """Return over how many ranks whole experts, or the same share of each, are spread."""
    return ep * tp if framework.experts.over_tensor_ranks else ep


def busiest_load(training: TrainingSpec, constants: CostConstants, *, num_experts: int, ranks: Ints | Floats) -> Floats:
    """Return the rows of the busiest of `ranks` [N] over their mean, the mean of layers; 1 for a rank with all experts.

    Where the training does not say it: rows of experts vary around their mean by `CostConstants.expert_deviation`, each
    for itself, so that a rank with E of them varies by 1 / sqrt(E) of that, and all wait for the largest of the ranks.
    A mixture of fewer than 64 experts varies as 64 would of which some always stand together.
    """
    if training.expert_load is not None:
        return np.where(ranks > 1, training.expert_load, 1.0)
    experts_of_rank = np.maximum(max(num_experts, _MEASURED_EXPERTS) / ranks, 1.0)
    return np.asarray(1.0 + constants.expert_deviation * largest_of(ranks) / np.sqrt(experts_of_rank))
