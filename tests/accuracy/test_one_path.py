"""What a table of runs predicts is what `estimate` prints for the same model, training, machines and plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from case_selection import with_all

import paraplan
from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.prediction import estimate_run, predict_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cost.estimate import PlanEstimate, evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.model.named import known_configs
from paraplan.model.vocabulary import with_vocabulary
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.resources import profiles_folder

DATA = BundledData(configs=known_configs())
TABLES = sorted((profiles_folder() / "runs").glob("*.csv"))


WORDS = {
    "id",
    "source",
    "model_name",
    "gpu",
    "cpu",
    "network",
    "intra_node_link",
    "quality",
    "nonstandard_features",
    "notes",
}
"""What a row says in words of its own: no setting that it shares with others."""


def kinds_of(run: MeasuredRun) -> list[object]:
    """Return what a row was measured with, and which of its other columns say anything."""
    told = run.model_dump(exclude_defaults=True, exclude=WORDS)
    axes = tuple(getattr(run, axis) for axis in ("dp", "tp", "pp", "cp", "ep") if (getattr(run, axis) or 1) > 1)
    settings = [(name, value) for name, value in told.items() if isinstance(value, (str, bool))]
    return [run.framework, len(axes), *(told.keys() - dict(settings)), *settings]


@cache
def some_of_all() -> dict[Path, list[MeasuredRun]]:
    """Return of each table as many runs as it takes to have every kind, with `--all` every one.

    Greedy: always the run that brings most kinds.
    """
    runs = [
        (path, row)
        for path in TABLES
        for row in read_runs(path.read_text(), source=path.name)
        if isinstance(row, MeasuredRun)
    ]
    kinds = [set(kinds_of(run)) for _, run in runs]
    missing = set[object]().union(*kinds)
    chosen = {*with_all(range(len(runs)))}
    while missing:
        best = max(range(len(runs)), key=lambda index: len(kinds[index] & missing))
        chosen.add(best)
        missing -= kinds[best]
    return {path: [runs[index][1] for index in sorted(chosen) if runs[index][0] == path] for path in TABLES}


def priced(path: Path) -> list[tuple[MeasuredRun, Workload, PlanEstimate]]:
    found = []
    for row in some_of_all()[path]:
        run = DATA.completed(row)
        try:
            workload = workload_of_run(run, DATA)
            found.append((run, workload, estimate_run(run, workload, plan_of_run(run, workload.framework))))
        except ParaplanError:
            continue
    return found


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_row_is_priced_as_its_parts_are_by_workload_of(path: Path) -> None:
    rows = priced(path)
    assert rows
    for run, theirs, estimate in rows:
        plan = estimate.plan
        # What a plan file keeps of a training is all that there is.
        kept = PlanFile.from_json(PlanFile(plan=plan, training=theirs.training).to_json(), source=run.id)
        assert kept.training == theirs.training, run.id
        ours = Workload.of(
            theirs.whole_model or theirs.model,
            kept.training,
            theirs.cluster,
            framework=DATA.frameworks.bundled(theirs.framework.name),
        )
        mine, shown = evaluate_plan(ours, kept.plan), predict_run(run, theirs, plan)
        assert mine.step.step_time_s == pytest.approx(shown.predicted_step_time_s, rel=1e-9), run.id
        assert mine.memory == estimate.memory, run.id


def gpt2(**stack: object) -> Workload:
    training = paraplan.TrainingSpec(
        global_batch_size=64, seq_length=1024, attention="flash", stack=StackSettings.model_validate(stack)
    )
    model, cluster = paraplan.load_model("gpt2"), paraplan.load_cluster("8xa100-80gb")
    return Workload.of(model, training, cluster, framework="megatron-core")


def test_a_framework_that_pads_the_vocabulary_is_planned_so() -> None:
    tp = np.array([1, 2, 8])
    assert gpt2().padded_vocabulary(tp).tolist() == [50304, 50432, 51200]
    assert gpt2(pads_vocabulary=False).padded_vocabulary(tp).tolist() == [50257] * 3
    plan = ParallelPlan(dp=8, micro_batch_size=8, num_microbatches=1)
    padded, bare = (evaluate_plan(workload, plan) for workload in (gpt2(), gpt2(pads_vocabulary=False)))
    # 50,257 columns are no multiple that tensor cores are fast with; 47 rows more of the table take memory.
    assert padded.step.step_time_s < 0.9 * bare.step.step_time_s
    assert padded.memory[0].parameter_bytes > bare.memory[0].parameter_bytes


def test_a_model_of_another_vocabulary_differs_in_its_tables_and_products_alone() -> None:
    model = paraplan.load_model("gpt2")
    wider = with_vocabulary(model, 50304)
    assert wider.parameters.total - model.parameters.total == 47 * 768
    assert (wider.vocabulary, wider.runs) == (50304, model.runs)
    assert with_vocabulary(wider, 50257) == model


def test_settings_are_read_from_words_and_written_so() -> None:
    told = StackSettings.parse("dispatcher=DeepEP, etp=1,overlaps-experts")
    assert (told.dispatcher, told.etp, told.overlaps_experts) == ("deepep", 1, True)
    assert StackSettings.parse(told.text) == told
    assert StackSettings.parse("") == StackSettings()
    for words, message in (
        ("dispatchr=deepep", "no setting 'dispatchr' of a stack"),
        ("dispatcher=pigeons", "dispatcher=pigeons of a stack is not 'alltoall'"),
        ("etp=0", "etp=0 of a stack is not greater than 0"),
        ("overlaps_experts=perhaps", "overlaps_experts=perhaps of a stack is not a valid boolean"),
    ):
        with pytest.raises(paraplan.ParaplanError, match=message):
            StackSettings.parse(words)


EXPERTS = {"dp": 8, "tp": 2, "sequence_parallel": True, "ep": 4, "zero_stage": 1, "num_microbatches": 16}


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("megatron-lm-te", "dispatcher=deepep"),
        ("megatron-lm-te", "etp=1"),
        ("megatron-lm-te", "cuda_graphs=full"),
        ("megatron-lm-te", "drops_tokens"),
        ("megatron-lm-te", "overlaps_experts"),
        ("megatron-lm-te", "fp8_attention"),
        ("megatron-lm-te", "compiled_loss"),
        ("megatron-lm-te", "engine_loss"),
        ("megatron-lm-te", "flash_generation=1"),
        ("megatron-lm-te", "overlaps_gradients=false"),
        ("megatron-lm-te", "overlaps_products"),
        ("megatron-lm-te", "fuses_accumulation=false"),
        ("megatron-lm-te", "gradient_bytes=2"),
        ("fsdp", "fused_kernels=all"),
        ("fsdp", "optimizer_step=foreach"),
        ("paraplan", "ring_attention"),
    ],
)
def test_every_setting_moves_a_step(framework: str, words: str) -> None:
    def seconds(text: str) -> float:
        training = paraplan.TrainingSpec(
            global_batch_size=128, seq_length=4096, attention="flash", stack=StackSettings.parse(text)
        )
        is_mixture = framework == "megatron-lm-te"
        model = paraplan.load_model("qwen3-30b-a3b" if is_mixture else "llama-3-8b")
        workload = Workload.of(model, training, paraplan.load_cluster("8xa100-80gb", num_nodes=2), framework=framework)
        plan = EXPERTS if is_mixture else {"dp": 8, "cp": 2, "zero_stage": 3, "num_microbatches": 16}
        return evaluate_plan(workload, ParallelPlan.model_validate(plan)).step.step_time_s

    assert seconds(words) != seconds("")
