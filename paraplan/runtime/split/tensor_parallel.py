"""Tensor parallelism: the linear layers of a model's blocks split over `tp`, checked before they are used.

How a block is split is found without values (`search`), by the model's own plan where it has one; then one block
of every kind is split for real and compared with itself whole (`check`). Embedding and head are split by
vocabulary (`vocabulary`); norms stay whole on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.model.tp_plan import splits, style_of
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.adapters import Adapters, find_adapters
from paraplan.runtime.split.check import (
    check_split,
    comparable_runs,
    setting_of,
    shares_with_blocks,
    summed_gradients,
)
from paraplan.runtime.split.experts import expert_weights, split_experts
from paraplan.runtime.split.kinds import kind_of, numbering_of
from paraplan.runtime.split.layers import (
    SequenceEnds,
    has_own_code,
    has_own_weight,
    is_linear,
    linear_sizes,
    run_block,
    shown_split,
    split_linear,
    sum_gradients_in_backward,
)
from paraplan.runtime.split.search import BlockSplit, find_split, own_plan
from paraplan.runtime.split.vocabulary import VocabularySplit, apply_vocabulary_split, find_vocabulary_split
from paraplan.runtime.structure.chain import HINT
from paraplan.runtime.structure.meta import attributes_kept, give_random_values
from paraplan.runtime.structure.model_structure import (
    BlockCall,
    ModelStructure,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


CheckSplit = Callable[[nn.Module, str, BlockCall, BlockSplit, Mesh, SequenceEnds | None], BlockSplit]
"""Returns a block's split, or a simpler form of it; raises `UnsupportedPlanError` where it computes something else."""


@dataclass(frozen=True)
class TensorSplit:
    """How the blocks of a model are split over `tp`: `blocks` by the block's name. Found before anything is changed."""

    blocks: dict[str, BlockSplit]
    vocabulary: VocabularySplit
    sequence_parallel: bool
    hidden_argument: int | str

    @property
    def whole(self) -> dict[str, str]:
        """The layers that every rank holds whole, with the reason: by their names in a block or, the ends, in all."""
        inside = {layer: reason for block in self.blocks.values() for layer, reason in block.whole.items()}
        return inside | dict(self.vocabulary.whole)

    @property
    def names(self) -> list[str]:
        """The names of all blocks, in order."""
        return [*self.blocks]


def tensor_group(mesh: Mesh, *, keeps_products: bool = False, in_halves: bool = False) -> TensorGroup:
    """Return the `tp` group of this rank.

    `keeps_products`: what layers return is kept for the backward pass. `in_halves`: backward passes of inputs and of
    weights are run apart.
    """
    return TensorGroup(
        size=mesh.size("tp"),
        index=mesh.coordinate("tp"),
        handle=mesh.group("tp"),
        keeps_products=keeps_products,
        overlaps=not (keeps_products or in_halves),
    )


def find_tensor_split(
    structure: ModelStructure, *, mesh: Mesh, sequence_parallel: bool, check: CheckSplit | None = None
) -> TensorSplit:
    """Return how the blocks of a model, which is whole and keeps its values, are split; checked with real numbers.

    All ranks of a `tp` group call it together. `check` is another way of checking than that in numbers. Raises
    `UnsupportedPlanError` where the blocks cannot be split, and says why.
    """
    size = mesh.size("tp")
    structure.check_has_blocks(f"tp={size}", "to split")
    model, stack = structure.model, structure.stack
    where = _hidden_argument(structure) if sequence_parallel else 0
    calls, meta_model = structure.calls, structure.meta_model
    plan = own_plan(model)
    numbering = numbering_of(stack.modules(meta_model))
    found: dict[Any, BlockSplit] = {}
    blocks: dict[str, BlockSplit] = {}
    for name, block, call in zip(stack.names, stack.modules(meta_model), calls, strict=True):
        if call is None:
            raise UnsupportedPlanError(f"block {name} is not called in a forward pass", hint="use tp=1 for this model")
        kept = _kept_whole(meta_model, block, name, plan)
        kind = kind_of(name, block, call, kept, numbering)
        if kind not in found:
            ends = SequenceEnds(where, is_first=True, is_last=True) if sequence_parallel else None
            wanted = _Wanted(mesh, ends, kept, check or checked_in_numbers)
            found[kind] = _split_of(model.get_submodule(name), block, name, call, wanted)
        blocks[name] = found[kind]
    vocabulary = find_vocabulary_split(structure, size=size)
    return TensorSplit(blocks, vocabulary, sequence_parallel=sequence_parallel, hidden_argument=where)


def check_compilable(split: TensorSplit, *, tp: int) -> None:
    """Raise `UnsupportedPlanError` where torch.compile cannot follow the code of a block that is split."""
    for name, block in split.blocks.items():
        if not block.use_local_output:
            raise UnsupportedPlanError(
                f"compile_backend with tp={tp}: the code of block {name} needs the sizes of whole tensors, and runs on "
                "split ones that torch.compile does not follow",
                hint="write sizes of heads as -1 in view and split, as transformers' Llama does, or leave out "
                "compile_backend",
            )


