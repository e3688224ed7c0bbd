"""One pipeline stage of a model that nobody rewrote: its own forward runs, with stand-ins for what other stages hold.

Before the stage's first block stands a module that puts in the received hidden state, after its last one a module that
ends the forward pass with it. Other blocks of other stages pass their input on. Modules around the blocks that the
stage does not use are replaced by ones that return zeros of the right shape. So masks, positions and caches are made by
the model itself on every stage, and the names of the stage's parameters are those of the whole model.
Modules stand in, not hooks: recompute runs a block's forward again in the backward pass, when hooks would see another
micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.anatomy import Anatomy
from paraplan.runtime.split.split_tensor import SplitTensor


class StageEndError(Exception):
    """Ends a forward pass after the last block of a stage, with the hidden state; it never leaves the stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("end of the stage")
        self.hidden = hidden


class _StandIn(nn.Module):
    """Stands for a module of another stage; attributes that it lacks are those of `shadow`, that module on meta."""

    def __init__(self, shadow: nn.Module) -> None:
        super().__init__()
        # Not through nn.Module's own setter: the shadow is no part of the stage.
        self.__dict__["shadow"] = shadow

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["shadow"], name)


class PassOn(_StandIn):
    """A block of another stage: returns its hidden state as it came, in the form of a block's output."""

    def __init__(self, shadow: nn.Module, anatomy: Anatomy) -> None:
        super().__init__(shadow)
        self.__dict__["hidden_argument"] = anatomy.hidden_argument
        self.__dict__["num_outputs"] = anatomy.num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state."""
        return self.output(self.hidden_of(args, kwargs))

    def hidden_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden state among the arguments of a block."""
        where = self.__dict__["hidden_argument"]
        return args[where] if isinstance(where, int) else kwargs[where]

    def output(self, hidden: Any) -> Any:
        """Return `hidden` as a block would."""
        num_outputs = self.__dict__["num_outputs"]
        return hidden if num_outputs is None else (hidden, *[None] * (num_outputs - 1))


class Inject(PassOn):
    """The block before a stage: returns what the stage received."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden state, whatever comes in."""
        return self.output(self.__dict__["received"])

    def hold(self, received: torch.Tensor | None) -> None:
        """Keep `received` for the next forward pass; None lets it go."""
        self.__dict__["received"] = received


class Exit(PassOn):
    """The block after a stage: ends the forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageEndError` with the hidden state."""
        raise StageEndError(self.hidden_of(args, kwargs))


class Phantom(_StandIn):
    """A module around the blocks whose output nothing in this stage depends on: returns zeros of the right shape."""

    def __init__(self, shadow: nn.Module, anatomy: Anatomy, device: torch.device) -> None:
        super().__init__(shadow)
        self.__dict__["own_dtype"] = anatomy.own_dtype
        self.__dict__["zeros_device"] = device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros that take no memory, in the shape of the module's output."""

        def meta(leaf: Any) -> Any:
            return leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf

        def zeros(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if isinstance(leaf, SplitTensor):  # this rank's tokens, under context parallelism
                return SplitTensor(zeros(leaf.local), leaf.cut, leaf.group, leaf.source)
            dtype, device = self.__dict__["own_dtype"](leaf.dtype), self.__dict__["zeros_device"]
            return torch.zeros((), dtype=dtype, device=device).expand(leaf.shape)

        with torch.no_grad():
            output = self.__dict__["shadow"](*pytree.tree_map(meta, args), **pytree.tree_map(meta, kwargs))
        return pytree.tree_map(zeros, output)


@dataclass(frozen=True)
class CutStage:
    """What `cut_stage` left: where the received hidden state goes in (None for the first stage), and the parameters.

    `names` maps the name of a parameter in the whole model to its name in the stage; they differ where one of several
    tied modules stayed.
    """

    inject: Inject | None
    names: dict[str, str]


def cut_stage(model: nn.Module, anatomy: Anatomy, *, start: int, end: int, device: torch.device) -> CutStage:
    """Leave in `model` what a stage with blocks `start`..`end` - 1 uses.

    Raises `UnsupportedPlanError` where the stage uses a parameter that lies inside a block of another stage.
    """
    whole = dict(model.named_parameters())
    needed = {id(whole[name]): name for name in sorted(anatomy.used_by(start, end))}
    inject = _replace_blocks(model, anatomy, start=start, end=end)
    _replace_surroundings(model, anatomy, set(needed), device)
    _drop_leftovers(model, set(needed), device)
    kept = {needed[id(parameter)]: name for name, parameter in model.named_parameters()}
    missing = sorted(set(needed.values()) - set(kept))
    if missing:
        raise UnsupportedPlanError(
            f"blocks {start} to {end - 1} use {missing[0]}, which lies in a block of another stage",
            hint="use pp=1 for this model",
        )
    return CutStage(inject=inject, names=kept)


def _replace_blocks(model: nn.Module, anatomy: Anatomy, *, start: int, end: int) -> Inject | None:
    inject = None
    for index, name in enumerate(anatomy.stack.names):
        if start <= index < end:
            continue
        shadow = anatomy.shadow.get_submodule(name)
        stand_in = PassOn(shadow, anatomy)
        if index == start - 1:
            stand_in = inject = Inject(shadow, anatomy)
        elif index == end:
            stand_in = Exit(shadow, anatomy)
        model.set_submodule(name, stand_in)
    return inject


def _replace_surroundings(model: nn.Module, anatomy: Anatomy, needed: set[int], device: torch.device) -> None:
    """Replace the modules outside the blocks that hold parameters, and none that the stage needs."""
    blocks = tuple(f"{name}." for name in anatomy.stack.names)
    replaced: tuple[str, ...] = ()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        holds_blocks = any(block.startswith(f"{name}.") or not name for block in blocks)
        if holds_blocks or f"{name}.".startswith(blocks + replaced):
            continue
        has_own = any(True for _ in module.parameters(recurse=False))
        if has_own and not any(id(parameter) in needed for parameter in module.parameters()):
            model.set_submodule(name, Phantom(anatomy.shadow.get_submodule(name), anatomy, device))
            replaced += (f"{name}.",)


def _drop_leftovers(model: nn.Module, needed: set[int], device: torch.device) -> None:
    """Put zeros without memory in place of parameters that stand beside needed ones, and that the stage does not need.

    They are plain attributes, so that no optimizer and no replica sees them; what is computed from them goes nowhere.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in needed:
                zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                delattr(module, name)
                setattr(module, name, zeros)
