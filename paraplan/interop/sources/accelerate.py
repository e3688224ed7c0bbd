"""Accelerate's configuration (YAML or JSON), read back. Keys as in accelerate 1.15 (commands/config/config_args.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, data_parallel_ranks, make_plan, steps_of
from paraplan.interop.sources.deepspeed import deepspeed_setup
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.launches import launch_of, launched_by_accelerate
from paraplan.interop.sources.narrow_products import accelerates_fp8
from paraplan.plan.training import TrainingPrecision

_DDP = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA")
# FSDP1's strategies, by name and by the number that old configurations have; FSDP2 says true or false.
FSDP_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_BATCH_NOTE = "the micro-batch is in the script: {} assumed, --micro-batch says otherwise"


def read_accelerate(text: str, *, source: str, given: Given, read_file: Callable[[str], str]) -> Setup:
    """Return the training that an accelerate configuration describes, or a script whose command names one.

    `read_file` reads that, and the DeepSpeed configuration that it may name. Raises `PlanError` naming the file and the
    key, and `UsageError` where YAML cannot be read here.
    """
    launch = launch_of(text, source)
    if launch is None:
        fields = Fields(load_document(text, source, hint="write one with accelerate config"), source=source)
        return accelerate_setup(fields, given=given, read_file=read_file)
    values, notes = launched_by_accelerate(launch, source, read_file)
    setup = accelerate_setup(Fields(values, source=source), given=given, read_file=read_file)
    return setup.replace(notes=(*setup.notes, *notes))


def accelerate_setup(fields: Fields, *, given: Given, read_file: Callable[[str], str]) -> Setup:
    """Return the training of a configuration's keys, as `read_accelerate` does."""
    if (fields.text("compute_environment") or "LOCAL_MACHINE") == "AMAZON_SAGEMAKER":
        raise fields.error("compute_environment", "LOCAL_MACHINE")
    kind = "NO" if fields.value("distributed_type") is False else fields.text("distributed_type")  # YAML's NO
    if kind is None:
        raise fields.error("distributed_type", "NO, MULTI_GPU, FSDP, DEEPSPEED or MEGATRON_LM")
    # Of distributed_type NO accelerate starts one process, whatever num_processes says.
    is_told = given.num_gpus is not None
    num_gpus = 1 if kind == "NO" else fields.count("num_processes") or given.num_gpus or 1
    given = given.replace(num_gpus=num_gpus)
    fields.value("num_machines")
    if kind == "FSDP":
        setup = _fsdp(fields, given)
    elif kind == "DEEPSPEED":
        setup = _deepspeed(fields, given, read_file)
    elif kind == "MEGATRON_LM":
        setup = _megatron(fields, given)
    elif kind in _DDP:
        setup = _ddp(fields, given)
    else:
        raise fields.error("distributed_type", "NO, MULTI_GPU, FSDP, DEEPSPEED or MEGATRON_LM")
    backend = fields.section("dynamo_config").text("dynamo_backend") or "NO"
    if backend.upper() not in ("NO", "EAGER"):
        setup = setup.replace(compiled=True)
    cpu = ["use_cpu: trains on the CPU, priced as on the GPUs"] if fields.flag("use_cpu") else []
    says_gpus = kind == "NO" or "num_processes" in fields
    assumed = (
        [] if says_gpus or is_told else ["num_processes is not named: 1 assumed, --profile and --nodes say otherwise"]
    )
    notes = (*assumed, *setup.notes, *cpu, *key_table("accelerate").notes(fields))
    return setup.replace(says_gpus=says_gpus, notes=notes)


def _degrees(fields: Fields, *axes: str) -> dict[str, int]:
    """Return the sizes of `parallelism_config` along some axes. Raises `PlanError` for more of them than processes."""
    sizes, num_gpus = fields.section("parallelism_config"), fields.count("num_processes")
    found = {axis: sizes.count(f"parallelism_config_{axis}_size") for axis in (*axes, "dp_replicate", "dp_shard")}
    product = prod(size or 1 for size in found.values())
    if num_gpus is not None and (product > num_gpus or (found["dp_shard"] and product != num_gpus)):
        named = " x ".join(f"{axis}_size {size}" for axis, size in found.items() if size)
        raise PlanError(
            f"{fields.source}: parallelism_config has {named} = {product} ranks, and there are {num_gpus} processes",
            hint=f"accelerate refuses it too: make them {num_gpus}, or num_processes {product}",
        )
    return {axis: found[axis] or 1 for axis in axes}


