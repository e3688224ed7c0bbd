"""Names of torch that the runtime uses and torch does not promise to keep, and why there is no public way.

Private names, methods of torch's classes that are replaced or overridden, and what torch writes in errors. All was seen
in torch 2.11 and 2.13, unless an entry says otherwise. `tests/test_torch_contract.py` asks each new torch for it.
Runs without values have a door of their own, `paraplan.runtime.fake.torch_private`.
"""

from __future__ import annotations

import dis
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]  # re-exported from C++ unmarked
from torch.distributed.pipelining import PipelineStage as PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from paraplan.model.trace_torch_private import FLASH_ATTENTION as FLASH_ATTENTION
from paraplan.model.trace_torch_private import GROUPED_MM as GROUPED_MM
from paraplan.model.trace_torch_private import TorchDispatchMode as TorchDispatchMode
from paraplan.model.trace_torch_private import all_taken_for_nonzero as all_taken_for_nonzero
from paraplan.model.trace_torch_private import schema_of as schema_of
from paraplan.model.trace_torch_private import storage_key as storage_key

__all__ = [  # of what is imported; names of this module's own are offered as they are
    "FLASH_ATTENTION",
    "GROUPED_MM",
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PipelineStage",
    "TorchDispatchMode",
    "all_taken_for_nonzero",
    "pytree",
    "stage_backward_weight",
    "storage_key",
    "unset_fake_temporarily",
]

BatchNorm = _BatchNorm
local_shape_and_offset = compute_local_shape_and_global_offset

RE_EXPORTED = {
    "BatchNorm": "the base of all batch norms, those of a user too; the public classes have no other in common",
    "FakeTensor": "the tensors of a run without values; torch documents the class under this path",
    "FLASH_ATTENTION": "see paraplan.model.trace_torch_private",
    "GROUPED_MM": "see paraplan.model.trace_torch_private",
    "HigherOrderOperator": "what a mode is shown of calls that take functions; no public name for the type",
    "OpOverload": "the type of torch.ops.aten.mm.default, which a mode is shown; no public name for it",
    "OpOverloadPacket": "the type of torch.ops.aten.mm, which a user may name in a policy; no public name for it",
    "PipelineStage": "the class is public; that schedules call its perform_reduce_grad and backward_maybe_with_nosync, "
    "which ReplicatedStage overrides, is written nowhere",
    "TorchDispatchMode": "see paraplan.model.trace_torch_private",
    "all_taken_for_nonzero": "see paraplan.model.trace_torch_private",
    "local_shape_and_offset": "which part of a DTensor a rank has; it has no method that says so",
    "pytree": "tensors in nested containers; torch has no public module for it",
    "schema_of": "see paraplan.model.trace_torch_private",
    "stage_backward_weight": "the second half of a backward pass (zero bubble); a stage calls it from one method alone",
    "storage_key": "see paraplan.model.trace_torch_private",
    "unset_fake_temporarily": "numbers in the midst of a run without values; public modes cannot be left from inside",
}
"""Names that are handed on as they are, and why."""

LOST_PEER = "Connection closed by peer"
"""Gloo's error on a rank whose peer has ended (transport/tcp/pair.cc); the error is a plain RuntimeError."""

LOST_CONNECTION = (LOST_PEER, "Connection reset by peer", "Broken pipe", "Socket closed")
"""Errors of gloo and the system about a connection that is gone."""

TIMED_OUT = re.compile(r"Timed out waiting (\d+)\s?ms for|Application timeout caused pair closure", re.IGNORECASE)
"""Gloo's error after a timeout (transport/tcp/unbound_buffer.cc and pair.cc); the error is a plain RuntimeError."""

NO_SHARDING = "in-place operations that require placement changes"
WRITTEN_IN_PLACE = "has been modified by an inplace operation"
NO_GRAPH = "does not require grad"
USED_TWICE = "Trying to backward through the graph a second time"
ONE_ENTRY = "Expected more than 1 value per channel"
NO_STORAGE = "are out of bounds for storage of size 0"
SPARSE_GRADIENT = "from the 'Sparse"
MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
"""DTensor's error where a shard meets a plain tensor; the error is a plain RuntimeError."""

NO_HOST_MEMORY = "can't allocate memory"
"""The error of the CPU's allocator (c10/core/impl/alloc_cpu.cpp); `OutOfMemoryError` is for GPUs alone."""

NOT_SUPPORTED = "not support"
"""Gloo's error for a collective that it lacks; the error is a plain RuntimeError."""

