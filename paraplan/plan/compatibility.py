"""Whether a plan suits a model, its training and the machines: the one place that says so, with what would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paraplan.hardware.cluster import Cluster
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.spec import ModelSpec
from paraplan.model.tensor_split import allowed_degrees, split_reason
from paraplan.model.weight_formats import is_stored_below_16_bits
from paraplan.plan.context_heads import context_reason, mask_reason
from paraplan.plan.incompatibility import Incompatibility
from paraplan.plan.parallel import AXES, Degree, ParallelPlan
from paraplan.plan.split_rules import STRICT, SplitRules
from paraplan.plan.stages import stages_reason
from paraplan.plan.training import TrainingSpec

_MOST_LISTED = 64


def why_incompatible(
    plan: ParallelPlan,
    model: ModelSpec,
    training: TrainingSpec,
    cluster: Cluster,
    rules: SplitRules = STRICT,
) -> Incompatibility | None:
    """Return the first rule that a plan breaks, None where it suits the model, the training and the machines.

    A plan may leave GPUs idle. `rules` are those of the framework. Whether the plan fits in memory and which runtime
    executes it are other questions.
    """
    return (
        why_untrainable(model, training, cluster.gpu)
        or _ranks(plan, cluster)
        or _batch(plan, training)
        or why_degrees_incompatible(model, training, plan.degrees, rules)
        or _stages(plan, model)
        or _sequence(plan, training)
        or why_not_sharded(training, zero_stage=plan.zero_stage)
    )


_OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion", "lion_8bit")


def why_not_sharded(training: TrainingSpec, *, zero_stage: int) -> Incompatibility | None:
    """Return why ZeRO cannot shard frozen weights as they are stored, or what an optimizer needs whole; None if it can.

    FSDP flattens parameters of one type: bitsandbytes stores 4-bit weights as 16-bit numbers for it
    (`bnb_4bit_quant_storage`), 8-bit ones it does not (huggingface.co/docs/bitsandbytes/fsdp_qlora).
    """
    if zero_stage < 3 or training.base_weights != "int8":
        return _parts_of_gradients(training, zero_stage=zero_stage)
    return Incompatibility(
        rule="base_weights",
        value="int8",
        limit="ZeRO-2",
        message="int8 weights of bitsandbytes cannot be sharded by ZeRO-3 or FSDP",
        reason="int8 weights cannot be sharded by ZeRO-3",
        allowed=("nf4", "bf16"),
        hint="use --base-weights nf4 or bf16, or --zero 0",
    )


def _parts_of_gradients(training: TrainingSpec, *, tp: int = 1, zero_stage: int = 0) -> Incompatibility | None:
    """Return why an optimizer cannot step on parts of matrices, None where it can or has whole ones.

    GaLore projects a whole gradient (Zhao et al. 2024; transformers' documentation: no FSDP, no DeepSpeed).
    """
    if training.optimizer != "galore_adamw" or (tp == 1 and zero_stage == 0):
        return None
    return Incompatibility(
        rule="optimizer",
        value=training.optimizer,
        limit="DDP",
        message="galore_adamw projects whole gradients, which ZeRO and tensor parallelism divide",
        reason="galore_adamw needs whole gradients",
        allowed=("adamw_8bit", "muon"),
        hint="use --zero 0 --tp 1, or --optimizer adamw_8bit",
    )


def _quantized_tp(training: TrainingSpec, tp: int) -> Incompatibility | None:
    weights = training.base_weights
    if tp == 1 or weights is None or not is_stored_below_16_bits(weights) or weights == "fp8":
        return None
    return Incompatibility(
        rule="base_weights",
        value=weights,
        limit=1,
        message=f"tp={tp}: tensor parallelism cannot divide {weights} weights, whose blocks go on from row to row",
        reason=f"tensor parallelism cannot divide {weights} weights",
        allowed=(1,),
        hint="use --tp 1: data parallelism, ZeRO-3 or a pipeline, or --base-weights bf16",
    )


def why_untrainable(model: ModelSpec, training: TrainingSpec, gpu: GpuProfile) -> Incompatibility | None:
    """Return why no plan can train a model so: an arithmetic that the GPU lacks, a sequence beyond learned positions.

    Rotary and other computed positions have no end.
    """
    if training.optimizer in _OF_BITSANDBYTES and gpu.vendor == "cpu":
        return Incompatibility(
            rule="optimizer",
            value=training.optimizer,
            limit="GPUs",
            message=f"{training.optimizer} is a kernel of bitsandbytes for GPUs, and {gpu.title} is none",
            reason=f"{training.optimizer} needs a GPU",
            allowed=("adamw",),
            hint="use --optimizer adamw",
        )
    if training.compute_precision not in gpu.peak_flops_per_s:
        known = tuple(name for name in ("bf16", "fp16", "fp32") if name in gpu.peak_flops_per_s)
        return Incompatibility(
            rule="precision",
            value=training.precision,
            limit=" ".join(known),
            message=f"{gpu.title} has no {training.precision} arithmetic",
            reason=f"{gpu.title} has no {training.precision} arithmetic",
            allowed=known,
            hint="use " + " or ".join(f"--precision {name}" for name in known),
        )
    longest = model.max_seq_length
    if longest is not None and training.seq_length > longest and model.has_learned_positions:
        return Incompatibility(
            rule="positions",
            value=training.seq_length,
            limit=longest,
            message=f"--seq-len {training.seq_length} is beyond the {longest} learned positions of {model.name}",
            reason=f"sequences are longer than the {longest} learned positions of the model",
            allowed=(longest,),
            hint=f"use at most --seq-len {longest}",
        )
    return None


def why_degrees_incompatible(
    model: ModelSpec,
    training: TrainingSpec,
    degrees: Mapping[Degree, int],
    rules: SplitRules = STRICT,
) -> Incompatibility | None:
    """Return why no plan of these degrees suits a model and its training, None where one may."""
    tp, cp = degrees["tp"], degrees["cp"]
    found = (
        why_tp(model, tp, shares_key_heads=rules.shares_key_heads),
        _quantized_tp(training, tp),
        _parts_of_gradients(training, tp=tp),
        None if rules.any_context else _context_heads(model, tp=tp, cp=cp),
        _context_masks(model, training, cp) if rules.causal_context else None,
        why_pp(model, degrees["pp"]),
        _share("global_batch", degrees["dp"], training.global_batch_size),
        _share("cp", cp, training.seq_length),
        why_ep(model, degrees["ep"] * (tp if rules.whole_experts and model.num_experts > 1 else 1)),
    )
    return next((one for one in found if one is not None), None)


OWN_TP_PLAN = (
    ", or give the module a config whose base_model_tp_plan names its layers, as transformers' have: "
    "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
)

OTHER_CONTEXT = ", or a framework that exchanges tokens for heads, as DeepSpeed and paraplan's runtime do"
MORE_RANKS_THAN_KEYS = ", or --framework megatron-core, in which several ranks attend to the same keys"


def why_tp(model: ModelSpec, tp: int, *, shares_key_heads: bool = False) -> Incompatibility | None:
    """Return why a model's layers cannot be divided over `tp` ranks.

    With `shares_key_heads` several ranks may attend to the same keys and values.
    """
    reason = split_reason(model, tp, shares_key_heads=shares_key_heads)
    if reason is None:
        return None
    is_traced = any(run.block.is_traced and run.block.tp_limit == 1 for run in model.runs)
    common = reason if is_traced else "tp does not divide the model's attention and key-value heads"
    allowed = allowed_degrees(model, most=_MOST_LISTED, shares_key_heads=shares_key_heads)
    ways = "" if shares_key_heads or split_reason(model, tp, shares_key_heads=True) else MORE_RANKS_THAN_KEYS
    return Incompatibility(
        rule="tp",
        value=tp,
        limit=max(allowed),
        message=f"tp={tp}: {reason}",
        reason=common,
        allowed=allowed,
        hint=f"use --tp {_listed(allowed)}" + (OWN_TP_PLAN if is_traced else ways),
    )


def why_pp(model: ModelSpec, pp: int) -> Incompatibility | None:
    """Return why a model has too few blocks for `pp` stages."""
    reason = stages_reason(pp, None, model.num_blocks, model.name)
    if reason is None:
        return None
    return Incompatibility(
        rule="stages",
        value=pp,
        limit=model.num_blocks,
        message=reason,
        reason=f"more pipeline stages than the model's {model.num_blocks} blocks",
        hint=f"use at most {model.num_blocks} stages",
    )


def why_ep(model: ModelSpec, ep: int) -> Incompatibility | None:
    """Return why the experts of a model cannot go over `ep` ranks."""
    count = model.num_experts
    if count % ep == 0:
        return None
    reason = f"{model.name} has {f'{count} experts to a layer' if count > 1 else 'no experts'}"
    allowed = _divisors(count)
    return Incompatibility(
        rule="ep",
        value=ep,
        limit=count,
        message=f"ep={ep}: {reason}",
        reason=reason,
        allowed=allowed,
        hint=f"use --ep {_listed(allowed)}",
    )


def _ranks(plan: ParallelPlan, cluster: Cluster) -> Incompatibility | None:
    devices = plan.devices_per_process
    if devices > cluster.gpus_per_node:
        return Incompatibility(
            rule="devices_per_process",
            value=devices,
            limit=cluster.gpus_per_node,
            message=f"one process divides its micro-batches over {devices} GPUs, and {cluster.name} has "
            f"{cluster.gpus_per_node}",
            reason="one process divides its micro-batches over more GPUs than a machine has",
            hint=f"use --devices-per-process {cluster.gpus_per_node}",
        )
    if plan.world_size <= cluster.num_gpus:
        return None
    nodes = -(-plan.world_size // cluster.gpus_per_node)
    return Incompatibility(
        rule="ranks",
        value=plan.world_size,
        limit=cluster.num_gpus,
        message=f"the plan has {_product_of(plan)} = {plan.world_size} ranks, "
        f"and {cluster.num_nodes} x {cluster.name} has {cluster.num_gpus} GPUs",
        reason="the plan has more ranks than the machines have GPUs",
        hint=f"use --nodes {nodes}, or a plan of at most {cluster.num_gpus} ranks",
    )


def _product_of(plan: ParallelPlan) -> str:
    return " x ".join(f"{axis.name} {plan.degrees[axis.name]}" for axis in AXES if axis.multiplies_ranks)


def _batch(plan: ParallelPlan, training: TrainingSpec) -> Incompatibility | None:
    wanted, own = training.global_batch_size, plan.global_batch_size
    group = training.learns_from.group
    if plan.micro_batch_size % group:
        return Incompatibility(
            rule="global_batch",
            value=plan.micro_batch_size,
            limit=group,
            message=f"a micro-batch of {plan.micro_batch_size} holds no pairs, which {training.task} learns from",
            reason=f"{training.task} learns from pairs, and micro-batches are odd",
            allowed=(plan.micro_batch_size + 1,),
            hint=f"use --micro-batch {plan.micro_batch_size + 1}: chosen and rejected sequences count apart",
        )
    if own == wanted:
        return None
    count, rest = divmod(wanted, plan.dp * plan.micro_batch_size)
    hint = f"use {count} micro-batches, or --global-batch {own}" if count and not rest else f"use --global-batch {own}"
    return Incompatibility(
        rule="global_batch",
        value=own,
        limit=wanted,
        message=f"the plan's global batch is {own} (micro-batch {plan.micro_batch_size} x {plan.num_microbatches} x "
        f"dp {plan.dp}), and {wanted} is wanted",
        reason=f"the plan's global batch is not {wanted}",
        allowed=(count,) if count and not rest else (),
        hint=hint,
    )


def _context_heads(model: ModelSpec, *, tp: int, cp: int) -> Incompatibility | None:
    reason = context_reason(model, tp=tp, cp=cp)
    if reason is None:
        return None
    allowed = tuple(size for size in range(1, _MOST_LISTED + 1) if context_reason(model, tp=tp, cp=size) is None)
    return Incompatibility(
        rule="context_heads",
        value=cp,
        limit=tp,
        message=reason,
        reason="cp, which exchanges tokens for heads, does not divide the model's heads",
        allowed=allowed,
        hint=f"use --cp {_listed(allowed)}",
    )


def _context_masks(model: ModelSpec, training: TrainingSpec, cp: int) -> Incompatibility | None:
    attends = mask_reason(model, training.seq_length)
    if cp == 1 or attends is None:
        return None
    reason = (
        f"this framework has context parallelism for attention to all tokens before alone, and {model.name} {attends}"
    )
    return Incompatibility(
        rule="cp",
        value=cp,
        limit=1,
        message=f"cp={cp}: {reason}",
        reason=reason,
        allowed=(1,),
        hint=f"use --cp 1{OTHER_CONTEXT}",
    )


def _share(rule: Literal["global_batch", "cp"], degree: int, total: int) -> Incompatibility | None:
    if total % degree == 0:
        return None
    axis, what, option = (
        ("cp", f"{total} tokens of a sequence", "--seq-len")
        if rule == "cp"
        else ("dp", f"{total} sequences of the global batch", "--global-batch")
    )
    common = f"the sequence length of {total}" if rule == "cp" else f"the global batch of {total}"
    allowed = _divisors(total)
    return Incompatibility(
        rule=rule,
        value=degree,
        limit=total,
        message=f"{axis}={degree} does not divide the {what}",
        reason=f"{axis} does not divide {common}",
        allowed=allowed,
        hint=f"use --{axis} {_listed(allowed)}, or another {option}",
    )


def _stages(plan: ParallelPlan, model: ModelSpec) -> Incompatibility | None:
    reason = stages_reason(plan.num_stages, plan.stage_blocks, model.num_blocks, model.name)
    if reason is None:
        return None
    is_sum = plan.stage_blocks is not None
    hint = "make the plan again for this model with paraplan recommend" if is_sum else None
    return Incompatibility(
        rule="stages",
        value=sum(plan.stage_blocks or ()) if is_sum else plan.num_stages,
        limit=model.num_blocks,
        message=reason,
        reason=f"the stages do not hold the model's {model.num_blocks} blocks",
        hint=hint or f"use at most {model.num_blocks} stages",
    )


def _sequence(plan: ParallelPlan, training: TrainingSpec) -> Incompatibility | None:
    tokens = training.seq_length // plan.cp
    if not plan.sequence_parallel or tokens % plan.tp == 0:
        return None
    return Incompatibility(
        rule="sequence_parallel",
        value=plan.tp,
        limit=tokens,
        message=f"sequence parallelism: tp={plan.tp} does not divide the {tokens} tokens of a rank",
        reason="tp does not divide the tokens of a rank, as sequence parallelism needs it",
        allowed=_divisors(tokens),
        hint="leave out --sequence-parallel, or use another --seq-len",
    )


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, min(number, _MOST_LISTED) + 1) if number % size == 0)


def _listed(values: tuple[int | str, ...]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
