"""Reading a state of a training, from a checkpoint or a copy in memory, into the parts of ranks under any plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paraplan.runtime.checkpoints.boxes import DAMAGED, Box, CheckpointError, Description, Place, boxes_of
from paraplan.runtime.checkpoints.entries import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    OPTIONS,
    PROGRESS,
    CheckpointSource,
    Options,
    Progress,
    check_kinds,
    empty_states,
    nested,
    read_options,
    read_progress,
    take_options,
    taking,
)
from paraplan.runtime.checkpoints.index import INDEX_NAME, OLD_INDEX_NAME, file_of, read_index
from paraplan.runtime.checkpoints.random_numbers import check_random, random_states, reseed, restore_random
from paraplan.runtime.checkpoints.tensor_files import DTYPES, TensorFile, opened
from paraplan.runtime.exchange import gather_json
from paraplan.runtime.world import World


def find_whole(folder: Path) -> Path | None:
    """Return where the last whole checkpoint of `folder` is; None where there is none."""
    places = (folder, beside(folder, "previous"))
    return next((one for one in places if any((one / name).exists() for name in (INDEX_NAME, OLD_INDEX_NAME))), None)


def load_checkpoint(folder: Path, source: CheckpointSource) -> int:
    """Read a checkpoint into this rank's parts; return its number of steps.

    Every rank calls it. Raises `CheckpointError` where there is none, or where it is of another model.
    """
    wait_for_all()  # one that rank 0 still moves
    return load_from(FolderReader(folder), source)


class Reader(Protocol):
    """Where a state is read from: `name` in messages, the `tensors` that there are, and the `values` of JSON."""

    @property
    def name(self) -> str:
        """The name of the checkpoint in messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, Description]:
        """The tensors that there are."""
        ...

    @property
    def values(self) -> Mapping[str, Any]:
        """The values that are no tensor."""
        ...

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill `boxes`. Every rank calls it."""
        ...


class FolderReader:
    """A checkpoint on disk. With `alone` one process reads it, of however many."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        """Read the index of the whole checkpoint of `folder`. Raises `CheckpointError` where there is none."""
        self.name = str(folder)
        whole = find_whole(folder)
        if whole is None:
            raise CheckpointError(f"{folder} holds no whole checkpoint", hint="name a folder that engine.save wrote")
        self._whole = whole
        self._alone = alone
        self._index = read_index(self._whole)
        self.values = self._index.state
        self.tensors = {
            name: Description(shape=saved.shape, dtype=DTYPES[saved.dtype])
            for name, saved in self._index.tensors.items()
        }

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill `boxes`. Every rank calls it. Raises `CheckpointError` on all where one finds a file damaged."""
        by_file: dict[int, list[tuple[Box, Place]]] = {}
        for box in boxes:
            for rank, place in self._sources(box.place):
                by_file.setdefault(rank, []).append((box, place))
        self._together(by_file, lambda file, _, place: file.check(place))  # before anything changes
        self._together(by_file, lambda file, box, place: box.fill(Box(place, file.tensor(place))))

    def _sources(self, target: Place) -> Iterator[tuple[int, Place]]:
        """Yield which boxes of which ranks' files have something of `target`."""
        saved, there = self._index.tensors[target.name], self.tensors[target.name]
        for rank, offsets, shape in saved.boxes:
            place = Place(target.name, offsets, shape, there.shape, there.dtype)
            if place.common(target):
                yield rank, place

    def _together(
        self,
        by_file: Mapping[int, Sequence[tuple[Box, Place]]],
        work: Callable[[TensorFile, Box, Place], object],
    ) -> None:
        """Do `work` with every box of the files. Raise on every rank what the first one raises."""
        failure: CheckpointError | None = None
        try:
            for rank, pairs in by_file.items():
                with opened(self._whole / file_of(rank)) as file:
                    for box, place in pairs:
                        work(file, box, place)
        except CheckpointError as error:
            failure = error
        message = None if failure is None else failure.message
        told = [message] if self._alone else gather_json(message)
        first = next((each for each in told if each is not None), None)
        if first is not None:
            raise CheckpointError(first, hint=DAMAGED) from failure


def load_from(reader: Reader, source: CheckpointSource) -> int:
    """Read a state into this rank's parts; return its number of steps. Every rank calls it. Raises as above."""
    progress, world = _progress_of(reader), source.mesh.world
    # All that is not a tensor of the model is checked before anything of the model changes.
    options = {
        name: read_options(name, reader.values[f"{OPTIONS}{name}"])
        for name in source.parameters
        if f"{OPTIONS}{name}" in reader.values
    }
    _check_progress(progress, options, source)
    random = _read_random(reader, world)
    states = _read_tensors(reader, options, source)
    _take_optimizer(source, states, options)
    _take_progress(random, progress, source)
    if source.average is not None:
        source.average.num_updates = progress.num_averaged
        if not _has_average(reader):
            source.average.restart()
    return progress.num_steps


def count_steps(reader: Reader) -> int:
    """Return the number of steps of a state. Raises `CheckpointError` for that of others."""
    return _progress_of(reader).num_steps


