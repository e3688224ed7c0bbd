"""Checkpoints: written under one plan, read under any other.

What is written are whole tensors under the names of the whole model, each rank its boxes of them in a file of
safetensors, of replicas one: parameters, buffers and the optimizer's state. An index of JSON, written last, says where
they are; it holds the optimizer's options parameter by parameter, and how far the training is. So neither the number of
ranks nor the split is part of a checkpoint; only the random numbers are those of each rank.

A checkpoint is written beside the one that it replaces, and takes its place when it reads as whole: a kill at any
moment leaves a whole one, under its name or the name with `.previous`.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paraplan.runtime.checkpoints.boxes import CheckpointError, gather_sizes, key_of, owner_of_each
from paraplan.runtime.checkpoints.entries import CheckpointSource, State, state_of
from paraplan.runtime.checkpoints.index import Index, SavedTensor, file_of, read_index, write_index
from paraplan.runtime.checkpoints.loading import beside, wait_for_all
from paraplan.runtime.checkpoints.tensor_files import write_tensors
from paraplan.runtime.exchange import gather_bytes, gather_json


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
            write_state(folder, state, group)
            if only is None:
                self._note_whole(time.monotonic() - began_s, num_steps)

        state = _own_part(state_of(source) if only is None else state_of(source, only))
        if not wait:
            state = replace(state, boxes=[box.copied() for box in state.boxes])
            if self._group is None and dist.is_initialized():
                self._group = dist.new_group(backend="gloo")  # for the thread: collectives must not cross
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)  # on every rank, so that each can say why not
        except OSError as error:
            raise _unwritten(folder, _reason_of(error)) from error
        if self._is_main:
            shutil.rmtree(beside(folder, "partial"), ignore_errors=True)
        wait_for_all()
        if wait:
            write(None)
            wait_for_all()
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
            self._failure = error if isinstance(error, CheckpointError) else _unwritten(folder, _reason_of(error))
            if self._is_main:
                sys.stderr.write(f"paraplan: {self._failure.message}\n")


def write_state(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> None:
    """Write what this rank has of a checkpoint; rank 0 puts it in its place when it is whole. Every rank calls it.

    Raises `CheckpointError` on all of them where one could not.
    """
    told = gather_bytes(json.dumps(_write_part(folder, state)).encode(), group, only_first=True)
    failure = None if told is None else _conclude(folder, [json.loads(each) for each in told])
    failure = gather_json(failure, group)[0]
    if failure is not None:
        raise _unwritten(folder, failure)


def _own_part(state: State) -> State:
    """Return what this rank writes of what it holds: of replicas one does. Every rank calls it."""
    sizes = {box.place.key: box.place.num_bytes for box in state.boxes} | {key_of(name): 0 for name in state.values}
    owners, rank = owner_of_each(gather_sizes(sizes)), _rank()
    return State(
        boxes=[box for box in state.boxes if owners[box.place.key] == rank],
        values={name: value for name, value in state.values.items() if owners[key_of(name)] == rank},
    )


def _write_part(folder: Path, state: State) -> dict[str, Any]:
    """Write the boxes of this rank; return what the index says of them, or why they were not written."""
    tensors, partial = {box.place.key_in_file: box.values for box in state.boxes}, beside(folder, "partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if tensors:
            write_tensors(partial / file_of(_rank()), tensors)
    except Exception as error:  # raised on every rank, by what rank 0 makes of it
        return {"failure": _reason_of(error)}
    return {"failure": None, "places": [box.place.words for box in state.boxes], "values": state.values}


def _conclude(folder: Path, told: Sequence[dict[str, Any]]) -> str | None:
    """Write the index behind the parts of all ranks and put the folder in its place; return why that failed, if so."""
    partial, previous = beside(folder, "partial"), beside(folder, "previous")
    failure = next((each["failure"] for each in told if each["failure"] is not None), None)
    try:
        if failure is None:
            write_index(partial, _index(told))
            read_index(partial)
            if folder.exists():
                shutil.rmtree(previous, ignore_errors=True)
                folder.rename(previous)
            partial.rename(folder)
            shutil.rmtree(previous, ignore_errors=True)
    except Exception as error:  # the other ranks wait for what became of it
        failure = _reason_of(error)
    if failure is not None:
        shutil.rmtree(partial, ignore_errors=True)  # every rank has given up by now
    return failure


def _index(told: Sequence[dict[str, Any]]) -> Index:
    tensors: dict[str, dict[str, Any]] = {}
    for rank, each in enumerate(told):
        for name, offsets, shape, whole, kind in each["places"]:
            saved = tensors.setdefault(name, {"dtype": kind, "shape": whole, "boxes": []})
            saved["boxes"].append((rank, offsets, shape))
    values = {name: value for each in told for name, value in each["values"].items()}
    return Index(state=values, tensors={name: SavedTensor(**fields) for name, fields in tensors.items()})


def _reason_of(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _unwritten(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} was not written: {reason}",
        hint="name a folder that can be written, on a disk with space for it; one that was there before is whole",
    )
