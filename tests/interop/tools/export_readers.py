"""Reads exported files with the parsers of the tools that they are written for. Started by check_exports.py.

    python tests/interop/tools/export_readers.py TARGET FILE...

Imports nothing of paraplan, so that any interpreter that has the tool can run it. Prints one JSON object a line: first
`{"tool": "accelerate 1.15.0"}` or `{"missing": "..."}`, then for each file `{"file", "says"}`, what the tool understood
in the words of a plan, or `{"file", "refused"}`, its first complaint.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from export_fine_tuning import read_axolotl, read_torchtune, read_trl
from export_jobs import read_jobset, read_pytorchjob, read_skypilot, read_slurm, read_torchrun, read_trainjob
from export_tools import MissingError, Says, is_there, module, shellcheck, shellcheck_version, versions, words_for


class Reader(NamedTuple):
    """How a target's files are read: what has to be there, the tool's name with its version, the reading itself."""

    needs: str
    tool: Callable[[], str]
    read: Callable[[Path], Says]


def main() -> None:
    """Read the files that the command line names."""
    target, *files = sys.argv[1:]
    missing = [name for name in READERS[target].needs.split() if not is_there(name)]
    if missing:
        print(json.dumps({"missing": missing[0]}))
        return
    with redirect_stdout(sys.stderr):  # some parsers print all that they read
        try:
            lines: list[dict[str, object]] = [{"tool": READERS[target].tool()}]
        except MissingError as error:
            lines, files = [{"missing": str(error)}], []
        lines += [{"file": file} | _read(READERS[target], Path(file)) for file in files]
    for line in lines:
        print(json.dumps(line))


def _read(reader: Reader, path: Path) -> dict[str, object]:
    before = dict(os.environ)
    try:
        return {"says": reader.read(path)}
    except MissingError as error:
        return {"missing": str(error)}
    except (Exception, SystemExit) as error:  # whatever a tool raises is its refusal, and is shown
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"refused": f"{type(error).__name__}: {' '.join(lines[:3])}"}
    finally:
        os.environ.clear()
        os.environ.update(before)


def _read_accelerate(path: Path) -> Says:
    """Through `accelerate launch` to the plugins that ranks make of its environment variables."""
    module("accelerate.commands.config.config_args").load_config_from_file(str(path))
    launch, dataclasses = module("accelerate.commands.launch"), module("accelerate.utils.dataclasses")
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    arguments.machine_rank = arguments.num_machines - 1  # the first machine asks whether the port is free just now
    says: Says = {
        "world_size": arguments.num_processes,
        "num_nodes": arguments.num_machines,
        "mixed_precision": arguments.mixed_precision,
        "compiled": str(arguments.dynamo_backend).upper() == "INDUCTOR",
    }
    utils = module("accelerate.utils.launch")
    if arguments.use_deepspeed:
        if not is_there("deepspeed"):
            raise MissingError("deepspeed is not installed")
        arguments.deepspeed_fields_from_accelerate_config = ",".join(
            defaults.deepspeed_config
        )  # as launch_command does
        _, environment = utils.prepare_deepspeed_cmd_env(arguments)
        os.environ.update(environment)
        plugin = dataclasses.DeepSpeedPlugin()
        zero = plugin.deepspeed_config["zero_optimization"]
        devices = [zero.get(f"offload_{what}", {}).get("device", "none") for what in ("param", "optimizer")]
        offload = "parameters" if devices[0] == "cpu" else "optimizer" if devices[1] == "cpu" else "none"
        steps = plugin.deepspeed_config["gradient_accumulation_steps"]
        return says | {"zero_stage": plugin.zero_stage, "offload": offload, "num_microbatches": steps}
    if not arguments.multi_gpu and not arguments.use_fsdp:
        return says | {"dp": 1, "zero_stage": 0}
    os.environ.update(utils.prepare_multi_gpu_env(arguments))
    if not arguments.use_fsdp:
        return says | {"dp": arguments.num_processes, "zero_stage": 0}
    fsdp = dataclasses.FullyShardedDataParallelPlugin()
    assert fsdp.fsdp_version == 2
    says |= {
        "zero_stage": 3 if fsdp.reshard_after_forward else 2,
        "offload": _fsdp_offload(fsdp),
        "recompute": "full" if fsdp.activation_checkpointing else "none",
        "dp": arguments.num_processes,
    }
    if arguments.use_parallelism_config:
        sizes = module("accelerate.parallelism_config").ParallelismConfig()
        assert sizes.total_size == arguments.num_processes, (sizes.total_size, arguments.num_processes)
        replicated = sizes.dp_shard_size if sizes.dp_replicate_size > 1 else None
        says |= {"dp": sizes.data_parallel_size, "tp": sizes.tp_size, "cp": sizes.cp_size, "zero_shards": replicated}
    return says


def _fsdp_offload(plugin: Any) -> str:
    return "parameters" if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy" else "none"


def _read_trainer(path: Path) -> Says:
    transformers = module("transformers")
    if "deepspeed" in json.loads(path.read_text()) and not is_there("deepspeed"):
        raise MissingError("deepspeed is not installed")
    (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(str(path))
    says: Says = {
        "micro_batch_size": arguments.per_device_train_batch_size,
        "num_microbatches": arguments.gradient_accumulation_steps,
        "compiled": bool(arguments.torch_compile),
        "zero_stage": 0,
    }
    if arguments.deepspeed:
        says["zero_stage"] = arguments.hf_deepspeed_config.get_value("zero_optimization.stage")
    elif arguments.fsdp:
        plugin = module("accelerate.utils").FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        says["zero_stage"] = 3 if plugin.reshard_after_forward else 2
        says["recompute"] = "full" if plugin.activation_checkpointing else "none"
        says["offload"] = _fsdp_offload(plugin)
    else:
        says["recompute"] = "full" if arguments.gradient_checkpointing else "none"
    return says


def _read_deepspeed(path: Path) -> Says:
    """In a process group of as many ranks as the plan has, by torch's fake backend: DeepSpeed multiplies by them."""
    world_size = int(path.stem.rpartition("-")[2])
    distributed = module("torch.distributed")
    store = module("torch.testing._internal.distributed.fake_pg").FakeStore()
    distributed.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        comm = module("deepspeed.comm")
        comm.init_distributed(dist_backend="fake", dist_init_required=False)
        config = module("deepspeed.runtime.config").DeepSpeedConfig(str(path))
        assert config.world_size == world_size
    finally:
        distributed.destroy_process_group()
        module("deepspeed.comm.comm").cdb = None
    zero, tp = config.zero_config, config.tensor_parallel_config.autotp_size or 1
    devices = [
        None if part is None else str(getattr(part.device, "value", part.device))
        for part in (zero.offload_param, zero.offload_optimizer)
    ]
    return {
        "dp": world_size // tp,
        "tp": tp,
        "zero_stage": int(config.zero_optimization_stage),
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "num_microbatches": config.gradient_accumulation_steps,
        "offload": "parameters" if devices[0] == "cpu" else "optimizer" if devices[1] == "cpu" else "none",
        "precision": "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "fp32",
    }


