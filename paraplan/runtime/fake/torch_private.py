"""Names of torch that runs without values use and torch does not promise to keep, and why there is no public way.

They run torch's own code with parts of it replaced: what asks for values, for a GPU or for other ranks. All was seen in
torch 2.11 and 2.13, unless an entry says otherwise. `tests/test_torch_contract.py` asks each new torch for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

PipelineStageBase = _PipelineStageBase
RecvInfo = _RecvInfo

RE_EXPORTED = {
    "DataDependentOutputException": "what FakeTensor raises where code reads a value; its public base is wider",
    "DynamicOutputShapeException": "what FakeTensor raises where a shape depends on values; its public base is wider",
    "FSDPParamGroup": "where FSDP2 reduces gradients in backward passes; see REPLACED",
    "FSDPState": "what FSDP2 keeps of a module; see REPLACED",
    "FakeStore": 'the store of the backend "fake", a process group of ranks that do not exist',
    "PipelineStageBase": "the base of all pipeline stages; see REPLACED",
    "RecvInfo": "a buffer in which a stage receives; a fake step makes those of micro-batches that it leaves out",
}
"""Names that are handed on as they are, and why."""

LAZY_INIT = "_lazy_init"
EXCHANGE_DEVICE = "_exchange_device"
MAYBE_EXCHANGE_DEVICE = "_maybe_exchange_device"
RECORD_MEMORY_HISTORY = "_record_memory_history"
DUMP_SNAPSHOT = "_dump_snapshot"
"""Names of `torch.cuda` that torch's own code and scripts call: a GPU that is not there must answer them."""

NATIVE: Any = torch._C
GET_ACCELERATOR = "_get_accelerator"
"""The function of torch's C++ that `fully_shard` asks where it is given no mesh."""

MODULE_APPLY = "_apply"
MODULE_CALL = "_call_impl"
"""The function that `nn.Module.to` and a call of a module end in: hooks see neither in the backward pass."""

MOVE_STATES = "_move_states_to_device"
"""By what FSDP2 moves buffers: it swaps the insides of tensors, which those without values do not stand."""

END_OF_BACKWARD = "_root_post_backward_final_callback"
"""The function that autograd calls when FSDP2's backward pass ends: modes are not on there."""

START_OF_STAGE = "_initialize_stage"
START_OF_STAGES = "_initialize_stages"
"""By what a schedule is first used: neighbors then send shapes, which later steps do not."""