def _ddp(fields: Fields, given: Given) -> Setup:
    """Return a training under DDP, whose models may have been loaded with tensor parallelism."""
    assert given.num_gpus is not None
    tp = _degrees(fields, "tp")["tp"]
    dp = data_parallel_ranks(fields.source, given.num_gpus, tp=tp)
    notes = []
    if dp > 1 and tp > 1:
        notes.append(
            f"parallelism_config_tp_size {tp} beside replicas that are not sharded: accelerate 1.15 refuses it, priced "
            f"as dp{dp} x tp{tp}"
        )
    return _setup(fields, given, {"dp": dp, "tp": tp}, framework="hf", tool="accelerate, DDP", notes=notes)


def _fsdp(fields: Fields, given: Given) -> Setup:
    fsdp, degrees = fields.section("fsdp_config"), _degrees(fields, "tp", "cp", "sp")
    assert given.num_gpus is not None
    notes: list[str] = []
    if degrees.pop("sp") > 1:
        notes.append("parallelism_config_sp_size: accelerate has it under DeepSpeed alone, not priced")
    dp = data_parallel_ranks(fields.source, given.num_gpus, **degrees)
    version = fsdp.count("fsdp_version")
    if version not in (None, 1, 2):
        raise fsdp.error("fsdp_version", "1 or 2")
    stage = _stage(fsdp)
    values = degrees | {"dp": dp, "zero_stage": stage if dp * degrees["cp"] > 1 else 0}
    plan: dict[str, object] = values | {"offload": "parameters" if fsdp.flag("fsdp_offload_params") else "none"}
    if values["zero_stage"]:
        plan["zero_shards"] = _shards(fields, dp, degrees["cp"], notes)
    fsdp.value("fsdp_auto_wrap_policy")
    if fsdp.flag("fsdp_activation_checkpointing"):
        plan["recompute"] = "full"
    return _setup(fields, given, plan, framework="fsdp", tool="accelerate, FSDP", notes=notes)


def _shards(fields: Fields, dp: int, cp: int, notes: list[str]) -> int | None:
    """Return the ranks of a sharded group where there are replicas of it, None for one group; add notes.

    FSDP1's hybrid strategies shard inside a machine.
    """
    sizes, fsdp = fields.section("parallelism_config"), fields.section("fsdp_config")
    key = "parallelism_config_dp_replicate_size"
    replicas = sizes.count(key) or 1
    strategy = str(fsdp.value("fsdp_sharding_strategy")).upper()
    if "HYBRID" in _NUMBERED.get(strategy, strategy) and replicas == 1:
        replicas = fields.count("num_machines") or 1
    if dp % replicas:
        raise sizes.error(key, f"a divisor of the {dp} data-parallel ranks")
    if replicas == 1 or dp == replicas:
        return None
    if cp > 1:
        notes.append(f"{replicas} replicas of groups sharded over cp too: priced as sharded over all of them")
        return None
    return dp // replicas


def _stage(fsdp: Fields) -> int:
    """Return the ZeRO stage of an FSDP section, in the words of either version."""
    for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy"):
        value = fsdp.value(key)
        if value is None or str(value).upper() == "NONE":
            continue
        if isinstance(value, bool):
            return 3 if value else 2
        name = str(value).upper()
        name = _NUMBERED.get(name, name)
        if name in ("TRUE", "FALSE"):
            return 3 if name == "TRUE" else 2
        if name not in FSDP_STRATEGIES:
            raise fsdp.error(key, f"true, false, {', '.join(FSDP_STRATEGIES)}")
        return FSDP_STRATEGIES[name]
    return 3


