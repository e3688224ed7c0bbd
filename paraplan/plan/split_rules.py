"""Divisions that one framework allows and others do not."""

from __future__ import annotations

from typing import NamedTuple


class SplitRules(NamedTuple):
    """How a framework splits a model, as far as that decides which degrees suit it."""

    any_context: bool = False
    """Context parallelism passes keys and values around a ring or gathers them, and so need not divide heads."""
    causal_context: bool = False
    """Context parallelism is for attention to all tokens before alone: no windows, no layers without such attention."""
    whole_experts: bool = False
    """Ranks of tp have experts of their own."""
    shares_key_heads: bool = False
    """There may be more ranks of tp than heads of keys and values."""


STRICT = SplitRules()
"""Rules of a framework that divides heads evenly."""
