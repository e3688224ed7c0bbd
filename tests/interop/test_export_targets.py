"""What each target says of a plan, and what it owns up to."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from exported_plans import PLANS, STARTS_OUR_RUNTIME, subject

from paraplan.api.imported import import_plan
from paraplan.cost.framework_files import load_framework
from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.interop.export import TARGETS, export_plan
from paraplan.plan.files import PlanFile, PlannedPlacement
from paraplan.plan.stack import StackSettings

YAML_TARGETS = ("accelerate", "megatron-bridge", "pytorchjob", "trainjob", "jobset", "skypilot")
SCRIPTS = ("torchrun", "slurm", "megatron-lm")
COMMENTED = (*YAML_TARGETS, *SCRIPTS, "torchtitan", "torchtitan-python")
LAUNCHED_BY_PARAPLAN = ("torchrun", "slurm", "pytorchjob", "trainjob", "jobset", "skypilot")


def read(target: str, plan: str, **training: object) -> Any:
    text = export_plan(subject(plan, **training), target, partial=True).text
    if target in YAML_TARGETS:
        return yaml.safe_load(text)
    if target in ("deepspeed", "hf-trainer"):
        return json.loads(text)
    return tomllib.loads(text) if target == "torchtitan" else text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_a_file_of_its_format_that_names_what_is_missing(target: str, plan: str) -> None:
    exported = export_plan(subject(plan), target, partial=True)
    read(target, plan)
    for gap in exported.gaps:
        assert target == "hf-trainer" or str(gap) in exported.text
    if target in COMMENTED:
        assert all(f"Left to you: {note}" in exported.text for note in exported.notes)


def test_what_cannot_be_expressed_is_an_error_that_names_all_of_it() -> None:
    with pytest.raises(UnsupportedPlanError) as caught:
        export_plan(subject("pipeline"), "accelerate")
    assert "pp=4" in caught.value.message
    assert "sequence_parallel=True" in caught.value.message
    assert caught.value.hint is not None
    assert "recommend --framework" in caught.value.hint


@pytest.mark.parametrize(
    ("word", "target"),
    [("kubernetes", "pytorchjob, trainjob or jobset"), ("NeMo", "megatron-bridge"), ("sbatch", "slurm"), ("hf", "hf-")],
)
def test_another_word_for_a_target_leads_to_it(word: str, target: str) -> None:
    with pytest.raises(UsageError) as caught:
        export_plan(subject("ddp"), word)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"use {target}")


def test_an_unknown_target_is_named_with_its_neighbours() -> None:
    with pytest.raises(UsageError, match="deepspede") as caught:
        export_plan(subject("ddp"), "deepspede")
    assert caught.value.hint == "did you mean deepspeed?"


@pytest.mark.parametrize("target", ["pytorchjob", "trainjob", "jobset"])
def test_a_pod_needs_an_image(target: str) -> None:
    with pytest.raises(UsageError, match="image"):
        export_plan(subject("ddp").replace(image=None), target)


@pytest.mark.parametrize("target", LAUNCHED_BY_PARAPLAN)
def test_what_the_runtime_does_not_execute_is_a_gap_where_paraplan_launches(target: str) -> None:
    # 1F1B needs a micro-batch for each stage.
    made = subject({"pp": 4, "pipeline_schedule": "1f1b", "num_microbatches": 2})
    (gap,) = export_plan(made, target, partial=True).gaps
    assert "paraplan.runtime does not execute it" in gap.reason
    assert export_plan(subject("zero-3"), target).gaps == ()
    (gap,) = export_plan(subject("zero-3", linear_precision="fp8", fp8_recipe="delayed"), target, partial=True).gaps
    assert gap.part == "--fp8-recipe delayed"


def test_ddp_in_accelerate() -> None:
    config = read("accelerate", "ddp")
    assert config["distributed_type"] == "MULTI_GPU"
    assert (config["num_machines"], config["num_processes"]) == (1, 8)
    assert config["mixed_precision"] == "bf16"
    assert "fsdp_config" not in config


@pytest.mark.parametrize(("plan", "reshards"), [("zero-2", False), ("zero-3", True)])
def test_zero_2_and_3_are_fsdp2_in_accelerate_and_the_trainer(plan: str, reshards: bool) -> None:
    config = read("accelerate", plan)
    assert config["distributed_type"] == "FSDP"
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is reshards
    arguments = read("hf-trainer", plan)
    assert arguments["fsdp"] is True
    assert arguments["fsdp_config"]["reshard_after_forward"] is reshards


def test_tp_and_cp_beside_fsdp_are_accelerates_parallelism_config() -> None:
    sizes = read("accelerate", "fsdp, tp and cp")["parallelism_config"]
    prefix = "parallelism_config_"
    assert {key.removeprefix(prefix): value for key, value in sizes.items()} == {
        "dp_replicate_size": 1,
        "dp_shard_size": 2,
        "cp_size": 2,
        "tp_size": 2,
    }


def test_zero_1_and_an_offloaded_optimizer_become_deepspeed_in_accelerate() -> None:
    config = read("accelerate", "zero-1 offloaded")
    assert config["distributed_type"] == "DEEPSPEED"
    assert config["deepspeed_config"]["zero_stage"] == 1
    assert config["deepspeed_config"]["offload_optimizer_device"] == "cpu"


@pytest.mark.parametrize("plan", PLANS)
def test_deepspeeds_batch_sizes_multiply(plan: str) -> None:
    config, parallel = read("deepspeed", plan), subject(plan).plan
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    # DeepSpeed multiplies by all ranks, so with others than data-parallel ones it is left to follow from the two.
    total = micro * steps * parallel.dp if parallel.dp == parallel.world_size else None
    assert config.get("train_batch_size") == total
    assert config["zero_optimization"]["stage"] == parallel.zero_stage


def test_deepspeed_offloads_parameters_with_zero_3() -> None:
    zero = read("deepspeed", "zero-3 offloaded")["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"


ALONE: dict[str, object] = {"zero_stage": 3, "offload": "parameters"}


@pytest.mark.parametrize(("plan", "stage"), [({"offload": "optimizer"}, 2), (ALONE, 3)])
def test_what_one_gpu_offloads_decides_deepspeeds_stage(plan: dict[str, object], stage: int) -> None:
    exported = export_plan(subject(plan), "deepspeed")
    zero = json.loads(exported.text)["zero_optimization"]
    assert (zero["stage"], exported.gaps) == (stage, ())
    assert ("offload_param" in zero) == (stage == 3)


def test_parameters_of_one_process_are_offloaded_by_deepspeed_where_a_tool_has_it(tmp_path: Path) -> None:
    made = subject(ALONE)
    for target in ("deepspeed", "accelerate", "hf-trainer"):
        path = tmp_path / f"{target}.txt"
        path.write_text(export_plan(made, target, partial=True).text)
        read_back = import_plan(path, target, num_gpus=1, micro_batch_size=1, global_batch_size=1)
        assert read_back.plan.gathers_alone, target
    assert "distributed_type: DEEPSPEED" in export_plan(made, "trl", partial=True).text
    for target in ("torchtitan", "torchtune", "transformers", "nemo-automodel", "megatron-lm"):
        with pytest.raises(UnsupportedPlanError, match="over several ranks alone"):
            export_plan(made, target, partial=True)
    exported = export_plan(subject({"offload": "parameters"}), "deepspeed", partial=True)
    assert [gap.part for gap in exported.gaps] == ["offload=parameters"]


def test_deepspeed_is_told_of_optimizers_that_it_would_refuse() -> None:
    assert read("deepspeed", "zero-3", optimizer="sgd")["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in read("deepspeed", "zero-3")
    notes = export_plan(subject("zero-3 offloaded"), "deepspeed", partial=True).notes
    assert any("DeepSpeedCPUAdam" in note for note in notes)


def test_the_modules_that_galore_projects_are_named_where_the_trainer_asks_for_them() -> None:
    made = subject({"dp": 8}, optimizer="galore_adamw", precision="bf16-pure")
    assert json.loads(export_plan(made, "hf-trainer").text)["optim_target_modules"] == "all-linear"
    assert yaml.safe_load(export_plan(made, "axolotl").text)["optim_target_modules"] == "all-linear"
    assert "--optim_target_modules all-linear" in export_plan(made, "trl").text


def test_deepspeeds_precision_and_tensor_parallelism() -> None:
    config = read("deepspeed", "fsdp and tp", precision="fp16")
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (False, True)
    assert config["tensor_parallel"] == {"autotp_size": 2}


def megatron(plan: str, **training: object) -> dict[str, str]:
    found = re.findall(r"^  --(\S+)(?: (.+))?$", read("megatron-lm", plan, **training), flags=re.MULTILINE)
    return dict(found)


def test_megatrons_degrees_rank_order_and_distributed_optimizer() -> None:
    arguments = megatron("pipeline")
    assert arguments["tensor-model-parallel-size"] == "2"
    assert arguments["pipeline-model-parallel-size"] == "4"
    assert arguments["global-batch-size"] == "32"
    assert arguments["pipeline-model-parallel-layout"] == "'Et*9|t*8|t*8|t*7L'"
    assert {"use-distributed-optimizer", "use-tp-pp-dp-mapping", "sequence-parallel", "bf16"} <= set(arguments)
    assert "use-tp-pp-dp-mapping" not in megatron("interleaved")


def test_megatrons_interleaved_stages_and_full_recompute() -> None:
    arguments = megatron("interleaved")
    assert arguments["num-virtual-stages-per-pipeline-rank"] == "2"
    assert arguments["recompute-granularity"] == "full"
    assert arguments["recompute-method"] == "uniform"


@pytest.mark.parametrize(("micro_batches", "group"), [(8, None), (12, None), (10, "5"), (7, "7")])
def test_megatrons_interleaved_rounds_are_equal(micro_batches: int, group: str | None) -> None:
    made = subject(PLANS["interleaved"] | {"num_microbatches": micro_batches})
    text = export_plan(made, "megatron-lm").text
    found = re.findall(r"--microbatch-group-size-per-virtual-pipeline-stage (\d+)", text)
    assert found == ([group] if group else [])
    model = yaml.safe_load(export_plan(made, "megatron-bridge").text)["model"]
    assert model.get("microbatch_group_size_per_vp_stage") == (int(group) if group else None)


def test_megatron_shards_parameters_with_its_own_fsdp() -> None:
    assert megatron("zero-3")["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert "bf16" not in megatron("zero-3", precision="fp32")


@pytest.mark.parametrize(("precision", "is_narrow"), [("bf16", True), ("fp16", False), ("fp32", False)])
def test_gradients_of_megatrons_fsdp_are_sent_as_they_are_priced(precision: str, is_narrow: bool) -> None:
    assert ("grad-reduce-in-bf16" in megatron("zero-3", precision=precision)) == is_narrow
    assert "grad-reduce-in-bf16" not in megatron("pipeline", precision=precision)


EXPERTS = {"dp": 8, "tp": 2, "pp": 2, "ep": 4, "zero_stage": 1, "sequence_parallel": True, "num_microbatches": 4}
EXPERTS |= {"pipeline_schedule": "1f1b"}


def test_experts_over_ranks_are_written_for_megatron() -> None:
    text = export_plan(subject(EXPERTS), "megatron-lm").text
    assert {"--expert-model-parallel-size 4", "--expert-tensor-parallel-size 2"} <= {
        line.strip() for line in text.splitlines()
    }
    model = yaml.safe_load(export_plan(subject(EXPERTS), "megatron-bridge").text)["model"]
    # Megatron-Bridge's recipes hold whole experts over the ranks of tp too, and are priced so.
    assert (model["expert_model_parallel_size"], model["expert_tensor_parallel_size"]) == (8, 1)
    assert "expert" not in export_plan(subject("pipeline"), "megatron-lm").text
    inside = export_plan(subject(EXPERTS | {"rank_order": ("dp", "pp", "cp", "tp")}), "megatron-lm", partial=True)
    assert [gap.part for gap in inside.gaps] == ["ep=4"]
    whole = export_plan(subject(EXPERTS | {"sequence_parallel": False}), "megatron-lm", partial=True)
    assert [str(gap) for gap in whole.gaps] == [
        "ep=4: Megatron-Core sends tokens to experts beside tp under sequence parallelism alone"
    ]


@pytest.mark.parametrize("target", sorted(STARTS_OUR_RUNTIME))
def test_what_starts_our_runtime_takes_experts_over_ranks(target: str) -> None:
    exported = export_plan(subject({"dp": 8, "ep": 4}), target, partial=True)
    assert "ep=4" not in [gap.part for gap in exported.gaps]


@pytest.mark.parametrize(
    "target", sorted(set(TARGETS) - STARTS_OUR_RUNTIME - {"megatron-lm", "megatron-bridge", "deepspeed"})
)
def test_experts_over_ranks_are_a_gap_elsewhere(target: str) -> None:
    exported = export_plan(subject({"dp": 8, "ep": 4}), target, partial=True)
    assert "ep=4" in [gap.part for gap in exported.gaps]
    assert "expert_parallel_degree" not in exported.text


def test_experts_over_the_ranks_of_fsdp_are_written_for_torchtitan() -> None:
    made = subject({"dp": 8, "ep": 4, "zero_stage": 3})
    assert "expert_parallel_degree = 4" in export_plan(made, "torchtitan").text
    assert "expert_parallel_degree = 4" in export_plan(made, "torchtitan-python").text


def test_sizes_of_whole_experts_count_the_ranks_of_tp() -> None:
    made = subject({"dp": 8, "tp": 2, "ep": 4, "zero_stage": 3, "sequence_parallel": True})
    parallelism = tomllib.loads(export_plan(made, "torchtitan").text)["parallelism"]
    assert (parallelism["expert_parallel_degree"], parallelism["expert_tensor_parallel_degree"]) == (8, 1)
    assert "expert_parallel_degree = 8" in export_plan(made, "torchtitan-python").text
    folded = export_plan(subject({"dp": 8, "tp": 2, "ep": 4, "zero_stage": 2}), "deepspeed")
    assert folded.gaps == ()
    assert json.loads(folded.text)["expert_parallel"] == {"enabled": True, "autoep_size": 8}
    sharded = export_plan(subject({"dp": 8, "tp": 2, "ep": 4, "zero_stage": 3}), "deepspeed", partial=True)
    assert [str(gap) for gap in sharded.gaps] == ["ep=4: beside tp AutoEP has ZeRO stages 0 to 2 without offload"]


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        ({"dp": 4, "ep": 4}, (4, None)),
        ({"dp": 8, "ep": 2, "zero_stage": 3}, (2, 4)),
        ({"dp": 4, "cp": 2, "ep": 4, "zero_stage": 3}, (4, 1)),
    ],
)
def test_axolotl_has_experts_on_an_axis_beside_shards(plan: dict[str, object], sizes: tuple[int, int | None]) -> None:
    exported = export_plan(subject(plan, precision="bf16-pure", attention="flash"), "axolotl")
    config = yaml.safe_load(exported.text)
    assert exported.gaps == ()
    assert (config["expert_parallel_size"], config.get("dp_shard_size")) == sizes
    assert config["plugins"] == ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"dp": 8, "ep": 4}, "without FSDP2 axolotl spreads experts over all ranks"),
        ({"dp": 2, "tp": 2, "ep": 2, "zero_stage": 3}, "beside dp and cp, not beside tp"),
        ({"dp": 2, "cp": 2, "ep": 4, "zero_stage": 3}, "ep has to divide dp"),
        ({"dp": 4, "ep": 4, "zero_stage": 1}, "beside DDP and FSDP2"),
    ],
)
def test_what_axolotl_does_not_do_with_experts_is_a_gap(plan: dict[str, object], reason: str) -> None:
    made = subject(plan, precision="bf16-pure", attention="flash")
    assert reason in " ".join(map(str, export_plan(made, "axolotl", partial=True).gaps))


HYBRID = {"dp": 16, "zero_stage": 3, "zero_shards": 8}


def test_sequences_over_ranks_are_written_for_deepspeed_and_read_back(tmp_path: Path) -> None:
    made = subject({"dp": 2, "cp": 4, "zero_stage": 3, "recompute": "full"})
    exported = export_plan(made, "deepspeed")
    assert any("UlyssesSPAttentionHF" in note for note in exported.notes)
    path = tmp_path / "ds.json"
    path.write_text(exported.text)
    assert import_plan(path, num_gpus=8, recompute="full").plan == made.plan
    for plan in ({"dp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2, "zero_stage": 1}):
        gaps = export_plan(subject(plan), "deepspeed", partial=True).gaps
        assert "cp=2" in [gap.part for gap in gaps]


def test_hybrid_sharding_is_replicas_of_shards_where_a_tool_has_them() -> None:
    sizes = yaml.safe_load(export_plan(subject(HYBRID), "accelerate").text)["parallelism_config"]
    prefix = "parallelism_config_dp"
    assert (sizes[f"{prefix}_replicate_size"], sizes[f"{prefix}_shard_size"]) == (2, 8)
    parallelism = tomllib.loads(export_plan(subject(HYBRID), "torchtitan").text)["parallelism"]
    assert (parallelism["data_parallel_replicate_degree"], parallelism["data_parallel_shard_degree"]) == (2, 8)
    assert "data_parallel_replicate_degree = 2\n" in export_plan(subject(HYBRID), "torchtitan-python").text
    for stage in (1, 3):
        made = subject(HYBRID | {"zero_stage": stage})
        assert "  --num-distributed-optimizer-instances 2\n" in export_plan(made, "megatron-lm").text
        ddp = yaml.safe_load(export_plan(made, "megatron-bridge").text)["ddp"]
        assert ddp["num_distributed_optimizer_instances"] == 2
    for target in LAUNCHED_BY_PARAPLAN:
        assert export_plan(subject(HYBRID), target).gaps == ()


@pytest.mark.parametrize("target", ["deepspeed", "hf-trainer"])
def test_hybrid_sharding_is_left_out_with_partial_where_a_tool_has_none(target: str) -> None:
    with pytest.raises(UnsupportedPlanError, match="zero_shards=8"):
        export_plan(subject(HYBRID), target)
    assert [gap.part for gap in export_plan(subject(HYBRID), target, partial=True).gaps] == ["zero_shards=8"]


@pytest.mark.parametrize("target", ["accelerate", "torchtitan", "torchtitan-python", "megatron-lm", "megatron-bridge"])
def test_groups_of_dp_alone_are_a_gap_where_shards_go_over_cp_too(target: str) -> None:
    made = subject({"dp": 4, "cp": 2, "zero_stage": 3, "zero_shards": 2})
    (gap,) = export_plan(made, target, partial=True).gaps
    assert gap.part == "zero_shards=2"
    assert "cp=2" in gap.reason


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"dp": 4, "tp": 2}, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"dp": 4, "tp": 2, "zero_stage": 3}, "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        ({"dp": 8}, None),
    ],
)
def test_megatrons_script_sets_the_variable_that_it_insists_on(plan: dict[str, object], line: str | None) -> None:
    lines = export_plan(subject(plan), "megatron-lm").text.splitlines()
    assert [found for found in lines if "CUDA_DEVICE_MAX" in found] == ([line] if line else [])


def test_megatron_bridge_keeps_offload_precision_and_momentum() -> None:
    made = subject({"dp": 8, "zero_stage": 1, "offload": "optimizer"}, precision="fp32", optimizer="sgd")
    config = yaml.safe_load(export_plan(made, "megatron-bridge").text)
    assert config["optimizer"] == {
        "optimizer": "sgd",
        "sgd_momentum": 0.0,
        "optimizer_cpu_offload": True,
        "use_precision_aware_optimizer": True,
    }
    assert config["mixed_precision"] is None


@pytest.mark.parametrize("target", ["torchtitan", "torchtitan-python"])
def test_replicas_over_cp_are_a_gap_of_torchtitan(target: str) -> None:
    assert any(gap.part == "cp=4" for gap in export_plan(subject({"cp": 4}), target, partial=True).gaps)


def test_compiling_has_a_place_in_torchtitan() -> None:
    assert read("torchtitan", "ddp", compiled=True)["compile"] == {"enable": True, "components": ["model"]}
    assert "config.compile.enable = True" in read("torchtitan-python", "ddp", compiled=True)


def test_an_order_of_ranks_that_megatron_lacks_is_a_gap() -> None:
    odd = subject({"dp": 4, "tp": 2, "rank_order": ("tp", "pp", "cp", "dp")})
    gaps = export_plan(odd, "megatron-lm", partial=True).gaps
    assert [gap.part for gap in gaps] == ["rank_order=tp dp"]


def test_torchtitan_names_the_modules_of_each_stage() -> None:
    parallelism = read("torchtitan", "pipeline")["parallelism"]
    parts = parallelism["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [10, 8, 8, 9]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "output"])
    assert parallelism["pipeline_parallel_schedule"] == "1F1B"


def test_torchtitans_local_batch_is_a_micro_batch_without_a_pipeline_and_all_of_them_with_one() -> None:
    assert read("torchtitan", "zero-3")["training"]["local_batch_size"] == 2
    assert read("torchtitan", "zero-3")["training"]["global_batch_size"] == 64
    assert read("torchtitan", "interleaved")["training"]["local_batch_size"] == 8


def test_torchtitans_python_sets_the_fields_of_a_configuration() -> None:
    def applied(plan: str, **fields: object) -> Any:
        text = export_plan(subject(plan), "torchtitan-python", partial=True).text
        tree = ast.parse(text)
        function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
        function.args.args[0].annotation = function.returns = None
        config = SimpleNamespace(parallelism=SimpleNamespace(), training=SimpleNamespace(**fields))
        policies = {
            "FullAC": SimpleNamespace(Config=lambda: "full"),
            "SelectiveAC": SimpleNamespace(Config=lambda: "some"),
        }
        exec(compile(ast.Module([function], []), "plan.py", "exec"), policies)  # noqa: S102 (what paraplan has written)
        return policies["apply_plan"](config)

    pipeline = applied("pipeline")
    assert pipeline.parallelism.num_pp_microbatches == 8
    assert pipeline.training.disable_cuda_graphs
    released = applied("pipeline", local_batch_size=1)  # v0.3.0 counts sequences
    assert (released.training.local_batch_size, released.training.seq_len) == (8, 4096)
    assert released.parallelism.pipeline_parallel_microbatch_size == 1
    assert not hasattr(released.training, "num_tokens_per_train_step")
    assert pipeline.parallelism.module_fqns_per_model_part[-1][-2:] == ["norm", "lm_head"]
    assert pipeline.training.num_tokens_per_train_step == 32 * 4096
    assert pipeline.activation_checkpoint is None
    assert applied("zero-2").activation_checkpoint == "full"
    assert applied("ddp").parallelism.data_parallel_replicate_degree == 8


def test_replicas_go_with_other_axes_in_torchtitans_python_alone() -> None:
    made = subject({"dp": 4, "tp": 2, "sequence_parallel": True})
    assert export_plan(made, "torchtitan-python").gaps == ()
    with pytest.raises(UnsupportedPlanError, match="DDP beside tp=2"):
        export_plan(made, "torchtitan")


@pytest.mark.parametrize(("ep", "modules"), [(1, ["layernorm"]), (4, ["layernorm", "moe_act"])])
def test_megatron_recomputes_activations_of_experts_where_it_takes_that(ep: int, modules: list[str]) -> None:
    plan = {"dp": 8, "zero_stage": 1, "ep": ep, "recompute": "selective_ops"}
    text = export_plan(subject(plan), "megatron-lm").text
    assert f"--recompute-modules {' '.join(modules)} " in text.replace("\n", " ")
    assert ("\n  --moe-grouped-gemm\n" in text) == (ep > 1)
    model = yaml.safe_load(export_plan(subject(plan), "megatron-bridge").text)["model"]
    assert (model["recompute_modules"], model.get("moe_grouped_gemm", False)) == (modules, ep > 1)


def test_megatron_bridge_says_what_megatron_lm_says() -> None:
    config = read("megatron-bridge", "zero-3")
    assert config["ddp"]["data_parallel_sharding_strategy"] == "optim_grads_params"
    assert config["mixed_precision"] == "bf16_mixed"
    assert read("megatron-bridge", "pipeline")["dist"]["use_tp_pp_dp_mapping"] is True


def test_products_below_16_bits_are_megatrons_and_a_note_of_others() -> None:
    plan = {"dp": 8, "zero_stage": 1}
    made = {linear: subject(plan, linear_precision=linear) for linear in ("fp8", "mxfp8", "nvfp4")}
    recipes = ["bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"]
    texts = [export_plan(one, "megatron-bridge").text for one in made.values()]
    assert [yaml.safe_load(text)["mixed_precision"] for text in texts] == recipes
    assert "--fp8-recipe delayed" in export_plan(made["fp8"], "megatron-lm").text
    priced = [load_framework(name).kernels.fp8_recipe for name in ("megatron-bridge", "megatron-core")]
    assert priced == ["tensorwise", "delayed"]
    recipes = {"delayed": "fp8_delayed_scaling", "blockwise": "fp8_subchannel_scaling"}
    for recipe, words in recipes.items():
        scaled = subject(plan, linear_precision="fp8", fp8_recipe=recipe)
        assert f"bf16_with_{words}_mixed" in export_plan(scaled, "megatron-bridge").text
        assert f"--fp8-recipe {recipe}" in export_plan(scaled, "megatron-lm").text
    gathered = subject(plan, linear_precision="fp8", fp8_gather=True)
    assert "--fp8-param-gather" in export_plan(gathered, "megatron-lm").text
    rows = subject(plan, linear_precision="fp8", fp8_recipe="rowwise")
    assert [gap.part for gap in export_plan(rows, "megatron-lm", partial=True).gaps] == ["fp8_recipe=rowwise"]
    assert "--fp8-format e4m3" in export_plan(made["mxfp8"], "megatron-lm").text
    assert any("linear layers in fp8" in note for note in export_plan(made["fp8"], "deepspeed").notes)


def test_the_plan_travels_with_a_pod_unchanged() -> None:
    made = subject("zero-1 offloaded", name="a $(HOME) $$ 'model'")
    for target in ("pytorchjob", "trainjob", "jobset"):
        text = export_plan(made, target, partial=True).text
        (value,) = (
            item["value"] for item in _find(yaml.safe_load(text), "env")[0] if item["name"].endswith("PLAN_JSON")
        )
        assert PlanFile.from_json(value.replace("$$", "$"), source="pod") == made.file


def test_nodes_become_replicas_and_completions() -> None:
    replicas = read("pytorchjob", "pipeline")["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] + replicas["Worker"]["replicas"] == 4
    trainer = read("trainjob", "pipeline")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    job = read("jobset", "pipeline")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    assert _find(job, "limits") == [{"nvidia.com/gpu": 8}]


def test_pods_have_shared_memory_of_the_node_and_what_is_left_to_the_user_is_said() -> None:
    for target, pods in (("pytorchjob", 2), ("jobset", 1)):
        job = read(target, "pipeline")
        assert _find(job, "volumeMounts") == [[{"name": "shared-memory", "mountPath": "/dev/shm"}]] * pods
        assert _find(job, "volumes") == [[{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]] * pods
    for target in ("pytorchjob", "trainjob", "jobset"):
        notes = " ".join(export_plan(subject("pipeline"), target, partial=True).notes)
        assert all(word in notes for word in ("rdma/", "hostNetwork", "NCCL_SOCKET_IFNAME"))
        assert ("/dev/shm" in notes) is (target == "trainjob"), "whose pods are its runtime's"
    one_node = " ".join(export_plan(subject("ddp"), "jobset", partial=True).notes)
    assert ("rdma/" in one_node) is (subject("ddp").layout.num_nodes > 1)


def test_skypilot_asks_for_the_gpus_of_the_plan() -> None:
    task = read("skypilot", "pipeline")
    assert task["resources"] == {"accelerators": "H100:8"}
    assert task["num_nodes"] == 4
    gaps = export_plan(_on("dgx-1-p100x"), "skypilot", partial=True).gaps
    assert [gap.part for gap in gaps] == ["machines"]


def test_the_order_of_gpus_is_followed_or_told() -> None:
    made = subject("zero-3")
    placement = PlannedPlacement(local_gpus=(0, 2, 1, 3, 4, 5, 6, 7), slowest_bytes_per_s={})
    made = made.replace(file=made.file.replace(placement=placement))
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3,4,5,6,7 PARAPLAN_PLAN=plan.json torchrun" in export_plan(made, "torchrun").text
    for target in ("slurm", "skypilot", "pytorchjob", "trainjob", "jobset"):
        assert "--gpus 0,2,1,3,4,5,6,7 --plan" in export_plan(made, target).text
    for target in ("accelerate", "deepspeed", "megatron-lm", "torchtitan", "hf-trainer", "megatron-bridge"):
        assert any("0,2,1,3" in note for note in export_plan(made, target, partial=True).notes)


def test_gpus_that_a_plan_skips_are_told_by_the_bus() -> None:
    made = subject({"dp": 2})
    placement = PlannedPlacement(local_gpus=(2, 3), slowest_bytes_per_s={})
    made = made.replace(file=made.file.replace(placement=placement))
    shown = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2,3"
    assert f"{shown} PARAPLAN_PLAN=plan.json torchrun" in export_plan(made, "torchrun").text
    assert "--gpus 2,3" not in export_plan(made, "slurm").text
    assert f"{shown}: the plan leaves other GPUs idle" in export_plan(made, "accelerate", partial=True).notes


def test_segments_of_the_allocator_that_grow_are_set_or_told() -> None:
    made = subject("zero-3", stack=StackSettings(expandable_segments=True))
    variable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    for target in ("torchrun", "megatron-lm"):
        assert f"{variable} torchrun" in export_plan(made, target, partial=True).text
    for target in ("accelerate", "deepspeed", "hf-trainer", "megatron-bridge", "trl"):
        assert any(variable in note for note in export_plan(made, target, partial=True).notes)


@pytest.mark.parametrize(
    ("model", "job"),
    [("Llama 3.1/8B", "llama-3-1-8b"), ("7b_Ä", "train-7b"), ("///", "training"), ("x" * 80, "x" * 40)],
)
def test_jobs_get_names_that_kubernetes_takes(model: str, job: str) -> None:
    assert subject("ddp", name=model).name == job


def test_a_plan_for_another_framework_is_not_for_the_launcher() -> None:
    made = subject("zero-3")
    made = made.replace(file=made.file.replace(framework="megatron-core"))
    assert [gap.part for gap in export_plan(made, "slurm", partial=True).gaps] == ["framework=megatron-core"]
    assert export_plan(made, "megatron-lm").gaps == ()


def test_a_hostile_name_breaks_no_file() -> None:
    made = subject("ddp", name="x\nevil: true\n$(rm -rf /)", path="a b;c.json", script="my script.py")
    for target in ("slurm", "torchrun"):
        text = export_plan(made, target).text
        assert "'my script.py'" in text
        assert "'a b;c.json'" in text
    assert "evil" not in yaml.safe_load(export_plan(made, "accelerate").text)


def test_a_plan_without_training_says_what_is_unknown() -> None:
    bare = subject("ddp")
    bare = bare.replace(file=PlanFile(plan=bare.plan))
    for target in ("accelerate", "deepspeed", "megatron-lm", "torchtitan", "hf-trainer", "megatron-bridge"):
        assert any("not in the plan file" in note for note in export_plan(bare, target).notes)


def _on(machines: str) -> Any:
    made = subject("zero-3")
    assert made.file.cluster is not None
    return made.replace(file=made.file.replace(cluster=made.file.cluster.replace(name=machines)))


def _find(value: Any, key: str) -> list[Any]:
    """Return every value of `key`, however deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [value[key]] if isinstance(value, dict) and key in value else []
    return found + [item for part in inner for item in _find(part, key)]