REPLACED: dict[str, tuple[str, ...]] = {
    "torch": ("is_autocast_enabled", "get_autocast_dtype", "compile", "save"),
    "torch._C": (GET_ACCELERATOR,),
    "torch.storage.UntypedStorage": ("resize_",),
    "torch.accelerator": (
        *("is_available", "device_count", "current_accelerator", "current_device_index", "current_device_idx"),
        *("set_device_index", "set_device_idx", "current_stream", "synchronize", "empty_cache"),
    ),
    "torch.amp.autocast_mode.autocast": ("__init__",),
    "torch.autograd.function.BackwardCFunction": ("apply",),
    "torch.cuda": (
        *(LAZY_INIT, "init", "is_available", "is_initialized", "is_bf16_supported", "is_current_stream_capturing"),
        *("device_count", "current_device", "set_device", EXCHANGE_DEVICE, MAYBE_EXCHANGE_DEVICE, "get_device_name"),
        *("get_device_properties", "get_device_capability", "can_device_access_peer", "mem_get_info"),
        *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_stats"),
        *("memory_summary", "get_rng_state", "current_stream", "default_stream", "stream", "Stream", "Event"),
        *("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_stream"),
        *("empty_cache", "synchronize", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated"),
        *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
    ),
    "torch.cuda.memory": (RECORD_MEMORY_HISTORY, DUMP_SNAPSHOT),
    "torch.cuda.nvtx": ("range_push", "range_pop", "range_start", "range_end", "mark"),
    "torch.cuda.profiler": ("start", "stop"),
    "torch.distributed": (
        *("init_process_group", "destroy_process_group", "all_gather_object", "gather_object"),
        *("broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list", "monitored_barrier"),
    ),
    "torch.distributed.device_mesh.DeviceMesh": ("__init__",),
    "torch.distributed.distributed_c10d": (
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
        *("recv_object_list", "monitored_barrier"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_init": (MOVE_STATES,),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": ("post_backward",),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": ("init", END_OF_BACKWARD),
    "torch.distributed.fsdp._fully_shard._fully_shard": (MOVE_STATES,),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": ("__init__",),
    "torch.distributed.pipelining.schedules.PipelineScheduleMulti": (START_OF_STAGES,),
    "torch.distributed.pipelining.schedules.PipelineScheduleSingle": (START_OF_STAGE,),
    "torch.distributed.pipelining.stage._PipelineStageBase": ("forward_one_chunk", "backward_one_chunk"),
    "torch._subclasses.fake_tensor.FakeTensor": ("device",),
    "torch.nn.modules.module.Module": ("to", "compile", MODULE_APPLY, MODULE_CALL),
    "torch.nn.parallel.distributed.DistributedDataParallel": ("__init__", "forward", "register_comm_hook"),
    "torch.utils.data.dataloader.DataLoader": ("__init__",),
}
"""All that is replaced in torch for a while, by module or class. None has a hook that comes before it."""

SHARDING_FOLDER = "_fully_shard"
SHAPES_FILE = "_sharding_prop.py"
"""Where torch's frames are told apart: FSDP2's makes parameters and gradients, DTensor's only asks for shapes."""

FUNCTIONAL_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of functional collectives, beside c10d: a mode is shown nothing else of them."""

READ_VALUE: Any = torch.ops.aten._local_scalar_dense.default
"""The operator of `Tensor.item` in a mode."""

COPY_TO: Any = torch.ops.aten._to_copy.default
"""The operator of `Tensor.to` in a mode."""


class FakeTensorMode(_FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves its base untyped
    """Makes tensors without values; torch documents the base under this path. Deep copies of tensors share the mode.

    torch copies the mode with each tensor, and in it weak references to the storages of known numbers, which are raw
    pointers: both copies free them, and Python ends with a segmentation fault some time later.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensorMode:
        return self


@contextmanager
def replaced(*entries: tuple[Any, str, Any]) -> Iterator[None]:
    """Have owners hold other values in this context: (owner, name, value). Those of torch must be in `REPLACED`."""
    for owner, name, _ in entries:
        where = name_of_owner(owner)
        assert where.split(".")[0] != "torch" or name in REPLACED.get(where, ()), f"{where}.{name}"
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in entries]
    for owner, name, value in entries:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def name_of_owner(owner: Any) -> str:
    """Return what `REPLACED` calls a module or a class."""
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


def movers_of_states() -> list[Any]:
    """Return the modules of FSDP2 that have `MOVE_STATES`: one that defines it, and where it is used."""
    return [one for one in (_fsdp_init, _fully_shard) if hasattr(one, MOVE_STATES)]


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread. Nothing public says so."""
    return torch._C._current_graph_task_id() != -1


def has_function_modes() -> bool:
    """Whether any function mode is on: in autograd's own thread none is. Nothing public says so."""
    return torch._C._len_torch_function_stack() > 0


def shape_mode() -> Any:
    """Return the innermost mode of tensors without values, None where none is on: DTensor uses one of its own."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor. `to_local` runs operators, which would be counted."""
    return tensor._local_tensor


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module itself, to write to: setting an attribute would run what watches a script."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a module itself, to write to: setting an attribute would run what watches a script."""
    return module._buffers


def apply_to_tensors(module: nn.Module, function: Any) -> None:
    """Do what `Module.to` does, with any function. There is no public way to change tensors in place of moving them."""
    module._apply(function)  # type: ignore[no-untyped-call]


def autocast_type(mode: torch.autocast) -> torch.dtype | None:
    """Return the type that a context of autocast computes in, None where it is off. It can be given, and not read."""
    return mode.fast_dtype if mode._enabled else None


def stages_of(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> list[Any]:
    """Return the stages of a schedule. They can be given, and not read."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def is_boxed_group(argument: Any) -> bool:
    """Whether an operator's argument is a process group as C++ hands it on; its class is told by name alone."""
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group that functional collectives call so. Raises what torch does for another name."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(name))  # type: ignore[attr-defined]
    return group


class SteadyReducer:
    """DDP's reducer, which keeps its first buckets; the later ones hold the same parameters in another order.

    DDP asks it in every forward pass, by a private name, and has no option against it.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
