"""Ranks without GPUs, without values and without other ranks: what they would hold and send."""
