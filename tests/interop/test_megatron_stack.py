"""Settings of the software in Megatron-Core's options: read, written and read back, and priced."""

from __future__ import annotations

from typing import Any

import pytest
from exported_plans import subject

from paraplan import Workload, estimate, load_cluster, load_model
from paraplan.errors import PlanError
from paraplan.interop.export import export_plan
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.megatron_lm import read_megatron_lm
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import TrainingSpec

_SIZES = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --seq-length 4096 --bf16 "
_EXPERTS = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type "
_OVERLAP = "--overlap-grad-reduce "
_PLAN: dict[str, object] = {"dp": 4, "tp": 2, "ep": 2, "sequence_parallel": True, "num_microbatches": 2}


def megatron(options: str) -> Setup:
    return read_megatron_lm(_SIZES + options, source="run.sh", given=Given(num_gpus=8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (_OVERLAP, ""),
        ("", "overlaps_gradients=false"),
        (_OVERLAP + _EXPERTS + "alltoall", "etp=1"),
        (_OVERLAP + _EXPERTS + "flex", "dispatcher=deepep,etp=1"),
        (_OVERLAP + _EXPERTS + "flex --moe-enable-deepep", "dispatcher=deepep,etp=1"),
        (_OVERLAP + _EXPERTS + "flex --moe-flex-dispatcher-backend hybridep", "dispatcher=hybridep,etp=1"),
        (_OVERLAP + "--overlap-moe-expert-parallel-comm", "overlaps_experts=true"),
        (_OVERLAP + "--tp-comm-overlap", "overlaps_products=true"),
        (_OVERLAP + "--cross-entropy-loss-fusion", "compiled_loss=true"),
        (_OVERLAP + "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "engine_loss=true"),
        (_OVERLAP + "--no-gradient-accumulation-fusion", "fuses_accumulation=false"),
        (_OVERLAP + "--cuda-graph-impl full_iteration", "cuda_graphs=full"),
        (_OVERLAP + "--enable-cuda-graph", "cuda_graphs=layers"),
        (_OVERLAP + "--grad-reduce-in-bf16", "gradient_bytes=2"),
    ],
)
def test_options_become_settings_and_no_note(options: str, text: str) -> None:
    setup = megatron(options)
    assert setup.stack.text == text
    assert setup.notes == ()


def test_a_dispatcher_that_is_not_priced_is_named() -> None:
    setup = megatron(_OVERLAP + _EXPERTS + "flex --moe-flex-dispatcher-backend ncclep")
    assert setup.stack.dispatcher is None
    assert any("--moe-token-dispatcher-type flex" in note for note in setup.notes)


def test_generation_alone_has_graphs_in_reinforcement_learning() -> None:
    options = _OVERLAP + "--cuda-graph-impl local --grpo-group-size 8"
    assert megatron(options).stack.text == ""
    assert megatron(f"{options} --rl-training-cuda-graphs").stack.text == "cuda_graphs=layers"


def test_an_unknown_kind_of_graphs_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match=r"--cuda-graph-impl: expected none or local .* found 'some'"):
        megatron("--cuda-graph-impl some")


@pytest.mark.parametrize(
    "text",
    [
        "dispatcher=hybridep,etp=1",
        "dispatcher=deepep,overlaps_experts",
        "cuda_graphs=layers,compiled_loss",
        "cuda_graphs=full,engine_loss",
        "overlaps_gradients=false,fuses_accumulation=false",
        "overlaps_products,gradient_bytes=2",
    ],
)
def test_settings_that_megatron_has_options_for_go_there_and_back(text: str) -> None:
    told = StackSettings.parse(text)
    made = subject(_PLAN)
    assert made.training is not None
    made = made.replace(file=made.file.replace(training=made.training.replace(stack=told)))
    exported = export_plan(made, "megatron-lm")
    assert not any("a stack with these settings" in note for note in exported.notes)
    setup = read_megatron_lm(exported.text, source="run.sh", given=Given(num_gpus=8))
    assert (setup.plan, setup.stack) == (made.plan, told)


def test_megatron_bridges_overrides_have_the_settings() -> None:
    told = StackSettings.parse("dispatcher=hybridep,cuda_graphs=full,engine_loss,overlaps_gradients=false,dropout=0.1")
    made = subject(_PLAN)
    assert made.training is not None
    made = made.replace(file=made.file.replace(training=made.training.replace(stack=told)))
    exported = export_plan(made, "megatron-bridge")
    for line in (
        "moe_token_dispatcher_type: flex",
        "moe_flex_dispatcher_backend: hybridep",
        "cuda_graph_impl: full_iteration",
        "cross_entropy_fusion_impl: te",
        "overlap_grad_reduce: false",
    ):
        assert line in exported.text
    assert "dropout=0.1: the plan was made for a stack with these settings" in exported.notes


@pytest.mark.parametrize(
    ("model", "plain", "told", "part"),
    [
        ("qwen3-30b-a3b", _EXPERTS + "alltoall", _EXPERTS + "flex --moe-flex-dispatcher-backend deepep", "step_time_s"),
        ("qwen3-30b-a3b", _EXPERTS + "alltoall", _EXPERTS + "alltoall --cuda-graph-impl local", "step_time_s"),
        ("llama-3-8b", "", "--tp-comm-overlap", "tensor_parallel_s"),  # what is hidden slows products
    ],
)
def test_an_imported_setting_changes_the_predicted_step(model: str, plain: str, told: str, part: str) -> None:
    spec, cluster = load_model(model), load_cluster("dgx-h100")

    def part_s(setup: Setup) -> float:
        values = {"seq_length": 4096, "global_batch_size": setup.plan.global_batch_size}
        training = TrainingSpec.model_validate(values | setup.training)
        step = estimate(Workload.of(spec, training, cluster, framework="megatron-core"), setup.plan).step
        return float(getattr(step, part))

    assert part_s(megatron(_OVERLAP + told)) < part_s(megatron(_OVERLAP + plain))


RECIPE = """ENV_VARS:
  TP: 4
  NCCL_ALGO: Tree
MODEL_ARGS:
  --num-layers: 24
  --seq-length: 512
  --micro-batch-size: 2
  --global-batch-size: 32
  --tensor-model-parallel-size: ${TP}
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --overlap-grad-reduce: false
  --split: 949,50,1
  --bf16: true
TEST_TYPE: regular
"""
SECTIONS = """language_model:
  num_layers: 24
  num_moe_experts: null
model_parallel:
  tensor_model_parallel_size: 4
  sequence_parallel: True
  bf16: True
seq_length: 512
micro_batch_size: 2
global_batch_size: 32
use_distributed_optimizer: True
"""


@pytest.mark.parametrize("text", [RECIPE, SECTIONS])
def test_arguments_that_are_keys_of_a_file_are_read_as_on_a_command_line(read: Any, text: str) -> None:
    setup = read(text, num_gpus=8)
    assert setup.tool == "Megatron-LM"
    assert setup.plan.describe() == "dp2 x tp4, ZeRO-1, sequence parallel, micro-batch 2 x 8"
    assert (setup.seq_length, setup.precision) == (512, "bf16")
    assert not any("split" in note or "not known" in note for note in setup.notes)


def test_a_file_of_megatron_lm_that_answers_questions_is_refused(read: Any) -> None:
    with pytest.raises(PlanError, match="MODE inference trains nothing"):
        read(f"MODE: inference\n{RECIPE}", num_gpus=8)
