"""ms-swift's YAML and commands (`swift sft`, `megatron sft`), read back.

Keys and defaults as in ms-swift of August 2026 (swift/arguments, swift/megatron/arguments, swift/config).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields, is_off
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.base_weights import released_format
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.liger import with_trainers_liger
from paraplan.interop.sources.megatron_lm import megatron_setup
from paraplan.interop.sources.objectives import Objective, objective_of, reserve_of
from paraplan.interop.sources.options import typed_options
from paraplan.interop.sources.shell import command_of
from paraplan.interop.sources.towers import adapters_of_towers, full_but_towers
from paraplan.model.trainable import AdapterKind
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import TrainingPrecision

_COMMANDS = "sft|pt|rlhf|infer|deploy|export|eval|rollout|sample|app|web-ui|merge-lora"
COMMAND = re.compile(
    rf"(?:^|[ \t/])(swift|megatron)[ \t]+({_COMMANDS})\b|\bswift/cli/(_megatron/)?(\w+)\.py", flags=re.MULTILINE
)
_TRAINS = ("sft", "pt", "rlhf")
_TRAINING = re.compile(
    rf"\b(swift|megatron)[ \t]+({'|'.join(_TRAINS)})\b|\bswift/cli/(_megatron/)?({'|'.join(_TRAINS)})\.py"
)
_MEGATRON_SIGNS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "micro_batch_size"),
    *("recompute_granularity", "global_batch_size", "mcore_model", "train_iters"),
)
_DEEPSPEED: dict[str, dict[str, object]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "zero2_offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero3_offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    },
}
"""Configurations of DeepSpeed that come with ms-swift (swift/config); their sizes are the Trainer's."""
_SIZES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
_FSDP2: dict[str, object] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
}
_TILES = 4
"""Tiles of an MLP where no number is given (ms-swift's tiled_mlp_num_shards)."""
_LAUNCHER = ("nproc_per_node", "nproc", "nnodes")
_RANK, _DROPOUT, _BATCH, _COMPLETION, _GRPO_BETA, _VLLM_SHARE = 8, 0.05, 16, 512, 0.04, 0.9


