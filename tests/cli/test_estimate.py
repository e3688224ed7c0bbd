from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from factory_script import FACTORY
from typer.testing import CliRunner

from paraplan.api.models import load_model
from paraplan.cli.main import app
from paraplan.units import format_bytes

LLAMA = ["estimate", "llama-3-8b", "--profile", "dgx-h100", "--seq-len", "8192"]
PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes", "workspace_bytes")
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def report(*arguments: str) -> dict[str, Any]:
    status, stdout, stderr = run(*arguments, "--json")
    assert (status, stderr) == (0, "")
    answer: dict[str, Any] = json.loads(stdout)
    return answer


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(FACTORY, encoding="utf-8")
    return str(path)


def test_a_plan_that_a_search_would_leave_out_is_estimated_with_the_reason() -> None:
    options = ["--profile", "2xrtx-4090", "--train", "lora:r=8", "--base-weights", "nf4", "--framework", "transformers"]
    status, _, stderr = run("estimate", "llama-3-8b", *options, "--dp", "2", "--zero", "3")
    assert status == 0
    assert "recommend would not plan this" in " ".join(stderr.split())
    assert "--zero 0" in stderr
    _, _, stderr = run("estimate", "llama-3-8b", *options, "--dp", "2", "--zero", "0")
    assert "recommend would not plan" not in " ".join(stderr.split())
    status, stdout, _ = run("recommend", "llama-3-8b", *options, "--seq-len", "1024", "--json")
    assert status == 0
    assert json.loads(stdout)["plan"]["zero_stage"] == 0


def test_estimate_prints_the_interface_that_programs_read() -> None:
    answer = report(*LLAMA, "--dp", "8", "--zero", "3")
    assert answer["plan"]["dp"] == 8
    assert answer["parameters"]["total"] == 8_030_261_248
    for stage in answer["memory"]:
        assert sum(stage[part] for part in PARTS) == stage["total_bytes"] < stage["device_bytes"]
    assert answer["peak_memory_bytes"] == max(stage["total_bytes"] for stage in answer["memory"])
    assert answer["fits"] is (answer["peak_memory_bytes"] <= answer["usable_memory_bytes"])
    assert {"step_time_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu"} <= set(answer["step"])
    assert answer["cluster"]["num_nodes"] == 1
    assert answer["training"]["seq_length"] == 8192
    assert answer["largest_layer"]["fits"] is True


def test_every_pipeline_stage_is_shown_and_the_parts_are_named() -> None:
    status, stdout, _ = run(*LLAMA, "--pp", "4", "--dp", "2")
    assert status == 0
    assert all(f"stage  {stage} " in stdout for stage in range(4))
    words = ("parameters", "gradients", "optimizer", "activations", "workspace", "shows 0")
    assert all(word in stdout for word in words)
    assert "max_memory_allocated" in stdout
    assert "nvidia-smi" in stdout


def test_what_would_fit_names_every_zero_stage_and_recompute() -> None:
    rows = report(*LLAMA, "--seq-len", "4096")["what_fits"]
    assert {(row["zero_stage"], row["recompute"]) for row in rows} == {
        (stage, kind) for stage in range(4) for kind in ("none", "selective", "selective_ops", "full")
    }
    _, stdout, _ = run(*LLAMA, "--seq-len", "4096", "-v")
    assert "What would fit on 8 GPUs" in stdout
    assert "Largest layer: head, 525 M parameters" in stdout


def test_offload_says_what_the_host_has_to_hold() -> None:
    answer = report(*LLAMA, "--dp", "8", "--offload", "optimizer")
    assert answer["host_bytes_per_node"] == 8 * answer["memory"][0]["host_bytes"] > 0
    _, stdout, _ = run(*LLAMA, "--dp", "8", "--offload", "optimizer")
    assert "Host memory for offload" in stdout
    assert report(*LLAMA, "--dp", "8")["host_bytes_per_node"] == 0


