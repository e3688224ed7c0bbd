"""torchtitan: the TOML of releases up to v0.2.2 (config/job_config.py); later ones are configured in Python."""

from __future__ import annotations

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
from paraplan.interop.quoting import comment, quoted
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.stages import even_split, stage_bounds

SCHEDULES: dict[str, str] = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
DTYPES: dict[str, str] = {"bf16": "bfloat16", "fp32": "float32"}


def to_torchtitan(subject: Subject) -> Exported:
    """Return the job configuration: [training], [parallelism], [activation_checkpoint], [optimizer], [compile]."""
    gaps = torchtitan_gaps(subject)
    notes = [
        "[model] name, flavor and hf_assets_path, the data set, the number of steps and the learning rate",
        "torchtitan reads TOML up to v0.2.2; --to torchtitan-python is for later releases",
    ]
    notes += shared_notes(subject, {"compiled", "seq_length", "optimizer"})
    sections = {
        "training": _training(subject),
        "parallelism": _parallelism(subject),
        "activation_checkpoint": _checkpoint(subject.plan),
    }
    if subject.training is not None and subject.training.optimizer == "adamw":
        sections["optimizer"] = {"name": "AdamW"}
    if subject.training is not None and subject.training.compiled:
        sections["compile"] = {"enable": True, "components": ["model"]}
    body = "".join(
        f"\n[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )
    return Exported(
        target="torchtitan",
        text=comment(remarks(subject, gaps, notes)) + body,
        gaps=tuple(gaps),
        notes=tuple(notes),
    )


def torchtitan_gaps(subject: Subject) -> list[Gap]:
    """Return what its configuration has no words for."""
    plan = subject.plan
    gaps = field_gap(
        plan, "zero_stage", (0, 2, 3), "torchtitan shards with FSDP2: gradients too (2), parameters too (3)"
    )
    if plan.zero_stage == 0 and plan.dp > 1 and plan.world_size > plan.dp:
        gaps.append(Gap(part=f"DDP beside {_others(plan)}", reason="torchtitan has DDP alone, or FSDP with other axes"))
    if plan.tp > 1:
        gaps += field_gap(plan, "sequence_parallel", (True,), "torchtitan's tensor parallelism always splits norms")
    if plan.zero_stage == 0:
        gaps += field_gap(plan, "ep", (1,), "torchtitan lays experts out over the ranks of FSDP, ZeRO stages 2 and 3")
    if plan.ep > 1 and plan.ep % plan.cp:
        reason = f"up to v0.2.2 torchtitan spreads experts over all of cp={plan.cp} first"
        gaps.append(Gap(part=f"ep={plan.ep}", reason=reason))
    gaps += shared_gaps(subject)
    if plan.zero_stage == 0 and plan.tp * plan.pp > 1:
        reason = "up to v0.2.2 torchtitan has mixed precision beside tp and pp under FSDP alone"
        gaps += training_gap(subject.training, "precision", ("fp32",), reason)
    gaps += training_gap(subject.training, "optimizer", ("adamw",), "torchtitan has Adam and AdamW")
    return gaps + order_gap(plan, "torchtitan", MEGATRON_RANK_ORDER)


def shared_gaps(subject: Subject) -> list[Gap]:
    """Return what no version of torchtitan can do of a plan."""
    plan, model = subject.plan, subject.file.model
    gaps = field_gap(
        plan, "pipeline_schedule", (None, *SCHEDULES), "torch's zero-bubble schedules need two or more stages a rank"
    )
    if plan.pp > 1 and plan.stage_blocks is None and (model is None or model.num_blocks is None):
        gaps.append(Gap(part="stages", reason="the number of blocks is not in the plan file, so they cannot be named"))
    if plan.stage_blocks is not None and 0 in plan.stage_blocks[1:-1]:
        gaps.append(Gap(part=f"stage_blocks={plan.stage_blocks}", reason="torchtitan's stages hold a module each"))
    gaps += hybrid_gap(plan, "torchtitan")
    if plan.zero_stage == 0:
        gaps += field_gap(plan, "cp", (1,), "torchtitan shards parameters over context-parallel ranks: ZeRO 2 or 3")
    gaps += field_gap(
        plan,
        "recompute",
        ("none", "selective_ops", "full"),
        "torchtitan's selective recompute chooses other operations",
    )
    gaps += field_gap(plan, "offload", ("none", "parameters"), "torchtitan offloads all of FSDP's state or nothing")
    if plan.offload == "parameters" and plan.zero_stage < 2:
        gaps += field_gap(plan, "offload", ("none",), "torchtitan offloads under FSDP, ZeRO stages 2 and 3")
    return gaps + training_gap(subject.training, "precision", tuple(DTYPES), "torchtitan trains in bfloat16 or float32")


def _others(plan: ParallelPlan) -> str:
    return " and ".join(f"{axis}={getattr(plan, axis)}" for axis in ("tp", "pp", "cp") if getattr(plan, axis) > 1)


def _training(subject: Subject) -> dict[str, object]:
    plan, training = subject.plan, subject.training
    micro_batches = plan.num_microbatches if plan.pp > 1 else 1
    section: dict[str, object] = {
        "local_batch_size": plan.micro_batch_size * micro_batches,
        "global_batch_size": plan.global_batch_size,
        "enable_cpu_offload": plan.offload == "parameters",
    }
    if training is not None:
        section |= {"seq_len": training.seq_length, "dtype": "float32"}
        section["mixed_precision_param"] = DTYPES.get(training.precision, "bfloat16")
    return section


def _parallelism(subject: Subject) -> dict[str, object]:
    plan = subject.plan
    # ZeRO-1, and DDP beside other axes, have no words of their own: FSDP without resharding comes nearest.
    is_ddp = plan.zero_stage == 0 and plan.world_size == plan.dp
    replicas, shards = (plan.dp, 1) if is_ddp else shard_degrees(plan)
    section: dict[str, object] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if plan.zero_stage == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
    }
    ranks = expert_ranks(subject)
    if ranks > 1 and plan.zero_stage:
        section |= {"expert_parallel_degree": ranks, "expert_tensor_parallel_degree": 1}
    if plan.pp > 1:
        section["pipeline_parallel_microbatch_size"] = plan.micro_batch_size
        schedule = SCHEDULES.get(plan.pipeline_schedule or "")
        if schedule is not None:
            section["pipeline_parallel_schedule"] = schedule
        parts = model_parts(subject, head="output")
        if parts is not None:
            section["module_fqns_per_model_part"] = parts
    return section


def model_parts(subject: Subject, *, head: str) -> list[list[str]] | None:
    """Return the modules of each stage, by torchtitan's names of them; None where the number of blocks is unknown.

    `head` is the name of the output projection.
    """
    plan, model = subject.plan, subject.file.model
    num_blocks = model.num_blocks if model is not None else None
    blocks = plan.stage_blocks or (even_split(num_blocks, plan.num_stages) if num_blocks is not None else None)
    if blocks is None:
        return None
    parts = [[f"layers.{block}" for block in range(start, end)] for start, end in stage_bounds(blocks)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _checkpoint(plan: ParallelPlan) -> dict[str, object]:
    if plan.recompute in ("selective", "selective_ops"):
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": plan.recompute}


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return "[\n" + "".join(f"  {_toml(item)},\n" for item in value) + "]"
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
