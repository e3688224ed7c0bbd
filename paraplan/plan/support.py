"""Plans that the runtime can execute. The planner recommends nothing else; tests run what this module admits."""

from __future__ import annotations

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stages import empty_stage_reason, stages_reason
from paraplan.plan.training import TORCHAO_RECIPES, TrainingPrecision, TrainingSpec

RUNNABLE_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
RUNNABLE_RECOMPUTE = ("none", "selective", "selective_ops", "full")
RUNNABLE_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-pure")
"""bf16-pure is a model in bf16 as it comes, without autocast."""
_OF_WHOLE_TENSORS = ("adafactor", "muon", "galore_adamw")
"""Optimizers that change a number by others of its matrix: what ranks hold in parts is gathered for them."""


def unsupported_reason(
    plan: ParallelPlan,
    *,
    num_blocks: int | None = None,
    precision: TrainingPrecision | None = None,
    compiled: bool = False,
) -> str | None:
    """Return why the runtime cannot execute `plan`, or None where it can.

    Runnable are one process, also with DataParallel over its GPUs; DDP and ZeRO-1, 2 and 3 over `dp`, and over `dp` and
    `cp` together; ZeRO over groups of `dp` with replicas between them (hybrid sharding); a pipeline under GPipe, 1F1B,
    1F1B of interleaved stages or the zero-bubble schedule, alone or beside DDP or ZeRO-1; tensor parallelism with and
    without sequence parallelism, and context parallelism, alone, together or beside any of these; each with
    the numbers of micro-batches that the schedule takes, and with recompute of none of the blocks, of their attention
    core, of chosen operations or of all. Experts go over `tp` like other layers, and over `ep` beside any of these.
    The optimizer may be offloaded under each of these, parameters under ZeRO-3.
    `num_blocks` is the number of repeated blocks of the model and `precision` that of the training; what is None is not
    looked at. Blocks that torch.compile compiles (`compiled`) are not copied, nor split in any model. Splits alone
    decide: whether the plan fits in memory is another question, and whether a model's heads divide over `tp` or `cp` is
    seen when it is prepared.
    """
    reasons = (
        _axes_reason(plan),
        _pipeline_reason(plan, num_blocks),
        _memory_reason(plan),
        _precision_reason(precision),
        compiled_reason(plan) if compiled else None,
    )
    return next((reason for reason in reasons if reason is not None), None)


def check_supported(
    plan: ParallelPlan,
    *,
    num_blocks: int | None = None,
    precision: TrainingPrecision | None = None,
    compiled: bool = False,
    training: TrainingSpec | None = None,
) -> None:
    """Raise `UnsupportedPlanError` with the reason and a way out if the runtime cannot execute `plan`.

    Of the `training` that the plan was made for only options are looked at that the runtime has not.
    """
    reason = training_reason(training, plan)
    reason = reason or unsupported_reason(plan, num_blocks=num_blocks, precision=precision, compiled=compiled)
    if reason is not None:
        raise UnsupportedPlanError(
            f"this runtime cannot execute the plan '{plan.describe()}': {reason}",
            hint="change that field of the plan, or make one with paraplan recommend",
        )


def rule_of(reason: str) -> str:
    """Return the general part of a reason, without the values of the plan: what many plans have in common."""
    return reason.partition(": ")[2] or reason


def training_reason(training: TrainingSpec | None, plan: ParallelPlan | None = None) -> str | None:
    """Return why the runtime does not train so under `plan`, or under any, None where it does or nothing is known."""
    narrow = None if training is None else _narrow_reason(training)
    if narrow is not None:
        return narrow
    if training is not None and training.offloads_activations and training.compiled:
        return "--offload-activations: what compiled blocks keep is the compiler's choice"
    keeps_operations = plan is not None and plan.recompute == "selective_ops"
    if training is not None and training.offloads_activations and keeps_operations:
        return "recompute=selective_ops: results of operations that are kept stay on the GPU"
    if training is not None and training.stack.mlp_tile is not None and training.compiled:
        return f"--stack mlp_tile={training.stack.mlp_tile}: tiles run again, which compiled blocks have compiled"
    for name, value in training.stack.of_engines.items() if training is not None else ():
        return f"--stack {name}={str(value).lower()}: the runtime has no such setting"
    is_in_parts = plan is not None and plan.offload != "none" and (plan.tp * plan.ep > 1 or plan.zero_stage > 0)
    if training is not None and plan is not None and is_in_parts and training.optimizer in _OF_WHOLE_TENSORS:
        return f"offload={plan.offload}: {training.optimizer} looks at whole tensors, which are gathered on the device"
    return None


