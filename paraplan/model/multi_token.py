"""Layers for multi-token prediction (MTP), which a checkpoint's inference leaves out."""

from __future__ import annotations

from paraplan.model.norm import norm
from paraplan.model.part import kept, linear
from paraplan.model.spec import BlockRun, ModelSpec


def with_prediction_layers(model: ModelSpec, num_layers: int) -> ModelSpec:
    """Return `model` with `num_layers` more blocks at its end, each of which predicts one token further ahead.

    Each is a block like the last, after a projection of two hidden states to one and two norms, and uses the embedding
    and the head of the model again (DeepSeek-AI 2024, DeepSeek-V3, section 2.2; Megatron-Core,
    core/transformer/multi_token_prediction.py). The memory traffic of its loss is not counted.
    """
    if num_layers == 0:
        return model
    last, hidden = model.runs[-1].block, model.hidden_size
    part = norm("mtp.enorm", "rms", hidden) + norm("mtp.hnorm", "rms", hidden)
    part += kept("projection_input", 2 * hidden, split="sequence") + linear(
        "mtp.eh_proj", 2 * hidden, hidden, bias=False
    )
    block = last.replace(
        kind="mtp",
        parameters=last.parameters + part.parameters,
        matmuls=last.matmuls + part.matmuls + model.head.matmuls,
        saved=last.saved + part.saved,
        saved_fused=last.saved_fused + part.saved_fused,
    )
    return model.replace(runs=(*model.runs, BlockRun(block=block, count=num_layers)))
