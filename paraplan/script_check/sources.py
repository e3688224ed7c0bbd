"""Where the data of a script comes from: what it makes or reads outside of its models, and what a loss takes of that.

Every call of torch that a script makes outside of its models is noted with what it was made of. Where ranks first get
unlike values from alike ones, as from `torch.randint` of a rank's own seed, rows taken out of a data set, or a data
loader, there one process can be given the batches of all ranks; the script computes the rest from them: targets, masks
and counts too.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paraplan.script_check.batches import MOST_COPIED, print_of, tensors_in, with_tensors
from paraplan.script_check.copies import hand_on, is_given, use
from paraplan.script_check.readings import NOWHERE, Place, Reading, Replay
from paraplan.script_check.records import SourceRecord
from paraplan.script_check.stillness import without_dropout
from paraplan.script_check.torch_private import is_transformed, untransformed

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_MARK = "_paraplan_reading"
_COMPUTED = "_paraplan_computed"
"""Mark of tensors that a script computes of its models' outputs without gradients: one process does so of its own."""
_SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "dsplit", "vsplit", "unbind")
"""Calls whose results are parts, of which a rank may take its own."""
_TAKING = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__")
"""Calls that give numbers which are no tensors."""
_DRAW = re.compile(r"rand\w*|(log_)?normal_?|bernoulli_?|uniform_|exponential_|multinomial|poisson")
"""Names of calls that draw numbers: what they are given says how many, or how likely, and not which."""

DRAWN = "drawn at "
"""So begin the places inside of models where random numbers are drawn."""


