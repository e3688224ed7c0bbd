"""Indexers of sparse attention: what is priced of them, and what is not."""

from __future__ import annotations

from paraplan.cost.workload import Workload
from paraplan.units import format_bytes

_FP32 = 4


def index_heads(workload: Workload) -> float | None:
    """Return the heads of a model's indexers whose scores are whole matrices, None where there are none.

    Of keys that stand for several tokens it is a share of that. Fused kernels choose tokens without them.
    """
    if workload.framework.kernels.fused:
        return None
    scores = (one for run in workload.model.runs if (one := run.block.index_scores) is not None)
    return max((one.num_heads / one.tokens_per_key for one in scores), default=None)


def indexer_notes(workload: Workload) -> tuple[str, ...]:
    """Return in a sentence what is priced of sparse attention; none for a model without."""
    if all(run.block.index_scores is None for run in workload.model.runs):
        return ()
    heads, length = index_heads(workload), workload.training.seq_length
    begin = f"{workload.model.name} chooses the tokens that attention reads, and "
    if heads is None:
        return (f"{begin}attention is priced over all, as where the indexer is trained; its own loss is not priced",)
    held = format_bytes(2.0 * _FP32 * heads * length * length)
    return (
        f"{begin}transformers computes all and masks the others, which is priced; its indexers get no gradient, and "
        f"hold {held} of scores for each sequence of {length} tokens while they choose",
    )
