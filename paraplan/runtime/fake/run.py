"""The memory of one rank of a plan: run for a few steps without a GPU, without other ranks and without values.

The engine is the runtime's own; only the processes, the tensors' values and the kernels are missing. What a GPU would
choose differently from the CPU (attention kernels, autocast's lists, foreach optimizers) is chosen as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from paraplan.errors import ParaplanError, PlanError
from paraplan.model.factory import call_user_code, explain
from paraplan.plan.memory_record import MemoryParts
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.plan.training import OptimizerName, TrainingSpec
from paraplan.records import Record
from paraplan.runtime.assembly import wrap_model
from paraplan.runtime.checks.plan_check import Checking
from paraplan.runtime.engine import Engine
from paraplan.runtime.fake.gpu_operators import GpuOperators
from paraplan.runtime.fake.rank import FakeRank
from paraplan.runtime.fake.storage_tracking import Peak, Phase
from paraplan.runtime.fake.torch_private import own_buffers, own_parameters
from paraplan.runtime.fake.world import fake_world
from paraplan.runtime.mesh import Mesh, build_mesh
from paraplan.runtime.options import EngineOptions
from paraplan.runtime.rank_part import ParallelContext, RankPart, step_loss
from paraplan.runtime.split import tensor_parallel
from paraplan.runtime.split.check import shares_with_blocks
from paraplan.runtime.split.forms import forms, tensor_group
from paraplan.runtime.split.layers import BlockSplit, SequenceEnds
from paraplan.runtime.split.regions import split_block
from paraplan.runtime.split.tensor_parallel import TensorSplit
from paraplan.runtime.step.loss import token_loss
from paraplan.runtime.structure.blocks import BlockStack, find_blocks
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.float8 import convert_products
from paraplan.runtime.structure.forwards import DOES_NOT_RUN, set_forward
from paraplan.runtime.structure.model_structure import BlockCall, ModelStructure
from paraplan.runtime.torch_private import function_modes, pytree
from paraplan.runtime.world import silence_known_noise

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
    source: str = "the model",
) -> TracedMemory:
    """Return the memory of one rank of `plan` that trains what `factory` builds.

    It takes token ids, or what the model's own `example_inputs(batch, tokens)` returns, for this rank's share of a
    step. The loss is the cross-entropy of logits to next tokens, or the mean of outputs that are no logits. Raises
    `ModelError` where the user's code fails, and what `Job.prepare` raises.
    """
    if plan.offload != "none":
        raise PlanError(
            f"offload={plan.offload}: what lies on the host cannot be told apart without a GPU",
            hint="trace the plan with offload=none",
        )
    check_keeps_on_gpu(training)
    silence_known_noise()
    with torch.device("meta"):
        model = call_user_code(source, "the model was built", factory)
    if training.precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    with ExitStack() as stack:
        mesh = build_mesh(plan, stack.enter_context(fake_world(rank=rank, size=plan.world_size)))
        traced = FakeRank(mesh)
        stack.enter_context(traced.patches)
        parallel = ParallelContext(mesh, training.precision, step_loss(token_loss, mesh), training=training)
        try:
            peak = _traced_peak(traced, model, parallel, training)
        except ParaplanError:
            raise
        except Exception as error:  # the user's model, which may do anything
            raise explain(source, "steps were run without values", error) from error
    stage = mesh.coordinate("pp")
    return TracedMemory(rank=rank, pipeline_stage=stage, **peak.parts().model_dump(), phase=peak.phase)


def _traced_peak(rank: FakeRank, model: nn.Module, parallel: ParallelContext, training: TrainingSpec) -> Peak:
    """Run the steps of one rank's engine, every storage of which is followed, and return the peak."""
    plan = parallel.plan
    part = wrap_without_values(rank, model, find_blocks(model), parallel)
    with rank.running():
        optimizer = make_optimizer(training.optimizer, list(part.parameters.values()))
        engine = Engine(part, optimizer, parallel.mesh, EngineOptions(checking=Checking(has_values=False)))
        rank.follow(part, optimizer)
        inputs, targets = example_batch(part.module, plan.micro_batch_size * plan.num_microbatches, training.seq_length)
        for _ in range(NUM_STEPS):
            engine.step(inputs, targets)
        return rank.peak()