def read_ms_swift(text: str, *, source: str, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training that a configuration of ms-swift describes, or a script with its command.

    Raises `PlanError` naming the file and key for what is broken, and for commands that train nothing.
    """
    values, is_megatron, notes, environment = _values(text, source, read_file)
    for what, keys in key_table("ms-swift").trains_nothing.items():
        if any(values.get(key) is not None for key in keys):
            raise PlanError(f"{source}: ms-swift's file {what}, and trains nothing", hint="give one that trains")
    fields = Fields(values, source=source)
    beside = {key: str(value) for key, value in fields.taken("ENV").items()}
    num_gpus = _processes({**beside, **(environment or {})}, values, is_command=environment is not None)
    notes += _spread_layers({**beside, **(environment or {})}, num_gpus)
    for key in _LAUNCHER:
        fields.value(key)
    if given.num_gpus is None and num_gpus is not None:
        given = given.replace(num_gpus=num_gpus)
    if is_megatron or any(key in values for key in _MEGATRON_SIGNS):
        setup, table = _megatron(fields, given), key_table("megatron-swift")
    else:
        setup, table = _trainer(fields, given, read_file), key_table("ms-swift")
    says_gpus = num_gpus is not None or setup.says_gpus
    return setup.replace(says_gpus=says_gpus, notes=(*notes, *setup.notes, *table.notes(fields)))


class _Source(NamedTuple):
    values: dict[str, object]
    """The keys of a YAML, or of a command's options."""
    is_megatron: bool
    """Whether Megatron runs them."""
    notes: list[str]
    environment: Mapping[str, str] | None
    """Variables that ms-swift's own command has; None for a file, and where another program starts the processes."""


def _values(text: str, source: str, read_file: trainer.ReadFile) -> _Source:
    """Return what a file or a script with a command says."""
    found = COMMAND.search(text)
    if found is None:
        return _Source(_document(text, source), False, [], None)
    command = command_of(text, source, _TRAINING, COMMAND)
    found = COMMAND.search(" ".join(command.words)) or found
    what = found.group(2) or found.group(4)
    if what not in _TRAINS:
        raise PlanError(
            f"{source}: ms-swift's command {found.group(1) or 'swift'} {what} trains nothing",
            hint="give one of swift sft, swift pt, swift rlhf, megatron sft, megatron pt and megatron rlhf",
        )
    values: dict[str, object] = {}
    for before, word in pairwise(command.words):
        if word.endswith((".yaml", ".yml", ".json")) and before in (*_TRAINS, "--config"):
            if "$" in word or any("$(" in one for one in command.words):
                raise PlanError(
                    f"{source}: the shell finds the file that its command names", hint="give that file itself"
                )
            values |= _document(read_file(word), word)
    options = typed_options(command.words)
    options.pop("config", None)
    values |= options
    if "rlhf_type" not in values and what == "rlhf":
        values["rlhf_type"] = "dpo"
    is_megatron = found.group(1) == "megatron" or found.group(3) is not None
    return _Source(values, is_megatron, command.notes(source), command.variables if found.group(1) else None)


def _processes(environment: Mapping[str, str], values: Mapping[str, object], *, is_command: bool) -> int | None:
    """Return the processes of all nodes that variables or torchrun's options say; None where they do not.

    ms-swift's own command starts torch.distributed.run for two of the variables alone (swift/cli/main.py).
    """
    each = environment.get("NPROC_PER_NODE") or values.get("nproc_per_node") or values.get("nproc")
    nodes = environment.get("NNODES") or values.get("nnodes")
    if each is None and nodes is None:
        return 1 if is_command and not values.get("use_ray") else None
    counts = [str(each or 1), str(nodes or 1)]
    return prod(map(int, counts)) or None if all(count.isdigit() for count in counts) else None


def _spread_layers(environment: Mapping[str, str], num_gpus: int | None) -> list[str]:
    """Return a note where processes see more GPUs than there are: ms-swift spreads a model's layers over them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    nodes = environment.get("NNODES", "1")
    each = (num_gpus or 1) // max(1, int(nodes) if nodes.isdigit() else 1)
    if num_gpus is None or len(visible) < 2 * each:
        return []
    return [
        f"CUDA_VISIBLE_DEVICES names {len(visible)} GPUs for {each} process{'es' * (each > 1)}: layers spread over "
        "several GPUs of a process (device_map) are priced as on one"
    ]


def _document(text: str, source: str) -> dict[str, object]:
    """Return the keys of a file; those of what trains stand in a section of their own in files for Ray."""
    values = dict(load_document(text, source, hint="examples/yaml of ms-swift has working ones"))
    part = values.pop("train", None)
    if isinstance(part, Mapping):
        values |= {str(key): value for key, value in part.items() if key != "gpus"}
        values |= {"nproc_per_node": part["gpus"]} if isinstance(part.get("gpus"), int) else {}
    return values


def _trainer(fields: Fields, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training of `swift sft` and its kin, which transformers' Trainer runs."""
    train, notes = _trainable(fields, default="lora")
    objective = _objective(fields)
    batch = fields.count("per_device_train_batch_size") or 1
    steps = fields.count("gradient_accumulation_steps") or max(1, ceil(_BATCH / batch / (given.num_gpus or 1)))
    cp = fields.count("sequence_parallel_size") or 1
    strategy = fields.value("fsdp")
    is_bundled = strategy == "fsdp2"
    sharding = Fields(_FSDP2 if is_bundled else {"fsdp_config": fields.taken("fsdp_config")}, source=fields.source)
    launched = fields.value("config_file")  # of accelerate launch, before the program
    if launched is not None:
        name = str(launched[0] if isinstance(launched, list) else launched)
        sharding = Fields({"accelerate_config": name}, source=fields.source)
    if strategy and not is_bundled:
        name = str(strategy)
        sharding = Fields(load_document(read_file(name), name, hint="ms-swift's own is fsdp2"), source=name)
    checkpoints = trainer.recomputes(fields)
    setup = trainer.sharded_setup(
        sharding,
        given,
        trainer.Batches(batch * objective.group, steps, (checkpoints is None or checkpoints) and not strategy),
        tool="ms-swift",
        target="hf-trainer",
        read_file=read_file,
        axes=trainer.Axes(cp=cp),
        deepspeed=_deepspeed(fields),
    )
    optimizer, found = trainer.trainer_optimizer(fields, "optim")
    notes += found
    if fields.flag("use_galore"):
        optimizer = "galore_adamw"
        notes += trainer.galore_note(fields.count("galore_rank") or trainer.GALORE_RANK)
    if fields.text("optimizer") == "muon":
        optimizer = "muon"
    elif fields.text("optimizer") is not None:
        notes.append(f"optimizer {fields.text('optimizer')}: priced as {optimizer}")
    precision = _precision(fields)
    notes += trainer.tf32_note(fields, precision)
    is_pure = precision == "bf16" and (train is None or train.startswith("text")) and not setup.keeps_fp32
    setup = setup.replace(
        precision="bf16-pure" if is_pure else precision,
        optimizer=optimizer,
        attention=trainer.attention_of(fields.value("attn_impl"), notes),
        packs_samples=fields.is_on("packing"),
        train=train,
        base_weights=_weights(fields, notes) if train is not None else None,
        loss="plain",
        compiled=fields.flag("torch_compile"),
        offloads_activations=trainer.offloads_checkpoints(fields) or _offloads(sharding),
        seq_length=_length(fields, objective, notes),
        model_name=fields.text("model") or fields.text("model_id_or_path"),
        task=objective.task,
        notes=(*setup.notes, *objective.notes, *notes),
    )
    setup = setup.replace(notes=(*setup.notes, *trainer.unsharded_note(fields, setup)))
    setup = trainer.with_whole_experts(setup, fields, key="experts_impl")
    return with_trainers_liger(trainer.with_tiled_mlp(setup, fields, key="use_tiled_mlp", tiles=_TILES), fields)


def _megatron(fields: Fields, given: Given) -> Setup:
    """Return the training of Megatron-SWIFT, which Megatron-Core runs."""
    train, notes = _trainable(fields, default="full")
    objective = _objective(fields)
    keys = (*key_table("megatron-lm").read, *key_table("megatron-lm").not_priced_keys)
    named = {key: fields.value(key) for key in keys if key in fields and key not in _LAUNCHER}
    values: dict[str, object] = {**key_table("megatron-swift").defaults, **named}
    micro = Fields(values, source=fields.source).count("micro_batch_size") or 1
    total = Fields(values, source=fields.source).count("global_batch_size") or _BATCH
    values |= {"micro_batch_size": micro * objective.group, "global_batch_size": total * objective.group}
    options = Fields(values, source=fields.source)
    setup = megatron_setup(options, given)
    precision = _precision(fields)
    if given.num_gpus is None:
        notes.append("no GPUs are named: as many as its degrees multiply to, --profile says otherwise")
    return setup.replace(
        tool="ms-swift, Megatron-Core",
        precision=precision,
        linear_precision=setup.linear_precision if precision != "fp32" else None,
        train=train,
        base_weights=("bf16" if precision == "bf16" else None) if train is not None else None,
        seq_length=_length(fields, objective, notes),
        packs_samples=fields.is_on("packing"),
        model_name=fields.text("model"),
        task=objective.task,
        notes=(*setup.notes, *key_table("megatron-lm").notes(options), *objective.notes, *notes),
    )


def _deepspeed(fields: Fields) -> object:
    """Return the configuration of DeepSpeed: one of ms-swift's own by its name, a file, or keys."""
    value = fields.value("deepspeed")
    config: object = value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        config = dict(load_document(value, fields.source, hint="give a name, a file or an object"))
    if isinstance(value, str) and value in _DEEPSPEED:
        config = {**_SIZES, **_DEEPSPEED[value]}
    tp, hpz = fields.count("deepspeed_autotp_size"), fields.count("zero_hpz_partition_size")
    if isinstance(config, dict) and tp is not None:
        config["tensor_parallel"] = {"autotp_size": tp}
    if isinstance(config, dict) and hpz is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "zero_hpz_partition_size": hpz}
    return config


