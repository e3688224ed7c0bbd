"""One record of the parts of a rank's memory, whoever says them: their names and order in JSON stay as they are."""

from __future__ import annotations

import json

import pytest

from paraplan.cost.estimate import MemoryEstimate
from paraplan.launch.fake.report import StageEstimate
from paraplan.plan.fake import FakeRankReport
from paraplan.plan.memory_record import MEMORY_PARTS, MemoryParts
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.fake.run import TracedMemory

PARTS = [
    *("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes", "workspace_bytes"),
    "total_bytes",
]
SIZES = dict(zip(PARTS, (1, 2, 3, 4, 5, 15), strict=True))


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (StageEstimate(**SIZES), [*PARTS, "host_bytes"]),
        (
            MemoryEstimate(pipeline_stage=0, device_bytes=20, **SIZES),
            ["pipeline_stage", *PARTS, "device_bytes", "host_bytes", "cached_device_bytes"],
        ),
        (
            TracedMemory(rank=0, pipeline_stage=0, phase="backward", **SIZES),
            ["rank", "pipeline_stage", *PARTS, "phase"],
        ),
        (
            FakeRankReport(
                rank=0,
                world_size=1,
                pipeline_stage=0,
                plan=ParallelPlan(),
                precision="bf16",
                num_parameters=7,
                phase="forward",
                **SIZES,
            ),
            [
                *("rank", "world_size", "pipeline_stage", "plan", "precision", "num_parameters"),
                *PARTS,
                *("phase", "host", "is_on_cpu", "collectives", "left_out"),
            ],
        ),
    ],
)
def test_json_names_the_parts_in_their_order(record: MemoryParts, names: list[str]) -> None:
    assert list(json.loads(record.to_json())) == names
    assert list(record.model_dump()) == names


def test_the_parts_are_all_sizes_but_the_total() -> None:
    assert [*MEMORY_PARTS, "total_bytes"] == list(MemoryParts.model_fields)