VIEW_WARNING = r"FSDP2-wrapped module.* returned a view tensor"
"""FSDP2's warning about a model that ends in a view; it has no option for it."""

NOISY_LOGGERS = {
    "torch.distributed.tensor._redistribute": "ERROR",
    "torch.distributed.pipelining.schedules": "CRITICAL",
}
"""Loggers that tell a user nothing here, by the level from which they are heard; torch has no option for them."""

BACKWARD_FRAME = ("autograd/graph.py", "_engine_run_backward")
"""The file and function of torch in which a rank is during a backward pass: where its hooks wait, they are C++."""

PIPELINING_FOLDER = "distributed/pipelining"
COLLECTIVES_FILE = "distributed_c10d.py"
"""Where torch's frames are told apart: no public record says in which call a rank is."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_of_torch(error: BaseException) -> bool:
    """Whether torch raised `error`: its Python code, or an operation that was called in the frame of a script."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    frame = traceback.tb_frame
    is_statement = dis.opname[frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    is_operation = type(error) in (RuntimeError, NotImplementedError) and not is_statement
    return is_operation or frame.f_globals.get("__name__", "").split(".")[0] == "torch"


def is_compiler_loaded() -> bool:
    """Whether anything was compiled in this process. `torch.compiler` would load the compiler to say so."""
    return "torch._dynamo" in sys.modules


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place. Saved tensors are checked by it; nothing public shows it."""
    return tensor._version


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks of `Tensor.register_hook`. They can be registered in public, and not read."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Return those of `register_post_accumulate_grad_hook`, which cannot be read in public either."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    return list((hooks or {}).values())


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks after and before a forward pass. They can be registered in public, and not read."""
    return module._forward_hooks, module._forward_pre_hooks


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers. `named_buffers` gives a copy, and only those that are there."""
    return module._buffers


def submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's own modules. In public it is written by `setattr`, which models override."""
    return module._modules


is_view = torch.Tensor._is_view
"""Whether a tensor is a view for autograd, which cannot be detached in place. Nothing public says so."""

without_base: Any = torch.ops.aten._unsafe_view.default
"""`without_base(made, made.shape)` is a tensor that nobody else has as no view for autograd: code may write into it.

torch's own linear layers do so; in public it takes a copy.
"""


def lerp_all(tensors: Sequence[torch.Tensor], towards: Sequence[torch.Tensor], weight: float) -> None:
    """Move each tensor by `weight` towards another: one kernel for all. `torch.lerp` starts one for each."""
    torch._foreach_lerp_(list(tensors), list(towards), weight)


def multiply_all(tensors: Sequence[torch.Tensor], by: float | torch.Tensor) -> None:
    """Multiply all tensors: one kernel for all. `clip_grads_with_norm_` does so with a factor of its own alone."""
    torch._foreach_mul_(list(tensors), by)


def dtensor_like(local: torch.Tensor, like: DTensor, *, requires_grad: bool = False) -> DTensor:
    """Return `local` as a DTensor of the layout of `like`, where `local` is. `from_local` moves it to the mesh."""
    return DTensor(local, like._spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def set_shards_by(set_data: Callable[[DTensor, torch.Tensor], None]) -> None:
    """Have `shard.data = values` call `set_data`. torch swaps what lies under a DTensor, which nothing reads."""
    plain: Any = torch.Tensor.data
    DTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]


def give_memory(shard: DTensor, local: torch.Tensor) -> None:
    """Have a DTensor be over the memory of `local` from now on. In public it keeps what it was made of."""
    shard._local_tensor = local


def tell_numbers_of_shards_by(check: Callable[[DTensor], None]) -> None:
    """Have `item`, float, int and bool of a DTensor call `check` first. torch gives what this rank has of a sum."""

    def number(operator: OpOverload, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        check(args[0])
        return operator(args[0].to_local())

    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = number


def watch_views_of_copies(check: Callable[[Any], None]) -> None:
    """Have a view that DTensor takes of a gathered copy call `check(mesh)`: what is written there is nowhere else."""
    dispatcher: Any = type(DTensor._op_dispatcher)
    plain = dispatcher.redistribute_local_args

    @wraps(plain)
    def redistribute(op_info: Any, wanted: Any, *rest: Any) -> None:
        infos = [argument.alias_info for argument in schema_of(wanted.op).arguments]
        if any(info is not None and not info.is_write for info in infos):
            check(op_info.compute_mesh)
        plain(op_info, wanted, *rest)

    dispatcher.redistribute_local_args = staticmethod(redistribute)


def check_batch_norm_input(module: BatchNorm, given: torch.Tensor) -> None:
    """Raise ValueError where `given` has not the dimensions of a batch norm: each class has its own rule, in here."""
    module._check_input_dim(given)  # type: ignore[no-untyped-call]


def ignore_in_replicas(module: nn.Module, names: Iterable[str]) -> None:
    """Have DDP neither reduce nor send what `names` names. DDP's constructor has no argument for it."""
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, list(names))


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after a step. They can be registered in public, and not read."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def function_modes() -> list[TorchFunctionMode]:
    """Return the modes that are on, the outermost first: what runs later enters them again. Nothing public has them."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def following_writes() -> AbstractContextManager[Any]:
    """Have `detach` share the count of writes in this context, as torch's selective checkpoint does, inside modes."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def default_store() -> Store:
    """Return the store by which the ranks have found each other. A public one would need a port of its own."""
    store: Store = distributed_c10d._get_default_store()
    return store


def names_of_groups() -> Mapping[dist.ProcessGroup, str]:
    """Return all groups of this process with torch's names for them. There is no public list of groups."""
    return distributed_c10d._world.pg_names


def group_options(backend: str, *, timeout: timedelta) -> Any:
    """Return options for `DeviceMesh(backend_override=)`. gloo has no public class, and neither a public timeout."""
    # torch's annotations lack both.
    options: Any = dist.ProcessGroupNCCL.Options() if backend == "nccl" else dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    return options


def timeout_of_world(device: torch.device) -> timedelta:
    """Return after what time collectives of the default group fail. It can be given in public, and not read."""
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    timeout: timedelta = backend.options._timeout
    return timeout


_ProcessGroup: Any = dist.ProcessGroup  # its methods have several forms, of which torch calls one


class GroupOverGloo(_ProcessGroup):  # type: ignore[misc]
    """A group that a subclass carries out with `gloo`, a group of the same ranks.

    It says how in `run(name, *arguments)`, and overrides the collectives by their public names; two have none.
    """

    run: Callable[..., dist.Work]

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.gloo = dist.ProcessGroup(store, rank, size)
        self.gloo._set_default_backend(kind)
        for group, device in ((self.gloo, "cpu"), (self, "cpu"), (self, "cuda")):
            group._register_backend(torch.device(device), kind, backend)

    def _allgather_base(self, *arguments: Any) -> dist.Work:
        return self.run("_allgather_base", *arguments)

    def _reduce_scatter_base(self, *arguments: Any) -> dist.Work:
        return self.run("_reduce_scatter_base", *arguments)


def finished_work(result: list[torch.Tensor]) -> dist.Work:
    """Return the work of a collective that is done, with what it has written."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


def recorded_collectives() -> list[dict[str, Any]] | None:
    """Return what torch's flight recorder has of gloo's calls; None for a torch without it.

    torch's own reader takes files, which NCCL's watchdog writes when it ends the process.
    """
    from torch._C import _distributed_c10d

    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else json.loads(dump(True, False)).get("entries") or []


@contextmanager
def watching_functions(watch: Callable[..., None]) -> Iterator[None]:
    """Have autograd.Functions call `watch(cls, args, kwargs)` before they are applied, in this context.

    Tensor subclasses are not asked: `apply` unwraps none, and calls no `__torch_function__`.
    """
    plain: Any = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        watch(cls, args, kwargs)
        return plain.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


@contextmanager
def in_place_of_reentrant(apply: Callable[..., Any]) -> Iterator[None]:
    """Have `torch.utils.checkpoint(use_reentrant=True)` call `apply` in this context: it has no hook."""
    CheckpointFunction.apply = apply  # type: ignore[method-assign]  # of this class alone; undone below
    try:
        yield
    finally:
        del CheckpointFunction.apply


def keep_compiled_buffers() -> None:
    """Have backward passes of compiled code not reuse what they keep: passes in two halves read it twice."""
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False


@contextmanager
def attention_replaced(attend: Callable[..., Any]) -> Iterator[None]:
    """Have code call `attend` for torch's attention in this context; in a mode torch.compile follows every call."""
    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


TensorClass = TypeVar("TensorClass", bound=torch.Tensor)


def without_memory(cls: type[TensorClass], shape: Sequence[int], like: torch.Tensor) -> TensorClass:
    """Return an instance of `cls`, with a `__torch_dispatch__` of its own, that has a shape and no memory.

    Of a plain tensor `Tensor.as_subclass` makes one, of a tensor of a run without values it does not.
    """
    made: TensorClass = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
    return made
