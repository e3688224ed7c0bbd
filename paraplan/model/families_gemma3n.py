"""Gemma 3n: four residual streams of which blocks work on one (AltUp), low-rank residuals (LAuReL), sparse MLPs.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
Baykal et al. 2023 (arXiv 2301.13310) is AltUp, Menghani et al. 2024 (arXiv 2411.07501) LAuReL.
"""

from __future__ import annotations

from dataclasses import replace

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import LayerKind, build_decoder
from paraplan.model.families import MODERN, ModernFamily, modern_attention, modern_shape
from paraplan.model.families_gemma import inputs_of_layers, layer_types, layers_with_keys, own_input
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import Matmul, ModelSpec

_NORM: NormKind = "rms_in_fp32"
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SPARSE_LAYERS = 10
"""The first layers keep their largest activations alone where a model has more, unless a pattern says which do."""


def gemma3n(config: ModelConfig) -> ModelSpec:
    """Return Gemma 3n's language model."""
    config = replace(config, fields={"final_logit_softcapping": 30.0, **config.fields})
    shape = modern_shape(config, MODERN["gemma3_text"]._replace(kv_heads=2, layers=_layers))
    hidden, streams = shape.hidden, config.count("altup_num_inputs", default=4)
    width = config.count("hidden_size_per_layer_input", default=256)
    shared = inputs_of_layers(config, hidden, width) + _projected("altup_projections", hidden, streams)
    joined = _projected("altup_unembed_projections", hidden, streams) + kept("streams", streams * hidden)
    head = replace(shape.head, projection=joined)
    return build_decoder(config, replace(shape, shared=shared, head=head, residual_streams=streams))


def _projected(name: str, hidden: int, streams: int) -> Part:
    """Return the products that make all streams but the first, or bring them back, each brought to the same size."""
    part = Part()
    for index in range(streams - 1):
        part += linear(f"{name}.{index}", hidden, hidden, bias=False) + kept("streams", 2 * hidden)
    return part


def _layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    types, window = layer_types(config, every=5), config.count("sliding_window", default=512)
    own = layers_with_keys(config, types, default=15)
    style = modern_attention(config, family)._replace(norms_values=True)
    streams, activation = _streams(config, hidden), config.text("hidden_activation", default="gelu_pytorch_tanh")
    streams += own_input(hidden, config.count("hidden_size_per_layer_input", default=256), activation)
    streams += _low_rank(hidden, config.count("laurel_rank", default=64))
    sizes, sparse = _inner_sizes(config, len(types)), _are_sparse(config, len(types))
    return tuple(
        LayerKind(
            _mlp(hidden, inner, activation, is_sparse=is_sparse) + streams,
            window=window if kind == "sliding_attention" else None,
            attention=style._replace(shares="keys_and_values" if index >= own else "nothing"),
        )
        for index, (kind, inner, is_sparse) in enumerate(zip(types, sizes, sparse, strict=True))
    )


def _mlp(hidden: int, inner: int, activation: str, *, is_sparse: bool) -> Part:
    part = mlp(hidden, inner, MlpStyle(_GATED, activation, is_gated=True))
    return part + kept("activation_input", inner, split="tensor", by="modules") if is_sparse else part


def _low_rank(hidden: int, rank: int) -> Part:
    """Return the residual of low rank, which reads what attention does."""
    part = linear("laurel.linear_left", hidden, rank, bias=False)
    part += kept("gate_inner", rank, weights_of=("laurel.linear_right",))
    part += linear("laurel.linear_right", rank, hidden, bias=False)
    return part + norm("laurel.post_laurel_norm", _NORM, hidden, is_residual=False)


def _streams(config: ModelConfig, hidden: int) -> Part:
    """Return what predicts all streams before a block from the active one, and corrects them by what it computed."""
    count = config.count("altup_num_inputs", default=4)
    names = {"prediction_coefs": count * count, "correction_coefs": count}
    router, part = "altup.modality_router", weight("altup.correct_output_scale", hidden)
    part += kept("streams", 2 * count * hidden, split="sequence")  # before the block, and what it changed of each
    part += kept("stream_weights", count * count + count) + linear(router, hidden, count, bias=False)
    again = Matmul(name=router, k=hidden, n=count)
    mixed = Matmul(name="altup streams", k=count, n=count, rows_per_token=float(hidden), of_activations=True)
    part += Part(matmuls=(again, mixed)) + norm("altup.router_norm", _NORM, hidden)
    part += Part(saved=norm("altup.router_norm", _NORM, hidden).saved)
    for name, width in names.items():
        part += kept("stream_router_input", hidden, split="sequence", weights_of=(router,))
        part += kept("stream_weights", count, element_type="fp32")
        part += kept("stream_weights", count, weights_of=(f"altup.{name}",))
        part += linear(f"altup.{name}", count, width, bias=False)
    if config.flag("altup_correct_scale", default=True):
        part += kept("streams", hidden, split="sequence")
    return part


def _inner_sizes(config: ModelConfig, count: int) -> tuple[int, ...]:
    if not isinstance(config.fields.get("intermediate_size"), list):
        return (config.count("intermediate_size", default=16_384),) * count
    sizes = config.fields["intermediate_size"]
    if len(sizes) != count or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(
            f"{config.source}: intermediate_size={sizes!r}, expected a whole number above 0 for each of {count} layers",
            hint="give one size, or one for each layer",
        )
    return tuple(sizes)


def _are_sparse(config: ModelConfig, count: int) -> tuple[bool, ...]:
    pattern = config.fields.get("activation_sparsity_pattern")
    if pattern is None:
        return tuple(count > _SPARSE_LAYERS and index < _SPARSE_LAYERS for index in range(count))
    if (
        not isinstance(pattern, list)
        or len(pattern) != count
        or not all(isinstance(one, int | float) for one in pattern)
    ):
        raise ModelError(
            f"{config.source}: activation_sparsity_pattern={pattern!r}, expected a number for each of {count} layers",
            hint="name each layer, 0 for one that is not sparse, or leave the field out",
        )
    return tuple(one > 0 for one in pattern)
