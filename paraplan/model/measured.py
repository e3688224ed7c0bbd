"""Records of a traced forward pass, and the parts of a `ModelSpec` that follow from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paraplan.model.spec import Attention, ElementType, Matmul, SavedTensor
from paraplan.model.tp_plan import DividedBy

_ROUTERS = ("gate", "router", "wg")
_ELEMENT_TYPES: dict[int, ElementType] = {1: "mask", 2: "activation", 4: "fp32"}


@dataclass(frozen=True)
class Product:
    """One matmul-like operation and its forward FLOPs.

    `dims` is [batch, m, k, n] of a product of matrices, `attention` and `key_length` describe an attention kernel;
    other operations (convolutions) have neither. `trains` is False for a product with a frozen parameter. `layer` is
    the name of the linear layer that it is of, `num_experts` above 1 where it is one of experts' weights, `divided_by`
    what tensor parallelism divides of it.
    """

    flops: int
    dims: tuple[int, int, int, int] | None = None
    attention: Attention | None = None
    key_length: int | None = None
    trains: bool = True
    layer: str = ""
    num_experts: int = 1
    divided_by: DividedBy | None = None


class Kept(NamedTuple):
    """The kind of a tensor that a scope keeps for its backward pass.

    `size` is that of an element in bytes. `is_split` says that tensor parallelism divides it. `weights_of` is that of
    `SavedTensor`.
    """

    size: int
    is_split: bool
    weights_of: tuple[str, ...] | None = None


@dataclass
class Measured:
    """One traced forward pass, by scope: "embedding", a block's name, "head".

    `saved_elements` counts the elements kept for the backward pass, `layer_inputs` those of inputs of linear layers
    that are not kept. `module_scopes` holds the scope in which each module first ran, by the module's name.
    """

    products: dict[str, list[Product]] = field(default_factory=lambda: defaultdict(list))
    saved_elements: dict[str, Counter[Kept]] = field(default_factory=lambda: defaultdict(Counter))
    layer_inputs: dict[str, Counter[Kept]] = field(default_factory=lambda: defaultdict(Counter))
    module_scopes: dict[str, str] = field(default_factory=dict)
    hidden_size: int | None = None


def with_reasons(whole: Measured, frozen: Measured) -> Measured:
    """Return what `whole` measured, with the weights that tensors are kept for.

    `frozen` is a run of the same module without gradients of weights: what it keeps is kept for something else, and
    it names the linear layers whose inputs it does not keep. What else is kept is for other weights.
    """
    saved: dict[str, Counter[Kept]] = defaultdict(Counter)
    for scope, everything in whole.saved_elements.items():
        explained = frozen.saved_elements[scope] + frozen.layer_inputs[scope]
        rest = Counter({kind._replace(weights_of=()): elements for kind, elements in everything.items()})
        for kind, elements in explained.items():
            rest[kind._replace(weights_of=())] -= elements
        saved[scope] = explained + rest  # without what is not above 0
    return replace(whole, saved_elements=saved)


def products_of(
    scope: str, whole: Measured, half: Measured | None, *, micro_batch_size: int, seq_length: int
) -> tuple[list[Matmul], list[Attention]]:
    """Return the matmuls and attentions of one scope.

    Batched products whose output or inner dimension follows the sequence (told by the run at half its length) are the
    two halves of an eager attention. Scores that no values follow, as of an indexer, are products of this length.
    Keys beyond those of the sequence are compressed ones, a second attention. Keys of another length are of an input
    of its own, as of an encoder of sound.
    """
    tokens = micro_batch_size * seq_length
    matmuls: list[Matmul] = []
    attentions: list[Attention] = []
    scores: tuple[int, int, Matmul] | None = None
    long_products = whole.products[scope]
    short_products = half.products[scope] if half is not None else []
    if half is not None and loops_over_tokens(scope, whole, half):
        return [
            _matmul(f"matmul {index}", k, n, rows / tokens, product)
            for index, ((_, k, n), (rows, product)) in enumerate(_rows_by_shape(long_products).items())
        ], []
    same_steps = len(long_products) == len(short_products)
    for index, product in enumerate(long_products):
        shorter = short_products[index] if same_steps else product
        if product.attention is not None and len(attentions) < 2 and product.key_length == seq_length:
            attentions.append(product.attention)
        elif product.attention is not None and product.key_length and len(attentions) < 2:
            attentions.append(_over_own_keys(product.attention, product.key_length, product.flops / tokens))
        elif product.attention is not None and product.key_length:  # a third
            k, n = product.attention.qk_head_dim, product.key_length
            rows = product.flops / 2 / k / n / tokens
            matmuls.append(_matmul(f"attention {index}", k, n, rows, replace(product, trains=True)))
        elif product.dims is None or shorter.dims is None:
            matmuls.append(_matmul(f"operation {index}", 1, 1, product.flops / 2 / tokens, product))
        else:
            batch, m, k, n = product.dims
            if batch > 1 and n != shorter.dims[3]:
                matmuls += [scores[2]] if scores is not None else []
                alone = _matmul(f"scores {index}", k, n, batch * m / tokens, product)
                scores = batch // micro_batch_size, k, alone
            elif batch > 1 and k != shorter.dims[2] and scores is not None and len(attentions) < 2:
                heads, qk_head_dim, _ = scores
                core = Attention(num_heads=heads, num_kv_heads=heads, qk_head_dim=qk_head_dim, v_head_dim=n)
                attentions += _with_compressed_keys(core, k, seq_length)[: 2 - len(attentions)]
                scores = None
            else:
                matmuls.append(_matmul(f"matmul {index}", k, n, batch * m / tokens, product))
    matmuls += [scores[2]] if scores is not None else []
    return list(_joined(matmuls)), attentions


def _over_own_keys(core: Attention, num_keys: int, flops_per_token: float) -> Attention:
    """Return attention over keys of a length of their own, as of pictures and sound, with the queries of a token."""
    each = core.replace(num_keys=num_keys)
    return each.replace(queries_per_token=flops_per_token / each.flops_per_token(num_keys))


def _with_compressed_keys(core: Attention, keys: int, length: int) -> list[Attention]:
    """Return attention over the keys of a sequence, and over those beyond them, one for several tokens each."""
    more = keys - length
    return [core] if more <= 0 else [core, core.replace(tokens_per_key=max(1, round(length / more)))]


def _joined(matmuls: list[Matmul]) -> Iterator[Matmul]:
    """Yield the products in order, those of one layer that is used several times as one."""
    rows: dict[str, float] = defaultdict(float)
    for one in matmuls:
        rows[one.name] += one.rows_per_token
    for one in {each.name: each for each in matmuls}.values():
        yield one.replace(rows_per_token=rows[one.name])


def loops_over_tokens(scope: str, whole: Measured, half: Measured) -> bool:
    """Whether the products of a scope grow in number with the sequence, and not in size."""
    return len(whole.products[scope]) > 1.5 * len(half.products[scope]) > 0


def _rows_by_shape(products: list[Product]) -> dict[tuple[str, int, int], tuple[float, Product]]:
    """Return the rows of all products of each layer, inner and outer size together, and one of these products."""
    rows: dict[tuple[str, int, int], tuple[float, Product]] = {}
    for product in products:
        _, _, k, n = product.dims or (1, 1, 1, 1)
        more = product.flops / 2 / k / n
        rows[product.layer, k, n] = rows.get((product.layer, k, n), (0.0, product))[0] + more, product
    return rows


def _matmul(name: str, k: int, n: int, rows_per_token: float, product: Product) -> Matmul:
    return Matmul(
        name=product.layer or name,
        k=k,
        n=n,
        rows_per_token=rows_per_token,
        trains=product.trains,
        is_narrow=not product.trains,
        num_experts=product.num_experts,
        split=product.divided_by or "none",
        weighs=product.layer.rpartition(".")[2] in _ROUTERS,
    )


def saved_of(
    scope: str, whole: Measured, half: Measured | None, *, micro_batch_size: int, seq_length: int
) -> list[SavedTensor]:
    """Return the saved tensors of one scope: elements = a s + b s^2 through both lengths.

    Where a part grows slower than the sequence, b = 0 keeps the sum at `seq_length`.
    """
    saved = []
    for kind, elements in sorted(whole.saved_elements[scope].items(), key=lambda one: str(one[0])):
        total = elements / micro_batch_size
        pairs = 0.0
        if half is not None:
            short = seq_length // 2
            shorter = half.saved_elements[scope][kind] / micro_batch_size
            pairs = max(0.0, (total / seq_length - shorter / short) / (seq_length - short))
        element_type = _ELEMENT_TYPES.get(kind.size, "fp32")
        scale = kind.size / 4 if kind.size not in _ELEMENT_TYPES else 1.0
        linear = scale * (total / seq_length - pairs * seq_length)
        for per_token, per_pair in ((linear, 0.0), (0.0, scale * pairs)):
            if per_token or per_pair:
                saved.append(
                    SavedTensor(
                        role="traced",
                        elements_per_token=per_token,
                        elements_per_token_pair=per_pair,
                        element_type=element_type,
                        split="tensor" if kind.is_split else "none" if per_pair else "sequence",
                        in_attention_core=bool(per_pair),
                        weights_of=kind.weights_of,
                    )
                )
    return saved
