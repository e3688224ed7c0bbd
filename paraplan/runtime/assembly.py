"""From a whole model to what one rank runs of it: checked against the plan, cut, sharded, wrapped."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paraplan.errors import PlanError, UnsupportedPlanError
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.checkpoints.adapter_files import count_base
from paraplan.runtime.data_parallel.block_order import orders_of
from paraplan.runtime.data_parallel.gradient_sums import gradient_sums
from paraplan.runtime.data_parallel.wrapping import Wrapping, never_sharded, reductions_of
from paraplan.runtime.expert_balance import GlobalBalance
from paraplan.runtime.experts.layers import check_experts, expert_parameters
from paraplan.runtime.precision import check_stored_type
from paraplan.runtime.rank_part import ModelSplit, ParallelContext, RankPart, divide, find_chunked, wrap_module
from paraplan.runtime.recompute.policy import recomputed_blocks
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.split.context_check import ContextSplit, find_context_split, take_tokens
from paraplan.runtime.split.context_parallel import Context
from paraplan.runtime.split.search import own_plan
from paraplan.runtime.split.tensor_parallel import (
    TensorSplit,
    check_compilable,
    find_tensor_split,
)
from paraplan.runtime.step.execution import WholeModelExecution
from paraplan.runtime.structure.blocks import BlockStack, find_blocks
from paraplan.runtime.structure.ends import large_ends
from paraplan.runtime.structure.model_structure import ModelStructure
from paraplan.runtime.structure.weights import (
    can_be_sharded,
    check_materialised,
    check_own_memory,
    count_parameters,
    is_quantized,
    lasting_buffers,
)

_LOGGER = logging.getLogger(__name__)


def check_model(
    model: nn.Module,
    *,
    plan: ParallelPlan,
    file: PlanFile | None,
    precision: TrainingPrecision,
    reads_weights: bool = False,
) -> BlockStack | None:
    """Return the block stack of `model` once it is known that the plan can be executed on it; see `Job.prepare`."""
    if plan.tp * plan.pp * plan.cp * plan.ep > 1 and any(hasattr(one, "_orig_mod") for one in model.modules()):
        raise UnsupportedPlanError(
            f"the plan '{plan.describe()}' looks into the model, and torch.compile has been put around it",
            hint="give job.prepare the model itself, with compile_backend='inductor'",
        )
    check_materialised(model, reads_weights=reads_weights)
    check_stored_type(model, precision)
    if plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.zero_stage:
        check_own_memory(model, plan.describe())
    stack = find_blocks(model)
    if plan.ep > 1:
        check_experts(model, ep=plan.ep, tp=plan.tp)
    if file is not None and file.model is not None:
        _check_reference(file.model, model, stack, plan)
    check_supported(plan, num_blocks=None if stack is None else len(stack), precision=precision)
    if plan.recompute != "none" and stack is None:
        raise PlanError(
            f"recompute={plan.recompute}, but {type(model).__name__} has no repeated blocks to recompute",
            hint="keep the blocks in an nn.ModuleList or nn.Sequential, or use recompute=none",
        )
    return stack


def unfrozen_note(model: nn.Module, file: PlanFile | None) -> str | None:
    """Return that all of a model trains where its plan foresees adapters beside frozen weights; None elsewhere."""
    training = None if file is None else file.training
    if (
        training is None
        or training.trainable.adapter is None
        or not all(one.requires_grad for one in model.parameters())
    ):
        return None
    return (
        f"the plan was made for --train {training.train}, and all parameters of this model train: that takes more "
        "memory and time than the plan foresees. Give job.prepare the model with its adapters, or plan without --train"
    )


def unfused_note(
    optimizers: Sequence[torch.optim.Optimizer], file: PlanFile | None, device: torch.device
) -> str | None:
    """Return a line where `file` counts on fused AdamW on a GPU and AdamW is left to torch's choice; None elsewhere.

    torch takes foreach then, which copies all parameters once more, or a loop for sharded ones
    (`torch.optim.optimizer._default_to_fused_or_foreach`).
    """
    if file is None or file.training is None or file.training.optimizer != "adamw" or device.type != "cuda":
        return None
    groups = [group for one in optimizers if isinstance(one, torch.optim.Adam) for group in one.param_groups]
    if all(group["fused"] or group["foreach"] for group in groups):
        return None
    return (
        "the plan counts on fused AdamW, which allocates nothing in its step, and this one is not: give it fused=True, "
        "or make the plan with --optimizer adamw_foreach"
    )


_QUANTIZED = ("Params4bit", "Int8Params")  # bitsandbytes.nn


def check_quantized(model: nn.Module, plan: ParallelPlan, device: torch.device) -> None:
    """Raise `UnsupportedPlanError` where a plan cannot hold the quantized weights that `model` has."""
    is_held = {name: is_quantized(one) for name, one in model.named_parameters()}
    of_bitsandbytes = [name for name in is_held if type(model.get_parameter(name)).__name__ in _QUANTIZED]
    name = next(iter(of_bitsandbytes or [name for name in is_held if is_held[name]]), None)
    if name is None or (plan.world_size == 1 and not plan.gathers_alone):
        return
    kind = type(model.get_parameter(name)).__name__
    if plan.gathers_alone:
        raise UnsupportedPlanError(
            f"zero_stage=3, offload=parameters in one process: {name} is quantized ({kind}), and stays on its device",
            hint="use zero_stage=0 and offload=none, or weights that are not quantized",
        )
    if plan.pp > 1 and not of_bitsandbytes:
        raise UnsupportedPlanError(
            f"pp={plan.pp}: {name} is quantized ({kind}), and stages are found on a model without values",
            hint="use DDP or ZeRO, or weights that are not quantized",
        )
    if plan.tp > 1:
        raise UnsupportedPlanError(
            f"tp={plan.tp}: {name} is quantized ({kind}), and its blocks go on from row to row",
            hint="use DDP or ZeRO-3, or weights that are not quantized",
        )
    if plan.zero_stage and kind == "Int8Params":
        raise UnsupportedPlanError(
            f"zero_stage={plan.zero_stage}: {name} is quantized to 8 bits ({kind}), which FSDP cannot shard",
            hint="use DDP, or weights in 4 bits with bnb_4bit_quant_storage",
        )
    _check_sharding(model, plan)
    if device.type == "cpu" and of_bitsandbytes:
        raise UnsupportedPlanError(
            f"{name} is quantized ({kind}), and on a CPU bitsandbytes lays it out anew for each pass in evaluation, "
            f"under the plan '{plan.describe()}'",
            hint="train it in one process, on GPUs, or with weights that are not quantized",
        )


def _check_sharding(model: nn.Module, plan: ParallelPlan) -> None:
    """Raise `UnsupportedPlanError` where FSDP would divide a quantized weight into plain tensors, or not at all."""
    num_shards = plan.zero_shards or plan.dp
    for name, one in model.named_parameters() if plan.zero_stage else ():
        if is_quantized(one) and not can_be_sharded(one, num_shards):
            raise UnsupportedPlanError(
                f"zero_stage={plan.zero_stage}: {name} is quantized ({type(one).__name__}), and FSDP cannot divide it "
                f"by {num_shards}",
                hint="use DDP, or a format that FSDP can shard, such as torchao's nf4",
            )


def wrap_model(
    model: nn.Module,
    stack: BlockStack | None,
    parallel: ParallelContext,
    *,
    example_inputs: Any = None,
    split: TensorSplit | None = None,
    given: Mapping[str, str] | None = None,
    has_values: bool = True,
) -> RankPart:
    """Return this rank's part of `model`, which is changed in place: split over `tp`, cut into stages, sharded.

    `split` is that of its layers over `tp` where it was found before, `given` how layers are to be split. Without
    `has_values` nothing is compared in numbers.
    """
    plan = parallel.plan
    if parallel.offloads_activations and stack is None:
        raise UnsupportedPlanError(
            f"offloads_activations=True, but {type(model).__name__} has no repeated blocks, whose activations wait",
            hint="keep the blocks in an nn.ModuleList or nn.Sequential, or use a plan without it",
        )
    layers = check_experts(model, ep=plan.ep, tp=plan.tp) if plan.ep > 1 else {}
    again = recomputed_blocks(parallel.recompute, plan, () if stack is None else stack.names)
    multiple = plan.cp * plan.tp if plan.cp > 1 else 1
    structure = ModelStructure(model, stack, example_inputs, token_multiple=multiple)
    if plan.pp > 1:
        # They import torch's compiler, which other plans do without.
        from paraplan.runtime.pipeline.assembly import find_stages, wrap_stages

        stages = find_stages(structure, plan, again)
    if plan.tp > 1 and split is None:
        split = _tensor_split(structure, parallel, given)
    found = ModelSplit(
        again,
        split,
        _context_split(structure, parallel, has_values=has_values) if plan.cp > 1 else None,
        layers,
        find_chunked(structure, parallel),
    )
    if plan.pp > 1:
        return wrap_stages(model, stages, found, parallel)
    return _wrap_whole(model, structure, found, parallel)


def _wrap_whole(model: nn.Module, structure: ModelStructure, split: ModelSplit, parallel: ParallelContext) -> RankPart:
    plan, mesh, context = parallel.plan, parallel.mesh, parallel.loss.context
    experts = [one for layer in split.layers.values() for _, one in expert_parameters(model, layer)]
    ends = large_ends(structure, experts, ep=plan.ep) if plan.zero_stage else ()
    names = structure.stack.names if structure.has_blocks else ()
    if split.context is not None:  # of a model without repeated blocks too
        names = split.context.names
    parallel.loss.balance = GlobalBalance.of(model, mesh)
    divided = divide(model, names, split, parallel)
    if split.context is not None:
        parallel.loss.refuse_other_calls(model)
    unsharded = never_sharded(model, plan)
    wrapping = Wrapping(
        structure.blocks_of(model),
        unsharded=unsharded,
        ends=[model.get_submodule(name) for name in ends],
        experts=divided.experts,
    )
    called = wrap_module(model, wrapping, parallel, again=split.again)
    if split.context is not None and context is not None:
        take_tokens(model, names, split.context, context)
    execution = WholeModelExecution(
        called,
        mesh,
        loss=parallel.loss,
        precision=parallel.precision,
        sums=gradient_sums(
            mesh,
            parallel.reduce_dtype,
            whole=[one for one in model.parameters() if one in unsharded],
            experts=[divided.experts],
            partial=[one for name, one in model.named_parameters() if name in divided.partial],
        ),
    )
    return RankPart(
        module=model,
        parameters=dict(model.named_parameters()),
        own_buffers=partial(lasting_buffers, model),
        execution=execution,
        shardings=divided.shardings,
        reductions=reductions_of(called),
        orders=orders_of(model),
        loads=(divided.experts.load,) if split.layers else (),
    )


def _context_split(structure: ModelStructure, parallel: ParallelContext, *, has_values: bool) -> ContextSplit:
    """Return how the blocks of a model run over `cp`; rank 0 says which parts of them need all tokens."""
    split = find_context_split(structure, parallel.mesh, has_values=has_values)
    plan = parallel.plan
    num_parts = plan.tp if plan.sequence_parallel else 1
    parallel.loss.context = Context(TensorGroup.of(parallel.mesh, "cp"), num_parts=num_parts)
    parts = {f"{block}.{part}".rstrip("."): None for block, found in split.whole.items() for part in found}
    if parts and parallel.mesh.world.rank == 0:
        _LOGGER.warning(
            "cp=%d: these bring tokens together by code that is not torch's scaled_dot_product_attention,\n"
            "nor one of transformers', and run on the tokens of all ranks:%s",
            *(parallel.plan.cp, _lines_of(parts)),
        )
    if split.embeds_all and parallel.mesh.world.rank == 0:
        _LOGGER.warning(
            "cp=%d: every rank embeds the tokens of all ranks: what comes before the blocks brings them together (%s)",
            *(parallel.plan.cp, split.embeds_all),
        )
    return split


def _lines_of(names: Iterable[str]) -> str:
    """Return names of modules, one a line, in which `*` stands for the numbers of blocks."""
    return "".join(f"\n  {one}" for one in dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))


def _tensor_split(structure: ModelStructure, parallel: ParallelContext, given: Mapping[str, str] | None) -> TensorSplit:
    """Return how the layers of a model, which is whole, are split over `tp`; rank 0 says which are not, and why."""
    split = find_tensor_split(
        structure, mesh=parallel.mesh, sequence_parallel=parallel.plan.sequence_parallel, given=given
    )
    if given is None and own_plan(structure.model) is None and parallel.mesh.world.rank == 0:
        lines = "".join(f"\n  {pattern!r}: {style!r}," for pattern, style in split.patterns.items())
        sys.stderr.write(
            f"paraplan: this model names no split over tp; tried and taken, as prepare(split=...):{lines}\n"
        )
    if parallel.compile_backend is not None:
        check_compilable(split, tp=parallel.plan.tp)
    if split.whole and parallel.mesh.world.rank == 0:
        reasons = "".join(f"\n  {layer}: {reason}" for layer, reason in split.whole.items())
        _LOGGER.warning("tp=%d leaves these layers whole on every rank:%s", parallel.plan.tp, reasons)
    if split.joined and parallel.mesh.world.rank == 0:
        _LOGGER.warning(
            "sequence_parallel=True: these look at tokens in code of their own,\n"
            "and compute with the tokens of all ranks:%s",
            _lines_of(split.joined),
        )
    return split


def _check_reference(reference: ModelReference, model: nn.Module, stack: BlockStack | None, plan: ParallelPlan) -> None:
    num_parameters = count_parameters(model)
    # Plans of --train lora are made for the model without its adapters, those of a factory for all that it builds.
    if reference.num_parameters not in (None, num_parameters, count_base(model)):
        raise PlanError(
            f"the plan was made for {reference.name} with {reference.num_parameters:,} parameters, and this model has "
            f"{num_parameters:,}",
            hint="make a plan for this model with paraplan recommend",
        )
    # Readers of models count the blocks of a second stack too (an encoder's); only a pipeline cuts by the count.
    if plan.pp > 1 and stack is not None and reference.num_blocks not in (None, len(stack)):
        raise PlanError(
            f"the plan was made for {reference.name} with {reference.num_blocks} blocks, and this model has "
            f"{len(stack)}",
            hint="make a plan for this model with paraplan recommend",
        )
