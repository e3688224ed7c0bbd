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
        ('{"plan": {"pp": 2}}', "plan: pipeline_schedule=None with pp=2"),
        ('{"plan": {"dp": 2, "ddp": 1}}', "plan.ddp: Extra inputs"),
    ],
)
def test_a_broken_plan_file_names_the_field_at_fault(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanFile.from_json(text, source="plan.json")


def test_an_edited_plan_needs_only_its_plan() -> None:
    assert PlanFile.from_json(json.dumps({"plan": {"dp": 3}}), source="plan.json").plan.world_size == 3
