from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_run import run

from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.prediction import estimate_run, is_standard, predict_run
from paraplan.accuracy.run_workload import BundledData, framework_of_run, plan_of_run, training_of_run, workload_of_run
from paraplan.accuracy.scoring import UNKNOWN_FRAMEWORK, score
from paraplan.cost.framework_files import FrameworkCatalog, load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.model.named import known_configs
from paraplan.plan.parallel import ParallelPlan

MEGATRON_CORE = load_framework("megatron-core")
PLAIN_PYTORCH = load_framework("plain-pytorch")
DATA = BundledData()
KNOWN = BundledData(configs=known_configs())
FRAMEWORKS = FrameworkCatalog()

MakeWorkload = Callable[..., Workload]


def planned(one: MeasuredRun) -> ParallelPlan:
    return plan_of_run(one, framework_of_run(one, FRAMEWORKS))


def test_blank_cells_take_the_stated_defaults() -> None:
    plan = planned(run())
    assert (plan.dp, plan.tp, plan.pp, plan.micro_batch_size, plan.num_microbatches) == (8, 1, 1, 1, 8)
    training = training_of_run(run(precision=""), MEGATRON_CORE)
    assert (training.precision, training.optimizer, training.attention) == ("bf16", "adamw", "flash")


def test_fp8_doubles_the_rate_of_linear_layers_where_the_gpu_has_it() -> None:
    row = run(layers=4, hidden=8192, heads=64, seq_len=4096, framework="Megatron-Core", flash_attention=True)
    seconds = []
    for precision in ("bf16", "fp8"):
        one = row.replace(gpu="H100-80GB", precision=precision)
        seconds.append(predict_run(one, workload_of_run(one, DATA), planned(one)).predicted_step_time_s or 0.0)
    assert 0.5 <= seconds[1] / seconds[0] <= 0.8
    with pytest.raises(PlanError, match="has no matrix products in fp8"):
        workload_of_run(row.replace(gpu="A100-80GB", precision="fp8"), DATA)


def test_stated_cells_are_kept() -> None:
    plan = planned(run(tp=2, pp=2, vpp=3, zero_stage=1, micro_batch=4, sequence_parallel=True, recompute="full"))
    assert (plan.dp, plan.virtual_pipeline_size, plan.pipeline_schedule) == (2, 3, "interleaved_1f1b")
    assert (plan.num_microbatches, plan.sequence_parallel, plan.recompute) == (8, True, "full")
    with pytest.raises(PlanError, match="dp=4 x tp=4 x pp=1 x cp=1 is not num_gpus=8"):
        planned(run(dp=4, tp=4))
    row = run(pp=8, vpp=2)
    with pytest.raises(PlanError, match="16 pipeline stages, and the model has 12 layers"):
        predict_run(row, workload_of_run(row, DATA), planned(row))


def test_blank_cells_are_what_the_framework_does_and_what_fits() -> None:
    assert planned(run(tp=2, framework="Megatron-Core")).sequence_parallel
    assert not planned(run(tp=2, framework="Megatron-LM")).sequence_parallel
    assert planned(run(tp=2, ep=8)).ep == 4, "experts over tp too"
    sharded = [planned(run(zero_stage=1, zero_shards=shards)).zero_shards for shards in (None, 4, 8)]
    assert sharded == [None, 4, None], "8 GPUs are all of dp"
    divided = planned(run(pp=4, dp=2, micro_batch=None, global_batch=32))
    assert (divided.micro_batch_size, divided.num_microbatches) == (1, 16)
    assert (planned(run(tp=2, ep=4, etp=1)).ep, planned(run(tp=2, ep=4, etp=2)).ep, planned(run(tp=2, ep=4)).ep) == (
        2,
        4,
        4,
    )
    with pytest.raises(PlanError, match="etp=2 with tp=4 and ep=2 is not modelled"):
        planned(run(tp=4, ep=2, etp=2))
    whole, split = (workload_of_run(run(tp=2, ep=4, etp=etp), DATA).framework.experts for etp in (1, 2))
    assert (whole.over_tensor_ranks, split.over_tensor_ranks) == (True, False)
    row = run(model_name="llama3-8b", layers=32, hidden=4096, heads=32, framework="MaxText (JAX)", zero_stage=3)
    row = row.replace(precision="", seq_len=8192)
    for gpu, words in (("H100-80GB", "micro-batch 1 x 8"), ("V100-SXM2-32GB", "micro-batch 1 x 8, recompute full")):
        made = workload_of_run(row.replace(gpu=gpu), KNOWN)
        attention = made.model.runs[0].block.attention
        assert attention is not None
        assert attention.num_kv_heads == 8
        assert predict_run(row, made, planned(row)).plan == f"dp8, ZeRO-3, {words}"
    assert made.training.precision == "fp16", "V100 has no bf16"


