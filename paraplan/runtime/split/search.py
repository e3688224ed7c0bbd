"""Finding how the layers of a block can be split over `tp`, by running it without values.

Every linear layer that reads whole tensors is tried as a column layer, every one that reads a part as a row
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

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.adapters import Adapters
from paraplan.runtime.split.cuts import SplitError, as_part, part_of
from paraplan.runtime.split.experts import ExpertWeights, expert_weights
from paraplan.runtime.split.layers import (
    BlockSplit,
    LayerRole,
    is_linear,
    linear_sizes,
    parameter_shardings,
    weight_of,
)
from paraplan.runtime.split.lockstep import DOES_NOT_RUN, PartsRun, WholeRun
from paraplan.runtime.split.sites import Sites
from paraplan.runtime.structure.forwards import trial_forwards
from paraplan.runtime.structure.model_structure import BlockCall
from paraplan.runtime.structure.outputs import numbered_outputs
from paraplan.runtime.torch_private import pytree, watching_functions

_MOST_TRIES = 64


@dataclass
class _Trial:
    """A block's layers as far as they are known: cuts of outputs, and layers to leave whole, with the reason.

    `other_segments` are cuts that would do as well by what was known, to be tried where those taken lead nowhere.
    `read` are layers by whose weights the code multiplies itself, and `given` are roles that are not to be found.
    """

    adapters: Adapters = field(default_factory=Adapters)
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    other_segments: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    roles: dict[str, LayerRole] = field(default_factory=dict)
    first_words: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    given: Mapping[str, LayerRole] | None = None


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
    whole_run = _run_whole_block(meta_model, call)
    names = {id(weight_of(module)): layer for layer, module in meta_model.named_modules() if is_linear(module)}
    products = {names[one] for one in whole_run.products if one in names} - trial.adapters.bases.keys()
    for _ in range(_MOST_TRIES):
        try:
            sites = _run_parts(meta_model, call, trial, whole_run, size=size, interleaved=interleaved)
        except SplitError as error:
            if trial.read:  # without these it may run
                trial.read -= {error.source} & trial.read or trial.read
            else:
                _learn(trial, error, meta_model, name, size)
            continue
        if products:  # once the others are known
            trial.read = products - trial.roles.keys() - trial.whole.keys()
            products = set()
            if trial.read:
                continue
        if not trial.roles:
            reasons = "; ".join(f"{layer}: {reason}" for layer, reason in trial.whole.items()) or "none is linear"
            raise UnsupportedPlanError(
                f"tp={size}, but no layer of {name} ({type(meta_model).__name__}) can be split: {reasons}",
                hint="use tp=1 for this model",
            )
        return BlockSplit(roles=trial.roles, whole=trial.whole, sites=sites)
    raise UnsupportedPlanError(
        f"tp={size}: no split of {name} ({type(meta_model).__name__}) was found", hint="use tp=1 for this model"
    )


def sites_of(meta_model: nn.Module, call: BlockCall, roles: Mapping[str, LayerRole], *, size: int) -> Sites:
    """Return the calls to rewrite in a block whose layers have `roles`; none where its code does not run so."""
    trial = _Trial(given=roles, read={layer for layer, role in roles.items() if role.kind == "read"})
    try:
        return _run_parts(meta_model, call, trial, _run_whole_block(meta_model, call), size=size, interleaved=False)
    except SplitError:
        return {}  # numbers will tell


def _run_whole_block(meta_model: nn.Module, call: BlockCall) -> WholeRun:
    run = WholeRun()
    noting = {
        module: _noting(module, layer, run)
        for layer, module in meta_model.named_modules()
        if layer and (is_linear(module) or expert_weights(module) is not None)
    }
    args, kwargs = copy.deepcopy((call.args, call.kwargs))  # caches are filled
    with trial_forwards(noting), torch.no_grad(), call.context(), run:
        meta_model.forward(*args, **kwargs)
    return run


def _noting(module: nn.Module, name: str, run: WholeRun | PartsRun) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run.layer(name, lambda: _run_whole(module, *args, **kwargs), (args, kwargs))

    return forward


def _run_parts(
    meta_model: nn.Module, call: BlockCall, trial: _Trial, whole: WholeRun, *, size: int, interleaved: bool
) -> Sites:
    """Run a block on parts, by which the layers of `trial` take their roles; return the calls to rewrite."""
    trial.roles = {}
    group = TensorGroup(size=size, index=0, handle=None)
    run = PartsRun(whole, group)
    args, kwargs = copy.deepcopy((call.args, call.kwargs))  # caches are filled
    tried = _tried(meta_model, trial, run, group, interleaved=interleaved)
    with ExitStack() as stack:
        for one in (torch.no_grad(), tried, call.context(), _custom_functions_kept_whole(), run):
            stack.enter_context(one)
        try:
            output = meta_model.forward(*args, **kwargs)
        except DOES_NOT_RUN as error:
            words = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"its code does not run on parts: {words}"
            raise SplitError(message, source=run.source, is_mixed=True) from error
    for number, value in numbered_outputs(output).items():
        part = part_of(value)
        if part is not None and (not number or number in call.read):
            raise SplitError("the block returns it, and other code reads it", source=part.source, is_mixed=True)
    return run.sites


@contextmanager
def _custom_functions_kept_whole() -> Iterator[None]:
    """Have an autograd.Function that is handed a part of what a layer returns raise `SplitError` for that layer."""

    def watch(cls: Any, args: Any, kwargs: Any) -> None:
        for one in pytree.tree_leaves((args, kwargs)):
            if (part := part_of(one)) is not None:
                message = f"{cls.__name__}, an autograd.Function, hides what it does with it"
                raise SplitError(message, source=part.source, is_mixed=True)

    with watching_functions(watch):
        yield


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
    if trial.other_segments.get(source):
        trial.segments[source] = trial.other_segments[source].pop(0)
        return
    if error.is_mixed and source not in trial.whole and source:
        trial.whole[source] = error.message
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
def _tried(
    meta_model: nn.Module, trial: _Trial, run: PartsRun, group: TensorGroup, *, interleaved: bool
) -> Iterator[None]:
    """Let the layers of `meta_model` take the role that their input asks for, in this context."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    with ExitStack() as undo:
        for name, module in meta_model.named_modules():
            weights = expert_weights(module) if name else None
            if weights is not None:
                role = LayerRole(kind="experts", segments=weights.segments(interleaved=interleaved))
                forwards[module] = _trying_experts(module, name, weights, role, trial, run, group)
            if name in trial.read:
                role = LayerRole(kind="read", segments=linear_sizes(module)[1:])
                _check_divides(name, role.segments, group)
                for one, sharding in parameter_shardings(module, role, group.size).items():
                    # An attribute of the instance stands before the parameter of its name, which stays where it is.
                    own = sharding.part(module.get_parameter(one), group.index)
                    module.__dict__[one] = as_part(own, sharding, name)
                    undo.callback(module.__dict__.pop, one, None)
                trial.roles[name] = role
            elif name and is_linear(module):
                forwards[module] = _trying(module, name, trial, run, group)
            if module not in forwards:
                begin = module.register_forward_pre_hook(lambda *_, name=name: run.modules.append(name))
                end = module.register_forward_hook(lambda *_: run.modules.pop() and None, always_call=True)
                undo.callback(begin.remove)
                undo.callback(end.remove)
        undo.enter_context(trial_forwards(forwards))
        yield


