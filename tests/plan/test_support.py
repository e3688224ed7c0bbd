"""The table of what the runtime executes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import paraplan
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported, unsupported_reason
from paraplan.plan.training import TrainingPrecision, TrainingSpec


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(),
        ParallelPlan(dp=8),
        ParallelPlan(dp=2, zero_stage=3, recompute="full", num_microbatches=5),
        ParallelPlan(pp=4, pipeline_schedule="1f1b", num_microbatches=4),
        ParallelPlan(pp=4, pipeline_schedule="gpipe", num_microbatches=1),
        ParallelPlan(pp=2, dp=4, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2),
        ParallelPlan(tp=4, dp=2, zero_stage=3, sequence_parallel=True),
        ParallelPlan(tp=2, pp=2, dp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2),
        ParallelPlan(pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=6, num_microbatches=3),
        ParallelPlan(pp=4, pipeline_schedule="zero_bubble", num_microbatches=8, dp=2),
        ParallelPlan(pp=2, pipeline_schedule="zero_bubble", num_microbatches=2, recompute="selective"),
        ParallelPlan(dp=2, recompute="selective", offload="optimizer"),
        ParallelPlan(dp=2, zero_stage=3, offload="parameters"),
        ParallelPlan(dp=2, cp=4, zero_stage=3, recompute="full"),
        ParallelPlan(cp=2, tp=2, zero_stage=3, sequence_parallel=True),
        ParallelPlan(cp=2, tp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2),
        ParallelPlan(dp=8, zero_stage=3, zero_shards=4),
        ParallelPlan(devices_per_process=4, num_microbatches=2),
        ParallelPlan(pp=2, tp=2, pipeline_schedule="zero_bubble", num_microbatches=2, sequence_parallel=True),
    ],
    ids=ParallelPlan.describe,
)
def test_data_parallelism_zero_pipelines_and_split_layers_are_executed(plan: ParallelPlan) -> None:
    assert unsupported_reason(plan, num_blocks=12, precision="bf16") is None
    check_supported(plan, num_blocks=12, precision="fp32")


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (ParallelPlan(dp=4, tp=2, zero_stage=3, zero_shards=2), "zero_shards=2: hybrid sharding"),
        (ParallelPlan(devices_per_process=2, recompute="full"), "devices_per_process=2, recompute=full"),
        (ParallelPlan(dp=2, zero_stage=2, offload="parameters"), "offload=parameters, zero_stage=2"),
        (ParallelPlan(pp=2, pipeline_schedule="interleaved_1f1b"), "virtual_pipeline_size=1"),
        (
            ParallelPlan(pp=4, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2, num_microbatches=9),
            "num_microbatches=9, pp=4: interleaved_1f1b takes micro-batches in 2 equal rounds",
        ),
        (ParallelPlan(pp=2, pipeline_schedule="1f1b", virtual_pipeline_size=2, num_microbatches=2), "virtual"),
        (ParallelPlan(pp=4, pipeline_schedule="1f1b", num_microbatches=3), "num_microbatches=3, pp=4"),
    ],
)
def test_other_plans_are_refused_with_the_field_and_its_value(plan: ParallelPlan, word: str) -> None:
    reason = unsupported_reason(plan)
    assert reason is not None
    assert word in reason
    with pytest.raises(UnsupportedPlanError, match=word):
        check_supported(plan)


def test_optimizers_that_look_at_whole_tensors_are_not_offloaded_where_ranks_hold_parts() -> None:
    sharded = ParallelPlan(dp=2, zero_stage=1, offload="optimizer")
    for optimizer in ("adafactor", "muon"):
        training = TrainingSpec(global_batch_size=2, seq_length=64, optimizer=optimizer)
        with pytest.raises(UnsupportedPlanError, match=f"offload=optimizer: {optimizer} looks at whole tensors"):
            check_supported(sharded, training=training)
        check_supported(ParallelPlan(dp=2, offload="optimizer"), training=training)
        check_supported(ParallelPlan(dp=2, zero_stage=1), training=training)
    check_supported(sharded, training=TrainingSpec(global_batch_size=2, seq_length=64))


def test_more_stages_than_blocks_are_refused_once_the_blocks_are_known() -> None:
    plan = ParallelPlan(pp=4, pipeline_schedule="gpipe")
    assert unsupported_reason(plan) is None
    assert unsupported_reason(plan, num_blocks=4) is None
    assert "3 blocks" in str(unsupported_reason(plan, num_blocks=3))


def test_stage_blocks_must_sum_to_the_blocks_of_the_model() -> None:
    plan = ParallelPlan(pp=2, pipeline_schedule="gpipe", stage_blocks=(3, 5))
    assert unsupported_reason(plan, num_blocks=8) is None
    assert "sum to 8" in str(unsupported_reason(plan, num_blocks=9))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_is_executed(precision: TrainingPrecision) -> None:
    assert unsupported_reason(ParallelPlan(dp=2), precision=precision) is None


def test_reasons_speak_of_a_training_in_the_words_of_its_options() -> None:
    fields = "|".join(name for name in TrainingSpec.model_fields if "_" in name)
    leaked = re.compile(rf"^({fields})(=\{{\}})?: ")
    found = []
    for path in Path(paraplan.__file__).parent.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if re.search(rf"[\"'](?:{fields})[^\"']*: ", source) else ():
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(part.value)
                if isinstance(part, ast.Constant)
                else "{}"
                if isinstance(part, ast.FormattedValue)
                else ""
                for part in parts
            )
            if leaked.match(text):
                found.append(f"{path}:{node.lineno} {text}")  # type: ignore[attr-defined]
    assert found == []
