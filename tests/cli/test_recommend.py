from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from factory_script import FACTORY
from typer.testing import CliRunner

from paraplan.api.recommendations import largest_model
from paraplan.cli.main import app
from paraplan.errors import UnsupportedPlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.launch.request import read_plan_file
from paraplan.plan.files import PlanFile
from paraplan.search.constraints import Constraints

LLAMA = ["llama-3-8b", "--profile", "dgx-h100", "--seq-len", "4096"]
RECOMMEND = ["recommend", *LLAMA, "--global-batch", "64"]
PLAIN = ["--tp", "1", "--pp", "1", "--cp", "1"]
"""Less to search, where any plan will do."""

LARGEST = ["--find", "largest-model", "--profile", "dgx-b200", "--nodes", "128", "--seq-len", "1k"]
LARGEST += ["--tp", "8", "--pp", "8", "--cp", "1", "--zero", "1", "--recompute", "full", "--micro-batch", "1"]
"""No model is larger than what this trains: what is found on smaller machines costs a search for every model."""


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


known = functools.cache(run)
"""What commands without files answer, which several tests look at."""


def test_recommend_prints_the_interface_that_programs_read() -> None:
    status, stdout, stderr = known(*RECOMMEND, "--json")
    answer = json.loads(stdout)
    assert (status, stderr) == (0, "")
    assert {"decisions", "plan", "estimate", "candidates", "rejections", "search", "commands"} <= set(answer)
    assert set(answer["decisions"][0]) == {"rule", "outcome", "because"}
    assert set(answer["rejections"][0]) == {"reason", "count"}
    assert answer["search"]["plans_considered"] > len(answer["candidates"])
    assert answer["estimate"]["fits"] is True
    assert answer["plan"]["dp"] * answer["plan"]["tp"] * answer["plan"]["pp"] * answer["plan"]["cp"] == 8


def test_estimate_prints_the_interface_that_programs_read() -> None:
    status, stdout, _ = run("estimate", *LLAMA, "--dp", "4", "--pp", "2", "--global-batch", "64", "--json")
    answer = json.loads(stdout)
    assert status == 0
    assert {"plan", "parameters", "memory", "fits", "peak_memory_bytes", "step"} <= set(answer)
    assert answer["parameters"]["total"] == 8_030_261_248
    assert [row["pipeline_stage"] for row in answer["memory"]] == [0, 1]
    assert answer["plan"]["num_microbatches"] == 16
    assert {"step_time_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu"} <= set(answer["step"])


def test_the_text_names_the_plan_the_tree_and_the_command() -> None:
    status, stdout, _ = known(*RECOMMEND)
    assert status == 0
    assert sum(not line.startswith(" ") for line in stdout.splitlines()) < 16  # the others go on where a line has ended
    assert "Faster    --compile: " in stdout
    for label in ("Model ", "Training ", "Machine ", "Plan ", "Memory ", "Speed "):
        assert any(line.startswith(label) for line in stdout.splitlines())
    assert "paraplan launch" in stdout
    details = ("Decision tree", "does the model fit one GPU?", "Ruled out", "Memory per GPU")
    assert not any(expected in stdout for expected in details)
    verbose = run(*RECOMMEND, "-v")[1]
    assert all(expected in verbose for expected in details)


def test_memory_can_be_kept_free_and_a_roomier_plan_is_named_where_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # where lines take most room, it stays
    job = ["recommend", "llama-3-8b", "--profile", "dgx-h100", "--seq-len", "6144", "--global-batch", "8"]
    full = json.loads(run(*job, "--json")[1])["estimate"]
    assert full["peak_memory_bytes"] > 0.95 * full["usable_memory_bytes"]
    words = " ".join(run(*job)[1].split())
    assert "Roomier" in words
    assert "risk of running out" in words
    free = json.loads(run(*job, "--memory-margin", "10%", "--json")[1])["estimate"]
    assert free["usable_memory_bytes"] == pytest.approx(0.9 * full["usable_memory_bytes"], rel=1e-6)
    assert free["peak_memory_bytes"] <= free["usable_memory_bytes"]
    status, _, stderr = run(*job, "--memory-margin", "95")
    assert (status, "--memory-margin 95 is not a percentage" in stderr) == (2, True)


