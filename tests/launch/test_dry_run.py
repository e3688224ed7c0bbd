from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paraplan.errors import CheckFailedError
from paraplan.launch.dry_run import CHOSEN_AT_START, LaunchTarget, plan_launch
from paraplan.launch.request import LaunchRequest
from paraplan.launch.spec import LaunchSpec, NodeRange
from paraplan.plan.files import PlanFile, PlannedEstimate
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import TrainingSpec

PLAN = ParallelPlan(dp=2, pp=4, pipeline_schedule="1f1b", num_microbatches=4)


def request(
    plan: ParallelPlan | None = PLAN, *, nodes: int = 1, peak: int | None = None, **changes: object
) -> LaunchRequest:
    values: dict[str, object] = {"training_script": "train.py", "training_script_args": ("--x", "a b")}
    spec = LaunchSpec(master_addr="10.0.0.1", **(values | changes))  # type: ignore[arg-type]
    path = "/plan.json" if plan else None
    estimate = None if peak is None else PlannedEstimate(step_time_s=1, tokens_per_s_per_gpu=1, peak_memory_bytes=peak)
    file = PlanFile(plan=plan, estimate=estimate) if plan else None
    return LaunchRequest(spec, NodeRange(nodes, nodes), "auto", file=file, plan_path=path)


def target(num_gpus: int = 8, memory: int | None = 80 << 30) -> LaunchTarget:
    return LaunchTarget(host="node", num_gpus=num_gpus, gpu_memory_bytes=memory, num_cores=64)


def test_every_rank_has_its_gpu_and_its_place_on_the_axes() -> None:
    run = plan_launch(request(), ranks_per_node=8, target=target())
    assert [rank.gpu for rank in run.ranks] == [str(index) for index in range(8)]
    assert run.ranks[5].coordinates == {"pp": 2, "dp": 1}
    assert run.ranks[5].groups == {"pp": [1, 3, 5, 7], "dp": [4, 5]}
    assert run.ranks[5].command[1:] == ["-u", "train.py", "--x", "a b"]
    assert run.problems == []


def test_the_environment_is_what_the_launcher_adds() -> None:
    environment = plan_launch(request(), ranks_per_node=8, target=target()).ranks[3].environment
    assert environment["RANK"] == environment["LOCAL_RANK"] == environment["ROLE_RANK"] == "3"
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "8"
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (CHOSEN_AT_START, CHOSEN_AT_START)
    assert environment["PARAPLAN_PLAN"] == "/plan.json"


def test_segments_grow_in_the_ranks_of_a_plan_that_was_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    training = TrainingSpec(global_batch_size=8, seq_length=8, stack=StackSettings(expandable_segments=True))
    file = PlanFile(plan=PLAN, training=training)
    made = replace(request(), file=file)
    grows, variable = "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF"

    def told() -> str | None:
        return plan_launch(made, ranks_per_node=8, target=target()).ranks[3].environment.get(variable)

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv(variable, raising=False)
    assert told() == grows
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    assert told() == f"max_split_size_mb:64,{grows}"
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert told() is None
    assert variable not in plan_launch(request(), ranks_per_node=8, target=target()).ranks[3].environment


def test_two_nodes_have_ranks_one_after_the_other_and_the_given_endpoint() -> None:
    run = plan_launch(request(nodes=2), ranks_per_node=4, target=target(4))
    assert [(rank.host, rank.local_rank) for rank in run.ranks[3:5]] == [("node 0", 3), ("node 1", 0)]
    assert run.ranks[4].environment["GROUP_RANK"] == "1"
    assert (run.ranks[4].environment["MASTER_ADDR"], run.ranks[4].environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("asked", "machine", "said"),
    [
        (request(), target(4), "8 ranks per node, but node has 4 GPUs"),
        (request(peak=90 << 30), target(), "the plan needs 90.0 GiB on a GPU, and one of node has 80.0 GiB"),
    ],
)
def test_what_cannot_run_or_does_not_fit_is_a_failed_check(
    asked: LaunchRequest, machine: LaunchTarget, said: str
) -> None:
    run = plan_launch(asked, ranks_per_node=8, target=machine)
    with pytest.raises(CheckFailedError) as caught:
        run.require_runnable()
    assert said in str(caught.value)
    assert caught.value.exit_status == 1


def test_the_text_says_shared_things_once_and_the_json_everything() -> None:
    run = plan_launch(request(), ranks_per_node=8, target=target())
    text = run.render()
    assert text.count("WORLD_SIZE=8") == 3  # of the world, the node and the role: each once
    assert "rank 5: host node, local rank 5, GPU 5, pp 2 dp 1\n" in text
    assert [rank["rank"] for rank in json.loads(run.to_json())["ranks"]] == list(range(8))


def test_on_a_cpu_there_is_no_gpu_and_any_number_of_ranks() -> None:
    run = plan_launch(request(None), ranks_per_node=3, target=target(0, None))
    assert [(rank.gpu, rank.coordinates) for rank in run.ranks] == [(None, {})] * 3
    assert run.problems == []


def test_variables_that_go_to_other_hosts_are_named_without_their_values(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu-a slots=1\ngpu-b slots=1\n")
    (tmp_path / "train.py").write_text("")
    words = ["--hostfile", "hosts", "--profile", "dgx-h100", "--dry-run"]
    environment = {**os.environ, "HF_TOKEN": "hf_s3cret", "NCCL_DEBUG": "s3cret"}
    for more in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "paraplan", "launch", *words, *more, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "HF_TOKEN" in done.stdout
        assert "NCCL_DEBUG" in done.stdout
        assert "s3cret" not in done.stdout + done.stderr
