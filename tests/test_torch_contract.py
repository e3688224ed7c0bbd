"""What paraplan relies on in torch beyond what torch promises: a new torch that lacks some of it fails here first."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import mmap
import re
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch_doors
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from paraplan.launch.torch_private import elastic, texts
from paraplan.model import trace_torch_private as trace_door
from paraplan.runtime import torch_private as door
from paraplan.runtime.fake import torch_private as fake_door

TORCH = Path(torch.__file__).parent


class Contract(NamedTuple):
    """A name of torch, `module:name`, what it is used for, and the parameters that it is called with, in order."""

    where: str
    used_for: str
    takes: tuple[str, ...] | None = None


_FSDP = "torch.distributed.fsdp._fully_shard"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_ELASTIC = "torch.distributed.elastic"
_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_C10D = "torch.distributed.distributed_c10d"
_DISPATCH = "torch.utils._python_dispatch:TorchDispatchMode"

CONTRACTS = (
    Contract("torch.autograd:Variable._execution_engine.queue_callback", "when a backward pass has done its graph"),
    Contract("torch._C._dynamo.eval_frame:_FrameAction.SKIP", "marks of steps that torch.compile leaves as they are"),
    Contract("torch._C._dynamo.eval_frame:_FrameExecStrategy", "as above"),
    Contract("torch.autograd:_profiler_enabled", "whether a script profiles itself", ()),
    Contract("torch.autograd.profiler:profile._prepare_trace", "that a script begins to profile itself", ("self",)),
    Contract("torch.utils.data.dataloader:_BaseDataLoaderIter.__next__", "time in data loaders", ("self",)),
    Contract("torch.distributed:_broadcast_coalesced", "waits of DDP for buffers"),
    Contract("torch.nn.modules.batchnorm:_BatchNorm", "layers whose statistics a checked script leaves as they are"),
    Contract("torch.nn.modules.dropout:_DropoutNd", "layers that a checked script leaves out"),
    Contract(
        "torch.distributed.tensor:DTensor._op_dispatcher.redistribute_local_args",
        "views of shards that a script takes",
        ("op_info", "suggested_input_schema"),
    ),
    Contract("torch.distributed:Work.wait", "waits in collectives"),
    Contract("torch.distributed._functional_collectives:wait_tensor", "waits in collectives of DTensors", ("tensor",)),
    Contract("torch._dynamo.compiled_autograd:compiled_autograd_enabled", "backward passes that are compiled"),
    Contract(_DISPATCH, "every mode that sees operators: tracing, recomputing, fake runs"),
    Contract(f"{_DISPATCH}.__torch_dispatch__", "what a mode overrides", ("self", "func", "types", "args", "kwargs")),
    Contract("torch:UntypedStorage._cdata", "storages told apart: saved activations, memory of fake runs"),
    Contract("torch.ops:aten._grouped_mm", "experts' products in traces and fake runs"),
    Contract("torch.ops:aten._scaled_dot_product_flash_attention", "attention as on a GPU in traces"),
    Contract("torch.ops:aten._scaled_dot_product_efficient_attention", "attention as on a GPU in traces"),
    Contract("torch.utils._pytree:tree_flatten", "tensors of nested inputs", ("tree",)),
    Contract("torch.utils._pytree:tree_unflatten", "tensors of nested inputs", ("leaves", "treespec")),
    Contract("torch.utils._pytree:tree_leaves", "tensors of nested inputs", ("tree",)),
    Contract("torch.utils._pytree:tree_map", "tensors of nested inputs", ("func", "tree")),
    Contract("torch._ops:OpOverload.overloadpacket", "operators of a recompute policy"),
    Contract("torch._ops:OpOverload.name", "operators of a recompute policy", ("self",)),
    Contract("torch._ops:OpOverloadPacket.overloads", "operators of a recompute policy", ("self",)),
    Contract("torch._ops:HigherOrderOperator", "operators of a recompute policy"),
    Contract("torch.ops:aten.mm.default._schema.is_mutable", "which operators' results may be kept"),
    Contract("torch.ops:aten.mm.default._schema.returns", "which operators' results may be kept"),
    Contract("torch._subclasses.fake_tensor:FakeTensor.fake_device", "tensors of fake runs"),
    Contract("torch._subclasses.fake_tensor:FakeTensor.device", "the device of tensors of fake runs"),
    Contract(
        "torch._subclasses.fake_tensor:FakeTensorMode.__init__",
        "fake runs",
        ("self", "allow_fallback_kernels", "allow_non_fake_inputs"),
    ),
    Contract("torch._subclasses.fake_tensor:unset_fake_temporarily", "trials with numbers inside of fake runs", ()),
    Contract("torch._subclasses.fake_tensor:DataDependentOutputException", "values that are read in fake runs"),
    Contract("torch._subclasses.fake_tensor:DynamicOutputShapeException", "shapes by values in fake runs"),
    Contract("torch.nn.modules.batchnorm:_BatchNorm._check_input_dim", "batch norms over ranks", ("self", "input")),
    Contract("torch.nn:Module._parameters", "fake scripts: parameters put in place of others"),
    Contract("torch.nn:Module._buffers", "fake scripts: buffers put in place of others"),
    Contract("torch.nn:Module._apply", "fake scripts: moving modules", ("self", "fn", "recurse")),
    Contract("torch.nn:Module._call_impl", "fake scripts: what runs again in backward passes"),
    Contract(
        "torch.nn.modules.module:register_module_parameter_registration_hook", "runtime.without_weights", ("hook",)
    ),
    Contract("torch.nn.modules.module:register_module_buffer_registration_hook", "fake scripts", ("hook",)),
    Contract("torch:Tensor._version", "whether a gradient, a kept result or a weight was written"),
    Contract("torch:Tensor._backward_hooks", "whether gradients of parameters are hooked"),
    Contract("torch:Tensor._post_accumulate_grad_hooks", "as above"),
    Contract("torch.ops:aten._unsafe_view.default", "results of layers that code writes into"),
    Contract("torch:Tensor._is_view", "sums in place; what pipeline stages send", ("self",)),
    Contract("torch:Tensor._make_wrapper_subclass", "embeddings of some tokens in the shape of all"),
    Contract("torch:_foreach_mul_", "gradient clipping"),
    Contract("torch:_foreach_lerp_", "averages of weights"),
    Contract("torch:DisableTorchFunction", "looking at tensors in fake runs"),
    Contract("torch._C:_SetExcludeDispatchKeyGuard", "kept results that see writes to them"),
    Contract("torch._C:_current_graph_task_id", "fake runs: whether a backward pass runs"),
    Contract("torch._C._functorch:peek_interpreter_stack", "checks of scripts: whether tensors have values"),
    Contract("torch._C._functorch:is_functorch_wrapped_tensor", "checks of scripts: what torch.func is given"),
    Contract("torch._C._functorch:get_unwrapped", "checks of scripts: what torch.func is given"),
    Contract("torch._C:_len_torch_function_stack", "fake runs: whether autograd has left modes out"),
    Contract("torch._C:_get_dispatch_mode", "fake runs: DTensor asking for shapes"),
    Contract("torch._C:_TorchDispatchModeKey.FAKE", "fake runs: DTensor asking for shapes"),
    Contract("torch._C:_get_accelerator", "fake scripts: fully_shard without a mesh"),
    Contract("torch._C:_distributed_c10d._dump_fr_trace_json", "which collective a rank waits in"),
    Contract("torch.overrides:_get_current_function_mode_stack", "recompute=selective: modes of the second run", ()),
    Contract("torch.autograd.function:BackwardCFunction.apply", "fake scripts: functions of a user in backward passes"),
    Contract("torch.autograd:Function.apply", "loss functions that hide what they do"),
    Contract("torch.fx.experimental._config:meta_nonzero_assume_all_nonzero", "models that pick entries by a mask"),
    Contract("torch.utils.checkpoint:CheckpointFunction.apply", "models that recompute with use_reentrant=True"),
    Contract("torch.autograd.graph:_engine_run_backward", "where a rank waits, by its stack"),
    Contract("torch.optim:Optimizer.register_step_pre_hook", "what `step_hooks` copies", ("self", "hook")),
    Contract(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        "parts of checkpoints",
        ("global_shape", "mesh", "placements"),
    ),
    Contract("torch.distributed.tensor:DTensor._spec", "optimizer state on the host, storage of shards"),
    Contract("torch.distributed.tensor:DTensor._local_tensor", "fake runs: storages of shards"),
    Contract(
        "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "sharded tables beside DDP",
        ("module", "params_and_buffers_to_ignore"),
    ),
    Contract(f"{_C10D}:_get_default_store", "words of ranks to each other", ()),
    Contract(f"{_C10D}:_resolve_process_group", "counting functional collectives"),
    Contract(f"{_C10D}:_abort_process_group", "ranks that stay: groups whose peers are gone", ("group",)),
    Contract(f"{_C10D}:_world.pg_map", "ranks that stay: groups that are aborted"),
    Contract(f"{_C10D}:_world.group_count", "ranks that stay: a group that was being made"),
    Contract(f"{_C10D}:_unregister_all_process_groups", "ranks that stay: a group that was being made"),
    *(
        Contract(f"{_C10D}:_world.{name}", "ranks that stay: a group that was being made")
        for name in ("pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")
    ),
    Contract("torch.utils.data._utils.signal_handling:_SIGCHLD_handler_set", "ranks that stay: data loaders"),
    Contract("torch.nn.modules.module:_global_forward_hooks", "ranks that stay: hooks that the script has set"),
    Contract("torch.nn.modules.module:_global_forward_pre_hooks", "as above"),
    Contract("torch.nn.modules.module:_global_backward_hooks", "as above"),
    Contract("torch._dynamo:reset", "ranks that stay: compiled code", ()),
    Contract("torch._inductor.async_compile:shutdown_compile_workers", "ranks that stay: processes that compile", ()),
    Contract(f"{_C10D}:_world.pg_names", "groups of a collective that timed out"),
    Contract("torch.distributed:ProcessGroup._get_backend", "the timeout of the default group"),
    Contract("torch.distributed:ProcessGroupGloo._Options", "the timeout of other groups"),
    Contract("torch.distributed:ProcessGroup._register_backend", "ranks that share a GPU"),
    Contract("torch.distributed:ProcessGroup._set_default_backend", "as above"),
    Contract("torch.distributed:ProcessGroup._allgather_base", "as above"),
    Contract("torch.distributed:ProcessGroup._reduce_scatter_base", "as above"),
    Contract("torch._C._distributed_c10d:_create_work_from_future", "as above"),
    Contract("torch.testing._internal.distributed.fake_pg:FakeStore", "fake worlds"),
    Contract(
        "torch.distributed.pipelining._backward:stage_backward_weight",
        "zero bubble",
        ("weights", "param_groups", "retain_graph"),
    ),
    Contract(f"{_STAGE}.perform_reduce_grad", "gradients of pipeline stages", ("self", "grad_scale_factor")),
    Contract(
        f"{_STAGE}.backward_maybe_with_nosync",
        "backward passes of pipeline stages",
        ("self", "backward_type", "bwd_kwargs", "last_backward"),
    ),
    Contract(f"{_STAGE}.forward_one_chunk", "fake steps", ("self", "fwd_chunk_id", "args", "kwargs")),
    Contract(f"{_STAGE}.backward_one_chunk", "fake steps", ("self", "bwd_chunk_id")),
    Contract(
        "torch.distributed.pipelining.stage:_RecvInfo",
        "fake steps: buffers of a stage",
        ("input_name", "source", "buffer"),
    ),
    Contract(f"{_SCHEDULES}:PipelineScheduleSingle._initialize_stage", "fake steps: what is sent once", ("self",)),
    Contract(f"{_SCHEDULES}:PipelineScheduleMulti._initialize_stages", "fake steps: what is sent once", ("self",)),
    Contract(
        f"{_FSDP}._fsdp_init:_move_states_to_device", "fake scripts: buffers of FSDP", ("params", "buffers", "device")
    ),
    Contract(f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward", "fake scripts: memory of FSDP", ("self",)),
    Contract(
        f"{_FSDP}._fsdp_state:FSDPState.init",
        "fake scripts: precision of FSDP",
        ("self", "modules", "device", "mp_policy"),
    ),
    Contract(
        f"{_FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback", "fake scripts: memory of FSDP", ("self",)
    ),
    Contract("torch:cuda._lazy_init", "fake GPUs"),
    Contract("torch:cuda._exchange_device", "fake GPUs"),
    Contract("torch:cuda._maybe_exchange_device", "fake GPUs"),
    Contract("torch:cuda.memory._record_memory_history", "fake GPUs"),
    Contract("torch:cuda.memory._dump_snapshot", "fake GPUs"),
    Contract(f"{_AGENT}._monitor_workers", "lost nodes and restarts", ("self", "worker_group")),
    Contract(f"{_AGENT}._restart_workers", "restarts told in words", ("self", "worker_group")),
    Contract(f"{_AGENT}._rendezvous", "who has come to a rendezvous", ("self", "worker_group")),
    Contract(
        f"{_AGENT}._assign_worker_ranks",
        "nodes that are lost while they meet",
        ("self", "store", "group_rank", "group_world_size", "spec"),
    ),
    Contract(f"{_AGENT}._start_workers", "a plan for the nodes that have come", ("self", "worker_group")),
    Contract(f"{_AGENT}._exit_barrier", "nodes that are done", ("self",)),
    Contract(f"{_AGENT}.get_worker_group", "nodes of a job"),
    Contract(
        f"{_ELASTIC}.multiprocessing:PContext.__init__",
        "ranks started by paraplan",
        ("self", "name", "entrypoint", "args", "envs", "logs_specs"),
    ),
    Contract(f"{_ELASTIC}.multiprocessing:PContext._start", "ranks started by paraplan", ("self",)),
    Contract(f"{_ELASTIC}.multiprocessing:PContext._poll", "ranks watched by paraplan", ("self",)),
    Contract(
        f"{_ELASTIC}.multiprocessing:PContext._close", "ranks stopped by paraplan", ("self", "death_sig", "timeout")
    ),
    Contract(
        f"{_ELASTIC}.agent.server.local_elastic_agent:start_processes",
        "bound to paraplan's own",
        ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes", "start_method", "numa_options"),
    ),
    Contract("torch.distributed.launcher.api:LocalElasticAgent", "bound to paraplan's own"),
    Contract(f"{_ELASTIC}.rendezvous.c10d_rendezvous_backend:TCPStore", "bound to paraplan's own"),
    Contract(f"{_ELASTIC}.rendezvous.static_tcp_rendezvous:TCPStore", "bound to paraplan's own"),
    Contract(
        f"{_ELASTIC}.rendezvous.c10d_rendezvous_backend:C10dRendezvousBackend._call_store",
        "nodes that are cut off",
        ("self", "store_op", "args", "kwargs"),
    ),
    Contract(f"{_ELASTIC}.rendezvous.c10d_rendezvous_backend:C10dRendezvousBackend._NULL_SENTINEL", "signed states"),
    Contract(f"{_ELASTIC}.rendezvous.dynamic_rendezvous:_NodeDesc", "signed states", ("addr", "pid", "local_id")),
    Contract(f"{_ELASTIC}.rendezvous.dynamic_rendezvous:_RendezvousState", "signed states", ()),
    Contract(
        f"{_ELASTIC}.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler._create_tcp_store_server",
        "stores that listen at one address",
        ("self", "master_addr", "master_port"),
    ),
    Contract(
        "torch.numa.binding:_maybe_wrap_command_args_with_numa_binding",
        "--numa-binding",
        ("command_args", "gpu_index", "numa_options"),
    ),
    Contract("torch.distributed.run:get_args_parser", "torchrun's options", ()),
)

_FLAT = "torch.distributed.fsdp._flat_param"
OF_OBJECTS = {
    "_handle": ("torch.distributed.fsdp.fully_sharded_data_parallel", "self._handle"),
    "_inter_node_pg": ("torch.distributed.fsdp._init_utils", "state._inter_node_pg = "),
    "_fsdp_param_groups": ("torch.distributed.fsdp._fully_shard._fsdp_state", "self._fsdp_param_group"),
    "_fsdp_param_group": ("torch.distributed.fsdp._fully_shard._fsdp_state", "_fsdp_param_group"),
    "_get_fsdp_state": ("torch.distributed.fsdp._fully_shard._fully_shard", "def _get_fsdp_state"),
    "_fqns": (_FLAT, "self._fqns = "),
    "_shapes": (_FLAT, "self._shapes = "),
    "_params": (_FLAT, "self._params = "),
    "_numels_with_padding": (_FLAT, "self._numels_with_padding = "),
    "_is_padding_mask": (_FLAT, "self._is_padding_mask = "),
    "_optimizer_step_pre_hooks": ("torch.optim.optimizer", "self._optimizer_step_pre_hooks = "),
    "_optimizer_step_post_hooks": ("torch.optim.optimizer", "self._optimizer_step_post_hooks = "),
    "_remaining_restarts": (f"{_ELASTIC}.agent.server.api", "self._remaining_restarts = "),
    "_custom_op_handlers": ("torch.distributed.tensor._dispatch", "self._custom_op_handlers = "),
    "_key": (f"{_ELASTIC}.rendezvous.c10d_rendezvous_backend", "self._key = "),
    "_store": (f"{_ELASTIC}.rendezvous.dynamic_rendezvous", "self._store = "),
    "_this_node": (f"{_ELASTIC}.rendezvous.dynamic_rendezvous", "self._this_node = "),
    "_state_holder": (f"{_ELASTIC}.rendezvous.dynamic_rendezvous", "self._state_holder = "),
    "_bootstrap_store_info": (f"{_ELASTIC}.rendezvous.dynamic_rendezvous", "self._bootstrap_store_info"),
    "_forward_hooks": ("torch.nn.modules.module", "self._forward_hooks[handle.id] = hook"),
    "_forward_pre_hooks": ("torch.nn.modules.module", "self._forward_pre_hooks[handle.id] = hook"),
    "_modules": ("torch.nn.modules.module", "self._modules[name] = module"),
    "_stage": (_SCHEDULES, "self._stage = "),
    "_stages": (_SCHEDULES, "self._stages = "),
    "_enabled": ("torch.amp.autocast_mode", "self._enabled = "),
    "_rebuild_buckets": ("torch.nn.parallel.distributed", "self.reducer._rebuild_buckets()"),
    "_redirects": (f"{_ELASTIC}.multiprocessing.api", "self._redirects = "),
    "_tee": (f"{_ELASTIC}.multiprocessing.api", "self._tee = "),
}
"""Attributes that objects get when they are made, or that torch calls: the line of its source that shows it."""

TESTED_BELOW = {
    "_dump_nccl_trace_json",
    "_timeout",
    "_type",
    "_local_scalar_dense",
    "_to_copy",
    "_c10d_functional",
    "_c10d_functional_autograd",
}


@cache
def found(where: str) -> Any:
    module, _, name = where.partition(":")
    value: Any = torch.ops if module == "torch.ops" else importlib.import_module(module)
    for part in name.split("."):
        value = vars(nn.Module())[part] if part in ("_parameters", "_buffers") else getattr(value, part)
    return value


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.where)
def test_torch_has_what_the_doors_use(contract: Contract) -> None:
    try:
        value = found(contract.where)
    except (AttributeError, ImportError) as error:
        raise AssertionError(
            f"torch {torch.__version__} lacks {contract.where}, used for: {contract.used_for}"
        ) from error
    if contract.takes is None:
        return
    try:
        taken = tuple(inspect.signature(value).parameters)
    except ValueError:  # a method of C++ has no signature
        return
    assert taken[: len(contract.takes)] == contract.takes, (
        f"{contract.where} of torch {torch.__version__} takes {taken}, not {contract.takes}; "
        f"used for: {contract.used_for}"
    )


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_torchs_objects_have_the_attributes_that_the_doors_read(name: str) -> None:
    module, line = OF_OBJECTS[name]
    source = inspect.getsource(importlib.import_module(module))
    assert line in source or line.replace(" = ", ": ") in source, f"{module} has no {line.strip()!r} any more"


def test_every_private_name_of_the_doors_has_a_contract() -> None:
    named = {part for contract in CONTRACTS for part in re.split(r"[.:]", contract.where)}
    replaced = {part for where in fake_door.REPLACED for part in where.split(".")}
    missing = torch_doors.private_names_of_doors() - named - replaced - OF_OBJECTS.keys() - TESTED_BELOW
    assert not missing


def test_no_module_uses_private_parts_of_torch_past_the_doors() -> None:
    uses = [use for path in torch_doors.MODULES for use in torch_doors.private_uses(path)]
    assert not uses, "\n".join(uses)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "from torch.distributed.tensor._utils import compute_local_shape_and_global_offset",
        "key = torch._C._current_graph_task_id()",
        "hooks = optimizer._optimizer_step_pre_hooks",
        "unheard = tensor._of_which_nobody_knows",
        "version = getattr(tensor, '_version')",
        "nn.Module.to = None",
        "setattr(nn.Module, 'to', None)",
        "del torch.cuda.is_available",
        "stack = 'torch._dynamo' in modules",
    ],
)
def test_a_module_past_the_doors_is_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"import torch\nfrom torch import nn\n{line}\n")
    assert list(torch_doors.private_uses(path))


def test_a_module_with_names_of_its_own_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import torch\nclass Own:\n    _held = 1\n\ndef read(own: Own) -> int:\n    return own._held\n")
    assert not list(torch_doors.private_uses(path))


def test_no_class_outside_of_the_doors_overrides_a_private_method_of_torch() -> None:
    doors = {".".join(path.relative_to(torch_doors.PACKAGE.parent).with_suffix("").parts) for path in torch_doors.DOORS}
    uses = []
    for path in torch_doors.MODULES:
        parts = path.relative_to(torch_doors.PACKAGE.parent).with_suffix("").parts
        if parts[1] not in ("runtime", "launch") or parts[-1] in ("__main__", "__init__"):
            continue
        for cls in vars(importlib.import_module(".".join(parts))).values():
            if isinstance(cls, type) and cls.__module__.startswith("paraplan.") and cls.__module__ not in doors:
                torchs = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "torch"]
                functions = [name for name, value in vars(cls).items() if inspect.isfunction(value)]
                private = [name for name in functions if re.fullmatch(r"_[a-z]\w*", name)]
                uses += [f"{cls}: {name}" for name in private if any(name in vars(base) for base in torchs)]
    assert not uses


def test_every_entry_of_a_door_says_why_it_is_there() -> None:
    for module in (trace_door, door, fake_door):
        for name, reason in module.RE_EXPORTED.items():
            assert hasattr(module, name)
            assert len(reason) > 20, name
    for module in (trace_door, door, fake_door, elastic):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                assert value.__doc__, name


def test_all_that_fake_runs_replace_is_there() -> None:
    # One of two names, by the version of torch; FSDP2's module that imports the function in some.
    optional = {"current_device_index", "current_device_idx", "set_device_index", "set_device_idx"}
    missing = []
    for where, names in fake_door.REPLACED.items():
        owner = _owner(where)
        assert fake_door.name_of_owner(owner) == where
        missing += [f"{where}.{name}" for name in names if not hasattr(owner, name) and name not in optional]
    assert set(missing) <= {f"{_FSDP}._fully_shard.{fake_door.MOVE_STATES}"}
    assert fake_door.movers_of_states()


def test_fake_runs_replace_nothing_of_torch_that_is_not_listed() -> None:
    with pytest.raises(AssertionError, match=r"torch\.cuda\.is_tf32_supported"):
        fake_door.replaced((torch.cuda, "is_tf32_supported", None)).__enter__()


def _owner(where: str) -> Any:
    module, names = where, []
    while True:
        try:
            owner: Any = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            names.insert(0, last)
    for name in names:
        owner = getattr(owner, name)
    return owner


def test_writes_are_counted_and_views_known() -> None:
    tensor = torch.zeros(4)
    before = door.version_of(tensor)
    tensor.add_(1.0)
    assert door.version_of(tensor) == before + 1
    assert door.is_view(tensor[:2])
    assert not door.is_view(tensor)
    assert not door.is_view(door.without_base(tensor[:2], tensor[:2].shape))
    assert door.storage_key(tensor) == door.storage_key(tensor[1:]) == door.storage_key(tensor.untyped_storage())
    assert door.storage_key(torch.zeros(4, device="meta")) != door.storage_key(tensor)


def test_hooks_on_gradients_are_seen() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not door.gradient_hooks(weight)
    assert not door.accumulation_hooks(weight)
    weight.register_hook(print)
    weight.register_post_accumulate_grad_hook(print)
    assert door.gradient_hooks(weight) == door.accumulation_hooks(weight) == [print]


def test_a_kept_result_sees_writes() -> None:
    seen: list[torch.Tensor] = []

    class Keeping(door.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                with door.following_writes():
                    seen.append(result.detach())
            return result

    with Keeping():
        result = torch.ones(2) * torch.ones(2)
        before = door.version_of(seen[0])
        result.add_(1.0)
    assert door.version_of(seen[0]) == before + 1


def test_modes_are_seen() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not fake_door.has_function_modes()
    with Mode() as mode:
        assert door.function_modes() == [mode]
        assert fake_door.has_function_modes()
    assert fake_door.shape_mode() is None
    with fake_door.FakeTensorMode() as fake:
        assert fake_door.shape_mode() is fake
    assert not fake_door.in_backward()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # as torch does once in a process
def test_deep_copies_without_values_share_the_mode() -> None:
    with fake_door.FakeTensorMode() as fake:
        copied: Any = copy.deepcopy(torch.empty(1))
    assert copied.fake_mode is fake


def test_operators_are_called_as_modes_are_shown_them() -> None:
    names: list[Any] = []

    class Noting(door.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func)
            return func(*args, **(kwargs or {}))

    with Noting():
        torch.ones(1).to(torch.float64).item()
    assert fake_door.COPY_TO in names
    assert fake_door.READ_VALUE in names
    assert {torch.ops._c10d_functional.all_reduce.default.namespace, "_c10d_functional_autograd"} == {
        *fake_door.FUNCTIONAL_COLLECTIVES
    }


def test_masks_without_values_pick_as_much_as_they_can() -> None:
    mask = torch.empty(2, 3, dtype=torch.bool, device="meta")
    with door.all_taken_for_nonzero():
        assert mask.nonzero().shape == (6, 2)
        assert torch.empty(2, 3, 4, device="meta")[mask].shape == (6, 4)
    with pytest.raises(NotImplementedError):
        mask.nonzero()


def test_attention_is_that_of_the_context_and_torchs_own_behind_it() -> None:
    own = torch.nn.functional.scaled_dot_product_attention
    with door.attention_replaced(lambda *operands: len(operands)):
        assert torch.nn.functional.scaled_dot_product_attention(1, 2, 3) == 3
    assert torch.nn.functional.scaled_dot_product_attention is own


def test_functions_of_autograd_are_watched_and_reentrant_checkpoints_replaced() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

    watched: list[Any] = []
    with door.watching_functions(lambda cls, args, kwargs: watched.append(cls)):
        assert Twice.apply(torch.ones(1)).item() == 2
    with door.in_place_of_reentrant(lambda *_: "replaced"):
        again = torch.utils.checkpoint.checkpoint(torch.relu, torch.ones(1), use_reentrant=True)
    assert watched == [Twice]
    assert again == "replaced"
    assert torch.utils.checkpoint.checkpoint(torch.relu, torch.ones(1, requires_grad=True), use_reentrant=True) == 1


def test_hooks_of_optimizers_are_read() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.register_step_post_hook(lambda *_: None)
    assert [len(hooks) for hooks in door.step_hooks(optimizer)] == [0, 1]


def test_groups_tell_their_timeout_and_names() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert door.timeout_of_world(torch.device("cpu")) == timedelta(seconds=77)
        assert door.group_options("gloo", timeout=timedelta(seconds=5))._timeout == timedelta(seconds=5)
        assert dist.group.WORLD in door.names_of_groups()
        assert fake_door.group_named(door.names_of_groups()[dist.group.WORLD]) is not None
        assert door.recorded_collectives() == []
        door.default_store().set("key", "value")
        boxed = dist.group.WORLD.boxed()
        assert fake_door.is_boxed_group(boxed)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        assert door.dtensor_like(torch.zeros(2), whole).placements == whole.placements
        assert fake_door.local_tensor(whole).tolist() == [1.0, 1.0]
        assert door.local_shape_and_offset(whole.shape, mesh, whole.placements) == ((2,), (0,))
    finally:
        dist.destroy_process_group()


IN_SOURCES = (
    ("distributed/tensor/_dispatch.py", door.MIXED_TENSORS, "a parameter that is read outside of its module"),
    ("distributed/tensor/_ops/utils.py", door.NO_SHARDING, "optimizers that write by masks"),
    ("distributed/elastic/agent/server/api.py", "Error waiting on exit barrier", "nodes that end one after the other"),
    ("distributed/elastic/multiprocessing/api.py", "(start_method:", "failures that are told in words"),
    ("distributed/elastic/rendezvous/dynamic_rendezvous.py", "failed to send a keep-alive", "nodes that end"),
    ("distributed/elastic/rendezvous/dynamic_rendezvous.py", "failed to shutdown the", "nodes that end"),
    ("distributed/elastic/rendezvous/api.py", texts.CLOSED_RENDEZVOUS, "a rendezvous that is closed"),
    ("distributed/elastic/rendezvous/api.py", texts.LATE_RENDEZVOUS, "too few nodes"),
    ("distributed/tensor/_sharding_prop.py", "class ShardingPropagator", "fake runs: shapes are nothing on a GPU"),
)


@pytest.mark.parametrize(("file", "text", "used_for"), IN_SOURCES, ids=lambda value: str(value)[:40])
def test_torch_still_says_so(file: str, text: str, used_for: str) -> None:
    assert text in (TORCH / file).read_text(), f"{file} no longer has {text!r}, used for: {used_for}"


IN_LIBRARIES = (
    (b"Connection closed by peer", "ranks that have ended"),
    (b"Application timeout caused pair closure", "collectives that time out"),
    (b"Timed out waiting", "collectives that time out"),
    (b"can't allocate memory", "hosts without memory"),
    (b"while trying to connect", "nodes that do not meet"),
)


@pytest.mark.parametrize(("text", "used_for"), IN_LIBRARIES, ids=lambda value: str(value)[:40])
def test_torchs_libraries_still_say_so(text: bytes, used_for: str) -> None:
    for name in ("lib/libtorch_cpu.so", "lib/libc10.so"):
        path = TORCH / name
        if not path.exists():
            pytest.skip(f"no {name}: another system's build")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(text) >= 0:
                return
    raise AssertionError(f"torch {torch.__version__} no longer says {text.decode()!r}, used for: {used_for}")


def test_nccls_flight_recorder_is_there_where_nccl_is() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    assert all(hasattr(torch._C._distributed_c10d, name) for name in texts.RECORDER_DUMPS)


def test_native_log_can_be_silenced() -> None:
    library = TORCH / elastic.LIBRARY
    if not library.exists():
        pytest.skip(f"no {elastic.LIBRARY}: another system's build")
    assert elastic.LOG_LEVEL.encode() in library.read_bytes()


def test_noisy_loggers_and_frames_are_where_the_runtime_looks() -> None:
    for name in door.NOISY_LOGGERS:
        importlib.import_module(name)
        assert name in logging.Logger.manager.loggerDict
    file, function = door.BACKWARD_FRAME
    assert f"def {function}(" in (TORCH / file).read_text()
    assert (TORCH / door.PIPELINING_FOLDER).is_dir()
    assert (TORCH / "distributed" / door.COLLECTIVES_FILE).exists()
    assert (TORCH / "distributed/fsdp" / fake_door.SHARDING_FOLDER).is_dir()


def test_the_agent_is_followed_step_by_step() -> None:
    """torch calls its private steps, and each ends in the public method that paraplan overrides."""
    called: list[str] = []

    class Agent(elastic.ElasticAgent):
        def __init__(self) -> None:
            self._remaining_restarts = 3

        def monitor_workers(self, group: Any) -> Any:
            called.append("monitor")

        def restart_workers(self, group: Any) -> None:
            called.append("restart")

        def rendezvous(self, group: Any) -> None:
            called.append("rendezvous")

        def start_workers(self, group: Any) -> dict[int, Any]:
            called.append("start")
            return {}

        def wait_for_nodes(self) -> None:
            called.append("wait")

    agent, group = Agent(), None
    for step in ("_monitor_workers", "_restart_workers", "_rendezvous", "_start_workers"):
        getattr(agent, step)(group)
    agent._exit_barrier()
    assert called == ["monitor", "restart", "rendezvous", "start", "wait"]
    assert agent.restarts_left == 3
    agent.forgo_restarts()
    assert agent.restarts_left == 0
