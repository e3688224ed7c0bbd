"""`paraplan import`: what another tool is configured for, priced, with what would be faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app

GPT2 = ["--model", "gpt2", "--profile", "dgx-h100", "--seq-len", "1024"]
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
    status, stdout, stderr = run("import", str(deepspeed), *GPT2)
    assert status == 0
    assert "FSDP (ZeRO-3) over 8 GPUs, micro-batch size 1, 8 accumulation steps" in " ".join(stdout.split())
    assert "now, DeepSpeed" in stdout
    assert "recommended, paraplan" in stdout
    assert "note: recompute is switched on by the script" in stderr


def test_plans_beside_a_config_stand_by_their_time_and_none_is_called_faster_that_is_slower(deepspeed: Path) -> None:
    text = run("import", str(deepspeed), *GPT2)[1]
    table = text.partition("Beside other plans, fastest first\n")[2].splitlines()
    rows = [line for line in table if "tokens/s/GPU" in line]
    rates = [float(line.partition(" tokens/s/GPU")[0].split()[-2]) for line in rows]
    assert len(rates) > 1
    assert rates == sorted(rates, reverse=True)
    assert "What would be faster" not in text


def test_json_keeps_the_keys_of_estimate_and_adds_the_comparison(deepspeed: Path) -> None:
    status, stdout, _ = run("import", str(deepspeed), *GPT2, "--json")
    answer = json.loads(stdout)
    assert status == 0
    assert {"plan", "parameters", "memory", "fits", "peak_memory_bytes", "step", "from", "faster"} <= set(answer)
    assert answer["plan"]["zero_stage"] == 3
    assert answer["from"]["tool"] == "DeepSpeed"
    figures = answer["faster"]["recommended, paraplan"]
    assert figures["speedup"] == pytest.approx(answer["step"]["step_time_s"] / figures["step_time_s"])


def test_options_beside_a_config_fill_in_what_scripts_decide(accelerate: Path) -> None:
    words = ["import", str(accelerate), *GPT2, "--micro-batch", "2", "--global-batch", "64", "--json"]
    answer = json.loads(run(*words)[1])
    assert answer["plan"]["micro_batch_size"] == 2
    assert answer["plan"]["num_microbatches"] == 4
    assert answer["from"]["notes"] == []
    full = json.loads(run(*words, "--recompute", "full")[1])
    assert full["plan"]["recompute"] == "full"


def test_megatron_arguments_are_priced_on_the_machines_that_are_named() -> None:
    answer = json.loads(run("import", *GPT2, "--gpus-per-node", "4", "--json", "--", *MEGATRON.split())[1])
    assert (answer["plan"]["dp"], answer["plan"]["tp"]) == (2, 2)
    assert answer["from"]["framework"] == "megatron-core"


def test_without_a_model_the_plan_alone_is_read_and_written(deepspeed: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    status, stdout, _ = run("import", str(deepspeed), "--seq-len", "512", "-o", str(path))
    assert (status, stdout) == (0, "DeepSpeed: dp8, ZeRO-3, micro-batch 1 x 8\n")
    file = json.loads(path.read_text())
    assert (file["plan"]["zero_stage"], file["training"]["seq_length"], file["model"]) == (3, 512, None)
    assert json.loads(run("import", str(deepspeed), "--json")[1])["training"] is None


def test_the_plan_file_is_estimated_as_the_configuration_is(deepspeed: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    imported = json.loads(run("import", str(deepspeed), *GPT2, "-o", str(path), "--json")[1])
    estimated = json.loads(run("estimate", "gpt2", "--profile", "dgx-h100", "--plan", str(path), "--json")[1])
    assert estimated["step"] == imported["step"]
    assert estimated["memory"] == imported["memory"]


def test_megatron_arguments_are_read_from_the_script_that_starts_it(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(f"torchrun pretrain_gpt.py {MEGATRON}\n")
    words = "import", str(script), "--profile", "dgx-h100"
    assert run(*words)[1] == (
        "Megatron-LM: dp4 x tp2, DDP, micro-batch 1 x 16\nit names no model: --model says which one is priced\n"
    )


def test_the_way_out_of_degrees_that_another_model_does_not_take_is_in_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "swift.yaml"
    recipe.write_text("model: Qwen/Qwen3-30B-A3B\ntuner_type: lora\nexpert_model_parallel_size: 4\n")
    status, _, stderr = run("import", str(recipe), "--model", "qwen3-8b", "--profile", "dgx-h100")
    assert status == 2
    said = "the file trains Qwen/Qwen3-30B-A3B, and --model says that qwen3-8b is priced; in the file, use ep 1"
    assert f"ep=4: qwen3-8b has no experts\nhint: {said}\n" in stderr


@pytest.mark.parametrize("tool", ["deepspeed", "megatron"])
def test_the_old_spelling_answers_alike_and_says_how_it_is_spelled_now(tool: str, deepspeed: Path) -> None:
    words = ["--gpus-per-node", "8", "--global-batch", "64"]
    source = str(deepspeed) if tool == "deepspeed" else MEGATRON
    status, stdout, stderr = run("estimate", *GPT2[1:], f"--from-{tool}", source, *words)
    assert (status, stdout) == run("import", *GPT2, *words, "--", *source.split())[:2]
    assert f"note: estimate --from-{tool} is now: paraplan import FILE --model gpt2" in stderr


def test_limits_hold_under_the_old_spelling(deepspeed: Path) -> None:
    words = ["--from-deepspeed", str(deepspeed), "--max-memory", "1MiB", "--github"]
    status, stdout, _ = run("estimate", *GPT2[1:], *words)
    assert status == 1
    assert f"::error file={deepspeed}" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "/no/such/ds.json", *GPT2], "/no/such/ds.json"),
        (["import", "{other}"], "not a configuration of DeepSpeed, accelerate, Megatron-LM"),
        (["import", "{ds}", *GPT2, "--nodes", "2"], "train_batch_size=64 is not"),
        (
            ["import", *GPT2, "--", *["--tensor-model-parallel-size", "5", "--micro-batch-size", "1"]],
            "do not divide the 8",
        ),
        (["estimate", *GPT2[1:], "--from-deepspeed", "{ds}", "--from-megatron", MEGATRON], "contradict each other"),
        (["estimate", *GPT2[1:], "--from-deepspeed", "{ds}", "--dp", "4"], "--dp beside --from-deepspeed"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], message: str, deepspeed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"learning_rate": 1}')
    status, stdout, stderr = run(*(word.format(ds=deepspeed, other=other) for word in arguments))
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_broken_config_names_the_file_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": "three"}}')
    status, _, stderr = run("import", str(path), *GPT2)
    assert status == 2
    assert f"{path}: zero_optimization.stage" in stderr


def test_verify_judges_an_imported_plan_as_its_own_tool_runs_it(tmp_path: Path) -> None:
    config, plan = tmp_path / "config.yaml", tmp_path / "plan.json"
    config.write_text(
        "base_model: m\nsequence_len: 2048\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
        "dp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\n"
    )
    machine = ["--model", "llama-3-8b", "--profile", "dgx-h100"]
    assert run("import", str(config), *machine, "-o", str(plan))[0] == 0
    _, output, _ = run("verify", str(plan), "--tolerance", "900%")
    assert "accelerate executes it" in output
    assert "paraplan.runtime" not in output


def test_options_come_before_what_a_file_says_and_packing_needs_a_length(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: gpt2\nsequence_len: 1024\nsample_packing: true\nmicro_batch_size: 2\n")
    plain = json.loads(run("import", str(path), *GPT2, "--json")[1])
    assert not plain["training"]["packs_samples"]
    more = ("--sample-len", "300", "--offload-activations", "--optimizer", "sgd")
    training = json.loads(run("import", str(path), *GPT2, *more, "--json")[1])["training"]
    assert (training["packs_samples"], training["sample_length"]) == (True, 300)
    assert (training["offloads_activations"], training["optimizer"]) == (True, "sgd")


def test_the_model_that_a_file_names_is_priced_on_a_named_machine(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    text = "stage: sft\nmodel_name_or_path: {}\ncutoff_len: 1024\nper_device_train_batch_size: 1\nbf16: true\n"
    path.write_text(text.format("Qwen/Qwen2.5-0.5B-Instruct"))
    status, stdout, stderr = run("import", str(path), "--profile", "dgx-h100")
    assert status == 0
    assert "qwen2.5-0.5b" in stdout
    assert "Beside other plans, fastest first" in stdout
    assert "Qwen/Qwen2.5-0.5B-Instruct: read as qwen2.5-0.5b" in stderr
    _, stdout, _ = run("import", str(path))
    assert "--model says which model is priced" in stdout
    path.write_text(text.format("/models/Qwen2.5-0.5B-Instruct"))
    _, stdout, _ = run("import", str(path), "--profile", "dgx-h100")
    assert "Beside other plans, fastest first" in stdout
    path.write_text(text.format("/models/none-of-ours"))
    status, stdout, _ = run("import", str(path), "--profile", "dgx-h100")
    assert status == 0
    assert "it trains /models/none-of-ours: --model says which model is priced" in stdout


@pytest.mark.parametrize("kind", ["accelerate.yaml", "ds.json", "adapter_config.json", "train.py"])
def test_pairs_stay_together_where_a_config_leaves_the_micro_batch_to_the_script(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.write_text(
        {
            "accelerate.yaml": "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n",
            "ds.json": '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}',
            "adapter_config.json": '{"peft_type": "LORA", "r": 8, "target_modules": ["c_attn"]}',
            "train.py": "from transformers import DistributedConfig\nc = DistributedConfig(tp_size=1, fsdp_size=8)\n",
        }[kind]
    )
    for task, size in (("reward", 2), ("sft", 1)):
        status, stdout, stderr = run("import", str(path), *GPT2, "--task", task, "--json")
        assert status == 0, stderr
        assert json.loads(stdout)["plan"]["micro_batch_size"] == size
