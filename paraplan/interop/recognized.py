"""Whose configuration a text is, by the keys that each tool has alone and by how many of the text's keys it knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from paraplan.errors import PlanError, UsageError
from paraplan.interop.known_keys import key_table
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.launches import (
    TRL_SCRIPT,
    Launch,
    is_trainer_command,
    launch_of,
    program_of,
    tool_of_command,
)
from paraplan.interop.sources.megatron_files import is_megatron_file
from paraplan.interop.sources.ms_swift import COMMAND
from paraplan.interop.sources.torchtitan_command import COMMAND as TITAN_COMMAND
from paraplan.interop.sources.transformers import ARGUMENTS, CONFIG

Tool = Literal[
    "deepspeed",
    "accelerate",
    "megatron-lm",
    "peft",
    "trl",
    "hf-trainer",
    "axolotl",
    "llama-factory",
    "llama-factory-v1",
    "ms-swift",
    "transformers",
    "torchtitan",
    "megatron-bridge",
    "nemo-automodel",
]

_TABLES: dict[str, Tool] = {
    "peft": "peft",
    "accelerate": "accelerate",
    "axolotl": "axolotl",
    "llama-factory-v1": "llama-factory-v1",
    "llama-factory": "llama-factory",
    "ms-swift": "ms-swift",
    "megatron-swift": "ms-swift",
    "hf-trainer": "hf-trainer",
    "trl": "trl",
    "deepspeed": "deepspeed",
    "megatron-bridge": "megatron-bridge",
    "nemo-automodel": "nemo-automodel",
}
_OF_THE_TRAINER = "per_device_train_batch_size"
"""A key of the Trainer that each of its tools has too."""
_LEAST_SHARE = 1 / 3
"""Least share of keys that a tool knows of its own file: others only share some with it."""
_TRANSFORMERS = re.compile(rf"\b({'|'.join((CONFIG, *ARGUMENTS))})\(")
_TITAN = re.compile(
    r"^\s*\[(job|parallelism|activation_checkpoint|training)\]|\b\w*Trainer\.Config\b", flags=re.MULTILINE
)
_STARTED = re.compile(r"\b(torchrun|accelerate|deepspeed|torch\.distributed\.(run|launch))\b")
_MEGATRON = re.compile(
    r"\A\s*--[a-z]|--(tensor-model|pipeline-model|micro-batch|num-layers)|--(tensor|pipeline)_model_parallel_size"
)
_MEGATRON_PROGRAM = re.compile(r"\bpretrain_\w+\.py\s")
_UNREAD = {
    "GPT-NeoX": r"^\s*[\"']?pipe[-_]parallel[-_]size[\"']?\s*:",
    "torchtune": r"\b_component_:\s*torchtune\.|^[^#\n]*\btune run\s",
    "nanotron": r"^\s+tp_linear_async_communication:|\brun_train\.py\s+--config-file\b",
    "verl": r"^\s*actor_rollout_ref:|\s-m\s+verl\.|\bactor_rollout_ref\.",
    "OpenRLHF": r"\bopenrlhf\.cli\.",
    "LLM Foundry or OLMo": r"^\s*device_train_microbatch_size:",
    "NeMo 1": r"^\s+megatron_amp_O2:",
    "XTuner": r"^[^#\n]*\bxtuner(/v1/| train\b|\.tools\.)",
    "slime": r"^[^#\n]*--rollout-batch-size\b",
    "LitGPT": r"^[^#\n]*\blitgpt\s+(finetune|finetune_lora|finetune_full|pretrain)\b",
}
"""Tools that are known and not read, by what only their files and commands have."""


def _refuse_unread(text: str, source: str) -> None:
    for name, sign in _UNREAD.items():
        if re.search(sign, text, flags=re.MULTILINE):
            raise PlanError(
                f"{source} is a configuration of {name}, which is not read",
                hint="give its degrees to paraplan estimate MODEL (--dp, --tp, --pp, --zero), or its DeepSpeed part "
                "as a file",
            )


def is_known_document(text: str, source: str) -> bool:
    """Return whether a text holds the keys of a tool."""
    keys = _top_level_keys(text, source)
    return _nearest(keys) is not None


def tool_of(text: str, source: str, read_file: Callable[[str], str] | None = None) -> Tool:
    """Return whose configuration a text is, or the one that its command names, which `read_file` reads.

    Raises `PlanError` for nobody's.
    """
    _refuse_unread(text, source)
    if COMMAND.search(text):
        return "ms-swift"
    if TITAN_COMMAND.search(text) and not text.lstrip().startswith(("[", "{")):
        return "torchtitan"
    if is_trainer_command(text):
        return tool_of_command(text)
    launch = None if read_file is None else launch_of(text, source)
    if launch is not None and launch.program == "axolotl":
        return "axolotl"
    is_fork = "--micro_batch_size" in text and _MEGATRON_PROGRAM.search(text) is not None
    if _MEGATRON.search(text) is not None or is_fork or is_megatron_file(text):
        return "megatron-lm"
    if _TRANSFORMERS.search(text):
        return "transformers"
    if _TITAN.search(text):
        return "torchtitan"
    if launch is not None and read_file is not None:
        return _tool_of_launch(launch, read_file)
    keys = _top_level_keys(text, source)
    best = _nearest(keys)
    if best is not None:
        return best
    program = program_of(text, source) if _STARTED.search(text) is not None else None
    if program is not None:
        raise PlanError(
            f"{source} starts {program}.py, and none of its options is one of a tool that is read",
            hint="give its degrees to paraplan estimate MODEL (--dp, --tp, --pp, --zero)",
        )
    raise PlanError(
        f"{source} is not a configuration of DeepSpeed, accelerate, Megatron-LM, Megatron-Bridge, NeMo AutoModel, "
        "peft, transformers' Trainer, TRL, axolotl, LLaMA-Factory, ms-swift or torchtitan, and no script with "
        "transformers' DistributedConfig: none of their keys is in it",
        hint="DeepSpeed's JSON has train_batch_size or zero_optimization, accelerate's file distributed_type, "
        "Megatron-LM's arguments --tensor-model-parallel-size, peft's adapter_config.json peft_type, axolotl's file "
        "base_model, LLaMA-Factory's stage or finetuning_type, TRL's model_name_or_path, ms-swift's tuner_type",
    )


def _tool_of_launch(launch: Launch, read_file: Callable[[str], str]) -> Tool:
    if launch.configuration is None:
        return "accelerate"
    if TRL_SCRIPT.match(launch.program):
        return "trl"
    return tool_of(read_file(launch.configuration), launch.configuration)


def _nearest(keys: frozenset[str]) -> Tool | None:
    """Return the tool whose file has such keys: the Trainer's where no other tool is told by its own."""
    # Keys of both are arguments of the Trainer too. Of two tools that score alike the first is taken.
    others = ("deepspeed", "accelerate") if _OF_THE_TRAINER in keys else ()
    names = [name for name in _TABLES if name not in others]
    scores = {name: _score(name, keys) for name in names}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] > 0:
        return _TABLES[best]
    return "hf-trainer" if _OF_THE_TRAINER in keys else None


def _score(name: str, keys: frozenset[str]) -> float:
    """Return how many of the keys a tool knows, each shared among the tools that know it; 0 where none is its sign."""
    table = key_table(name)
    known = keys & table.known
    if not keys & frozenset(table.signs) or len(known) < _LEAST_SHARE * len(keys):
        return 0.0
    return sum(1.0 / sum(key in key_table(other).known for other in _TABLES) for key in known)


def _top_level_keys(text: str, source: str) -> frozenset[str]:
    """Return the keys of a YAML or JSON text; of a broken one those that stand at the beginning of lines."""
    try:
        data: object = load_document(text, source, hint="")
    except (PlanError, UsageError):
        text = text.removeprefix("\ufeff")
        pattern = r"""["'](\w+)["']\s*:""" if text.lstrip().startswith("{") else r"""^["']?(\w+)["']?\s*:"""
        return frozenset(re.findall(pattern, text, flags=re.MULTILINE)) - {"stage"}
    return frozenset(str(key) for key in data) if isinstance(data, Mapping) else frozenset()
