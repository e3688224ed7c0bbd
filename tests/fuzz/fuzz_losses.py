"""Losses, batches and optimizers of random models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fuzz_grammar import Recipe
from fuzz_network import FLOAT_INPUTS, ModelResult, image_shape
from fuzz_parts import TOKENS
from torch import nn

NUM_STEPS = 3


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits in an output of any form."""
    if isinstance(outputs, dict):
        found = outputs["logits"]
    elif isinstance(outputs, tuple):
        found = outputs[0]
    else:
        found = outputs.logits if isinstance(outputs, ModelResult) else outputs
    assert isinstance(found, torch.Tensor)
    return found


class SquaredLoss(torch.autograd.Function):
    """Cross entropy with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        ctx.save_for_backward(logits, targets)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the logits."""
        logits, targets = ctx.saved_tensors
        share = logits.softmax(dim=-1) - F.one_hot(targets, logits.shape[-1])
        return share * gradients[0] / len(targets), None


def _tokens(outputs: Any, targets: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits_of(outputs).flatten(0, 1), targets.flatten(), **options)


def _masked_mean(outputs: Any, targets: Any) -> torch.Tensor:
    losses = _tokens(outputs, targets["labels"], reduction="none")
    mask: torch.Tensor = targets["mask"].flatten()
    return (losses * mask).sum() / mask.sum()


def _dict_loss(outputs: Any, targets: Any) -> torch.Tensor:
    labels = targets["labels"].masked_fill(targets["attention_mask"] == 0, -100)
    return _tokens(outputs, labels)


def _z_loss(outputs: Any, targets: Any) -> torch.Tensor:
    return _tokens(outputs, targets) + 0.01 * logits_of(outputs).logsumexp(dim=-1).square().mean()


def _contrastive(outputs: Any, targets: Any) -> torch.Tensor:
    ours, theirs = (F.normalize(one, dim=-1) for one in (logits_of(outputs), targets))
    return F.cross_entropy(5 * ours @ theirs.T, torch.arange(len(theirs), device=theirs.device))