def _narrow_reason(training: TrainingSpec) -> str | None:
    """Return why linear layers do not multiply below 16 bits as `training` says: torchao's float8 layers do."""
    if training.linear_precision not in ("16bit", "fp8"):
        return f"--linear-precision {training.linear_precision}: the runtime has torchao's layers, which are in fp8"
    if training.fp8_recipe not in (None, *TORCHAO_RECIPES):
        return f"--fp8-recipe {training.fp8_recipe}: torchao's layers scale by {', '.join(TORCHAO_RECIPES)}"
    if training.fp8_gather:
        return "--fp8-gather: weights are gathered as they are stored"
    return None


def compiled_reason(plan: ParallelPlan, *, of_any_model: bool = True) -> str | None:
    """Return why torch.compile cannot compile the blocks of a model under `plan`, None where it can.

    Blocks that `tp` splits can be compiled where their code names no sizes of whole tensors: not `of_any_model`.
    """
    if plan.tp > 1 and of_any_model:
        return f"tp={plan.tp}: whether torch.compile follows split layers depends on the model's code"
    if plan.ep > 1 and of_any_model:
        return f"ep={plan.ep}: experts run uncompiled within a compiled block, of which no cost is known here"
    if plan.ep > 1 and plan.recompute == "full":
        return f"ep={plan.ep}, recompute=full: what experts interrupt and runs again is not compiled"
    if plan.recompute == "selective_ops":
        return "recompute=selective_ops: a compiled block's operations are the compiler's choice"
    if plan.devices_per_process > 1:
        return f"devices_per_process={plan.devices_per_process}: DataParallel copies blocks anew in every step"
    if plan.virtual_pipeline_size > 1:
        return f"virtual_pipeline_size={plan.virtual_pipeline_size}: copies of blocks are not compiled"
    return None


def _axes_reason(plan: ParallelPlan) -> str | None:
    if plan.zero_shards is not None and plan.dp < plan.world_size:
        return f"zero_shards={plan.zero_shards}: hybrid sharding is executed over dp alone"
    return None


def _pipeline_reason(plan: ParallelPlan, num_blocks: int | None) -> str | None:
    if plan.pp == 1:
        return None
    reason = _schedule_reason(plan) or _count_reason(plan) or empty_stage_reason(plan.stage_blocks)
    if reason is not None:
        return reason
    return None if num_blocks is None else stages_reason(plan.num_stages, plan.stage_blocks, num_blocks)


def _schedule_reason(plan: ParallelPlan) -> str | None:
    if plan.pipeline_schedule not in RUNNABLE_SCHEDULES:
        return f"pipeline_schedule={plan.pipeline_schedule}: executed schedules are {', '.join(RUNNABLE_SCHEDULES)}"
    virtual = plan.virtual_pipeline_size
    if plan.pipeline_schedule == "interleaved_1f1b":
        return None if virtual > 1 else "virtual_pipeline_size=1: interleaved_1f1b needs two stages or more on a rank"
    if virtual > 1:
        return f"virtual_pipeline_size={virtual}: only interleaved_1f1b has more than one stage on a rank"
    return None


def _count_reason(plan: ParallelPlan) -> str | None:
    count = plan.num_microbatches
    if plan.pipeline_schedule == "1f1b" and count < plan.pp:
        return f"num_microbatches={count}, pp={plan.pp}: 1f1b needs a micro-batch for each stage"
    # Torch's schedules take rounds of about pp micro-batches, all of one size.
    rounds = max(1, count // plan.pp)
    if plan.pipeline_schedule in ("interleaved_1f1b", "zero_bubble") and count % rounds:
        return (
            f"num_microbatches={count}, pp={plan.pp}: {plan.pipeline_schedule} takes micro-batches in {rounds} equal "
            f"rounds, so that their number is a multiple of {rounds}; a multiple of pp always is"
        )
    return None


def _memory_reason(plan: ParallelPlan) -> str | None:
    if plan.devices_per_process > 1 and (plan.recompute != "none" or plan.offload != "none"):
        return (
            f"devices_per_process={plan.devices_per_process}, recompute={plan.recompute}, offload={plan.offload}: "
            "DataParallel copies the model anew in every step, without recompute and offload"
        )
    if plan.recompute not in RUNNABLE_RECOMPUTE:
        return f"recompute={plan.recompute}: executed recompute is {' or '.join(RUNNABLE_RECOMPUTE)}"
    if plan.offload == "parameters" and plan.zero_stage < 3:
        return f"offload=parameters, zero_stage={plan.zero_stage}: parameter offload requires ZeRO-3"
    return None


def _precision_reason(precision: TrainingPrecision | None) -> str | None:
    if precision is not None and precision not in RUNNABLE_PRECISIONS:
        return f"precision={precision}: executed are {' and '.join(RUNNABLE_PRECISIONS)}"
    return None
