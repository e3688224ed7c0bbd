"""What is recommended for a framework is what its configuration can say, whole."""

from __future__ import annotations

import pytest
from case_selection import with_all

import paraplan
from paraplan.api.recommendations import Recommendation
from paraplan.cost.framework_files import load_framework
from paraplan.cost.generation import task_notes
from paraplan.errors import PlanError

TARGETS = {
    "torchtitan": "torchtitan",
    "fsdp": "accelerate",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "hf-trainer": "hf-trainer",
    "megatron-core": "megatron-lm",
}
NAMED_ALIKE = ("megatron-bridge", "megatron-lm", "torchtune", "trl", "axolotl", "transformers", "nemo-automodel")
"""Frameworks that are targets of export under the same name."""
JOBS = {
    "one node": ("llama-3-8b", "dgx-h100", 1, 4096, 64),
    "slow links": ("llama-2-7b", "rtx-4090-x4", 2, 2048, 32),
    "long": ("llama-3-8b", "dgx-h100", 2, 32768, 16),
    "experts": ("mixtral-8x7b", "dgx-h100", 2, 4096, 32),
}


@pytest.mark.parametrize(
    # Each framework with a job, and each job with a framework; experts with the one that splits them.
    ("framework", "job"),
    [
        pytest.param(framework, job, marks=[] if is_run else pytest.mark.with_all)
        for number, framework in enumerate(TARGETS)
        for place, job in enumerate(JOBS)
        for is_run in [(number + place) % 4 == 0]
    ],
)
def test_every_ranked_plan_of_a_framework_is_exported_whole(framework: str, job: str) -> None:
    model, profile, nodes, length, batch = JOBS[job]
    training = paraplan.TrainingSpec(global_batch_size=batch, seq_length=length)
    cluster = paraplan.load_cluster(profile, num_nodes=nodes)
    workload = paraplan.Workload.of(
        paraplan.load_model(model, seq_length=length), training, cluster, framework=framework
    )
    answer: Recommendation = paraplan.recommend(workload, objective="fastest")
    file = answer.plan_file()
    for plan in {answer.best.plan, *(one.plan for one in (*answer.candidates, *answer.result.front))}:
        assert paraplan.export(file.replace(plan=plan), TARGETS[framework]).text


def test_the_targets_are_those_that_the_profiles_name() -> None:
    assert {name: load_framework(name).export_target for name in TARGETS} == TARGETS
    assert [load_framework(name).export_target for name in NAMED_ALIKE] == list(NAMED_ALIKE)


@pytest.mark.parametrize(
    # Others are asked for experts below, or in the words of megatron-core above.
    "framework",
    ["megatron-bridge", "torchtune", "trl", *with_all(["megatron-lm", "axolotl", "transformers", "nemo-automodel"])],
)
def test_what_is_ranked_for_a_target_by_its_name_is_exported_to_it(framework: str) -> None:
    precision = "bf16-pure" if framework == "torchtune" else "bf16"
    training = paraplan.TrainingSpec(global_batch_size=64, seq_length=4096, precision=precision)
    workload = paraplan.Workload.of(
        paraplan.load_model("llama-3-8b"), training, paraplan.load_cluster("dgx-h100"), framework=framework
    )
    answer = paraplan.recommend(workload)
    file = answer.plan_file()
    for plan in {answer.best.plan, *(one.plan for one in answer.candidates)}:
        assert paraplan.export(file.replace(plan=plan), framework).text


@pytest.mark.parametrize(
    "framework", ["transformers", "torchtitan", "axolotl", "nemo-automodel", *with_all(["deepspeed"])]
)
def test_who_has_expert_parallelism_is_recommended_it_and_exported_to(framework: str) -> None:
    training = paraplan.TrainingSpec(global_batch_size=64, seq_length=2048)
    cluster = paraplan.load_cluster("dgx-h100", num_nodes=4)
    workload = paraplan.Workload.of(paraplan.load_model("qwen3-30b-a3b"), training, cluster, framework=framework)
    answer = paraplan.recommend(workload, objective="fastest")
    file = answer.plan_file()
    assert file.plan.ep > 1
    assert file.model is not None
    assert file.model.num_experts == 128
    for plan in {answer.best.plan, *(one.plan for one in answer.candidates)}:
        assert paraplan.export(file.replace(plan=plan), framework).gaps == ()