def test_a_mixture_of_experts_is_known_by_its_name_and_its_experts_go_over_ep() -> None:
    row = run(model_name="deepseekv2-4L", hidden=None, heads=None, layers=4, gpu="B200", framework="Megatron-Core")
    row = row.replace(seq_len=4096, ep=8, zero_stage=1)
    made = workload_of_run(row, KNOWN)
    assert (made.model.num_blocks, made.model.num_experts, made.model.vocab_size) == (4, 160, 102400)
    prediction = predict_run(row, made, planned(row))
    assert prediction.parallelism == "ep, ZeRO-1"
    assert prediction.plan.startswith("dp8 x ep8, ZeRO-1")
    with pytest.raises(PlanError, match="hidden, heads not given"):
        workload_of_run(row.replace(model_name="another"), KNOWN)


def test_runs_of_an_unknown_framework_are_a_group_of_their_own() -> None:
    row = run(framework="Unheard Of", measured_step_time_s=1.0)
    assert framework_of_run(row, FRAMEWORKS).name == PLAIN_PYTORCH.name
    prediction = predict_run(row, workload_of_run(row, DATA), planned(row), is_known_framework=False)
    assert not prediction.is_known_framework
    assert list(score([prediction], "step_time_error").by_framework) == [UNKNOWN_FRAMEWORK]
    for split in ({"tp": 2}, {"pp": 2}):
        assert framework_of_run(row.replace(**split), FRAMEWORKS).name == "megatron-core"


def test_published_benchmarks_force_an_even_load_unless_they_say_that_routers_chose() -> None:
    row = run(model_name="mixtral-8x7b", hidden=None, heads=None, layers=None, framework="Megatron-Core", ep=8)
    own = row.replace(framework="paraplan")
    loads = {
        name: training_of_run(one, framework_of_run(one, FRAMEWORKS)).expert_load
        for name, one in {
            "published": row,
            "natural": row.replace(routing="natural"),
            "dropped": row.replace(routing="natural", capacity_factor=1.25),
            "own": own,
            "own, even": own.replace(routing="even"),
        }.items()
    }
    assert loads == {"published": 1.0, "natural": None, "dropped": 1.25, "own": None, "own, even": 1.0}


def test_runs_with_sequence_parallelism_are_of_a_later_release() -> None:
    plain, parallel = (run(gpu="A100", framework="Megatron-LM", sequence_parallel=value) for value in (False, True))
    assert [framework_of_run(one, FRAMEWORKS).name for one in (plain, parallel)] == ["megatron-lm", "megatron-lm-2022"]


def test_what_megatron_lm_had_only_with_megatron_core_tells_its_release() -> None:
    plain = run(gpu="A100", framework="Megatron-LM")
    later = [plain.replace(gpu="H100"), plain.replace(gpu="MI300X"), plain.replace(ep=8), plain.replace(cp=2)]
    assert {framework_of_run(one, FRAMEWORKS).name for one in later} == {"megatron-lm-te"}


