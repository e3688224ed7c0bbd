"""Expert parallelism in the files of axolotl and DeepSpeed: what it is as a plan, and what they refuse too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paraplan.api.imported import import_plan
from paraplan.errors import PlanError
from paraplan.interop.setup import Setup

AXOLOTL = "base_model: m\nplugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]\n"
SHARDED = AXOLOTL + "fsdp_config: {fsdp_version: 2, reshard_after_forward: true}\n"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return what reads a text, or an object as JSON, as a file."""

    def read_file(content: str | dict[str, object], **given: Any) -> Setup:
        path = tmp_path / "config"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return import_plan(path, **given).setup

    return read_file


def _autoep(size: int, *, stage: int = 2, tp: int = 1, enabled: bool = True) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp},
        "expert_parallel": {"enabled": enabled, "autoep_size": size},
    }


def test_axolotls_experts_over_all_ranks_leave_the_rest_to_ddp(read: Any) -> None:
    plan = read(AXOLOTL + "expert_parallel_size: 4\n", num_gpus=4).plan
    assert (plan.dp, plan.ep, plan.zero_stage) == (4, 4, 0)


def test_axolotls_experts_times_shards_times_context_are_all_ranks(read: Any) -> None:
    beside = read(SHARDED + "expert_parallel_size: 2\ndp_shard_size: 4\n", num_gpus=8).plan
    assert (beside.dp, beside.ep, beside.zero_stage) == (8, 2, 3)
    context = read(SHARDED + "expert_parallel_size: 4\ncontext_parallel_size: 2\n", num_gpus=8).plan
    assert (context.dp, context.cp, context.ep) == (4, 2, 4)


def test_a_file_of_axolotl_with_experts_says_how_many_gpus_there_are(read: Any) -> None:
    setup = read(SHARDED + "expert_parallel_size: 2\ndp_shard_size: 2\n")
    assert (setup.plan.world_size, setup.says_gpus) == (4, True)
    assert not any("no GPUs are named" in note for note in setup.notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("expert_parallel_size: 2\n", "expert_parallel_size 2 = 2 ranks, and there are 8 GPUs"),
        ("expert_parallel_size: 2\ntensor_parallel_size: 4\n", "beside tensor_parallel_size"),
        ("expert_parallel_size: many\n", "expert_parallel_size: expected a whole number"),
    ],
)
def test_what_axolotl_refuses_of_experts_is_refused_by_its_key(read: Any, words: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(SHARDED + words, num_gpus=8)
    assert message in str(caught.value)


def test_ranks_of_experts_that_stand_apart_on_several_machines_are_told(read: Any) -> None:
    setup = read(SHARDED + "expert_parallel_size: 4\ndp_shard_size: 4\n", num_gpus=16)
    assert (
        "expert_parallel_size=4: axolotl has every 4th rank share out experts, priced as neighbors are" in setup.notes
    )
    assert not any("share out experts" in note for note in read(SHARDED + "expert_parallel_size: 8\n").notes)


def test_without_its_plugin_axolotls_size_is_told_as_not_priced(read: Any) -> None:
    setup = read("base_model: m\nexpert_parallel_size: 4\n", num_gpus=4)
    assert setup.plan.ep == 1
    assert any("expert_parallel_size=4: not priced" in note for note in setup.notes)


def test_autoep_spreads_experts_over_data_parallel_ranks(read: Any) -> None:
    for stage in (0, 1, 2, 3):
        plan = read(_autoep(4, stage=stage), num_gpus=8).plan
        assert (plan.dp, plan.ep, plan.zero_stage) == (8, 4, stage)
    assert read(_autoep(4, enabled=False), num_gpus=8).plan.ep == 1


def test_autoep_counts_ranks_of_tensor_parallelism_too(read: Any) -> None:
    plan = read(_autoep(8, tp=2), num_gpus=8).plan
    assert (plan.dp, plan.tp, plan.ep) == (4, 2, 4)
    for size in (4, 2):
        setup = read(_autoep(size, tp=4), num_gpus=8)
        assert setup.plan.ep == 1
        assert any(f"autoep_size {size}: priced as" in note for note in setup.notes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (_autoep(3), "autoep_size 3 does not divide the 8 GPUs"),
        (_autoep(8, tp=2, stage=3), "beside tensor_parallel.autotp_size 2 under ZeRO-3"),
    ],
)
def test_what_deepspeed_refuses_of_experts_is_refused_by_its_key(read: Any, values: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(values, num_gpus=8)
    assert message in str(caught.value)
