"""Linear layers of which every rank of a `tp` group has a part, and the blocks that hold them.

A column layer has some of the outputs: it reads the whole input and hands on a `SplitTensor`. A row layer has the
inputs that go with them: it reads a `SplitTensor` and sums what the ranks have computed. Under sequence parallelism
the hidden state between them is split along its tokens: column layers gather it, row layers sum and scatter it, and a
block takes and returns this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.shards.group import (
    TensorGroup,
    all_gather,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter,
    scatter_to_region,
)
from paraplan.runtime.shards.overlap import LateWeight, can_be_late, copy_beside, gather_beside, late_linear
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import (
    SEQUENCE,
    SplitError,
    SplitTensor,
)
from paraplan.runtime.structure.chain import put_argument
from paraplan.runtime.structure.outputs import map_outputs
from paraplan.runtime.torch_private import pytree

_TOKENS = 1  # their dimension, in [batch, tokens, hidden]


@dataclass(frozen=True)
class LayerRole:
    """A layer's part in a split: a linear one holds some outputs (column) or inputs (row), cut by `segments`.

    A gathered layer is whole, and reads the tokens of all ranks. Experts hold some inner units of each; the segments
    are those of the weights that make them. A row layer that `keeps_tokens` returns those of all ranks under sequence
    parallelism too: inside of a block, for code that looks at all of them. A layer that is `read` holds some outputs as
    a column layer does, for code that multiplies by its weight itself. `reads_alone`: no other layer reads what a
    column layer reads.
    """

    kind: Literal["column", "row", "read", "gathered", "experts"]
    segments: tuple[int, ...]
    keeps_tokens: bool = False
    reads_alone: bool = False


@dataclass(frozen=True)
class SequenceEnds:
    """Where a block finds its hidden state, and whether it is the first or last one with split tokens."""

    hidden_argument: int | str
    is_first: bool
    is_last: bool


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer: torch's, or transformers' with its weight as [inputs, outputs]."""
    is_torchs = isinstance(module, nn.Linear) and has_own_weight(module) and _returns_outputs(module)
    return is_torchs or _is_transposed(module)


def has_own_weight(module: nn.Module) -> bool:
    """Whether the weight of a layer is a parameter, not computed from others (weight norm and the like)."""
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False, remove_duplicate=False))


def has_own_code(module: nn.Module) -> bool:
    """Whether a linear layer is a subclass of torch's with a forward pass of its own."""
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward


def _returns_outputs(module: nn.Linear) -> bool:
    """Whether a subclass with a forward pass of its own returns outputs alone, as a router of experts does not."""
    forward: Callable[..., Any] = type(module).forward
    if not has_own_code(module):
        return True
    try:
        with torch.no_grad():
            output = forward(module, module.weight.new_zeros(1, module.in_features))
    except RuntimeError:  # it reads inputs of another shape, as DeepSeek-V4's layer of groups does
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and has_own_weight(module)


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Return the number of inputs and of outputs of a linear layer."""
    outputs, inputs = weight_of(module).shape[:: -1 if _is_transposed(module) else 1]
    return inputs, outputs


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the weight of a linear layer."""
    return cast("nn.Parameter", module.weight)


def parameter_shardings(module: nn.Module, role: LayerRole, size: int) -> dict[str, Sharding]:
    """Return how the parameters of a linear layer in `role` are cut, by their names in it; whole ones are left out."""
    if role.kind == "gathered":
        return {}
    outputs_first = not _is_transposed(module)
    dim = int(outputs_first == (role.kind == "row"))
    shardings = {"weight": Sharding(dim=dim, segments=role.segments, size=size)}
    if role.kind in ("column", "read") and getattr(module, "bias", None) is not None:
        shardings["bias"] = Sharding(dim=0, segments=role.segments, size=size)
    return shardings


def split_linear(
    module: nn.Module,
    role: LayerRole,
    group: TensorGroup,
    *,
    name: str,
    sequence_parallel: bool,
    use_local_output: bool = False,
) -> dict[str, Sharding]:
    """Leave this rank's part in a linear layer and make it work on it; return the cuts of its parameters.

    Where `use_local_output`, plain tensors come out of column layers and go into row layers.
    """
    shardings = parameter_shardings(module, role, group.size)
    for parameter_name, sharding in shardings.items():
        whole = module.get_parameter(parameter_name)
        part = sharding.part(whole.detach(), group.index).clone(memory_format=torch.contiguous_format)
        setattr(module, parameter_name, nn.Parameter(part, requires_grad=whole.requires_grad))
    if role.kind == "gathered":
        module.forward = gathered_forward(module)
    elif role.kind == "column":
        module.forward = column_forward(module, role, group, name, use_local_output=use_local_output)
    elif role.kind == "row":
        scatters = sequence_parallel and not role.keeps_tokens
        module.forward = row_forward(module, group, name, sequence_parallel=scatters, use_local_output=use_local_output)
    return shardings