MODEL = {"num-layers": "32", "hidden-size": "4096", "num-attention-heads": "32", "max-position-embeddings": "8192"}


def _read_megatron(path: Path) -> Says:
    """By `parse_args` and `validate_args`, which would ask CUDA for the architecture: answered here with Hopper's."""
    shellcheck(path)
    parsing = module("megatron.training.arguments")
    with words_for(path, "torchrun") as (words, environment):
        os.environ.update(environment)
        if "CUDA_DEVICE_MAX_CONNECTIONS" not in environment:
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    named = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--n")}
    os.environ["RANK"] = "0"
    os.environ["WORLD_SIZE"] = str(int(named.get("--nnodes", "1")) * int(named["--nproc-per-node"]))
    model = [word for name, value in MODEL.items() for word in (f"--{name}", value)]
    experts = ["--num-experts", "8"] if "--expert-model-parallel-size" in words else []
    sys.argv = ["pretrain_gpt.py", *words[words.index("pretrain_gpt.py") + 1 :], *model, *experts]
    parsing.get_device_arch_version = lambda: 9
    arguments = parsing.parse_args()
    arguments = parsing.validate_args(arguments) or arguments
    stages = {"optim_grads": 2, "optim_grads_params": 3}
    dp = arguments.data_parallel_size
    stage = stages[arguments.data_parallel_sharding_strategy] if arguments.use_megatron_fsdp else 0
    copies = arguments.num_distributed_optimizer_instances
    return {
        "dp": dp,
        "tp": arguments.tensor_model_parallel_size,
        "pp": arguments.pipeline_model_parallel_size,
        "cp": arguments.context_parallel_size,
        "ep": arguments.expert_model_parallel_size,
        "zero_stage": stage or int(arguments.use_distributed_optimizer),
        "zero_shards": dp // copies if copies > 1 else None,
        "sequence_parallel": arguments.sequence_parallel,
        "micro_batch_size": arguments.micro_batch_size,
        "num_microbatches": arguments.global_batch_size // arguments.micro_batch_size // dp,
        "virtual_pipeline_size": arguments.virtual_pipeline_model_parallel_size or 1,
        "recompute": arguments.recompute_granularity or "none",
        "offload": "optimizer" if arguments.optimizer_cpu_offload else "none",
        "precision": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
        "seq_length": arguments.seq_length,
    }


