"""Which heads context parallelism can exchange tokens for."""

from __future__ import annotations

import pytest

from paraplan.model.reader import read_model
from paraplan.plan.context_heads import context_reason, divides_heads, key_copies


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "copies"),
    [(32, 8, 8, 1), (32, 8, 16, 2), (8, 2, 8, 4), (14, 2, 7, 7), (8, 1, 8, 8), (12, 12, 4, 1), (20, 5, 4, 4)],
)
def test_keys_are_repeated_until_every_rank_has_as_many(queries: int, keys: int, ranks: int, copies: int) -> None:
    assert key_copies(keys, ranks) == copies
    assert divides_heads(queries, keys, ranks)
    # Each rank attends with whole groups: the queries of a rank share the keys of that rank.
    assert (queries // ranks) % (keys * copies // ranks) == 0


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(32, 8, 3), (4, 1, 8), (12, 3, 8), (12, 8, 4)])
def test_queries_that_the_ranks_do_not_divide_are_not(queries: int, keys: int, ranks: int) -> None:
    assert not divides_heads(queries, keys, ranks)


def test_a_reason_names_the_heads_and_the_degree_beside() -> None:
    model = read_model("llama-3-8b")
    assert context_reason(model, tp=8, cp=4) is None
    reason = context_reason(model, tp=8, cp=8)
    assert reason is not None
    assert "cp=8 beside tp=8" in reason
    assert "32 attention and 8 key-value heads of llama-3-8b" in reason
