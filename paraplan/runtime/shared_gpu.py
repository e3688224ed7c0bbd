"""Collectives of ranks that share a GPU: gloo on copies in the host's memory.

gloo sums and broadcasts tensors on a GPU, but ends the process where it gathers, scatters or sends one (torch 2.11).
This group copies every tensor that is no CPU tensor to the host, has gloo do the work and copies the result back, on
the stream that the call was made on. It is slow, and for tests of a plan on fewer GPUs than it has ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.torch_private import GroupOverGloo, finished_work, pytree

NAME = "gloo_shared_gpu"


def register() -> str:
    """Make the backend known to torch, and return its name."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SharedGpuGroup, devices=["cpu", "cuda"])
    return NAME


class _Received(dist.Work):
    """A message that is on its way: `wait` puts it where it was to go."""

    def __init__(self, work: dist.Work, put: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._put = work, put

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once the message is there."""
        done = self._work.wait() if timeout == timedelta(0) else self._work.wait(timeout)
        self._put()
        self._put = _nothing
        return done

    def is_completed(self) -> bool:
        """Whether the message has come to the host."""
        return self._work.is_completed()


def _nothing() -> None:
    pass


class SharedGpuGroup(GroupOverGloo):
    """A group of ranks some of which have the same GPU."""

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name that torch knows the backend by."""
        return NAME

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor goes over a copy."""
        return tensor.device.type != "cpu"

    def run(self, name: str, *given: Any, num_outputs: int = 1) -> dist.Work:
        """Have gloo do `name` on all tensors of `given`, of which the first so many are, or hold, what it writes.

        gloo knows no mean: that is a sum, divided here.
        """
        options = given[-1]
        is_mean = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        if is_mean:
            options.reduceOp = dist.ReduceOp.SUM
        copies = pytree.tree_map_only(torch.Tensor, self._on_host, given)
        work: dist.Work = getattr(self.gloo, name)(*copies)
        pairs = list(zip(*(pytree.tree_leaves(some[:num_outputs]) for some in (given, copies)), strict=True))
        is_staged = any(here is not there for here, there in pairs)
        if is_staged or is_mean:
            work.wait()
        if is_staged:
            _put_back(pairs)
            work = finished_work([here for here, _ in pairs])
        for here, _ in pairs if is_mean else ():
            here /= self.size()
        return work

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True) if self.is_staged(tensor) else tensor

    def barrier(self, opts: Any) -> dist.Work:
        """Wait for all ranks, as torch's process groups do."""
        return self.gloo.barrier(opts)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        """Send tensors to a rank, as torch's process groups do."""
        return self.run("send", tensors, rank, tag, num_outputs=0)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        """Receive tensors from a rank; they have their values once the work was waited for."""
        return self._receive(tensors, lambda copies: self.gloo.recv(copies, rank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive tensors from whichever rank sends."""
        return self._receive(tensors, lambda copies: self.gloo.recv_anysource(copies, tag))

    def _receive(self, tensors: list[torch.Tensor], begin: Callable[[list[torch.Tensor]], dist.Work]) -> dist.Work:
        copies = [torch.empty_like(one, device="cpu") if self.is_staged(one) else one for one in tensors]
        pairs = list(zip(tensors, copies, strict=True))
        return _Received(begin(copies), lambda: _put_back(pairs))


def _put_back(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for here, there in pairs:
            if here is not there:
                here.copy_(there)


def _over_gloo(name: str) -> Callable[..., dist.Work]:
    def collective(group: SharedGpuGroup, *given: Any) -> dist.Work:
        return group.run(name, *given)

    return collective


for _name in (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_into_tensor_coalesced"),
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall_base", "alltoall"),
):
    setattr(SharedGpuGroup, _name, _over_gloo(_name))  # torch looks for what a subclass overrides when it calls it
