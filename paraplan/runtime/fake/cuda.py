"""Answers of `torch.cuda` in a process whose GPU is not there: a healthy GPU that does everything at once."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from paraplan.errors import UsageError
from paraplan.runtime.fake.gpu import FakeGpu
from paraplan.runtime.fake.torch_private import (
    DUMP_SNAPSHOT,
    EXCHANGE_DEVICE,
    GET_ACCELERATOR,
    LAZY_INIT,
    MAYBE_EXCHANGE_DEVICE,
    NATIVE,
    RECORD_MEMORY_HISTORY,
    replaced,
)

_OF_WORKERS = frozenset(
    {
        *("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "timeout"),
        *("multiprocessing_context", "pin_memory_device"),
    }
)


class Done:
    """A stream, on which all is done, or an event that has been."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = self.stream_id = self.priority = 0

    def __enter__(self) -> Done:
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave the stream."""

    def record(self, *_: Any) -> Done:
        """Take no note."""
        return self

    record_event = record

    def query(self) -> bool:
        """Say that all is done."""
        return True

    def wait(self, *_: Any) -> None:
        """Go on: it has been."""

    wait_event = wait_stream = synchronize = wait

    def is_capturing(self) -> bool:
        """Say that no graph is captured."""
        return False

    def elapsed_time(self, *_: Any) -> float:
        """Return a time in ms: nothing takes any that tells of a GPU."""
        return 1.0


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of each node of a fake world: how many, and the memory of one."""

    count: int
    memory_bytes: int


@contextmanager
def cuda_of(gpu: FakeGpu, gpus: NodeGpus, left_out: set[str]) -> Iterator[None]:
    """Let torch answer in this context as on a node with `gpus`, of which `gpu` is this process's.

    What is not done is added to `left_out`.
    """
    with replaced(*_of_cuda(gpu, gpus), *_of_accelerator(gpu, gpus.count), *_of_torch(left_out)):
        yield


def _of_cuda(gpu: FakeGpu, gpus: NodeGpus) -> list[tuple[Any, str, Any]]:
    num_gpus, memory_bytes = gpus.count, gpus.memory_bytes
    cuda, index, stream = torch.cuda, gpu.device.index, Done()
    name = "a GPU that is not there"
    properties = types.SimpleNamespace(
        name=name, major=9, minor=0, total_memory=memory_bytes, multi_processor_count=132, warp_size=32, is_integrated=0
    )

    def allocated(*_: Any) -> int:
        return gpu.tracker._bytes

    def most_allocated(*_: Any) -> int:
        gpu.tracker.settle()
        return gpu.tracker.peak.total_bytes

    nothing = _answering(None)
    answers: dict[str, Any] = {
        LAZY_INIT: nothing,
        "init": nothing,
        "is_available": _answering(True),
        "is_initialized": _answering(True),
        "is_bf16_supported": _answering(True),
        "is_current_stream_capturing": _answering(False),
        "device_count": _answering(num_gpus),
        "current_device": _answering(index),
        "set_device": lambda device: _check_index(device, num_gpus),
        EXCHANGE_DEVICE: _answering(index),
        MAYBE_EXCHANGE_DEVICE: _answering(index),
        "get_device_name": _answering(name),
        "get_device_properties": _answering(properties),
        "get_device_capability": _answering((9, 0)),
        "can_device_access_peer": _answering(True),
        "mem_get_info": lambda *_: (memory_bytes - allocated(), memory_bytes),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": most_allocated,
        "max_memory_reserved": most_allocated,
        "memory_stats": lambda *_: defaultdict(int),
        "memory_summary": _answering(""),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "current_stream": _answering(stream),
        "default_stream": _answering(stream),
        "stream": lambda *_: nullcontext(),
        "Stream": Done,
        "Event": Done,
    }
    dropped = [
        *("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_stream"),
        *("empty_cache", "synchronize", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated"),
        *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
    ]
    marks = [(cuda.nvtx, name, nothing) for name in ("range_push", "range_pop", "range_start", "range_end", "mark")]
    profiler = [(cuda.profiler, name, nothing) for name in ("start", "stop")]
    history = [(cuda.memory, name, nothing) for name in (RECORD_MEMORY_HISTORY, DUMP_SNAPSHOT)]
    answers |= dict.fromkeys(dropped, nothing)
    return [*((cuda, name, value) for name, value in answers.items()), *marks, *profiler, *history]


def _check_index(device: Any, num_gpus: int) -> None:
    chosen = device.index if isinstance(device, torch.device) else device
    chosen = int(str(chosen).partition(":")[2] or 0) if isinstance(chosen, str) else chosen
    if chosen is not None and chosen >= num_gpus:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: {chosen} of {num_gpus} GPUs of a node; LOCAL_RANK names the one of "
            "this process"
        )


