"""One process on a GPU: precisions, compiled blocks, attention kernels, recompute, offload, memory and waiting."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import BATCH, Model, batch_of, engine_of, train
from torch.nn.attention import SDPBackend, sdpa_kernel

from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is a prototype feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # of torch's own compiler, as the next one
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # fp32 is meant
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
ALONE = ParallelPlan(micro_batch_size=BATCH)
Record = Callable[[str, Any], None]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_model_learns_in_every_precision(precision: TrainingPrecision, record_property: Record) -> None:
    losses = train(ALONE, num_steps=30, precision=precision, verify="full").losses
    record_property("losses", [round(losses[0], 4), round(losses[-1], 4)])
    assert losses[-1] < losses[0] - 0.2
    if precision != "fp32":
        assert losses[0] == pytest.approx(train(ALONE, num_steps=1).losses[0], rel=2e-2)


@pytest.mark.cuda_only
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_train_as_plain_ones(precision: TrainingPrecision) -> None:
    plain, compiled = (train(ALONE, precision=precision, compile_backend=name) for name in (None, "inductor"))
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.cuda_only
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_kernels_train_alike_with_and_without_recompute(kernel: SDPBackend, recompute: str) -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        expected = train(ALONE, precision="bf16")
    with sdpa_kernel([kernel]):
        found = train(ALONE.replace(recompute=recompute), precision="bf16")
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)


@pytest.mark.cuda_only
def test_recompute_takes_less_memory(record_property: Record) -> None:
    peaks = {}
    inputs, targets = batch_of(0, 256)
    for recompute in ("none", "selective", "full"):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        job, engine = engine_of(ALONE.replace(micro_batch_size=256, recompute=recompute), precision="bf16")
        for _ in range(3):
            engine.step(inputs, targets)
        job.close()
        peaks[recompute] = torch.cuda.max_memory_allocated()
        del engine
    record_property("peak_bytes", peaks)
    assert peaks["full"] < peaks["selective"] <= peaks["none"]


def test_an_optimizer_on_the_host_does_the_same_steps(record_property: Record) -> None:
    times, trained = {}, {}
    for offload in ("none", "optimizer"):
        started_s = time.perf_counter()
        trained[offload] = train(ALONE.replace(offload=offload), num_steps=6)
        times[offload] = round(time.perf_counter() - started_s, 3)
    record_property("seconds_of_six_steps", times)
    assert trained["optimizer"].losses == pytest.approx(trained["none"].losses, rel=1e-4)


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "bf16", "recompute": "full"},
        {"precision": "bf16", "compile_backend": "inductor"},
        {"precision": "bf16", "num_microbatches": 4},
    ],
    ids=str,
)
def test_ten_steps_do_not_wait_for_the_gpu(options: dict[str, Any]) -> None:
    """torch raises at whatever would: a number that is read, a copy that is waited for."""
    options = dict(options)
    count = options.pop("num_microbatches", 1)
    plan = ParallelPlan(
        micro_batch_size=BATCH // count, num_microbatches=count, recompute=options.pop("recompute", "none")
    )
    job, engine = engine_of(plan, **options)
    batches = [tuple(part.cuda() for part in batch_of(step)) for step in range(16)]
    for inputs, targets in batches[:6]:
        engine.step(inputs, targets)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for inputs, targets in batches[6:]:
            engine.step(inputs, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    job.close()


@pytest.mark.cuda_only
def test_the_host_is_ahead_of_the_gpu(record_property: Record) -> None:
    """Calls of steps return long before the steps are done: the queue of the GPU is never empty."""
    job, engine = engine_of(ALONE.replace(micro_batch_size=64), precision="bf16", num_layers=24)
    inputs, targets = (part.cuda() for part in batch_of(0, 64))
    for _ in range(5):
        engine.step(inputs, targets)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(10):
        engine.step(inputs, targets)
    returned_s = time.perf_counter() - started_s
    torch.cuda.synchronize()
    record_property("seconds_until_returned_and_done", [returned_s, time.perf_counter() - started_s])
    job.close()


@pytest.mark.cuda_only
def test_step_times_of_the_report_are_those_of_the_gpu(record_property: Record) -> None:
    job, engine = engine_of(ALONE, precision="bf16")
    reports: list[Any] = []
    engine.on_step(reports.append, every=20)
    inputs, targets = (part.cuda() for part in batch_of(0))
    for step in range(40):
        if step == 20:
            torch.cuda.synchronize()
            started_s = time.perf_counter()
        engine.step(inputs, targets)
    measured_s = (time.perf_counter() - started_s) / 20
    record_property("reported_and_measured_s", [reports[1].step_time_s, measured_s])
    assert reports[1].step_time_s == pytest.approx(measured_s, rel=0.3)
    job.close()


@pytest.mark.cuda_only
def test_tf32_is_no_false_alarm() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        losses = train(ALONE.replace(recompute="full"), verify="full").losses
    finally:
        torch.set_float32_matmul_precision(before)
    assert losses[-1] < losses[0]


@pytest.mark.cuda_only
def test_a_loss_that_is_not_a_number_ends_the_training_two_steps_later() -> None:
    from paraplan.runtime.step.faults import DivergedError

    job, engine = engine_of(ALONE)
    inputs, targets = (part.cuda() for part in batch_of(0))
    engine.step(inputs, targets)
    with torch.no_grad():
        next(iter(engine.parameters.values())).fill_(float("nan"))
    engine.step(inputs, targets)
    engine.step(inputs, targets)
    with pytest.raises(DivergedError, match="the loss is nan in step 2"):
        engine.step(inputs, targets)
    job.close()


def test_weights_come_back_from_a_checkpoint(tmp_path: Any) -> None:
    job, engine = engine_of(ALONE, precision="bf16")
    engine.step(*batch_of(0))
    engine.save(tmp_path / "one", wait=False)
    expected = engine.step(*batch_of(1)).item()
    engine.load(tmp_path / "one")
    assert engine.step(*batch_of(1)).item() == pytest.approx(expected, rel=1e-3)
    job.close()


@pytest.mark.cuda_only
def test_the_peak_of_memory_holds_the_state_of_the_training(record_property: Record) -> None:
    torch.cuda.reset_peak_memory_stats()
    job, engine = engine_of(ALONE, precision="fp32", num_layers=12)
    for step in range(4):
        engine.step(*batch_of(step))
    parameters = sum(held.numel() for held in Model(12).parameters())
    peak = torch.cuda.max_memory_allocated()
    record_property("peak_and_state_bytes", [peak, 16 * parameters])
    assert peak > 16 * parameters  # weights, gradients and two moments
    job.close()
