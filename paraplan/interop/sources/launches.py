"""Commands that start a training, by accelerate, torchrun, DeepSpeed or a tool's own name, and what options they give.

Options of such a script are the keys of its tool's files (`HfArgumentParser`), those of what starts it say on how many
processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from paraplan.errors import PlanError
from paraplan.interop.sources.documents import is_document, load_document
from paraplan.interop.sources.options import scalar, typed_options
from paraplan.interop.sources.shell import command_of

_TRL = "sft|dpo|grpo|kto|reward|rloo|distillation|gkd|online_dpo|nash_md|xpo|bco|cpo|orpo|ppo|prm|gspo|mpo|sdft|sdpo"
_OPTIONS = re.compile(
    r"--(per_device_train_batch_size|finetuning_type|use_peft)\b|--stage[ =](pt|sft|rm|ppo|dpo|kto)\b"
    rf"|\b(trl|examples)/scripts/({_TRL})\w*\.py\b"
)
_TRL_COMMAND = re.compile(rf"(?:^|[\s/&;])trl[ \t]+({_TRL})\b")
_COMMAND = re.compile(
    rf"\b(accelerate|torchrun|deepspeed|llamafactory-cli|trl|axolotl)\s|\bpython3?\b|\w+\.py\b|{_OPTIONS.pattern}"
)
TRL_SCRIPT = re.compile(rf"^({_TRL})(_\w+)?$")
"""Names of TRL's own scripts, and of those made after them."""
_OBJECTIVE = re.compile(rf"(?:^|_)({_TRL})(?:_|$)")
_STARTS = re.compile(r"\b(accelerate|torchrun|deepspeed|axolotl|python[\d.]*)[ \t]")
TRAINS_NOTHING = re.compile(r"generat|inference|eval|export|convert|preprocess|prompt|server|chat|demo")
"""Programs that are no training, by their files."""
_CONFIGURATIONS = (".yaml", ".yml", ".json")
_LLAMA_FACTORY_COMMAND = re.compile(r"\bllamafactory-cli[ \t]+train\b")
_ADAPTERS_OF_TRL = ("use_peft", "lora_target_modules")
_OF_LLAMA_FACTORY = ("stage", "finetuning_type")
_PER_NODE = ("nproc_per_node", "num_gpus")
_NODES = ("nnodes", "num_nodes", "num_machines")
_LAUNCH_SILENT = (
    *("main_process_port", "main_process_ip", "main_training_function", "machine_rank", "node_rank"),
    *("same_network", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("rdzv_timeout", "max_restarts", "monitor_interval", "standalone", "include", "exclude", "hostfile"),
    *("launcher", "role", "log_dir", "tee", "redirects", "multi_gpu", "gpu_ids", "module", "no_python"),
    *("num_cpu_threads_per_process", "dynamo_backend", "deepspeed_hostfile", "debug", "quiet"),
    *("local_ranks_filter", "use_env"),
)
"""Options of launchers without effect on memory and time, but for a step that is compiled."""

TrainerTool = Literal["trl", "llama-factory", "hf-trainer"]


class TrainerCommand(NamedTuple):
    """Content of a command."""

    tool: TrainerTool
    """Whose keys the options are."""
    values: dict[str, object]
    """The options, under the names of the tool's keys, and how the launcher starts it under those of TRL."""
    objective: str | None
    """Objective of TRL's command or script; None where neither says it."""
    notes: list[str]
    """Assumptions about the command."""


class Launch(NamedTuple):
    """The program that a script starts with most options, and what starts it."""

    launcher: list[str]
    """Words of what starts the program."""
    program: str
    """The program's name, without `.py`; "axolotl" for axolotl's."""
    options: dict[str, object]
    """The program's own options, but for its configuration."""
    configuration: str | None
    """The file that it is given as its configuration."""
    notes: list[str]
    """Assumptions about the script."""


def is_trainer_command(text: str) -> bool:
    """Return whether a text is a script with a command whose options are keys of a Trainer."""
    if text.lstrip("\ufeff \n").startswith("{"):
        return False
    return (
        _TRL_COMMAND.search(text) is not None or "llamafactory-cli train" in text or _OPTIONS.search(text) is not None
    )


def launch_of(text: str, source: str) -> Launch | None:
    """Return what a script starts with a configuration, or by one of accelerate's; None for any other text."""
    if _STARTS.search(text) is None or is_document(text):
        return None
    launch = _launch(text, source)
    has_own = launch.configuration is not None or bool(_accelerate(_options(launch.launcher)))
    return launch if has_own or "config_file" in _options(launch.launcher) else None


def program_of(text: str, source: str) -> str | None:
    """Return the name of the Python program that a script's command starts, None for none."""
    return None if is_document(text) else _launch(text, source).program or None


def tool_of_command(text: str) -> TrainerTool:
    """Return whose keys the options of a text's command are."""
    return _command(_launch(text, "the command"), "the command", {}).tool


def content_of(text: str, source: str, read_file: Callable[[str], str], *, hint: str) -> TrainerCommand:
    """Return the keys of a configuration, or of the command of a script; `read_file` reads the file that it names."""
    if not is_trainer_command(text) and launch_of(text, source) is None:
        return TrainerCommand("hf-trainer", dict(load_document(text, source, hint=hint)), None, [])
    launch = _launch(text, source)
    named = launch.configuration
    held = {} if named is None else load_document(read_file(named), named, hint="give that file itself")
    return _command(launch, source, held)


def launched_by_accelerate(
    launch: Launch, source: str, read_file: Callable[[str], str]
) -> tuple[dict[str, object], list[str]]:
    """Return accelerate's file as a launch names it, with the launch's own options before it, and what is assumed."""
    if TRAINS_NOTHING.search(launch.program) and "train" not in launch.program:
        raise PlanError(f"{source}: {launch.program} trains nothing", hint="give a script that starts a training")
    values, notes = _started(launch.launcher, source)
    config = values.pop("accelerate_config", {})
    if isinstance(config, str):
        config = load_document(read_file(config), config, hint="write one with accelerate config")
    return {**config, **values} if isinstance(config, Mapping) else values, [*launch.notes, *notes]


def _command(launch: Launch, source: str, held: Mapping[str, object]) -> TrainerCommand:
    """Return what a launch says, beside what its configuration holds."""
    values = {**held, **launch.options}
    started, notes = _started(launch.launcher, source)
    found = TRL_SCRIPT.match(launch.program)
    if launch.program == "llamafactory-cli" or any(key in values for key in _OF_LLAMA_FACTORY):
        tool: TrainerTool = "llama-factory"
    else:
        is_trl = found is not None or any(key in values for key in _ADAPTERS_OF_TRL)
        tool = "trl" if is_trl else "hf-trainer"
    found = found or _OBJECTIVE.search(launch.program)
    objective = found.group(1) if found is not None else None
    objective = "reward" if launch.program.startswith("reward") else objective
    return TrainerCommand(tool, started | values, objective, [*launch.notes, *notes])


def _launch(text: str, source: str) -> Launch:
    command = command_of(text, source, _OPTIONS, _COMMAND)
    launcher, program, words = _parts(command.words)
    options = _options(words)
    named = next((options.pop(key) for key in ("config", "config_file") if _is_configuration(options.get(key))), None)
    for before, word in pairwise(["", *words]):
        if before in ("", "train") and _is_configuration(word):
            named = word
            options.pop(word, None)
    return Launch(launcher, program, options, None if named is None else str(named), command.notes(source))


def _is_configuration(word: object) -> bool:
    return isinstance(word, str) and word.endswith(_CONFIGURATIONS) and "=" not in word


def _parts(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the words of what starts a program, the program's name, and its own words."""
    for place, word in enumerate(words):
        name = PurePosixPath(word).name
        if name in ("trl", "llamafactory-cli", "axolotl") and place + 1 < len(words):
            own = words[place + 2 :] if name == "trl" else words[place + 1 :]
            return words[:place], words[place + 1] if name == "trl" else name, own
        if name.endswith(".py"):
            return words[:place], name.removesuffix(".py"), words[place + 1 :]
        is_module = place > 0 and words[place - 1] in ("-m", "--module")
        if is_module and not word.startswith(("torch.distributed", "accelerate", "deepspeed")):
            name = "axolotl" if word.startswith("axolotl.") else word.rpartition(".")[2]
            return words[: place - 1], name, words[place + 1 :]
    return [], "", words


def _options(words: list[str]) -> dict[str, object]:
    """Return options with their values, and what stands before them as key=value."""
    head = (word.partition("=") for word in words if re.match(r"\w+=", word))
    return {key: scalar(value) for key, _, value in head} | typed_options(words)


def _started(words: list[str], source: str) -> tuple[dict[str, object], list[str]]:
    """Return how a program is started, as TRL's keys say it, and what is not priced of that."""
    options = typed_options(words)
    values: dict[str, object] = {}
    counts = [next((options[name] for name in names if name in options), 1) for names in (_PER_NODE, _NODES)]
    if any(name in options for name in _PER_NODE) and all(isinstance(count, int) for count in counts):
        values["num_processes"] = prod(count for count in counts if isinstance(count, int))
    if isinstance(options.get("num_processes"), int):
        values["num_processes"] = options["num_processes"]
    file = options.get("config_file")
    config = _accelerate(options)
    if file is not None:
        values["accelerate_config"] = str(file)
    elif config:
        values["accelerate_config"] = config
    if options.get("mixed_precision") is not None:
        values["mixed_precision"] = options["mixed_precision"]
    known = {*_PER_NODE, *_NODES, "num_processes", "config_file", "mixed_precision", *_LAUNCH_SILENT}
    rest = [key for key in options if key not in known and not (config and key.startswith(_OF_PLUGINS))]
    if file is not None and options.get("zero_stage"):
        raise PlanError(f"{source}: --config_file beside --zero_stage", hint="leave one of them out")
    return values, [f"{', '.join('--' + key for key in rest)} of what starts the script: not priced"] if rest else []


_OF_DEEPSPEED = ("zero", "offload_", "gradient_", "deepspeed_")
_OF_PLUGINS = ("use_deepspeed", "use_fsdp", "fsdp_", "parallelism_config_", *_OF_DEEPSPEED)


def _accelerate(options: dict[str, object]) -> dict[str, object]:
    """Return the file that `accelerate launch` would make of its options; none where they name no plugin."""
    beside = {key: value for key, value in options.items() if key.startswith("parallelism_config_")}
    part = {"parallelism_config": beside} if beside else {}
    if options.get("use_fsdp"):
        fsdp = {key: value for key, value in options.items() if key.startswith("fsdp_")}
        return {"distributed_type": "FSDP", "fsdp_config": fsdp, **part}
    if options.get("use_deepspeed"):
        own = {key: value for key, value in options.items() if key.startswith(_OF_DEEPSPEED)}
        own.pop("deepspeed_hostfile", None)
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": own}
    return {}
