"""Tensor parallelism: the linear layers of a model's blocks split over `tp`, checked before they are used.

How a block is split is found without values (`search`), by the model's own plan where it has one; then one block
of every kind is split for real and compared with itself whole (`check`). Embedding and head are split by
vocabulary (`vocabulary`); norms stay whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paraplan.errors import PlanError, UnsupportedPlanError
from paraplan.model.tp_plan import splits, style_of
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.adapters import Adapters, find_adapters
from paraplan.runtime.split.experts import expert_weights
from paraplan.runtime.split.forms import checked_in_numbers
from paraplan.runtime.split.kinds import kind_of, numbering_of
from paraplan.runtime.split.layers import (
    BlockSplit,
    SequenceEnds,
    has_own_code,
    has_own_weight,
    is_linear,
    linear_sizes,
)
from paraplan.runtime.split.logits import VocabularyLogits
from paraplan.runtime.split.patterns import GivenSplit, written_down
from paraplan.runtime.split.regions import split_block
from paraplan.runtime.split.search import find_split, own_plan
from paraplan.runtime.split.vocabulary import VocabularySplit, apply_vocabulary_split, find_vocabulary_split
from paraplan.runtime.structure.chain import HINT
from paraplan.runtime.structure.model_structure import BlockCall, ModelStructure

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


CheckSplit = Callable[..., BlockSplit]
"""`check(block, name, call, split, mesh=, ends=)` returns a block's split, or a simpler form of it.