def test_the_longest_sequence_by_default_is_the_same_as_given(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY | {"model_type": "mistral", "sliding_window": 64}), encoding="utf-8")
    default, given = (
        report("estimate", str(config), "--profile", "dgx-h100", *more) for more in ((), ("--seq-len", "256"))
    )
    assert (default["memory"], default["step"]) == (given["memory"], given["step"])
    searched, short, long = (
        load_model(str(config), seq_length=length, finds_length=finds)
        for length, finds in ((32, True), (32, False), (256, False))
    )
    assert searched == long != short, "--find longest-sequence keeps the masks of sequences beyond the window"


def test_the_plan_decides_how_many_machines_there_are_unless_nodes_says() -> None:
    assert report(*LLAMA, "--dp", "24", "--zero", "3")["cluster"]["num_nodes"] == 3
    status, _, stderr = run(*LLAMA, "--dp", "24", "--nodes", "2")
    assert status == 2
    assert "24 ranks, and 2 x dgx-h100 has 16 GPUs" in stderr
    assert "use --nodes 3" in stderr


def test_a_plan_file_brings_its_training_and_options_come_first(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    recommend = ["recommend", *LLAMA[1:], "--seq-len", "2048", "--global-batch", "16", "--precision", "fp32"]
    assert run(*recommend, "-o", str(plan))[0] == 0
    answer = report(*LLAMA[:-2], "--plan", str(plan))
    assert (answer["training"]["seq_length"], answer["training"]["precision"]) == (2048, "fp32")
    assert answer["training"]["global_batch_size"] == 16
    assert report(*LLAMA[:-2], "--plan", str(plan), "--precision", "bf16")["training"]["precision"] == "bf16"
    beside = {
        "--sample-len 600 --packed": {"sample_length": 600, "packs_samples": True},
        "--offload-activations": {"offloads_activations": True},
        "--precision fp8": {"precision": "bf16", "linear_precision": "fp8"},
        "--stack dropout=0.1": {"stack": {"dropout": 0.1}},
    }
    for words, fields in beside.items():
        training = report(*LLAMA[:-2], "--plan", str(plan), *words.split())["training"]
        assert {name: training[name] for name in fields} == fields
    status, _, stderr = run(*LLAMA[:-2], "--plan", str(plan), "--dp", "4")
    assert status == 2
    assert "--dp beside --plan" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "tp=3: 3 does not divide the 32 attention and 8 key-value heads of llama-3-8b"),
        (["--pp", "33"], "33 pipeline stages for the 32 blocks"),
        (["--cp", "7"], "cp=7 does not divide the 8192 tokens of a sequence"),
        (["--cp", "32", "--seq-len", "8200"], "cp=32 does not divide the 8200 tokens"),
        (["--tp", "2", "--sequence-parallel", "--seq-len", "8191"], "tp=2 does not divide the 8191 tokens of a rank"),
        (["--zero", "1"], "zero_stage=1 has nothing to shard over with dp=1"),
        (["--dp", "2", "--global-batch", "7"], "global_batch_size=7 is not a multiple"),
        (["--virtual-stages", "2"], "virtual_pipeline_size=2 with pp=1"),
        (["--schedule", "gpipe"], "a schedule goes with pp > 1 alone"),
        (["--plan", "absent.json"], "cannot read the plan absent.json"),
    ],
)
def test_a_plan_that_cannot_be_is_told_in_one_sentence(arguments: list[str], message: str) -> None:
    status, stdout, stderr = run(*LLAMA, *arguments)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e3", "99999999999999999999", ""])
