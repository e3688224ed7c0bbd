"""Checkpoints: written under one plan, read under any other, by torch.distributed.checkpoint.

What is written are whole tensors under the names of the whole model, each rank its shards: parameters, buffers, the
optimizer's state and options parameter by parameter, and how far the training is. So neither the number of ranks nor
the split is part of a checkpoint; only the random numbers are those of each rank.

A checkpoint is written beside the one that it replaces, and takes its place when it is whole: a kill at any moment
leaves a whole one, under its name or the name with `.previous`.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

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
    copied,
    empty_bytes,
    empty_states,
    entries_to_write,
    nested,
    read_options,
    read_progress,
    take_options,
    taking,
)
from paraplan.runtime.checkpoints.safe_reader import (
    INDEX_NAME,
    CheckpointError,
    SafeReader,
    read_entries,
    reason_of,
    without_the_note_on_single_processes,
)
from paraplan.runtime.structure.weights import lasting_buffers
from paraplan.runtime.world import World

__all__ = ["CheckpointError", "CheckpointSource", "CheckpointWriter", "find_whole", "load_checkpoint"]


_TORCHS_FILE = "inline_container"  # caffe2/serialize/inline_container.cc, which counts the bytes that were written


class CheckpointWriter:
    """Writes the checkpoints of one rank, one after the other. `is_main` is True on rank 0, which moves the folders.

    `note_whole` is called with the seconds that a whole checkpoint took, and the number of its steps.
    """

    def __init__(
        self, *, is_main: bool, note_whole: Callable[[float, int], None] = lambda seconds, steps: None
    ) -> None:
        self._is_main, self._note_whole = is_main, note_whole
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def write(
        self, folder: Path, source: CheckpointSource, *, wait: bool, only: Callable[[str], bool] | None = None
    ) -> None:
        """Write a checkpoint to `folder`, replacing one that is there. Every rank calls it.

        With `only` it holds the entries that this picks by name. With `wait` all return when it is whole. Without,
        they return when the state is copied, and a thread goes on. Raises `CheckpointError` where the folder or the
        disk does not take it; the one that is there stays.
        """
        self.finish()
        began_s, num_steps = time.monotonic(), source.num_steps

        def write(group: dist.ProcessGroup | None) -> None:
            self._write(folder, entries, group)
            if only is None:
                self._note_whole(time.monotonic() - began_s, num_steps)

        entries = entries_to_write(source) | random_entries(source.mesh.world)
        if only is not None:
            entries = {name: held for name, held in entries.items() if only(name)}
        if not wait:
            entries = copied(entries)
            if self._group is None and dist.is_initialized():
                self._group = dist.new_group(backend="gloo")  # for the thread: collectives must not cross
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)  # on every rank, so that each can say why not
        except OSError as error:
            raise _unwritten(folder, error) from error
        if self._is_main:
            shutil.rmtree(_beside(folder, "partial"), ignore_errors=True)
        _wait_for_all()
        if wait:
            write(None)
            _wait_for_all()
            return
        self._thread = threading.Thread(target=self._keep_error, args=(folder, lambda: write(self._group)))
        self._thread.start()

    def finish(self) -> None:
        """Wait until a checkpoint that a thread writes is whole. Raises what went wrong in it."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _keep_error(self, folder: Path, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # raised again by `finish`, in the thread that trains, which a script may not call
            self._failure = error if isinstance(error, CheckpointError) else _unwritten(folder, error)
            if self._is_main:
                sys.stderr.write(f"paraplan: {self._failure.message}\n")

    def _write(self, folder: Path, entries: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        partial, previous = _beside(folder, "partial"), _beside(folder, "previous")
        try:
            with without_the_note_on_single_processes():
                save(entries, checkpoint_id=partial, process_group=group)
            # On rank 0 that returns when every rank has written its part, and the index is there.
            if self._is_main:
                if folder.exists():
                    shutil.rmtree(previous, ignore_errors=True)
                    folder.rename(previous)
                partial.rename(folder)
                shutil.rmtree(previous, ignore_errors=True)
        except (OSError, CheckpointException) as error:  # the latter is no Exception
            if self._is_main:
                shutil.rmtree(partial, ignore_errors=True)  # every rank has given up by now
            raise _unwritten(folder, error) from error


def _unwritten(folder: Path, error: BaseException) -> CheckpointError:
    """Return what says that a checkpoint could not be written."""
    reason = reason_of(error)
    if _TORCHS_FILE in reason:
        reason = f"the disk has not taken all of it ({reason})"
    return CheckpointError(
        f"the checkpoint {folder} was not written: {reason}",
        hint="name a folder that can be written, on a disk with space for it; one that was there before is whole",
    )


def has_checkpoint(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint, or the one that was there before."""
    return any((place / INDEX_NAME).exists() for place in (folder, _beside(folder, "previous")))


def find_whole(folder: Path) -> Path:
    """Return where the last whole checkpoint of `folder` is. Raises `CheckpointError` where there is none."""
    for place in (folder, _beside(folder, "previous")):
        if (place / INDEX_NAME).exists():
            return place
    raise CheckpointError(f"{folder} holds no whole checkpoint", hint="name a folder that engine.save wrote")


def load_checkpoint(folder: Path, source: CheckpointSource) -> int:
    """Read a checkpoint into this rank's parts; return its number of steps.

    Every rank calls it. Raises `CheckpointError` where there is none, or where it is of another model.
    """
    _wait_for_all()  # one that rank 0 still moves
    return load_from(FolderReader(folder), source)


class Reader(Protocol):
    """Where a state is read from: `name` in messages, `saved` what there is by entry."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def saved(self) -> Mapping[str, Any]:
        """The entries, as torch's index of a checkpoint describes them."""
        ...

    def read(self, entries: dict[str, torch.Tensor]) -> None:
        """Fill the tensors of `entries`. Every rank calls it."""
        ...


class FolderReader:
    """A checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        """Read the index of the whole checkpoint of `folder`. Raises `CheckpointError` where there is none."""
        self.name = str(folder)
        self._whole = find_whole(folder)
        self._index = SafeReader(self._whole).read_metadata()

    @property
    def saved(self) -> Mapping[str, Any]:
        """The entries of the index."""
        return self._index.state_dict_metadata

    def read(self, entries: dict[str, torch.Tensor]) -> None:
        """Fill the tensors of `entries`. Every rank calls it."""
        read_entries(self._whole, entries, index=self._index)


def load_from(reader: Reader, source: CheckpointSource) -> int:
    """Read a state into this rank's parts; return its number of steps. Every rank calls it. Raises as above."""
    folder, saved = reader.name, reader.saved
    if PROGRESS not in saved:
        raise CheckpointError(f"{folder} is a checkpoint of another program", hint="name one that engine.save wrote")
    texts = [PROGRESS, *(f"{OPTIONS}{name}" for name in source.parameters if f"{OPTIONS}{name}" in saved)]
    entries = {name: empty_bytes(name, saved[name]) for name in (*texts, *_random_names(saved, source))}
    reader.read(entries)
    # All that is not a tensor of the model is checked before anything of the model changes.
    progress = read_progress(entries[PROGRESS])
    options = {
        name: read_options(name, entries[f"{OPTIONS}{name}"])
        for name in source.parameters
        if f"{OPTIONS}{name}" in entries
    }
    _check_progress(progress, options, source)
    if f"{RANDOM}{source.mesh.world.rank}" in entries:
        state = entries[f"{RANDOM}{source.mesh.world.rank}"]
        taking("the state of the random numbers", lambda: torch.Generator().set_state(state))
    states = _read_tensors(reader, source)
    _take_optimizer(source, states, options)
    _take_progress(entries, progress, source)
    if source.average is not None:
        source.average.num_updates = progress.num_averaged
        if not _has_average(saved):
            source.average.restart()
    return progress.num_steps


def count_steps(reader: Reader) -> int:
    """Return the number of steps of a state. Every rank calls it. Raises `CheckpointError` for that of others."""
    if PROGRESS not in reader.saved:
        raise CheckpointError(f"{reader.name} is a checkpoint of another program", hint="name one of engine.save")
    entries = {PROGRESS: empty_bytes(PROGRESS, reader.saved[PROGRESS])}
    reader.read(entries)
    return read_progress(entries[PROGRESS]).num_steps


def load_whole_model(reader: Reader, model: nn.Module) -> None:
    """Read parameters and buffers of a state into a whole model. Every rank calls it."""
    saved = reader.saved
    held = dict(model.named_parameters()) | lasting_buffers(model)
    entries = {f"{MODEL}{name}": tensor.detach() for name, tensor in held.items() if f"{MODEL}{name}" in saved}
    reader.read(entries)


def _random_names(saved: Mapping[str, Any], source: CheckpointSource) -> list[str]:
    names = random_entries(source.mesh.world).keys()
    return [*names] if names <= saved.keys() else []


def _check_progress(progress: Progress, options: Mapping[str, Options], source: CheckpointSource) -> None:
    if source.scheduler is not None and progress.scheduler is not None:
        check_kinds("numbers of the scheduler", progress.scheduler, source.scheduler.state_dict(), knows_all=True)
    names = {parameter: name for name, parameter in source.parameters.items()}
    for group in source.optimizer.param_groups:
        for parameter in group["params"]:
            if names.get(parameter) in options:
                check_kinds(f"options of {names[parameter]}", options[names[parameter]].options, group)


def _read_tensors(reader: Reader, source: CheckpointSource) -> dict[str, dict[str, torch.Tensor]]:
    """Read parameters and buffers into those of `source`; return the tensors of the optimizer's state."""
    folder, saved = reader.name, reader.saved
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors():
        _check_tensor(folder, saved, MODEL, name, source.whole_shape(name), tensor.dtype)
        entries[f"{MODEL}{name}"] = source.piece(name, tensor)
    if _has_average(saved) and source.average is not None:
        for name, tensor in source.average.tensors.items():
            _check_tensor(folder, saved, AVERAGE, name, source.whole_shape(name), tensor.dtype)
        entries |= source.averages()
    states, whole = empty_states(saved, source), source.stepped_whole()
    for name, values in states.items():
        for key, value in values.items():
            is_part = value.shape == source.parameters[name].shape and source.parameters[name] not in whole
            entries[f"{OPTIMIZER}{key}.{name}"] = source.piece(name, value) if is_part else value
    reader.read(entries)
    return states


def _take_optimizer(
    source: CheckpointSource, states: Mapping[str, dict[str, torch.Tensor]], options: Mapping[str, Options]
) -> None:
    groups = {source.parameters[name]: one.options for name, one in options.items()}
    take_options(source.optimizer, groups)
    held = {one: group for group in source.optimizer.param_groups for one in group["params"]}
    for name, parameter in source.parameters.items():
        values: dict[str, Any] = _placed(states[name], parameter, held.get(parameter, {}))
        values |= options[name].numbers if name in options else {}
        if values:
            source.optimizer.state[parameter] = nested(values)


def _take_progress(entries: Mapping[str, torch.Tensor], progress: Progress, source: CheckpointSource) -> None:
    scheduler, saved = source.scheduler, progress.scheduler
    if scheduler is not None and saved is not None:
        taking("the state of the scheduler", lambda: scheduler.load_state_dict(scheduler.state_dict() | saved))
    if source.loss_scale is not None and progress.loss_scale is not None:
        vars(source.loss_scale).update(progress.loss_scale)
    world = source.mesh.world
    if progress.plan == source.plan and random_entries(world).keys() <= entries.keys():
        taking("the state of the random numbers", lambda: restore_random(dict(entries), world))
        return
    place = source.mesh.coordinate("dp") + source.mesh.coordinate("pp") * source.mesh.size("dp")
    reseed(seed=progress.seed, num_steps=progress.num_steps, place=place)


def _placed(
    values: dict[str, torch.Tensor], parameter: nn.Parameter, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return `values` with counts where the optimizer wants them: beside the parameter if it is fused or capturable."""
    if options.get("fused") or options.get("capturable"):
        return {key: value.to(parameter.device) for key, value in values.items()}
    return values


def _has_average(saved: Mapping[str, Any]) -> bool:
    return any(entry.startswith(AVERAGE) for entry in saved)


def _check_tensor(
    folder: str, saved: Mapping[str, Any], kind: str, name: str, shape: torch.Size, dtype: torch.dtype
) -> None:
    description = saved.get(f"{kind}{name}")
    if description is None:
        raise CheckpointError(f"{folder} holds no {name}", hint="it is a checkpoint of another model")
    if description.size != shape:
        raise CheckpointError(
            f"{folder} holds {name} in shape {tuple(description.size)}, and the model has {tuple(shape)}",
            hint="it is a checkpoint of another model",
        )
    found = description.properties.dtype
    if found.is_floating_point != dtype.is_floating_point or found.is_complex != dtype.is_complex:
        raise CheckpointError(
            f"{folder} holds {name} as {found}, and the model has {dtype}", hint="it is a checkpoint of another model"
        )


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


RANDOM = "random.cpu."
_MIXER = 1_000_003  # a prime: seeds of neighbouring steps must not meet those of neighbouring ranks


def random_entries(world: World) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators of this rank, by the names of their entries."""
    states = {f"{RANDOM}{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"random.device.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return states


def restore_random(entries: dict[str, Any], world: World) -> None:
    """Set torch's generators of this rank to what `random_entries` returned."""
    torch.set_rng_state(entries[f"{RANDOM}{world.rank}"])
    device_state = entries.get(f"random.device.{world.rank}")
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, world.device)


def reseed(*, seed: int, num_steps: int, place: int) -> None:
    """Start torch's generators anew after `num_steps` steps of a training that began with `seed`.

    `place` tells apart the ranks that draw different numbers.
    """
    torch.manual_seed((seed + _MIXER * num_steps + place) % 2**63)
