"""Several optimizers and schedulers of one model, as one of each: each has some of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan


class RankParameters(list[nn.Parameter]):
    """This rank's parameters, as an optimizer takes them, which know their names in the whole model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters.values())
        self._names = tuple(parameters)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their names, the same under every plan: for groups of an optimizer."""
        return list(zip(self._names, self, strict=True))


OptimizerFactory = Callable[[RankParameters], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
SchedulerFactory = Callable[[Any], LRScheduler | Sequence[LRScheduler]]
"""Is called with what the factory of the optimizer returned."""


class SeveralOptimizers(torch.optim.Optimizer):
    """Steps `members` one after the other. Groups and states are theirs; a parameter is in one of them alone."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        # Not the parent's, which makes groups of its own.
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self._owners: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for member in self.members:
            held = [parameter for group in member.param_groups for parameter in group["params"]]
            if any(parameter in self._owners for parameter in held):
                raise UsageError(
                    f"a parameter is in two optimizers, the second of which is {type(member).__name__}",
                    hint="give every parameter to one optimizer",
                )
            self._owners |= dict.fromkeys(held, member)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch annotates an attribute
        """The groups of all members, in their order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]  # torch annotates an attribute
        """The state that the members keep, by parameter."""
        return _States(self.members, self._owners)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the loss is the engine's
        """Step every member; a `closure` is not called."""
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of every member."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the members, by their places."""
        return {str(place): member.state_dict() for place, member in enumerate(self.members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for place, member in enumerate(self.members):
            member.load_state_dict(state_dict[str(place)])

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call `hook` before the first member's step."""
        return self.members[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call `hook` behind the last member's step."""
        return self.members[-1].register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"SeveralOptimizers{self.members}"


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers by parameter, each kept by the one that has the parameter."""

    def __init__(
        self, members: Sequence[torch.optim.Optimizer], owners: Mapping[torch.Tensor, torch.optim.Optimizer]
    ) -> None:
        self._members = members
        self._owners = owners

    def __getitem__(self, parameter: Any) -> Any:
        if parameter not in self:
            raise KeyError(parameter)
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self._owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._owners[parameter].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._owners and parameter in self._owners[parameter].state  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(member.state for member in self._members)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


class SeveralSchedulers(LRScheduler):
    """Steps `members` one after the other."""

    def __init__(self, members: Sequence[LRScheduler]) -> None:
        # Not the parent's, which makes a first step.
        self.members = tuple(members)

    def step(self, epoch: int | None = None) -> None:
        """Step every member."""
        for member in self.members:
            member.step()

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of all groups of all members."""
        return [rate for member in self.members for rate in member.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the members, by their places."""
        return {str(place): member.state_dict() for place, member in enumerate(self.members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; what a checkpoint leaves out stays. Raises `ValueError` for others."""
        own = self.state_dict()
        if state_dict.keys() != own.keys():
            raise ValueError(f"{len(state_dict)} schedulers were saved, and there are {len(own)}")
        for place, member in enumerate(self.members):
            saved, held = state_dict[str(place)], own[str(place)]
            if not isinstance(saved, dict) or not saved.keys() <= held.keys():
                raise ValueError(f"scheduler {place} was another one")
            member.load_state_dict(held | saved)


def optimizers_in(made: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `made` consists of: a list, several as one, or a single one."""
    if isinstance(made, SeveralOptimizers):
        return [*made.members]
    return [*made] if isinstance(made, (list, tuple)) else [made]


def as_one_optimizer(made: Any) -> torch.optim.Optimizer:
    """Return what a factory made as one optimizer; raise `UsageError` where it made none or other things."""
    members = optimizers_in(made)
    kinds = [list if isinstance(member, RankParameters) else type(member) for member in members]
    wrong = [kind.__name__ for kind in kinds if not issubclass(kind, torch.optim.Optimizer)]
    if wrong or not members:
        raise UsageError(
            f"optimizer= returned {wrong[0] if wrong else 'an empty list'}",
            hint="return an optimizer of the parameters, or a list of optimizers that each have some",
        )
    return members[0] if len(members) == 1 else SeveralOptimizers(members)


def as_one_scheduler(made: Any, check: Callable[[Any], None]) -> LRScheduler | None:
    """Return what a factory made as one scheduler, None for none; `check` is called with each."""
    members = [*made] if isinstance(made, (list, tuple)) else [made]
    for member in members:
        check(member)
    if len(members) > 1:
        return SeveralSchedulers(members)
    only: LRScheduler | None = members[0] if members else None
    return only


def check_parameters(made: Any, held: RankParameters, plan: ParallelPlan) -> None:
    """Raise `UsageError` where an optimizer has parameters that it was not given, under a plan of several ranks.

    Nobody sums their gradients over ranks, and under ZeRO and tp those of the model before the plan are trained by
    nobody.
    """
    known = {id(parameter) for parameter in held}
    trained = (one for group in made.param_groups for one in group["params"])
    foreign = next((one for one in trained if id(one) not in known), None)
    if foreign is not None and plan.world_size > 1:
        raise UsageError(
            f"the optimizer has a parameter of shape {list(foreign.shape)} that is not among those it was given: "
            f"'{plan.describe()}' neither sums its gradient over ranks nor saves it",
            hint="make the optimizer from the parameters that job.prepare calls it with; make trained parameters of a "
            "loss part of the model",
        )