@pytest.mark.parametrize("option", ["--seq-len", "--dp", "--micro-batch", "--nodes", "--global-batch"])
def test_numbers_that_no_machine_has_are_refused(option: str, value: str) -> None:
    status, stdout, stderr = run(*LLAMA, f"{option}={value}")
    assert (status, stdout) == (2, "")
    assert option in stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "the field 'hidden_size' is missing"),
        ({"hidden_size": "wide"}, "hidden_size='wide', expected a whole number above 0"),
        ({"vocab_size": float("nan")}, "vocab_size=nan, expected a whole number"),
        ({"vocab_size": float("inf")}, "vocab_size=inf, expected a whole number"),
        ({"intermediate_size": -4}, "intermediate_size=-4, expected a whole number"),
        ({"hidden_size": 10**30}, "expected at most 1000000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"quantization_config": {"bits": 4}}, "a quantized checkpoint"),
        ({"model_type": "unheard-of"}, "no reader knows model_type='unheard-of'"),
        ({"model_type": "own", "auto_map": {"AutoModel": "trap.Model"}}, "code that auto_map names is never executed"),
    ],
)
def test_a_wrong_configuration_is_told_by_its_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | changes), encoding="utf-8")
    status, stdout, stderr = run("estimate", str(path), "--profile", "dgx-h100")
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert "hint:" in stderr
    assert "Traceback" not in stderr


def test_a_folder_without_a_configuration_is_told(tmp_path: Path) -> None:
    status, _, stderr = run("estimate", str(tmp_path), "--profile", "dgx-h100")
    assert status == 2
    assert "holds no config.json" in stderr


@pytest.mark.parametrize(
    ("factory", "message", "line"),
    [
        ("build_with", "cannot be called without arguments: missing a required argument: 'size'", None),
        ("build_on_gpu", "failed while the model was built", 'return Model().to("cuda")'),
        ("build_from_file", "FileNotFoundError", 'return open("weights that are not there")'),
        ("absent", "defines no 'absent'", None),
    ],
)
def test_a_factory_that_fails_is_shown_with_its_own_error(
    script: str, factory: str, message: str, line: str | None
) -> None:
    pytest.importorskip("torch", reason="factories need torch")
    status, stdout, stderr = run("estimate", f"{script}:{factory}", "--profile", "dgx-h100")
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert line is None or (line in stderr and "train.py, line" in stderr)


def test_a_trace_stands_beside_the_estimate_part_by_part(script: str) -> None:
    pytest.importorskip("torch", reason="a trace runs the engine")
    model = ["estimate", f"{script}:build", "--profile", "dgx-h100", "--seq-len", "128"]
    plan = ["--pp", "2", "--global-batch", "64", "--micro-batch", "16", "--precision", "fp32", "--trace-memory"]
    answer = report(*model, *plan)
    assert [stage["pipeline_stage"] for stage in answer["traced_memory"]] == [0, 1]
    for estimated, traced in zip(answer["predicted_for_trace"], answer["traced_memory"], strict=True):
        assert sum(traced[part] for part in PARTS) == traced["total_bytes"]
        assert estimated["total_bytes"] == pytest.approx(traced["total_bytes"], rel=0.1)
    status, stdout, _ = run(*model, *plan)
    assert status == 0
    assert all(word in stdout for word in ("predicted", "traced peaks: stage 0 in ", "errors in parts of the peak"))


def test_a_trace_of_a_plan_that_the_runtime_cannot_run_is_an_error(script: str) -> None:
    pytest.importorskip("torch", reason="a trace runs the engine")
    too_few_micro_batches = ["--pp", "2", "--schedule", "1f1b", "--global-batch", "1"]
    status, _, stderr = run(
        *["estimate", f"{script}:build", "--profile", "dgx-h100", "--seq-len", "64", "--trace-memory"],
        *too_few_micro_batches,
    )
    assert status == 2
    assert "this runtime cannot execute the plan" in stderr


