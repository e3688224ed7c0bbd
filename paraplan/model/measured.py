"""What a traced forward pass did, and the parts of a `ModelSpec` that follow from it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paraplan.model.spec import Attention, ElementType, Matmul, SavedTensor

_ELEMENT_TYPES: dict[int, ElementType] = {1: "mask", 2: "activation", 4: "fp32"}


@dataclass(frozen=True)
class Product:
    """One matmul-like operation and its forward FLOPs.

    `dims` is [batch, m, k, n] of a product of matrices, `attention` and `key_length` describe an attention kernel;
    other operations (convolutions) have neither.
    """

    flops: int
    dims: tuple[int, int, int, int] | None = None
    attention: Attention | None = None
    key_length: int | None = None


@dataclass
class Measured:
    """What one forward pass did, by scope: "embedding", a block's name, "head".

    `saved_elements` counts the elements kept for the backward pass by the size of one element in bytes.
    `module_scopes` holds the scope in which each module first ran, by the module's name.
    """

    products: dict[str, list[Product]] = field(default_factory=lambda: defaultdict(list))
    saved_elements: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    module_scopes: dict[str, str] = field(default_factory=dict)
    hidden_size: int | None = None


def products_of(
    scope: str, whole: Measured, half: Measured | None, *, micro_batch_size: int, seq_length: int
) -> tuple[list[Matmul], list[Attention]]:
    """Return the matmuls and attentions of one scope.

    Batched products whose output or inner dimension follows the sequence (told by the run at half its length) are the
    two halves of an eager attention.
    """
    tokens = micro_batch_size * seq_length
    matmuls: list[Matmul] = []
    attentions: list[Attention] = []
    scores: tuple[int, int] | None = None
    long_products = whole.products[scope]
    short_products = half.products[scope] if half is not None else []
    if half is not None and loops_over_tokens(scope, whole, half):
        return [
            _matmul(f"matmul {index}", k, n, rows / tokens)
            for index, ((k, n), rows) in enumerate(_rows_by_shape(long_products).items())
        ], []
    same_steps = len(long_products) == len(short_products)
    for index, product in enumerate(long_products):
        shorter = short_products[index] if same_steps else product
        if product.attention is not None and len(attentions) < 2 and product.key_length == seq_length:
            attentions.append(product.attention)
        elif product.attention is not None and product.key_length:  # over a length of its own, as of a picture
            k, n = product.attention.qk_head_dim, product.key_length
            matmuls.append(_matmul(f"attention {index}", k, n, product.flops / 2 / k / n / tokens))
        elif product.dims is None or shorter.dims is None:
            matmuls.append(_matmul(f"operation {index}", 1, 1, product.flops / 2 / tokens))
        else:
            batch, m, k, n = product.dims
            if batch > 1 and n != shorter.dims[3]:
                scores = batch // micro_batch_size, k
            elif batch > 1 and k != shorter.dims[2] and scores is not None and len(attentions) < 2:
                heads, qk_head_dim = scores
                attentions.append(Attention(num_heads=heads, num_kv_heads=heads, qk_head_dim=qk_head_dim, v_head_dim=n))
                scores = None
            else:
                matmuls.append(_matmul(f"matmul {index}", k, n, batch * m / tokens))
    return matmuls, attentions


def loops_over_tokens(scope: str, whole: Measured, half: Measured) -> bool:
    """Whether the products of a scope grow in number with the sequence, and not in size."""
    return len(whole.products[scope]) > 1.5 * len(half.products[scope]) > 0


def _rows_by_shape(products: list[Product]) -> dict[tuple[int, int], float]:
    """Return the rows of all products of each inner and outer size together."""
    rows: dict[tuple[int, int], float] = defaultdict(float)
    for product in products:
        if product.dims is None:
            rows[1, 1] += product.flops / 2
        else:
            batch, m, k, n = product.dims
            rows[k, n] += batch * m
    return rows


def _matmul(name: str, k: int, n: int, rows_per_token: float) -> Matmul:
    return Matmul(name=name, k=k, n=n, rows_per_token=rows_per_token)


def saved_of(
    scope: str, whole: Measured, half: Measured | None, *, micro_batch_size: int, seq_length: int
) -> list[SavedTensor]:
    """Return the saved tensors of one scope: elements = a s + b s^2 through both lengths.

    Where a part grows slower than the sequence, b = 0 keeps the sum at `seq_length`.
    """
    saved = []
    for size, elements in sorted(whole.saved_elements[scope].items()):
        total = elements / micro_batch_size
        pairs = 0.0
        if half is not None:
            short = seq_length // 2
            shorter = half.saved_elements[scope][size] / micro_batch_size
            pairs = max(0.0, (total / seq_length - shorter / short) / (seq_length - short))
        element_type = _ELEMENT_TYPES.get(size, "fp32")
        scale = size / 4 if size not in _ELEMENT_TYPES else 1.0
        linear = scale * (total / seq_length - pairs * seq_length)
        for name, per_token, per_pair in (("by token", linear, 0.0), ("by pair of tokens", 0.0, scale * pairs)):
            if per_token or per_pair:
                saved.append(
                    SavedTensor(
                        name=f"{size}-byte elements kept {name}",
                        elements_per_token=per_token,
                        elements_per_token_pair=per_pair,
                        element_type=element_type,
                        in_attention_core=bool(per_pair),
                    )
                )
    return saved
