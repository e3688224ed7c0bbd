"""DeepSpeed's JSON, read back. Keys and rules as in DeepSpeed 0.19 (runtime/config.py)."""

from __future__ import annotations

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, data_parallel_ranks, make_plan, optimizer_of
from paraplan.interop.sources.documents import parse_json
from paraplan.interop.sources.experts import autoep
from paraplan.plan.training import OptimizerName, TrainingPrecision

_HINT = "DeepSpeed's configuration is a JSON object"
_ON_HOST = "cpu_checkpointing"
_HOST_NOTE = (
    "activation_checkpointing.cpu_checkpointing: full recompute with what it keeps on the host, where the script "
    "checkpoints by deepspeed.checkpointing; torch's own checkpoints, as transformers', do not read it"
)
_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def read_deepspeed(text: str, *, source: str, given: Given) -> Setup:
    """Return the training that a DeepSpeed configuration describes.

    The number of GPUs is not in it: it is the given one, or follows from the three batch sizes. Raises `PlanError`
    naming the file and the key for what is broken or contradicts itself.
    """
    data = parse_json(text, source, _HINT)
    if not isinstance(data, dict):
        raise PlanError(f"{source} holds no JSON object", hint=_HINT)
    fields = Fields(data, source=source)
    if fields.section("activation_checkpointing").flag(_ON_HOST):
        setup = deepspeed_setup(fields, given=given.replace(recompute=given.recompute or "full"))
        is_used = setup.plan.recompute == "full"
        return setup.replace(offloads_activations=is_used or None, notes=(*setup.notes, _HOST_NOTE))
    return deepspeed_setup(fields, given=given)


def deepspeed_setup(fields: Fields, *, given: Given) -> Setup:
    """Return the training of a configuration's keys, as `read_deepspeed` does."""
    zero = fields.section("zero_optimization")
    stage, tp = zero.choice("stage", (0, 1, 2, 3), 0), _tensor_parallel(fields)
    cp = fields.count("sequence_parallel_size") or 1
    given, notes = _micro_batch_of_auto(fields, given)
    dp, micro, steps = _batch(fields, given, tp, cp)
    ep, expert_notes = autoep(fields, dp=dp, tp=tp, zero_stage=stage)
    optimizer, optimizer_notes = _optimizer(fields.section("optimizer"))
    notes += expert_notes + optimizer_notes
    shards = _shards(zero, dp, notes)
    offload = _offload(zero, stage, notes)
    is_sharded = dp * cp > 1 or (stage == 3 and offload == "parameters" and tp == 1)
    plan = make_plan(
        fields.source,
        dp=dp,
        tp=tp,
        ep=ep,
        cp=cp,
        zero_stage=stage if is_sharded else 0,
        zero_shards=shards if stage == 3 else None,
        micro_batch_size=micro,
        num_microbatches=steps,
        recompute=given.recompute or "none",
        offload=offload,
    )
    if given.recompute is None:
        notes.append("recompute is switched on by the script: none assumed, --recompute full says otherwise")
    pipeline = fields.taken("pipeline")
    if any(key != "pipeline_parallel_size" or size not in (1, "auto") for key, size in pipeline.items()):
        notes.append("pipeline: its stages are made by the script and are not priced")
    if stage and not is_sharded:
        notes.append(f"ZeRO-{stage} has nothing to shard over with one data-parallel rank: priced as stage 0")
    precision = _precision(fields)
    return Setup(
        plan=plan,
        tool="DeepSpeed",
        target="deepspeed",
        framework="deepspeed zero",
        precision=precision,
        optimizer=optimizer,
        notes=(*notes, *key_table("deepspeed").notes(fields)),
    )


def _optimizer(section: Fields) -> tuple[OptimizerName | None, list[str]]:
    momentum = section.section("params").value("momentum")
    return optimizer_of(section.text("type"), has_momentum=momentum not in (None, 0))


def _micro_batch_of_auto(fields: Fields, given: Given) -> tuple[Given, list[str]]:
    """Return what is given, with the smallest micro-batch where the Trainer or accelerate fills in sizes, and a note.

    That is what the many configurations say in which every size is "auto".
    """
    if fields.count(_MICRO) is not None or given.micro_batch_size is not None:
        return given, []
    total, steps = given.global_batch_size or fields.count(_TOTAL), fields.count(_STEPS)
    is_open = total is not None and steps is None and fields.value(_MICRO) == "auto"
    if not is_open and (total is not None or "auto" not in (fields.value(_TOTAL), fields.value(_MICRO))):
        return given, []
    micro = given.least_micro_batch
    notes = [f"{_MICRO} is auto, which the script fills in: {micro} assumed, --micro-batch says otherwise"]
    if steps is None and total is None:
        notes.append(f"{_STEPS} is auto: 1 assumed, --global-batch says otherwise")
    return given.replace(micro_batch_size=micro), notes