def _of_accelerator(gpu: FakeGpu, num_gpus: int) -> list[tuple[Any, str, Any]]:
    answers = {
        "is_available": _answering(True),
        "device_count": _answering(num_gpus),
        "current_accelerator": _answering(torch.device("cuda")),
        "current_device_index": _answering(gpu.device.index),
        "current_device_idx": _answering(gpu.device.index),
        "set_device_index": _answering(None),
        "set_device_idx": _answering(None),
        "current_stream": _answering(Done()),
        "synchronize": _answering(None),
        "empty_cache": _answering(None),
    }
    found = [(torch.accelerator, name, value) for name, value in answers.items() if hasattr(torch.accelerator, name)]
    # What fully_shard asks where it is given no mesh.
    return [*found, (NATIVE, GET_ACCELERATOR, _answering(torch.device("cuda")))]


def _of_torch(left_out: set[str]) -> list[tuple[Any, str, Any]]:
    """Autocast of a GPU is that of the CPU (`GpuOperators` has the other lists); workers of data loaders are not."""
    plain_autocast, plain_loader = torch.autocast.__init__, DataLoader.__init__
    plain_is, plain_type = torch.is_autocast_enabled, torch.get_autocast_dtype
    plain_to = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        named = {name: _of_index(value) for name, value in options.items()}
        return plain_to(module, *map(_of_index, args), **named)

    def autocast(mode: torch.autocast, device_type: str = "cuda", *args: Any, **options: Any) -> None:
        plain_autocast(mode, _on_cpu(device_type), *args, **options)

    def load(loader: Any, *args: Any, **options: Any) -> None:
        plain_loader(loader, *args, **{name: value for name, value in options.items() if name not in _OF_WORKERS})

    def compile_nothing(model: Any = None, **_: Any) -> Any:
        left_out.add("compiling")
        return (lambda given: given) if model is None else model

    def save(*_: Any, **__: Any) -> None:
        left_out.add("what torch.save writes")

    return [
        (torch.autocast, "__init__", autocast),
        (torch, "is_autocast_enabled", lambda kind="cuda": plain_is(_on_cpu(kind))),
        (torch, "get_autocast_dtype", lambda kind: plain_type(_on_cpu(kind))),
        (DataLoader, "__init__", load),
        (torch, "compile", compile_nothing),
        (torch.nn.Module, "to", to),
        (torch.nn.Module, "compile", lambda *_, **__: left_out.add("compiling")),
        (torch, "save", save),
    ]


def _of_index(value: Any) -> Any:
    """Return the GPU that a bare number names; torch's own parser asks the machine for the kind of such a device."""
    is_index = isinstance(value, int) and not isinstance(value, bool)
    return torch.device("cuda", value) if is_index else value


def _on_cpu(device_type: str) -> str:
    return "cpu" if str(device_type).partition(":")[0] == "cuda" else device_type


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def objects_of_one_rank() -> Iterator[None]:
    """Answer what torch sends by pickling, in this context, as if every rank sent what this one does."""
    names = {
        "all_gather_object": _all_gather,
        "gather_object": _gather,
        "broadcast_object_list": _keep,
        "scatter_object_list": _scatter,
        "send_object_list": _keep,
        "recv_object_list": _receive,
        "monitored_barrier": _keep,
    }
    with replaced(*((owner, name, value) for owner in (dist, distributed_c10d) for name, value in names.items())):
        yield


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_: Any, **__: Any
) -> None:
    scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]


def _keep(*_: Any, **__: Any) -> None:
    """Leave objects as they are."""


def _receive(*_: Any, **__: Any) -> None:
    raise UsageError(
        "this rank waits for objects of another one, which does not exist: a pipeline's stage asks the one before it "
        "for shapes",
        hint="give torch's PipelineStage input_args and output_args, or look at the rank of the first stage",
    )
