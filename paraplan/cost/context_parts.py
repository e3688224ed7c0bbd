"""How ranks of context parallelism share out an attention, for columns of plans: `ContextShares` in arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.plan_table import Floats, Ints, first_rows
from paraplan.model.spec import Attention
from paraplan.plan.context_heads import context_shares


class ContextParts(NamedTuple):
    """The part of an attention that a rank of `cp` has, one entry a plan."""

    heads: Floats
    """Parts of the heads: ranks that exchange tokens for them."""
    tokens: Floats
    """Ranks that have the same heads, over which keys and values are gathered."""
    causal_load: Floats
    """Work under a causal mask of the rank with the most of it, over the mean."""

    def key_copies(self, key_heads: Floats) -> Floats:
        """Return how often each key is on a rank that has `key_heads` of them, over those of its own tokens."""
        own = np.maximum(key_heads, 1).astype(np.int64)
        return np.asarray(self.heads / np.gcd(own, self.heads.astype(np.int64)) * self.tokens)


def context_parts(attention: Attention, tp: Ints | Floats, cp: Ints) -> ContextParts:
    """Return how ranks of `cp` share out what each rank of `tp` has of an attention."""
    whole = np.asarray(tp).astype(np.int64)
    firsts, alike = first_rows(whole, cp)
    shares = [
        context_shares(
            max(1, attention.num_heads // int(whole[row])),
            max(1, attention.num_kv_heads // int(whole[row])),
            int(cp[row]),
        )
        for row in firsts
    ]
    columns = [(share.heads, share.tokens, share.causal_load if attention.is_causal else 1.0) for share in shares]
    return ContextParts(*np.array(columns, dtype=float).reshape(-1, 3)[alike].T)