def _progress_of(reader: Reader) -> Progress:
    if PROGRESS not in reader.values:
        raise CheckpointError(
            f"{reader.name} is a checkpoint of another program", hint="name one that engine.save wrote"
        )
    return read_progress(reader.values[PROGRESS])


def _read_random(reader: Reader, world: World) -> dict[str, torch.Tensor]:
    """Return the states of this rank's generators; none where fewer ranks have written theirs."""
    names = random_states(world).keys()
    found = {name: reader.tensors[name] for name in names if names <= reader.tensors.keys()}
    states = {name: torch.zeros(there.shape, dtype=there.dtype, device="cpu") for name, there in found.items()}
    reader.read([box for name, state in states.items() for box in boxes_of(name, state)])
    if states:
        taking("the state of the random numbers", lambda: check_random(states, world))
    return states


def _check_progress(progress: Progress, options: Mapping[str, Options], source: CheckpointSource) -> None:
    if source.scheduler is not None and progress.scheduler is not None:
        check_kinds("numbers of the scheduler", progress.scheduler, source.scheduler.state_dict(), knows_all=True)
    names = {parameter: name for name, parameter in source.parameters.items()}
    for group in source.optimizer.param_groups:
        for parameter in group["params"]:
            if names.get(parameter) in options:
                check_kinds(f"options of {names[parameter]}", options[names[parameter]].options, group)


def _read_tensors(
    reader: Reader, options: Mapping[str, Options], source: CheckpointSource
) -> dict[str, dict[str, torch.Tensor]]:
    """Read parameters and buffers into those of `source`; return the tensors of the optimizer's state."""
    boxes: list[Box] = []
    for name, tensor in source.tensors():
        _check_tensor(reader, MODEL, name, source.whole_shape(name), tensor.dtype)
        boxes += source.boxes(f"{MODEL}{name}", name, tensor)
    if _has_average(reader) and source.average is not None:
        for name, tensor in source.average.tensors.items():
            _check_tensor(reader, AVERAGE, name, source.whole_shape(name), tensor.dtype)
            boxes += source.boxes(f"{AVERAGE}{name}", name, tensor)
    states, whole = empty_states(reader.tensors, source), source.stepped_whole()
    for name, values in states.items():
        if name in options:
            taking(f"options of {name}", partial(nested, options[name].numbers | values))
        for key, value in values.items():
            is_part = value.shape == source.parameters[name].shape and source.parameters[name] not in whole
            boxes += source.boxes(f"{OPTIMIZER}{key}.{name}", name if is_part else "", value)
    reader.read(boxes)
    return states


def _take_optimizer(
    source: CheckpointSource, states: Mapping[str, dict[str, torch.Tensor]], options: Mapping[str, Options]
) -> None:
    groups = {source.parameters[name]: one.options for name, one in options.items()}
    take_options(source.optimizer, groups)
    held = {one: group for group in source.optimizer.param_groups for one in group["params"]}
    for name, parameter in source.parameters.items():
        values: dict[str, Any] = dict(states[name])
        if any(held.get(parameter, {}).get(kind) for kind in ("fused", "capturable")):  # counts are beside it then
            values = {key: value.to(parameter.device) for key, value in values.items()}
        values |= options[name].numbers if name in options else {}
        if values:
            source.optimizer.state[parameter] = nested(values)


def _take_progress(random: Mapping[str, torch.Tensor], progress: Progress, source: CheckpointSource) -> None:
    scheduler, saved = source.scheduler, progress.scheduler
    if scheduler is not None and saved is not None:
        taking("the state of the scheduler", lambda: scheduler.load_state_dict(scheduler.state_dict() | saved))
    if source.loss_scale is not None and progress.loss_scale is not None:
        vars(source.loss_scale).update(progress.loss_scale.model_dump())
    if progress.plan == source.mesh.plan and random:
        taking("the state of the random numbers", lambda: restore_random(random, source.mesh.world))
        return
    reseed(seed=progress.seed, num_steps=progress.num_steps, place=source.mesh.place_of_draws)


def _has_average(reader: Reader) -> bool:
    return any(name.startswith(AVERAGE) for name in reader.tensors)


def _check_tensor(reader: Reader, kind: str, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
    there = reader.tensors.get(f"{kind}{name}")
    hint = "it is a checkpoint of another model"
    if there is None:
        raise CheckpointError(f"{reader.name} holds no {name}", hint=hint)
    if there.shape != tuple(shape):
        raise CheckpointError(
            f"{reader.name} holds {name} in shape {there.shape}, and the model has {tuple(shape)}", hint=hint
        )
    if there.dtype.is_floating_point != dtype.is_floating_point or there.dtype.is_complex != dtype.is_complex:
        raise CheckpointError(f"{reader.name} holds {name} as {there.dtype}, and the model has {dtype}", hint=hint)


def beside(folder: Path, ending: str) -> Path:
    """Return the folder beside `folder` that has `ending`."""
    return folder.with_name(f"{folder.name}.{ending}")


def wait_for_all() -> None:
    """Wait for the other ranks, if there are some."""
    if dist.is_initialized():
        dist.barrier()
