from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.described_run import workload_of_run
from paraplan.cost.frameworks import ALIASES, PLAIN_PYTORCH, habits_of
from paraplan.cost.habits import DEEPSPEED_ZERO, FSDP, MEGATRON_CORE, MEGATRON_DEEPSPEED, PARAPLAN
from paraplan.cost.scoring import UNKNOWN_FRAMEWORK, score
from paraplan.cost.validation import (
    habits_of_run,
    is_standard,
    plan_of_run,
    predict_run,
    training_of_run,
)
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError, ProfileError
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.profile_files import list_gpus
from paraplan.model.named import known_configs
from paraplan.plan.runs import MeasuredRun

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
        "quality": "A",
        "precision": "bf16",
    }
    return MeasuredRun.model_validate(base | values)


def test_blank_cells_take_the_stated_defaults() -> None:
    plan = plan_of_run(run())
    assert (plan.dp, plan.tp, plan.pp, plan.micro_batch_size, plan.num_microbatches) == (8, 1, 1, 1, 8)
    training = training_of_run(run(precision=""), MEGATRON_CORE)
    assert (training.precision, training.optimizer, training.attention) == ("bf16", "adamw", "flash")


def test_fp8_doubles_the_rate_of_linear_layers_where_the_gpu_has_it() -> None:
    row = run(layers=4, hidden=8192, heads=64, seq_len=4096, framework="Megatron-Core", flash_attention=True)
    for gpu, least, most in (("H100-80GB", 0.5, 0.8), ("A100-80GB", 1.0, 1.0)):
        seconds = []
        for precision in ("bf16", "fp8"):
            one = row.replace(gpu=gpu, precision=precision)
            made = workload_of_run(one, list_gpus(), load_link_speeds())
            seconds.append(predict_run(one, made, plan_of_run(one)).predicted_step_time_s or 0.0)
        assert least <= seconds[1] / seconds[0] <= most


def test_stated_cells_are_kept() -> None:
    plan = plan_of_run(run(tp=2, pp=2, vpp=3, zero_stage=1, micro_batch=4, sequence_parallel=True, recompute="full"))
    assert (plan.dp, plan.virtual_pipeline_size, plan.pipeline_schedule) == (2, 3, "interleaved_1f1b")
    assert (plan.num_microbatches, plan.sequence_parallel, plan.recompute) == (8, True, "full")
    with pytest.raises(PlanError, match="dp=4 x tp=4 x pp=1 x cp=1 is not num_gpus=8"):
        plan_of_run(run(dp=4, tp=4))
    row = run(pp=8, vpp=2)
    with pytest.raises(PlanError, match="16 pipeline stages, and the model has 12 layers"):
        predict_run(row, workload_of_run(row, list_gpus(), load_link_speeds()), plan_of_run(row))


def test_blank_cells_are_what_the_framework_does_and_what_fits() -> None:
    assert plan_of_run(run(tp=2, framework="NeMo AutoModel")).sequence_parallel
    assert not plan_of_run(run(tp=2, framework="Megatron-LM")).sequence_parallel
    assert plan_of_run(run(tp=2, ep=8)).ep == 4, "experts over tp too"
    row = run(model_name="llama3-8b", layers=32, hidden=4096, heads=32, framework="MaxText (JAX)", zero_stage=3)
    row = row.replace(precision="", seq_len=8192)
    for gpu, words in (("H100-80GB", "micro-batch 1 x 8"), ("V100-SXM2-32GB", "micro-batch 1 x 8, recompute full")):
        made = workload_of_run(row.replace(gpu=gpu), list_gpus(), load_link_speeds(), known_configs())
        attention = made.model.runs[0].block.attention
        assert attention is not None
        assert attention.num_kv_heads == 8
        assert predict_run(row, made, plan_of_run(row)).plan == f"dp8, ZeRO-3, {words}"
    assert made.training.precision == "fp16", "V100 has no bf16"


