"""Keys of TRL, LLaMA-Factory and axolotl for transformers' Trainer: batches, sharding, recompute, quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paraplan.interop.fields import Fields
from paraplan.interop.setup import Given, Setup, data_parallel_ranks, make_plan, optimizer_of, steps_of
from paraplan.interop.sources.accelerate import FSDP_STRATEGIES, accelerate_setup
from paraplan.interop.sources.deepspeed import deepspeed_setup, read_deepspeed
from paraplan.interop.sources.documents import load_document
from paraplan.model.weight_formats import WeightFormat, is_linear_4bit
from paraplan.plan.training import AttentionKind, OptimizerName, TrainingPrecision

ReadFile = Callable[[str], str]
GALORE_RANK = 128
"""The rank that `galore_adamw` is priced at."""

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
"""`num_processes` of all accelerate files that come with the tools."""
_LATER = (
    "num_processes is not named",
    "the micro-batch is in the script",
    "gradient accumulation is in the script",
    "recompute is switched on",
)


class Batches(NamedTuple):
    """Sizes of a step as a tool's keys say them."""

    micro_batch: int
    """Sequences, those of pairs counted one by one."""
    steps: int
    """Micro-batches of a step."""
    recompute: bool
    """Whether blocks are computed again in the backward pass."""


