"""How far the clocks of nodes are apart, in words."""

from __future__ import annotations

LARGE_SKEW_S = 1.0
"""From how much on a difference of two nodes' clocks is said: times in their logs are then hard to compare."""


def describe_skew(ahead_s: float) -> str:
    """Return `60.0 s ahead of`, or `60.0 s behind`."""
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"
