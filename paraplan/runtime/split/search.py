"""Finding how the layers of a block can be split over `tp`, by running it without values.

Every linear layer that reads whole tensors is tried as a column layer, every one that reads a split tensor as a row
layer; where ranks would have to bring their parts together, the layer that was split is left whole, and where the code
takes a fused output apart, the output is cut at the same places. A model's own plan (transformers' styles) says which
layers to split in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import SplitError, SplitTensor, split_operands
from paraplan.runtime.split.adapters import Adapters
from paraplan.runtime.split.experts import ExpertWeights, expert_weights
from paraplan.runtime.split.layers import (
    BlockSplit,
    LayerRole,
    check_row_input,
    check_unread,
    is_linear,
    linear_sizes,
    parameter_shardings,
    shown_split,
    weight_of,
)
from paraplan.runtime.split.trial import custom_functions_kept_whole
from paraplan.runtime.structure.model_structure import BlockCall
from paraplan.runtime.structure.outputs import numbered_outputs

_MOST_TRIES = 64
_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "linear"})


@dataclass
class _Trial:
    """What is known of a block's layers so far: cuts of outputs, and layers to leave whole, with the reason.

    `other_segments` are cuts that would do as well by what was known, to be tried where those taken lead nowhere.
    `read` are layers by whose weights the code multiplies itself; None before the others are known.
    """

    adapters: Adapters = field(default_factory=Adapters)
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    other_segments: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    roles: dict[str, LayerRole] = field(default_factory=dict)
    first_words: dict[str, str] = field(default_factory=dict)
    read: set[str] | None = None


def find_split(
    meta_model: nn.Module,
    call: BlockCall,
    *,
    size: int,
    name: str,
    kept_whole: Mapping[str, str],
    interleaved: bool = False,
    adapters: Adapters | None = None,
) -> BlockSplit:
    """Return how `meta_model`, a block on the meta device, can be split over `size` ranks.

    `call` is what it is called with. `kept_whole` names layers that must not be split, with the reason; `interleaved`
    says how experts hold gate and up. `adapters` are pairs of layers that go with others.
    Raises `UnsupportedPlanError` with the layer and the numbers where `size` does not divide heads, and where no layer
    can be split.
    """
    trial = _Trial(adapters=adapters or Adapters(), whole=dict(kept_whole))
    for _ in range(_MOST_TRIES):
        trial.roles = {}
        group = TensorGroup(size=size, index=0, handle=None)
        try:
            args, kwargs = copy.deepcopy((call.args, call.kwargs))  # caches are filled
            tried = _tried(meta_model, trial, group, interleaved=interleaved)
            with ExitStack() as stack:
                for one in (torch.no_grad(), tried, call.context(), custom_functions_kept_whole()):
                    stack.enter_context(one)
                products = stack.enter_context(_ProductsNoted(meta_model))
                output = meta_model.forward(*args, **kwargs)
            for number, value in numbered_outputs(output).items():
                check_unread(number, value, call.read)
        except SplitError as error:
            if trial.read:  # without these it ran
                trial.read -= {error.source} & trial.read or trial.read
            else:
                _learn(trial, error, meta_model, name, size)
            continue
        if trial.read is None:
            trial.read = products.weights - trial.roles.keys() - trial.whole.keys() - trial.adapters.bases.keys()
            if trial.read:
                continue
        if not trial.roles:
            reasons = "; ".join(f"{layer}: {reason}" for layer, reason in trial.whole.items()) or "none is linear"
            raise UnsupportedPlanError(
                f"tp={size}, but no layer of {name} ({type(meta_model).__name__}) can be split: {reasons}",
                hint="use tp=1 for this model",
            )
        return BlockSplit(roles=trial.roles, whole=trial.whole, read=call.read)
    raise UnsupportedPlanError(
        f"tp={size}: no split of {name} ({type(meta_model).__name__}) was found", hint="use tp=1 for this model"
    )


class _ProductsNoted(TorchFunctionMode):
    """Notes in `weights` the linear layers of a block by whose weights code multiplies itself in this context."""

    def __init__(self, meta_model: nn.Module) -> None:
        super().__init__()
        self._names = {id(weight_of(module)): name for name, module in meta_model.named_modules() if is_linear(module)}
        self.weights: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _PRODUCTS:
            self.weights |= {self._names[id(value)] for value in args if id(value) in self._names}
        return func(*args, **(kwargs or {}))


def _learn(trial: _Trial, error: SplitError, meta_model: nn.Module, name: str, size: int) -> None:
    """Change `trial` so that `error` does not come again, or raise what a user can understand."""
    source = error.source
    trial.first_words.setdefault(source, error.message)
    segments = error.segments
    if segments is not None:
        outputs = linear_sizes(meta_model.get_submodule(source))[1]
        if len(segments) == 1 and segments[0] < 0:
            count = -segments[0]
            segments = (outputs // count,) * count if outputs % count == 0 else None
        known = trial.segments.get(source, (outputs,))
        choices = [] if segments is None else [segments]
        if segments is not None and sum(segments) < outputs:
            choices = refinements(known, segments)
        choices = [one for one in choices if sum(one) == outputs and one != known]
        if choices:
            trial.segments[source] = choices[0]
            trial.other_segments[source] = choices[1:] + trial.other_segments.get(source, [])
            return
    if error.is_mixed and source not in trial.whole and source:
        trial.whole[source] = error.message
        return
    if trial.other_segments.get(source):
        trial.segments[source] = trial.other_segments[source].pop(0)
        return
    raise UnsupportedPlanError(
        f"{name} ({type(meta_model).__name__}) cannot be split: {trial.first_words[source]}",
        hint=f"use a tp that divides them, not {size}, or tp=1",
    ) from None


def refinements(segments: tuple[int, ...], parts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return `segments` with `parts` in place of runs of them that are as long and end where some of `parts` do.

    The first has them in place of every such run. Runs that overlap are not known apart: each then comes by itself.
    """
    bounds = set(accumulate(parts))
    runs: dict[int, int] = {}
    for place in range(len(segments)):
        ends: list[int] = []
        for stop, end in enumerate(accumulate(segments[place:]), place + 1):
            ends.append(end)
            if end == sum(parts) and bounds.issuperset(ends):
                runs[place] = stop
    every: list[int] = []
    place = 0
    while place < len(segments):
        every += parts if place in runs else segments[place : place + 1]
        place = runs.get(place, place + 1)
    single = [(*segments[:start], *parts, *segments[stop:]) for start, stop in runs.items()]
    return list(dict.fromkeys([tuple(every), *single]))