@pytest.mark.parametrize(
    ("framework", "words", "option"),
    [
        ("torchtitan", "torchtitan cannot train so: optimizer=adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("megatron-core", "Megatron-Core cannot train so: optimizer=adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("fsdp", "FSDP cannot train so: --stack dispatcher=deepep", {"stack": {"dispatcher": "deepep"}}),
    ],
)
def test_a_training_that_a_framework_cannot_do_is_refused_before_the_search(
    framework: str, words: str, option: dict[str, object]
) -> None:
    training = paraplan.TrainingSpec.model_validate({"global_batch_size": 64, "seq_length": 1024, **option})
    workload = paraplan.Workload.of(
        paraplan.load_model("gpt2"), training, paraplan.load_cluster("dgx-h100"), framework=framework
    )
    with pytest.raises(PlanError, match=f"^{words}"):
        paraplan.recommend(workload)


@pytest.mark.parametrize("task", ["dpo", *with_all(["reward", "kto", "grpo:completion=512"])])
@pytest.mark.parametrize("framework", ["deepspeed", *with_all(["fsdp", "hf"])])
def test_what_is_ranked_for_a_task_of_trl_is_exported_to_it(framework: str, task: str) -> None:
    training = paraplan.TrainingSpec(global_batch_size=32, seq_length=2048, task=task)
    cluster = paraplan.load_cluster("dgx-a100")
    workload = paraplan.Workload.of(paraplan.load_model("qwen2.5-7b"), training, cluster, framework=framework)
    answer = paraplan.recommend(workload)
    assert answer.commands(None)["export"].endswith("--to trl")
    file = answer.plan_file()
    for plan in {answer.best.plan, *(one.plan for one in answer.candidates)}:
        text = paraplan.export(file.replace(plan=plan), "trl").text
        needs_deepspeed = framework == "deepspeed" or plan.zero_stage == 1 or plan.offload == "optimizer"
        assert ("distributed_type: DEEPSPEED" in text) is needs_deepspeed


def test_a_task_of_tools_beside_trl_is_planned_and_nothing_is_written() -> None:
    training = paraplan.TrainingSpec(global_batch_size=32, seq_length=2048, task="grpo:completion=512")
    cluster = paraplan.load_cluster("dgx-a100")
    workload = paraplan.Workload.of(paraplan.load_model("qwen2.5-7b"), training, cluster, framework="megatron-core")
    answer = paraplan.recommend(workload)
    assert answer.commands(None) == {}
    assert any("NeMo-RL, verl and ms-swift train so by Megatron-Core" in one for one in task_notes(workload))


@pytest.mark.parametrize("framework", ["torchtitan", "nemo-automodel", "transformers"])
def test_a_task_that_a_framework_has_not_names_those_that_have_it(framework: str) -> None:
    training = paraplan.TrainingSpec(global_batch_size=32, seq_length=2048, task="dpo")
    cluster = paraplan.load_cluster("dgx-a100")
    workload = paraplan.Workload.of(paraplan.load_model("qwen2.5-7b"), training, cluster, framework=framework)
    with pytest.raises(PlanError, match="trains on given sequences") as refused:
        paraplan.recommend(workload)
    assert refused.value.hint == "use --framework fsdp, hf or deepspeed"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("accelerate", "distributed_type: DEEPSPEED"),
        ("trl", "distributed_type: DEEPSPEED"),
        ("hf-trainer", '"zero_optimization"'),
        ("axolotl", "zero_optimization:"),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_plan_made_for_deepspeed_is_run_by_it_in_other_tools_too(target: str, words: str, stage: int) -> None:
    training = paraplan.TrainingSpec(global_batch_size=8, seq_length=1024)
    plan = paraplan.ParallelPlan(dp=8, zero_stage=stage)
    file = paraplan.PlanFile(plan=plan, training=training)
    assert words in paraplan.export(file.replace(framework="deepspeed"), target).text
    assert words not in paraplan.export(file, target).text
