"""Manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880): residual streams side by side.

A connection makes one input of all streams, and mixes what the layer returns into them, by weights of each token.
"""

from __future__ import annotations

from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import Matmul

_NORM: NormKind = "rms_in_fp32"


def hyper_connection(name: str, hidden: int, streams: int, *, iterations: int) -> Part:
    """Return a connection. transformers writes it out in fp32, with every step of Sinkhorn and Knopp's division.

    Fused kernels are taken to keep the streams, the weights before they are normalised, and what the layer returned.
    """
    weights, pairs = (2 + streams) * streams, streams**2
    part = _weights_of_streams(f"{name}.fn", hidden, streams, weights)
    part += weight(f"{name}.base", weights) + weight(f"{name}.scale", 3)
    divisions = (2 * iterations - 1) * (pairs + streams)
    part += kept("stream_weights", 3 * streams + pairs + divisions, element_type="fp32", by="modules")
    part += kept("streams", hidden, split="sequence") + kept("stream_weights", streams + pairs)
    mixed = Matmul(name=f"{name} streams", k=streams, n=streams, rows_per_token=float(hidden), of_activations=True)
    return part + Part(matmuls=(mixed,))


def joined_streams(name: str, hidden: int, streams: int) -> Part:
    """Return what makes one of all streams before the last norm."""
    part = _weights_of_streams(f"{name}.hc_fn", hidden, streams, streams)
    part += weight(f"{name}.hc_base", streams) + weight(f"{name}.hc_scale", 1)
    return part + kept("stream_weights", 2 * streams, element_type="fp32", by="modules")


def _weights_of_streams(name: str, hidden: int, streams: int, weights: int) -> Part:
    width = streams * hidden
    part = kept("streams", width, split="sequence")
    normed = norm(name, _NORM, width)
    part += Part(saved=normed.saved, saved_fused=tuple(one for one in normed.saved_fused if one.role != "norm_input"))
    part += linear(name, width, weights, bias=False, layer="other", weighs=True)
    return part + kept("stream_weights", weights, element_type="fp32")
