"""Readers of files for tools that fine-tune: TRL, axolotl and torchtune, each by its own parser (export_readers.py)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from export_tools import MissingError, Says, module, shellcheck, words_for

_SHORT = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "o", "o_proj": "o"}
_MLP = ["down_proj", "gate_proj", "up_proj"]


def read_trl(path: Path) -> Says:
    """By TRL's own parser of `trl sft`, and accelerate's of the file that the script writes."""
    shellcheck(path)
    with tempfile.TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)
        try:
            with words_for(path, "trl") as (words, _):
                pass
            launched = Path("accelerate.yaml")
            says: Says = _accelerated(launched) if launched.exists() else {"zero_stage": 0}
        finally:
            os.chdir(here)
    trl = module("trl")
    named = [word for word in words[1:] if word != "--accelerate_config"]
    named = [word for word in named if word != "accelerate.yaml"]
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    _, training, model = parser.parse_args_and_config([*named, "--use_cpu", "true"])
    assert training.loss_type in ("nll", "chunked_nll")  # TRL 1.16 has chunks for both, and the second as an alias
    bases = {"float32": "fp32", "bfloat16": "bf16"}
    peft = trl.get_peft_config(model)
    is_pure = model.dtype == "bfloat16" and peft is None
    says |= {
        "micro_batch_size": training.per_device_train_batch_size,
        "num_microbatches": training.gradient_accumulation_steps,
        "seq_length": training.max_length,
        "compiled": bool(training.torch_compile),
        "precision": "bf16-pure" if is_pure else "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
        "loss": "liger" if training.use_liger_kernel else "cut" if "chunked_nll" in named else "plain",
    }
    if training.gradient_checkpointing:
        says["recompute"] = "full"
    elif "recompute" not in says:
        says["recompute"] = "none"
    if peft is None:
        return says | {"train": "full", "base_weights": None}
    quantized = trl.get_quantization_config(model)
    base = bases[str(model.dtype)] if quantized is None else "int8"
    if quantized is not None and quantized.load_in_4bit:
        base = quantized.bnb_4bit_quant_type + (":double" if quantized.bnb_4bit_use_double_quant else "")
    kind = "dora" if peft.use_dora else "rslora" if peft.use_rslora else "lora"
    return says | {"base_weights": base, "train": _words(kind, peft.r, peft.target_modules, peft.lora_dropout)}


def _words(kind: str, rank: int, targets: Any, dropout: float) -> str:
    """Return adapters in the words of `--train`."""
    fields = [f"r={rank}"]
    if targets != "all-linear" and targets != ["all-linear"]:
        names = [_SHORT.get(name, name) for name in ([targets] if isinstance(targets, str) else targets)]
        order = list(_SHORT.values())  # peft keeps a set
        fields.append("targets=" + "|".join(sorted(names, key=order.index)))
    if dropout:
        fields.append(f"dropout={dropout:g}")
    return f"{kind}:{','.join(fields)}"


def _accelerated(path: Path) -> Says:
    """Return what accelerate reads from the file that a script of TRL has written, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("export_readers.py")), "accelerate", str(path.resolve())]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    line = json.loads(finished.stdout.splitlines()[-1])
    if "missing" in line:
        raise MissingError(line["missing"])
    if "says" not in line:
        raise ValueError(f"accelerate: {line}")
    return {key: value for key, value in line["says"].items() if key not in ("mixed_precision", "compiled")}