def _check_divides(name: str, segments: tuple[int, ...], group: TensorGroup) -> None:
    """Raise where the outputs of the layer `name` do not divide over the ranks."""
    if any(segment % group.size for segment in segments):
        raise SplitError(
            f"tp={group.size} does not divide the outputs {' + '.join(map(str, segments))} of {name}",
            source=name,
            is_mixed=sum(segments) < group.size,  # a gate of one number
        )


def _trying(
    module: nn.Module, name: str, trial: _Trial, run: PartsRun, group: TensorGroup
) -> Callable[[torch.Tensor], torch.Tensor]:
    _, outputs = linear_sizes(module)
    adapters = trial.adapters
    base, down = adapters.bases.get(name, name), adapters.downs.get(name)
    whole = _noting(module, name, run)

    def kind(reads_part: bool, is_split: bool, source: str) -> str:
        if trial.given is not None:
            return trial.given[name].kind if name in trial.given else "whole"
        if (down in trial.roles and trial.roles[down].kind == "row") or (adapters.is_down(name) and not reads_part):
            return "whole"
        if reads_part and name in trial.whole:
            raise SplitError(f"{name} reads it, and is left whole", source=source, is_mixed=True)
        if reads_part:
            return "row"
        return "whole" if is_split or name in trial.whole or base in trial.whole else "column"

    def forward(given: torch.Tensor) -> torch.Tensor:
        with torch.DisableTorchFunction():  # what is asked and made here is no call of the code
            result = taken(given)
        return whole(given) if result is None else result

    def taken(given: torch.Tensor) -> torch.Tensor | None:
        part = part_of(given)
        reads_part = part is not None and part.sharding.dim == given.ndim - 1
        role = kind(reads_part, part is not None, "" if part is None else part.source)
        if role == "row":
            if part is None or not reads_part or part.sharding.repeats > 1:
                message = f"{name} reads a tensor that is not split along its last dimension"
                raise SplitError(message, source=name if part is None else part.source)
            _take_role(trial, name, LayerRole(kind="row", segments=part.sharding.segments))
            run.take(name, part.source)
            return given.new_empty((*given.shape[:-1], outputs))
        if role == "column":
            segments = trial.given[name].segments if trial.given else trial.segments.get(base, (outputs,))
            _check_divides(base, segments, group)
            _take_role(trial, name, LayerRole(kind="column", segments=segments))
            local = given.new_empty((*given.shape[:-1], outputs // group.size))
            run.take(name, base)
            return as_part(local, Sharding(given.ndim - 1, segments, group.size), base)
        return None

    return forward


def _run_whole(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _trying_experts(
    module: nn.Module,
    name: str,
    weights: ExpertWeights,
    role: LayerRole,
    trial: _Trial,
    run: PartsRun,
    group: TensorGroup,
) -> Callable[..., torch.Tensor]:
    whole = _noting(module, name, run)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if name not in trial.whole and weights.inner % group.size:
            trial.whole[name] = f"tp={group.size} does not divide the {weights.inner} inner units of each expert"
        for one in pytree.tree_leaves((args, kwargs)):
            if (part := part_of(one)) is not None:
                raise SplitError(f"{name} reads a split tensor", source=part.source, is_mixed=True)
        if name not in trial.whole:
            _take_role(trial, name, role)
        return whole(*args, **kwargs)

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
