"""What TRL, LLaMA-Factory and axolotl pass on to transformers' Trainer: batches, sharding, recompute, quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paraplan.interop.setup import Fields, Given, Setup, make_plan, optimizer_of, steps_of
from paraplan.interop.sources.accelerate import FSDP_STRATEGIES, accelerate_setup
from paraplan.interop.sources.deepspeed import deepspeed_setup, read_deepspeed
from paraplan.interop.sources.documents import load_document
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import AttentionKind, OptimizerName

ReadFile = Callable[[str], str]

_BUNDLED: dict[str, dict[str, object]] = {
    "single_gpu": {"distributed_type": "NO"},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    **{
        f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
        for stage in (1, 2, 3)
    },
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
}
"""The configurations of accelerate that come with TRL (trl/accelerate_configs)."""
_BUNDLED_PROCESSES = 8
"""What all of them have for `num_processes`."""
_LATER = ("the micro-batch is in the script", "gradient accumulation is in the script", "recompute is switched on")


class Batches(NamedTuple):
    """Sizes of a step as a tool's keys say them."""

    micro_batch: int
    steps: int
    recompute: bool


def sharded_setup(
    fields: Fields, given: Given, batches: Batches, *, tool: str, target: str, read_file: ReadFile
) -> Setup:
    """Return the plan of a tool's `accelerate_config`, `deepspeed` or `fsdp` key, with the batches of its own keys.

    What is `given` comes first. Without any of those keys it is DDP over the GPUs that are given.
    """
    micro = given.micro_batch_size or batches.micro_batch
    recompute = given.recompute or ("full" if batches.recompute else "none")
    beside = given.replace(micro_batch_size=micro, recompute=recompute, global_batch_size=None)
    found = _by_key(fields, beside, read_file)
    notes = [note for note in found.notes if not note.startswith(_LATER)] if found is not None else []
    num_gpus = fields.count("num_processes")
    says_gpus = num_gpus is not None or "accelerate_config" in fields
    if given.num_gpus is None and not says_gpus:
        notes.append("no GPUs are named: 1 assumed, --profile and --nodes say otherwise")
    dp = found.plan.dp if found is not None else num_gpus or given.num_gpus or 1
    steps = steps_of(fields.source, given.global_batch_size, micro=micro, dp=dp) or batches.steps
    sizes: dict[str, object] = {"micro_batch_size": micro, "num_microbatches": steps, "recompute": recompute}
    if found is None:
        plan = make_plan(fields.source, dp=dp, **sizes)
        name = f"{tool}, DDP"
        return Setup(plan=plan, tool=name, target=target, framework="hf", says_gpus=says_gpus, notes=tuple(notes))
    # FSDP's own key switches recompute on too.
    if found.plan.recompute == "full":
        sizes["recompute"] = "full"
    plan = make_plan(fields.source, **found.plan.model_dump() | sizes)
    kind = found.tool.rpartition(", ")[2]
    return found.replace(plan=plan, tool=f"{tool}, {kind}", target=target, says_gpus=says_gpus, notes=tuple(notes))


def _by_key(fields: Fields, given: Given, read_file: ReadFile) -> Setup | None:
    num_gpus = fields.count("num_processes")
    known = given.replace(num_gpus=num_gpus or given.num_gpus or 1)
    name = fields.text("accelerate_config")
    if name is not None:
        launched = _BUNDLED.get(name)
        if launched is not None:
            known = given.replace(num_gpus=num_gpus or given.num_gpus or _BUNDLED_PROCESSES)
        else:
            launched = dict(load_document(read_file(name), name, hint="write one with accelerate config"))
        # TRL passes its own num_processes to accelerate launch, where it comes before the file's.
        launched = launched | ({} if num_gpus is None else {"num_processes": num_gpus})
        return accelerate_setup(Fields(launched, source=name), given=known, read_file=read_file)
    if "deepspeed" in fields:
        path = fields.values["deepspeed"]
        if isinstance(path, str):
            setup = read_deepspeed(read_file(path), source=path, given=known)
        else:
            setup = deepspeed_setup(fields.section("deepspeed"), given=known)
        return setup.replace(tool="DeepSpeed", precision=None, optimizer=None)
    return _fsdp(fields, known, read_file)


def _fsdp(fields: Fields, given: Given, read_file: ReadFile) -> Setup | None:
    """Return the plan of `fsdp` and `fsdp_config`, whose keys are accelerate's, with or without their prefix."""
    strategy, section = fields.values.get("fsdp"), fields.section("fsdp_config")
    if not strategy and not section.values:
        return None
    config = {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in _named(section.values)}
    words = strategy if isinstance(strategy, list) else str(strategy or "").split()
    for word in map(str, words):
        if word.upper() in FSDP_STRATEGIES:
            config.setdefault("fsdp_sharding_strategy", word)
        if word == "offload":
            config["fsdp_offload_params"] = True
    sizes = {
        f"parallelism_config_{axis}_size": fields.count(key)
        for axis, key in (("tp", "tensor_parallel_size"), ("cp", "context_parallel_size"))
    } | {"parallelism_config_dp_replicate_size": fields.count("dp_replicate_size")}
    values = {
        "distributed_type": "FSDP",
        "num_processes": given.num_gpus,
        "fsdp_config": config,
        "parallelism_config": {key: size for key, size in sizes.items() if size is not None},
    }
    return accelerate_setup(Fields(values, source=fields.source), given=given, read_file=read_file)


def _named(values: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the entries of a section; YAML may have keys that are no text, which no tool knows."""
    return [(key, value) for key, value in values.items() if isinstance(key, str)]


def trainer_optimizer(fields: Fields, key: str) -> tuple[OptimizerName | None, list[str]]:
    """Return the optimizer that the Trainer takes for `key`; its SGD has a momentum where `optim_args` says so."""
    has_momentum = "momentum" in str(fields.values.get("optim_args"))
    return optimizer_of(fields.text(key) or "adamw_torch_fused", has_momentum=has_momentum)


def quantized_weights(fields: Fields) -> WeightFormat | None:
    """Return the format that `load_in_4bit` and `load_in_8bit` ask bitsandbytes for, None without either."""
    if fields.flag("load_in_8bit"):
        return "int8"
    if not fields.flag("load_in_4bit"):
        return None
    is_double = fields.flag("use_bnb_nested_quant") or fields.flag("bnb_4bit_use_double_quant")
    is_fp4 = (fields.text("bnb_4bit_quant_type") or "nf4") == "fp4"
    return four_bits(is_fp4=is_fp4, is_double=bool(is_double))


def four_bits(*, is_fp4: bool, is_double: bool) -> WeightFormat:
    """Return bitsandbytes' 4-bit format of that type."""
    if is_fp4:
        return "fp4:double" if is_double else "fp4"
    return "nf4:double" if is_double else "nf4"


_ATTENTION: dict[str, AttentionKind] = {
    "flash": "flash",
    "fa2": "flash",
    "fa3": "flash",
    "sdpa": "sdpa",
    "eager": "eager",
}


def attention_of(words: str | None) -> AttentionKind | None:
    """Return the attention kernel that `attn_implementation` or LLaMA-Factory's `flash_attn` names."""
    if words is None:
        return None
    found = next((kind for sign, kind in _ATTENTION.items() if sign in words.lower()), None)
    return "eager" if found is None and words == "disabled" else found