def _shards(zero: Fields, dp: int, notes: list[str]) -> int | None:
    """Return the ranks of a group of MiCS, which DeepSpeed before 0.19 has; add notes of what is not priced."""
    partition = zero.count("zero_hpz_partition_size") or 1
    if partition > 1:
        notes.append(f"zero_hpz_partition_size={partition}: the second copy of parameters (hpZ) is not priced")
    size = zero.value("mics_shard_size")
    if size in (None, -1):
        return None
    shards = zero.count("mics_shard_size") or 1
    if shards == 1 or dp % shards:
        raise zero.error("mics_shard_size", f"more than 1, and a divisor of the {dp} data-parallel ranks")
    notes.append("mics_shard_size: DeepSpeed 0.19 refuses it, MiCS having been removed")
    return None if shards == dp else shards


def _tensor_parallel(fields: Fields) -> int:
    section = fields.section("tensor_parallel")
    size = section.choice("autotp_size", tuple(range(4097)), 0) or section.section("tp").count("tp_size")
    return size or 1


def _batch(fields: Fields, given: Given, tp: int, cp: int) -> tuple[int, int, int]:
    """Return data-parallel ranks, micro-batch and steps of accumulation; a missing one follows from the others."""
    total = given.global_batch_size or fields.count(_TOTAL)
    micro = given.micro_batch_size or fields.count(_MICRO)
    steps = fields.count(_STEPS) if given.global_batch_size is None else None
    source = fields.source
    if total is None and micro is None:
        raise PlanError(
            f"{source}: neither {_TOTAL} nor {_MICRO} has a number",
            hint="DeepSpeed needs one of them; say it with --micro-batch and --global-batch",
        )
    if given.num_gpus is not None:
        dp = data_parallel_ranks(source, given.num_gpus, tp=tp, cp=cp)
    elif total is not None and micro is not None and steps is not None:
        ranks = _quotient(fields, total, micro * steps, f"{_MICRO}={micro} x {_STEPS}={steps}")
        dp = data_parallel_ranks(source, ranks * cp, tp=tp, cp=cp)
    else:
        raise PlanError(f"{source} does not say how many GPUs there are", hint="give --profile NAME and --nodes N")
    if micro is None:
        assert total is not None
        micro = _quotient(fields, total, dp * (steps or 1), f"{dp} data-parallel ranks x {_STEPS}={steps or 1}")
        return dp, micro, steps or 1
    if total is None:
        return dp, micro, steps or 1
    if given.global_batch_size is None and steps is not None and total == micro * steps * dp * tp:
        return dp, micro, steps  # without an mpu DeepSpeed multiplies by all ranks, those of tp too
    implied = _quotient(fields, total, dp * micro, f"{_MICRO}={micro} x {dp} data-parallel ranks")
    if steps is not None and implied != steps:
        product = micro * steps * dp
        raise PlanError(
            f"{source}: {_TOTAL}={total} is not {_MICRO}={micro} x {_STEPS}={steps} x {dp} data-parallel ranks "
            f"= {product}",
            hint=f"DeepSpeed refuses it too: use {_TOTAL}={product}, or other machines (--nodes, --gpus-per-node)",
        )
    return dp, micro, implied


def _quotient(fields: Fields, total: int, divisor: int, words: str) -> int:
    share, rest = divmod(total, divisor)
    if rest or not share:
        raise PlanError(
            f"{fields.source}: {_TOTAL}={total} is not a multiple of {words}",
            hint="fix the batch sizes, or say what machines they are for: --profile NAME --nodes N",
        )
    return share


def _offload(zero: Fields, stage: int, notes: list[str]) -> str:
    devices = {key: zero.section(key).text("device") or "none" for key in ("offload_optimizer", "offload_param")}
    if zero.flag("cpu_offload"):
        devices["offload_optimizer"] = "cpu"
    for key, device in devices.items():
        if device not in ("none", "cpu", "nvme"):
            raise zero.section(key).error("device", "none, cpu or nvme")
    notes += [f"{key}: priced as the host's memory, not NVMe" for key, device in devices.items() if device == "nvme"]
    if devices["offload_param"] != "none" and stage == 3:
        return "parameters"
    is_on = devices["offload_optimizer"] != "none"
    return "optimizer" if is_on and zero.section("offload_optimizer").mostly_offloads("ratio", notes) else "none"


def _precision(fields: Fields) -> TrainingPrecision | None:
    sections = {name: fields.section(name) for name in ("bf16", "bfloat16", "fp16", "torch_autocast")}
    if sections["torch_autocast"].flag("enabled"):
        return "fp16" if sections["torch_autocast"].values.get("dtype") == "float16" else "bf16"
    if sections["bf16"].flag("enabled") or sections["bfloat16"].flag("enabled"):
        return "bf16"
    if sections["fp16"].flag("enabled"):
        return "fp16"
    is_open = any(section.values.get("enabled") == "auto" for section in sections.values())
    return None if is_open else "fp32"
