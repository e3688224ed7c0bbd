"""No key of another tool's file is dropped in silence, and a file is known by its own tool's keys."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paraplan.api.imported import import_plan
from paraplan.errors import PlanError
from paraplan.interop.fields import Fields, is_off
from paraplan.interop.known_keys import KeyTable, key_table
from paraplan.interop.setup import Setup

BASES: dict[str, dict[str, object]] = {
    "axolotl": {"base_model": "m", "sequence_len": 1024, "micro_batch_size": 2},
    "llama-factory": {"stage": "sft", "model_name_or_path": "m", "do_train": True, "cutoff_len": 1024},
    "llama-factory-v1": {
        "model": "m",
        "train_dataset": "d.yaml",
        "model_class": "llm",
        "dist_config": {"name": "fsdp2"},
    },
    "trl": {"model_name_or_path": "m", "dataset_name": "d", "max_length": 1024, "use_peft": False},
    "hf-trainer": {"per_device_train_batch_size": 1, "accelerator_config": {"split_batches": False}, "local_rank": -1},
    "ms-swift": {"model": "m", "tuner_type": "lora", "max_length": 1024, "split_dataset_ratio": 0.1},
    "megatron-swift": {"model": "m", "tuner_type": "full", "max_length": 1024, "micro_batch_size": 1},
    "accelerate": {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"},
    "deepspeed": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
    "nemo-automodel": {
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1},
        "dist_env": {"backend": "nccl"},
        "distributed": {"strategy": "fsdp2", "tp_size": 1},
    },
    "megatron-bridge": {
        "model": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
        "ddp": {"overlap_grad_reduce": True},
    },
    "peft": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]},
}
"""A small file of each tool."""
READ: dict[str, list[tuple[str, object]]] = {
    "axolotl": [
        *(("micro_batch_size", 4), ("sequence_len", 2048), ("gradient_accumulation_steps", 4), ("fp16", True)),
        *(("gradient_checkpointing", True), ("activation_offloading", True), ("optimizer", "lion"), ("rl", "dpo")),
        *(
            ("tensor_parallel_size", 2),
            ("context_parallel_size", 2),
            ("flash_attention", True),
            ("torch_compile", True),
        ),
        *(("fsdp_config", {"reshard_after_forward": True}), ("deepspeed", {"zero_optimization": {"stage": 3}})),
        *(("adapter", "lora"), ("chunked_cross_entropy", True), ("reward_model", True), ("rl", "grpo"), ("rl", "kto")),
        *(
            ("attn_implementation", "eager"),
            ("optimizer", "muon"),
            ("fp8", True),
            ("liger_fused_linear_cross_entropy", True),
        ),
    ],
    "llama-factory": [
        *(("per_device_train_batch_size", 4), ("gradient_accumulation_steps", 4), ("cutoff_len", 4096), ("fp16", True)),
        *(("disable_gradient_checkpointing", True), ("finetuning_type", "full"), ("lora_rank", 64), ("use_dora", True)),
        *(
            ("lora_target", "q_proj"),
            ("quantization_bit", 4),
            ("use_galore", True),
            ("use_muon", True),
            ("use_badam", True),
        ),
        *(("use_apollo", True), ("use_adam_mini", True), ("flash_attn", "fa2"), ("enable_liger_kernel", True)),
        *(
            ("pure_bf16", True),
            ("optim", "adafactor"),
            ("stage", "dpo"),
            ("stage", "rm"),
            ("stage", "kto"),
            ("stage", "ppo"),
        ),
        *(("tensor_model_parallel_size", 2), ("pipeline_model_parallel_size", 2), ("fsdp", "full_shard auto_wrap")),
        *(("torch_compile", True), ("fp8", True), ("deepspeed", {"zero_optimization": {"stage": 3}})),
    ],
    "llama-factory-v1": [
        *(("micro_batch_size", 4), ("global_batch_size", 32), ("cutoff_len", 4096), ("bf16", False), ("cp_size", 2)),
        *(("peft_config", {"name": "lora", "r": 4}), ("enable_activation_checkpointing", False), ("flash_attn", "fa2")),
        *(("optim_config", {"name": "muon"}), ("kernel_config", {"name": "liger_kernel"}), ("mp_replicate_size", 2)),
    ],
    "trl": [
        *(("per_device_train_batch_size", 4), ("gradient_accumulation_steps", 4), ("max_length", 4096), ("fp16", True)),
        *(("use_peft", True), ("dtype", "bfloat16"), ("gradient_checkpointing", False), ("optim", "lion_32bit")),
        *(
            ("loss_type", "chunked_nll"),
            ("loss_type", "sigmoid"),
            ("use_liger_kernel", True),
            ("activation_offloading", True),
        ),
        *(("num_generations", 8), ("accelerate_config", "zero2"), ("attn_implementation", "flash_attention_2")),
    ],
    "hf-trainer": [
        *(("per_device_train_batch_size", 4), ("gradient_accumulation_steps", 4), ("block_size", 4096), ("fp16", True)),
        *(("bf16", True), ("dtype", "bfloat16"), ("activation_checkpointing", True), ("gradient_checkpointing", True)),
        *(("optim", "lion_32bit"), ("use_liger_kernel", True), ("fsdp", "full_shard"), ("torch_compile", True)),
        *(("deepspeed", {"zero_optimization": {"stage": 3}}), ("attn_implementation", "eager")),
    ],
    "ms-swift": [
        *(
            ("per_device_train_batch_size", 4),
            ("gradient_accumulation_steps", 8),
            ("max_length", 4096),
            ("lora_rank", 64),
        ),
        *(("tuner_type", "full"), ("torch_dtype", "float16"), ("attn_impl", "flash_attn"), ("quant_bits", 4)),
        *(("deepspeed", "zero3_offload"), ("deepspeed", "zero2"), ("fsdp", "fsdp2"), ("rlhf_type", "dpo")),
        *(
            ("rlhf_type", "grpo"),
            ("rlhf_type", "kto"),
            ("sequence_parallel_size", 2),
            ("gradient_checkpointing", False),
        ),
        *(("use_liger_kernel", True), ("use_galore", True), ("task_type", "embedding"), ("target_modules", ["q_proj"])),
    ],
    "megatron-swift": [
        *(("tensor_model_parallel_size", 2), ("pipeline_model_parallel_size", 2), ("context_parallel_size", 2)),
        *(
            ("expert_model_parallel_size", 2),
            ("micro_batch_size", 2),
            ("global_batch_size", 32),
            ("tuner_type", "lora"),
        ),
        *(("recompute_granularity", "full"), ("use_distributed_optimizer", False), ("optimizer_cpu_offload", True)),
        *(("rlhf_type", "dpo"), ("fp8_format", "hybrid"), ("optimizer", "muon"), ("max_length", 4096)),
    ],
    "accelerate": [
        *(("num_processes", 2), ("mixed_precision", "fp16"), ("use_cpu", True), ("distributed_type", "FSDP")),
        *(("parallelism_config", {"parallelism_config_tp_size": 2}), ("dynamo_config", {"dynamo_backend": "INDUCTOR"})),
    ],
    "deepspeed": [
        *(("train_micro_batch_size_per_gpu", 2), ("gradient_accumulation_steps", 4), ("bf16", {"enabled": True})),
        *(("zero_optimization", {"stage": 3}), ("optimizer", {"type": "Lion"}), ("sequence_parallel_size", 2)),
        *(("tensor_parallel", {"autotp_size": 2}), ("fp16", {"enabled": True}), ("torch_autocast", {"enabled": True})),
        *(("expert_parallel", {"enabled": True, "autoep_size": 2}),),
        *(("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "cpu"}}), ("pipeline", {"stages": 2})),
    ],
    "peft": [("r", 4), ("target_modules", ["k_proj"]), ("lora_dropout", 0.1), ("use_dora", True), ("peft_type", "IA3")],
}
"""Values that are not the default, and change what is read of that small file."""
COMMANDS = ("trl", "llama-factory", "hf-trainer")
"""Tools whose scripts take the keys of a file as options."""
VALUES = st.one_of(st.integers(2, 9), st.just(True), st.sampled_from(["some", "words"]), st.just(["a", "b"]))


def setup_of(values: dict[str, object], folder: Path) -> Setup:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return import_plan(path, num_gpus=4, micro_batch_size=None).setup


def _top_level(table: KeyTable) -> list[str]:
    return sorted(key for key in table.known if "." not in key)


@pytest.mark.parametrize("tool", BASES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_key_is_read_or_without_effect_or_in_a_note(tool: str, data: st.DataObject, tmp_path: Path) -> None:
    table = key_table(tool)
    extra = {
        key: data.draw(VALUES, label=key)
        for key in data.draw(st.lists(st.sampled_from([*_top_level(table), "no_such_key"]), max_size=6, unique=True))
    }
    silent = {key for keys in table.without_effect.values() for key in keys}
    try:
        notes = "\n".join(setup_of(extra | BASES[tool], tmp_path).notes)
    except PlanError:
        return
    for key in extra.keys() - BASES[tool].keys() - silent - set(table.read):
        beside = [switch for switch, keys in table.only_beside.items() if key in keys]
        if not beside or any(not is_off((extra | BASES[tool]).get(switch)) for switch in beside):
            assert key in notes, (key, extra, notes)


@pytest.mark.parametrize(("tool", "key", "value"), [(tool, *pair) for tool, pairs in READ.items() for pair in pairs])
def test_a_key_that_is_read_changes_the_setup(tool: str, key: str, value: object, tmp_path: Path) -> None:
    assert setup_of(BASES[tool] | {key: value}, tmp_path) != setup_of(BASES[tool], tmp_path)


def _command(values: dict[str, object]) -> str:
    program = "python src/train.py"
    words = [
        f"    --{key} {' '.join(map(shlex.quote, map(str, value if isinstance(value, list) else [value])))}"
        for key, value in values.items()
    ]
    return " \\\n".join([program, *words, "    --output_dir out"])


@pytest.mark.parametrize(("tool", "key", "value"), [(tool, *pair) for tool in COMMANDS for pair in READ[tool]])
def test_a_command_says_what_the_file_of_its_options_does(tool: str, key: str, value: object, tmp_path: Path) -> None:
    sections = {"accelerator_config", "deepspeed"}
    values = {name: each for name, each in (BASES[tool] | {key: value}).items() if name not in sections}
    path = tmp_path / "run.sh"
    path.write_text(f"#!/bin/bash\nexport N=3\n{_command(values)}\n")
    ours = import_plan(path, num_gpus=4).setup
    file = setup_of({"accelerator_config": {}} | values if tool == "hf-trainer" else values, tmp_path)
    assert ours.replace(notes=()) == file.replace(notes=())


@pytest.mark.parametrize(
    ("launcher", "plan"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2", "dp8, DDP"),
        ("accelerate launch --num_processes 4 --multi_gpu", "dp4, DDP"),
        ("accelerate launch --num_processes 4 --mixed_precision fp16", "dp4, DDP"),
        ("accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4", "dp4, ZeRO-3"),
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2", "dp2, ZeRO-3"),
        ("deepspeed --num_gpus 8", "dp8, DDP"),
        ("python -m torch.distributed.run --nproc_per_node 2", "dp2, DDP"),
    ],
)
def test_what_starts_a_script_says_on_how_many_processes(launcher: str, plan: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{launcher} train.py --per_device_train_batch_size 2 --unknown_option 3\n")
    found = import_plan(path).setup
    assert found.plan.describe().startswith(plan)
    assert "unknown_option: not known as keys of transformers' Trainer, and not priced" in found.notes
    assert found.precision == ("fp16" if "fp16" in launcher else "fp32")


def test_a_script_without_the_trainers_options_is_none_of_the_trainers(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("accelerate launch --num_processes 4 nlp_example.py --mixed_precision fp16 --output_dir out\n")
    with pytest.raises(PlanError, match="none of its options is one of a tool"):
        import_plan(path)


@pytest.mark.parametrize(
    ("program", "task"),
    [("trl dpo", "dpo"), ("trl/scripts/grpo.py", "grpo"), ("examples/scripts/reward_modeling.py", "reward")],
)
def test_trls_command_says_what_a_step_learns_from(program: str, task: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{'' if program.startswith('trl ') else 'python '}{program} --model_name_or_path m --bf16\n")
    found = import_plan(path).setup
    assert found.tool == "TRL, DDP"
    assert (found.task or "").startswith(task)


@pytest.mark.parametrize("tool", BASES)
def test_a_key_has_one_place_in_its_table(tool: str) -> None:
    table = key_table(tool)
    silent = {key for keys in table.without_effect.values() for key in keys}
    assert not silent & set(table.not_priced_keys)


def test_a_key_that_nobody_asks_for_is_named_and_one_without_effect_is_not() -> None:
    table = KeyTable(
        title="T",
        source="s",
        read=("a",),
        without_effect={"logs": ("log", "section")},
        not_priced={"is not priced": ("b", "c", "part")},
        only_beside={"switch": ("c",)},
    )
    values = {"a": 1, "b": 2, "c": 3, "log": 1, "section": {"x": 1}, "part": {"y": 1}, "new": 0, "off": None}
    fields = Fields(values, source="file")
    assert fields.count("a") == 1
    assert table.notes(fields) == ["b, part.y: is not priced", "new: not known as keys of T, and not priced"]
    assert Fields({"a": 1}, source="file").unread() == [("a", 1)]


@pytest.mark.parametrize("tool", BASES)
def test_a_file_is_known_by_its_own_tools_keys(tool: str, tmp_path: Path) -> None:
    names: Any = {
        "axolotl": "axolotl",
        "llama-factory": "LLaMA-Factory",
        "llama-factory-v1": "LLaMA-Factory v1",
        "trl": "TRL",
        "hf-trainer": "transformers' Trainer",
        "ms-swift": "ms-swift",
        "megatron-swift": "ms-swift",
        "accelerate": "accelerate",
        "deepspeed": "DeepSpeed",
        "peft": "peft",
        "nemo-automodel": "NeMo AutoModel",
        "megatron-bridge": "Megatron-Bridge",
    }
    assert setup_of(BASES[tool], tmp_path).tool.split(", ")[0] == names[tool]


@pytest.mark.parametrize("tool", ["axolotl", "ms-swift", "trl"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("num_gpus", [1, 4])
def test_deepspeed_keeps_fp32_weights_on_any_number_of_gpus(
    tool: str, stage: int, num_gpus: int, tmp_path: Path
) -> None:
    half: dict[str, dict[str, object]] = {
        "axolotl": {"bf16": True},
        "ms-swift": {"tuner_type": "full", "torch_dtype": "bfloat16"},
        "trl": {"dtype": "bfloat16", "bf16": True},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASES[tool] | half[tool] | {"deepspeed": {"zero_optimization": {"stage": stage}}}))
    assert import_plan(path, num_gpus=num_gpus).setup.precision == "bf16"
