"""Blocks of which every rank of a `tp` group holds some heads and inner units, on plain tensors between modules.

A region is where a rank computes with what it holds alone: a module that holds column layers (attention, a gated
MLP), or a column layer by itself. What enters is whole on every rank, and its gradient is summed (Shoeybi et al. 2019,
section 3, f and g); a row layer sums what leaves. Under sequence parallelism a rank has its own tokens outside of
regions: they are gathered where one is entered, and summed and scattered where a row layer leaves it (Korthikanti et
al. 2022, section 4.2.2). In a region gradients of what a rank holds whole are partial: they are summed at the end of a
step.

Code that writes down sizes of whole tensors has them rewritten at the calls that do (`sites`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.errors import PlanError, UnsupportedPlanError, UsageError
from paraplan.runtime.shards.group import (
    TensorGroup,
    gather_from_region,
    reduce_from_region,
    reduce_scatter,
    scatter_to_region,
    sum_both_ways,
)
from paraplan.runtime.shards.overlap import LateGradient, enter_region, late_linear
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.experts import expert_shardings, expert_weights
from paraplan.runtime.split.layers import (
    BlockSplit,
    LayerRole,
    SequenceEnds,
    parameter_shardings,
    product_of,
    take_parts,
)
from paraplan.runtime.split.sites import RunOnParts, sites_by_module
from paraplan.runtime.structure.chain import put_argument
from paraplan.runtime.structure.float8 import is_float8
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.structure.outputs import map_outputs


@dataclass
class _Region:
    """The last tensor that entered a region, and the gradient of its `first` column layer's weight if that is late.

    `is_layer`: the region is a column layer. It `gathers` tokens, of which a rank has some outside.
    """

    first: nn.Module | None = None
    is_layer: bool = False
    gathers: bool = False
    tensor: torch.Tensor | None = None
    late: LateGradient | None = None


def split_block(
    block: nn.Module, split: BlockSplit, group: TensorGroup, ends: SequenceEnds | None
) -> dict[str, Sharding]:
    """Leave this rank's parts in `block` and make it work on them; return the cuts of its parameters by their names."""
    shardings: dict[str, Sharding] = {}
    joined = () if ends is None else joined_modules(split)
    regions = {path: _Region() for path in _regions(block, split)}
    for path, region in regions.items():
        columns = [layer for layer, role in split.roles.items() if role.kind == "column" and _is_in(layer, (path,))]
        first = block.get_submodule(columns[0]) if columns else None
        region.first, region.is_layer = None if first is None or is_float8(first) else first, path in columns
    for layer, role in split.roles.items():
        module = block.get_submodule(layer)
        found = (expert_shardings if role.kind == "experts" else parameter_shardings)(module, role, group.size)
        take_parts(module, found, group)
        shardings |= {f"{layer}.{name}": sharding for name, sharding in found.items()}
        has_own_tokens = ends is not None and not _is_in(layer, joined)
        if role.kind == "column":
            region = regions[next(path for path in regions if _is_in(layer, (path,)))]
            if split.draws or region.first is module or type(module).forward is not nn.Linear.forward:
                set_forward(module, _column(module, region, group, draws=split.draws))
        elif role.kind == "row":
            is_inner = split.has_regions and _is_inner(layer, split.roles, regions)
            set_forward(module, _row(module, split, group, scatters=has_own_tokens, is_inner=is_inner))
        elif role.kind == "experts":
            _share_bias(module, group)
    for path, sites in sites_by_module(split.sites).items():
        module = block.get_submodule(path)
        set_forward(module, _rewriting(module, RunOnParts(sites, group, copies=not split.has_regions)))
    for path, names in split.divided.items():
        _divide(block.get_submodule(path), names, group.size)
    for path, region in regions.items():
        is_of_experts = path in split.roles and split.roles[path].kind == "experts"
        region.gathers = ends is not None and not _is_in(path, joined)
        module = block.get_submodule(path)
        set_forward(module, _entering(module, group, region, sums=is_of_experts))
    for path in joined:
        joined_module = block.get_submodule(path)
        set_forward(joined_module, _joining(joined_module, group, draws=split.draws))
    set_forward(block, _block_forward(block, split, group, ends))
    return shardings