def _hidden_argument(structure: ModelStructure) -> int | str:
    """Return where blocks take the hidden state; raise where sequence parallelism cannot split it between them."""
    try:
        chain = structure.chain
    except UnsupportedPlanError as error:
        is_no_chain = error.hint == HINT  # which speaks of pipelines
        raise UnsupportedPlanError(
            f"sequence_parallel=True: {error.message}",
            hint="use a plan without sequence parallelism" if is_no_chain else error.hint,
        ) from None
    if chain.uses.reads_between:
        raise UnsupportedPlanError(
            "sequence_parallel=True: code between the blocks reads hidden states, of which ranks have some tokens",
            hint="use a plan without sequence parallelism",
        )
    return chain.hidden_argument


@dataclass(frozen=True)
class _Wanted:
    """What the split of a block is to be: over this mesh, with these ends, some layers whole, checked in this way."""

    mesh: Mesh
    ends: SequenceEnds | None
    kept: Mapping[str, str]
    check: CheckSplit


def _split_of(
    block: nn.Module,
    meta_model: nn.Module,
    name: str,
    call: BlockCall,
    wanted: _Wanted,
) -> BlockSplit:
    """Return how a block is split, checked: the first of these ways that computes the same.

    Its adapters go with the layers beside them, or are as any other layers; and linear layers with code of their own,
    which may look at whole weights, stay whole.
    """
    adapters = find_adapters(meta_model)
    own = {
        layer: f"{type(module).__name__} computes by code of its own, and not the same from a part of its weight"
        for layer, module in meta_model.named_modules()
        if layer and is_linear(module) and has_own_code(module)
    }
    ways: list[tuple[Adapters | None, dict[str, str]]] = [(adapters, {})] if adapters.bases else []
    ways += [(None, {}), *([(None, own)] if own.keys() - wanted.kept.keys() else [])]
    narrow = _narrow_layers(meta_model, size=wanted.mesh.size("tp"))
    ways += [(None, narrow)] if narrow.keys() - wanted.kept.keys() else []
    errors = []
    for pairs, whole in ways:
        try:
            kept = replace(wanted, kept=whole | dict(wanted.kept))
            return _split_with(pairs, block, meta_model, name, call, kept)
        except UnsupportedPlanError as error:
            errors.append(error)
    raise errors[0] from None


def _narrow_layers(meta_model: nn.Module, *, size: int) -> dict[str, str]:
    """Return layers that make fewer outputs than one beside them: keys and values of fewer heads than ranks, it may be.

    Every rank then has them whole, and the gradients of the heads that it has of the queries are summed.
    """
    beside: dict[tuple[str, int], dict[str, int]] = {}
    for layer, module in meta_model.named_modules():
        if layer and is_linear(module):
            inputs, outputs = linear_sizes(module)
            beside.setdefault((layer.rpartition(".")[0], inputs), {})[layer] = outputs
    return {
        layer: f"it makes the keys or values of fewer heads than tp={size} divides"
        for layers in beside.values()
        for layer, outputs in layers.items()
        if outputs == min(layers.values()) < max(layers.values())
    }


def _split_with(
    adapters: Adapters | None,
    block: nn.Module,
    meta_model: nn.Module,
    name: str,
    call: BlockCall,
    wanted: _Wanted,
) -> BlockSplit:
    """Return how a block is split, checked: its experts with gate before up, interleaved, or else left whole."""
    experts = [layer for layer, module in meta_model.named_modules() if layer and expert_weights(module) is not None]
    mesh, ends, kept = wanted.mesh, wanted.ends, dict(wanted.kept)
    tried = [layer for layer in experts if layer not in kept]
    find = partial(find_split, meta_model, call, size=mesh.size("tp"), name=name, ends=ends, adapters=adapters)
    for interleaved in (False, True) if tried else ():
        split = find(interleaved=interleaved, kept_whole=kept)
        try:
            return wanted.check(block, name, call, split, mesh, ends)
        except UnsupportedPlanError as error:
            reason = error.message
    kept = kept | dict.fromkeys(tried, reason) if tried else kept
    kept |= _stacked_weights_elsewhere(meta_model)
    split = find(kept_whole=kept)
    return wanted.check(block, name, call, split, mesh, ends)


def _stacked_weights_elsewhere(meta_model: nn.Module) -> dict[str, str]:
    """Return the stacked weights of a block that are in no module of experts, with the reason that they stay whole."""
    return {
        f"{layer}.{name}".lstrip("."): "its weights are stacked, and in no module that holds the two of experts alone"
        for layer, module in meta_model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and not isinstance(module, _CONVOLUTIONS) and (not layer or expert_weights(module) is None)
    }