def test_a_mixture_of_experts_is_known_by_its_name_and_its_experts_go_over_ep() -> None:
    row = run(model_name="deepseekv2-4L", hidden=None, heads=None, layers=4, gpu="B200", framework="Megatron-Core")
    row = row.replace(seq_len=4096, ep=8, zero_stage=1)
    made = workload_of_run(row, list_gpus(), load_link_speeds(), known_configs())
    assert (made.model.num_blocks, made.model.num_experts, made.model.vocab_size) == (4, 160, 102400)
    prediction = predict_run(row, made, plan_of_run(row))
    assert prediction.parallelism == "ep, ZeRO-1"
    assert prediction.plan.startswith("dp8 x ep8, ZeRO-1")
    with pytest.raises(PlanError, match="hidden, heads not given"):
        workload_of_run(row.replace(model_name="another"), list_gpus(), load_link_speeds(), known_configs())


@pytest.mark.parametrize(
    ("framework", "habits"),
    [
        ("NeMo / Megatron-Core", MEGATRON_CORE),
        ("Megatron-DeepSpeed", MEGATRON_DEEPSPEED),
        ("torchtitan (FSDP2)", FSDP),
        ("DeepSpeed ZeRO-3 (Megatron-DeepSpeed)", DEEPSPEED_ZERO),
        ("Megatron-LM 23e00ed + TE 2.11", MEGATRON_CORE),
        ("paraplan", PARAPLAN),
    ],
)
def test_frameworks_are_known_by_the_words_of_their_names(framework: str, habits: object) -> None:
    assert habits_of(framework) == habits


@pytest.mark.parametrize("framework", ["something new", "papaxos", "vfsdpx", "megatron_core", ""])
def test_an_unknown_framework_is_an_error_and_not_paraplans_runtime(framework: str) -> None:
    with pytest.raises(ProfileError, match="there is no framework") as refused:
        habits_of(framework)
    assert refused.value.hint


def test_runs_of_an_unknown_framework_are_a_group_of_their_own() -> None:
    row = run(framework="InternEvo", measured_step_time_s=1.0)
    assert habits_of_run(row) == PLAIN_PYTORCH
    prediction = predict_run(row, workload_of_run(row, list_gpus(), load_link_speeds()), plan_of_run(row))
    assert not prediction.is_known_framework
    assert list(score([prediction], "step_time_error").by_framework) == [UNKNOWN_FRAMEWORK]


def test_every_framework_names_its_source() -> None:
    assert all(habits.source for habits in ALIASES.values())


def test_the_precision_of_gradients_is_that_of_the_row() -> None:
    assert habits_of_run(run(framework="Megatron-LM", grad_dtype="fp32")).gradient_bytes == 4
    assert habits_of_run(run(framework="Megatron-Core", grad_dtype="bf16")).gradient_bytes == 2


def test_only_complete_usual_rows_are_standard() -> None:
    assert is_standard(run())
    assert is_standard(run(quality=""))
    assert not is_standard(run(quality="C"))
    assert not is_standard(run(nonstandard_features="LoRA"))
    assert not is_standard(run(precision="fp8"))
    assert not is_standard(run(fit_status="oom"))


def test_errors_are_predicted_over_measured_less_one(workload: MakeWorkload) -> None:
    made = workload()
    row = run(measured_step_time_s=0.02, measured_peak_mem_gib=10.0, memory_metric="max_allocated")
    prediction = predict_run(row, made, plan_of_run(row))
    assert prediction.predicted_step_time_s is not None
    assert prediction.step_time_error == pytest.approx(prediction.predicted_step_time_s / 0.02 - 1)
    assert prediction.memory_error is not None


def test_what_nvidia_smi_shows_is_more_than_what_is_allocated(workload: MakeWorkload) -> None:
    made = workload()
    allocated, shown = (
        predict_run(one, made, plan_of_run(one)).predicted_peak_memory_bytes
        for one in (run(memory_metric="max_allocated"), run(memory_metric="nvidia-smi"))
    )
    assert allocated is not None
    assert shown is not None
    assert shown > allocated + 2**29
