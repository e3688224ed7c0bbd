"""Blocks, attention and operators that run again in the backward pass."""
