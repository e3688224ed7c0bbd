"""`paraplan estimate --from-...`: what another tool is configured for, priced, with what would be faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app

GPT2 = ["estimate", "gpt2", "--profile", "dgx-h100", "--seq-len", "1024"]
MEGATRON = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --bf16"


@pytest.fixture
def deepspeed(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    values = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
    )
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_a_deepspeed_config_is_priced_beside_what_would_be_faster(deepspeed: Path) -> None:
    status, stdout, stderr = run(*GPT2, "--from-deepspeed", str(deepspeed))
    assert status == 0
    assert "dp8, ZeRO-3, micro-batch 1 x 8: fits" in stdout
    assert "now, DeepSpeed" in stdout
    assert "recommended, paraplan" in stdout
    assert "note: recompute is switched on by the script" in stderr


def test_json_keeps_the_keys_of_estimate_and_adds_the_comparison(deepspeed: Path) -> None:
    status, stdout, _ = run(*GPT2, "--from-deepspeed", str(deepspeed), "--json")
    answer = json.loads(stdout)
    assert status == 0
    assert {"plan", "parameters", "memory", "fits", "peak_memory_bytes", "step", "from", "faster"} <= set(answer)
    assert answer["plan"]["zero_stage"] == 3
    assert answer["from"]["tool"] == "DeepSpeed"
    figures = answer["faster"]["recommended, paraplan"]
    assert figures["speedup"] == pytest.approx(answer["step"]["step_time_s"] / figures["step_time_s"])


def test_options_beside_a_config_fill_in_what_scripts_decide(accelerate: Path) -> None:
    words = ["--from-accelerate", str(accelerate), "--micro-batch", "2", "--global-batch", "64", "--json"]
    answer = json.loads(run(*GPT2, *words)[1])
    assert answer["plan"]["micro_batch_size"] == 2
    assert answer["plan"]["num_microbatches"] == 4
    assert answer["from"]["notes"] == []
    full = json.loads(run(*GPT2, *words, "--recompute", "full")[1])
    assert full["plan"]["recompute"] == "full"


def test_megatron_arguments_are_priced_on_the_machines_that_are_named() -> None:
    answer = json.loads(run(*GPT2, "--from-megatron", MEGATRON, "--gpus-per-node", "4", "--json")[1])
    assert (answer["plan"]["dp"], answer["plan"]["tp"]) == (2, 2)
    assert answer["from"]["framework"] == "megatron-core"


def test_limits_hold_for_another_tools_config_too(deepspeed: Path) -> None:
    status, stdout, _ = run(*GPT2, "--from-deepspeed", str(deepspeed), "--max-memory", "1MiB", "--github")
    assert status == 1
    assert f"::error file={deepspeed}" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-deepspeed", "/no/such/ds.json"], "/no/such/ds.json"),
        (["--from-deepspeed", "{ds}", "--from-megatron", MEGATRON], "contradict each other"),
        (["--from-deepspeed", "{ds}", "--dp", "4"], "--dp beside --from-deepspeed"),
        (["--from-deepspeed", "{ds}", "--nodes", "2"], "train_batch_size=64 is not"),
        (["--from-megatron", "--tensor-model-parallel-size 5 --micro-batch-size 1"], "do not divide the 8 GPUs"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], message: str, deepspeed: Path) -> None:
    status, stdout, stderr = run(*GPT2, *(word.format(ds=deepspeed) for word in arguments))
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_broken_config_names_the_file_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": "three"}}')
    status, _, stderr = run(*GPT2, "--from-deepspeed", str(path))
    assert status == 2
    assert f"{path}: zero_optimization.stage" in stderr
