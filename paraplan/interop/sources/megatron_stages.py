"""Pipeline stages in Megatron-LM's options: layouts, shorter ends, the embedding and the loss as layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paraplan.interop.fields import Fields
from paraplan.interop.setup import StageRule

_ENDS = ("decoder_{}_pipeline_num_layers", "num_layers_in_{}_pipeline_stage")
"""Layers of an end: of Megatron-LM's command line, and of Megatron-Core's configuration."""
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def stage_rule(fields: Fields, pp: int) -> StageRule | None:
    """Return how the stages are cut, None for an even cut; raise `PlanError` naming the option for a broken one."""
    name = "pipeline_model_parallel_layout"
    if fields.value(name) is not None:
        stages = _layout(fields, name, pp)
        blocks, predicting = (tuple(stage.count(sign) for stage in stages) for sign in "tm")
        return None if pp == 1 else StageRule(option=fields.shown(name), layout=blocks, predicting=predicting)
    first, last = (_end(fields, end) for end in ("first", "last"))
    embedding, loss = (name if fields.is_on(name) else None for name in _COUNTED)
    said = [name for name in (first, last, embedding, loss) if name is not None]
    if pp == 1 or not said:
        return None
    if (first or last) and (embedding or loss):
        raise fields.error(embedding or loss or "", f"false beside {fields.shown(first or last or '')}")
    return StageRule(
        option=fields.shown(said[0]),
        first=fields.count(first) if first else None,
        last=fields.count(last) if last else None,
        counts_embedding=embedding is not None,
        counts_loss=loss is not None,
    )


def virtual_stages(fields: Fields, pp: int, rule: StageRule | None) -> int:
    """Return the virtual stages of a pipeline rank."""
    if pp == 1:
        return 1
    if rule is not None and rule.layout is not None:
        return len(rule.layout) // pp
    stages = fields.count("num_virtual_stages_per_pipeline_rank") or fields.count(
        "virtual_pipeline_model_parallel_size"
    )
    layers = fields.count("num_layers_per_virtual_pipeline_stage") if stages is None else None
    if stages is not None or layers is None:
        return stages or 1
    num_blocks = fields.count("num_layers")
    counted = 0 if rule is None else rule.counts_embedding + rule.counts_loss
    if num_blocks is None:
        raise fields.error("num_layers_per_virtual_pipeline_stage", "--num-layers beside it, which is missing")
    if (num_blocks + counted) % (pp * layers):
        raise fields.error("num_layers_per_virtual_pipeline_stage", f"a divisor of --num-layers {num_blocks} / pp {pp}")
    return (num_blocks + counted) // pp // layers


def _end(fields: Fields, end: str) -> str | None:
    """Return the option that gives the layers of an end, None where none does."""
    return next((name for name in (key.format(end) for key in _ENDS) if fields.count(name) is not None), None)


def _layout(fields: Fields, name: str, pp: int) -> Sequence[str]:
    """Return the stages of a layout, each with its letters: E embedding, t a layer, m one that predicts, L the loss."""
    layout = fields.text(name) or ""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda part: part.group(1) * int(part.group(2)), layout.replace(",", ""))
    stages = layout.split("|")
    if re.fullmatch(r"[EtmL|]+", layout) is None or "t" not in layout or len(stages) % pp:
        raise fields.error(name, f"E, t, m and L in stages apart by |, a multiple of {pp}")
    return stages
