"""The model itself, as one process has it, beside a rank's part of it: empty until it runs, then freed again.

Its weights come from the ranks that hold them: all at once where they fit beside the part, else those of one block at
a time, in the forward pass and again in the backward pass.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from paraplan.model.trace import stack_names
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks.changed_attributes import ChangedAttributes
from paraplan.runtime.checks.trials import anywhere
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.recompute.blocks import recompute_in_backward
from paraplan.runtime.structure.blocks import modules_around
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.structure.snapshots import MODULE_FIELDS
from paraplan.runtime.structure.weights import is_quantized

_LOGGER = logging.getLogger(__name__)

Verify = Literal["auto", "full", "off"]
Whole = Callable[[str, torch.Tensor], torch.Tensor]
Compare = Callable[[str, torch.Tensor | None], None]

_SHARE_OF_MEMORY = 0.25
_COPIES = 3  # of the weights: the reference, its gradients, and those of the plan


@dataclass
class Reference:
    """A copy of the model without its weights. `streamed` names its blocks that get them one by one, with theirs."""

    model: nn.Module
    streamed: dict[str, list[str]] = field(default_factory=dict)


def reference_of(model: nn.Module, mesh: Mesh, verify: Verify, *, recomputes: bool = False) -> Reference | None:
    """Return a copy of `model` without weights on this rank's device to check the plan by; None where none is kept.

    That is where the plan changes nothing and, unless all is to be verified, where not even the copy without its blocks
    and one of them would fit, with gradients, into a quarter of the memory that is free. All ranks agree.
    """
    plan = mesh.plan
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
    is_whole = not anywhere(not is_whole, mesh)
    made = _copied(model, {} if is_whole else units, mesh) if fits else None
    if not anywhere(made is None, mesh):
        return made
    if mesh.world.rank == 0:
        reason = "the model cannot be copied" if fits else "no copy of the model fits, even with one block at a time"
        _LOGGER.warning("'%s' is not checked against one process: %s", plan.describe(), reason)
    return None


def changes_the_model(plan: ParallelPlan, *, recomputes: bool = False) -> bool:
    """Whether a plan does more to a model than to copy it; `recomputes`: blocks are run again whatever it says."""
    return recomputes or plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.zero_stage > 0 or plan.recompute != "none"


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
    # Quantized weights are not trained, and are not put together from what ranks hold: they are copied.
    held = {id(one): _placeholder(one, device) for one in model.parameters() if not is_quantized(one)}
    try:
        made = copy_of(model, held)
    except Exception:  # the user's modules, of which some cannot be copied: nothing is checked then
        return None
    return Reference(made.to(device), units)


def _placeholder(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter of the same shape that takes no memory; who computes with it gets no number."""
    value = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    nothing = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    return nn.Parameter(nothing, requires_grad=parameter.requires_grad)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {key: one for key, one in vars(module).items() if key not in MODULE_FIELDS and key != "forward"}


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
        self._attributes = ChangedAttributes(part.model or part.module)
        self._before: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, int] = {}
        self._compare: Compare | None = None
        self._terms: list[torch.Tensor] = []
        self._settled: set[str] = set()
        self._filled_now: list[tuple[nn.Parameter, torch.Tensor]] = []
        streamed = {name for names in self._streamed.values() for name in names}
        self._residents = {
            name: (one, one.data)
            for name, one in self.model.named_parameters()
            if name not in streamed and not is_quantized(one)
        }
        filled = weakref.WeakMethod(self._filled)  # no circle holds the model

        def fill(*given: Any, **options: Any) -> Any:
            run = filled()
            assert run is not None
            return run(*given, **options)

        for unit, names in self._streamed.items():
            block = self.model.get_submodule(unit)
            own = {name: self.model.get_parameter(name) for name in names}
            set_forward(block, partial(fill, block.forward, own))
            recompute_in_backward(block)

    @property
    def is_streamed(self) -> bool:
        """Whether blocks get their weights one by one."""
        return bool(self._streamed)

    def release(self) -> None:
        """Let go the weights, and what the last run has kept."""
        self._terms.clear()
        self._settled.clear()
        self._compare = None
        self._before.clear()
        self._empty()
        for parameter, nothing in self._residents.values():
            parameter.data = nothing
        self.model.zero_grad()

    def run(self, terms: Callable[[nn.Module], Iterator[torch.Tensor]], *, begin: Callable[[], None]) -> bool:
        """Run the forward passes of `terms(model)`, the losses to add up; return whether it went well on every rank.

        `begin` is called once weights are there, but for those of blocks that come one by one.
        """
        self.model.zero_grad()
        self._terms = []
        with self._going_on() as went:
            self._fetch_residents()
            begin()
            for term in terms(self.model):
                if self._streamed:
                    self._terms.append(term)
                else:
                    term.backward()  # type: ignore[no-untyped-call]
        return went[0]

    def lend_attributes(self) -> None:
        """Set on the part's modules what a pass has set on those of the model: a loss may read it there."""
        held = dict((self._part.model or self._part.module).named_modules())
        for name, module in self.model.named_modules():
            before = self._before.get(name, {})
            changed = {key: one for key, one in _attributes_of(module).items() if before.get(key, self) is not one}
            if changed and name in held:
                held[name].__dict__.update(changed)

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
        return not anywhere(not mine, self._mesh)

    def _fetch_residents(self) -> None:
        self._attributes.bring(self.model)
        self._before = {name: _attributes_of(module) for name, module in self.model.named_modules()}
        self._sources = self._stages_of(dict(self.model.named_parameters()), self._part.parameters)
        for name, (parameter, _) in self._residents.items():
            parameter.data = self._fetched(name, parameter)
        buffers, held = dict(self.model.named_buffers()), self._part.buffers
        stages = self._stages_of(buffers, held)
        for name, buffer in buffers.items():
            if name in stages:
                buffer.copy_(self._from_stage(stages[name], held.get(name), buffer))

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

    def _stages_of(self, known: Mapping[str, object], held: Mapping[str, object]) -> dict[str, int]:
        """Return the first pipeline stage that holds each of `known`; `held` are those of this rank."""
        found: dict[str, int] = {}
        for rank, row in enumerate(gathered_numbers([float(one in held) for one in known], self._mesh.world)):
            for name, is_held in zip(known, row, strict=True):
                stage = self._mesh.grid.coordinates(rank)["pp"]
                if is_held:
                    found[name] = min(stage, found.get(name, stage))
        return found

    def _fetched(self, name: str, like: torch.Tensor) -> torch.Tensor:
        held = self._part.parameters.get(name)
        source = self._sources.get(name)
        if source is None:  # no rank holds it: nothing reads it
            return torch.zeros(like.shape, dtype=like.dtype, device=self._mesh.world.device)
        return self._from_stage(source, None if held is None else self._whole(name, held.detach()), like)

    def _from_stage(self, source: int, held: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Return what the ranks of stage `source` hold, in the form of `like`."""
        device, group = self._mesh.world.device, self._mesh.group("pp")
        value = None if held is None else held.detach().to(device).reshape(like.shape)
        if group is None:
            assert value is not None
            return value
        sent = torch.empty(like.shape, dtype=like.dtype, device=device) if value is None else value.contiguous()
        dist.broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, group=group, group_src=source)
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
