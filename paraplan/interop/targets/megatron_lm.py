"""Megatron-LM: the arguments of pretrain_gpt.py and its kin, as in its training/arguments.py of August 2026."""

from __future__ import annotations

import shlex

from paraplan.interop.commands import torchrun_command
from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    expert_ranks,
    field_gap,
    hybrid_gap,
    order_gap,
    remarks,
    shard_degrees,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, Axis, ParallelPlan
from paraplan.plan.stack import Graphs, StackSettings
from paraplan.plan.stages import even_split
from paraplan.plan.training import Fp8Recipe, LinearPrecision, TrainingSpec

PIPELINE_INSIDE_DATA: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")
"""The order of --use-tp-pp-dp-mapping ('tp-cp-ep-pp-dp', innermost first), from outermost to innermost."""

MODULES_NOTE = (
    "recompute modules of other models: moe_act beside --moe-grouped-gemm where there are experts, mla_up_proj where "
    "attention is latent"
)

TOLD = frozenset(
    {
        *("dispatcher", "etp", "overlaps_experts", "cuda_graphs", "fp8_attention", "compiled_loss", "engine_loss"),
        *("overlaps_gradients", "fuses_accumulation", "overlaps_products", "gradient_bytes"),
    }
)
"""Settings of the software that Megatron-Core has options for."""
_OPTIMIZERS = {
    "adamw": ["--optimizer adam"],
    "sgd_momentum": ["--optimizer sgd"],
    "sgd": ["--optimizer sgd", "--sgd-momentum 0.0"],
    "muon": ["--optimizer muon"],
}
_ATTENTION = {"flash": ["--attention-backend flash"], "eager": ["--attention-backend unfused"], "sdpa": []}
_NARROW: dict[LinearPrecision, list[str]] = {
    "16bit": [],
    "fp8": ["--fp8-format hybrid"],
    "mxfp8": ["--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--fp4-format e2m1", "--fp4-recipe nvfp4"],
}
"""Linear layers below 16 bits (megatron/training/arguments.py)."""
GRAPHS: dict[Graphs, str] = {"none": "none", "layers": "transformer_engine", "full": "full_iteration"}
"""Content of CUDA graphs in Megatron-Core's words (cuda_graph_impl)."""
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def to_megatron_lm(subject: Subject) -> Exported:
    """Return a script that holds the arguments of the plan and passes them on; the model's own are its arguments."""
    gaps = megatron_gaps(subject)
    notes = ["the model (--num-layers, --hidden-size ...), data and learning rate: arguments of this script"]
    if subject.layout.num_nodes > 1:
        notes.append("run it on every node, with FIRST_NODE replaced by the address of one of them")
    tells = TOLD | {"expandable_segments"}
    notes += shared_notes(subject, {"linear_precision", "seq_length", "optimizer", "attention"}, tells=tells)
    if subject.plan.recompute == "selective_ops":
        notes.append(MODULES_NOTE)
    arguments = "".join(f"  {argument}\n" for argument in megatron_arguments(subject))
    script = subject.script if subject.script != "train.py" else "pretrain_gpt.py"
    command = torchrun_command(subject.layout, script=script, training=subject.training)
    text = (
        "#!/bin/bash\n"
        + comment(remarks(subject, gaps, notes))
        + _connections(subject.plan)
        + f'plan_arguments=(\n{arguments})\n{command} "${{plan_arguments[@]}}" "$@"\n'
    )
    return Exported(target="megatron-lm", text=text, gaps=tuple(gaps), notes=tuple(notes))


