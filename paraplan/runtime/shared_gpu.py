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

from paraplan.runtime.torch_private import GATHER_INTO, REDUCE_INTO, GroupOverGloo, finished_work, pytree

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

    def _run(self, name: str, tensors: tuple[Any, ...], *rest: Any, num_outputs: int = 1) -> dist.Work:
        """Have gloo do `name` on all tensors; of the tuple the first so many are, or hold, what it writes."""
        copies = pytree.tree_map_only(torch.Tensor, self._on_host, tensors)
        work: dist.Work = getattr(self.gloo, name)(*copies, *rest)
        pairs = list(zip(*(pytree.tree_leaves(some[:num_outputs]) for some in (tensors, copies)), strict=True))
        if not any(here is not there for here, there in pairs):
            return work
        work.wait()
        _put_back(pairs)
        return finished_work([here for here, _ in pairs])

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True) if self.is_staged(tensor) else tensor

    def _reduced(self, name: str, tensors: tuple[Any, ...], options: Any) -> dist.Work:
        """Do a collective that sums or the like; gloo knows no mean."""
        is_mean = options.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            options.reduceOp = dist.ReduceOp.SUM
        work = self._run(name, tensors, options)
        if is_mean:
            work.wait()
            for tensor in pytree.tree_leaves(tensors[0]):
                tensor /= self.size()
        return work

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._run("broadcast", (tensors,), opts)

    def allreduce(self, tensors: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._reduced("allreduce", (tensors,), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._reduced("allreduce_coalesced", (tensors,), opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._reduced("reduce", (tensors,), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._run("allgather", (outputs, inputs), opts)

    def gather_into(self, output: Any, given: Any, opts: Any) -> dist.Work:
        """As torch's `all_gather_into_tensor`."""
        return self._run(GATHER_INTO, (output, given), opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._run("allgather_into_tensor_coalesced", (outputs, inputs), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._run("gather", (outputs, inputs), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._run("scatter", (outputs, inputs), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._reduced("reduce_scatter", (outputs, inputs), opts)

    def reduce_into(self, output: Any, given: Any, opts: Any) -> dist.Work:
        """As torch's `reduce_scatter_tensor`."""
        return self._reduced(REDUCE_INTO, (output, given), opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._reduced("reduce_scatter_tensor_coalesced", (outputs, inputs), opts)

    def alltoall_base(self, output: Any, given: Any, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's; `outputs` and `inputs` are the sizes of parts."""
        return self._run("alltoall_base", (output, given), outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """As torch's."""
        return self._run("alltoall", (outputs, inputs), opts)

    def barrier(self, opts: Any) -> dist.Work:
        """As torch's."""
        return self.gloo.barrier(opts)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        """As torch's."""
        return self._run("send", (tensors,), rank, tag, num_outputs=0)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        """As torch's; the tensors have their values once the work was waited for."""
        return self._receive(tensors, lambda copies: self.gloo.recv(copies, rank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """As `recv`, from whichever rank sends."""
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
