"""One rank of a large world in one process: collectives that send nothing, tensors that hold nothing.

A few places of torch's distributed code read the values of tensors, which fake tensors lack. They are replaced while
a fake world lasts, by what a healthy job would find there; what is allocated stays the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import cycle
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from paraplan.runtime.fake.torch_private import (
    FakeStore,
    SteadyReducer,
    replaced,
)
from paraplan.runtime.torch_private import (
    PIPELINING_FOLDER,
    FakeTensor,
    tensors_in,
    unset_fake_temporarily,
)
from paraplan.runtime.world import World


@contextmanager
def fake_world(*, rank: int, size: int, is_launched: bool = False) -> Iterator[World]:
    """Yield the world of `rank` among `size` ranks of which no other exists. There must be no process group yet.

    One rank alone has a group where it `is_launched`, as by torchrun.
    """
    device = torch.device("cpu")
    if size == 1 and not is_launched:
        yield World(rank=0, local_rank=0, size=1, device=device, is_distributed=False)
        return
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _ddp_without_values():
            yield World(rank=rank, local_rank=0, size=size, device=device, is_distributed=True)
    finally:
        dist.destroy_process_group()


@contextmanager
def modules_that_stay() -> Iterator[None]:
    """Leave modules where they are: all is on one device, and torch cannot move fake parameters to where they stand."""
    plain = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        is_move = len(args) == 1 and isinstance(args[0], torch.device) and not kwargs
        return self if is_move else plain(self, *args, **kwargs)

    with replaced((nn.Module, "to", to)):
        yield


@contextmanager
def transformers_as_if_with_values() -> Iterator[None]:
    """Hide from transformers, where it is loaded, that tensors are fake: it makes masks for such that it else skips.

    The numbers of rows that its experts exchange are those of an even load.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    entries: list[tuple[Any, str, Any]] = []
    if hasattr(module, "is_fake_tensor"):
        entries.append((module, "is_fake_tensor", lambda _: False))
    dispatcher: Any = getattr(sys.modules.get("transformers.distributed.expert_parallel"), "AllToAllEP", None)
    if dispatcher is not None:
        entries.append((dispatcher, "__call__", _dispatching_evenly(dispatcher.__call__)))
    with replaced(*entries):
        yield


def _dispatching_evenly(plain: Any) -> Any:
    """Return a token dispatcher's call that reads an even load where it reads how many rows go to whom."""

    @wraps(plain)
    def dispatch(implementation: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, weights: Any) -> Any:
        ranks = implementation.ep_mesh.size()
        with _EvenRows(-(-top_k_index.numel() // implementation.tp_mesh.size()), ranks):
            return plain(implementation, hidden_states, top_k_index, weights)

    return dispatch


class _EvenRows(TorchFunctionMode):
    """Answers who asks for rows sent to and received from each of `ranks` as if `rows` were spread over them."""

    def __init__(self, rows: int, ranks: int) -> None:
        super().__init__()
        # A fake tensor's `tolist` asks for its numbers one by one: those of all ranks, again and again.
        self._shares = cycle([(rows + place) // ranks for place in range(ranks)])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and isinstance(args[0], FakeTensor):
            return next(self._shares)
        return func(*args, **(kwargs or {}))


_READS = (torch.Tensor.item, torch.Tensor.__int__)


class SmallNumbers(TorchFunctionMode):
    """Keeps the numbers of micro-batches real: a pipeline's schedule cuts a range of them, and its stage reads one.

    The vote of a pipeline's ranks on whether shapes are known is answered with yes, as all ranks of this runtime vote.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and len(args) == 1 and not kwargs:
            return self._really(func, args, kwargs)
        if func in _READS and isinstance(args[0], FakeTensor) and _is_called_by(PIPELINING_FOLDER):
            return 1
        tensors = tensors_in((args, kwargs))
        is_real = tensors and not any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in tensors)
        if is_real and all(leaf.dtype is torch.long for leaf in tensors):
            return self._really(func, args, kwargs)
        return func(*args, **kwargs)

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_called_by(place: str) -> bool:
    """Whether the nearest caller outside of torch's machinery of modes is code in `place`, a part of a path."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename.replace("\\", "/")
    return place in path


@contextmanager
def _ddp_without_values() -> Iterator[None]:
    """Let DDP skip what compares ranks by values: shapes at the start, the order of buckets after the first step.

    Its buckets are reduced in place by a hook that does nothing, since the fake group's own reduction returns nothing.
    """
    plain, plain_hook = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def keep_hook(self: DistributedDataParallel, state: Any, hook: Any) -> None:
        """Leave the hook of a run with values out: its work is never done here."""

    @wraps(plain)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "init_sync": False})
        plain_hook(self, self.process_group, lambda group, bucket: _reduce_in_place(group, bucket))
        self.reducer = SteadyReducer(self.reducer)  # type: ignore[assignment]

    ddp = DistributedDataParallel
    with replaced((ddp, "__init__", init), (ddp, "register_comm_hook", keep_hook)):
        yield


def _reduce_in_place(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)  # does nothing, and is seen
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
