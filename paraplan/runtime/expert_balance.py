"""Balancing losses of mixtures of experts over the global batch: the routing of all ranks counts, not that of one.

transformers' models call `load_balancing_loss_func` in their own forward pass (Fedus et al. 2022, equations 4 to 6):
experts x the sum over experts of (share of tokens that go there) x (mean probability). Means over the tokens of a rank
give another product than those over all tokens. Here both are means over all tokens of `dp` and `cp`: two numbers
for each expert travel, no logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup, reduce_from_region, sum_both_ways

_NAME = "load_balancing_loss_func"
_PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")

_Balance = Callable[[Sequence[torch.Tensor], int, int, "torch.Tensor | None"], torch.Tensor]


class GlobalBalance:
    """The balancing losses that a model computes while its code runs in `passing`.

    `modules` are those of its code that have the function.
    """

    def __init__(self, modules: Sequence[ModuleType], mesh: Mesh) -> None:
        self._modules = modules
        self._replicas, self._tokens = TensorGroup.of(mesh, "dp"), TensorGroup.of(mesh, "cp")
        self._is_left_out = False

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh) -> GlobalBalance | None:
        """Return the balance of `model` over the ranks of `dp` and `cp`, None where there is none or one rank."""
        modules = _modules_of(model) if mesh.replica_group is not None else []
        return cls(modules, mesh) if modules else None

    @contextmanager
    def passing(self, *, has_tokens: bool) -> Iterator[None]:
        """Have the code in this context balance the tokens of all ranks; `has_tokens`: this one brings some."""

        def balance(
            logits: Sequence[torch.Tensor], num_experts: int, top_k: int, mask: torch.Tensor | None
        ) -> torch.Tensor:
            if self._is_left_out:
                return _nothing(logits, num_experts, top_k, mask)
            sums = _sums(logits, num_experts, top_k, mask)
            sums = sums if has_tokens else sums * 0.0
            if self._tokens.size > 1:
                sums = reduce_from_region(sums, self._tokens)
            return _balance(sum_both_ways(sums, self._replicas) if self._replicas.size > 1 else sums)

        with _replaced(self._modules, balance):
            yield

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Have the losses be 0 in this context."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False


@contextmanager
def without_balance(model: nn.Module) -> Iterator[None]:
    """Have the balancing losses of `model` be 0 in this context: where it is looked at how its code treats tokens."""
    with _replaced(_modules_of(model), _nothing):
        yield


@contextmanager
def _replaced(modules: Sequence[ModuleType], balance: _Balance) -> Iterator[None]:
    own = [getattr(module, _NAME) for module in modules]

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(function).bind(*args, **kwargs)
            given.apply_defaults()
            logits, num_experts, top_k, mask = (given.arguments[name] for name in _PARAMETERS)
            if not isinstance(logits, tuple) or not logits or any(layer.ndim != 2 for layer in logits):
                return function(*args, **kwargs)
            if mask is not None and mask.numel() != len(logits[0]):
                return function(*args, **kwargs)
            return balance(logits, num_experts or logits[0].shape[-1], top_k, mask)

        return call

    for module, function in zip(modules, own, strict=True):
        setattr(module, _NAME, replacement(function))
    try:
        yield
    finally:
        for module, function in zip(modules, own, strict=True):
            setattr(module, _NAME, function)


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """Return the modules of the code of `model` that have the function, and compute by it what is computed here."""
    names = sorted({type(module).__module__ for module in model.modules()} & sys.modules.keys())
    return [sys.modules[name] for name in names if _is_known(getattr(sys.modules[name], _NAME, None))]


def _is_known(function: Any) -> bool:
    if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters) != _PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 5, generator=generator, device="cpu") for _ in range(2))
    if type(logits[0]) is not torch.Tensor:  # a run without values has nothing to compare
        return True
    for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 0]], device="cpu")):
        try:
            own = function(logits, 5, 2, mask)
        except Exception:  # somebody else's function of that name
            return False
        if not torch.is_tensor(own) or not torch.isclose(own, _balance(_sums(logits, 5, 2, mask))):
            return False
    return True


def _nothing(logits: Sequence[torch.Tensor], num_experts: int, top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    return logits[0][:0].flatten().sum(0)


def _sums(logits: Sequence[torch.Tensor], num_experts: int, top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Return tokens by expert, sums of probabilities by expert, and the number of tokens, [2 x experts + 1].

    Those of all layers together, of the tokens that `mask` counts. No sum comes to one number, which would be that of
    all ranks under `cp` (`context_sums`).
    """
    device = logits[0].device
    counts = probabilities = torch.zeros(num_experts, device=device)
    number = torch.zeros(1, device=device)
    weights = torch.ones(len(logits[0]), 1, device=device) if mask is None else mask.reshape(-1, 1).to(device).float()
    for layer in logits:
        routing = layer.softmax(-1)
        went = torch.zeros_like(routing, dtype=torch.float32).scatter_(-1, routing.topk(top_k, -1).indices, 1.0)
        counts = counts + (went * weights).sum(0)
        probabilities = probabilities + (routing.float() * weights).sum(0)
        number = number + weights.sum(0)
    return torch.cat([counts, probabilities, number])


def _balance(sums: torch.Tensor) -> torch.Tensor:
    num_experts = sums.numel() // 2
    number = sums[-1].clamp(min=torch.finfo(sums.dtype).tiny)
    return num_experts * torch.dot(sums[:num_experts] / number, sums[num_experts:-1] / number)