def test_a_known_family_is_estimated_without_torch() -> None:
    code = (
        "import sys; from paraplan.cli.main import app;"
        f"app({[*LLAMA, '--dp', '8']!r}, standalone_mode=False);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_hybrid_sharding_and_data_parallel_in_one_process_are_estimated_from_options() -> None:
    hybrid = ["gpt2-xl", "--profile", "dgx-a100", "--dp", "32", "--zero", "3", "--zero-shards", "8"]
    assert "ZeRO-3 in groups of 8" in run("estimate", *hybrid)[1]
    shared = ["gpt2", "--profile", "titan-rtx-x2", "--precision", "fp32", "--micro-batch", "8"]
    assert "DataParallel over 2 GPUs" in run("estimate", *shared, "--devices-per-process", "2")[1]
    status, _, stderr = run("estimate", *shared, "--devices-per-process", "3")
    assert status == 2
    assert "hint: use --devices-per-process 2" in stderr


def test_compiled_blocks_are_faster_keep_less_and_stand_in_the_plan(tmp_path: Path) -> None:
    options = ["gpt2", "--profile", "dgx-a100", "--seq-len", "1024"]
    plain = json.loads(run("estimate", *options, "--micro-batch", "8", "--json")[1])
    compiled = json.loads(run("estimate", *options, "--micro-batch", "8", "--compile", "--json")[1])
    assert compiled["step"]["step_time_s"] < plain["step"]["step_time_s"]
    assert compiled["peak_memory_bytes"] < plain["peak_memory_bytes"]

    path = tmp_path / "plan.json"
    status, stdout, _ = run("recommend", *options, "--global-batch", "64", "--compile", "-o", str(path))
    assert status == 0
    assert "bf16, adamw, sdpa attention, compiled blocks" in stdout
    assert json.loads(path.read_text(encoding="utf-8"))["training"]["compiled"] is True
    assert "compiled blocks" in run("estimate", "gpt2", "--profile", "dgx-a100", "--plan", str(path))[1]


def test_a_framework_is_a_name_or_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    own = {"sources": [{"source": "train.py", "source_kind": "source code"}], "gradient_bytes": 2}
    path.write_text(json.dumps({"name": "mine", "title": "My trainer", "based_on": "fsdp", "storage": own}))
    arguments = ["estimate", "gpt2", "--profile", "dgx-a100", "--seq-len", "1024", "--dp", "8", "--framework"]
    status, stdout, _ = run(*arguments, str(path))
    assert (status, stdout.splitlines()[0]) == (0, "Predicted for My trainer, which paraplan does not launch:")
    assert f" --framework {path}" in stdout.splitlines()[-1]  # the search is for it too
    status, _, stderr = run(*arguments, "megatron-cor")
    assert status == 2
    assert "there is no framework 'megatron-cor'" in stderr
    assert "did you mean megatron-core" in stderr


def test_selective_recompute_of_attention_that_keeps_no_scores_is_said_to_be_none() -> None:
    options = ("estimate", "gpt2", "--profile", "dgx-a100", "--dp", "8", "--recompute", "selective")
    said = "selective recompute drops what attention keeps of its scores, and sdpa attention keeps none"
    notes = json.loads(run(*options, "--json")[1])["warnings"]
    assert any(note.startswith(said) and note.endswith("selective_ops or full would keep less") for note in notes)
    eager = json.loads(run(*options, "--attention", "eager", "--json")[1])["warnings"]
    assert not any(note.startswith("selective recompute") for note in eager)


def test_short_samples_count_by_their_own_tokens_padded_and_packed() -> None:
    words = [*LLAMA, "--dp", "8", "--zero", "3", "--global-batch", "64"]
    plain, short = report(*words), report(*words, "--sample-len", "2048")
    rate = plain["step"]["tokens_per_s_per_gpu"]
    assert plain["effective_tokens_per_s_per_gpu"] == {"padded": rate, "packed": rate}
    assert short["step"] == plain["step"]
    assert short["effective_tokens_per_s_per_gpu"] == {"padded": rate / 4, "packed": rate}
    said = " ".join(run(*words, "--sample-len", "2k")[1].split())
    assert "Samples of 2048 tokens: padded to 8192," in said
    assert "a step has 256 samples in place of 64" in said
    for length in ([], ["--sample-len", "8192"], ["--sample-len", "9000"]):
        assert "Samples" not in run(*words, *length)[1]


def test_utilization_names_its_peak_where_data_sheets_state_a_sparse_one() -> None:
    words = ["estimate", "llama-3-8b", "--dp", "8", "--zero", "3", "--seq-len", "4096", "--profile"]
    dense = "MFU counts against 989 TFLOP/s, the dense rate: data sheets state 2 times that too"
    assert dense in " ".join(run(*words, "dgx-h100")[1].split())
    assert "MFU counts against 312 TFLOP/s" in run(*words, "dgx-a100")[1]
    for others in (["dgx-1-v100", "--precision", "fp16"], ["dgx-h100", "--precision", "fp32"]):
        assert "the dense rate" not in run(*words, *others)[1]


def test_what_does_not_fit_names_the_recompute_and_the_micro_batch_that_let_it() -> None:
    words = ["estimate", "gpt-oss-120b", "--profile", "dgx-h100", "--nodes", "8", "--framework", "megatron-bridge"]
    words += ["--dp", "16", "--pp", "4", "--ep", "8", "--zero", "1", "--seq-len", "4096", "--global-batch", "512"]
    said = " ".join(run(*words, "--micro-batch", "4")[1].split())
    assert "does not fit" in said
    full, smaller = (
        report(*words, *each)
        for each in (("--micro-batch", "4", "--recompute", "full"), ("--micro-batch", "1", "--recompute", "none"))
    )
    assert full["fits"]
    assert smaller["fits"]
    assert f"Fits with --recompute full: {format_bytes(full['peak_memory_bytes'])}" in said
    assert f"with --micro-batch 1: {format_bytes(smaller['peak_memory_bytes'])}" in said
    # What NVIDIA's recipe of these 64 GPUs runs: micro-batches of 1, layernorm and moe_act recomputed.
    assert report(*words, "--micro-batch", "1", "--recompute", "selective_ops")["fits"]


def test_ep_counts_ranks_of_tp_where_the_framework_does() -> None:
    words = ["estimate", "qwen3-235b-a22b", "--profile", "dgx-h100", "--nodes", "32", "--dp", "16", "--tp", "2"]
    words += ["--pp", "8", "--ep", "32", "--sequence-parallel", "--seq-len", "4096", "--global-batch", "2048"]
    words += ["--zero", "1"]
    assert report(*words, "--framework", "megatron-bridge")["plan"]["ep"] == 16
    said = run(*words, "--framework", "megatron-bridge")[1]
    assert "tensor 2 x pipeline 8 (1F1B) x expert 32 x data 16" in said
    status, _, refused = run(*words, "--framework", "megatron-core")
    assert status == 2
    assert "Megatron-Core divides each expert over tp=2 too" in refused


def test_padding_loads_one_rank_of_experts_and_packed_samples_load_all() -> None:
    words = ["estimate", "qwen3-30b-a3b", "--profile", "8xh100", "--dp", "8", "--ep", "8"]
    words += ["--global-batch", "64", "--seq-len", "4096", "--attention", "flash"]
    plain, short = report(*words), report(*words, "--sample-len", "128")
    packed, trained = report(*words, "--sample-len", "128", "--packed"), report(*words, "--expert-load", "trained")
    assert short["step"]["step_time_s"] > 1.2 * plain["step"]["step_time_s"]
    both = short["effective_tokens_per_s_per_gpu"]
    assert both["packed"] == pytest.approx(packed["step"]["tokens_per_s_per_gpu"])
    assert packed["step"]["step_time_s"] < trained["step"]["step_time_s"]  # the same load, and less to attend to
    assert both["padded"] == pytest.approx(
        short["step"]["tokens_per_s_per_gpu"] * 128 / short["training"]["seq_length"]
    )
    assert any("as the tokens that pad samples all go to the same" in note for note in short["warnings"])


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("dpo", "counted: a reference model in 16 bits beside the one that trains"),
        ("dpo:precomputed", "64 sequences of a step are 32 pairs"),
        ("grpo:completion=1024", "Not modeled: prompts, scheduling, rewards, sending weights"),
    ],
)
def test_tasks_say_what_was_counted(task: str, words: str) -> None:
    options = [*LLAMA, "--dp", "8", "--zero", "3", "--micro-batch", "2", "--global-batch", "64", "--task", task]
    status, said, errors = run(*options)
    assert (status, errors) == (0, "")
    assert words in " ".join(said.split())
    assert task in said


