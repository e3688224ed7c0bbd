"""A script of plain torch without values, on a GPU that is not there, for two steps of its optimizers.

It replicates or shards as it does among real ranks: DistributedDataParallel, `fully_shard`, DTensors over a DeviceMesh,
pipelines. What is on the GPU is counted, and what of the model is on the host apart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from paraplan.errors import UsageError
from paraplan.plan.fake import FakeRankReport
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.fake.collective_count import CollectiveCount
from paraplan.runtime.fake.cuda import NodeGpus, cuda_of, objects_of_one_rank
from paraplan.runtime.fake.gpu import FakeGpu, PlacedTracker
from paraplan.runtime.fake.gpu_operators import GpuKernels, GpuOperators
from paraplan.runtime.fake.job import FakeJob
from paraplan.runtime.fake.rank import (
    FakeRunEnd,
    choose_as_on_gpu,
    write_report,
)
from paraplan.runtime.fake.run import NUM_STEPS
from paraplan.runtime.fake.storage_tracking import StorageUse, storage_of, uses_of
from paraplan.runtime.fake.torch_private import (
    END_OF_BACKWARD,
    MODULE_APPLY,
    MODULE_CALL,
    MOVE_STATES,
    FSDPParamGroup,
    FSDPState,
    apply_to_tensors,
    autocast_type,
    has_function_modes,
    movers_of_states,
    own_buffers,
    own_parameters,
    replaced,
)
from paraplan.runtime.fake.world import transformers_as_if_with_values
from paraplan.runtime.structure.meta import without_weights
from paraplan.runtime.torch_private import FakeTensor, pytree
from paraplan.runtime.world import World

_PRECISIONS: dict[torch.dtype | None, TrainingPrecision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _refuse_flat_sharding(*_: Any, **__: Any) -> NoReturn:
    caller = sys._getframe(1)
    where = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
    raise UsageError(
        f"{where} shards the model by FullyShardedDataParallel, whose flat parameters --fake does not follow",
        hint="use fully_shard, which torch has in its place, or the engine of paraplan.runtime with zero_stage=3",
    )


class PlainScript:
    """A followed script that does without paraplan's runtime."""

    def __init__(self, world: World, gpus: NodeGpus) -> None:
        self._world = world
        self._gpus = gpus
        self._tracker = PlacedTracker(self._uses)
        self._gpu = FakeGpu(world.local_rank, self._tracker)
        self._collectives = CollectiveCount(None)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._made: Any = WeakTensorKeyDictionary()  # the parameters without values by those of the script
        self._num_steps: dict[torch.optim.Optimizer, int] = {}
        self._left_out: set[str] = set()
        self._stack, self._modes = ExitStack(), ExitStack()
        self._replicas: list[nn.Module] = []
        self._follows = True
        self._has_mesh = False
        self._knows_transformers = False
        self._num_forwards = 0
        self._micro_batch_size = 1
        self._precision: TrainingPrecision | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow a script in this context."""
        self._tracker.enter("building")
        with self._stack as stack:
            stack.enter_context(self._tracker.following_resizes())
            stack.enter_context(objects_of_one_rank())
            self._patch(stack)
            self._patch_sharding(stack)
            self._patch_backward(stack)
            for handle in (
                register_module_parameter_registration_hook(self._note_parameter),
                register_module_buffer_registration_hook(lambda module, *_: self._modules.add(module)),
                register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer)),
                register_optimizer_step_post_hook(lambda optimizer, *_: self._end_update(optimizer)),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self._modes)
            self._enter_modes(self._modes)
            yield

    def _enter_modes(self, stack: ExitStack) -> None:
        gpu = self._gpu
        stack.enter_context(cuda_of(gpu, self._gpus, self._left_out))
        stack.enter_context(GpuKernels())  # type: ignore[no-untyped-call]  # torch leaves its base untyped
        stack.enter_context(GpuOperators())
        stack.enter_context(self._collectives)
        stack.enter_context(gpu)

    def _step_aside(self, job: FakeJob) -> FakeJob:
        """Leave the script to the runtime's own way without values; return its job, with this GPU if it offloads.

        Other plans do without: all that the runtime makes is on the GPU.
        """
        if self._follows:
            self._follows = False
            if job.plan.offload == "none":
                self._gpu.is_on = False
                self._modes.close()
            self._stack.enter_context(without_weights())
        return replace(job, gpu=self._gpu) if self._gpu.is_on else job

    def _patch(self, stack: ExitStack) -> None:
        script = self
        plain_init, plain_forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
        plain_mesh, plain_autocast, plain_job = DeviceMesh.__init__, torch.autocast.__init__, FakeJob.prepare
        plain_apply = self._plain_apply = getattr(nn.Module, MODULE_APPLY)

        def init(ddp: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
            script._replicate(module, lambda: plain_init(ddp, module, *args, **options))

        def forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            script._meet(args, kwargs)
            return plain_forward(ddp, *args, **kwargs)  # type: ignore[no-untyped-call]

        def mesh(made: DeviceMesh, *args: Any, **options: Any) -> None:
            plain_mesh(made, *args, **options)
            script._name_groups(made)

        def autocast(mode: torch.autocast, *args: Any, **options: Any) -> None:
            plain_autocast(mode, *args, **options)
            if script._precision is None:
                script._precision = _PRECISIONS.get(autocast_type(mode))

        def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            return script._apply(module, fn, recurse) if script._gpu.is_on else plain_apply(module, fn, recurse)

        def prepare(job: FakeJob, model: nn.Module, *args: Any, **options: Any) -> Any:
            own = script._step_aside(job)
            put_on_meta(model)
            return plain_job(own, model, *args, **options)

        entries: list[tuple[Any, str, Any]] = [
            (DistributedDataParallel, "__init__", init),
            (DistributedDataParallel, "forward", forward),
            (DeviceMesh, "__init__", mesh),
            (torch.autocast, "__init__", autocast),
            (FakeJob, "prepare", prepare),
            (nn.Module, MODULE_APPLY, apply),
            (dist, "init_process_group", lambda *_, **__: None),  # the world is there
            (dist, "destroy_process_group", lambda *_, **__: None),
            (fsdp.FullyShardedDataParallel, "__init__", _refuse_flat_sharding),
        ]
        stack.enter_context(replaced(*entries))

    def _patch_sharding(self, stack: ExitStack) -> None:
        """Take note of what `fully_shard` is asked for, and move buffers in its place."""
        script = self
        plain_shard = FSDPState.init
        homes = movers_of_states()
        plain_move = getattr(homes[0], MOVE_STATES)

        def shard(state: FSDPState, modules: Any, device: Any, mp_policy: Any, *args: Any, **options: Any) -> None:
            script._precision = script._precision or _PRECISIONS.get(mp_policy.param_dtype)
            plain_shard(state, modules, device, mp_policy, *args, **options)

        def move(parameters: list[nn.Parameter], buffers: list[torch.Tensor], device: torch.device) -> None:
            if script._follows:
                script._move_buffers(buffers, device)
                buffers = [one for one in buffers if isinstance(one, DTensor)]
            plain_move(parameters, buffers, device)

        moves = [(home, MOVE_STATES, move) for home in homes]
        stack.enter_context(replaced((FSDPState, "init", shard), *moves))

    def _patch_backward(self, stack: ExitStack) -> None:
        """Have Python that autograd runs meet the modes, which autograd leaves out: hooks, and what is run again."""
        places: list[tuple[Any, str]] = [
            (nn.Module, MODULE_CALL),
            (BackwardCFunction, "apply"),
            (FSDPParamGroup, "post_backward"),
            (FSDPState, END_OF_BACKWARD),
        ]
        for owner, name in places:
            plain = getattr(owner, name)

            def call(*args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
                if self._follows and self._tracker.phase == "building":
                    self._tracker.enter("forward")
                if has_function_modes() or not self._gpu.is_on:
                    return _plain(*args, **kwargs)
                with GpuOperators(), self._gpu.calls():
                    return _plain(*args, **kwargs)

            stack.enter_context(replaced((owner, name, call)))

    def _note_parameter(self, module: nn.Module, _: str, parameter: nn.Parameter) -> Any:
        if self._follows and not self._knows_transformers and "transformers" in sys.modules:
            self._knows_transformers = True
            self._stack.enter_context(transformers_as_if_with_values())
        self._modules.add(module)
        return self._without_values(parameter)

    def _without_values(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Return a parameter without values in the place of one of the host's; the same one for what is tied."""
        if parameter is None or parameter.is_meta or isinstance(parameter, FakeTensor | DTensor):
            return parameter
        if not self._follows:
            return parameter
        if parameter not in self._made:
            made = self._gpu.without_values(parameter, "host")
            self._tracker.mark({storage_of(made): "parameter"})  # where it goes elsewhere before anybody asks
            self._made[parameter] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        found: nn.Parameter = self._made[parameter]
        return found

    def _apply(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> nn.Module:
        """Do what `nn.Module.to` and its like do; parameters stay the same objects, as on real devices."""
        for child in module.children() if recurse else ():
            apply_to_tensors(child, fn)
        parameters = [(name, held) for name, held in own_parameters(module).items() if held is not None]
        own = {name: held for name, held in parameters if isinstance(held, FakeTensor)}
        own_parameters(module).update(dict.fromkeys(own))  # torch would swap their insides, which have weak references
        self._plain_apply(module, fn, recurse=False)
        for name, held in own.items():
            with torch.no_grad():
                held.data = fn(held)
                if held.grad is not None:
                    held.grad = fn(held.grad)
            own_parameters(module)[name] = held
        return module

    def _move_buffers(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        """Put buffers on `device` for FSDP, which gives a tensor with values the insides of one without.

        It leaves those on meta to whoever loads them.
        """
        chosen = {id(one) for one in buffers if not one.is_meta}
        for module in self._modules:
            for name, held in own_buffers(module).items():
                if id(held) in chosen and held is not None and not isinstance(held, DTensor):
                    own_buffers(module)[name] = held.to(device)

    def _replicate(self, module: nn.Module, replicate: Callable[[], None]) -> None:
        """Let DDP make its buckets, which hold gradients."""
        first = next(module.parameters(), None)
        place = "host" if first is None else self._tracker.place_of(first)
        if not self._follows:
            with self._gpu.making(place) if self._gpu.is_on else nullcontext():
                return replicate()
        self._replicas.append(module)
        if not self._has_mesh:
            self._collectives.name(range(self._world.size), "dp")
        self._tracker.enter("setup")
        with self._gpu.making(place):
            replicate()
        self._tracker.enter("building")
        return None

    def _meet(self, args: Any, kwargs: Any) -> None:
        """Take note of a forward pass under DDP."""
        self._num_forwards += 1
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        self._micro_batch_size = tensors[0].shape[0] if tensors else 1

    def _name_groups(self, mesh: DeviceMesh) -> None:
        self._has_mesh = self._has_mesh or bool(mesh.mesh_dim_names)
        for index, name in enumerate(mesh.mesh_dim_names or ()):
            try:
                ranks = dist.get_process_group_ranks(mesh.get_group(index))
            except (RuntimeError, KeyError, IndexError, AttributeError):  # a mesh without groups of its own
                continue
            self._collectives.name(ranks, name)

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._follows:
            return
        self._num_steps.setdefault(optimizer, 0)
        choose_as_on_gpu(optimizer, place_of=self._tracker.place_of)
        self._tracker.enter("optimizer")

    def _end_update(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._follows:
            return
        self._tracker.enter("forward")
        self._num_steps[optimizer] += 1
        fewest = min(self._num_steps.values())
        if fewest >= NUM_STEPS:
            self._write_report()
            raise FakeRunEnd(0)
        if fewest == self._num_steps[optimizer]:  # the last optimizer of a step
            self._collectives.forget()
            self._num_forwards = 0

    def _uses(self) -> dict[int, StorageUse]:
        buffers = (one for module in self._modules for one in own_buffers(module).values() if one is not None)
        return uses_of(self._parameters(), buffers, self._num_steps)

    def _parameters(self) -> list[torch.Tensor]:
        held = [held for module in self._modules for held in own_parameters(module).values() if held is not None]
        updated = [one for optimizer in self._num_steps for group in optimizer.param_groups for one in group["params"]]
        return held + updated

    def _write_report(self) -> None:
        self._tracker.settle()
        parameters = {id(one): one for one in self._parameters() if isinstance(one, DTensor) or one.grad_fn is None}
        peak, host = self._tracker.peak, self._tracker.host.peak
        is_on_cpu = not peak.total_bytes
        if is_on_cpu:
            peak = host
        is_replicated = self._replicas and not any(isinstance(one, DTensor) for one in parameters.values())
        plan = ParallelPlan(
            dp=self._world.size, micro_batch_size=self._micro_batch_size, num_microbatches=max(1, self._num_forwards)
        )
        write_report(
            FakeRankReport(
                rank=self._world.rank,
                world_size=self._world.size,
                pipeline_stage=0,
                plan=plan if is_replicated else None,
                precision=self._found_precision(),
                num_parameters=sum(one.numel() for one in parameters.values()),
                **peak.parts().model_dump(),
                phase=peak.phase,
                host=host.parts() if host.total_bytes and not is_on_cpu else None,
                is_on_cpu=is_on_cpu,
                collectives=self._collectives.counted(),
                left_out=tuple(sorted(self._left_out)),
            )
        )

    def _found_precision(self) -> TrainingPrecision:
        """Return what autocast or a policy of `fully_shard` says, else the type of the largest parameter."""
        if self._precision is not None:
            return self._precision
        largest = max(self._parameters(), key=lambda one: one.numel(), default=None)
        return "fp32" if largest is None else _PRECISIONS.get(largest.dtype, "fp32")


def put_on_meta(model: nn.Module) -> None:
    """Put tensors on meta in the place of parameters without values; what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, held in own_parameters(module).items():
            if isinstance(held, FakeTensor):
                if id(held) not in made:
                    empty = torch.empty(held.shape, dtype=held.dtype, device="meta")
                    made[id(held)] = nn.Parameter(empty, requires_grad=held.requires_grad)
                own_parameters(module)[name] = made[id(held)]