def _shifted(outputs: Any, targets: Any) -> torch.Tensor:
    return F.cross_entropy(logits_of(outputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _counted(outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _tokens(outputs, targets, ignore_index=-1, reduction="sum"), (targets != -1).sum()


def _hits(outputs: Any, targets: Any) -> dict[str, torch.Tensor]:
    return {"hits": (logits_of(outputs).argmax(dim=-1) == targets).float().mean()}


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cross entropy": _tokens,
    "ignored -100": _tokens,
    "ignored -1": lambda outputs, targets: _tokens(outputs, targets, ignore_index=-1),
    "pad 0": lambda outputs, targets: _tokens(outputs, targets, ignore_index=0),
    "float mask mean": _masked_mean,
    "labels inside": lambda outputs, _: outputs.loss,
    "dict targets": _dict_loss,
    "z-loss": _z_loss,
    "label smoothing": lambda outputs, targets: _tokens(outputs, targets, label_smoothing=0.1),
    "sum": lambda outputs, targets: _tokens(outputs, targets, reduction="sum"),
    "custom function": lambda outputs, targets: SquaredLoss.apply(logits_of(outputs).flatten(0, 1), targets.flatten()),  # type: ignore[no-untyped-call]
    "shifted": _shifted,
    "mse": lambda outputs, targets: F.mse_loss(logits_of(outputs), targets),
    "contrastive": _contrastive,
    "classes": lambda outputs, targets: F.cross_entropy(logits_of(outputs), targets),
    "class sum": lambda outputs, targets: F.cross_entropy(logits_of(outputs), targets, reduction="sum"),
    "router loss": lambda outputs, targets: _tokens(outputs, targets) + 0.1 * outputs["aux"],
    "sum and count": _counted,
    "metrics": lambda outputs, targets: (_tokens(outputs, targets), _hits(outputs, targets)),
    "sum, count and metrics": lambda outputs, targets: (*_counted(outputs, targets), _hits(outputs, targets)),
}
COUNTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "ignored -1": lambda targets: (targets != -1).sum(),
    "pad 0": lambda targets: (targets != 0).sum(),
    "float mask mean": lambda targets: targets["mask"].sum(),
    "dict targets": lambda targets: targets["attention_mask"].sum(),
    "shifted": lambda targets: (targets[:, 1:] != -100).sum(),
}
"""Targets of means that go over others than are counted."""
_MASKED = {"ignored -100": -100, "ignored -1": -1, "sum and count": -1, "sum, count and metrics": -1, "pad 0": 0}
_MASKED |= {"labels inside": -100, "shifted": -100}


def whole_loss(returned: Any) -> torch.Tensor:
    """Return the loss of a whole batch by what `loss_fn` returned: a number, or a sum with a count, or with metrics."""
    if not isinstance(returned, tuple):
        loss: torch.Tensor = returned
        return loss
    total, count = returned[0], returned[1]
    assert isinstance(total, torch.Tensor)
    return total if isinstance(count, dict) else total / count


def make_batch(recipe: Recipe, step: int) -> tuple[Any, Any]:
    """Return the inputs and targets of the global batch of a step."""
    generator = torch.Generator().manual_seed(recipe.seed * 31 + step)
    rows = recipe.batch
    lengths = torch.randint(1, TOKENS + 1, (rows, 1), generator=generator)
    present = torch.arange(TOKENS) < lengths  # masks are uneven on purpose
    targets = _targets(recipe, present, generator)
    if recipe.source == "tokens":
        values = torch.randint(recipe.vocabulary, (rows, TOKENS), generator=generator)
    else:
        shape = image_shape() if recipe.source == "image" else (TOKENS, FLOAT_INPUTS)
        values = torch.randn(rows, *shape, generator=generator)
    sides: dict[str, Any] = {}
    for name, dtype in (("float mask", torch.float32), ("bool mask", torch.bool), ("int mask", torch.long)):
        if recipe.has(name):
            sides["mask"] = present.to(dtype)
    if recipe.has("mask of attention"):
        sides["attention_mask"] = present.long()
    if recipe.has("extra ids"):
        sides["kinds"] = torch.randint(3, (rows, TOKENS), generator=generator)
    if recipe.has("flag"):
        sides["flag"] = step != 1
    if recipe.loss == "labels inside":
        sides["labels"] = targets
    return ({"inputs": values} | sides if sides else values), targets


def _targets(recipe: Recipe, present: torch.Tensor, generator: torch.Generator) -> Any:
    rows, vocabulary = recipe.batch, recipe.vocabulary
    if recipe.loss in ("classes", "class sum"):
        return torch.randint(vocabulary, (rows,), generator=generator)
    if recipe.loss == "contrastive":
        return torch.randn(rows, vocabulary, generator=generator)
    if recipe.loss == "mse":
        return torch.randn(rows, TOKENS, vocabulary, generator=generator)
    labels = torch.randint(1, vocabulary, (rows, TOKENS), generator=generator)
    if recipe.loss in _MASKED:
        # A shifted loss leaves out the first target: each row keeps two.
        kept = present | (torch.arange(TOKENS) < 2)
        return labels.masked_fill(~kept, _MASKED[recipe.loss])
    if recipe.loss == "float mask mean":
        return {"labels": labels, "mask": present.float()}
    if recipe.loss == "dict targets":
        return {"labels": labels, "attention_mask": present.long()}
    return labels


class SignDescent(torch.optim.Optimizer):
    """An optimizer of a user's own that treats every element alone."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step by a smooth sign of each gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for held in group["params"]:
                    if held.grad is not None:
                        held.sub_(group["lr"] * torch.tanh(held.grad * 20))


class LayerRates(torch.optim.Optimizer):
    """An optimizer of a user's own that looks at whole tensors: the rate of each is its norm over its gradient's."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of a fixed share of each tensor's norm (LARS, LAMB)."""
        with torch.no_grad():
            for group in self.param_groups:
                for held in group["params"]:
                    if held.grad is not None and held.numel():
                        rate = (held.norm() + 0.1) / (held.grad.norm() + 1e-2)
                        held.sub_(group["lr"] * rate * held.grad)


class ClippedDescent(torch.optim.Optimizer):
    """An optimizer of a user's own that clips the gradient of each tensor by its own norm."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step by clipped gradients."""
        with torch.no_grad():
            for group in self.param_groups:
                for held in group["params"]:
                    if held.grad is not None:
                        norm = torch.linalg.vector_norm(held.grad)
                        held.sub_(group["lr"] * held.grad * (0.05 / (norm + 1e-6)).clamp(max=1.0))


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return optimizer `name`; what amplifies noise is turned down."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    adam: dict[str, Any] = {"lr": 5e-3, "eps": 1e-4, "weight_decay": 0.1}
    if name == "groups":
        large = [parameter for parameter in trained if parameter.ndim > 1]
        small = [parameter for parameter in trained if parameter.ndim < 2]
        groups: Any = [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 1e-2}]
        return torch.optim.AdamW([group for group in groups if group["params"]], **adam)
    if name == "muon":
        matrices = [parameter for parameter in trained if parameter.ndim == 2]
        return torch.optim.Muon(matrices, lr=5e-3) if matrices else torch.optim.SGD(trained, lr=0.0)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(trained, **adam),
        "fused adamw": lambda: torch.optim.AdamW(trained, fused=True, **adam),
        "adafactor": lambda: torch.optim.Adafactor(trained, lr=1e-2, eps=(1e-3, 1e-3)),
        "sign": lambda: SignDescent(trained),
        "lamb": lambda: LayerRates(trained),
        "tensor clip": lambda: ClippedDescent(trained),
    }
    return makers[name]()