def megatron_arguments(subject: Subject) -> list[str]:
    """Return the arguments, one option with its value each; what cannot be expressed is left out."""
    plan, training = subject.plan, subject.training
    arguments = [
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        f"--context-parallel-size {plan.cp}",
        f"--micro-batch-size {plan.micro_batch_size}",
        f"--global-batch-size {plan.global_batch_size}",
    ]
    stack = training.stack if training is not None else StackSettings()
    experts, expert_tp = (expert_ranks(subject), 1) if stack.etp == 1 else (plan.ep, plan.tp)
    if experts > 1:
        arguments += [
            f"--expert-model-parallel-size {experts}",
            f"--expert-tensor-parallel-size {expert_tp}",
            f"--moe-token-dispatcher-type {'alltoall' if stack.dispatcher in (None, 'alltoall') else 'flex'}",
        ]
    arguments += told_arguments(stack)
    arguments += ["--sequence-parallel"] * plan.sequence_parallel
    arguments += _pipeline(subject) + _sharding(plan, stack) + _recompute(plan)
    if plan.offload == "optimizer":
        arguments += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if order_gap(plan, "", MEGATRON_RANK_ORDER) and not order_gap(plan, "", PIPELINE_INSIDE_DATA):
        arguments.append("--use-tp-pp-dp-mapping")
    if training is not None:
        arguments.append(f"--seq-length {training.seq_length}")
        arguments += [f"--{training.precision}"] * (training.precision != "fp32")
        # Megatron-FSDP's gradients are priced in 16 bits, which releases before 2026 have to be told.
        in_16_bits = stack.gradient_bytes == 2 or plan.zero_stage >= 2
        arguments += ["--grad-reduce-in-bf16"] * (training.precision == "bf16" and in_16_bits)
        arguments += _NARROW[training.linear_precision]
        arguments += [f"--fp8-recipe {recipe_name(training, usual='delayed')}"] * (training.linear_precision == "fp8")
        arguments += ["--fp8-param-gather"] * training.fp8_gather
        arguments += _OPTIMIZERS.get(training.optimizer, []) + _ATTENTION[training.attention]
    return arguments


def told_arguments(stack: StackSettings) -> list[str]:
    """Return the options for settings of the software that the plan was made for."""
    options = {
        f"--moe-flex-dispatcher-backend {stack.dispatcher}": stack.dispatcher in ("deepep", "hybridep"),
        "--overlap-moe-expert-parallel-comm": stack.overlaps_experts,
        f"--cuda-graph-impl {GRAPHS.get(stack.cuda_graphs or 'none')}": stack.cuda_graphs is not None,
        "--fp8-dot-product-attention": stack.fp8_attention,
        "--cross-entropy-loss-fusion": stack.compiled_loss or stack.engine_loss,
        "--cross-entropy-fusion-impl te": stack.engine_loss,
        "--no-gradient-accumulation-fusion": stack.fuses_accumulation is False,
        "--tp-comm-overlap": stack.overlaps_products,
    }
    return [option for option, is_told in options.items() if is_told]


def recipe_name(training: TrainingSpec, *, usual: Fp8Recipe) -> str:
    """Return the name of Megatron-Core for how operands in fp8 are scaled, with what it cannot do as "tensorwise".

    Where the training does not say it, they are scaled as is `usual`.
    """
    chosen = training.fp8_recipe or usual
    return chosen if chosen in ("delayed", "blockwise") else "tensorwise"


def _connections(plan: ParallelPlan) -> str:
    """Return the line for a variable that Megatron-LM's validate_args insists on: 1 for tp and cp, never 1 for FSDP."""
    if plan.zero_stage >= 2:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if plan.tp * plan.cp > 1 else ""


def megatron_gaps(subject: Subject) -> list[Gap]:
    """Return what Megatron-Core cannot do of a plan."""
    plan, model = subject.plan, subject.file.model
    gaps = field_gap(
        plan,
        "pipeline_schedule",
        (None, "1f1b", "interleaved_1f1b"),
        "Megatron-Core runs 1F1B, plain or interleaved; use 1f1b or interleaved_1f1b",
    )
    gaps += field_gap(plan, "offload", ("none", "optimizer"), "Megatron-Core keeps parameters on the GPU")
    gaps += hybrid_gap(plan, "Megatron-Core")
    if plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel:
        reason = "Megatron-Core sends tokens to experts beside tp under sequence parallelism alone"
        gaps.append(Gap(part=f"ep={plan.ep}", reason=reason))
    if plan.ep > plan.cp and plan.pp > 1 and order_gap(plan, "", MEGATRON_RANK_ORDER):
        reason = "outside of pp Megatron-Core lays dp out for experts too, so that these go over cp alone"
        gaps.append(Gap(part=f"ep={plan.ep}", reason=reason))
    if plan.virtual_pipeline_size > 1 and plan.num_microbatches < plan.pp:
        part = f"num_microbatches={plan.num_microbatches}"
        gaps.append(Gap(part=part, reason=f"interleaving takes one for each of {plan.pp} stages or more"))
    if plan.virtual_pipeline_size > 1 and plan.stage_blocks is None and (model is None or model.num_blocks is None):
        gaps.append(Gap(part="stages", reason="the number of blocks is not in the plan file, so they cannot be cut"))
    gaps += training_gap(
        subject.training, "optimizer", tuple(_OPTIMIZERS), "Megatron-LM has adam, sgd, muon, lion and soap"
    )
    if subject.training is not None and subject.training.fp8_recipe is not None:
        recipes = ("delayed", "tensorwise", "blockwise")
        gaps += training_gap(subject.training, "fp8_recipe", recipes, "Megatron-Core scales tensors or blocks")
    if plan.zero_stage >= 2:
        fitting = ("adamw", "sgd", "sgd_momentum")
        gaps += training_gap(subject.training, "optimizer", fitting, "Megatron-FSDP takes adam and sgd")
    return gaps + order_gap(plan, "Megatron-Core", MEGATRON_RANK_ORDER, PIPELINE_INSIDE_DATA)