def _deepspeed(fields: Fields, given: Given, read_file: Callable[[str], str]) -> Setup:
    """Return a training of DeepSpeed; sequences over heads (Ulysses) are cp, which shards parameters too."""
    section = fields.section("deepspeed_config")
    path = section.text("deepspeed_config_file")
    assert given.num_gpus is not None
    cp = _degrees(fields, "sp")["sp"]
    if given.num_gpus % cp:
        raise fields.section("parallelism_config").error(
            "parallelism_config_sp_size", f"a divisor of the {given.num_gpus} processes"
        )
    if path is not None:
        data = load_document(read_file(path), path, hint="DeepSpeed's configuration is a JSON object")
        setup = deepspeed_setup(Fields({**data, "sequence_parallel_size": cp}, source=path), given=given)
        is_said = not {"bf16", "fp16"}.isdisjoint(data)  # else accelerate writes its own into it
        precision = setup.precision if is_said and setup.precision is not None else _precision(fields)
        return setup.replace(tool="accelerate, DeepSpeed", target="accelerate", precision=precision)
    stage = section.choice("zero_stage", (0, 1, 2, 3), 2)
    devices = [section.text(f"offload_{what}_device") or "none" for what in ("param", "optimizer")]
    offload = "parameters" if devices[0] != "none" and stage == 3 else "optimizer" if devices[1] != "none" else "none"
    plan: dict[str, object] = {
        "dp": given.num_gpus // cp,
        "cp": cp,
        "zero_stage": stage if given.num_gpus > 1 or offload == "parameters" else 0,
        "num_microbatches": section.count("gradient_accumulation_steps") or 1,
        "offload": offload,
    }
    return _setup(fields, given, plan, framework="deepspeed zero", tool="accelerate, DeepSpeed")


def _megatron(fields: Fields, given: Given) -> Setup:
    section = fields.section("megatron_lm_config")
    tp, pp, cp, ep = (
        section.count(f"megatron_lm_{name}") or 1
        for name in ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size")
    )
    recompute = "selective" if section.flag("megatron_lm_recompute_activations") else "none"
    granularity = section.text("megatron_lm_recompute_granularity") or recompute
    if granularity not in ("none", "selective", "full"):
        raise section.error("megatron_lm_recompute_granularity", "selective or full")
    assert given.num_gpus is not None
    dp = data_parallel_ranks(fields.source, given.num_gpus, tp=tp, pp=pp, cp=cp)
    shards = bool(section.flag("megatron_lm_use_distributed_optimizer")) and dp * cp > 1
    plan: dict[str, object] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "zero_stage": 1 if shards else 0,
        "pipeline_schedule": "1f1b" if pp > 1 else None,
        "sequence_parallel": bool(section.flag("megatron_lm_sequence_parallelism")) and tp > 1,
        "num_microbatches": section.count("megatron_lm_num_micro_batches") or 1,
        "ep": ep,
        "recompute": granularity,
        "offload": "optimizer" if section.flag("megatron_lm_optimizer_cpu_offload") else "none",
    }
    return _setup(fields, given, plan, framework="megatron-core", tool="accelerate, Megatron-LM")


def _setup(
    fields: Fields,
    given: Given,
    values: Mapping[str, object],
    *,
    framework: str,
    tool: str,
    notes: list[str] | None = None,
) -> Setup:
    """Return the setup of a plan's `values`, with what scripts decide filled in from the user's words."""
    notes = list(notes or [])
    plan = dict(values)
    if given.recompute is not None:
        plan["recompute"] = given.recompute
    micro = given.micro_batch_size or given.least_micro_batch
    if given.micro_batch_size is None:
        notes.append(_BATCH_NOTE.format(micro))
    plan["micro_batch_size"] = micro
    dp = plan["dp"]
    assert isinstance(dp, int)
    steps = steps_of(fields.source, given.global_batch_size, micro=micro, dp=dp)
    if steps is not None:
        plan["num_microbatches"] = steps
    elif "num_microbatches" not in plan:
        notes.append("gradient accumulation is in the script: none assumed, --global-batch says otherwise")
    setup = Setup(
        plan=make_plan(fields.source, **plan),
        tool=tool,
        target="accelerate",
        framework=framework,
        precision=_precision(fields),
        notes=tuple(notes),
    )
    return accelerates_fp8(setup, fields) if fields.value("mixed_precision") == "fp8" else setup


def _precision(fields: Fields) -> TrainingPrecision:
    words = fields.value("mixed_precision")
    if words in (None, "no", "No", "NO", False):
        return "fp32"
    if words == "fp16":
        return "fp16"
    if words in ("bf16", "fp8"):
        return "bf16"
    raise fields.error("mixed_precision", "no, fp16, bf16 or fp8")