def test_a_load_is_a_number_or_a_word() -> None:
    for wrong in ("heavy", "0.5", "nan"):
        status, _, errors = run(*LLAMA, "--expert-load", wrong)
        assert status == 2
        assert "such as 1.5, nor the word 'trained'" in " ".join(errors.replace("│", " ").split())


def test_an_unknown_task_is_an_error() -> None:
    status, _, errors = run(*LLAMA, "--task", "rlvr")
    assert status == 2
    assert errors.startswith(
        "error: --task does not know 'rlvr'\nhint: use sft, dpo, dpo:precomputed, orpo, kto, reward"
    )


def test_a_task_that_is_not_priced_says_what_is_missing_and_what_is_nearest() -> None:
    status, _, errors = run(*LLAMA, "--task", "ppo")
    assert status == 2
    assert errors == (
        "error: --task ppo is not priced: it has reward, value and reference models beside the policy\n"
        "hint: --task grpo is the nearest that is priced\n"
    )


def test_the_load_that_plans_of_mixtures_assume_is_told_unless_it_is_stated() -> None:
    options = (
        "estimate",
        "mixtral-8x7b",
        "--profile",
        "dgx-h100",
        "--framework",
        "megatron-core",
        "--dp",
        "8",
        "--zero",
        "1",
        "--json",
    )

    def told(*more: str) -> list[str]:
        return [note for note in json.loads(run(*options, *more)[1])["warnings"] if "--expert-load" in note]

    assert told("--ep", "8")[0].startswith("the busiest of 8 ranks of experts is taken to have 1.15 times the mean")
    assert told("--ep", "8", "--expert-load", "1") == []
    assert told() == []