def pipeline_layout(plan: ParallelPlan, num_blocks: int) -> str:
    """Return the value of --pipeline-model-parallel-layout: E embedding, t a block, L the loss, stages apart by |."""
    blocks = plan.stage_blocks or even_split(num_blocks, plan.num_stages)
    return "E" + "|".join(f"t*{count}" if count else "" for count in blocks) + "L"


def _pipeline(subject: Subject) -> list[str]:
    """Return how the blocks are cut: Megatron's own even cut where it divides, else a layout of every stage."""
    plan, model = subject.plan, subject.file.model
    if plan.pp == 1:
        return []
    num_blocks = model.num_blocks if model is not None else None
    blocks = plan.stage_blocks or (even_split(num_blocks, plan.num_stages) if num_blocks is not None else None)
    group = interleaved_group(plan)
    rounds = [f"--microbatch-group-size-per-virtual-pipeline-stage {group}"] if group is not None else []
    if blocks is not None and len(set(blocks)) > 1:
        return [f"--pipeline-model-parallel-layout {shlex.quote(pipeline_layout(plan, sum(blocks)))}", *rounds]
    if plan.virtual_pipeline_size > 1:
        return [f"--num-virtual-stages-per-pipeline-rank {plan.virtual_pipeline_size}", *rounds]
    return []


def interleaved_group(plan: ParallelPlan) -> int | None:
    """Return the micro-batches that go through the chunks together, None where Megatron-Core's default of pp does.

    Its rounds are equal or end with one of pp micro-batches at least (core/pipeline_parallel/schedules.py).
    """
    if plan.virtual_pipeline_size == 1 or plan.num_microbatches % plan.pp == 0:
        return None
    return next((size for size in range(plan.pp, plan.num_microbatches + 1) if plan.num_microbatches % size == 0), None)


def _sharding(plan: ParallelPlan, stack: StackSettings) -> list[str]:
    overlaps = stack.overlaps_gradients is not False
    overlap = ["--overlap-grad-reduce"] * (overlaps and plan.dp * plan.cp > 1)
    gathers = ["--overlap-param-gather"] * overlaps
    if plan.zero_stage == 0:
        return overlap
    replicas, _ = shard_degrees(plan)
    if replicas > 1:
        overlap.append(f"--num-distributed-optimizer-instances {replicas}")
    if plan.zero_stage == 1:
        return ["--use-distributed-optimizer", *overlap, *gathers]
    return [
        "--use-megatron-fsdp",
        "--use-distributed-optimizer",
        f"--data-parallel-sharding-strategy {_SHARDING[plan.zero_stage]}",
        "--ckpt-format fsdp_dtensor",
        *overlap,
        *gathers,
    ]


def recomputed_modules(plan: ParallelPlan) -> list[str]:
    """Return what recompute of operations runs again.

    Megatron-Core refuses moe_act without grouped products of experts (core/transformer/transformer_config.py).
    """
    return ["layernorm", "moe_act"] if plan.ep > 1 else ["layernorm"]


def _recompute(plan: ParallelPlan) -> list[str]:
    if plan.recompute == "selective":
        return ["--recompute-granularity selective"]
    if plan.recompute == "selective_ops":
        grouped = ["--moe-grouped-gemm"] if plan.ep > 1 else []
        modules = " ".join(recomputed_modules(plan))
        return ["--recompute-granularity selective", f"--recompute-modules {modules}", *grouped]
    if plan.recompute == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return []