def _objective(fields: Fields) -> Objective:
    name = fields.text("rlhf_type")
    task = fields.text("task_type")
    if name is None and task not in (None, "causal_lm"):
        return objective_of(task, key="task_type")
    is_generated = name in ("grpo", "gkd")
    completion = fields.count("max_completion_length") if is_generated else None
    beta = fields.value("beta") if is_generated else None
    beta = _GRPO_BETA if beta is None and name == "grpo" else beta
    reserve = reserve_of(fields, usual=_VLLM_SHARE) if name == "grpo" else None
    return objective_of(name, key="rlhf_type", completion=completion, beta=beta, reserve=reserve)


def _trainable(fields: Fields, *, default: str) -> tuple[str | None, list[str]]:
    words = fields.text("tuner_type") or fields.text("train_type") or fields.text("sft_type") or default
    keys = {"tower": "freeze_vit", "projector": "freeze_aligner", "language": "freeze_llm"}
    if words == "full":
        return full_but_towers(fields, **keys)
    if words not in ("lora", "dora", "lora_llm", "longlora"):
        raise fields.error("tuner_type", "lora or full, the ways to train that are priced")
    kind: AdapterKind = "dora" if fields.flag("use_dora") else "lora"
    train, found = trainable_of(
        fields,
        kind=kind,
        rank=fields.count("lora_rank") or _RANK,
        targets=fields.value("target_modules") or fields.value("lora_target_modules") or "all-linear",
        dropout=_DROPOUT if fields.value("lora_dropout") is None else fields.value("lora_dropout"),
        by_root=bool(fields.flag("use_rslora")),
        saved=fields.value("modules_to_save"),
        parameters=fields.value("target_parameters"),
    )
    return train, adapters_of_towers(fields, **keys) + found