def test_a_model_that_is_named_with_its_own_shapes_is_that_model() -> None:
    data = BundledData(configs=known_configs())
    shapes = {"layers": 64, "hidden": 5120, "heads": 64, "kv_heads": 8, "ffn_hidden": 25600, "vocab": 151936}
    named = workload_of_run(run(model_name="Qwen3-32B", **shapes), data).model
    other = workload_of_run(run(model_name="Qwen3-32B", **shapes | {"hidden": 4096}), data).model
    assert named.runs[0].block.attention is not None
    assert named.runs[0].block.attention.qk_head_dim == 128  # 5,120 / 64 heads would be 80
    assert named.model_type == "qwen3" != other.model_type


def test_the_precision_of_gradients_is_that_of_the_row() -> None:
    def gradient_bytes(framework: str, grad_dtype: str) -> float:
        one = run(gpu="A100", framework=framework, grad_dtype=grad_dtype)
        return workload_of_run(one, DATA).framework.storage.gradient_bytes

    assert gradient_bytes("Megatron-LM", "fp32") == 4
    assert gradient_bytes("Megatron-Core", "bf16") == 2
    assert gradient_bytes("Megatron-LM", "fp32 reduce") == gradient_bytes("Megatron-LM", "")
    for stated in ("bf16", "fp32"):  # those of Megatron-FSDP too
        one = run(framework="Megatron-Core", grad_dtype=stated, zero_stage=3)
        assert workload_of_run(one, DATA).framework.storage.sharded_gradient_bytes is None


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
    prediction = predict_run(row, made, planned(row))
    assert prediction.predicted_step_time_s is not None
    assert prediction.step_time_error == pytest.approx(prediction.predicted_step_time_s / 0.02 - 1)
    assert prediction.memory_error is not None


def test_what_nvidia_smi_shows_is_more_than_what_is_allocated(workload: MakeWorkload) -> None:
    made = workload()
    allocated, shown = (
        predict_run(one, made, planned(one)).predicted_peak_memory_bytes
        for one in (run(memory_metric="max_allocated"), run(memory_metric="nvidia-smi"))
    )
    assert allocated is not None
    assert shown is not None
    assert shown > allocated + 2**29


def nanotron_run(**values: object) -> MeasuredRun:
    sizes = {"layers": 16, "hidden": 2048, "heads": 32, "seq_len": 4096, "global_batch": 256, "tp": 8}
    return run(framework="nanotron v0.5", **(sizes | values))


def test_a_block_of_little_work_takes_the_host_its_calls_and_collectives() -> None:
    def slot_s(**values: object) -> float:
        one = nanotron_run(**values)
        workload = workload_of_run(one, DATA)
        step = predict_run(one, workload, planned(one)).predicted_step_time_s
        assert step is not None
        return step / planned(one).num_microbatches / 16

    kernels = load_framework("nanotron").kernels
    floor = 2 * kernels.host_s_per_block + 10 * kernels.collective_host_s  # 4 collectives forward, 6 backward
    assert slot_s(micro_batch=1) == pytest.approx(floor, rel=0.25)
    assert slot_s(micro_batch=16) > 3 * floor


def test_collectives_hold_tensors_only_where_the_gpu_is_slower_than_the_host() -> None:
    def held(**values: object) -> float:
        one = nanotron_run(**values)
        workload = workload_of_run(one, DATA)
        freed = replace(workload, framework=workload.framework.changed(tensor_parallel={"commands_per_block": 0.0}))
        both = [estimate_run(one, made, planned(one)).memory[0].device_bytes for made in (workload, freed)]
        return (both[0] - both[1]) / (4096 * 2048 * 2)

    assert held(micro_batch=1) == 0
    assert held(micro_batch=1, tp=1) == 0
    assert held(micro_batch=16) == pytest.approx(16 * 2 * 1024 / 55 / 0.94, rel=0.01)
