"""Experts that all compute every token, scaled by a router that is zero for most: transformers' own code of Llama 4.

Other frameworks send a token to the experts that its router chose.
"""

from __future__ import annotations

from dataclasses import replace

from paraplan.model.feed_forward import ExpertsStyle, experts
from paraplan.model.part import Part, kept
from paraplan.model.spec import BlockSpec, ModelSpec


def dense_experts(hidden: int, style: ExpertsStyle) -> Part:
    """Return experts as transformers runs them: tokens are copied for each expert and scaled before they are read."""
    routed, count, inner = experts(hidden, style), style.num_experts, style.inner
    readers = (style.router_name, *style.readers)
    part = kept("router_input", hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    part += kept("routing_indices", 2 * style.experts_per_token, element_type="fp32")
    part += kept("router_probabilities", count, element_type="fp32")
    own = kept("routing_weights", count) + kept("tokens_by_expert", count * hidden)
    own += kept("tokens_by_expert", count * hidden, weights_of=("gate_up_proj",))
    for role in ("activation_internals", "up_projection", "activated_gate"):
        own += kept(role, count * inner, split="tensor")
    own += kept("mlp_inner_output", count * inner, split="tensor", weights_of=("down_proj",))
    saved = tuple(one.replace(is_of_expert_rows=True) for one in own.saved)
    products = tuple(
        one.replace(dense_rows_per_token=float(count)) if one.num_experts > 1 else one for one in routed.matmuls
    )
    return replace(routed, matmuls=products, saved=part.saved + saved)


def as_routed(model: ModelSpec) -> ModelSpec:
    """Return the model as frameworks run it whose experts compute the tokens that were sent to them alone."""
    if not any(one.dense_rows_per_token for run in model.runs for one in run.block.matmuls):
        return model
    return model.replace(runs=tuple(run.replace(block=_as_routed(run.block)) for run in model.runs))


def _as_routed(block: BlockSpec) -> BlockSpec:
    if not any(one.dense_rows_per_token for one in block.matmuls):
        return block
    rows = [one for one in block.saved_fused if one.is_of_expert_rows]
    return block.replace(
        matmuls=tuple(one.replace(dense_rows_per_token=None) for one in block.matmuls),
        saved=(*(one for one in block.saved if not one.is_of_expert_rows), *rows),
    )
