"""How much of a job's time becomes training: the interval of its checkpoints, and what failures cost.

Failures come at random with one rate (a Poisson process), while ranks start too. Symbols as in J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006):
M mean time between failures, delta time that a checkpoint takes from training, R restart time, tau training between
two checkpoints.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from paraplan.errors import UsageError
from paraplan.records import Record

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weights and the two states of Adam, each in fp32; a lower bound for the engine's checkpoints."""

WRITE_BYTES_PER_S_PER_NODE = 1e9
"""Assumed speed of a checkpoint where none was measured: the storage of Llama 3 sustained 2 TB/s for 2,048 nodes of
8 GPUs ("The Llama 3 Herd of Models", arXiv:2407.21783, 3.3.1: Tectonic; 16,384 GPUs)."""

RESTART_S = 300.0
"""Assumed time from a failure to training again, where none was measured: the order of what Kokolis et al.
(arXiv:2410.21680) take for the overhead of a restart."""

_UNITS_S = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "y": 365 * 86_400.0}
_MOST_S = 1e12


class FailureCosts(Record):
    """Costs of failures and of the protection from them, in seconds."""

    save_s: float = Field(ge=0)
    """Training stands still for so long for one checkpoint (delta)."""
    write_s: float = Field(ge=0)
    """From the start of a checkpoint until it is whole: more than `save_s` where it is written beside training."""
    load_s: float = Field(ge=0)
    """Reading a checkpoint after a restart."""
    restart_s: float = Field(ge=0)
    """From a failure to the first step, without `load_s`: noticing it, ending ranks, waiting for nodes, starting."""

    is_measured: bool = True
    """False for assumed ones."""

    @property
    def behind_s(self) -> float:
        """How much older than the last checkpoint's start the state may be that a failure leaves."""
        return max(0.0, self.write_s - self.save_s)

    @property
    def recovery_s(self) -> float:
        """R: what every failure costs beside training that is done again."""
        return self.restart_s + self.load_s


class MeasuredCosts(Record):
    """Costs that a run has shown; None for an event that did not happen in it."""

    save_s: float | None = Field(default=None, ge=0)
    write_s: float | None = Field(default=None, ge=0)
    load_s: float | None = Field(default=None, ge=0)
    restart_s: float | None = Field(default=None, ge=0)

    def completed(self, assumed: FailureCosts) -> FailureCosts:
        """Return the costs with what is `assumed` of those that are not known."""
        known = {name: value for name, value in self if value is not None}
        return assumed.replace(**known, is_measured=len(known) == len(type(self).model_fields))


class GoodputEstimate(Record):
    """Expected shares of a job's time, which add up to 1, with a checkpoint every `interval_s` of training."""

    mtbf_s: float
    """Mean time between failures of the whole job (M)."""
    interval_s: float
    """Training between two checkpoints (tau)."""
    goodput: float
    """Steps that count."""
    checkpoints: float
    """Standing still for checkpoints."""
    lost: float
    """Training that a failure undoes, and that is done again."""
    restarts: float
    """From failures to the next step."""
    costs: FailureCosts


@dataclass(frozen=True)
class FailureRate:
    """A mean time between failures, of the whole job, or of one GPU or node: more of them fail more often."""

    mtbf_s: float
    of: Literal["job", "gpu", "node"] = "job"

    @classmethod
    def parse(cls, text: str) -> FailureRate:
        """Read `3h`, `50000h/gpu` or `2y/node`. Raises `UsageError` for anything else."""
        match = re.fullmatch(
            r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([a-z]+)\s*(?:/\s*(job|gpu|node))?\s*", text.lower()
        )
        unit = None if match is None else _UNITS_S.get(match.group(2))
        seconds = 0.0 if match is None or unit is None else float(match.group(1)) * unit
        if match is None or not 0 < seconds <= _MOST_S:
            raise UsageError(
                f"--mtbf {text!r} is not a mean time between failures",
                hint="write 3h for the whole job, 50000h/gpu or 400d/node; units are s, min, h, d and y",
            )
        of: Literal["job", "gpu", "node"] = (
            "gpu" if match.group(3) == "gpu" else "node" if match.group(3) == "node" else "job"
        )
        return cls(seconds, of)

    def of_job_s(self, *, num_gpus: int, num_nodes: int) -> float:
        """Return the mean time between failures of a job, any of whose parts ends it."""
        return self.mtbf_s / {"job": 1, "gpu": num_gpus, "node": num_nodes}[self.of]


def assumed_costs(*, num_parameters: int, num_nodes: int) -> FailureCosts:
    """Return the costs of a job that has not run yet: checkpoints at `WRITE_BYTES_PER_S_PER_NODE`, `RESTART_S`."""
    seconds = num_parameters * CHECKPOINT_BYTES_PER_PARAMETER / (WRITE_BYTES_PER_S_PER_NODE * num_nodes)
    return FailureCosts(save_s=seconds, write_s=seconds, load_s=seconds, restart_s=RESTART_S, is_measured=False)


def young_interval(mtbf_s: float, save_s: float) -> float:
    """Return sqrt(2 delta M): J. W. Young, Communications of the ACM 17 (1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(mtbf_s: float, save_s: float) -> float:
    """Return Daly's higher-order optimum of the interval; M where a checkpoint takes longer than 2 M."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2 * mtbf_s))
    return max(young_interval(mtbf_s, save_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s, 0.0)


def best_interval(mtbf_s: float, costs: FailureCosts, *, step_s: float = 1.0) -> float:
    """Return the interval to write at: Daly's, but no less than a step, nor than what writing a checkpoint takes."""
    return max(daly_interval(mtbf_s, costs.save_s), costs.behind_s, step_s)


def estimate_goodput(mtbf_s: float, costs: FailureCosts, *, interval_s: float) -> GoodputEstimate:
    """Return the expected shares of a job's time.

    Without `behind_s` that is Daly's complete model: tau of training and a checkpoint take
    M exp(R/M) (exp((tau + delta)/M) - 1). A checkpoint that is written beside training counts when it is whole: each
    failure undoes `behind_s` more, which is training that is done again and may fail again.
    Times that no failure lets through give a goodput of 0.
    """
    behind, recovery = costs.behind_s, costs.recovery_s
    length = (interval_s + costs.save_s) / mtbf_s
    if length + (recovery + behind) / mtbf_s > _MOST_EXPONENT:
        return GoodputEstimate(
            mtbf_s=mtbf_s, interval_s=interval_s, goodput=0, checkpoints=0, lost=0, restarts=1, costs=costs
        )
    failures = math.expm1(length)  # of one interval, those while ranks start not counted
    restarts = failures * mtbf_s * math.expm1(recovery / mtbf_s)
    again = failures * mtbf_s * math.exp(recovery / mtbf_s) * math.expm1(behind / mtbf_s)
    undone = failures * mtbf_s - interval_s - costs.save_s
    whole = interval_s + costs.save_s + restarts + again + undone
    return GoodputEstimate(
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        goodput=interval_s / whole,
        checkpoints=costs.save_s / whole,
        lost=(undone + again) / whole,
        restarts=restarts / whole,
        costs=costs,
    )


_MOST_EXPONENT = 500.0
"""Beyond, no job gets from one checkpoint to the next in any time, and numbers overflow."""