@contextmanager
def shown_split(
    module: nn.Module,
    parts: Mapping[str, torch.Tensor],
    shardings: Mapping[str, Sharding],
    group: TensorGroup,
    name: str,
) -> Iterator[None]:
    """Let code see `parts` of the parameters of the layer `name` as split tensors in this context."""
    # An attribute of the instance stands before the parameter of its name, which stays where it is.
    module.__dict__.update({one: SplitTensor(parts[one], sharding, group, name) for one, sharding in shardings.items()})
    try:
        yield
    finally:
        for one in shardings:
            module.__dict__.pop(one, None)


def sum_gradients_in_backward(module: nn.Module, names: Sequence[str], group: TensorGroup) -> None:
    """Make the gradients of these whole parameters of `module` the sums over the ranks, of every backward pass.

    Of every pass, not of what has gathered in `.grad`, which further micro-batches would then count twice.
    """
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # An attribute of the instance stands before the parameter of its name, which stays where it is.
        module.__dict__.update({name: copy_to_region(module.get_parameter(name), group) for name in names})
        try:
            return inner(*args, **kwargs)
        finally:
            for name in names:
                module.__dict__.pop(name, None)

    module.forward = forward


def gathered_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the forward pass of a layer that is whole beside split ones, under sequence parallelism."""
    inner: Callable[..., torch.Tensor] = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = pytree.tree_map(_with_all_tokens, (args, kwargs))
        return inner(*args, **kwargs)

    return forward


def join_tokens(given: Any) -> Any:
    """Return the tokens of all ranks, for every rank to compute the same with them; other values stay as they are."""
    if not isinstance(given, SplitTensor):
        return given
    if given.source != SEQUENCE:
        raise SplitError("a whole layer reads a split tensor", source=given.source, is_mixed=True)
    return gather_from_region(given.local, given.sharding, given.group)


def _with_all_tokens(given: Any) -> Any:
    return join_tokens(given) if isinstance(given, SplitTensor) else given


def column_forward(
    module: nn.Module, role: LayerRole, group: TensorGroup, name: str, *, use_local_output: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward pass of a column layer that holds its part."""

    @cache
    def sharding_of(num_dimensions: int) -> Sharding:
        return Sharding(dim=num_dimensions - 1, segments=role.segments, size=group.size)

    def column(given: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = module.bias  # type: ignore[assignment]
        late = LateWeight(weight_of(module), outputs_first=not _is_transposed(module))
        entered = enter_column(given, group, alone=role.reads_alone, late=late)
        local = late_linear(entered, bias, late) if late.is_entered else _apply(module, entered, bias)
        return local if use_local_output else SplitTensor(local, sharding_of(local.ndim), group, name)

    return column


def enter_column(
    given: torch.Tensor, group: TensorGroup, *, alone: bool = False, late: LateWeight | None = None
) -> torch.Tensor:
    """Return the whole input of a column layer, gathered where its tokens are split; `alone`: nobody else reads it.

    The layer that enters it first may have the gradient of its weight made `late`.
    """
    if isinstance(given, SplitTensor):
        if given.source != SEQUENCE:
            raise SplitError("a column layer reads a split tensor", source=given.source, is_mixed=True)
        local, sharding = given.local, given.sharding
        group.token_shardings[tuple(given.shape[:-1])] = sharding
        if late is not None and can_be_late(late.weight, local, group):
            make = partial(gather_beside, local, sharding, late, group)
        else:
            make = partial(all_gather, local, sharding, group)
    elif late is not None and can_be_late(late.weight, given, group):
        make = partial(copy_beside, given, late, group)
    else:
        make = partial(copy_to_region, given, group, for_products=True)
    return make() if alone else group.cached_copy(given, make)


def row_forward(
    module: nn.Module, group: TensorGroup, name: str, *, sequence_parallel: bool, use_local_output: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward pass of a row layer that holds its part."""

    def row(given: torch.Tensor) -> torch.Tensor:
        if use_local_output:
            return leave_row(_apply(module, given, None), module.bias, group, sequence_parallel=False)
        check_row_input(given, name)
        assert isinstance(given, SplitTensor)
        return leave_row(_apply(module, given.local, None), module.bias, group, sequence_parallel=sequence_parallel)

    return row


def check_row_input(given: torch.Tensor, name: str) -> None:
    """Raise `SplitError` where the input of a row layer is not split along its last dimension."""
    if not isinstance(given, SplitTensor) or given.sharding.dim != given.local.ndim - 1 or given.sharding.repeats > 1:
        source = given.source if isinstance(given, SplitTensor) else name
        raise SplitError(f"{name} reads a tensor that is not split along its last dimension", source=source)


def leave_row(partial: torch.Tensor, bias: Any, group: TensorGroup, *, sequence_parallel: bool) -> torch.Tensor:
    """Return the sum of what the ranks computed plus `bias`: whole, or this rank's tokens of it, in their type."""
    if bias is not None and bias.dtype is not partial.dtype:
        bias = bias.to(partial.dtype)  # which autocast leaves in fp32
    if not sequence_parallel:
        total = reduce_from_region(partial, group, is_product=True)
        return total if bias is None else total + bias
    # Code that has flattened batch and tokens reads column layers in that shape too.
    sharding = group.token_shardings.get(tuple(partial.shape[:-1]))
    if sharding is None and partial.ndim != 3:
        raise SplitError(
            f"sequence parallelism needs hidden states [batch, tokens, hidden], found {partial.ndim} dimensions",
            source=SEQUENCE,
        )
    sharding = sharding or _token_sharding(partial.shape[_TOKENS], group)
    mine: torch.Tensor = SplitTensor(reduce_scatter(partial, sharding, group), sharding, group, SEQUENCE)
    return mine if bias is None else mine + bias


def _apply(module: nn.Module, given: torch.Tensor, bias: Any) -> torch.Tensor:
    weight = weight_of(module)
    if not _is_transposed(module):
        return F.linear(given, weight, bias)
    if bias is None:
        return given @ weight
    # One operation, as in the whole layer: autocast leaves a sum by itself in fp32, and all that follows it.
    return torch.addmm(bias, given.flatten(0, -2), weight).view(*given.shape[:-1], -1)


def _token_sharding(tokens: int, group: TensorGroup) -> Sharding:
    return Sharding(dim=_TOKENS, segments=(tokens,), size=group.size)


def run_block(
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    group: TensorGroup,
    ends: SequenceEnds | None,
    read: frozenset[int] = frozenset(),
) -> Any:
    """Return what a block with split layers, whose forward pass is `inner`, returns.

    With `ends` its hidden state has split tokens; outside of the first and the last such block whole tensors travel.
    Of what it returns beside the first tensor, other code reads those with the numbers `read`: they have to be whole.
    """

    def leave(number: int, value: torch.Tensor) -> Any:
        if not number:
            return value if ends is None else _leave_sequence(value, group, ends)
        if not isinstance(value, SplitTensor):
            return value
        if number in read:
            raise SplitError("the block returns it, and other code reads it", source=value.source, is_mixed=True)
        return None  # attention weights beside the hidden state are of some heads alone

    try:
        if ends is not None:
            where = ends.hidden_argument
            hidden = args[where] if isinstance(where, int) else kwargs[where]
            entered = _enter_sequence(hidden, group, ends)
            args, kwargs = put_argument(where, entered, args, kwargs)
        return map_outputs(leave, inner(*args, **kwargs))
    finally:
        group.forget()


def _enter_sequence(hidden: torch.Tensor, group: TensorGroup, ends: SequenceEnds) -> SplitTensor:
    if hidden.ndim != 3:
        raise UnsupportedPlanError(
            f"sequence_parallel=True: the blocks take hidden states of shape {tuple(hidden.shape)}, and not of "
            "[batch, tokens, hidden]",
            hint="use a plan without sequence parallelism",
        )
    tokens = hidden.shape[_TOKENS]
    if ends.is_first and tokens % group.size:
        raise UsageError(
            f"hidden states of shape {tuple(hidden.shape)} do not divide along their tokens over tp={group.size} ranks",
            hint="use a sequence length that tp divides, or a plan without sequence parallelism",
        )
    if ends.is_first:
        sharding = _token_sharding(tokens, group)
        return SplitTensor(scatter_to_region(hidden, sharding, group), sharding, group, SEQUENCE)
    return SplitTensor(hidden, _token_sharding(tokens * group.size, group), group, SEQUENCE)


def _leave_sequence(hidden: torch.Tensor, group: TensorGroup, ends: SequenceEnds) -> torch.Tensor:
    if not isinstance(hidden, SplitTensor) or hidden.source != SEQUENCE:
        raise SplitError("a block returns whole tokens", source=SEQUENCE)
    if hidden.sharding.dim != _TOKENS or hidden.sharding.repeats > 1:
        raise SplitError("a block returns its hidden state in another shape", source=SEQUENCE)
    return gather_from_region(hidden.local, hidden.sharding, group) if ends.is_last else hidden.local
