"""The model itself, as one process has it, beside a rank's part of it: whole, or with one block at a time.

A copy of a large model does not fit beside the part. Its blocks are then empty: each gets its weights from the ranks
that hold them when it runs, in the forward pass and again in the backward pass, and lets them go.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.model.trace import stack_names
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.saving import Reader, load_whole_model
from paraplan.runtime.checks.trials import gathered_numbers
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.recompute.blocks import recompute_in_backward
from paraplan.runtime.structure.blocks import modules_around
from paraplan.runtime.torch_private import version_of

_LOGGER = logging.getLogger(__name__)

Verify = Literal["auto", "full", "off"]
Whole = Callable[[str, torch.Tensor], torch.Tensor]
Compare = Callable[[str, torch.Tensor | None], None]

_SHARE_OF_MEMORY = 0.25
_COPIES = 3  # of the weights: the reference, its gradients, and those of the plan


@dataclass
class Reference:
    """A copy of the model. `streamed` names its blocks that have no weights until they run, with their parameters."""

    model: nn.Module
    streamed: dict[str, list[str]] = field(default_factory=dict)


def reference_of(
    model: nn.Module, plan: ParallelPlan, mesh: Mesh, verify: Verify, *, recomputes: bool = False
) -> Reference | None:
    """Return a copy of the whole `model` on this rank's device to check the plan by; None where none is to be kept.

    That is where the plan changes nothing and, unless all is to be verified, where not even the copy without its blocks
    and one of them would fit, with gradients, into a quarter of the memory that is free. All ranks agree.
    """
    changes = changes_the_model(plan, recomputes=recomputes)
    if verify == "off" or plan.devices_per_process > 1 or (verify == "auto" and not changes):
        return None
    has_values = not any(parameter.is_meta for parameter in model.parameters())
    budget_bytes = _SHARE_OF_MEMORY * _free_bytes(mesh)
    whole_bytes = sum(map(_size_bytes, model.parameters()))
    is_whole = has_values and whole_bytes * _COPIES <= budget_bytes
    units = _streamed_units(model)
    fits = is_whole or (bool(units) and _resident_bytes(model, units) * _COPIES <= budget_bytes)
    if verify == "full" and not fits:
        fits, is_whole = True, has_values
    is_whole = all(row[0] for row in gathered_numbers([float(is_whole)], mesh))
    made = _copied(model, {} if is_whole else units, mesh) if fits else None
    if all(row[0] for row in gathered_numbers([float(made is not None)], mesh)):
        return made
    if mesh.world.rank == 0:
        reason = "the model cannot be copied" if fits else "no copy of the model fits, even with one block at a time"
        _LOGGER.warning("'%s' is not checked against one process: %s", plan.describe(), reason)
    return None


def changes_the_model(plan: ParallelPlan, *, recomputes: bool = False) -> bool:
    """Whether a plan does more to a model than to copy it; `recomputes`: blocks are run again whatever it says."""
    return recomputes or plan.tp * plan.pp * plan.cp > 1 or plan.zero_stage > 0 or plan.recompute != "none"


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _free_bytes(mesh: Mesh) -> float:
    device = mesh.world.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free)
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return float(pages * os.sysconf("SC_PAGE_SIZE")) / mesh.world.size


def _streamed_units(model: nn.Module) -> dict[str, list[str]]:
    """Return the outermost repeated blocks of `model` with the names of the parameters that are theirs alone."""
    names = [f"{path}.{name}".lstrip(".") for path, one in model.named_modules() for name in stack_names(one)]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    units = {name: model.get_submodule(name) for name in outermost}
    holders = Counter(id(one) for unit in units.values() for one in set(unit.parameters()))
    around = modules_around(model, [*units.values()])
    holders.update(id(one) for module in around for one in module.parameters(recurse=False))
    own = {
        name: [f"{name}.{inner}" for inner, one in unit.named_parameters() if holders[id(one)] == 1]
        for name, unit in units.items()
    }
    return {name: parameters for name, parameters in own.items() if parameters}


def _resident_bytes(model: nn.Module, units: dict[str, list[str]]) -> int:
    sizes = {name: sum(_size_bytes(model.get_parameter(one)) for one in names) for name, names in units.items()}
    total = sum(map(_size_bytes, model.parameters()))
    return total - sum(sizes.values()) + max(sizes.values(), default=0)


def _copied(model: nn.Module, units: dict[str, list[str]], mesh: Mesh) -> Reference | None:
    device = mesh.world.device
    if any(buffer.is_meta for buffer in model.buffers()):
        return None
    # Where blocks are streamed, all other weights are fetched too: nothing is kept until then.
    held = {id(one): _placeholder(one, device) for one in model.parameters()} if units else {}
    try:
        made = copy.deepcopy(model, held)
    except Exception:  # the user's modules, of which some cannot be copied: nothing is checked then
        return None
    return Reference(made.to(device), units)


def _placeholder(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter of the same shape that takes no memory; who computes with it gets no number."""
    value = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    nothing = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    return nn.Parameter(nothing, requires_grad=parameter.requires_grad)


class Abandoned(Exception):  # noqa: N818  # no error: another rank could not go on
    """Another rank has given up running its reference."""


