"""A model's own `generate` under a plan: its loop runs on every rank, and each call of the model through the plan."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from paraplan.errors import UsageError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.torch_private import pytree

Forward = Callable[[Any], Any]
Options = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of `generate` behind its inputs, and those by name."""


def generate(
    model: nn.Module, forward: Forward, inputs: Any, *, mesh: Mesh, tokens_multiple: int, options: Options
) -> Any:
    """Return what the model's own `generate` returns for `inputs`, with `forward(inputs)` for each call of the model.

    Sequences are filled up on the right to a multiple of `tokens_multiple` tokens for it, which a causal model does not
    see. Ranks of one copy of the model draw the same random numbers. Raises `UsageError` where there is no `generate`.
    """
    method = getattr(type(model), "generate", None)
    if method is None:
        raise UsageError(
            f"{type(model).__name__} has no generate",
            hint="give it a method that calls the model for the next token, or call engine.predict in a loop",
        )
    known = inspect.signature(method).parameters
    by_transformers = "synced_gpus" in known  # GenerationMixin
    arguments, given = options[0], dict(options[1])
    if by_transformers:
        if given.get("use_cache"):
            raise UsageError(
                "use_cache=True, but caches do not pass through a plan", hint="leave use_cache out of engine.generate"
            )
        given |= {"use_cache": False, "synced_gpus": mesh.size("dp") > 1}
    stand_in = _StandIn.of(model, _filled_up(forward, tokens_multiple))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_common_seed(mesh) + mesh.coordinate("dp"))
        if isinstance(inputs, dict):
            return method(stand_in, *arguments, **inputs, **given)
        return method(stand_in, *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)), *arguments, **given)


class _StandIn:
    """Makes an object of a model's class that shares what the model holds, and whose forward is another one."""

    @staticmethod
    def of(model: nn.Module, forward: Forward) -> nn.Module:
        made: nn.Module = object.__new__(type(model))
        # Hooks are for the module's own forward: those of FSDP gather its parameters.
        own = {name: OrderedDict() if name.endswith("_hooks") else held for name, held in vars(model).items()}
        made.__dict__ = own | {"training": False, "_compiled_call_impl": None}
        signature = inspect.signature(type(model).forward)

        @functools.wraps(type(model).forward)  # transformers reads which arguments there are
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                return forward(args[0] if len(args) == 1 else args)
            named = signature.bind(made, *args, **kwargs).arguments
            return forward(dict(list(named.items())[1 : 1 + len(args)]) | kwargs)

        made.__dict__["forward"] = call
        return made


def _filled_up(forward: Forward, multiple: int) -> Forward:
    def call(inputs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
        tokens = leaves[0].shape[1] if leaves else 0
        missing = -tokens % multiple
        if isinstance(inputs, dict) and multiple > 1:
            inputs = {name: held for name, held in inputs.items() if name != "logits_to_keep"}  # counts from the end
        if not missing:
            return forward(inputs)

        def fill(leaf: Any) -> Any:
            is_of_tokens = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == tokens
            return functional.pad(leaf, [0, 0] * (leaf.ndim - 2) + [0, missing]) if is_of_tokens else leaf

        def cut(leaf: Any) -> Any:
            is_filled = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == tokens + missing
            return leaf[:, :tokens] if is_filled else leaf

        filled = pytree.tree_map(fill, inputs)
        return pytree.tree_map(cut, forward(filled))

    return call


def _common_seed(mesh: Mesh) -> int:
    seed = torch.randint(2**31, (1,)).to(mesh.world.device)
    if mesh.world.is_distributed:
        dist.broadcast(seed, src=0)
    return int(seed)