Raises `UnsupportedPlanError` where it computes something else.
"""
_CheckOfBlock = Callable[[BlockSplit], BlockSplit]


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
    def patterns(self) -> dict[str, str]:
        """The split as `split` of `job.prepare` takes it."""
        return written_down(self.blocks, (*self.vocabulary.embeddings, *self.vocabulary.heads))

    @property
    def joined(self) -> list[str]:
        """Blocks, or modules of these, that have the tokens of all ranks under sequence parallelism with experts."""
        return [f"{name}.{path}".rstrip(".") for name, block in self.blocks.items() for path in block.joins]

    def partial(self, names: Sequence[str]) -> frozenset[str]:
        """Return the parameters of the blocks `names` whose gradients each rank computes in part."""
        return frozenset(f"{name}.{one}" for name in names for one in self.blocks[name].summed)

    @property
    def names(self) -> list[str]:
        """The names of all blocks, in order."""
        return [*self.blocks]


def find_tensor_split(
    structure: ModelStructure,
    *,
    mesh: Mesh,
    sequence_parallel: bool,
    check: CheckSplit | None = None,
    given: Mapping[str, str] | None = None,
) -> TensorSplit:
    """Return how the blocks of a model, which is whole and keeps its values, are split; checked with real numbers.

    All ranks of a `tp` group call it together. `check` is another way of checking than that in numbers, and `given`
    says how layers are split (`GivenSplit`). Raises `UnsupportedPlanError` where the blocks cannot be split, and says
    why, and `PlanError` for a given split that does not fit the model.
    """
    size = mesh.size("tp")
    structure.check_has_blocks(f"tp={size}", "to split")
    model, stack = structure.model, structure.stack
    where = _hidden_argument(structure) if sequence_parallel else 0
    calls, meta_model = structure.calls, structure.meta_model
    plan = own_plan(model)
    numbering = numbering_of(stack.modules(meta_model))
    asked = None if given is None else GivenSplit.of(given, meta_model)
    uses = Counter(id(parameter) for _, parameter in meta_model.named_parameters(remove_duplicate=False))
    found: dict[Any, BlockSplit] = {}
    blocks: dict[str, BlockSplit] = {}
    for name, block, call in zip(stack.names, stack.modules(meta_model), calls, strict=True):
        if call is None:
            raise UnsupportedPlanError(f"block {name} is not called in a forward pass", hint="use tp=1 for this model")
        kept = _kept_whole(block, name, plan, uses) if asked is None else asked.styles_in(block, name)
        kind = kind_of(name, block, call, [*kept] if asked is None else [*kept.items()], numbering)
        if kind not in found:
            ends = SequenceEnds(where, is_first=True, is_last=True) if sequence_parallel else None
            checked = partial(check or checked_in_numbers, model.get_submodule(name), name, call, mesh=mesh, ends=ends)
            if asked is None:
                found[kind] = _split_of(block, call, name, kept, size, checked)
            else:
                split = asked.split_of(block, name, call, size=size)
                reasons = _kept_whole(block, name, None, uses)
                for layer in split.roles.keys() & reasons.keys():
                    raise PlanError(f"split: {name}.{layer} cannot be split: {reasons[layer]}", hint="leave it whole")
                found[kind] = checked(split)
        blocks[name] = found[kind]
    vocabulary = VocabularySplit()
    if asked is None or asked.has_vocabulary:
        vocabulary = find_vocabulary_split(structure, size=size)
    return TensorSplit(blocks, vocabulary, sequence_parallel=sequence_parallel, hidden_argument=where)


def check_compilable(split: TensorSplit, *, tp: int) -> None:
    """Raise `UnsupportedPlanError` where torch.compile cannot follow the code of a block that is split."""
    for name, block in split.blocks.items():
        if block.draws:
            raise UnsupportedPlanError(
                f"compile_backend with tp={tp}: block {name} draws random numbers (dropout), each rank its own for its "
                "part, and torch.compile does not follow that",
                hint="set dropout to 0, or leave out compile_backend",
            )
        if block.sites:
            raise UnsupportedPlanError(
                f"compile_backend with tp={tp}: the code of block {name} writes sizes of whole tensors, which are "
                "rewritten while it runs, and torch.compile does not follow that",
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
    if chain.uses.reads_between or any(chain.carried):
        what = (
            "code between the blocks reads hidden states" if chain.uses.reads_between else "blocks pass on more tensors"
        )
        raise UnsupportedPlanError(
            f"sequence_parallel=True: {what}, of which ranks have some tokens",
            hint="use a plan without sequence parallelism",
        )
    return chain.hidden_argument


def _split_of(
    meta_model: nn.Module, call: BlockCall, name: str, kept: Mapping[str, str], size: int, check: _CheckOfBlock
) -> BlockSplit:
    """Return how a block is split, checked: the first of these ways that computes the same.

    Its adapters go with the layers beside them, or are as any other layers; linear layers with code of their own, which
    may look at whole weights, or those that make fewer outputs than others stay whole. In each of these its experts
    have gate before up, interleaved, or else are left whole.
    """
    adapters = find_adapters(meta_model)
    with_own_code = {
        layer: f"{type(module).__name__} computes by code of its own, and not the same from a part of its weight"
        for layer, module in meta_model.named_modules()
        if layer and is_linear(module) and has_own_code(module)
    }
    ways: list[tuple[Adapters | None, dict[str, str]]] = [(adapters, {})] if adapters.bases else []
    ways.append((None, {}))
    ways += [
        (None, more) for more in (with_own_code, _narrow_layers(meta_model, size=size)) if more.keys() - kept.keys()
    ]
    experts = [layer for layer, module in meta_model.named_modules() if layer and expert_weights(module) is not None]
    failure: UnsupportedPlanError | None = None
    for pairs, more in ways:
        whole = more | dict(kept)
        tried = [layer for layer in experts if layer not in whole]
        find = partial(find_split, meta_model, call, size=size, name=name, adapters=pairs)
        try:
            for interleaved in (False, True) if tried else ():
                split = find(interleaved=interleaved, kept_whole=whole)
                try:
                    return check(split)
                except UnsupportedPlanError as error:
                    reason = error.message
            whole |= dict.fromkeys(tried, reason) if tried else {}
            return check(find(kept_whole=whole | _stacked_weights_elsewhere(meta_model)))
        except UnsupportedPlanError as error:
            failure = failure or error
    assert failure is not None
    raise failure from None


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


def _stacked_weights_elsewhere(meta_model: nn.Module) -> dict[str, str]:
    """Return the stacked weights of a block that are in no module of experts, with the reason that they stay whole."""
    return {
        f"{layer}.{name}".lstrip("."): "its weights are stacked, and in no module that holds the two of experts alone"
        for layer, module in meta_model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and not isinstance(module, _CONVOLUTIONS) and (not layer or expert_weights(module) is None)
    }


def apply_tensor_split(
    model: nn.Module, split: TensorSplit, names: Sequence[str], group: TensorGroup, logits: VocabularyLogits
) -> dict[str, Sharding]:
    """Leave this rank's parts in the ends and the blocks `names` of `model`, or of a stage of it that holds these.

    `logits` are those that its head makes. Returns the cuts of parameters by their names in `model`.
    """
    shardings = apply_vocabulary_split(model, split.vocabulary, group, logits)
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


def _kept_whole(block: nn.Module, name: str, plan: dict[str, str] | None, uses: Mapping[int, int]) -> dict[str, str]:
    """Return the layers of a block that are not to be split, with the reason; `uses` counts places by parameter."""
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
