"""`import paraplan`: its exact names, that they cost nothing until they are used, and what their results print."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
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
    *("estimate", "recommend", "check", "check_script", "export", "load_workload", "sweep", "__version__"),
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


FUNCTIONS = sorted(name for name in paraplan.__all__ if inspect.isfunction(getattr(paraplan, name)))
SUITING = {"path": "plan.json", "source": "8xh100", "text": "GPU0", "target": "trl", "script": "train.py"} | {
    "reference": "gpt2",
    "model": "gpt2",
    "profile": "cpu",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_refused_by_its_name(job: Workload, name: str) -> None:
    parameters = inspect.signature(getattr(paraplan, name)).parameters
    known = SUITING | {"workload": job, "plan": "plan.json" if name == "export" else ParallelPlan(dp=4)}
    suiting = {each: value for each, value in known.items() if each in parameters}
    wrong = [*parameters, "unheard_of"]
    if name in ("load_workload", "sweep"):
        wrong[wrong.index(next(each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD))] = (
            "seq_length"
        )
    for each in wrong:
        given = suiting | {each: object()}
        places = [given.pop(one.name, None) for one in parameters.values() if one.kind is one.POSITIONAL_ONLY]
        with pytest.raises(paraplan.ParaplanError, match=each) as refused:
            getattr(paraplan, name)(*places, **given)
        assert refused.value.hint


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda job: paraplan.recommend(job, num_candidates=0), "num_candidates=0"),
        (lambda job: paraplan.recommend(job, memory_margin=1.5), "memory_margin=1.5"),
        (lambda job: paraplan.recommend(job, objective="fast"), "'throughput', 'fastest'"),
        (lambda job: paraplan.estimate(job, [ParallelPlan(), "dp4"]), "a list of ParallelPlan"),
        (lambda _: paraplan.load_model("gpt2", seq_length=0), "seq_length=0"),
        (lambda _: paraplan.load_model(""), "name of a model is empty"),
        (lambda _: paraplan.Constraints(tp=0), "tp=0"),
        (lambda _: paraplan.Constraints(zero_stage=4), "zero_stage=4"),
        (lambda _: paraplan.Constraints(recompute="all"), "recompute='all' of Constraints"),
        (lambda job: Workload.of(None, job.training, job.cluster), "model=None of Workload.of"),
        (lambda _: paraplan.load_workload("gpt2", "cpu", global_batch_size=0), "global_batch_size=0"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_sentence(
    call: Callable[[Workload], object], said: str, job: Workload
) -> None:
    with pytest.raises(paraplan.ParaplanError, match=re.escape(said)) as refused:
        call(job)
    assert refused.value.hint


def test_machines_in_a_name_are_as_many_as_it_says() -> None:
    assert paraplan.load_workload("gpt2", "2x8xh100").cluster.num_nodes == 2
    assert paraplan.load_workload("gpt2", "32xh100").cluster.num_nodes == 4


def test_answers_name_fields_of_python(job: Workload) -> None:
    said = str(paraplan.recommend(job.replace(seq_length=1024)))
    assert "--" not in said


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


def test_five_tasks_of_a_notebook(tmp_path: Path) -> None:
    # 1. Read what there is: fields with their sentences, and arguments at the first use.
    assert "0 is DDP; 1 shards the optimizer state" in (inspect.getdoc(paraplan.ParallelPlan) or "")
    code = "import inspect, paraplan; print(inspect.signature(paraplan.TrainingSpec))"
    signature = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "global_batch_size" in signature
    # 2. A model of one's own, and defaults as on the command line; lengths are said once.
    torch = pytest.importorskip("torch")

    class Mine(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(512, 64)
            self.head = torch.nn.Linear(64, 512)

        def forward(self, tokens: object) -> object:
            return self.head(self.embedding(tokens))

    module = Mine()
    own = [paraplan.load_model(one, seq_length=128) for one in (Mine, module)]
    assert own[0].parameters.total == own[1].parameters.total == 512 * 64 * 2 + 512
    assert module.head.weight.device.type == "cpu"
    job = paraplan.load_workload("gpt2", "2xa100", global_batch_size=16)
    assert (job.training.seq_length, job.training.precision) == (1024, "bf16")
    assert paraplan.load_workload("gpt2", "2xv100-sxm2-16gb").training.precision == "fp16"
    # 3. Wrong input is one sentence, also where a record is made.
    for wrong, said in (
        (lambda: TrainingSpec(global_batch_size=64), "TrainingSpec needs seq_length"),  # type: ignore[call-arg]
        (lambda: ParallelPlan(data_parallel=8), "has no field 'data_parallel'"),  # type: ignore[call-arg]
        (lambda: ParallelPlan(4), "a ParallelPlan takes its fields by name, not 4"),  # type: ignore[call-arg]
        (lambda: ParallelPlan(pp=2), "needs a pipeline_schedule, such as '1f1b'"),
        (lambda: job.replace(seq_len=8), "has no field 'seq_len'"),
        (lambda: job.replace(precision="bf17"), "precision='bf17' of a TrainingSpec: it should be 'fp32'"),
    ):
        with pytest.raises(paraplan.ParaplanError, match=said):
            wrong()
    # 4. Plans side by side, what answers look like, and tables.
    estimates = paraplan.estimate(job, [ParallelPlan(dp=2), ParallelPlan(dp=2, zero_stage=3)])
    assert [each.plan.num_microbatches for each in estimates] == [8, 8]
    assert estimates[0].step_time_s == estimates[0].step.step_time_s
    answer = paraplan.recommend(job)
    for shown in (job, job.model, job.cluster, answer, estimates[0], answer.plan_file()):
        assert len(repr(shown)) < 200, repr(shown)
        assert "\n" not in repr(shown)
    assert repr(estimates[0]).startswith("<Estimate dp2, DDP, micro-batch 1 x 8: ")
    rows = answer.to_rows()
    assert {type(value) for row in rows for value in row.values()} <= {str, int, float, bool}
    assert [row["is_recommended"] for row in rows].count(True) == 1
    # 5. A sweep, and the plan for another tool.
    swept = paraplan.sweep(job, seq_length=[512, 1024], optimizer=["adamw", "sgd"])
    assert [(row["seq_length"], row["optimizer"]) for row in swept] == [
        *((512, "adamw"), (512, "sgd"), (1024, "adamw"), (1024, "sgd"))
    ]
    assert swept[0]["step_time_s"] < swept[2]["step_time_s"]
    assert not paraplan.sweep(job, ParallelPlan(dp=4), seq_length=[512])[0]["fits"]
    paraplan.export(answer, "accelerate", partial=True).save(tmp_path / "accelerate.yaml")
    assert "distributed_type" in (tmp_path / "accelerate.yaml").read_text()


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
