"""Chunks of tokens in which the runtime computes a loss."""

from __future__ import annotations

FEWEST, TOKENS = 8, 1024
"""Number of chunks, that of torchtune's CEWithChunkedOutputLoss, and tokens of a chunk from which there are more."""


def num_loss_chunks(tokens: float) -> int:
    """Return in how many chunks the loss of so many `tokens` of one micro-batch is computed."""
    return max(FEWEST, -(-int(tokens) // TOKENS))
