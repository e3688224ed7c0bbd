from __future__ import annotations

import json

import pytest

from paraplan.errors import PlanError
from paraplan.plan.files import ClusterReference, ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec


def test_a_plan_file_survives_its_own_json() -> None:
    file = PlanFile(
        plan=ParallelPlan(dp=2, pp=2, pipeline_schedule="gpipe", num_microbatches=4, stage_blocks=(3, 5)),
        model=ModelReference(name="gpt2", num_parameters=124_439_808, num_blocks=12),
        training=TrainingSpec(global_batch_size=8, seq_length=1024),
        cluster=ClusterReference(name="dgx-h100", num_nodes=1, gpus_per_node=4),
    )
    assert PlanFile.from_json(file.to_json(), source="plan.json") == file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json is not JSON"),
        ("[]", "has no field 'plan'"),
        ('{"schema_version": 9, "plan": {}}', "schema_version 9, and this paraplan reads 1"),
        ('{"plan": {"dp": "many"}}', "plan.dp: .*integer.*'many'"),
        ('{"plan": {"pp": 2}}', "plan: pp=2 needs a pipeline_schedule"),
        ('{"plan": {"dp": 2, "ddp": 1}}', "plan.ddp: Extra inputs"),
    ],
)
def test_a_broken_plan_file_names_the_field_at_fault(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanFile.from_json(text, source="plan.json")


def test_an_edited_plan_needs_only_its_plan() -> None:
    assert PlanFile.from_json(json.dumps({"plan": {"dp": 3}}), source="plan.json").plan.world_size == 3


WRITTEN_IN_NOVEMBER_2026 = """
{
  "schema_version": 1,
  "plan": {
    "dp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "zero_stage": 1, "zero_shards": null, "sequence_parallel": true,
    "micro_batch_size": 2, "num_microbatches": 8, "pipeline_schedule": null, "virtual_pipeline_size": 1,
    "stage_blocks": null, "recompute": "none", "offload": "none", "rank_order": ["pp", "dp", "cp", "tp"],
    "devices_per_process": 1
  },
  "model": {"name": "llama-3-8b", "source": "llama-3-8b", "num_parameters": 8030261248, "num_blocks": 32},
  "training": {
    "global_batch_size": 64, "seq_length": 4096, "precision": "bf16", "optimizer": "adamw", "attention": "sdpa",
    "compiled": false
  },
  "cluster": {"name": "dgx-h100", "num_nodes": 1, "gpus_per_node": 8},
  "estimate": {
    "step_time_s": 3.81, "tokens_per_s_per_gpu": 8590.0, "peak_memory_bytes": 67968000000,
    "memory": {
      "parameter_bytes": 1, "gradient_bytes": 2, "optimizer_state_bytes": 3, "activation_bytes": 4, "workspace_bytes": 5
    },
    "model_flops_per_step": 1.35e16, "smaller_plan": "dp8, ZeRO-3, micro-batch 1 x 8"
  },
  "placement": {"local_gpus": [0, 1, 2, 3, 4, 5, 6, 7], "slowest_bytes_per_s": {"dp": 450e9, "tp": 450e9}},
  "framework": null
}
"""


def test_a_plan_file_that_was_written_before_stays_readable() -> None:
    file = PlanFile.from_json(WRITTEN_IN_NOVEMBER_2026, source="plan.json")
    assert file.plan.describe() == "dp4 x tp2, ZeRO-1, sequence parallel, micro-batch 2 x 8"
    assert file.training is not None
    assert file.training.global_batch_size == file.plan.global_batch_size == 64
    before, now = json.loads(WRITTEN_IN_NOVEMBER_2026), json.loads(file.to_json())
    plain = json.loads(TrainingSpec(global_batch_size=1, seq_length=1).to_json())
    later = {name: value for name, value in plain.items() if name not in before["training"]}
    assert now == before | {
        "training": before["training"] | later,
        "model": before["model"] | {"num_experts": None},
        "cluster": before["cluster"] | {"host_memory_bytes": None},
        "estimate": before["estimate"] | {"plain": None},
    }