class Axes(NamedTuple):
    """Degrees of parallelism beside the data, and how the data's ranks are sharded."""

    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Ranks that share a sequence."""
    dp_replicate: int | None = None
    """Replicas of sharded groups; None where the file does not say."""
    dp_shard: int | None = None
    """Ranks of a sharded group; None where the file does not say."""


_NO_AXES = Axes()


def sharded_setup(
    fields: Fields,
    given: Given,
    batches: Batches,
    *,
    tool: str,
    target: str,
    read_file: ReadFile,
    axes: Axes = _NO_AXES,
    deepspeed: object = None,
) -> Setup:
    """Return the plan of a tool's `accelerate_config`, `deepspeed` or `fsdp` key, with the batches of its own keys.

    What is `given` comes first. Without any of those keys it is DDP over the GPUs that are given. `deepspeed` stands
    for that key where a tool has names of its own for configurations.
    """
    micro = given.micro_batch_size or batches.micro_batch
    recompute = given.recompute or ("full" if batches.recompute else "none")
    beside = given.replace(micro_batch_size=micro, global_batch_size=None)
    found = _by_key(fields, beside, read_file, axes, deepspeed)
    notes = [note for note in found.notes if not note.startswith(_LATER)] if found is not None else []
    num_gpus = fields.count("num_processes")
    is_launched = "accelerate_config" in fields
    says_gpus = num_gpus is not None or (is_launched and found is not None and found.says_gpus)
    if given.num_gpus is None and not says_gpus:
        notes.append("no GPUs are named: 1 assumed, --profile and --nodes say otherwise")
    ranks = num_gpus or given.num_gpus or 1
    spread: dict[str, object] = {"cp": axes.cp, "tp": axes.tp}
    if found is None:
        dp = data_parallel_ranks(fields.source, ranks, tp=axes.tp, cp=axes.cp)
    elif axes.cp in (1, found.plan.cp):  # the tool's own keys say no other
        dp, spread = found.plan.dp, {}
    else:  # DeepSpeed counts ranks of cp among its own
        dp, spread = data_parallel_ranks(fields.source, found.plan.dp, cp=axes.cp), {"cp": axes.cp}
    steps = steps_of(fields.source, given.global_batch_size, micro=micro, dp=dp) or batches.steps
    sizes: dict[str, object] = {"micro_batch_size": micro, "num_microbatches": steps, "recompute": recompute}
    if found is None:
        plan = make_plan(fields.source, dp=dp, **spread, **sizes)
        name = f"{tool}, DDP"
        return Setup(plan=plan, tool=name, target=target, framework="hf", says_gpus=says_gpus, notes=tuple(notes))
    # FSDP's own key switches recompute on too.
    if found.plan.recompute != "none":
        sizes["recompute"] = found.plan.recompute
    plan = make_plan(fields.source, **found.plan.model_dump() | {"dp": dp} | spread | sizes)
    kind = found.tool.rpartition(", ")[2]
    return found.replace(plan=plan, tool=f"{tool}, {kind}", target=target, says_gpus=says_gpus, notes=tuple(notes))


def _by_key(fields: Fields, given: Given, read_file: ReadFile, axes: Axes, deepspeed: object) -> Setup | None:
    num_gpus = fields.count("num_processes")
    known = given.replace(num_gpus=num_gpus or given.num_gpus or 1)
    config = fields.value("accelerate_config")
    if isinstance(config, Mapping):  # what a command line says in place of a file
        values = {**config, "num_processes": known.num_gpus}
        return accelerate_setup(Fields(values, source=fields.source), given=known, read_file=read_file)
    name = fields.text("accelerate_config")
    if name is not None:
        launched = _BUNDLED.get(name)
        if launched is not None:
            launched = launched | {"num_processes": given.num_gpus or _BUNDLED_PROCESSES}
        else:
            launched = dict(load_document(read_file(name), name, hint="write one with accelerate config"))
        # TRL passes its own num_processes to accelerate launch, where it comes before the file's.
        launched = launched | ({} if num_gpus is None else {"num_processes": num_gpus})
        return accelerate_setup(Fields(launched, source=name), given=known, read_file=read_file)
    path = deepspeed if deepspeed is not None else fields.value("deepspeed")
    if path is True:  # a script that makes its own file, as DeepSpeed-Chat's do
        zero: dict[str, object] = {"stage": fields.choice("zero_stage", (0, 1, 2, 3), 0)}
        if fields.is_on("offload"):
            zero["offload_optimizer"] = {"device": "cpu"}
        path = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
    if path is not None:
        if isinstance(path, str):
            setup = read_deepspeed(read_file(path), source=path, given=known)
        elif isinstance(path, Mapping):
            setup = deepspeed_setup(Fields(path, source=fields.source, path="deepspeed."), given=known)
        else:
            raise fields.error("deepspeed", "a file, or an object with keys")
        return setup.replace(tool="DeepSpeed", precision=None, optimizer=None)
    return _fsdp(fields, known, read_file, axes)


_ACCELERATES = {"cpu_offload": "offload_params"}
"""Keys of `fsdp_config` that the Trainer calls otherwise than accelerate does."""


def _fsdp(fields: Fields, given: Given, read_file: ReadFile, axes: Axes) -> Setup | None:
    """Return the plan of `fsdp` and `fsdp_config`, whose keys are accelerate's, with or without their prefix."""
    strategy, named = fields.value("fsdp"), fields.value("fsdp_config")
    section: Mapping[str, object]
    if isinstance(named, str) and named.endswith((".json", ".yaml", ".yml")):
        section = load_document(read_file(named), named, hint="it holds what fsdp_config would")
    else:
        section = fields.taken("fsdp_config")
    if not strategy and not section:
        return None
    config = {f"fsdp_{_ACCELERATES.get(name := key.removeprefix('fsdp_'), name)}": section[key] for key in section}
    version = fields.value("fsdp_version")  # axolotl has it beside the section
    config = config if version is None else {"fsdp_version": version, **config}
    words = strategy if isinstance(strategy, list) else str(strategy or "").split()
    for word in map(str, words):
        if word.upper() in FSDP_STRATEGIES:
            config.setdefault("fsdp_sharding_strategy", word)
        if word == "offload":
            config["fsdp_offload_params"] = True
    sizes = {f"parallelism_config_{axis}_size": size for axis, size in axes._asdict().items() if size is not None}
    values = {
        "distributed_type": "FSDP",
        "num_processes": given.num_gpus,
        "fsdp_config": config,
        "parallelism_config": sizes,
    }
    return accelerate_setup(Fields(values, source=fields.source), given=given, read_file=read_file)


def trainer_optimizer(fields: Fields, key: str) -> tuple[OptimizerName | None, list[str]]:
    """Return the optimizer that the Trainer takes for `key`; its SGD has a momentum where `optim_args` says so."""
    has_momentum = "momentum" in str(fields.value("optim_args"))
    return optimizer_of(fields.text(key) or "adamw_torch_fused", has_momentum=has_momentum)


_CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


def recomputes(fields: Fields) -> bool | None:
    """Return whether the Trainer computes blocks again, None where it is not said; the key was renamed in 2026."""
    own = fields.flag("activation_checkpointing")
    older = fields.flag("gradient_checkpointing")
    return older if own is None else own


def offloads_checkpoints(fields: Fields) -> bool | None:
    """Return True where the Trainer keeps inputs of blocks that are computed again on the host, else None.

    transformers has that since a release after 5.16.1.
    """
    given = (key for key in _CHECKPOINTING if isinstance(fields.values.get(key), Mapping))
    return any(fields.section(key).flag("offload") for key in given) or None


