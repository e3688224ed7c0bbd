"""Along which dimension FSDP divides a parameter."""

from __future__ import annotations

import pytest

from paraplan.plan.sharding import padded_share, sharded_dimension


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((4096,), 32, 0),  # a vector has one dimension
        ((50257, 768), 8, 0),  # a few rows left over are no waste
        ((8, 14336, 4096), 8, 0),
        ((8, 14336, 4096), 32, 1),  # 8 experts over 32 ranks: 24 of them would have none
        ((8, 14337, 4096), 32, 2),
        ((8, 7, 9), 32, 0),  # nothing divides evenly
    ],
)
def test_the_first_dimension_is_divided_unless_another_spares_much(
    shape: tuple[int, ...], num_shards: int, dim: int
) -> None:
    assert sharded_dimension(shape, num_shards) == dim


def test_a_share_counts_the_rows_that_are_left_over() -> None:
    assert padded_share(8, 32) == 4
    assert padded_share(9, 4) == pytest.approx(12 / 9)
    assert padded_share(8, 4) == 1
