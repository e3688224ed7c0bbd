"""What measured runs say about memory: optimizers, flags, contradictions, and whether they ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paraplan.cost.frameworks import habits_of
from paraplan.cost.habits import FLAGSCALE, MEGATRON_CORE, MEGATRON_DEEPSPEED, PADDLE, TORCHTUNE
from paraplan.cost.scoring import score_fits
from paraplan.cost.validation import RunPrediction, habits_of_run, plan_of_run, predict_run, training_of_run
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.runs import MeasuredRun
from paraplan.units import GIB, MIB

MakeWorkload = Callable[..., Workload]


def run(**values: object) -> MeasuredRun:
    base: dict[str, object] = {
        "id": "a",
        "gpu": "H100-80GB",
        "num_gpus": 8,
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "seq_len": 1024,
        "global_batch": 64,
    }
    return MeasuredRun.model_validate(base | values)


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        ("", "adamw"),
        ("adam (dist. optimizer)", "adamw"),
        ("PagedAdamW 8-bit", "adamw_8bit"),
        ("adam 8-bit", "adamw_8bit"),
        ("Adafactor", "adafactor"),
        ("muon", "muon"),
        ("SGD", "sgd"),
    ],
)
def test_optimizers_are_known_by_their_words(words: str, optimizer: str) -> None:
    assert training_of_run(run(optimizer=words), MEGATRON_CORE).optimizer == optimizer


@pytest.mark.parametrize(
    ("framework", "habits"),
    [("torchtune FSDP", TORCHTUNE), ("PaddlePaddle 2.5.1 (PaddleNLP)", PADDLE), ("FlagScale (Megatron-LM)", FLAGSCALE)],
)
def test_more_frameworks_are_known_by_the_words_of_their_names(framework: str, habits: object) -> None:
    assert habits_of(framework) == habits


def test_flags_in_the_notes_change_the_habits() -> None:
    framework = "Megatron-Core CI, transformer-impl=transformer_engine"
    habits = habits_of_run(run(framework=framework, notes="flags: deterministic-mode, cross-entropy-loss-fusion"))
    assert habits.is_deterministic
    assert habits.logit_bytes == 10
    stated = habits_of_run(run(framework=framework, notes="biases=1; dropout attention 0.0 hidden 0.0; rope"))
    assert stated.dropout == 0
    assert habits_of_run(run(framework=framework)) == MEGATRON_CORE
    shown = run(memory_metric="nvidia-smi (GB as printed, includes 1113 MiB CUDA context)")
    assert habits_of_run(shown).context_bytes == 1113 * MIB


def test_a_batch_smaller_than_one_micro_batch_a_rank_is_a_contradiction() -> None:
    with pytest.raises(PlanError, match="a global batch of 2 is less than dp=8 micro-batches of 2"):
        plan_of_run(run(dp=8, micro_batch=2, global_batch=2))


def test_fits_counts_what_ran_and_what_ran_out_of_memory() -> None:
    def prediction(*, fits: bool | None, said: bool, skipped: str | None = None) -> RunPrediction:
        values = {"id": "a", "source": "s", "gpu": "g", "framework": "f"}
        return RunPrediction(**values, fits=fits, predicted_fits=said, skipped=skipped)

    score = score_fits(
        [
            prediction(fits=True, said=True),
            prediction(fits=True, said=False),
            prediction(fits=False, said=False),
            prediction(fits=None, said=True),
            prediction(fits=False, said=False, skipped="no such GPU"),
        ]
    )
    assert (score.ran, score.ran_predicted, score.out_of_memory, score.out_of_memory_predicted) == (2, 1, 1, 1)


def test_a_run_that_no_gpu_holds_is_predicted_to_run_out_of_memory(workload: MakeWorkload) -> None:
    measured = run(dp=8, micro_batch=64, global_batch=512, fit_status="oom", memory_metric="nvidia-smi")
    for size, fits in ((64, False), (1, True)):
        one = measured.replace(micro_batch=size)
        predicted = predict_run(one, workload(global_batch_size=512), plan_of_run(one))
        assert (predicted.fits, predicted.predicted_fits) == (False, fits)


def test_nvidia_smi_sees_more_under_deepspeeds_pipeline_than_the_allocator_hands_out(workload: MakeWorkload) -> None:
    measured = run(framework="Megatron-DeepSpeed", dp=8, zero_stage=1, memory_metric="nvidia-smi")
    made = replace(workload(), habits=MEGATRON_DEEPSPEED)
    shown = predict_run(measured, made, plan_of_run(measured)).predicted_peak_memory_bytes
    allocated = predict_run(
        measured.replace(memory_metric="max_allocated"), made, plan_of_run(measured)
    ).predicted_peak_memory_bytes
    assert shown is not None
    assert allocated is not None
    # The context of its time, NCCL, the bucket and the flat copies, in blocks that nothing else can use.
    assert shown - allocated > 1.7 * GIB
