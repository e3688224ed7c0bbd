"""The memory of one rank of a plan: run for a few steps without a GPU, without other ranks and without values.

The engine is the runtime's own; only the processes, the tensors' values and the kernels are missing. What a GPU would
choose differently from the CPU (attention kernels, autocast's lists, foreach optimizers) is chosen as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.errors import ParaplanError, PlanError
from paraplan.model.factory import call_user_code, explain
from paraplan.plan.memory_record import MEMORY_PARTS, MemoryParts
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.plan.training import OptimizerName, TrainingSpec
from paraplan.records import Record
from paraplan.runtime.assembly import wrap_model
from paraplan.runtime.data.batches import StepShape
from paraplan.runtime.engine import Engine
from paraplan.runtime.fake.gpu_operators import GpuKernels, GpuOperators
from paraplan.runtime.fake.split import split_without_values
from paraplan.runtime.fake.storage_tracking import (
    Peak,
    Phase,
    StorageTracker,
    StorageUse,
)
from paraplan.runtime.fake.torch_private import (
    local_tensor,
    own_buffers,
    own_parameters,
)
from paraplan.runtime.fake.world import fake_world, without_values
from paraplan.runtime.mesh import build_mesh
from paraplan.runtime.micro_batching import Checking
from paraplan.runtime.options import EngineOptions
from paraplan.runtime.rank_part import ParallelContext, RankPart
from paraplan.runtime.split.tensor_parallel import TensorSplit
from paraplan.runtime.step.loss import LossFunction, token_loss
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.torch_private import function_modes, storage_key
from paraplan.runtime.world import World, silence_known_noise

NUM_STEPS = 2
LEARNING_RATE = 1e-3


class _TracedRank(Record):
    rank: int
    pipeline_stage: int


class TracedMemory(MemoryParts, _TracedRank):
    """Bytes of one rank at the moment when most were allocated, over `NUM_STEPS` steps; the parts sum to `total_bytes`.

    Parameters include gathered ones and copies in another type; activations are all that the forward passes made;
    workspace is what the rest of a step makes for a moment. `phase` is what the rank was doing. Beside them what CUDA
    libraries keep is not seen (`CostConstants`).
    """

    phase: Phase


def first_rank_of_stage(plan: ParallelPlan, stage: int) -> int:
    """Return the first rank that holds pipeline stage `stage`."""
    return RankGrid.of_plan(plan).rank(pp=stage)


def trace_memory(
    factory: Callable[[], nn.Module],
    *,
    plan: ParallelPlan,
    training: TrainingSpec,
    rank: int = 0,
    inputs: Any = None,
    loss_fn: LossFunction | None = None,
    source: str = "the model",
) -> TracedMemory:
    """Return the memory of one rank of `plan` that trains what `factory` builds.

    `inputs` is what the model takes for the sequences of this rank's share of a step: by default token ids, or what the
    model's own `example_inputs(batch, tokens)` returns. `loss_fn` is by default the cross-entropy of logits to next
    tokens, or the mean of outputs that are no logits. Raises `ModelError` where the user's code fails, and what
    `Job.prepare` raises.
    """
    return trace_peak(factory, plan=plan, training=training, rank=rank, inputs=inputs, loss_fn=loss_fn, source=source)[
        0
    ]


def trace_peak(
    factory: Callable[[], nn.Module],
    *,
    plan: ParallelPlan,
    training: TrainingSpec,
    rank: int = 0,
    inputs: Any = None,
    loss_fn: LossFunction | None = None,
    source: str = "the model",
) -> tuple[TracedMemory, Peak]:
    """Return the memory of one rank, and the peak with the operators that made its workspace; see `trace_memory`."""
    if plan.offload != "none":
        raise PlanError(
            f"offload={plan.offload}: what lies on the host cannot be told apart without a GPU",
            hint="trace the plan with offload=none",
        )
    silence_known_noise()
    with torch.device("meta"):
        model = call_user_code(source, "the model was built", factory)
    if training.precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    with ExitStack() as stack:
        world = stack.enter_context(fake_world(rank=rank, size=plan.world_size))
        mesh = build_mesh(plan, world)
        split = split_without_values(model, mesh, sequence_parallel=plan.sequence_parallel)
        stack.enter_context(without_values())
        stack.enter_context(GpuKernels())  # type: ignore[no-untyped-call]  # torch leaves its base untyped
        materialise(model, world.device)
        parallel = ParallelContext.of(plan, mesh, training.precision, loss_fn or token_loss, training=training)
        tracked = _TrackedRank(model, parallel, training, world, split)
        stack.enter_context(tracked.tracker.following_resizes())
        stack.enter_context(GpuOperators())
        try:
            peak = tracked.run(inputs)
        except ParaplanError:
            raise
        except Exception as error:  # the user's model, which may do anything
            raise explain(source, "steps were run without values", error) from error
    stage = mesh.coordinate("pp")
    parts = {f"{use}_bytes": size for use, size in peak.bytes_by_use.items()}
    report = TracedMemory(
        rank=rank,
        pipeline_stage=stage,
        **{name: parts.get(name, 0) for name in MEMORY_PARTS},
        total_bytes=peak.total_bytes,
        phase=peak.phase,
    )
    return report, peak


class _TrackedRank:
    """One rank's engine with its optimizer, every storage of which is followed."""

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelContext,
        training: TrainingSpec,
        world: World,
        split: TensorSplit | None,
    ) -> None:
        self.tracker = StorageTracker(self._uses)
        self._model = model
        self._parallel = parallel
        self._training = training
        self._world = world
        self._split = split
        self._part: RankPart | None = None
        self._engine: Engine | None = None

    def run(self, inputs: Any) -> Peak:
        """Prepare the engine, run the steps, and return the peak."""
        plan, tracker = self._parallel.plan, self.tracker
        with tracker:
            stack = find_blocks(self._model)
            for block in [] if stack is None else stack.modules(self._model):
                keep_operators(block)
            self._part = wrap_model(self._model, stack, self._parallel, split=self._split, has_values=False)
            del self._model
            for tensor in [*self._part.parameters.values(), *self._part.module.buffers()]:
                tracker.watch(tensor)
            tracker.mark(self._uses())
            optimizer = make_optimizer(self._training.optimizer, list(self._part.parameters.values()))
            self._engine = Engine(
                self._part,
                optimizer,
                mesh=self._parallel.mesh,
                plan=plan,
                shape=StepShape.of_plan(plan, is_fixed=True),
                engine_options=EngineOptions(checking=Checking(has_values=False)),
            )
            tracker.enter("forward")
            tracker.forget_peak()  # models are built and cut in host memory
            share = plan.micro_batch_size * plan.num_microbatches
            inputs, targets = example_batch(self._part.module, inputs, share, self._training.seq_length)
            optimizer.register_step_pre_hook(lambda *_: tracker.enter("optimizer"))
            optimizer.register_step_post_hook(lambda *_: tracker.enter("forward"))
            for _ in range(NUM_STEPS):
                self._engine.step(inputs, targets)
        tracker.settle()
        return tracker.peak

    def _uses(self) -> dict[int, StorageUse]:
        uses: dict[int, StorageUse] = {}
        if self._part is None:
            return uses
        for parameter in self._part.parameters.values():
            uses[storage_of(parameter)] = "parameter"
            if parameter.grad is not None:
                uses[storage_of(parameter.grad)] = "gradient"
        for buffer in self._part.module.buffers():
            uses[storage_of(buffer)] = "parameter"
        if self._engine is not None:
            for state in self._engine.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        uses[storage_of(value)] = "optimizer_state"
        return uses


