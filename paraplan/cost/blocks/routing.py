"""How unevenly a router's rows fall on the ranks that hold its experts."""

from __future__ import annotations

from functools import cache
from math import comb
from typing import TypeVar

import numpy as np

from paraplan.cost.constants import CostConstants
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.plan_table import Floats, Ints
from paraplan.cost.slowest import largest_of
from paraplan.model.spec import Matmul, ModelSpec
from paraplan.plan.training import TrainingSpec

_MEASURED_EXPERTS = 64
"""The experts of the mixtures by which the deviation is known. Of eight, the busiest had 1.03 to 1.22 of the mean
(shawntan/scattermoe issue 10)."""

Counts = TypeVar("Counts", int, Ints, Floats)


def expert_ranks(framework: FrameworkProfile, *, ep: Counts, tp: Counts) -> Counts:
    """Return over how many ranks whole experts, or the same share of each, are spread."""
    return ep * tp if framework.experts.over_tensor_ranks else ep


def busiest_load(training: TrainingSpec, constants: CostConstants, matmul: Matmul, *, ranks: Ints | Floats) -> Floats:
    """Return the rows of the busiest of `ranks` [N] over their mean, the mean of layers; 1 for a rank with all experts.

    Where the training does not say it: rows of experts vary around their mean by `CostConstants.expert_deviation`, each
    for itself, so that a rank with E of them varies by 1 / sqrt(E) of that, and all wait for the largest of the ranks.
    A mixture of fewer than 64 experts varies as 64 would of which some always stand together.
    Tokens that pad short samples are all alike, and a router sends all of a layer to the same experts.
    """
    if training.stated_load is not None:
        return np.where(ranks > 1, training.stated_load, 1.0)
    experts_of_rank = np.maximum(max(matmul.num_experts, _MEASURED_EXPERTS) / ranks, 1.0)
    deviation = constants.trained_expert_deviation if training.tunes_trained else constants.expert_deviation
    of_text = np.asarray(1.0 + deviation * largest_of(ranks) / np.sqrt(experts_of_rank))
    padding = training.padding_share
    if padding == 0:
        return of_text
    chosen = max(1, round(matmul.rows_per_token))
    of_padding = [_load_of_one_choice(matmul.num_experts, chosen, int(count)) for count in ranks.tolist()]
    return np.where(ranks > 1, padding * np.array(of_padding) + (1.0 - padding) * of_text, 1.0)


def load_of_model(
    model: ModelSpec,
    training: TrainingSpec,
    constants: CostConstants,
    framework: FrameworkProfile,
    *,
    tp: Ints,
    ep: Ints,
) -> Floats | None:
    """Return the load of the busiest rank of a model's experts under some shardings, None without experts."""
    matmuls = (matmul for run in model.runs for matmul in run.block.matmuls)
    routed = next((matmul for matmul in matmuls if matmul.num_experts > 1), None)
    if routed is None:
        return None
    return busiest_load(training, constants, routed, ranks=expert_ranks(framework, ep=ep, tp=tp))


@cache
def _load_of_one_choice(num_experts: int, chosen: int, ranks: int) -> float:
    """Return how many of some `chosen` experts the rank has that has the most of them, in the mean, over their mean.

    All choices are as likely. With E experts a rank, those with at most m on any of n ranks number the coefficient of
    x^chosen in (C(E, 0) + C(E, 1) x + ... + C(E, m) x^m)^n.
    """
    ranks = min(ranks, num_experts)
    each, mean, share_below = -(-num_experts // ranks), 0.0, 0.0
    for most in range(1, chosen + 1):
        of_rank = np.array([comb(each, count) for count in range(most + 1)], dtype=object)
        ways = np.array([1], dtype=object)
        for _ in range(ranks):
            ways = np.convolve(ways, of_rank)[: chosen + 1]
        share = ways[chosen] / comb(each * ranks, chosen) if len(ways) > chosen else 0.0
        mean, share_below = mean + most * (share - share_below), share
    return mean * ranks / chosen