def apply_tensor_split(
    model: nn.Module, split: TensorSplit, names: Sequence[str], group: TensorGroup
) -> dict[str, Sharding]:
    """Leave this rank's parts in the ends and the blocks `names` of `model`, or of a stage of it that holds these.

    Returns the cuts of parameters by their names in `model`.
    """
    shardings = apply_vocabulary_split(model, split.vocabulary, group)
    done: set[int] = set()
    for place, name in enumerate(names):
        block = model.get_submodule(name)
        if id(block) in done:
            raise UnsupportedPlanError(f"block {name} stands in the model twice", hint="use tp=1 for this model")
        done.add(id(block))
        ends = None
        if split.sequence_parallel:
            ends = SequenceEnds(split.hidden_argument, is_first=place == 0, is_last=place == len(names) - 1)
        found = split_block(block, split.blocks[name], group, ends)
        shardings |= {f"{name}.{parameter}": sharding for parameter, sharding in found.items()}
    return shardings


def split_block(
    block: nn.Module, split: BlockSplit, group: TensorGroup, ends: SequenceEnds | None
) -> dict[str, Sharding]:
    """Leave this rank's parts in `block` and make it work on them; return the cuts of its parameters by their names."""
    shardings: dict[str, Sharding] = {}
    shown: dict[str, dict[str, Sharding]] = {}
    for layer, role in split.roles.items():
        module = block.get_submodule(layer)
        if role.kind == "experts":
            shardings |= {
                f"{layer}.{name}": sharding for name, sharding in split_experts(module, role, group, layer).items()
            }
            continue
        found = split_linear(
            module, role, group, name=layer, sequence_parallel=ends is not None, use_local_output=split.use_local_output
        )
        if role.kind == "read" and not split.use_local_output:
            shown[layer] = found
        shardings |= {f"{layer}.{parameter}": sharding for parameter, sharding in found.items()}
    summed: dict[str, list[str]] = {}
    for name in split.summed:
        layer, _, parameter = name.rpartition(".")
        summed.setdefault(layer, []).append(parameter)
    for layer, parameters in summed.items():
        sum_gradients_in_backward(block.get_submodule(layer), parameters, group)
    block.forward = _block_forward(block, group, ends, split.read, shown)
    return shardings


def _block_forward(
    block: nn.Module,
    group: TensorGroup,
    ends: SequenceEnds | None,
    read: frozenset[int],
    shown: dict[str, dict[str, Sharding]],
) -> Callable[..., Any]:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as undo:
            for layer, shardings in shown.items():
                module = block.get_submodule(layer)
                undo.enter_context(shown_split(module, dict(module.named_parameters()), shardings, group, layer))
            return run_block(inner, args, kwargs, group=group, ends=ends, read=read)

    return forward


def _kept_whole(meta_model: nn.Module, block: nn.Module, name: str, plan: dict[str, str] | None) -> dict[str, str]:
    """Return the layers of a block that are not to be split, with the reason."""
    uses: dict[int, int] = {}
    for _, parameter in meta_model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    experts = {layer for layer, module in block.named_modules() if layer and expert_weights(module) is not None}
    layers = {layer: module for layer, module in block.named_modules() if layer in experts or is_linear(module)}
    kept = {
        layer: "its parameters belong to another layer too"
        for layer, module in layers.items()
        if any(uses[id(parameter)] > 1 for parameter in module.parameters())
    }
    kept |= {
        layer: "its weight is computed from other parameters"
        for layer, module in block.named_modules()
        if isinstance(module, nn.Linear) and not has_own_weight(module)
    }
    holders = find_adapters(block).holders  # a plan knows the layer, not what stands around it
    styles = {layer: style_of(plan or {}, f"{name}.{holders.get(layer, layer)}") for layer in layers}
    # Plans of transformers leave out the experts that all tokens share beside those that they split.
    beside = tuple(f"{layer.rpartition('.')[0]}." for layer in experts if splits(styles[layer]))
    if any(splits(style) for style in styles.values()):
        kept |= {
            layer: "the model's own plan leaves it whole"
            for layer, style in styles.items()
            if not splits(style) and not layer.startswith(beside)
        }
    return kept


def checked_in_numbers(
    block: nn.Module, name: str, call: BlockCall, split: BlockSplit, mesh: Mesh, ends: SequenceEnds | None
) -> BlockSplit:
    """Return `split`, or the same with plain parts where the block's code computes the same with them."""
    group = tensor_group(mesh)
    whole = copy.deepcopy(block)
    give_random_values(whole)
    whole = whole.to(mesh.world.device)
    copies = [whole]
    try:
        with comparable_runs(mesh.world.device):
            with attributes_kept(whole):
                setting = setting_of(whole, call)
            if ends is None and not split.draws and not shares_with_blocks(call):
                # SplitTensors cost time for every operation; code that takes heads as they come does not need them.
                direct = replace(split, use_local_output=True)
                copies.append(copy.deepcopy(whole))
                shardings = split_block(copies[-1], direct, group, None)
                with attributes_kept(whole):
                    summed = summed_gradients(whole, copies[-1], shardings, call, group=group, setting=setting)
                if summed is not None:
                    split = replace(direct, summed=summed)
            copies.append(copy.deepcopy(whole))
            shardings = split_block(copies[-1], split, group, ends)
            check_split(whole, copies[-1], shardings, call, group=group, name=name, setting=setting)
        return split
    finally:
        # Their forward passes refer to them: the values are let go here, not when Python next looks for such circles.
        for each in copies:
            each.to("meta")