def wrap_without_values(
    rank: FakeRank,
    model: nn.Module,
    stack: BlockStack | None,
    parallel: ParallelContext,
    *,
    example_inputs: Any = None,
) -> RankPart:
    """Return the part of `model`, which is on the meta device, that `rank` holds; its tensors have storages then."""
    split = _tensor_split(model, parallel.mesh)
    convert_products(model, stack, parallel.training, parallel.mesh.world.device)
    with rank.on_host():  # where a script keeps the whole model
        _materialise(model, parallel.mesh.world.device)
    with rank.running():
        for block in [] if stack is None else stack.modules(model):
            _keep_operators(block)
        return wrap_model(model, stack, parallel, example_inputs=example_inputs, split=split, has_values=False)


def _keep_operators(block: nn.Module) -> None:
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


def check_keeps_on_gpu(training: TrainingSpec | None) -> None:
    """Raise `PlanError` where activations wait on the host: copies of tensors without values are counted as others."""
    if training is not None and training.offloads_activations:
        raise PlanError(
            "offloads_activations=True: which activations wait on the host cannot be told apart without a GPU",
            hint="count the plan without it; paraplan estimate says what it leaves on the GPU",
        )


def _materialise(model: nn.Module, device: torch.device) -> None:
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


def make_optimizer(name: OptimizerName, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer of that name: AdamW fused, others in the form that they take by default.

    Raises `PlanError` for optimizers that torch does not bring, or that read values.
    """
    if name in ("adamw", "adamw_foreach"):
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True if name == "adamw" else None)
    if name in ("sgd", "sgd_momentum"):
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9 if name == "sgd_momentum" else 0.0)
    raise PlanError(f"optimizer={name} cannot be run without values", hint="use adamw, sgd_momentum or sgd")


def example_batch(module: nn.Module, size: int, seq_length: int) -> tuple[Any, torch.Tensor]:
    """Return inputs and targets of `size` sequences."""
    own = getattr(module, "example_inputs", None)
    inputs = torch.zeros(size, seq_length, dtype=torch.long) if own is None else own(size, seq_length)
    return inputs, torch.zeros(size, seq_length, dtype=torch.long)


def _tensor_split(model: nn.Module, mesh: Mesh) -> TensorSplit | None:
    """Return the split of `model`, which is on the meta device, over `tp`; None where that is one rank.

    Of the forms of a split block, the first is taken whose code runs; whether it computes the same needs values.
    """
    if mesh.size("tp") == 1:
        return None
    structure = ModelStructure(model, find_blocks(model))
    return tensor_parallel.find_tensor_split(
        structure,
        mesh=mesh,
        sequence_parallel=mesh.plan.sequence_parallel,
        check=partial(_unchecked, structure.meta_model),
    )


def _unchecked(
    meta_model: nn.Module,
    _: nn.Module,
    name: str,
    call: BlockCall,
    split: BlockSplit,
    mesh: Mesh,
    ends: SequenceEnds | None,
) -> BlockSplit:
    """Return the first form of `split` whose code runs, in the type in which `meta_model` itself runs."""
    block = meta_model.get_submodule(name)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda leaf: torch.empty_like(leaf, device="meta"), (call.args, call.kwargs)
    )
    for form in forms(block, split, ends, size=mesh.size("tp"), shares=shares_with_blocks(call)):
        part = copy_of(block)
        split_block(part, form, tensor_group(mesh), ends)
        try:
            with torch.no_grad(), call.context():
                part(*args, **kwargs)
        except DOES_NOT_RUN:
            continue  # sizes that the code names do not fit the parts
        return form
    return split