def _weights(fields: Fields, notes: list[str]) -> WeightFormat:
    bits = fields.number("quant_bits") or fields.number("quantization_bit")
    method = fields.text("quant_method")
    if bits and method not in (None, "bnb"):
        raise fields.error("quant_method", "bnb, the method that is priced")
    if bits == 8:
        return "int8"
    if bits == 4:
        is_double = fields.flag("bnb_4bit_use_double_quant")
        return trainer.four_bits(is_fp4=fields.text("bnb_4bit_quant_type") == "fp4", is_double=is_double is not False)
    return released_format(fields.text("model"), notes) or "bf16"


def _offloads(sharding: Fields) -> bool | None:
    """Return True where ms-swift's FSDP keeps activations on the host."""
    return Fields(sharding.taken("fsdp_config"), source=sharding.source).flag("activation_cpu_offload")


def _precision(fields: Fields) -> TrainingPrecision:
    """Return the type of the arithmetic: that of the weights, of which fp32 ones are computed in fp16."""
    words = fields.text("torch_dtype") or fields.text("dtype") or "bfloat16"
    if fields.flag("fp16") or (words in ("float16", "fp16", "float32", "fp32") and not fields.flag("bf16")):
        return "fp32" if fields.flag("fp16") is False else "fp16"
    return "bf16"


def _length(fields: Fields, objective: Objective, notes: list[str]) -> int | None:
    """Return the tokens of a sequence: of a prompt and its answer where answers are generated."""
    length = fields.count("max_length")
    is_packed = not is_off(fields.value("packing"))
    fields.value("padding_free")
    packed = fields.count("packing_length")
    if length is None and packed is None:
        notes.append("max_length is not named, which is the model's own longest then: --seq-len says how long they are")
    is_generated = objective.task is not None and objective.task.startswith("grpo")
    if fields.text("rlhf_type") == "gkd":  # which generates a share of its answers
        is_generated = not is_off(fields.values.get("lmbda", True))
    if is_generated and length is not None:
        return length + (fields.count("max_completion_length") or _COMPLETION)
    row = packed if is_packed and packed is not None else length
    if is_packed and objective.group == 2 and row is not None:
        # A row is as long as all sequences in it together, those of both answers (swift/dataset/packing.py).
        notes.append(f"packed rows of {row} tokens hold both sequences of pairs: priced as two of {row // 2}")
        return row // 2
    return row
