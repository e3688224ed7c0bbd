"""DPO, reward models and GRPO: what they take beside training on given sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.generation import OWN_MEMORY, cache_bytes, generation_of, task_notes
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.task import TRL_RESERVE, Task, parse_task
from paraplan.plan.training import TrainingSpec

MakeWorkload = Callable[..., Workload]
GIB = 1 << 30
DDP = ParallelPlan(dp=8, micro_batch_size=2, num_microbatches=4)
ZERO_3 = ParallelPlan(dp=8, zero_stage=3, micro_batch_size=2, num_microbatches=4)
PIPELINE = ParallelPlan(dp=2, pp=4, micro_batch_size=2, num_microbatches=16, pipeline_schedule="1f1b")


@pytest.mark.parametrize(
    "words",
    [
        *("sft", "dpo", "dpo:precomputed", "orpo", "kto", "reward", "embedding", "reranker", "grpo"),
        "grpo:completion=512,gpus=2,beta=0.04",
    ],
)
def test_words_are_read_as_they_are_written(words: str) -> None:
    assert parse_task(words.upper() + " ").text == words
    assert parse_task("grpo:completion=1k") == Task(kind="grpo", completion=1024)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "rlvr",
        "dpo:completion=3",
        "grpo:completion=many",
        "grpo:completion=0",
        "grpo:gpus=1k",
        "grpo:beta=nan",
        "grpo:beta=inf",
        "grpo:gpus=-1",
        "sft:x",
        "dpo:precomputed=1",
    ],
)
def test_other_words_are_an_error_that_says_what_would_do(words: str) -> None:
    with pytest.raises(PlanError) as caught:
        TrainingSpec(global_batch_size=2, seq_length=8, task=words)
    assert "grpo:completion=512" in str(caught.value.hint)


@pytest.mark.parametrize("plan", [DDP, ZERO_3, PIPELINE], ids=str)
def test_a_reference_is_one_more_model_in_16_bits_and_one_more_forward_pass(
    workload: MakeWorkload, plan: ParallelPlan
) -> None:
    plain, dpo = (workload("gpt2-xl", task=task) for task in ("sft", "dpo"))
    before, after = estimate_plan(plain, plan), estimate_plan(dpo, plan)
    for stage, other in zip(before.memory, after.memory, strict=True):
        trained = stage.optimizer_state_bytes / 8  # AdamW keeps two fp32 numbers a parameter
        assert other.parameter_bytes - stage.parameter_bytes == pytest.approx(2 * trained, rel=0.01)
    ratio = (after.step.compute_s + after.step.tensor_parallel_s) / (
        before.step.compute_s + before.step.tensor_parallel_s
    )
    assert 1.2 < ratio < 1.45, "three products a layer become four"


def test_adapters_have_their_reference_in_the_base_model(workload: MakeWorkload) -> None:
    plain, dpo = (workload("gpt2-xl", task=task, train="lora:r=8") for task in ("sft", "dpo"))
    before, after = estimate_plan(plain, DDP), estimate_plan(dpo, DDP)
    assert after.peak_memory_bytes == before.peak_memory_bytes
    assert after.step.compute_s > 1.2 * before.step.compute_s
    assert any("base model without its adapters" in note for note in task_notes(dpo))


def test_what_was_computed_before_costs_nothing(workload: MakeWorkload) -> None:
    plain, dpo = (workload("gpt2-xl", task=task) for task in ("sft", "dpo:precomputed"))
    before, after = estimate_plan(plain, ZERO_3), estimate_plan(dpo, ZERO_3)
    assert (after.step, after.peak_memory_bytes) == (before.step, before.peak_memory_bytes)


def test_a_reward_model_has_one_output_in_place_of_logits(workload: MakeWorkload) -> None:
    plain, reward = (workload("llama-3-8b", task=task) for task in ("sft", "reward"))
    assert reward.model.vocabulary == 1
    assert reward.model.parameters.head == plain.model.parameters.head - (128_256 - 1) * 4096
    before, after = (estimate_plan(one, ZERO_3) for one in (plain, reward))
    logits = 2 * 1024 * 128_256 * 4  # of one micro-batch in fp32, which the loss holds at least once
    assert before.peak_memory_bytes - after.peak_memory_bytes > logits
    adapted = workload("llama-3-8b", task="reward", train="lora:r=8")
    assert any(one.trains and one.name == "score.weight" for one in adapted.model.head.parameters)
    tied = workload("gpt2", task="reward").model
    assert tied.parameters.total == workload("gpt2").model.parameters.total + 768


def test_no_more_is_generated_than_a_sequence_has(workload: MakeWorkload) -> None:
    whole, most = (workload("gpt2", task=f"grpo:completion={count}") for count in (9999, 1024))
    assert generation_of(whole) == generation_of(most)
    assert "a completion of 9999 tokens leaves no prompt in a sequence of 1024" in task_notes(whole)
    assert not any("no prompt" in note for note in task_notes(workload("gpt2", task="grpo:completion=1023")))


def test_pairs_stay_together(workload: MakeWorkload) -> None:
    with pytest.raises(PlanError, match="65 sequences are no pairs"):
        TrainingSpec(global_batch_size=65, seq_length=8, task="dpo")
    odd = ParallelPlan(dp=8, micro_batch_size=1, num_microbatches=8)
    with pytest.raises(PlanError, match="a micro-batch of 1 holds no pairs"):
        estimate_plan(workload("gpt2", task="reward"), odd)
    assert estimate_plan(workload("gpt2", task="grpo"), odd).step.step_time_s > 0


def test_what_generates_beside_the_training_takes_its_share_of_memory(workload: MakeWorkload) -> None:
    plain, shared, apart = (workload("llama-3-8b", task=task) for task in ("sft", "grpo", "grpo:gpus=4"))
    peaks = [estimate_plan(one, ZERO_3).peak_memory_bytes for one in (plain, shared, apart)]
    memory = shared.cluster.gpu_memory_bytes
    assert peaks[1] - peaks[0] == pytest.approx(TRL_RESERVE * memory, rel=0.01)
    assert peaks[2] == peaks[0]
    half, asleep = (workload("llama-3-8b", task=f"grpo:reserve={share}") for share in ("0.5", "0"))
    told = [estimate_plan(one, ZERO_3).peak_memory_bytes for one in (half, asleep)]
    assert told[0] - peaks[0] == pytest.approx(0.5 * memory, rel=0.01)
    assert told[1] == peaks[0]
    assert any("holds nothing on the GPUs while a step trains" in note for note in task_notes(asleep))
    here, there = generation_of(shared), generation_of(apart)
    assert here is not None
    assert there is not None
    assert (here.num_gpus, here.num_sequences, here.is_shared) == (1, 8, True)
    assert (there.num_gpus, there.num_sequences, there.is_shared) == (1, 16, False)
    assert there.reserved_bytes == OWN_MEMORY * memory
    assert 16.0e9 < here.weight_bytes < 16.1e9
    assert cache_bytes(shared, 1024) == 1024 * 32 * 8 * 2 * 128 * 2, "two of 8 key-value heads of 128 in 32 layers"
    weights_alone = here.weight_bytes / shared.memory_bandwidth_bytes_per_s
    assert 512 * weights_alone < here.seconds < 512 * 1.2 * weights_alone, "half of 1,024 tokens, one after the other"


def test_a_model_that_one_gpu_cannot_hold_to_generate_is_divided_or_said_not_to_fit(workload: MakeWorkload) -> None:
    divided = generation_of(workload("llama-3-70b", task="grpo"))
    assert divided is not None
    assert divided.num_gpus == 8
    assert divided.weight_bytes * 8 > 140e9
    (note,) = (one for one in task_notes(workload("llama-3-70b", "1xh100", task="grpo:gpus=1")) if "generation" in one)
    assert note.startswith("generation does not fit: 131 GiB of weights on each of 1 GPUs")


def test_a_task_of_given_sequences_is_not_spoken_of(workload: MakeWorkload) -> None:
    assert task_notes(workload("gpt2")) == ()
    assert Task().extra_forwards == 0
    assert np.isfinite(estimate_plan(workload("gpt2"), DDP).step.step_time_s)


def test_an_optimizer_that_projects_whole_gradients_is_refused_where_they_are_divided(workload: MakeWorkload) -> None:
    made = workload("gpt2", optimizer="galore_adamw")
    whole = estimate_plan(made, DDP)
    assert whole.peak_memory_bytes < estimate_plan(workload("gpt2"), DDP).peak_memory_bytes
    for plan in (ZERO_3, ParallelPlan(dp=4, tp=2, micro_batch_size=2, num_microbatches=8)):
        with pytest.raises(PlanError, match="galore_adamw projects whole gradients"):
            estimate_plan(made, plan)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("simpo", "orpo"), ("cpo", "orpo"), ("bco", "kto"), ("contrastive", "embedding"), ("rm", "reward"), ("pt", "sft")],
)
def test_objectives_with_the_passes_of_another_one_are_priced_as_that(words: str, kind: str) -> None:
    assert parse_task(words).text == kind


@pytest.mark.parametrize("words", ["ppo", "gkd", "kd", "distillation"])
def test_objectives_with_further_models_are_refused_with_the_nearest_one(words: str) -> None:
    with pytest.raises(PlanError, match=f"task {words} is not priced") as caught:
        parse_task(words)
    assert "nearest" in str(caught.value.hint)


@pytest.mark.parametrize("plan", [DDP, ZERO_3, PIPELINE], ids=str)
def test_pairs_without_a_reference_take_what_precomputed_ones_do(workload: MakeWorkload, plan: ParallelPlan) -> None:
    orpo, dpo = (estimate_plan(workload("gpt2-xl", task=task), plan) for task in ("orpo", "dpo:precomputed"))
    assert orpo.memory == dpo.memory
    assert orpo.step == dpo.step


def test_kto_runs_both_models_on_answers_to_other_prompts_too(workload: MakeWorkload) -> None:
    kto, dpo = (estimate_plan(workload("gpt2-xl", task=task), DDP) for task in ("kto", "dpo"))
    assert kto.memory == dpo.memory
    assert kto.step.step_time_s > 1.2 * dpo.step.step_time_s
    alone = DDP.replace(micro_batch_size=1, num_microbatches=8)
    assert estimate_plan(workload("gpt2", task="kto"), alone).step.step_time_s > 0


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "qwen3-0.6b", "gemma-2-2b"])
def test_an_embedding_model_has_no_logits(workload: MakeWorkload, name: str) -> None:
    plain, pooled, scored = (workload(name, task=task) for task in ("sft", "embedding", "reranker"))
    assert pooled.model.head.matmuls == ()
    assert pooled.model.parameters.total <= plain.model.parameters.total
    assert pooled.model.parameters.embedding == plain.model.parameters.embedding
    before, after = (estimate_plan(each, DDP) for each in (plain, pooled))
    assert after.peak_memory_bytes < before.peak_memory_bytes
    assert after.step.step_time_s < before.step.step_time_s
    assert max(one.n for one in scored.model.head.matmuls) == 1
    assert any("writes no file for --task embedding" in note for note in task_notes(pooled))
    odd = ParallelPlan(dp=8, num_microbatches=8)
    with pytest.raises(PlanError, match="holds no pairs"):
        estimate_plan(pooled, odd)
    assert estimate_plan(scored, odd).step.step_time_s > 0
