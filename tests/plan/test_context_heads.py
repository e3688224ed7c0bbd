"""Which heads context parallelism can exchange tokens for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.framework_files import FrameworkCatalog
from paraplan.cost.workload import Workload
from paraplan.model.reader import read_model
from paraplan.plan.compatibility import why_incompatible
from paraplan.plan.context_heads import context_reason, context_shares, divides_heads, key_copies, mask_reason
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]


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


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "parts"),
    [
        (64, 8, 36, (4, 9)),
        (32, 8, 8, (8, 1)),
        (8, 1, 16, (8, 2)),
        (3, 3, 4, (1, 4)),
        (6, 2, 12, (6, 2)),
        (9, 3, 6, (3, 2)),
    ],
)
def test_ranks_beyond_the_heads_share_out_tokens_evenly(
    queries: int, keys: int, ranks: int, parts: tuple[int, int]
) -> None:
    shares = context_shares(queries, keys, ranks)
    assert shares == parts
    members = [shares.members(share) for share in range(shares.tokens)]
    assert sorted(rank for each in members for rank in each) == list(range(ranks))
    assert all(list(each) == sorted(each) for each in members)
    # Under a causal mask the tokens of a rank attend to those of all ranks before it, and to half of its own.
    work = [sum(rank + 0.5 for rank in each) for each in members]
    assert max(work) / (sum(work) / len(work)) == pytest.approx(shares.causal_load)
    assert shares.causal_load == 1 or shares.heads % 2


@pytest.mark.parametrize(
    ("name", "seq_length", "reason"),
    [
        ("llama-3-8b", 131072, None),
        ("deepseek-v3", 131072, None),
        ("gemma-3-12b", 131072, "attends in windows of 1024 tokens"),
        ("gemma-3-12b", 1024, None),
        ("gpt-oss-20b", 8192, "attends in windows of 128 tokens"),
        ("qwen3-next-80b-a3b", 8192, "has layers without softmax attention"),
    ],
)
def test_masks_that_are_not_all_tokens_before_are_told(name: str, seq_length: int, reason: str | None) -> None:
    assert mask_reason(read_model(name), seq_length) == reason


def test_a_framework_that_rings_causal_attention_has_no_other_over_cp(workload: MakeWorkload) -> None:
    plan = ParallelPlan(cp=8, zero_stage=3, recompute="full")
    for framework, model, is_refused in (
        ("trl", "gemma-3-12b", True),
        ("trl", "qwen3-8b", False),
        ("axolotl", "gemma-3-12b", False),  # whose ring is another
        ("paraplan", "gemma-3-12b", False),
    ):
        made = workload(model, profile="8xh100", seq_length=32768, global_batch_size=1)
        profile = FrameworkCatalog().load(framework)
        found = why_incompatible(plan, made.model, made.training, made.cluster, profile.split_rules)
        assert (found is not None) == is_refused
        assert found is None or "attention to all tokens before alone, and gemma-3-12b attends" in found.message
