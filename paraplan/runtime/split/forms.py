"""In which form a split block runs: on plain parts where its code lets it, compared in numbers with itself whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.check import BlockDiffersError, BlockTrial, block_trial, shares_with_blocks
from paraplan.runtime.split.layers import BlockSplit, SequenceEnds, is_linear
from paraplan.runtime.split.regions import joined_modules, split_block
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.model_structure import BlockCall

_HEADS = re.compile(r"(n|num)_.*heads?|.*_heads|heads")


def tensor_group(mesh: Mesh, *, keeps_products: bool = False, in_halves: bool = False) -> TensorGroup:
    """Return the `tp` group of this rank.

    `keeps_products`: what layers return is kept for the backward pass. `in_halves`: backward passes of inputs and of
    weights are run apart.
    """
    return TensorGroup.of(mesh, "tp", keeps_products=keeps_products, overlaps=not (keeps_products or in_halves))


def checked_in_numbers(
    block: nn.Module, name: str, call: BlockCall, split: BlockSplit, mesh: Mesh, ends: SequenceEnds | None
) -> BlockSplit:
    """Return `split` in the first form that computes what the block does whole, with what it takes to do so.

    With regions around the modules that hold column layers, or around these layers; and under sequence parallelism the
    same with the tokens of all ranks in the block. Raises `UnsupportedPlanError` where none does.
    """
    with block_trial(block, call, mesh.world.device) as trial:
        split = replace(split, draws=trial.draws)
        for form in forms(block, split, ends, size=mesh.size("tp"), shares=shares_with_blocks(call)):
            try:
                return _checked(trial, name, form, tensor_group(mesh), ends)
            except UnsupportedPlanError as error:
                failure = error
    if ends is None or failure.message.startswith("sequence_parallel"):
        raise failure
    raise UnsupportedPlanError(
        f"sequence_parallel=True: {failure.message}", hint="use a plan without sequence parallelism"
    ) from failure


def _checked(
    trial: BlockTrial, name: str, form: BlockSplit, group: TensorGroup, ends: SequenceEnds | None
) -> BlockSplit:
    part = copy_of(trial.whole)
    try:
        shardings = split_block(part, form, group, ends)
        return replace(form, summed=trial.compare(part, group, shardings, _partial(part, form, shardings, ends)))
    except BlockDiffersError as error:
        said = f"{name} split over tp={group.size} does not compute what it computes whole"
        if not error.runs:
            said = f"the split of {name} over tp={group.size} does not run"
        raise UnsupportedPlanError(f"{said}: {error}", hint="use tp=1 for this model") from error
    finally:
        # Its forward passes refer to it: the values are let go here, not when Python next looks for such circles.
        part.to("meta")


def forms(
    block: nn.Module, split: BlockSplit, ends: SequenceEnds | None, *, size: int, shares: bool
) -> Iterator[BlockSplit]:
    """Return the forms of a split over `size` ranks, the one that costs least first.

    `shares`: blocks hand each other what they compute beside their hidden states, of which each has a part.
    """
    parts = [name for name, child in block.named_children() if any(True for _ in child.children())]
    changed = {
        site: kept for site, found in split.sites.items() if (kept := tuple(one for one in found if one.changes_sizes))
    }
    sizes = written_sizes(block, split, size) if changed and not split.divided else {}
    for joins in ((), *((part,) for part in parts), ("",)) if ends is not None else ((),):
        form = replace(split, joins=joins)
        if not shares:
            if sizes:
                yield replace(form, divided=sizes, has_regions=True, sites={})
            yield replace(form, has_regions=True, sites=changed)
        yield form


def written_sizes(block: nn.Module, split: BlockSplit, size: int) -> dict[str, tuple[str, ...]]:
    """Return the attributes that may be sizes of what is split, of modules that hold column layers and all in them."""
    lengths: dict[str, set[int]] = {}
    for layer, role in split.roles.items():
        if role.kind == "column":
            lengths.setdefault(layer.rpartition(".")[0], set()).update((*role.segments, sum(role.segments)))
    found: dict[str, tuple[str, ...]] = {}
    for path, module in block.named_modules():
        holder = next((one for one in lengths if one and f"{path}.".startswith(f"{one}.")), None)
        names = tuple(
            name
            for name, value in vars(module).items()
            if holder is not None
            and type(value) is int
            and value > 1
            and value % size == 0
            and (value in lengths[holder] or _HEADS.fullmatch(name))
        )
        if names and not is_linear(module):
            found[path] = names
    return found


def _partial(
    block: nn.Module, form: BlockSplit, shardings: Mapping[str, Sharding], ends: SequenceEnds | None
) -> frozenset[str]:
    """Return the whole parameters of a split block of whose gradients every rank has a part, whatever their values."""
    if ends is None:
        return frozenset()
    joined = tuple(f"{path}." if path else "" for path in joined_modules(form))
    names = dict(block.named_parameters()).keys() - shardings.keys()
    return frozenset(name for name in names if not name.startswith(joined or ("/",)))