def read_axolotl(path: Path) -> Says:
    """By axolotl's schema, as on machines with so many H100."""
    yaml = module("yaml")
    schemas = module("axolotl.utils.schemas.config")
    text = path.read_text()
    world_size = int(path.stem.rpartition("-")[2])
    capabilities = {"bf16": True, "fp8": True, "n_gpu": min(8, world_size), "n_node": max(1, world_size // 8)}
    config = schemas.AxolotlConfigWCapabilities(
        **yaml.safe_load(text),
        capabilities=capabilities | {"compute_capability": "sm_90"},
        env_capabilities={"torch_version": "2.13.0"},
    )
    fsdp, deepspeed = config.fsdp_config, config.deepspeed
    zero = deepspeed["zero_optimization"] if deepspeed else {}
    stage = zero.get("stage", 0) if deepspeed else 0
    if fsdp is not None:
        assert config.fsdp_version == 2
        stage = 3 if fsdp.reshard_after_forward else 2
    offload = "parameters" if (fsdp is not None and fsdp.offload_params) or "offload_param" in zero else "none"
    if offload == "none" and "offload_optimizer" in zero:
        offload = "optimizer"
    checkpoints = bool(config.gradient_checkpointing) or (fsdp is not None and bool(fsdp.activation_checkpointing))
    says: Says = {
        "zero_stage": stage,
        "offload": offload,
        "recompute": "full" if checkpoints else "none",
        "micro_batch_size": config.micro_batch_size,
        "num_microbatches": config.gradient_accumulation_steps,
        "seq_length": config.sequence_len,
        "tp": config.tensor_parallel_size or 1,
        "cp": config.context_parallel_size or 1,
        "compiled": bool(config.torch_compile),
        "loss": _axolotl_loss(yaml.safe_load(text)),
    }
    if (config.dp_replicate_size or 1) > 1:
        says["zero_shards"] = config.dp_shard_size
    if config.adapter is None:
        return says | {"train": "full", "base_weights": None}
    quantization = config.bnb_config_kwargs or {}
    kind = quantization.get("bnb_4bit_quant_type", "nf4")
    double = ":double" if quantization.get("bnb_4bit_use_double_quant", True) else ""
    base = "int8" if config.load_in_8bit else kind + double if config.load_in_4bit else "bf16"
    targets = "all-linear" if config.lora_target_linear else config.lora_target_modules
    adapter = "dora" if config.peft_use_dora else "rslora" if config.peft_use_rslora else "lora"
    return says | {"base_weights": base, "train": _words(adapter, config.lora_r, targets, config.lora_dropout or 0.0)}


def _axolotl_loss(config: dict[str, Any]) -> str:
    if config.get("liger_fused_linear_cross_entropy"):
        return "liger"
    return "cut" if config.get("cut_cross_entropy") else "chunked" if config.get("chunked_cross_entropy") else "plain"


def read_torchtune(path: Path) -> Says:
    """By `tune validate`, which binds every component's arguments, and the recipe's own reading of the rest."""
    omegaconf = module("omegaconf").OmegaConf
    tune = module("torchtune.config")
    config = omegaconf.load(path)
    tune.validate(config)
    command = next(line for line in path.read_text().splitlines() if "tune run" in line)
    recipe = shlex.split(command.partition("tune run ")[2])
    name = next(word for word in recipe if "finetune" in word)
    registry = module("torchtune._recipe_registry")
    assert name in {one.name for one in registry.get_all_recipes()}, name
    stage = 0
    if name.endswith("distributed"):
        stage = 3 if config.fsdp_reshard_after_forward else 2
    model = config.get("model")
    says: Says = {
        "zero_stage": stage,
        "offload": "parameters" if config.get("fsdp_cpu_offload") else "none",
        "recompute": "full" if config.enable_activation_checkpointing else "none",
        "micro_batch_size": config.batch_size,
        "num_microbatches": config.gradient_accumulation_steps,
        "compiled": config.compile,
    }
    if "loss" in config:
        says["loss"] = "chunked" if "Chunked" in config.loss._component_ else "plain"
    if model is None:
        return says
    says["seq_length"] = config.tokenizer.max_seq_len
    component = model._component_.rpartition(".")[2]
    if "lora_rank" not in model:
        return says | {"train": "full", "base_weights": None}
    layers = [*model.lora_attn_modules, *(_MLP if model.apply_lora_to_mlp else [])]
    every = {"q_proj", "k_proj", "v_proj", "output_proj", *_MLP}
    targets = "all-linear" if set(layers) == every else layers
    kind = "dora" if model.get("use_dora") else "lora"
    base = "nf4:double" if component.startswith("qlora") else "bf16"
    return says | {"base_weights": base, "train": _words(kind, model.lora_rank, targets, model.lora_dropout)}