def tf32_note(fields: Fields, precision: TrainingPrecision | None) -> list[str]:
    """Return a note where matmuls of fp32 weights compute in TF32, which changes nothing beside 16-bit ones."""
    return ["tf32: matmuls are priced in fp32"] if fields.is_on("tf32") and precision == "fp32" else []


def quantized_weights(fields: Fields) -> WeightFormat | None:
    """Return the format that `load_in_4bit` and `load_in_8bit` ask bitsandbytes for, None without either."""
    if fields.flag("load_in_8bit"):
        return "int8"
    if not fields.flag("load_in_4bit"):
        return None
    is_double = fields.flag("use_bnb_nested_quant") or fields.flag("bnb_4bit_use_double_quant")
    is_fp4 = (fields.text("bnb_4bit_quant_type") or "nf4") == "fp4"
    return four_bits(is_fp4=is_fp4, is_double=bool(is_double))


_STORAGE = "bnb_4bit_quant_storage"


def unsharded_note(fields: Fields, setup: Setup) -> list[str]:
    """Return a note where FSDP is to shard 4-bit weights that are stored as integers, as they are by default.

    accelerate leaves them out of the shards, warns, and goes on (utils/fsdp_utils.py of 1.15, `fsdp2_prepare_model`).
    """
    is_sharded = "FSDP" in setup.tool and setup.plan.zero_stage == 3
    if not (is_linear_4bit(setup.base_weights) and is_sharded) or str(fields.value(_STORAGE)).removeprefix(
        "torch."
    ).startswith(("bfloat", "float")):
        return []
    return [
        f"{_STORAGE}: accelerate shards 4-bit weights that are stored as bfloat16, as is priced, and leaves others "
        "whole on each rank"
    ]


def four_bits(*, is_fp4: bool, is_double: bool) -> WeightFormat:
    """Return bitsandbytes' 4-bit format of that type."""
    if is_fp4:
        return "fp4:double" if is_double else "fp4"
    return "nf4:double" if is_double else "nf4"


_ATTENTION: dict[str, AttentionKind] = {
    "flash": "flash",
    "fa2": "flash",
    "fa3": "flash",
    "fa4": "flash",
    "sdpa": "sdpa",
    "auto": "sdpa",
    "xformers": "sdpa",
    "eager": "eager",
    "disabled": "eager",
}


def attention_of(words: object, notes: list[str]) -> AttentionKind:
    """Return the attention kernel that `attn_implementation` and its kin name; add a note of one that is not known.

    transformers' own is sdpa. Of several, one for each part of a model, the first is read.
    """
    names = [str(word) for word in words] if isinstance(words, list | tuple) and words else [words]
    if names[0] is None:
        return "sdpa"
    kind = next((kind for sign, kind in _ATTENTION.items() if sign in str(names[0]).lower()), None)
    if kind is None or len(set(names)) > 1:
        notes.append(f"attention {', '.join(map(str, names))}: priced as {kind or 'sdpa'}")
    return kind or "sdpa"


def galore_note(rank: int) -> list[str]:
    """Return a note where GaLore projects to another rank than the one that is priced."""
    return [] if rank == GALORE_RANK else [f"use_galore: priced at rank {GALORE_RANK}, its rank is {rank}"]


def with_whole_experts(setup: Setup, fields: Fields, *, key: str) -> Setup:
    """Return a setup with experts in whole tensors where `key` chooses their products, as transformers 5 alone can.

    Its `experts_implementation` is grouped_mm by default, which is priced for every other one too.
    """
    kind = fields.text(key)
    if kind is None:
        return setup
    told = [] if kind == "grouped_mm" else [f"{key} {kind}: priced as grouped_mm"]
    return setup.replace(stack=setup.stack.replace(whole_experts=True), notes=(*setup.notes, *told))


def with_tiled_mlp(setup: Setup, fields: Fields, *, key: str, tile: int | None = None, tiles: int = 1) -> Setup:
    """Return a setup whose MLPs run in tiles where `key` says so: of `tile` tokens, or so many `tiles`."""
    given = fields.count("tiled_mlp_num_shards")
    if not fields.flag(key) or setup.seq_length is None:
        return setup
    tokens = tile if given is None and tile is not None else -(-setup.seq_length // (given or tiles))
    return setup.replace(stack=setup.stack.replace(mlp_tile=tokens))