def test_what_a_plan_wastes_is_said_with_its_cause() -> None:
    few = ["recommend", "llama-3-70b", "--profile", "dgx-h100", "--nodes", "32", "--seq-len", "8192"]
    words = " ".join(run(*few, "--global-batch", "32", "--cp", "1", "--tp", "4", "--pp", "16")[1].split())
    assert "Caution" in words
    assert "of the step is waiting in the pipeline (32 sequences for 256 GPUs)" in words
    odd = ["recommend", "gpt2", "--profile", "dgx-h100", "--gpus-per-node", "6", "--seq-len", "512"]
    words = " ".join(run(*odd, "--global-batch", "64")[1].split())
    assert "6 GPUs do not divide 64 sequences; a global batch of 60 or 66 allows plain data parallelism" in words
    full = ["estimate", "llama-3-8b", "--profile", "dgx-h100", "--seq-len", "4096", "--dp", "8", "--zero", "3"]
    words = " ".join(run(*full, "--micro-batch", "2")[1].split())
    assert re.search(r"has to give some back, \d+% risk of running out", words)


def test_the_plan_file_holds_plan_model_training_cluster_and_estimate(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    status, stdout, _ = run(*RECOMMEND, "-o", str(path))
    file = PlanFile.from_json(path.read_text(), source=str(path))
    assert status == 0
    assert file.model is not None
    assert file.model.num_parameters == 8_030_261_248
    assert file.training is not None
    assert file.plan.global_batch_size == file.training.global_batch_size == 64
    assert file.cluster is not None
    assert file.cluster.gpus_per_node == 8
    assert file.estimate is not None
    assert f"paraplan launch --plan {path} train.py" in stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_saved_plan_is_estimated_as_it_was_recommended(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _, stdout, _ = run(*RECOMMEND, "-o", str(path), "--json")
    recommended = json.loads(stdout)["estimate"]
    _, stdout, _ = run("estimate", *LLAMA, "--plan", str(path), "--json")
    assert json.loads(stdout)["step"] == recommended["step"]


def test_a_model_from_a_factory_gets_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    status, stdout, stderr = run(
        "recommend", f"{path}:build", "--profile", "cpu", "--seq-len", "32", "--global-batch", "8", "--json"
    )
    assert (status, stderr) == (0, "")
    answer = json.loads(stdout)
    assert answer["estimate"]["parameters"]["total"] == 256 * 64 + 4 * (64 * 256 * 2 + 256 + 64) + 64 * 256 + 256


@pytest.mark.parametrize(
    ("arguments", "message", "expected_status"),
    [
        (["no-such-model", *LLAMA[1:]], "no-such-model", 2),
        (["llama-3-8b", "--profile", "dgx-h1000"], "dgx-h100", 2),
        (["llama-3-8b", "--profile", "dgx-h100", "--nodes", "0"], "--nodes", 2),
        (["llama-3-8b", "--profile", "dgx-h100", "--gpus-per-node", "9"], "8", 2),
        (["llama-3-8b", "--profile", "dgx-h100", "-o", "/no/such/folder/plan.json"], "cannot write", 2),
        (["llama-3-8b", "--profile", "1xrtx-3060", "--offload", "none"], "no plan fits", 1),
        (["gpt2", "--profile", "dgx-1-v100", "--precision", "bf16"], "no bf16 arithmetic", 2),
        (["gpt2", "--profile", "dgx-1-p100", "--precision", "bf16"], "use --precision fp16 or --precision fp32", 2),
        (["llama-3-8b", "--profile", "dgx-h100", "--tp", "3"], "use --tp 1, 2, 4 or 8", 2),
        (["gpt2", "--profile", "dgx-h100", "--seq-len", "1025"], "1024 learned positions", 2),
        (["gpt2", "--profile", "dgx-h100", "--global-batch", "9" * 21], "Invalid value for '--global-batch'", 2),
        (["gpt2", "--profile", "rtx-3090-x2", "--tokens", "inf"], "Invalid value for '--tokens'", 2),
        (["gpt2", "--profile", "rtx-3090-x2", "--nodes", "100000"], "no plan suits gpt2 on 200000 GPUs", 1),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], message: str, expected_status: int) -> None:
    status, stdout, stderr = run("recommend", "--global-batch", "64", *arguments)
    assert status == expected_status
    assert stdout == ""
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_broken_config_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"')
    status, _, stderr = run("recommend", str(path), "--profile", "dgx-h100", "--global-batch", "8")
    assert status == 2
    assert "config.json" in stderr


def test_an_unknown_model_is_named_before_what_else_is_missing() -> None:
    status, _, stderr = run("recommend", "nothere")
    assert status == 2
    assert "'nothere' is neither a file" in stderr


def test_a_batch_that_is_not_given_is_assumed_and_said() -> None:
    status, stdout, stderr = run("recommend", *LLAMA, "--json")
    assert status == 0
    assert json.loads(stdout)["estimate"]["training"]["global_batch_size"] == 64
    assert "a global batch of 64 is assumed, 8 sequences a GPU" in stderr


def test_numbers_are_read_as_people_write_them() -> None:
    small = ["recommend", "gpt2", "--profile", "8xh100", "--global-batch", "64", "--tp", "1", "--pp", "1", "--cp", "1"]
    whole = run(*small, "--tokens", "1e12", "--price", "2.5")[1]
    assert run(*small, "--tokens", "1T", "--price", "$2.5")[1].splitlines()[:-4] == whole.splitlines()[:-4]
    long = json.loads(run("recommend", "gpt2", "--profile", "1xh100", "--seq-len", "1k", "--json")[1])
    assert long["estimate"]["training"]["seq_length"] == 1024
    for words in (["--tokens", "lots"], ["--price", "-1"], ["--seq-len", "k"]):
        assert run(*RECOMMEND, *words)[0] == 2


@pytest.mark.parametrize("command", [("recommend", "--global-batch", "8"), ("estimate", "--dp", "8", "--zero", "3")])
def test_a_sequence_beyond_the_models_length_is_remarked_and_planned(command: tuple[str, ...]) -> None:
    arguments = [command[0], "llama-3-8b", "--profile", "dgx-h100", *command[1:]]
    status, stdout, stderr = run(*arguments, "--seq-len", "16384", "--json")
    assert (status, stderr) == (0, "")
    (warning,) = json.loads(stdout)["warnings"]
    assert "16384 tokens are longer than the 8192" in warning
    assert json.loads(run(*arguments, "--seq-len", "8192", "--json")[1])["warnings"] == []
    words = " ".join(run(*arguments, "--seq-len", "16384")[1].split())
    assert warning in words


def test_a_plan_for_another_framework_is_estimated_by_its_profile(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    options = ["--profile", "dgx-h100", "--nodes", "2"]
    made = run("recommend", "mixtral-8x7b", *options, "--seq-len", "4096", "--global-batch", "64", "--ep", "4",
               "--framework", "megatron-core", "-o", path, "--json")  # fmt: skip
    step = json.loads(made[1])["estimate"]["step"]
    answer = json.loads(run("estimate", "mixtral-8x7b", *options, "--plan", path, "--json")[1])
    assert (answer["plan"]["ep"], answer["step"]) == (4, step)
    (note,) = answer["warnings"]
    assert note.startswith("the busiest of 4 ranks of experts")
    own = json.loads(run("estimate", "mixtral-8x7b", *options, "--plan", path, "--framework", "paraplan", "--json")[1])
    assert own["step"] != step
    assert not any("does not execute" in warning for warning in own["warnings"])


@pytest.mark.with_all  # test_what_helps prices recompute and offload free
def test_a_plan_that_offloads_says_what_it_costs_and_what_would_do_without() -> None:
    job = ["recommend", "mixtral-8x7b", "--profile", "dgx-h100", "--seq-len", "4096", "--global-batch", "64"]
    small = [*job, *PLAIN]
    answer = json.loads(run(*small, "--json")[1])
    assert answer["plan"]["offload"] == "optimizer"
    (warning,) = answer["warnings"]
    assert warning.endswith("It would fit with 16 GPUs (--nodes 2) or --optimizer adamw_8bit")
    for way in (["--nodes", "2"], ["--optimizer", "adamw_8bit"]):
        other = json.loads(run(*small, *way, "--json")[1])
        assert (other["plan"]["offload"], other["warnings"]) == ("none", [])
    assert json.loads(run(*small, "--offload", "optimizer", "--json")[1])["warnings"] == []
    # The fewest GPUs are those that need no offload only where there are as many.
    few = ["--cp", "1", "--tp", "1", "--zero", "3"]
    fewest = json.loads(run(*job, *few, "--find", "fewest-gpus", "--json")[1])
    assert fewest["plan"]["offload"] != "none"


def test_a_simpler_plan_says_what_it_costs_and_the_fastest_is_to_be_had() -> None:
    job = ["recommend", "llama-3-8b", "--profile", "dgx-h100", "--seq-len", "4096", "--global-batch", "64"]
    answer = json.loads(known(*job, "--json")[1])
    assert answer["fastest"]["step"]["step_time_s"] < answer["estimate"]["step"]["step_time_s"]
    both = ["--tp", "1", "--cp", "1", "--micro-batch", "1"]  # less to search
    text = run(*job, *both, "--top", "1", "--explain")[1]
    table = text.partition("fastest first")[2].partition("Ruled out")[0]
    assert table.count("GiB") == 3  # the fastest, the recommended one, which is plain FSDP, and DDP, which is too large
    words = " ".join(text.split())
    assert "Why the best beats the second" in words
    assert "slower, and chosen because it is simpler" in words
    assert "chosen over dp4 x pp2, ZeRO-1, interleaved_1f1b" in words
    assert json.loads(run(*job, "--objective", "fastest", "--json")[1])["plan"] == answer["fastest"]["plan"]


@pytest.mark.with_all  # a line of tables alone
def test_plans_that_differ_in_cp_for_dp_alone_are_counted_in_a_line() -> None:
    small = ["recommend", "mixtral-8x7b", "--profile", "dgx-h100", "--seq-len", "4096", "--global-batch", "64"]
    small += ["--pp", "1"]  # less to search
    shown, answer = run(*small, "-v")[1], json.loads(run(*small, "--json")[1])
    table = shown.partition("fastest first")[2].partition("Ruled out")[0]
    hidden = int(table.partition(" similar plan")[0].split()[-1])
    # The recommended plan may be of the same kind as a faster one, which alone is a candidate then.
    beside = {json.dumps(plan) for plan in (answer["plan"], *(one["plan"] for one in answer["baselines"]))} - {
        json.dumps(one["plan"]) for one in answer["candidates"]
    }
    assert table.count("GiB") + hidden - len(beside) == len(answer["candidates"]) == 10


def test_experts_go_over_ranks_where_the_framework_has_it() -> None:
    mixtral = ["recommend", "mixtral-8x7b", "--profile", "dgx-h100", "--nodes", "2", "--seq-len", "4096"]
    mixtral += ["--global-batch", "64", "--ep", "8"]
    status, stdout, stderr = run(*mixtral, "--framework", "megatron-core", "--json")
    assert (status, stderr) == (0, "")
    answer = json.loads(stdout)
    assert answer["plan"]["ep"] == 8
    assert answer["estimate"]["step"]["expert_parallel_s"] > 0
    status, _, stderr = run(*mixtral, "--framework", "fsdp")
    assert status == 2
    assert "--ep 8: FSDP does not spread experts over ep" in stderr
    assert "Megatron-Core" in stderr


def test_planning_a_known_model_never_imports_torch() -> None:
    probe = (
        "import json, sys\nfrom paraplan.cli.main import app\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try:\n        app(words)\n    except SystemExit as end:\n        assert end.code == 0, (words, end.code)\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules, words"
    )
    commands = [["topo", "--profile", "dgx-h100", "--json"], ["estimate", *LLAMA, "--json"], [*RECOMMEND, "--json"]]
    command = [sys.executable, "-c", probe, json.dumps(commands)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_every_recommended_plan_has_what_the_options_fix() -> None:
    answer = json.loads(run(*RECOMMEND, "--tp", "4", "--zero", "1", "--micro-batch", "2", "--json")[1])
    plans = [answer["plan"], *(candidate["plan"] for candidate in answer["candidates"])]
    assert {(plan["tp"], plan["zero_stage"], plan["micro_batch_size"]) for plan in plans} == {(4, 1, 2)}


def test_explain_sets_the_parts_of_the_best_and_the_second_side_by_side() -> None:
    words = ["recommend", "gpt2", "--profile", "cpu", "--seq-len", "128", "--global-batch", "8"]
    status, stdout, _ = run(*words, "--explain", "--json")
    found = json.loads(stdout)["explanation"]
    assert status == 0
    assert sum(part["best_s"] for part in found["parts"]) == pytest.approx(found["best_step_s"])
    assert sum(part["second_s"] for part in found["parts"]) == pytest.approx(found["second_step_s"])


def test_the_front_of_memory_and_speed_trades_one_for_the_other() -> None:
    front = json.loads(run(*RECOMMEND, "--pareto", "--json")[1])["front"]
    seconds, peaks = ([one[name] for one in front] for name in ("step_time_s", "peak_memory_bytes"))
    assert len(front) > 2
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)


def test_an_earlier_plan_is_compared_after_gpus_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    few = [*RECOMMEND, "--tp", "1", "--cp", "1", "--micro-batch", "1"]
    run(*few, "-o", str(path))
    fewer = json.loads(run(*few, "--gpus-per-node", "4", "--like", str(path), "--json")[1])["comparison"]
    assert any("4 lost" in sentence for sentence in fewer["because"])
    assert fewer["changes"]
    assert fewer["here_step_s"] is None
    assert fewer["then_step_s"] > 0
    same = json.loads(run(*few, "--like", str(path), "--json")[1])["comparison"]
    assert same["changes"] == []
    assert same["here_step_s"] == pytest.approx(same["then_step_s"])
    slow = ["--dp", "8", "--zero", "1", "--offload", "optimizer"]
    assert run(*few, *slow, "-o", str(path))[0] == 0
    faster = json.loads(run(*few, "--like", str(path), "--json")[1])["comparison"]
    saved = 1 - faster["now_step_s"] / faster["here_step_s"]
    assert 0 < saved < 1
    assert faster["because"][-1].endswith(f"{saved:.1%} less time")
    other = run(
        "recommend", "gpt2", "--profile", "dgx-h100", "--global-batch", "64", *PLAIN, "--like", str(path), "--json"
    )
    assert "the old plan is for llama-3-8b, not gpt2" in json.loads(other[1])["comparison"]["because"]


def test_tokens_and_a_price_give_time_and_cost() -> None:
    found = json.loads(run(*RECOMMEND, *PLAIN, "--tokens", "1e9", "--price", "2", "--json")[1])
    budget, step_s = found["budget"], found["estimate"]["step"]["step_time_s"]
    assert budget["seconds"] == pytest.approx(1e9 / (64 * 4096) * step_s)
    assert budget["cost"] == pytest.approx(2 * 8 * budget["seconds"] / 3600)


def test_the_cheapest_number_of_gpus_is_among_the_offers() -> None:
    found = json.loads(run(*RECOMMEND, *PLAIN, "--objective", "cost", "--price", "2", "--json")[1])
    assert found["budget"]["tokens"] == 1e9  # what a price is told for where no tokens are
    costs = {offer["num_gpus"]: offer["cost_per_billion_tokens"] for offer in found["offers"]}
    plan = found["plan"]
    assert costs[plan["dp"] * plan["tp"] * plan["pp"] * plan["cp"]] == min(costs.values())


def test_a_plan_for_another_framework_says_so_and_is_not_launched(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    status, stdout, _ = run(*RECOMMEND, "--framework", "megatron-core", "-o", str(path))
    assert status == 0
    assert "Predicted for Megatron-Core, which paraplan does not launch" in " ".join(stdout.split())
    assert "paraplan export" in stdout
    with pytest.raises(UnsupportedPlanError, match="made for megatron-core"):
        read_plan_file(path)


def test_the_plan_file_names_the_gpus_of_the_local_ranks(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("recommend", "gpt2-xl", "--profile", "rtx-3090-x4-crossed", "--global-batch", "64", "-o", str(path))
    placement = PlanFile.from_json(path.read_text(), source=str(path)).placement
    assert placement is not None
    assert sorted(placement.local_gpus) == [0, 1, 2, 3]


def test_the_fewest_gpus_are_found_and_planned_for() -> None:
    found = json.loads(run(*RECOMMEND, *PLAIN, "--find", "fewest-gpus", "--json")[1])
    plan = found["plan"]
    gpus = plan["dp"] * plan["tp"] * plan["pp"] * plan["cp"]
    assert gpus < 8
    assert f"{gpus} of 8" in found["found"]


def test_gpus_are_found_that_end_in_time_or_it_is_said_how_long_the_best_takes() -> None:
    asked = ["recommend", "gpt2", "--profile", "rtx-3090-x2", "--find", "by-date"]
    few = [*PLAIN, "--micro-batch", "1", "--recompute", "none", "--offload", "none"]
    wanted = [*asked, "--tokens", "10B", "--global-batch", "8", *few, "--days"]
    found = json.loads(run(*wanted, "4", "--json")[1])
    plan = found["plan"]
    gpus = plan["dp"] * plan["tp"] * plan["pp"] * plan["cp"]
    assert f"days or less: {gpus}" in found["found"]
    assert found["budget"]["seconds"] <= 4 * 86_400
    status, _, stderr = run(*wanted, "0.001")
    assert status == 1
    assert "no number of GPUs tried trains on 10.0 B tokens in 0.001 days" in stderr
    assert "e+" not in stderr
    assert "give a larger --global-batch" in stderr, "no lever comes near"
    status, _, stderr = run(*asked)
    assert status == 2
    assert "give --" not in stderr


@pytest.mark.with_all  # the search finds it in test_search
def test_the_largest_model_is_found_and_planned_for_or_named() -> None:
    status, stdout, stderr = run("recommend", *LARGEST, "--budget", "1e10")
    assert status == 0
    assert "on 20 tokens a parameter" in stderr
    assert re.search(r"(?m)^Model .*, [\d.]+ T parameters$", stdout)
    assert "offload" not in stdout.partition("Memory")[0]
    pair = {"seq_length": 1024, "constraints": Constraints(tp=1, pp=1, zero_stage=3, recompute="full")}
    largest = largest_model(cluster_from_profile("rtx-3090-x2"), **pair)
    for_little = largest_model(cluster_from_profile("rtx-3090-x2"), **pair, money=100.0, price_per_gpu_hour=1.0)
    assert 10**9 < largest.parameters.total < 10 * 10**9
    assert for_little.parameters.total < largest.parameters.total / 4
    assert run("recommend", "gpt2", "--profile", "dgx-h100", "--find", "largest-model")[0] == 2
    assert "no MODEL given" in run("recommend", "--profile", "dgx-h100")[2]


def test_the_module_and_the_script_are_the_same_command() -> None:
    environment = os.environ | {"NO_COLOR": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", "paraplan", "--version"], capture_output=True, text=True, check=True, env=environment
    )
    assert finished.stdout.startswith("paraplan 0.")


@pytest.mark.parametrize(
    ("degrees", "message", "hint"),
    [
        (["--tp", "3"], "tp=3: 3 does not divide", "use --tp 1, 2, 4 or 8"),
        (["--pp", "33", "--global-batch", "33"], "33 pipeline stages for the 32 blocks", "at most 32"),
        (["--dp", "3", "--global-batch", "4"], "is not a multiple of dp=3", "3 or 6"),
    ],
)
def test_a_plan_that_does_not_suit_the_model_is_refused(degrees: list[str], message: str, hint: str) -> None:
    status, stdout, stderr = run("estimate", *LLAMA, *degrees)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert hint in stderr


def test_a_time_between_failures_gives_an_interval_of_checkpoints_and_a_goodput(tmp_path: Path) -> None:
    small = ["recommend", "gpt2", "--profile", "8xh100", "--seq-len", "128", "--global-batch", "8", *PLAIN]
    status, stdout, _ = run(*small, "--mtbf", "3h")
    assert status == 0
    assert "Expected goodput" in stdout
    assert "assumed" in stdout
    job = json.loads(run(*small, "--mtbf", "3h", "--json")[1])["goodput"]
    gpu = json.loads(run(*small, "--mtbf", "24h/gpu", "--json")[1])["goodput"]
    assert job == gpu  # of 8 GPUs
    assert job["goodput"] + job["checkpoints"] + job["lost"] + job["restarts"] == pytest.approx(1)
    assert json.loads(known(*RECOMMEND, "--json")[1])["goodput"] is None
    costs = {"save_s": 0.5, "write_s": 20.0, "load_s": 3.0, "restart_s": None}
    (tmp_path / "run.json").write_text(json.dumps({"goodput": {"costs": costs}}))
    words = ("--mtbf", "3h", "--costs-of", str(tmp_path), "--json")
    measured = json.loads(run(*small, *words)[1])["goodput"]
    assert measured["costs"]["save_s"] == 0.5
    assert measured["goodput"] > job["goodput"]


def test_bad_times_between_failures_and_bad_runs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"goodput": null}')
    for words, said in (
        (("--mtbf", "often"), "not a mean time between failures"),
        (("--costs-of", str(tmp_path)), "--costs-of without --mtbf"),
        (("--mtbf", "3h", "--costs-of", str(tmp_path / "none")), "cannot read"),
        (("--mtbf", "3h", "--costs-of", str(tmp_path)), "holds no costs"),
    ):
        result = CliRunner().invoke(app, [*RECOMMEND, *words], catch_exceptions=True)
        text = f"{result.output}{result.exception}"
        assert result.exit_code != 0
        assert said in text


def test_the_memory_of_a_machine_is_what_is_said(tmp_path: Path) -> None:
    words = ["recommend", "llama-3-8b", "--profile", "1xrtx-4090", "--seq-len", "2k", "--global-batch", "8"]
    status, _, stderr = run(*words)
    assert status == 1
    assert "not the 64.0 GiB of a node (--host-memory)" in " ".join(stderr.split())
    status, stdout, _ = run(*words, "--host-memory", "128GiB")
    assert status == 0
    assert "of 128 GiB in a machine's memory for offload" in " ".join(stdout.split())
    plan = tmp_path / "plan.json"
    run(*words, "--host-memory", "128GiB", "-o", str(plan))
    assert run("verify", str(plan))[0] == 0  # the plan file keeps it
    assert run("verify", str(plan), "--host-memory", "64GiB")[0] == 1
    for wrong in ("lots", "1KB"):
        status, _, stderr = run(*words, "--host-memory", wrong)
        assert status == 2
        assert "--host-memory" in stderr


def test_a_framework_for_which_nothing_is_written_is_told_so(tmp_path: Path) -> None:
    page = tmp_path / "answer.html"
    words = ["recommend", "llama-3.2-1b", "--profile", "1xh100", "--train", "qlora", "--framework", "unsloth"]
    status, stdout, _ = run(*words, "--html", str(page))
    assert status == 0
    assert "paraplan export" not in stdout
    assert "writes no configuration of unsloth" in " ".join(stdout.split())
    assert "Run it" not in page.read_text()
    assert json.loads(run(*words, "--json")[1])["commands"] == {}


@pytest.mark.parametrize("batch", [pytest.param("2", marks=pytest.mark.with_all), "6"])
def test_plans_of_pairs_keep_them_together(batch: str) -> None:
    words = ["recommend", "llama-3.2-1b", "--profile", "8xh100", "--seq-len", "1k", "--task", "dpo", "--json"]
    status, stdout, stderr = run(*words, "--global-batch", batch)
    assert (status, stderr) == (0, "")
    answer = json.loads(stdout)
    assert answer["candidates"]
    assert all(one["plan"]["micro_batch_size"] % 2 == 0 for one in answer["candidates"])
    assert answer["commands"] == {"export": "paraplan export plan.json --to trl"}
    assert (
        "then export it for TRL:\n  paraplan export plan.json --to trl\n"
        in run(*words[:-1], "--global-batch", batch)[1]
    )
    for size in ("1", "3"):
        status, _, stderr = run(*words, "--global-batch", batch, "--micro-batch", size)
        assert status == 2
        assert stderr.startswith(f"error: --micro-batch {size} holds no pairs, which dpo learns from")


def test_several_machines_make_a_table_json_and_a_page(tmp_path: Path) -> None:
    asked = [
        "recommend",
        "gpt2",
        "--profile",
        "8xh100,dgx-a100, rtx-3090-x2",
        "--global-batch",
        "64",
        "--tokens",
        "1B",
        *PLAIN,
    ]
    page = tmp_path / "machines.html"
    status, stdout, _ = run(*asked, "--html", str(page))
    assert status == 0
    assert all(name in stdout for name in ("dgx-h100", "dgx-a100", "rtx-3090-x2"))
    assert "https://" in page.read_text()
    found = json.loads(run(*asked, "--json")[1])
    assert len(found["machines"]) == 3
    assert all(offer["fits"] for offer in found["machines"])
    assert run(*asked, "-o", str(tmp_path / "plan.json"))[0] == 2
    assert "recommend compares them" in run("estimate", "gpt2", "--profile", "8xh100,dgx-a100")[2]


def test_a_budget_is_counted_in_a_known_price_or_the_users_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # not installed: a page is written sooner without charts
    asked = ["recommend", "gpt2", "--global-batch", "64", "--budget", "100", *PLAIN]
    known_one = json.loads(run(*asked, "--profile", "8xh100", "--json")[1])
    assert known_one["price_source"].endswith("USD")
    page = tmp_path / "report.html"
    own = json.loads(run(*asked, "--profile", "1xh100", "--price", "2", "--json", "--html", str(page))[1])
    assert own["bought"]["gpu_hours"] == 50
    assert "What 100 buy" in page.read_text()
    status, _, stderr = run(*asked, "--profile", "4xl40s")
    assert status == 2
    assert "--prices FILE" in stderr


@pytest.mark.parametrize("command", [["recommend"], ["estimate"]])
def test_gpus_without_bf16_train_in_fp16_and_it_is_said_in_a_line(command: list[str]) -> None:
    options = ["gpt2", "--profile", "1xt4", "--global-batch", "4", "--json"]
    result = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    assert "NVIDIA T4 has no bf16 arithmetic: --precision fp16 is taken" in result.stderr
    assert "no bf16" not in CliRunner().invoke(app, [*command, *options, "--precision", "fp16"]).stderr


@pytest.mark.parametrize("columns", ["80", "100"])
def test_machines_are_compared_in_figures_that_stand_in_columns(columns: str) -> None:
    options = ["--profile", "8xh100,4xrtx-4090", "--global-batch", "64", "--seq-len", "1024", "--tokens", "1B", *PLAIN]
    result = CliRunner().invoke(app, ["recommend", "gpt2", *options], env={"COLUMNS": columns})
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    header = next(line for line in lines if line.strip().startswith("step"))
    rows = [line for line in lines if line.startswith("  ") and "%" in line]
    assert len(rows) == 2
    assert {len(line.rstrip()) for line in (header, *rows)} == {len(header.rstrip())}
    assert "https://" not in result.stdout


def test_anywhere_compares_rented_machines_and_says_how_each_is_submitted(tmp_path: Path) -> None:
    aws = {"instance": "p5.48xlarge", "gpu": "h100-sxm-80gb", "num_gpus": 8, "on_demand_per_hour": 55}
    aws |= {"machine": "aws-p5-48xlarge", "region": "us-east-1", "date": "2026-11-09", "source": "a page"}
    lone = {"instance": "RTX 4090", "gpu": "rtx-4090", "num_gpus": 1, "on_demand_per_hour": 0.3}
    lone |= {"date": "2026-11-09", "source": "a page"}
    (tmp_path / "aws.json").write_text(json.dumps({"provider": "AWS", "currency": "USD", "offers": [aws, lone]}))
    words = ["recommend", "gpt2", "--anywhere", "--seq-len", "1k", "--global-batch", "64", "--nodes", "1", *PLAIN]
    words += ["--prices", str(tmp_path / "aws.json")]
    status, out, _ = run(*words, "--tokens", "1e9", "-o", str(tmp_path / "plans"))
    assert status == 0
    assert "cheapest: 8xrtx-4090; fastest: aws-p5-48xlarge" in out
    plan = tmp_path / "plans" / "1x-aws-p5-48xlarge.json"
    options = "--option infra=aws/us-east-1 --option instance-type=p5.48xlarge train.py"
    assert f"paraplan submit --to sky --plan {plan} {options}" in out
    assert read_plan_file(plan).plan.world_size == 8
    assert "--anywhere asks what training on so many tokens costs" in run(*words)[2]
    assert "no machine trains on so many tokens in 0.001 days" in run(*words, "--tokens", "1e12", "--days", "0.001")[2]


@pytest.mark.parametrize("train", ["qlora", "full"])
def test_the_options_of_a_lever_beside_the_command_give_what_it_says(train: str) -> None:
    words = ("recommend", "qwen3-30b-a3b", "--profile", "1xrtx-4090", "--framework", "axolotl", "--train", train)
    status, report, _ = run(*words, "--json")
    assert status == 1
    first = next(one for one in json.loads(report)["levers"] if one["fits"])
    assert not first["offloads_parameters"]
    assert "targets=q|k|v|o" in first["options"]
    status, report, _ = run(*words, *shlex.split(first["options"]), "--json")
    assert status == 0
    stages = json.loads(report)["estimate"]["memory"]
    assert max(stage["total_bytes"] for stage in stages) == first["peak_memory_bytes"]


def test_gpus_that_stay_idle_are_named_however_much_else_there_is_to_say() -> None:
    """Two machines whose network costs more than their GPUs gain, with cautions, levers and notes to be told."""
    words = ["qwen2.5-1.5b", "--profile", "2xa10", "--nodes", "2", "--network", "ethernet-10g", "--seq-len", "512"]
    text = known("recommend", *words, "--global-batch", "32", "--framework", "deepspeed")[1]
    assert re.search(r"^GPUs +uses 2 of 4 GPUs: ", text, re.MULTILINE)
