"""Whether blocks compute on some tokens of a sequence what they compute on all of them, tried before they train.

One block of every kind is compared in numbers with itself on whole sequences. Where it brings tokens together outside
of attention that can be exchanged (attention that is written out, a convolution), the part that does so is found, and
runs on the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paraplan.errors import ParaplanError, UnsupportedPlanError
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.expert_balance import without_balance
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup, gather_from_region
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.check import BlockDiffersError, BlockTrial, block_trial
from paraplan.runtime.split.context_parallel import (
    Context,
    argument_names,
    follow_passes,
    run_on_all_tokens,
    run_on_own_tokens,
    take_own_tokens,
    tokens_of,
)
from paraplan.runtime.split.context_tail import TokensApart
from paraplan.runtime.split.kinds import kind_of, numbering_of
from paraplan.runtime.split.own_tokens import TokensMixedError, look_up_own_tokens
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.forwards import DOES_NOT_RUN, set_forward
from paraplan.runtime.structure.model_structure import BlockCall, ModelStructure
from paraplan.runtime.structure.outputs import map_outputs
from paraplan.runtime.torch_private import pytree


@dataclass(frozen=True)
class ContextSplit:
    """How the blocks `names` of a model run over `cp`; `whole` has those of their parts that need all tokens.

    `kept` has the arguments of blocks that are of another sequence. `draws`: blocks draw random numbers in training.
    `embeds_all` says what code before the blocks brings tokens together, so that every rank embeds those of all.
    """

    names: tuple[str, ...]
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    draws: bool = False
    embeds_all: str = ""


@dataclass(frozen=True)
class _Way:
    """How a block of one kind runs: these parts of it on all tokens ("" is the block), these arguments as they are."""

    parts: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    draws: bool = False


def find_context_split(structure: ModelStructure, mesh: Mesh, *, has_values: bool = True) -> ContextSplit:
    """Return how the blocks of a model, which is whole, run over `cp`. All ranks of a `cp` group call it together.

    Raises `UnsupportedPlanError` where a block, or what is around the blocks, does not run on some tokens.
    """
    tokens_of(structure.inputs, mesh.size("cp"))
    structure = structure if structure.has_blocks else _around_shared_block(structure, mesh.size("cp"))
    stack, meta_model = structure.stack, structure.meta_model
    numbering = numbering_of(stack.modules(meta_model))
    found: dict[Any, _Way] = {}
    ways: dict[str, _Way] = {}
    any_call = next((call for call in structure.calls if call is not None), None)
    for name, block, own_call in zip(stack.names, stack.modules(meta_model), structure.calls, strict=True):
        call = own_call or any_call  # of a block that was left out in this pass, perhaps on this rank alone
        if call is not None and has_values:
            kind = kind_of(name, block, call, (), numbering)
            if kind not in found:
                found[kind] = _checked(structure.model.get_submodule(name), name, call, mesh)
            ways[name] = found[kind]
    split = ContextSplit(
        stack.names,
        whole={name: way.parts for name, way in ways.items()},
        kept={name: way.kept for name, way in ways.items()},
        draws=any(way.draws for way in ways.values()),
    )
    try:
        _try_model(structure, split, size=mesh.size("cp"))
    except (TokensMixedError, UnsupportedPlanError) as mixed:
        split = replace(split, embeds_all=mixed.message if isinstance(mixed, UnsupportedPlanError) else str(mixed))
        _try_model(structure, split, size=mesh.size("cp"))
    return split


def _around_shared_block(structure: ModelStructure, size: int) -> ModelStructure:
    """Return the structure with the outermost part as its one block that takes hidden states of all tokens.

    That is for a model that calls one block again and again (ALBERT). Raises `UnsupportedPlanError` without one.
    """
    meta_model = structure.meta_model
    found: list[str] = []

    def attempt(tried: Any, _: object) -> None:
        def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
            if first is not None and first.is_floating_point() and first.ndim > 2 and first.shape[-2] == tokens:
                found.append(name)

        tokens = tokens_of(tried, size)
        with ExitStack() as undo, torch.no_grad():
            for name, module in meta_model.named_modules():
                if name and any(True for child in module.children()):
                    hook = partial(note, name)
                    undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            call_model(meta_model, tried)

    structure.run(attempt)
    total = sum(held.numel() for held in meta_model.parameters())
    for name in found:
        if 2 * sum(held.numel() for held in meta_model.get_submodule(name).parameters()) > total // 2:
            return structure.around((name,))
    structure.check_has_blocks(f"cp={size}", "that work on some tokens")
    return structure


def _checked(block: nn.Module, name: str, call: BlockCall, mesh: Mesh) -> _Way:
    """Return the first way in which a block computes on some tokens what it does on all of them."""
    group, problem = TensorGroup.of(mesh, "cp"), ""
    if not any(isinstance(one, torch.Tensor) and one.ndim > 1 for one in (*call.args, *call.kwargs.values())):
        raise UnsupportedPlanError(
            f"cp={group.size}: no argument of block {name} is its hidden state [batch, tokens, hidden]",
            hint="give blocks their hidden state as an argument of its own, or use cp=1",
        )
    with block_trial(block, replace(call, read=frozenset()), mesh.world.device) as trial:
        parts = [part for part, held in block.named_children() if any(True for _ in held.parameters())]
        others = _like_hidden(block, call)
        for way in (_Way(), *(_Way(kept=(one,)) for one in others), *(_Way(parts=(one,)) for one in (*parts, ""))):
            try:
                _compare(trial, way, group)
            except (BlockDiffersError, ParaplanError) as error:
                problem = problem or (error.message if isinstance(error, ParaplanError) else str(error))
            else:
                return replace(way, draws=trial.draws)
    raise UnsupportedPlanError(
        f"cp={group.size}: {name} does not compute on some tokens what it does on all of them: {problem}",
        hint="its attention must be torch.nn.functional.scaled_dot_product_attention, with masks made before the "
        "blocks, or that of transformers (attn_implementation='sdpa'), or be a module of its own; or use cp=1",
    )


def _like_hidden(block: nn.Module, call: BlockCall) -> list[str]:
    """Return the arguments of a call in the shape of its hidden state, which may be of another sequence."""
    given = [*zip(argument_names(block), call.args, strict=False), *call.kwargs.items()]
    tensors = [(name, one) for name, one in given if isinstance(one, torch.Tensor) and one.ndim > 1]
    return [name for name, one in tensors[1:] if one.shape[-2:] == tensors[0][1].shape[-2:]]


def _compare(trial: BlockTrial, way: _Way, group: TensorGroup) -> None:
    """Raise `BlockDiffersError` where a block does not compute in one way what it does on whole sequences."""
    part, context = copy_of(trial.whole), Context(group)
    for one in way.parts:
        run_on_all_tokens(part.get_submodule(one), context)
    run_on_own_tokens(part, context, draws=False)
    take_own_tokens(part, context, way.kept)
    _join_ends(part, trial.call, context)
    try:
        trial.compare(part, group, {}, None)
    finally:
        part.to("meta")


def _join_ends(part: nn.Module, call: BlockCall, context: Context) -> None:
    """Have `part` return the tokens of all ranks, those of `call`, as it would be followed by other blocks."""
    inner, group = part.forward, context.group

    def join(number: int, own: torch.Tensor) -> torch.Tensor:
        if number or own.ndim < 2 or own.shape[-2] != context.num_own:
            return own
        return gather_from_region(own, Sharding(own.ndim - 2, (context.num_tokens,), group.size), group)

    def cut(leaf: Any) -> Any:
        has_tokens = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[-2] == context.num_tokens
        return context.cut(leaf, -2) if has_tokens else leaf

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.ndim > 1)
        context.num_tokens = hidden.shape[-2]

    def forward(*args: Any, **kwargs: Any) -> Any:
        for shared in (*args, *kwargs.values()):
            if isinstance(shared, MutableMapping):  # keys and values of blocks before, which have them of own tokens
                shared.update({key: pytree.tree_map(cut, shared[key]) for key in shared})
        return map_outputs(join, inner(*args, **kwargs))

    part.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    set_forward(part, forward)


def _try_model(structure: ModelStructure, split: ContextSplit, *, size: int) -> None:
    """Raise `UnsupportedPlanError` where what is around the blocks does not run on some tokens, without values.

    Raises `TokensMixedError` where embeddings of some tokens are not enough for what comes before the blocks.
    """
    context = Context(TensorGroup(size=size, index=0, handle=None))
    meta_model = copy_of(structure.meta_model)
    apply_split(meta_model, split.names, split, context)
    take_tokens(meta_model, split.names, split, context)

    def attempt(tried: Any, _: object) -> None:
        with torch.no_grad():
            call_model(structure.meta_model, tried)  # inputs that it does not run on without values are not meant here
            try:
                dtype = next(structure.meta_model.parameters()).dtype
                if next(meta_model.parameters()).dtype != dtype:
                    meta_model.to(dtype)
                with TokensApart(size, lambda: context.own_outside), context.passing(), without_balance(meta_model):
                    call_model(meta_model, tried)
            except DOES_NOT_RUN as error:
                raise UnsupportedPlanError(
                    f"cp={size}: {type(structure.model).__name__} does not run where its blocks have some of the "
                    f"tokens: {(str(error).splitlines() or [''])[0]}",
                    hint="what follows the blocks must work token by token; or use cp=1",
                ) from error

    structure.run(attempt)


def apply_split(
    model: nn.Module,
    names: Sequence[str],
    split: ContextSplit,
    context: Context,
    *,
    has_first: bool = True,
    has_last: bool = True,
    backend: str | None = None,
    group: TensorGroup | None = None,
) -> None:
    """Make the blocks `names` of `model`, or of a stage of it that holds these, work on this rank's tokens.

    `has_first` and `has_last` say which ends of the model are there too, `backend` by what torch.compile compiles
    blocks. Under sequence parallelism the ranks of `group` share the tokens.
    """
    for name in names:
        for part in split.whole.get(name, ()):
            run_on_all_tokens(model.get_submodule(f"{name}.{part}".rstrip(".")), context, group)
        run_on_own_tokens(model.get_submodule(name), context, draws=split.draws, backend=backend)
    follow_passes(model, context, has_first=has_first, has_last=has_last)


def take_tokens(model: nn.Module, names: Sequence[str], split: ContextSplit, context: Context) -> None:
    """Have the blocks `names` of `model` be given this rank's tokens, and embeddings look up no others.

    Called once `model` is wrapped: see `take_own_tokens`.
    """
    for name in names:
        take_own_tokens(model.get_submodule(name), context, split.kept.get(name, ()))
    if not split.embeds_all:
        look_up_own_tokens(model, names, context)
