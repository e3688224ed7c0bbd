"""Collectives that time out: the rank that waited in vain says in which one, of which ranks, and how long.

Which rank never entered it, and where that one was, is in the report of `paraplan launch`, which asks all ranks. On
GPUs NCCL's watchdog ends the process before anything is raised, and the launcher reads what the watchdog wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from paraplan.errors import ParaplanError
from paraplan.runtime.torch_private import (
    BACKWARD_FRAME,
    COLLECTIVES_FILE,
    PIPELINING_FOLDER,
    TIMED_OUT,
    names_of_groups,
    recorded_collectives,
    timeout_of_world,
)
from paraplan.runtime.world import backend_of
from paraplan.units import ranks_in_words

_TORCH = f"{Path(torch.__file__).parent}/"


class CollectiveTimeoutError(ParaplanError):
    """A rank waited for others in a collective until it timed out."""

    exit_status = 1


@dataclass(frozen=True)
class Collective:
    """The collective in which a rank waited, and the ranks of its group; none where they are unknown."""

    name: str
    ranks: tuple[int, ...] = ()


@contextmanager
def explained_timeouts(what: Callable[[], str]) -> Iterator[None]:
    """Raise `CollectiveTimeoutError` in place of gloo's error in this context; `what()` names what was being done."""
    try:
        yield
    except RuntimeError as error:
        seconds = waited_s(error)
        if seconds is None:
            raise
        raise timeout_error(_collective_in(error.__traceback__), waited_s=seconds, what=what()) from error


def waited_s(error: BaseException) -> float | None:
    """Return after how many seconds gloo gave up, 0 where it does not say; None for another error."""
    found = TIMED_OUT.search(str(error))
    if found is None:
        return None
    return int(found[1]) / 1000 if found[1] else 0.0


def timeout_error(collective: Collective, *, waited_s: float, what: str) -> CollectiveTimeoutError:
    """Return what a user is told."""
    group = f" of {ranks_in_words(collective.ranks)}" if collective.ranks else ""
    after = f" after {waited_s:g} s" if waited_s else ""
    return CollectiveTimeoutError(
        f"{collective.name}{group} timed out{after} ({what}): a rank did not enter it, or the connection to one is "
        "lost; paraplan launch reports which rank, and where it was",
        hint="every rank must make the same calls with the same plan; if one is only slow, give runtime.init a longer "
        "timeout_s",
    )


def _collective_in(traceback: TracebackType | None) -> Collective:
    """Return the collective in which the innermost frames of a traceback waited."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(_TORCH):
            break
        if (file.removeprefix(_TORCH), name) == BACKWARD_FRAME:  # hooks of DDP are C++
            break
        if file.startswith(f"{_TORCH}{PIPELINING_FOLDER}"):
            return Collective("a send or receive over pp", _ranks_of(description="mesh_pp"))
        if file.endswith(COLLECTIVES_FILE) and name in ("send", "recv", "isend", "irecv"):  # not recorded
            return Collective(name)
        if file.startswith(f"{_TORCH}distributed"):
            return _last_recorded() or Collective(name)
    return _last_recorded() or Collective("a collective")


def _last_recorded() -> Collective | None:
    """Return the collective that this process began last, by torch's flight recorder; None where it records none."""
    entries = recorded_collectives()
    if not entries:
        return None
    last = max(entries, key=lambda entry: int(entry["record_id"]))
    group, description = last["process_group"]
    axis = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
    call = str(last["profiling_name"]).rpartition(":")[2]
    return Collective(f"{call} over {axis}" if axis else call, _ranks_of(name=group))


def _ranks_of(*, name: str = "", description: str = "") -> tuple[int, ...]:
    """Return the ranks of the group that torch calls so, none where there is no such group."""
    for group, known in names_of_groups().items():
        if (name and known == name) or (description and group.group_desc == description):
            return tuple(dist.get_process_group_ranks(group))
    return ()


def default_timeout(device: torch.device) -> timedelta | None:
    """Return after what time collectives of the default group on `device` fail; None without gloo or NCCL there."""
    if not backend_of(device).startswith(("gloo", "nccl")):
        return None
    return timeout_of_world(device)