def _read_bridge(path: Path) -> Says:
    """As its scripts merge overrides into a recipe's ConfigContainer: every key has to be a field of it."""
    container = module("megatron.bridge.training.config").ConfigContainer
    utils = module("megatron.bridge.training.utils.omegaconf_utils")
    recipe = module("megatron.bridge.recipes.llama").llama3_8b_pretrain_config()
    assert isinstance(recipe, container)
    merged, excluded = utils.create_omegaconf_dict_config(recipe)
    omegaconf = module("omegaconf").OmegaConf
    merged = omegaconf.merge(merged, omegaconf.load(path))
    utils.apply_overrides(recipe, omegaconf.to_container(merged, resolve=True), excluded)
    model, ddp = recipe.model, recipe.ddp
    return {
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "sequence_parallel": model.sequence_parallel,
        "micro_batch_size": recipe.train.micro_batch_size,
        "recompute": model.recompute_granularity or "none",
        "offload": "optimizer" if recipe.optimizer.optimizer_cpu_offload else "none",
        "zero_stage": {"optim_grads": 2, "optim_grads_params": 3}[ddp.data_parallel_sharding_strategy]
        if ddp.use_megatron_fsdp
        else int(ddp.use_distributed_optimizer),
    }


def _titan(parallelism: Any, training: Any, *, recompute: str, compiled: bool) -> Says:
    replicas, shards = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    shards_over = shards * parallelism.context_parallel_degree
    sequences, of_pipeline, of_step, seq_length = _titan_batch(parallelism, training)
    return {
        "dp": replicas * shards,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
        "cp": parallelism.context_parallel_degree,
        "ep": max(1, parallelism.expert_parallel_degree // parallelism.tensor_parallel_degree),
        "zero_stage": 0 if shards_over == 1 else 3 if parallelism.fsdp_reshard_after_forward == "always" else 2,
        "zero_shards": shards if replicas > 1 and shards > 1 else None,
        "micro_batch_size": sequences,
        "num_microbatches": max(of_pipeline, of_step // sequences // (replicas * shards)),
        "recompute": recompute,
        "compiled": compiled,
        "offload": "parameters" if training.enable_cpu_offload else "none",
        "seq_length": seq_length,
    }


def _titan_batch(parallelism: Any, training: Any) -> tuple[int, int, int, int]:
    """Return sequences of a micro-batch, micro-batches of a pipeline, sequences of a step, and a sequence's tokens."""
    pipelined = parallelism.pipeline_parallel_degree > 1
    if hasattr(training, "local_batch_size"):
        size = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
        return size, training.local_batch_size // size, training.global_batch_size, training.seq_len
    tokens = training.max_context_length  # since v0.3.0 batches are counted in tokens
    steps = parallelism.num_pp_microbatches if pipelined else 1
    size = training.num_tokens_per_microbatch_per_dp_rank // tokens
    return size, steps, training.num_tokens_per_train_step // tokens, tokens


def _read_torchtitan(path: Path) -> Says:
    config = module("torchtitan.config").ConfigManager().parse_args(["--job.config_file", str(path)])
    return _titan(
        config.parallelism,
        config.training,
        recompute=config.activation_checkpoint.mode,
        compiled=config.compile.enable and "model" in config.compile.components,
    )


def _imported(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location("plan", path)
    assert specification is not None
    assert specification.loader is not None
    made = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(made)
    return made


def _read_transformers(path: Path) -> Says:
    """Through the file itself: its `DistributedConfig` and the arguments of its Trainer."""
    made = _imported(path)
    arguments = made.training_arguments(str(path.with_suffix("")))
    says: Says = {
        "micro_batch_size": arguments.per_device_train_batch_size,
        "num_microbatches": arguments.gradient_accumulation_steps,
        "recompute": "full" if arguments.gradient_checkpointing else "none",
    }
    config = getattr(made, "DISTRIBUTED", None)
    if config is None:
        return says | {"tp": 1, "zero_stage": 0}
    return says | {
        "dp": config.dp_size,
        "tp": config.tp_size,
        "ep": max(1, config.ep_size // config.tp_size),
        "zero_stage": 3 if config.fsdp_size > 1 else 0,
        "zero_shards": config.fsdp_size if min(config.fsdp_size, config.dp_replicate_size) > 1 else None,
        "offload": "parameters" if config.fsdp_cpu_offload else "none",
    }


def _read_torchtitan_python(path: Path) -> Says:
    registry = module("torchtitan.models.llama3.config_registry")
    made = _imported(path)
    config = made.apply_plan(registry.llama3_8b())
    config.__post_init__()  # checks the fields against each other
    policy = type(config.activation_checkpoint).__qualname__ if config.activation_checkpoint is not None else ""
    return _titan(
        config.parallelism,
        config.training,
        recompute={"FullAC.Config": "full", "SelectiveAC.Config": "selective"}.get(policy, "none"),
        compiled=config.compile.enable and "model" in config.compile.components,
    ) | {
        "sequence_parallel": config.parallelism.enable_sequence_parallel
        and config.parallelism.tensor_parallel_degree > 1
    }


def _megatron_version() -> str:
    info = module("megatron.core.package_info")
    module("megatron.training.arguments")
    return f"Megatron-LM {info.__version__}, as on Hopper"


READERS: dict[str, Reader] = {
    "torchrun": Reader(
        "program:shellcheck torch", lambda: f"{versions('torch')()}, {shellcheck_version()}", read_torchrun
    ),
    "accelerate": Reader("accelerate", versions("accelerate"), _read_accelerate),
    "deepspeed": Reader("deepspeed", versions("deepspeed"), _read_deepspeed),
    "hf-trainer": Reader("transformers accelerate", versions("transformers"), _read_trainer),
    "transformers": Reader("transformers.distributed peft", versions("transformers"), _read_transformers),
    "megatron-lm": Reader("megatron.training.arguments program:shellcheck", _megatron_version, _read_megatron),
    "megatron-bridge": Reader("megatron.bridge transformer_engine", versions("megatron-bridge"), _read_bridge),
    "torchtitan": Reader("torchtitan.config.job_config", versions("torchtitan"), _read_torchtitan),
    "torchtitan-python": Reader("torchtitan.config.configs", versions("torchtitan"), _read_torchtitan_python),
    "trl": Reader("trl accelerate program:shellcheck", versions("trl", "accelerate"), read_trl),
    "axolotl": Reader("axolotl", versions("axolotl"), read_axolotl),
    "torchtune": Reader("torchtune omegaconf", versions("torchtune"), read_torchtune),
    "slurm": Reader("program:shellcheck", shellcheck_version, read_slurm),
    "pytorchjob": Reader(
        "kubeflow.training kubeflow_trainer_api",
        versions("kubeflow-training", "kubeflow-trainer-api"),
        read_pytorchjob,
    ),
    "trainjob": Reader("kubeflow_trainer_api", versions("kubeflow-trainer-api"), read_trainjob),
    "jobset": Reader("kubeflow_trainer_api", versions("kubeflow-trainer-api"), read_jobset),
    "skypilot": Reader("sky", versions("skypilot"), read_skypilot),
}

if __name__ == "__main__":
    main()
