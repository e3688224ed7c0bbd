"""Optimizers under a plan: those that look at single numbers run on parts of tensors, others are given whole tensors.

SGD and Adam treat every number alike, so that a rank's part of a parameter is stepped as it would be in the whole one.
Muon, Adafactor, LAMB or clipping by tensor look at rows, matrices and norms. Which of the two an optimizer is shows in
a trial on small numbers, unless it is one that is known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.structure.weights import local_shard, own_part
from paraplan.runtime.torch_private import step_hooks, version_of

Scope = Literal["numbers", "tensors", "model"]
"""The numbers that an optimizer looks at to change one: that alone, the tensor that it is of, or other tensors too."""

_OF_NUMBERS = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
_OF_PLAIN_NUMBERS = (torch.optim.Rprop,)
"""Optimizers that write by masks, which torch does not in a sharded tensor."""
_TRIAL_STEPS = 12  # some begin otherwise than they go on
_TRIAL_LENGTH = 6  # of a dimension
_TOLERANCE = 1e-4


def scope_of(optimizer: torch.optim.Optimizer) -> Scope:
    """Return what `optimizer`, which has not stepped yet, looks at; found by a trial where its class is not known."""
    has_hooks = any(step_hooks(optimizer))
    if type(optimizer) in _OF_NUMBERS and not has_hooks:
        return "numbers"
    try:
        whole = _trial(optimizer, lambda _, parameter: [parameter])
        if not _agree(whole[:1], _trial(optimizer, lambda index, parameter: [] if index else [parameter])[:1]):
            return "model"  # at first: a norm of all gradients is the same for blocks of the tensors
        return "numbers" if _agree(whole, _trial(optimizer, _in_blocks)) else "tensors"
    except Exception:  # an optimizer of the user, of which nothing is known then
        return "model"


def check_optimizer(optimizer: torch.optim.Optimizer, plan: ParallelPlan) -> Scope:
    """Return what `optimizer` looks at; raise `UnsupportedPlanError` where ranks of `plan` do not have all of that."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedPlanError(
            "LBFGS computes the loss several times in a step, and engine.step computes it once",
            hint="use an optimizer whose step needs no closure",
        )
    divides = plan.tp * plan.ep > 1 or plan.zero_stage > 0
    if not divides and plan.pp == 1:
        return "numbers"
    scope = scope_of(optimizer)
    if scope == "numbers" and plan.zero_stage and isinstance(optimizer, _OF_PLAIN_NUMBERS):
        scope = "tensors"
    if scope == "model" and plan.pp > 1:
        raise UnsupportedPlanError(
            f"{name} steps a parameter by what it finds in others, and pp={plan.pp} has them on several ranks",
            hint="use an optimizer that steps each parameter by itself, or pp=1",
        )
    if scope != "numbers" and divides and plan.offload != "none":
        raise UnsupportedPlanError(
            f"{name} looks at whole tensors, which are gathered for it on the device, and the plan has "
            f"offload={plan.offload}",
            hint="use offload=none, or an optimizer that treats every number alike (AdamW)",
        )
    return scope if divides else "numbers"


