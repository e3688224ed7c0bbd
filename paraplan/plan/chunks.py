"""Chunks of tokens in which the runtime computes a loss."""

from __future__ import annotations

FEWEST, TOKENS = 8, 1024
"""As many as torchtune's CEWithChunkedOutputLoss has, and more of them where a chunk would have more tokens."""


def num_loss_chunks(tokens: float) -> int:
    """Return in how many chunks the loss of so many `tokens` of one micro-batch is computed."""
    return max(FEWEST, -(-int(tokens) // TOKENS))