@contextmanager
def _tried(meta_model: nn.Module, trial: _Trial, group: TensorGroup, *, interleaved: bool) -> Iterator[None]:
    """Let the layers of `meta_model` take the role that their input asks for, in this context."""
    with ExitStack() as undo:
        for name, module in meta_model.named_modules():
            weights = expert_weights(module) if name else None
            if weights is not None:
                undo.callback(module.__dict__.pop, "forward", None)
                role = LayerRole(kind="experts", segments=weights.segments(interleaved=interleaved))
                module.forward = _trying_experts(module, name, weights, role, trial, group)
            if name in (trial.read or ()):
                role = LayerRole(kind="read", segments=linear_sizes(module)[1:])
                _check_divides(name, role.segments, group)
                shardings = parameter_shardings(module, role, group.size)
                parts = {
                    one: sharding.part(module.get_parameter(one), group.index) for one, sharding in shardings.items()
                }
                undo.enter_context(shown_split(module, parts, shardings, group, name))
                trial.roles[name] = role
            elif name and is_linear(module):
                undo.callback(module.__dict__.pop, "forward", None)
                module.forward = _trying(module, name, trial, group)
        yield


def _check_divides(name: str, segments: tuple[int, ...], group: TensorGroup) -> None:
    """Raise where the outputs of the layer `name` do not divide over the ranks."""
    if any(segment % group.size for segment in segments):
        raise SplitError(
            f"tp={group.size} does not divide the outputs {' + '.join(map(str, segments))} of {name}",
            source=name,
            is_mixed=sum(segments) < group.size,  # a gate of one number
        )


def _trying(module: nn.Module, name: str, trial: _Trial, group: TensorGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    _, outputs = linear_sizes(module)
    adapters = trial.adapters
    base, down = adapters.bases.get(name, name), adapters.downs.get(name)

    def forward(given: torch.Tensor) -> torch.Tensor:
        split = given if isinstance(given, SplitTensor) else None
        reads_part = split is not None and split.sharding.dim == split.local.ndim - 1
        follows_row = down in trial.roles and trial.roles[down].kind == "row"
        is_whole = name in trial.whole or base in trial.whole
        if follows_row or (adapters.is_down(name) and not reads_part):
            return _run_whole(module, given)
        if split is not None and reads_part and name in trial.whole:
            raise SplitError(f"{name} reads it, and is left whole", source=split.source, is_mixed=True)
        if split is not None and reads_part:
            part = check_row_input(split, name)
            _take_role(trial, name, LayerRole(kind="row", segments=part.sharding.segments))
            return part.local.new_empty((*part.local.shape[:-1], outputs))
        if split is not None or is_whole:
            return _run_whole(module, given)
        segments = trial.segments.get(base, (outputs,))
        _check_divides(base, segments, group)
        _take_role(trial, name, LayerRole(kind="column", segments=segments))
        local = given.new_empty((*given.shape[:-1], outputs // group.size))
        return SplitTensor(local, Sharding(dim=given.ndim - 1, segments=segments, size=group.size), group, base)

    return forward


def _run_whole(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = type(module).forward(module, *args, **kwargs)
    return result


def _trying_experts(
    module: nn.Module, name: str, weights: ExpertWeights, role: LayerRole, trial: _Trial, group: TensorGroup
) -> Callable[..., torch.Tensor]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if name not in trial.whole and weights.inner % group.size:
            trial.whole[name] = f"tp={group.size} does not divide the {weights.inner} inner units of each expert"
        for one in split_operands(args, kwargs):
            raise SplitError(f"{name} reads a split tensor", source=one.source, is_mixed=True)
        if name not in trial.whole:
            _take_role(trial, name, role)
        return _run_whole(module, *args, **kwargs)

    return forward


def _take_role(trial: _Trial, name: str, role: LayerRole) -> None:
    if trial.roles.setdefault(name, role) != role:
        raise SplitError(f"{name} is used in two ways", source=name, is_mixed=True)


def own_plan(model: nn.Module) -> dict[str, str] | None:
    """Return the styles that a transformers config names for layers, by patterns of their names; None without any."""
    config: Any = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        return None
    return {str(pattern): str(style) for pattern, style in plan.items()}
