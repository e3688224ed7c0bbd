"""What measured runs say about memory: optimizers, flags, contradictions, and whether they ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_run import run

from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.prediction import predict_run
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.run_workload import BundledData, plan_of_run, training_of_run, workload_of_run
from paraplan.accuracy.scoring import score_fits
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.report.short_text import memory_verdict
from paraplan.units import GIB, MIB

MEGATRON_CORE = load_framework("megatron-core")
MEGATRON_DEEPSPEED = load_framework("megatron-deepspeed")

MakeWorkload = Callable[..., Workload]
RunAndPrediction = tuple[MeasuredRun, RunPrediction]


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


def test_columns_of_a_run_change_what_is_modelled() -> None:
    data = BundledData()
    plain = run(framework="Megatron-Core CI, transformer-impl=transformer_engine")
    stated = plain.replace(deterministic=True, compiled_loss=True, dropout=0.0, context_bytes=1113 * MIB)
    before, after = (workload_of_run(one, data) for one in (plain, stated))
    assert before.framework == MEGATRON_CORE
    assert before.constants.cublas_workspace_bytes is None
    assert after.constants.cublas_workspace_bytes == 32 * MIB
    assert after.framework.loss.peak_logit_bytes == 10
    torchtitan = run(framework="torchtitan (FSDP2)", torch_compile=True)
    bytes_each = [workload_of_run(torchtitan.replace(compiled_loss=is_compiled), data) for is_compiled in (False, True)]
    assert [one.framework.loss.peak_logit_bytes for one in bytes_each] == [12, 4]
    assert not any(one.element_type == "mask" for run in after.model.runs for one in run.block.saved)
    assert after.framework.storage.context_bytes == 1113 * MIB


def test_a_classifier_has_no_lm_head() -> None:
    made = workload_of_run(run(head="classifier"), BundledData())
    assert made.model.vocab_size == 1


def test_nothing_is_read_from_notes() -> None:
    notes = "deterministic-mode; cross-entropy-loss-fusion; no LM head; fp32 grads; sequence parallel"
    data = BundledData()
    plain, noted = (workload_of_run(run(framework="Megatron-LM", notes=text), data) for text in ("", notes))
    assert (noted.framework, noted.constants, noted.model) == (plain.framework, plain.constants, plain.model)


def test_a_batch_smaller_than_one_micro_batch_a_rank_is_a_contradiction() -> None:
    with pytest.raises(PlanError, match="a global batch of 2 is less than dp=8 micro-batches of 2"):
        plan_of_run(run(dp=8, micro_batch=2, global_batch=2), MEGATRON_CORE)
    with pytest.raises(PlanError, match="tp, pp and cp are blank, and a global batch of 2 is less than one for each"):
        plan_of_run(run(dp=None, tp=None, pp=None, cp=None, num_gpus=8, micro_batch=1, global_batch=2), MEGATRON_CORE)


def of_run(made: MeasuredRun, *, fits: bool | None, said: bool = True, skipped: str | None = None) -> RunAndPrediction:
    values = {"id": made.id, "source": made.source, "gpu": made.gpu, "framework": made.framework}
    return made, RunPrediction(**values, fits=fits, predicted_fits=said, skipped=skipped)


def test_fits_counts_what_ran_and_what_ran_out_of_memory() -> None:
    score = score_fits(
        [
            of_run(run(micro_batch=1), fits=True),
            of_run(run(micro_batch=1), fits=True, said=False),
            of_run(run(micro_batch=4), fits=False, said=False),
            of_run(run(micro_batch=4), fits=False),
            of_run(run(micro_batch=4), fits=None),
            of_run(run(micro_batch=4), fits=False, said=False, skipped="no such GPU"),
            of_run(run(micro_batch=4, nonstandard_features="optimizer offloaded"), fits=False),
        ]
    )
    assert (score.ran, score.ran_predicted, score.out_of_memory, score.out_of_memory_predicted) == (2, 1, 2, 1)
    assert score.ended_otherwise == 0


@pytest.mark.parametrize(
    ("ended_well", "otherwise"),
    [
        ({"tp": 2, "micro_batch": 2}, 1),
        ({"tp": 1, "micro_batch": 4}, 1),
        ({"tp": 4, "micro_batch": 2}, 0),
        ({"tp": 2, "micro_batch": 1}, 0),
        ({"tp": 2, "micro_batch": 2, "zero_stage": 1}, 0),
        ({"tp": 2, "micro_batch": 2, "recompute": "full"}, 0),
        ({"tp": 2, "micro_batch": 2, "seq_len": 512}, 0),
        ({"num_gpus": 4}, 1),
        ({"num_gpus": 16}, 0),
        ({"num_microbatches": 1}, 1),  # without a pipeline none wait
        ({"pp": 2}, 1),
        ({"pp": 8}, 0),
        ({"pp": 2, "num_microbatches": 1}, 0),  # half of the layers have a micro-batch, with pp=4 all had
    ],
)
def test_what_failed_where_no_less_on_each_gpu_ran_did_not_run_out_of_memory(
    ended_well: dict[str, object], otherwise: int
) -> None:
    failed = run(tp=2, micro_batch=2, zero_stage=0, recompute="none", pp=4 if "pp" in ended_well else 1)
    other = failed.replace(**ended_well)
    score = score_fits([of_run(failed, fits=False), of_run(other, fits=True)])
    assert (score.ended_otherwise, score.out_of_memory) == (otherwise, 1 - otherwise)


def test_a_run_that_no_gpu_holds_is_predicted_to_run_out_of_memory(workload: MakeWorkload) -> None:
    measured = run(dp=8, micro_batch=64, global_batch=512, fit_status="oom", memory_metric="nvidia-smi")
    for size, fits in ((64, False), (1, True)):
        one = measured.replace(micro_batch=size)
        predicted = predict_run(one, workload(global_batch_size=512), plan_of_run(one, MEGATRON_CORE))
        assert (predicted.fits, predicted.predicted_fits) == (False, fits)


def test_a_run_fits_where_what_the_allocator_keeps_fits_too(workload: MakeWorkload) -> None:
    made = workload("gpt2", seq_length=1024, global_batch_size=8 * 512)
    tight = 0
    for size in range(32, 80):
        one = run(dp=8, micro_batch=size, global_batch=8 * size, recompute="none")
        estimate = evaluate_plan(made, plan_of_run(one, MEGATRON_CORE))
        cached = max(stage.cached_device_bytes for stage in estimate.memory)
        device = max(stage.device_bytes for stage in estimate.memory)
        assert device <= cached
        gives_back = device <= made.cluster.gpu_memory_bytes < cached
        tight += gives_back
        assert predict_run(one, made, estimate.plan).predicted_fits == (cached <= made.cluster.gpu_memory_bytes)
        if gives_back and estimate.fits:
            assert memory_verdict(made, estimate)[0].startswith("may not fit")
    assert tight


def test_a_run_without_a_language_model_head_keeps_no_logits() -> None:
    heads = [run(nonstandard_features=words) for words in ("", "question-answering head (no LM head)")]
    whole, without = (workload_of_run(one, BundledData()).model for one in heads)
    assert whole.head.parameters or whole.tied_embeddings
    assert without.vocab_size == 1
    assert without.head.kind == "classifier"
    assert not without.head.matmuls


def test_nvidias_bert_example_trains_a_16_bit_model_without_autocast() -> None:
    made = workload_of_run(run(framework="PyTorch DDP, NVIDIA DLE run_squad.py", precision="fp16"), BundledData())
    storage = made.framework.storage
    assert (storage.is_autocast, storage.weight_bytes, storage.master_bytes) == (False, 2, 4)


def test_nvidia_smi_sees_more_under_deepspeeds_pipeline_than_the_allocator_hands_out(workload: MakeWorkload) -> None:
    measured = run(framework="Megatron-DeepSpeed", dp=8, zero_stage=1, memory_metric="nvidia-smi")
    made = replace(workload(), framework=MEGATRON_DEEPSPEED)
    shown = predict_run(measured, made, plan_of_run(measured, MEGATRON_DEEPSPEED)).predicted_peak_memory_bytes
    allocated = predict_run(
        measured.replace(memory_metric="max_allocated"), made, plan_of_run(measured, MEGATRON_DEEPSPEED)
    ).predicted_peak_memory_bytes
    assert shown is not None
    assert allocated is not None
    # The context of its time, NCCL, the bucket and the flat copies, in blocks that nothing else can use.
    assert shown - allocated > 1.7 * GIB
