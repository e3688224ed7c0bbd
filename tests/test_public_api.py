"""`import paraplan`: its exact names, that they cost nothing until they are used, and what their results print."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import paraplan
from paraplan import ParallelPlan, PlanError, TrainingSpec, Workload

NAMES = {
    *(
        "Cluster",
        "ModelSpec",
        "NodeTopology",
        "ParallelPlan",
        "StackSettings",
        "TrainingSpec",
        "Workload",
        "Constraints",
        "PlanFile",
    ),
    *("Estimate", "Recommendation", "PlanCheck", "Exported", "ImportedPlan"),
    *("ParaplanError", "PlanError", "NoPlanFitsError"),
    *(
        "load_cluster",
        "load_model",
        "load_plan",
        "load_calibration",
        "load_history",
        "probe_topology",
        "read_topology",
        "import_plan",
    ),
    *("estimate", "recommend", "check", "check_script", "export", "__version__"),
}


@pytest.fixture(scope="module")
def job() -> Workload:
    model = paraplan.load_model("gpt2", seq_length=1024)
    training = TrainingSpec(global_batch_size=64, seq_length=1024)
    return Workload.of(model, training, paraplan.load_cluster("dgx-h100", gpus_per_node=4))


@pytest.fixture(scope="module")
def answer(job: Workload) -> paraplan.Recommendation:
    return paraplan.recommend(job)


def test_the_public_names_are_exactly_these() -> None:
    assert set(paraplan.__all__) == NAMES
    assert len(paraplan.__all__) == len(NAMES)
    assert set(dir(paraplan)) >= NAMES


def test_every_public_name_is_there_typed_and_described() -> None:
    for name in NAMES - {"__version__"}:
        value = getattr(paraplan, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            hints = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
            assert inspect.Signature.empty not in hints, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'recomend'"):
        paraplan.recomend  # noqa: B018


def test_import_paraplan_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\nbegan = time.process_time()\nimport paraplan\nspent = time.process_time() - began\n"
        "print(spent, sorted({'numpy', 'torch', 'pydantic', 'rich', 'typer'} & set(sys.modules)))\n"
        "from paraplan import errors\nassert errors.ParaplanError is paraplan.ParaplanError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, _, heavy = done.stdout.partition(" ")
    assert float(seconds) < 0.05
    assert heavy.strip() == "[]"


def test_an_estimate_says_its_answer_and_shows_its_report(job: Workload) -> None:
    found = paraplan.estimate(job, ParallelPlan(dp=4, micro_batch_size=4, num_microbatches=4))
    text = str(found)
    assert "gpt2, 124 M parameters" in text
    assert "DDP over 4 GPUs, micro-batch size 4, 4 accumulation steps" in text
    assert "fits: " in text
    assert f"MFU {found.step.mfu:.1%}" in text
    assert found.memory[0].total_bytes == found.peak_memory_bytes
    html = found._repr_html_()
    assert html.startswith("<iframe")
    assert "&lt;svg" in html
    assert found.to_dict()["plan"]["dp"] == 4


def test_a_plan_that_does_not_suit_is_an_error_with_a_way_out(job: Workload) -> None:
    with pytest.raises(PlanError, match="and 64 is wanted") as refused:
        paraplan.estimate(job, ParallelPlan(dp=4, num_microbatches=3))
    assert refused.value.hint


def test_a_recommendation_says_why_and_becomes_a_plan_file(
    job: Workload, answer: paraplan.Recommendation, tmp_path: Path
) -> None:
    assert answer.best.plan.describe() in str(answer)
    assert "because it is simpler" in str(answer)
    assert answer.decisions[0].because
    assert "Ruled out" in answer._repr_html_()
    answer.save(tmp_path / "plan.json")
    assert paraplan.load_plan(tmp_path / "plan.json").plan == answer.best.plan
    assert paraplan.check(job, answer.best.plan).passed


def test_constraints_are_kept(job: Workload) -> None:
    assert paraplan.recommend(job, constraints=paraplan.Constraints(tp=2), num_candidates=1).best.plan.tp == 2


def test_a_plan_goes_to_another_tool_and_back(answer: paraplan.Recommendation, tmp_path: Path) -> None:
    exported = paraplan.export(answer.plan_file(), "deepspeed", partial=True)
    path = tmp_path / "ds.json"
    path.write_text(exported.text)
    assert json.loads(exported.text)
    imported = paraplan.import_plan(path, "deepspeed", num_gpus=4)
    assert imported.plan.global_batch_size == answer.best.plan.global_batch_size


def test_another_framework_is_a_word(job: Workload) -> None:
    megatron = Workload.of(job.model, job.training, job.cluster, framework="megatron-core")
    plan = ParallelPlan(dp=4, num_microbatches=16)
    assert paraplan.estimate(megatron, plan).peak_memory_bytes != paraplan.estimate(job, plan).peak_memory_bytes


def test_a_framework_that_does_not_exist_is_an_error(job: Workload) -> None:
    with pytest.raises(paraplan.ParaplanError, match="no framework 'megatron_core'"):
        Workload.of(job.model, job.training, job.cluster, framework="megatron_core")


def test_a_topology_is_read_from_text(job: Workload) -> None:
    text = json.dumps(job.cluster.node.to_report())
    assert len(paraplan.read_topology(text).gpus) == 4


def test_the_planner_answers_in_a_process_of_its_own() -> None:
    def ask(**question: object) -> dict[str, dict[str, object]]:
        values = {"model": "gpt2", "profile": "cpu", "num_nodes": 1, "gpus_per_node": 2, "precision": "fp32"}
        done = subprocess.run(
            [sys.executable, "-m", "paraplan.api"],
            input=json.dumps(values | {"global_batch_size": 8, "seq_length": 64} | question),
            capture_output=True,
            text=True,
            check=True,
        )
        answer: dict[str, dict[str, object]] = json.loads(done.stdout)
        return answer

    assert ask()["plan_file"]["training"]
    assert ask(model="no-such-model")["error"]["exit_status"] == 2