def test_the_search_that_is_named_is_for_the_same_training() -> None:
    options = ["--seq-len", "512", "--precision", "fp32", "--train", "lora:r=8", "--compile", "--tp", "2"]
    _, stdout, _ = run("estimate", "llama-3-8b", "--profile", "dgx-h100", "--global-batch", "8", *options)
    (line,) = (line.strip() for line in stdout.splitlines() if line.startswith("  paraplan recommend"))
    assert line == (
        "paraplan recommend llama-3-8b --profile dgx-h100 --seq-len 512 --global-batch 8 --precision fp32 "
        "--train lora:r=8 --compile"
    )


@pytest.mark.parametrize(
    ("framework", "degrees", "zero_stage", "splits_sequences"),
    [
        ("paraplan", ["--dp", "4", "--tp", "2"], 0, False),
        ("torchtitan", ["--dp", "4", "--tp", "2"], 3, True),
        ("torchtitan", ["--dp", "4", "--pp", "2"], 1, False),
        ("megatron-bridge", ["--dp", "4", "--tp", "2"], 1, True),
        ("megatron-core", ["--dp", "4", "--tp", "2"], 0, True),
        ("fsdp", ["--dp", "8"], 3, False),
        ("fsdp", ["--tp", "8"], 0, False),
    ],
)
def test_what_nobody_says_is_taken_from_the_framework_and_said(
    framework: str, degrees: list[str], zero_stage: int, *, splits_sequences: bool
) -> None:
    words = [*LLAMA, *degrees, "--framework", framework, "--global-batch", "16"]
    status, stdout, stderr = run(*words, "--json")
    plan = json.loads(stdout)["plan"]
    assert (status, plan["zero_stage"], plan["sequence_parallel"]) == (0, zero_stage, splits_sequences)
    assert (f"--zero {zero_stage}" in stderr) == (zero_stage > 0)
    assert ("--no-sequence-parallel" in stderr) == splits_sequences
    assert "the default of" not in run(*words, "--zero", "0", "--no-sequence-parallel")[2]


@pytest.mark.parametrize(("task", "size"), [("dpo", 2), ("embedding", 2), ("kto", 1), ("sft", 1)])
def test_a_plan_without_a_micro_batch_has_the_smallest_of_its_task(task: str, size: int) -> None:
    plan = report("estimate", "gpt2", "--profile", "8xa100", "--dp", "8", "--task", task)["plan"]
    assert (plan["micro_batch_size"], plan["num_microbatches"]) == (size, 1)
