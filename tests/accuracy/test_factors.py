"""What the factors of a calibration multiply."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paraplan.accuracy.factors import FactorName, scaled
from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.saved_tensors import Shardings
from paraplan.cost.workload import Workload

MakeWorkload = Callable[..., Workload]


def times_of(made: Workload, **factors: float) -> KernelTimes:
    named: dict[FactorName, float] = {name: factors[name] for name in factors}  # type: ignore[misc]
    made = scaled(made, named)
    columns = [np.array([one]) for one in (1, 0, 1, 8, 0, 0, 1)]
    shardings = Shardings.of_columns(columns, made.training, autocast=True)
    return KernelTimes(made.training, made.cluster.gpu, shardings, made.constants, made.framework)


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h200"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matmuls_at_half_of_their_rate_take_twice_as_long(workload: MakeWorkload, profile: str, precision: str) -> None:
    made = workload("llama-3-8b", profile, seq_length=4096, precision=precision)
    block = made.model.runs[0].block
    plain, slow = (times_of(made, matmul=factor).matmuls_s(block, backward=False)[0] for factor in (1.0, 0.5))
    assert slow / plain == pytest.approx(2, rel=0.01)  # starting them stays


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h200"])
def test_memory_at_half_of_its_rate_takes_twice_as_long(workload: MakeWorkload, profile: str) -> None:
    made = workload("llama-3-8b", profile, seq_length=4096)
    plain, slow = (times_of(made, memory=factor).parts_s(made.model.runs[0].block).between[0] for factor in (1.0, 0.5))
    assert slow / plain == pytest.approx(2, rel=0.03)
