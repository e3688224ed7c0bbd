"""`SavedRole`: what a tensor that a block keeps for its backward pass is to the operations around it."""

from __future__ import annotations

from typing import Literal

_OfStream = Literal["embeddings", "pixels", "rotary_tables", "encoder_output", "layer_inputs", "layer_outputs"]
_OfStreams = Literal["streams", "stream_weights", "stream_router_input"]
_OfNorm = Literal["norm_input", "norm_input_in_fp32", "norm_statistics", "centred", "centred_squares", "normalised"]
_OfProjections = Literal["attention_input", "query_latent", "key_value_latent", "before_rotation", "projection_input"]
_OfScores = Literal["attention_mask", "position_bias", "scores", "probabilities", "probabilities_copy"]
_OfKernel = Literal["query", "key", "value", "attention_dropout_mask", "softmax_statistics", "attention_output"]
_OfGate = Literal["output_by_token", "output_gate", "gate_inner", "gated_output", "layer_gate_inputs", "layer_gate"]
_OfHeads = Literal["heads", "normalised_heads", "repeated_heads", "decayed_heads", "values", "norm_root"]
_OfRule = Literal["convolution_input", "convolution_output", "decay", "beta", "inverse", "chunks", "scan_output"]
_OfRuleOutput = Literal["rule_output", "scaled_output", "gated_norm"]
_OfMlp = Literal["mlp_input", "activation_input", "activation_internals", "power", "relu_output", "up_projection"]
_OfMlpOutput = Literal["activated_gate", "mlp_inner_output", "mlp_output_mask", "dropout_mask"]
_OfRouter = Literal[
    "router_input", "router_input_in_fp32", "router_probabilities", "routing_indices", "routing_weights"
]
_OfExperts = Literal["tokens_by_expert", "expert_outputs", "shared_expert_output", "copied_weights"]
_OfAdapter = Literal["adapter_input", "adapter_inner", "adapter_scaled"]
_OfEnds = Literal["projector_input", "projector_inner_output", "head_input", "head_activation", "capped_logits"]
SavedRole = (
    _OfStream
    | _OfStreams
    | _OfNorm
    | _OfProjections
    | _OfScores
    | _OfKernel
    | _OfGate
    | _OfHeads
    | _OfRule
    | _OfRuleOutput
    | _OfMlp
    | _OfMlpOutput
    | _OfRouter
    | _OfExperts
    | _OfAdapter
    | _OfEnds
    | Literal["gradient", "traced"]
)
"""The role of a kept tensor for the operations around it. "layer_inputs" are what full recompute keeps of a tower,
"streams" residual streams side by side, "traced" sums of all that a traced module keeps."""
