"""Samples that stand in sequences one behind the other, and attend to their own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.run_workload import BundledData, workload_of_run
from paraplan.cost.blocks.module_traffic import KERNEL_START_S
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.model.named import known_configs
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.training import AttentionKind, TrainingSpec
from paraplan.report.short_text import samples_in_words, samples_rates

MakeWorkload = Callable[..., Workload]
PLAN = ParallelPlan(dp=8, zero_stage=3, num_microbatches=8)


def trained(made: Workload, attention: AttentionKind, *, length: int | None, packed: bool = True) -> Workload:
    training = made.training.replace(attention=attention, sample_length=length, packs_samples=packed)
    return replace(made, training=training)


def test_attention_of_packed_samples_is_that_of_sequences_as_long(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=8192)
    steps = [evaluate_plan(trained(made, "flash", length=length), PLAN).step for length in (512, 1024, 4096, 8192)]
    seconds = np.array([step.compute_s for step in steps])
    # Of each token pairs with half of its sample, and kernels of short samples fill less of their tiles.
    assert (np.diff(seconds) > 0).all()
    alone = evaluate_plan(trained(made, "flash", length=None, packed=False), PLAN).step
    assert steps[-1].compute_s == alone.compute_s
    rates = [step.model_flops_per_s_per_gpu * step.step_time_s for step in steps]
    assert np.diff(rates) / np.diff([512, 1024, 4096, 8192]) == pytest.approx((rates[1] - rates[0]) / 512)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_kernels_that_mask_compute_all_scores(workload: MakeWorkload, attention: AttentionKind) -> None:
    made = workload("llama-3-8b", seq_length=2048)
    packed, alone = (
        evaluate_plan(trained(made, attention, length=length, packed=length is not None), PLAN).step.step_time_s
        for length in (256, None)
    )
    assert packed == alone


def test_packing_has_no_padding_and_trains_on_more_a_second(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=8192)
    padded = trained(made, "flash", length=512, packed=False)
    assert padded.training.padding_share == 1 - 512 / 8192
    assert trained(made, "flash", length=512).training.padding_share == 0
    slow, fast = samples_rates(padded, evaluate_plan(padded, PLAN))
    step = evaluate_plan(trained(made, "flash", length=512), PLAN).step
    assert slow * 16 < fast == step.tokens_per_s_per_gpu


def test_samples_that_fill_a_sequence_alone_are_not_called_packed(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=8192)
    for length, words in ((512, "each attends to its own tokens alone"), (9000, "each fills a sequence alone")):
        packed = trained(made, "flash", length=length)
        assert words in (samples_in_words(packed, evaluate_plan(packed, PLAN)) or "")


def in_framework(made: Workload, name: str) -> Workload:
    return replace(made, framework=load_framework(name))


def exchanging(made: Workload, engine: bool) -> Workload:
    return replace(made, framework=made.framework.changed(kernels={"engine": engine}))


def looped(made: Workload, *, fuses_rotations: bool) -> Workload:
    stack = made.training.stack.replace(fuses_rotations=fuses_rotations)
    return replace(made, training=made.training.replace(stack=stack))


def test_rotations_that_go_from_sample_to_sample_wait_for_the_host(workload: MakeWorkload) -> None:
    made = in_framework(workload("qwen3-8b", seq_length=8192), "megatron-core")
    starts_s = 8 * 36 * 2 * KERNEL_START_S  # micro-batches, blocks, sequences

    def more_s(made: Workload, recompute: Recompute = "none") -> float:
        plan = ParallelPlan(dp=2, tp=4, num_microbatches=8, recompute=recompute, micro_batch_size=2)
        fused, looped_ = (evaluate_plan(looped(made, fuses_rotations=way), plan).step for way in (True, False))
        return (looped_.step_time_s - fused.step_time_s) / starts_s

    short, long = (trained(made, "flash", length=length) for length in (128, 256))
    least, most = 26 * 64, 48 * 64  # GPUs work while the host starts what a backward pass turns
    assert least <= more_s(short) <= most
    assert more_s(short) - more_s(long) >= least / 2
    assert more_s(short, "selective_ops") == pytest.approx(more_s(short))
    assert more_s(short, "full") - more_s(short) == pytest.approx(least)
    for attention, packed in (("flash", False), ("sdpa", True), ("eager", True)):  # which are not told apart
        assert more_s(trained(made, attention, length=128, packed=packed)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("cp", [2, 4])
def test_an_exchange_of_heads_finds_its_order_sample_by_sample(workload: MakeWorkload, cp: int) -> None:
    def more_s(framework: str, *, ring: bool, recompute: Recompute = "none", length: int | None = 128) -> float:
        made = trained(workload("qwen3-8b", seq_length=8192), "flash", length=length, packed=length is not None)
        made = in_framework(made, framework)
        made = replace(made, framework=made.framework.changed(kernels={"ring_attention": ring}))
        plan = ParallelPlan(dp=4 // cp, cp=cp, tp=2, num_microbatches=4, recompute=recompute)
        steps = [evaluate_plan(exchanging(made, engine), plan).step for engine in (False, True)]
        assert steps[1].compute_s == pytest.approx(steps[0].compute_s)
        return (steps[1].context_parallel_s - steps[0].context_parallel_s) / (cp * 4 * 36 * 64 * KERNEL_START_S)

    for ways, starts in (
        ({"framework": "megatron-core", "ring": False, "length": None}, 0),
        ({"framework": "megatron-core", "ring": False}, 144),
        ({"framework": "megatron-core", "ring": False, "recompute": "selective_ops"}, 144),
        ({"framework": "megatron-core", "ring": False, "recompute": "full"}, 224),
        ({"framework": "torchtitan", "ring": False, "recompute": "selective_ops"}, 224),
    ):
        assert more_s(**ways) == pytest.approx(starts), ways  # type: ignore[arg-type]


def test_what_is_packed_has_a_length() -> None:
    with pytest.raises(PlanError, match="how long the samples are"):
        TrainingSpec(global_batch_size=8, seq_length=128, packs_samples=True)


def test_rows_state_packing() -> None:
    columns = "id,gpu,num_gpus,model_name,layers,hidden,heads,seq_len,global_batch,sample_length,packed"
    rows = "a,H100,8,llama-3-8b,,,,4096,8,300,1\nb,H100,8,llama-3-8b,,,,4096,8,300,\n"
    runs = [run for run in read_runs(f"{columns}\n{rows}", source="x") if isinstance(run, MeasuredRun)]
    data = BundledData(configs=known_configs())
    packs = [workload_of_run(data.completed(run), data).training.packs_samples for run in runs]
    assert packs == [True, False]


@pytest.mark.parametrize(
    ("cells", "ring", "fuses"),
    [(",", True, True), ("a2a,1", False, True), ("p2p,0", True, False), ("ring,", True, True)],
)
def test_rows_state_what_goes_from_sample_to_sample(cells: str, ring: bool, fuses: bool) -> None:
    columns = (
        "id,gpu,num_gpus,model_name,layers,hidden,heads,seq_len,global_batch,framework,cp_exchange,fuses_rotations"
    )
    row = f"a,H100,8,llama-3-8b,,,,4096,8,Megatron-Bridge,{cells}\n"
    (run,) = read_runs(f"{columns}\n{row}", source="x")
    assert isinstance(run, MeasuredRun), run
    made = workload_of_run(run, BundledData(configs=known_configs()))
    turned = made.training.stack.fuses_rotations is not False
    assert (made.framework.kernels.ring_attention, turned) == (ring, fuses)
