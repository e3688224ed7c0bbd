"""Other tools' files as people have them, priced: what is stored in how many bits, which axes and task, does it fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from case_selection import with_all
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.plan.parallel import ParallelPlan
from paraplan.units import GIB

QLORA = """
base_model: Qwen/Qwen3-30B-A3B
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_target_modules: [q_proj, v_proj]
sequence_len: 1024
micro_batch_size: 1
gradient_checkpointing: true
optimizer: adamw_torch_8bit
bf16: true
"""
FACTORY_QLORA = """
model_name_or_path: Qwen/Qwen3-30B-A3B
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
lora_target: q_proj,v_proj
cutoff_len: 1024
per_device_train_batch_size: 1
bf16: true
"""
AXOLOTL = """
base_model: m
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 2
gradient_checkpointing: true
bf16: true
"""
FSDP2 = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
EP = "plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]\nexpert_parallel_size: 4\n"
EIGHT_BITS, FUSED = "optimizer: adamw_torch_8bit\n", "optimizer: adamw_torch_fused\n"
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
DPO = "rl: dpo\n" + FUSED + FSDP2
CP = "context_parallel_size: 8\ndeepspeed: {zero_optimization: {stage: 3}, train_micro_batch_size_per_gpu: auto}\n"
FACTORY = """
model_name_or_path: m
stage: sft
do_train: true
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""


@pytest.fixture
def answer(tmp_path: Path) -> Any:
    """Return what imports a text for a model and machines, as JSON."""

    def of(text: str, model: str, profile: str, *options: str) -> dict[str, Any]:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        words = ["import", str(path), "--model", model, "--profile", profile, *options, "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code in (0, 1), result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return of


@pytest.mark.parametrize(
    ("text", "model", "profile", "plan", "gib", "fits"),
    [
        # Experts stay in 16 bits: 55.6 GiB of weights, of which bitsandbytes stores the rest in four.
        (QLORA, "qwen3-30b-a3b", "1xrtx-4090", "one process", (57, 62), False),
        (QLORA + "quantize_moe_experts: true\n", "qwen3-30b-a3b", "1xrtx-4090", "one process", (17, 21), True),
        (
            AXOLOTL.replace("steps: 2", "steps: 1") + EP + EIGHT_BITS,
            "qwen3-30b-a3b",
            "4xh100",
            "dp4 x ep4",
            (50, 60),
            True,
        ),
        (AXOLOTL + CP + FUSED, "llama-3-8b", "8xh100", "cp8, ZeRO-3", (15, 31), True),
        (AXOLOTL + DPO, "qwen3-8b", "8xh100", "dp8, ZeRO-3", (22, 36), True),
        (AXOLOTL + CUT + EIGHT_BITS + "adapter: lora\nlora_r: 8\n", "gpt-oss-20b", "1xa6000", "one", (39, 44), True),
        # 2 bytes a weight, gradients alike, a momentum of 4 and no second moment: 8 B parameters.
        (FACTORY + "finetuning_type: full\nuse_muon: true\n", "qwen3-8b", "8xh100", "dp8, DDP", (95, 125), False),
        *with_all(  # what others above have in other combinations
            [
                (FACTORY_QLORA, "qwen3-30b-a3b", "1xrtx-4090", "one process", (57, 62), False),
                (AXOLOTL + FUSED + FSDP2, "qwen3-32b", "8xh100", "dp8, ZeRO-3", (40, 56), True),
                (FACTORY + "finetuning_type: lora\n", "gpt-oss-120b", "8xh100", "dp8, DDP", (215, 235), False),
            ]
        ),
    ],
)
def test_files_are_priced_as_their_tools_run_them(
    answer: Any, text: str, model: str, profile: str, plan: str, gib: tuple[int, int], fits: bool
) -> None:
    found = answer(text, model, profile)
    assert ParallelPlan.model_validate(found["plan"]).describe().startswith(plan)
    assert gib[0] <= found["peak_memory_bytes"] / GIB <= gib[1]
    assert found["fits"] is fits
    assert found["memory_verdict"].startswith("fits" if fits else "does not fit")


def test_experts_that_stay_in_16_bits_are_named_with_what_stores_them(answer: Any) -> None:
    (warning,) = [text for text in answer(QLORA, "qwen3-30b-a3b", "1xrtx-4090")["warnings"] if "experts" in text]
    assert "16 bits" in warning
    assert "quantize_moe_experts" in warning


def test_long_sequences_that_no_offload_saves_are_refused(answer: Any) -> None:
    text = """{
      "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": true},
      "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    }"""
    assert not answer(text, "llama-3-8b", "8xh100", "--seq-len", "256k")["fits"]


def test_adapters_of_a_model_with_linear_attention_are_read_by_the_files_type(answer: Any) -> None:
    lora = "finetuning_type: lora\nlora_rank: 16\nlora_target: q_proj,up_proj,out_proj\nquantization_bit: 4\n"
    found = answer(FACTORY + lora, "qwen3.5-27b", "3xl40s")
    assert found["parameters"]["total"] == pytest.approx(27.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "num_gpus", "grows"),
    [
        (AXOLOTL, 1, True),
        (AXOLOTL + FSDP2, 8, True),
        (FACTORY + "finetuning_type: full\n", 8, True),
        (FACTORY + "finetuning_type: full\n", 1, False),
        ("model: m\ntuner_type: full\nmax_length: 64\n", 8, False),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", 2, False),
    ],
)
def test_a_tool_that_has_the_allocator_grow_its_segments_is_priced_so(
    answer: Any, text: str, num_gpus: int, grows: bool
) -> None:
    found = answer(text, "gpt2", f"{num_gpus}xh100", "--seq-len", "64")
    assert found["training"].get("stack", {}).get("expandable_segments", False) is grows


def test_the_environment_of_a_script_comes_before_its_tools_default(answer: Any) -> None:
    swift = "NPROC_PER_NODE=2 swift sft --model m --tuner_type full --max_length 64\n"
    told = "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\\n" + swift
    segments = [
        answer(text, "gpt2", "2xh100")["training"].get("stack", {}).get("expandable_segments", False)
        for text in (swift, told, told.replace("True", "False"))
    ]
    assert segments == [False, True, False]


def test_each_tool_that_has_no_plan_to_compare_with_says_why(answer: Any) -> None:
    text = QLORA.replace("Qwen/Qwen3-30B-A3B", "m") + "fsdp: [full_shard]\nfsdp_config: {offload_params: true}\n"
    stored = answer(text, "llama-2-70b", "4xrtx-4090", "--quantizer", "transformers-4")
    assert stored["loading"]["fits"] is True
    assert stored["training"]["quantizer"] == "transformers-4"
    tools = list(stored["faster"]) or stored["not_compared"]
    assert "axolotl" in str(tools)  # its own search takes the quantizer that was given
    usual = answer(text, "llama-2-70b", "4xrtx-4090")
    assert usual["loading"]["fits"] is False
    assert "each rank has all weights on its GPU first" in usual["not_compared"]