@dataclass
class Sources:
    """The inputs at each place of the script, in order, while gradients were recorded."""

    readings: dict[str, list[Reading]] = field(default_factory=lambda: defaultdict(list))
    replay: Replay | None = None
    num_steps: int = 0
    """Steps of optimizers that are done."""
    taken: dict[Place, None] = field(default_factory=dict)
    """Where that was read of which the script has taken numbers."""
    gathers_rows: bool = False
    """Whether ranks exchange what they read."""
    has_dropout: bool = False
    """Whether a model's call asked for dropout, and was made without."""
    _depth: int = 0
    _model_depth: int = 0
    _pid: int = field(default_factory=os.getpid)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While a model, an optimizer or a loader is at work: what they compute is nothing that the script reads."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def inside_model(self) -> Iterator[None]:
        """While a model, or a pass back through it, is at work: what it draws is noted."""
        self._model_depth += 1
        try:
            with self.inside():
                yield
        finally:
            self._model_depth -= 1

    @property
    def is_of_model(self) -> bool:
        """Whether a call is one of a model in training, in the process that is checked."""
        return self._model_depth > 0 and torch.is_grad_enabled() and os.getpid() == self._pid

    @property
    def is_of_script(self) -> bool:
        """Whether a call is the script's own, in the process that is checked."""
        return self._depth == 0 and os.getpid() == self._pid and not is_transformed()

    @property
    def is_watching(self) -> bool:
        """Whether a call is the script's own, in the process that is checked, and in a training step."""
        return self.is_of_script and torch.is_grad_enabled()

    def read(self, name: str, value: Any, made_of: Sequence[Reading] = (), *, is_end: bool = False) -> Any:
        """Note `value` as what `name` gave now; return it, or what is to be read in its place."""
        place = (name, len(self.readings[name]))
        if self.replay is not None:
            value = self.replay.at(place, value)
        tensors = list(tensors_in(value))
        is_small = sum(tensor.numel() for _, tensor in tensors) <= MOST_COPIED
        with self.inside():
            copies = [(key, tensor.detach().clone()) for key, tensor in tensors] if is_small else []
            digest = print_of(tensors)
        reading = Reading(
            place, copies, tuple(made_of), digest, is_end=is_end, num_steps=self.num_steps, num_parts=len(tensors)
        )
        self.readings[name].append(reading)
        for _, tensor in tensors:
            setattr(tensor, _MARK, reading)
        return value

    def read_in_place(self, name: str, tensor: torch.Tensor, made_of: Sequence[Reading] = ()) -> torch.Tensor:
        """Note the value that `tensor` has been given; let it have what is to be read in its place. Return it."""
        read = self.read(name, tensor, made_of)
        if read is not tensor:
            tensor.data = read  # which may have the rows of more ranks
            setattr(tensor, _MARK, getattr(read, _MARK))
        return tensor

    def link(self, given: Any, result: Any) -> bool:
        """Note that `result` is made of what is `given`, where that was read; return whether it was."""
        made_of = marks_of(tensor for _, tensor in tensors_in(given))
        _link([tensor for _, tensor in tensors_in(result) if is_data(tensor)], made_of)
        return bool(made_of)

    def draw(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Note the random numbers that a model draws; return those that it is to have."""
        name = f"{DRAWN}{name}"
        place = (name, len(self.readings[name]))
        if self.replay is not None:
            value = self.replay.drawn(place, value)
        copies = [("", value.detach().clone())] if value.numel() <= MOST_COPIED else []
        self.readings[name].append(Reading(place, copies, (), print_of([("", value)]), True, num_steps=self.num_steps))
        return value

    def use(self, value: Any, name: str) -> Any:
        """Note that a model or a loss takes `value`; what the script read nowhere is read here. Return what to take."""
        taken, is_replaced = [], False
        for reading in use([tensor for _, tensor in tensors_in(value)]):
            reading.use()
        for number, (_, tensor) in enumerate(tensors_in(value)):
            if not is_sample(tensor):
                taken.append(tensor)
                continue
            reading, read = getattr(tensor, _MARK, None), tensor
            if reading is None and _is_computed(tensor):
                taken.append(tensor)
                continue
            if reading is None:
                read = self.read(f"{name} {number}", tensor)
                reading = getattr(read, _MARK)
                is_replaced = is_replaced or read is not tensor
            reading.use()
            taken.append(read)
        return with_tensors(value, iter(taken)) if is_replaced else value

    def use_transformed(self, value: Any) -> None:
        """Note that `value` is used, where `torch.func.vmap` or another of its kind computes with it."""
        for reading in marks_of(untransformed(tensor) for _, tensor in tensors_in(value)) if is_transformed() else ():
            reading.use()

    def pick(self, value: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Note those of `tensors`, which `value` holds, that are parts of a split, as they are first taken out."""
        taken = []
        for tensor in tensors:
            reading: Reading | None = getattr(tensor, _MARK, None)
            if reading is not None and reading.num_parts > 1 and reading.at[0].rpartition(" ")[2] in _SPLITS:
                taken.append(self.read(f"{place_of_caller()} part", tensor, [reading]))
            else:
                taken.append(tensor)
        is_replaced = any(one is not tensor for one, tensor in zip(taken, tensors, strict=True))
        return with_tensors(value, iter(taken)) if is_replaced else value

    def end_step(self) -> None:
        """Forget copies of what nothing has taken for two steps."""
        self.num_steps += 1
        for reading in (one for readings in self.readings.values() for one in readings):
            if not reading.is_used and reading.num_steps < self.num_steps - 1:
                reading.tensors = []

    def records(self) -> tuple[tuple[SourceRecord, ...], dict[str, torch.Tensor]]:
        """Return what was read at places of which something is used, or numbers taken, and its tensors by key."""
        found, tensors = [], {}
        taken = {place for place, _ in self.taken}
        for number, (place, readings) in enumerate(self.readings.items()):
            if place not in taken and not any(reading.is_used for reading in readings):
                continue
            for time, reading in enumerate(readings):
                for leaf, (name, tensor) in enumerate(reading.tensors if reading.is_used else ()):
                    tensors[f"source/{number}/{time}/{leaf}/{name}"] = tensor
            found.append(
                SourceRecord(
                    number=number,
                    place=place,
                    prints=tuple(reading.print for reading in readings),
                    is_used=tuple(reading.is_used for reading in readings),
                    is_end=tuple(reading.is_end for reading in readings),
                    made_of=tuple(tuple(reading.places()) for reading in readings),
                )
            )
        return tuple(found), tensors


def marks_of(tensors: Iterable[torch.Tensor]) -> list[Reading]:
    """Return the readings that tensors are, or are made of."""
    marks = [getattr(tensor, _MARK, None) for tensor in tensors]
    return list({id(mark): mark for mark in marks if mark is not None}.values())


def is_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor can hold samples: it has dimensions, and is nothing that is trained, or that ranks share."""
    return tensor.ndim > 0 and not tensor.requires_grad and _is_plain(tensor)


def is_random_kind(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a type of which models draw numbers, or masks."""
    return tensor.is_floating_point() or tensor.dtype == torch.bool


def _is_array(data: Any = None) -> bool:
    return type(data).__module__ == "numpy" and data.ndim > 0


def is_sample(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds samples, also such by which a loss is derived, as that of a gradient penalty."""
    derived = tensor.requires_grad and tensor.is_leaf and hasattr(tensor, _MARK) and _is_plain(tensor)
    return derived or is_data(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no parameter, DTensor or other kind of its own, and has values in memory."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


class FollowSources(TorchFunctionMode):
    """Sees every call of torch that the script makes outside of its models."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self.sources = sources
        self._is_drawing = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call, and note what it gave."""
        kwargs = kwargs or {}
        sources, name = self.sources, getattr(func, "__name__", "call")
        if sources.is_of_model and not self._is_drawing:
            if _DRAW.fullmatch(name) or (name in ("tensor", "as_tensor") and _is_array(*args[:1])):
                return self._drawn(func, name, args, kwargs)
            args, kwargs, has_dropout = without_dropout(name, args, kwargs)
            sources.has_dropout |= has_dropout
        sources.use_transformed((args, kwargs))
        if not sources.is_of_script or name in ("__get__", "__set__", "__delete__", "backward"):
            return self._got(name, func(*args, **kwargs), args)
        is_training = torch.is_grad_enabled()
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        if is_training and any(map(_is_output, given)):
            args, kwargs = sources.use((args, kwargs), f"{place_of_caller()} {name}")
        if any(map(_is_output, given)) or (any(map(_is_computed, given)) and _DRAW.fullmatch(name) is None):
            return _computed(name, func(*args, **kwargs))
        args, kwargs = sources.pick((args, kwargs), given)
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        hand_on(given, result)
        if any(isinstance(tensor, nn.Parameter) for tensor in given) or "empty" in name:
            return result
        made_of = {id(mark): mark for mark in marks_of(given)}
        if name in _TAKING:
            sources.taken |= dict.fromkeys(Reading(NOWHERE, [], tuple(made_of.values())).places())
        is_draw = _DRAW.fullmatch(name) is not None
        is_of_copy = any(is_given(tensor) and not hasattr(tensor, _MARK) for tensor in given)
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if not is_training and not made_of and not is_of_copy and (is_in_place or not is_draw):
            return result  # as of weights, which are no data
        if is_draw or is_of_copy:
            made_of = {}
        if name == "__iter__":
            return iter([self._noted(item, name, list(made_of.values())) for item in result])
        if given and is_in_place:
            self._noted(given[0], name, list(made_of.values()), is_in_place=True)  # nn.init gives its tensor by name
            return result
        return self._noted(result, name, list(made_of.values()))

    def _got(self, name: str, result: Any, args: tuple[Any, ...]) -> Any:
        """Note what an attribute is made of that is a tensor, as a transpose."""
        if name == "__get__" and self.sources.is_of_script and isinstance(result, torch.Tensor) and is_data(result):
            if any(_is_output(one) or _is_computed(one) for one in args[:1]):
                return _computed(name, result)
            self.sources.link(args[:1], result)
        return result

    def _drawn(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_drawing = True  # on the way back the mode may be entered twice
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_drawing = False
        if not isinstance(result, torch.Tensor) or not _is_plain(result) or not is_random_kind(result):
            return result
        value = self.sources.draw(f"{place_of_caller()} {name}", result)
        if value is not result and name.endswith("_"):
            with torch.no_grad():
                return result.copy_(value)
        return value

    def _noted(self, result: Any, name: str, made_of: Sequence[Reading], *, is_in_place: bool = False) -> Any:
        tensors = [tensor for _, tensor in tensors_in(result)]
        if not isinstance(result, torch.Tensor | tuple | list) or not tensors or not all(map(_is_plain, tensors)):
            return result
        if not any(map(is_data, tensors)):  # numbers are noted with what is made of them
            _link(tensors, made_of)
            return result
        place = f"{place_of_caller()} {name}"
        if is_in_place and isinstance(result, torch.Tensor):
            return self.sources.read_in_place(place, result, made_of)
        return self.sources.read(place, result, made_of)


def _is_output(value: Any) -> bool:
    """Whether a value is of a model that is trained, or a loss: gradients go back through it."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def _is_computed(value: Any) -> bool:
    return hasattr(value, _COMPUTED)


def _computed(name: str, result: Any) -> Any:
    """Mark what the script computes of its models' outputs; return it."""
    for _, tensor in tensors_in(result) if _DRAW.fullmatch(name) is None else ():
        if is_data(tensor):
            setattr(tensor, _COMPUTED, True)
    return result


def _link(tensors: Sequence[torch.Tensor], made_of: Sequence[Reading]) -> None:
    """Note what `tensors` are made of, and not their values."""
    link = Reading(NOWHERE, [], tuple(made_of))
    for tensor in tensors if made_of else ():
        setattr(tensor, _MARK, link)


def place_of_caller() -> str:
    """Return the file, line and instruction that called torch, alike in all processes of a script."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN, "<frozen")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}+{frame.f_lasti}"