def keep_operators(block: nn.Module) -> None:
    """Let a block that is run again in the backward pass use a GPU's operators there too: autograd leaves modes out.

    A method, which a copy of the block has as its own.
    """
    set_forward(block, MethodType(_forward_on_gpu, block))


def _forward_on_gpu(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain = type(block).forward
    if any(isinstance(mode, GpuOperators) for mode in function_modes()):
        return plain(block, *args, **kwargs)
    with GpuOperators():
        return plain(block, *args, **kwargs)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Put tensors on `device` in place of those on meta; what is tied stays tied, which `nn.Module.to_empty` undoes."""
    made: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (own_parameters(module), own_buffers(module)):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = one(tensor)  # type: ignore[assignment]


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the storage of a tensor from others, of a DTensor that of its local part."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor  # `to_local` runs operators
    return storage_key(local)


def make_optimizer(name: OptimizerName, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer of that name: AdamW fused, others in the form that they take by default on a GPU.

    That is foreach over plain tensors, and one parameter after the other over DTensors (torch.optim.optimizer,
    `_default_to_fused_or_foreach`). Raises `PlanError` for optimizers that torch does not bring, or that read values.
    """
    foreach = not any(isinstance(parameter, DTensor) for parameter in parameters)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    if name == "adamw_foreach":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=foreach)
    if name in ("sgd", "sgd_momentum"):
        momentum = 0.9 if name == "sgd_momentum" else 0.0
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum, foreach=foreach)
    raise PlanError(f"optimizer={name} cannot be run without values", hint="use adamw, sgd_momentum or sgd")


def example_batch(module: nn.Module, inputs: Any, size: int, seq_length: int) -> tuple[Any, torch.Tensor]:
    """Return inputs and targets of `size` sequences."""
    if inputs is None:
        own = getattr(module, "example_inputs", None)
        inputs = torch.zeros(size, seq_length, dtype=torch.long) if own is None else own(size, seq_length)
    return inputs, torch.zeros(size, seq_length, dtype=torch.long)