def check_scheduler(scheduler: Any) -> None:
    """Raise `UnsupportedPlanError` for a scheduler that cannot be stepped after every step."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UnsupportedPlanError(
            "ReduceLROnPlateau steps by a loss that the script chooses, and engine.step knows none",
            hint="leave scheduler= out, make it of engine.optimizer and call its step(loss) after engine.eval_step",
        )


@dataclass
class _Whole:
    """A whole parameter in the place of the part that this rank holds. `version` is that of its gradient."""

    held: nn.Parameter
    whole: nn.Parameter
    version: int = 0


class WholeTensorSteps:
    """Gives an optimizer whole tensors for a step, and takes this rank's parts of them back.

    Every rank that shares a parameter does the whole step of it. Between steps `param_groups` holds the parts, for
    schedulers and checkpoints; the optimizer's state is of whole tensors.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shardings: Shardings, mesh: Mesh) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._shardings = shardings
        self._mesh = mesh
        self._made: dict[nn.Parameter, _Whole] = {}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Work for `optimizer` from its next step on."""
        optimizer.register_step_pre_hook(self._enter)
        optimizer.register_step_post_hook(self._leave)

    def _enter(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._whole_of(parameter, optimizer) for parameter in group["params"]]

    def _whole_of(self, held: nn.Parameter, optimizer: torch.optim.Optimizer) -> nn.Parameter:
        name = self._names.get(held)
        if name is None or not (isinstance(held, DTensor) or name in self._shardings.names):
            return held
        values = self._shardings.whole(name, held.detach(), self._mesh)
        made = self._made.setdefault(held, _Whole(held, nn.Parameter(values, requires_grad=held.requires_grad)))
        made.whole.data = values
        made.whole.grad = None
        if held.grad is not None:
            made.whole.grad = self._shardings.whole(name, held.grad, self._mesh).clone()
            made.version = version_of(made.whole.grad)
        state = optimizer.state.pop(held, None)
        if state is not None:
            optimizer.state[made.whole] = state
        return made.whole

    def _leave(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parts = {made.whole: made for made in self._made.values()}
        for group in optimizer.param_groups:
            group["params"] = [self._take_back(one, parts.get(one), optimizer) for one in group["params"]]

    def _take_back(
        self, parameter: nn.Parameter, made: _Whole | None, optimizer: torch.optim.Optimizer
    ) -> nn.Parameter:
        if made is None:
            return parameter
        held, whole = made.held, made.whole
        name = self._names[held]
        with torch.no_grad():
            local_shard(held).copy_(self._part(name, held, whole.detach()))
            if held.grad is not None and whole.grad is not None and version_of(whole.grad) != made.version:
                local_shard(held.grad).copy_(self._part(name, held, whole.grad))  # clipped, say
        if whole in optimizer.state:
            optimizer.state[held] = optimizer.state.pop(whole)
        whole.grad = None
        whole.data = whole.data.new_empty(0)
        return held

    def _part(self, name: str, held: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return own_part(self._shardings.part(name, whole, self._mesh), held)


def stepped_whole(optimizers: Iterable[torch.optim.Optimizer]) -> set[nn.Parameter]:
    """Return the parameters for which `optimizers` are given whole tensors, and whose state is whole on every rank."""
    found = set()
    for one in optimizers:
        if any(isinstance(getattr(hook, "__self__", None), WholeTensorSteps) for hook in step_hooks(one)[0].values()):
            found |= {parameter for group in one.param_groups for parameter in group["params"]}
    return found


_Parts = list[list[torch.Tensor]]
"""For each parameter of a trial, the tensors that an optimizer has in its place."""


def _trial(optimizer: torch.optim.Optimizer, divide: Callable[[int, nn.Parameter], Sequence[nn.Parameter]]) -> _Parts:
    """Return small parameters after some steps of a copy of `optimizer`, which has them divided."""
    memo: dict[int, Any] = {}
    parts: _Parts = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        small = [_small(index, original) for index, original in enumerate(originals)]
        memo |= {id(original): made for original, made in zip(originals, small, strict=True)}
        tried = copy.deepcopy(optimizer, memo)
        for own, hooks in zip(step_hooks(tried), step_hooks(optimizer), strict=True):  # which a copy is without
            own.update(hooks)
        places = iter(range(len(small)))
        for group in tried.param_groups:
            divided = [divide(index, small[index]) for index in (next(places) for _ in group["params"])]
            parts += [[*entry] for entry in divided]
            group["params"] = [one for entry in divided for one in entry]
        for _ in range(_TRIAL_STEPS):
            tried.step()
    return parts


def _small(index: int, original: nn.Parameter) -> nn.Parameter:
    generator = torch.Generator().manual_seed(index)
    shape = [min(length, _TRIAL_LENGTH) for length in original.shape]
    made = nn.Parameter(torch.randn(shape, generator=generator).to(original.device, original.dtype))
    made.requires_grad_(original.requires_grad)
    made.grad = torch.randn(shape, generator=generator).to(original.device, original.dtype)
    return made


def _in_blocks(_: int, parameter: nn.Parameter) -> Sequence[nn.Parameter]:
    gradients = [None] * 2**parameter.ndim if parameter.grad is None else _blocks(parameter.grad)
    blocks = []
    for values, gradient in zip(_blocks(parameter.detach()), gradients, strict=False):
        block = nn.Parameter(values.clone(), requires_grad=parameter.requires_grad)
        block.grad = None if gradient is None else gradient.clone()
        blocks.append(block)
    return blocks


def _blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return `tensor` halved along every dimension, since a plan may cut it along any."""
    blocks: Sequence[torch.Tensor] = [tensor]
    for dim in range(tensor.ndim):
        blocks = [half for block in blocks for half in block.chunk(2, dim)]
    return blocks


def _agree(expected: _Parts, found: _Parts) -> bool:
    for one, other in zip(expected, found, strict=True):
        whole = one if len(one) == len(other) else _blocks(one[0])
        if not all(
            torch.allclose(first.float(), second.float(), rtol=_TOLERANCE, atol=_TOLERANCE)
            for first, second in zip(whole, other, strict=True)
        ):
            return False
    return True
