"""The grammar of random models: what they are made of, and one recipe for each number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fuzz_parts import IMAGE_NORMS, IMAGE_PARTS, SEQUENCE_NORMS, SEQUENCE_PARTS

ANYWHERE = (
    "constant buffer",  # a buffer that is read
    "counter",  # a buffer that counts forward passes
    "average",  # a moving average that nothing reads
    "average read",  # a moving average that the same forward pass reads
    "layer number",  # each block knows its place
    "block scale",  # a single number in each block
    "frozen blocks",  # the first blocks are not trained
    "x0",  # every block reads what enters the first one
    "u-net",  # later blocks read what earlier ones returned
    "dropout 0",
    "detached copy",  # a block reads its input without a gradient
    "frozen gate",  # a frozen layer under no_grad in each block
    "shared module",  # one layer in all blocks
    "unused parameter",
    "prior",  # a frozen parameter of the root that the head reads without autograd
    "root scale",  # a single number in the root
    "tuple output",
    "dict output",
    "object output",
)
"""Features that any model may have."""

OF_SEQUENCES = (
    "table",  # an embedding of the root that all blocks read
    "value residual",  # blocks take and return a second tensor, which needs a gradient
    "frozen encoder",  # a second tower under no_grad that feeds every block
    "encoder",  # a second tower that is trained and feeds every block
    "second stack",  # blocks of another class before these
    "correction",  # a frozen parameter in blocks that only an argmax reads
    "router buffer",  # a buffer that blocks correct by the load of experts
    "float mask",
    "bool mask",
    "int mask",
    "mask of attention",
    "positions",
    "sinusoids",  # a constant buffer of the root, not part of its state
    "mixed blocks",  # blocks of one class with different parts
)
"""Features of models over sequences."""

OF_TOKENS = ("tied", "buckets", "extra ids", "frozen embedding", "flag")
"""Features of models that read token ids. "flag": a number beside the tensors says whether a layer is used."""

MASKS = ("float mask", "bool mask", "int mask")
OUTPUTS = ("tuple output", "dict output", "object output")

TOKEN_LOSSES = (
    "cross entropy",
    "ignored -100",
    "ignored -1",
    "pad 0",
    "float mask mean",
    "labels inside",
    "dict targets",
    "z-loss",
    "label smoothing",
    "sum",
    "custom function",
    "shifted",
)
OTHER_LOSSES = ("mse", "contrastive", "classes", "class sum")
NEW_FORMS = ("sum and count", "metrics", "sum, count and metrics")
"""What else `loss_fn` may return; tried where the runtime knows it."""

OPTIMIZERS = ("sgd", "adamw", "groups", "fused adamw", "muon", "adafactor", "sign", "lamb", "tensor clip")


@dataclass(frozen=True)
class Recipe:
    """All that decides a random model, its loss, its optimizer and its batches."""

    source: str = "tokens"
    parts: tuple[str, ...] = ("mlp",)
    norm: str = "layer"
    num_blocks: int = 4
    vocabulary: int = 24
    features: frozenset[str] = field(default_factory=frozenset)
    loss: str = "cross entropy"
    optimizer: str = "sgd"
    max_grad_norm: float | None = None
    batch: int = 8
    seed: int = 0

    def has(self, feature: str) -> bool:
        """Whether the model has `feature`."""
        return feature in self.features

    def words(self) -> list[str]:
        """Return all that could matter to a failure, one word each."""
        return [
            f"source:{self.source}",
            *(f"part:{part}" for part in self.parts),
            f"norm:{self.norm}",
            f"loss:{self.loss}",
            f"optimizer:{self.optimizer}",
            *(["clipped"] if self.max_grad_norm is not None else []),
            *sorted(self.features),
        ]

    def __repr__(self) -> str:
        """Return the recipe as source text that makes it again."""
        names = ", ".join(repr(name) for name in sorted(self.features))
        fields = [f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__ if name != "features"]
        return f"Recipe({', '.join(fields)}, features=frozenset([{names}]))"


def random_recipe(seed: int, number: int, *, new_forms: bool = False) -> Recipe:
    """Return recipe `number` of `seed`; `new_forms` says that losses may return more than one number."""
    dice = random.Random(f"{seed}/{number}")  # noqa: S311 (no secret)
    source = dice.choices(("tokens", "floats", "image"), (75, 12, 13))[0]
    is_image = source == "image"
    parts = IMAGE_PARTS if is_image else SEQUENCE_PARTS
    norms = IMAGE_NORMS if is_image else SEQUENCE_NORMS
    weights = [3 if norm in ("layer", "rms", "group") else 1 for norm in norms]
    features = _features(dice, source)
    losses = [*TOKEN_LOSSES, *OTHER_LOSSES, *NEW_FORMS]
    loss = dice.choice(["cross entropy", *losses]) if dice.random() < 0.75 else "cross entropy"
    if loss in NEW_FORMS and not new_forms:  # so the other choices are the same with and without them
        loss = "cross entropy"
    if not is_image and dice.random() < 0.05:
        loss = "router loss"
    if is_image:
        loss = dice.choice(("classes", "classes", "class sum", "contrastive", "mse"))
    return fitting(
        Recipe(
            source=source,
            parts=tuple(dice.sample(list(parts), dice.choice((1, 1, 2, 2, 3) if not is_image else (1, 2)))),
            norm=dice.choices(list(norms), weights)[0],
            num_blocks=dice.choice((2, 3, 4, 4, 4, 5)),
            vocabulary=dice.choice((24, 24, 25)),
            features=features,
            loss=loss,
            optimizer=dice.choice(("sgd", "adamw", *OPTIMIZERS)),
            max_grad_norm=dice.choice((None, None, 0.3)),
            batch=dice.choice((8, 8, 8, 12)),
            seed=dice.randrange(10_000),
        )
    )


def fitting(recipe: Recipe) -> Recipe:
    """Return `recipe` without what contradicts its other choices."""
    features = set(recipe.features)
    if recipe.loss == "labels inside":
        features = features - set(OUTPUTS) | {"object output"}
    if recipe.loss == "router loss":
        features = features - set(OUTPUTS) - {"value residual", "mixed blocks"} | {"dict output"}
    if recipe.loss in OTHER_LOSSES:
        features -= {"tied"}
    if "frozen embedding" in features:
        features -= {"tied"}
    return replace(recipe, features=frozenset(features))


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Yield recipes that differ from `recipe` in one choice and are simpler."""
    for feature in sorted(recipe.features):
        yield fitting(replace(recipe, features=recipe.features - {feature}))
    if len(recipe.parts) > 1:
        for part in recipe.parts:
            yield replace(recipe, parts=tuple(other for other in recipe.parts if other != part))
    plain: dict[str, object] = {"optimizer": "sgd", "max_grad_norm": None, "vocabulary": 24, "batch": 8}
    if recipe.source != "image":
        plain |= {"parts": ("mlp",), "norm": "layer", "source": "tokens", "loss": "cross entropy"}
    for name, value in plain.items():
        if getattr(recipe, name) != value:
            yield fitting(replace(recipe, **{name: value}))  # type: ignore[arg-type]  # names are those of fields


def _features(dice: random.Random, source: str) -> frozenset[str]:
    known = list(ANYWHERE)
    if source != "image":
        known += OF_SEQUENCES
    if source == "tokens":
        known += OF_TOKENS
    chosen = set(dice.sample(known, dice.choice((0, 1, 1, 2, 2, 3, 4, 6))))
    for alternatives in (MASKS, OUTPUTS):
        several = [name for name in alternatives if name in chosen]
        chosen -= set(several[1:])
    return frozenset(chosen)
