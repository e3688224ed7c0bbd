"""Context parallelism: every rank of a `cp` group has some tokens of each sequence, from the inputs to the loss.

The model sees whole shapes (`SplitTensor`), so that the positions and masks that it makes itself are those of all
tokens; what it computes token by token runs on a rank's own. In attention the ranks exchange tokens for heads and back
(DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.1). Losses are summed over the ranks, and so are gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import CONTEXT, SplitError, SplitTensor
from paraplan.runtime.split.experts import expert_weights, of_own_tokens
from paraplan.runtime.split.trial import custom_functions_refused
from paraplan.runtime.structure.model_structure import ModelStructure
from paraplan.runtime.torch_private import pytree

_TOKENS = 1  # their dimension, in [batch, tokens]
# What transformers calls inputs that have an entry for each token. Masks are of all tokens on every rank, and so are
# positions and types of tokens, from which models make masks (of packed documents, of images).
_BY_TOKEN = frozenset({"input_ids", "inputs_embeds"})


def context_group(mesh: Mesh) -> TensorGroup:
    """Return the `cp` group of this rank."""
    return TensorGroup(size=mesh.size("cp"), index=mesh.coordinate("cp"), handle=mesh.group("cp"))


def split_tokens(inputs: Any, group: TensorGroup) -> Any:
    """Return the inputs of a model with this rank's tokens of those that have an entry for each.

    These are the first tensor, and in a dict those of transformers' names. Raises `UsageError` where `cp` does not
    divide the tokens.
    """
    if isinstance(inputs, dict):
        first = next((name for name, value in inputs.items() if isinstance(value, torch.Tensor)), None)
        chosen = _BY_TOKEN & inputs.keys() or {first}
        return {name: _split(value, group) if name in chosen else value for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)([_split(inputs[0], group), *inputs[1:]])
    return _split(inputs, group)


def _split(value: Any, group: TensorGroup) -> Any:
    tokens = value.shape[_TOKENS] if isinstance(value, torch.Tensor) and value.ndim > _TOKENS else 0
    if not tokens or tokens % group.size:
        found = f"inputs of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"{found} do not divide along their tokens over cp={group.size} ranks",
            hint="use a sequence length that cp divides, or a plan without cp",
        )
    sharding = Sharding(dim=_TOKENS, segments=(tokens,), size=group.size)
    return SplitTensor(sharding.part(value, group.index).contiguous(), sharding, group, CONTEXT)


def keep_experts_apart(model: nn.Module) -> None:
    """Let the experts in `model`, which look at each token by itself, see this rank's tokens as plain tensors."""
    for module in model.modules():
        if expert_weights(module) is not None:
            module.forward = of_own_tokens(module.forward)


def check_context(
    structure: ModelStructure, *, size: int, split_layers: Callable[[nn.Module], object] | None = None
) -> None:
    """Raise `UnsupportedPlanError` where a model brings tokens together outside of attention, run without its values.

    `split_layers` leaves in a copy of the model what one rank of `tp` has of its layers: it is tried so too.
    """
    _try_context(structure, copy.deepcopy(structure.meta_model), size=size)
    if split_layers is not None:
        meta_model = copy.deepcopy(structure.meta_model)
        split_layers(meta_model)
        _try_context(structure, meta_model, size=size)


def _try_context(structure: ModelStructure, meta_model: nn.Module, *, size: int) -> None:
    group = TensorGroup(size=size, index=0, handle=None, is_trial=True)
    keep_experts_apart(meta_model)

    def attempt(tried: Any, _: object) -> None:
        with torch.no_grad(), custom_functions_refused():
            call_model(meta_model, split_tokens(tried, group))

    try:
        structure.run(attempt, meta_model)
    except SplitError as error:
        raise context_error(error, group) from None


def context_error(error: SplitError, group: TensorGroup) -> UnsupportedPlanError:
    """Return what a user can understand of a computation that the ranks cannot do each on its tokens."""
    return UnsupportedPlanError(
        f"cp={group.size}: the model mixes tokens outside of attention: {error.message}",
        hint="its attention must be torch.nn.functional.scaled_dot_product_attention or written out as products of "
        "queries, keys and values (attn_implementation='sdpa' or 'eager' in transformers), and its loss "
        "torch.nn.functional.cross_entropy, a mean or a sum; or use cp=1",
    )


def show_hooks_plain(block: nn.Module) -> None:
    """Let the hooks of `block` (those of FSDP, which follow gradients) see this rank's tokens as plain tensors.

    Called after the hooks are registered: these run between what is undone before them and done again behind them.
    """
    inner, entering, leaving = block.forward, _Marks(), _Marks()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return entering.take_off((args, kwargs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = entering.put_on((args, kwargs))
        return leaving.take_off(inner(*args, **kwargs))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return leaving.put_on(output)

    block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    block.register_forward_hook(after)
    block.forward = forward


class _Marks:
    """Which tensors of a nest are split, and how, while they go through hooks as plain ones."""

    def __init__(self) -> None:
        self._split: list[SplitTensor | None] = []

    def take_off(self, tree: Any) -> Any:
        """Return `tree` with the parts of its split tensors in their place."""
        leaves, structure = pytree.tree_flatten(tree)
        self._split = [leaf if isinstance(leaf, SplitTensor) else None for leaf in leaves]
        return pytree.tree_unflatten(
            [leaf.local if isinstance(leaf, SplitTensor) else leaf for leaf in leaves], structure
        )

    def put_on(self, tree: Any) -> Any:
        """Return `tree` with its tensors split as they were."""
        leaves, structure = pytree.tree_flatten(tree)
        put = [
            leaf if mark is None else SplitTensor(leaf, mark.sharding, mark.group, mark.source)
            for leaf, mark in zip(leaves, self._split, strict=True)
        ]
        self._split = []
        return pytree.tree_unflatten(put, structure)