def _divide(module: nn.Module, names: Collection[str], size: int) -> None:
    """Divide the attributes `names` of `module`; raise `PlanError` where one is no number that `size` divides."""
    for name in names:
        value = getattr(module, name, None)
        if not isinstance(value, int) or value % size:
            raise PlanError(
                f"split: {name}={value!r} of a {type(module).__name__} is not divided by tp={size}",
                hint="divide numbers of heads and sizes that its code names",
            )
        setattr(module, name, value // size)


def joined_modules(split: BlockSplit) -> tuple[str, ...]:
    """Return the modules that have the tokens of all ranks under sequence parallelism, each of which does the same.

    What holds experts is one, whose routing is of all tokens: a balance loss reads it.
    """
    experts = [layer for layer, role in split.roles.items() if role.kind == "experts"]
    return _outermost([*split.joins, *(layer.rpartition(".")[0] for layer in experts)])


def _is_in(layer: str, paths: Collection[str]) -> bool:
    return any(not path or layer == path or layer.startswith(f"{path}.") for path in paths)


def _outermost(paths: Any) -> tuple[str, ...]:
    found = list(dict.fromkeys(paths))
    return tuple(one for one in found if not any(one != other and _is_in(one, (other,)) for other in found))


def _regions(block: nn.Module, split: BlockSplit) -> tuple[str, ...]:
    """Return the regions of a block: experts, and modules that hold column layers, or these layers by themselves."""
    paths = []
    for layer, role in split.roles.items():
        holder = layer.rpartition(".")[0]
        is_held = split.has_regions and holder and not isinstance(block.get_submodule(holder), nn.ModuleList)
        if role.kind in ("column", "read"):
            paths.append(holder if is_held else layer)
        elif role.kind == "experts":
            paths.append(layer)
    return _outermost(paths)


def _is_inner(layer: str, roles: Mapping[str, LayerRole], regions: Collection[str]) -> bool:
    """Whether a row layer is followed by column layers of its region, which go on with what it returns."""
    region = next((path for path in regions if path and _is_in(layer, (path,))), None)
    later = [*roles][[*roles].index(layer) + 1 :]
    return region is not None and any(roles[one].kind == "column" and _is_in(one, (region,)) for one in later)


def _column(module: Any, region: _Region, group: TensorGroup, *, draws: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    product, is_first = product_of(module), region.first is module

    def column(given: torch.Tensor) -> torch.Tensor:
        if draws and module.training:
            group.numbers.apart(given.device)
        late = region.late if is_first and given is region.tensor else None
        if late is None:
            return product(given, module.weight, module.bias)
        region.late = None
        return late_linear(given, module.weight.detach(), module.bias, late)

    return column


def _row(
    module: Any, split: BlockSplit, group: TensorGroup, *, scatters: bool, is_inner: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    draws, product = split.draws, product_of(module)

    def row(given: torch.Tensor) -> torch.Tensor:
        bias, partial = module.bias, product(given, module.weight, None)
        if is_inner:
            own = sum_both_ways(partial, group)
        elif scatters:
            is_plain = partial.ndim == 3 and partial.shape[1] == group.num_tokens
            tokens = group.tokens if is_plain else _tokens_of_all(partial, group)
            own = reduce_scatter(partial, tokens, group)
        else:
            own = reduce_from_region(partial, group, is_product=True)
            if draws:
                group.numbers.together()
        if bias is not None and bias.dtype is not own.dtype:
            bias = bias.to(own.dtype)  # which autocast leaves in fp32
        return own if bias is None else own + bias

    return row


def _tokens_of_all(whole: torch.Tensor, group: TensorGroup) -> Sharding:
    """Return how the tokens of all ranks are cut in [batch, tokens, hidden] or [batch x tokens, hidden]."""
    tokens, dim = group.num_tokens, whole.ndim - 2
    if dim < 0 or (whole.shape[dim] != tokens if dim else whole.shape[0] % tokens):
        raise ValueError(f"it makes hidden states of shape {tuple(whole.shape)} of {tokens} tokens")
    return Sharding(dim, group.tokens.segments, group.size, 1 if dim else whole.shape[0] // tokens)


def _share_bias(module: nn.Module, group: TensorGroup) -> None:
    """Have a bias that experts add to what each rank computed count once."""
    weights = expert_weights(module)
    assert weights is not None
    bias, inner = f"{weights.leave}_bias", module.forward
    if getattr(module, bias, None) is None:
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        # An attribute of the instance stands before the parameter of its name, which stays where it is.
        module.__dict__[bias] = module.get_parameter(bias) / group.size
        try:
            return inner(*args, **kwargs)
        finally:
            del module.__dict__[bias]

    set_forward(module, forward)


def _has_gradients(nest: tuple[Any, ...]) -> bool:
    for one in nest:
        if one.requires_grad if isinstance(one, torch.Tensor) else type(one) is tuple and _has_gradients(one):
            return True
    return False


def _enter(given: Any, region: _Region, group: TensorGroup) -> Any:
    """Return what a region goes on with in the place of `given`."""
    if type(given) is tuple:
        return tuple([_enter(one, region, group) for one in given])
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        return given
    tokens = None
    if region.gathers and region.tensor is None:
        is_plain = given.ndim == 3 and given.shape[1] * group.size == group.num_tokens
        tokens = group.tokens if is_plain else group.part_of_tokens(given)
    has_gradient = given.requires_grad and torch.is_grad_enabled()
    if tokens is None and not has_gradient:
        return given
    entered = group.entered
    if entered is not None and entered[0] is given and entered[1] == has_gradient:
        made = entered[2]
    else:
        made, region.late = enter_region(given, tokens, region.first, group, for_products=region.is_layer)
        group.entered = (given, has_gradient, made)
    if region.tensor is None:
        region.tensor = made
    return made


def _entering(module: nn.Module, group: TensorGroup, region: _Region, *, sums: bool) -> Callable[..., Any]:
    """Return the forward of `module` which has what it is called with enter it, and `sums` what leaves it."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        region.tensor = region.late = None
        entered = list(args)
        for key, one in (*enumerate(args), *kwargs.items()):
            if isinstance(one, torch.Tensor):
                enters = one.requires_grad or (region.gathers and region.tensor is None)
            else:
                enters = type(one) is tuple and _has_gradients(one)
            if enters and isinstance(key, int):
                entered[key] = _enter(one, region, group)
            elif enters:
                kwargs[str(key)] = _enter(one, region, group)
        try:
            output = inner(*entered, **kwargs)
        finally:  # recompute ends a forward pass by an error, once it has what it needs
            region.tensor = region.late = None
        return map_outputs(lambda _, one: reduce_from_region(one, group), output) if sums else output

    return forward


def _rewriting(module: nn.Module, mode: RunOnParts) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    return forward


def _joining(module: nn.Module, group: TensorGroup, *, draws: bool) -> Callable[..., Any]:
    """Return the forward of `module` which computes with the tokens of all ranks, and returns its own."""
    inner = module.forward

    def joined(given: Any) -> Any:
        if not isinstance(given, torch.Tensor) or not given.is_floating_point():
            return given
        tokens = group.part_of_tokens(given)
        return given if tokens is None else gather_from_region(given, tokens, group)

    def own(number: int, output: torch.Tensor) -> torch.Tensor:
        return output if number else scatter_to_region(output, _tokens_of_all(output, group), group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if draws:
            group.numbers.together()
        output = inner(*[joined(one) for one in args], **{name: joined(one) for name, one in kwargs.items()})
        if draws and module.training:
            group.numbers.apart(next(module.parameters()).device)
        return map_outputs(own, output)

    return forward


def _block_forward(
    block: nn.Module, split: BlockSplit, group: TensorGroup, ends: SequenceEnds | None
) -> Callable[..., Any]:
    inner = block.forward

    def leave(number: int, own: torch.Tensor) -> Any:
        return own if number else gather_from_region(own, group.tokens, group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            if ends is not None:
                args, kwargs = _with_own_tokens(args, kwargs, group, ends)
            if ends is not None and split.draws and block.training:
                group.numbers.apart(next(block.parameters()).device)
            output = inner(*args, **kwargs)
            return map_outputs(leave, output) if ends is not None and ends.is_last else output
        finally:
            group.entered = None
            if split.draws:
                group.numbers.together()

    return forward


def _with_own_tokens(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: TensorGroup, ends: SequenceEnds
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with this rank's tokens of its hidden state, which the first block cuts."""
    where = ends.hidden_argument
    hidden = args[where] if isinstance(where, int) else kwargs[where]
    if hidden.ndim != 3:
        raise UnsupportedPlanError(
            f"sequence_parallel=True: the blocks take hidden states of shape {tuple(hidden.shape)}, and not of "
            "[batch, tokens, hidden]",
            hint="use a plan without sequence parallelism",
        )
    group.num_sequences, tokens = hidden.shape[:2]
    if not ends.is_first:
        # Read while torch.compile compiles, their number would have it compile anew.
        if torch.compiler.is_compiling() or tokens * group.size != group.num_tokens:
            group.take_tokens(tokens * group.size)
        return args, kwargs
    if tokens % group.size:
        raise UsageError(
            f"hidden states of shape {tuple(hidden.shape)} do not divide along their tokens over tp={group.size} ranks",
            hint="use a sequence length that tp divides, or a plan without sequence parallelism",
        )
    group.take_tokens(tokens)
    return put_argument(where, scatter_to_region(hidden, group.tokens, group), args, kwargs)