class RunningReference:
    """A reference that runs rows of a batch, and compares its gradients with those that `compare` is told of.

    `whole` gathers what this rank's `part` holds a part of. All ranks call every method together.
    """

    def __init__(self, reference: Reference, part: RankPart, mesh: Mesh, whole: Whole) -> None:
        self.model = reference.model
        self._streamed = reference.streamed
        self._part = part
        self._mesh = mesh
        self._whole = whole
        self._versions = self._held_versions()
        self._sources: dict[str, int] = {}
        self._compare: Compare | None = None
        self._terms: list[torch.Tensor] = []
        self._settled: set[str] = set()
        self._filled_now: list[tuple[nn.Parameter, torch.Tensor]] = []

    @property
    def is_streamed(self) -> bool:
        """Whether blocks get their weights from the part: then it runs once."""
        return bool(self._streamed)

    def reload(self, reader: Reader) -> None:
        """Bring the reference to the state that `reader` has, which the part has been brought to."""
        if not self._streamed:
            load_whole_model(reader, self.model)
        self._versions = self._held_versions()

    def release(self) -> None:
        """Give back the memory of the model. Its hooks hold it in a cycle, which Python looks for some steps later."""
        self._terms.clear()
        for held in (*self.model.parameters(), *self.model.buffers()):
            held.grad = None
            held.data = held.data.new_empty(0)

    def _held_versions(self) -> list[tuple[int, int]]:
        """Return what writing counts up: of shards the tensor that code sees, and what this rank holds of it."""
        return [(version_of(one), version_of(local_part(one))) for one in self._part.parameters.values()]

    def is_current(self) -> bool:
        """Whether nobody has changed the weights since the reference was made, on any rank."""
        if self._streamed:
            return True
        changed = float(self._versions != self._held_versions())
        return not any(row[0] for row in gathered_numbers([changed], self._mesh))

    def run(self, terms: Callable[[nn.Module], Iterator[torch.Tensor]]) -> bool:
        """Run the forward passes of `terms(model)`, the losses to add up; return whether it went well on every rank."""
        self.model.zero_grad()
        self._terms = []
        with self._going_on() as went:
            if self._streamed:
                self._fetch_residents()
            for term in terms(self.model):
                if self._streamed:
                    self._terms.append(term)
                else:
                    term.backward()  # type: ignore[no-untyped-call]
        return went[0]

    def compare(self, with_part: Compare) -> bool:
        """Call `with_part` once with the name and the gradient of each parameter; return whether it went well."""
        self._compare = with_part
        with self._going_on() as went:
            if self._streamed:
                torch.stack([term.reshape(()) for term in self._terms]).sum().backward()  # type: ignore[no-untyped-call]
            self._settle(is_end=True)
        return went[0]

    @contextmanager
    def _going_on(self) -> Iterator[list[bool]]:
        """Have the first item of the list say afterwards whether no rank failed in this context."""
        went = [False]
        try:
            yield went
        except Abandoned:
            return
        except Exception:  # a loss for split outputs alone, a model for other batches, too little memory
            self._is_going_on(False)
            return
        went[0] = self._is_going_on(True)

    def _is_going_on(self, mine: bool) -> bool:
        return all(row[0] for row in gathered_numbers([float(mine)], self._mesh))

    def _fetch_residents(self) -> None:
        self._sources = self._stages_of_parameters()
        streamed = {name for names in self._streamed.values() for name in names}
        for name, parameter in self.model.named_parameters():
            if name not in streamed:
                parameter.data = self._fetched(name, parameter)
        for unit, names in self._streamed.items():
            block = self.model.get_submodule(unit)
            block.forward = partial(
                self._filled, block.forward, {name: self.model.get_parameter(name) for name in names}
            )
            recompute_in_backward(block)

    def _filled(self, inner: Callable[..., Any], parameters: dict[str, nn.Parameter], *args: Any, **kwargs: Any) -> Any:
        """Run a block with its weights, for the backward pass until the next block runs again: what ran later is done.

        What torch saves of trained weights holds their values, and of frozen ones the parameter.
        """
        if not self._is_going_on(True):
            raise Abandoned
        if self._compare is not None:
            self._settle()
        self._empty()
        self._filled_now = [(parameter, parameter.data) for parameter in parameters.values()]
        try:
            for name, parameter in parameters.items():
                parameter.data = self._fetched(name, parameter)
            return inner(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()  # it holds what was cast of the weights
            if self._compare is None:
                self._empty()

    def _empty(self) -> None:
        for parameter, nothing in self._filled_now:
            parameter.data = nothing
        self._filled_now.clear()

    def _stages_of_parameters(self) -> dict[str, int]:
        """Return the first pipeline stage that holds each parameter."""
        names = [name for name, _ in self.model.named_parameters()]
        found: dict[str, int] = {}
        for rank, row in enumerate(
            gathered_numbers([float(one in self._part.parameters) for one in names], self._mesh)
        ):
            for name, is_held in zip(names, row, strict=True):
                stage = self._mesh.grid.coordinates(rank)["pp"]
                if is_held:
                    found[name] = min(stage, found.get(name, stage))
        return found

    def _fetched(self, name: str, like: torch.Tensor) -> torch.Tensor:
        device = self._mesh.world.device
        source, group = self._sources.get(name), self._mesh.group("pp")
        if source is None:  # no rank holds it: nothing reads it
            return torch.zeros(like.shape, dtype=like.dtype, device=device)
        held = self._part.parameters.get(name)
        value = None if held is None else self._whole(name, held.detach()).to(device).reshape(like.shape)
        if group is None:
            assert value is not None
            return value
        sent = torch.empty(like.shape, dtype=like.dtype, device=device) if value is None else value.contiguous()
        dist.broadcast(sent, group=group, group_src=source)
        return sent

    def _settle(self, *, is_end: bool = False) -> None:
        """Compare the gradients that are there, and let them go; at the end those of all other parameters too."""
        known = dict(self.model.named_parameters())
        for name in [*known, *(self._part.parameters.keys() - known.keys() if is_end else ())]:
            gradient = known[name].grad if name in known else None
            if name in self._settled or (gradient is None and not is_end):
                continue
            self._settled.add(name)
            if self._compare is not None and name:
                self._compare(name, gradient)
            if name in known:
                known[name].grad = None


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
