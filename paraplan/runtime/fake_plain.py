"""A script of plain torch without values: followed from its DistributedDataParallel on, for two steps of its optimizer.

What the script asks of GPUs is answered by the CPU; numbers that it reads of tensors without values are 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.fake_job import without_values_of
from paraplan.runtime.fake_rank import FakeRank, FakeRunEnd
from paraplan.runtime.fake_run import NUM_STEPS, materialise
from paraplan.runtime.mesh import build_mesh
from paraplan.runtime.storage_tracking import StorageTracker
from paraplan.runtime.world import World

_PRECISIONS: dict[torch.dtype, TrainingPrecision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


_READS = (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__)


class _TrackerOfFakes(StorageTracker):  # type: ignore[no-untyped-call]  # torch leaves its base untyped
    """Follows tensors without values alone: the script's data is on the host."""

    def _add(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        if isinstance(tensor, FakeTensor):
            super()._add(tensor, func, args)


class _Zeros(TorchFunctionMode):
    """Answers 0 where a number is read of a tensor without values, and leaves tensors where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and isinstance(args[0], FakeTensor):
            try:
                return func(*args, **kwargs)  # a constant that torch knows
            except DataDependentOutputException:
                return 0.0 if func is torch.Tensor.__float__ or args[0].is_floating_point() else 0
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_gpu(argument) else argument for argument in args)
            kwargs = {name: "cpu" if _is_gpu(value) else value for name, value in kwargs.items()}
        elif _is_gpu(kwargs.get("device")):
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )


def _refuse_sharding(*_: Any, **__: Any) -> NoReturn:
    caller = sys._getframe(1)
    where = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
    raise UsageError(
        f"{where} shards the model by torch's FSDP itself, which --fake does not follow",
        hint="let the engine of paraplan.runtime shard it under a plan with zero_stage=3, or price it with paraplan "
        "estimate MODEL --zero 3",
    )


class PlainScript:
    """What is followed of a script that does without paraplan's runtime."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._modes = ExitStack()
        self._rank: FakeRank | None = None
        self._num_parameters = 0
        self._replaced: dict[int, nn.Parameter] = {}
        self._num_steps = 0
        self._num_forwards = 0
        self._micro_batch_size = 1
        self._precision: TrainingPrecision = "fp32"

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow a script in this context."""
        with ExitStack() as stack:
            stack.enter_context(_Zeros())
            self._patch(stack)
            for handle in (
                register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer)),
                register_optimizer_step_post_hook(lambda *_: self._end_update()),
            ):
                stack.callback(handle.remove)
            stack.push(self._modes)
            yield

    def _patch(self, stack: ExitStack) -> None:
        plain_init, plain_forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
        plain_autocast = torch.autocast.__init__
        script = self

        def init(ddp: DistributedDataParallel, module: nn.Module, *_: Any, **options: Any) -> None:
            is_new = any(parameter.is_meta for parameter in module.parameters())
            if is_new:
                options = {
                    name: value for name, value in options.items() if name not in ("device_ids", "output_device")
                }
                script._begin(module, lambda: plain_init(ddp, module, **options))
            else:
                plain_init(ddp, module, **options)

        def forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if script._rank is not None:
                args, kwargs = script._meet(args, kwargs)
            return plain_forward(ddp, *args, **kwargs)  # type: ignore[no-untyped-call]

        def autocast(mode: torch.autocast, device_type: str = "cpu", *args: Any, **options: Any) -> None:
            plain_autocast(mode, "cpu" if device_type == "cuda" else device_type, *args, **options)

        replaced: list[tuple[Any, str, Any]] = [
            (DistributedDataParallel, "__init__", init),
            (DistributedDataParallel, "forward", forward),
            (torch.autocast, "__init__", autocast),
            (nn.Module, "cuda", lambda module, *_: module),
            (torch.cuda, "set_device", lambda *_: None),
            (dist, "init_process_group", lambda *_, **__: None),  # the world is there
            (fsdp, "fully_shard", _refuse_sharding),
            (fsdp.FullyShardedDataParallel, "__init__", _refuse_sharding),
        ]
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def _begin(self, module: nn.Module, replicate: Callable[[], None]) -> None:
        """Give the parameters of `module` storages without values, let DDP make its buckets, and count from then on."""
        self._num_parameters = sum(parameter.numel() for parameter in module.parameters())
        mesh = build_mesh(ParallelPlan(dp=self._world.size), self._world)
        self._rank = FakeRank(mesh, tracker=_TrackerOfFakes)
        before = dict(module.named_parameters())
        with self._rank.on_host():
            materialise(module, torch.device("cpu"))
        self._replaced = {id(before[name]): parameter for name, parameter in module.named_parameters()}
        with self._rank.running():
            replicate()
        self._modes.enter_context(self._rank.watching())
        self._rank.follow(module.parameters(), module.buffers())

    def _meet(self, args: Any, kwargs: Any) -> Any:
        """Return the inputs of a forward pass without values."""
        assert self._rank is not None
        self._num_forwards += 1
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        self._micro_batch_size = tensors[0].shape[0] if tensors else 1
        if torch.is_autocast_enabled("cpu"):
            self._precision = _PRECISIONS.get(torch.get_autocast_dtype("cpu"), "fp32")
        with self._rank.on_host():
            return pytree.tree_map(without_values_of, (args, kwargs))

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rank is None:
            return
        for group in optimizer.param_groups:  # made before the parameters were replaced, or after
            group["params"] = [self._replaced.get(id(parameter), parameter) for parameter in group["params"]]
        self._rank.begin_update(optimizer)

    def _end_update(self) -> None:
        if self._rank is None:
            return
        self._rank.end_update()
        self._num_steps += 1
        if self._num_steps < NUM_STEPS:
            self._rank.collectives.forget()
            self._num_forwards = 0
            return
        plan = ParallelPlan(
            dp=self._world.size, micro_batch_size=self._micro_batch_size, num_microbatches=max(1, self._num_forwards)
        )
        self._rank.write_report(plan=plan, precision=self._precision, num_parameters=self._num_parameters, left_out=())
        raise FakeRunEnd(0)
