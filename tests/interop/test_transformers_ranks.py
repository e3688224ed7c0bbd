"""Files exported for transformers, trained by the stock Trainer on CPU ranks: losses and norms of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from exported_plans import subject
from rank_harness import RankHarness
from transformers_ranks import FAMILIES, save_model, train, train_in_a_loop

from paraplan.interop.export import export_plan
from paraplan.plan.parallel import ParallelPlan

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 4, "zero_stage": 3, "recompute": "full"},
    "hybrid": {"dp": 4, "zero_stage": 3, "zero_shards": 2, "num_microbatches": 2},
    "tp": {"tp": 2},
    "replicas and tp": {"dp": 2, "tp": 2},
    "fsdp and tp": {"dp": 2, "tp": 2, "zero_stage": 3},
    "ep": {"dp": 2, "ep": 2, "zero_stage": 3, "num_microbatches": 2, "recompute": "full"},
    "ep in fsdp": {"dp": 4, "ep": 2, "zero_stage": 3, "recompute": "full"},
    "ep and tp": {"dp": 2, "tp": 2, "ep": 2, "zero_stage": 3},
}
RUN = {("gpt_oss", "ep")}
"""The pair that is always tried: experts beside shards."""
DENSE = ("llama", "qwen3")


def on_a_rank(path: str, folder: str, ranks: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the steps of the Trainer and of the loop; ranks beside each other share data under tp.

    There accelerate takes no CPUs for a Trainer (`ParallelismConfig._validate_accelerator`): the loop has to do.
    """
    rank = int(os.environ.get("RANK", "0")) * ranks // int(os.environ.get("WORLD_SIZE", "1"))
    trains = ranks == int(os.environ.get("WORLD_SIZE", "1"))
    return train(path, folder) if trains else [], train_in_a_loop(path, folder, rank, ranks)


def write(plan: dict[str, Any], path: Path, experts: int, **training: object) -> str:
    made = subject(plan, precision="fp32", attention="eager", **training)
    model = made.file.model
    assert model is not None
    named = made.file.replace(model=model.replace(num_experts=experts))
    exported = export_plan(made.model_copy(update={"file": named}), "transformers")
    assert exported.gaps == ()
    path.write_text(exported.text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) in RUN else pytest.mark.with_all)
        for family in FAMILIES
        for layout in LAYOUTS
        if family not in DENSE or "ep" not in LAYOUTS[layout]
    ],
)
def test_the_trainer_and_the_loop_train_as_one_process(
    family: str, layout: str, ranks: RankHarness, tmp_path: Path
) -> None:
    plan = ParallelPlan.model_validate(LAYOUTS[layout])
    folder, experts = str(tmp_path / "model"), 1 if family in DENSE else 4
    ranks.run_alone(save_model, family, folder)
    batch = plan.dp * plan.num_microbatches
    alone = write({"micro_batch_size": batch}, tmp_path / "alone.py", experts)
    spread = write(LAYOUTS[layout], tmp_path / "spread.py", experts)
    (whole, whole_loop) = ranks.run_alone(on_a_rank, alone, folder, 1)
    found = ranks.run(on_a_rank, spread, folder, plan.dp, size=plan.world_size, timeout_s=300.0)
    for trained, _ in found:
        assert trained == [pytest.approx(step, rel=2e-5) for step in (whole if plan.tp == 1 else [])]
    for step, (loss, norm) in enumerate(whole_loop):
        losses = [looped[step][0] for _, looped in found]
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=2e-5)
        assert [looped[step][1] for _, looped in found] == [pytest.approx(norm, rel=2e-5)] * len(found)


@pytest.mark.with_all  # the Trainer trains beside shards, above
def test_adapters_beside_shards_train_as_in_one_process(ranks: RankHarness, tmp_path: Path) -> None:
    folder, plan = str(tmp_path / "model"), ParallelPlan(dp=2, ep=2, zero_stage=3)
    ranks.run_alone(save_model, "qwen3_moe", folder)
    adapters = {"train": "lora:r=4,targets=q_proj|v_proj", "base_weights": "fp32"}
    alone = write({"micro_batch_size": 2}, tmp_path / "alone.py", 4, **adapters)
    spread = write(plan.model_dump(), tmp_path / "spread.py", 4, **adapters)
    whole, whole_loop = ranks.run_alone(on_a_rank, alone, folder, 1)
    for trained, looped in ranks.run(on_a_rank, spread, folder, 2, size=2, timeout_s=300.0):
        assert trained == [pytest.approx(step, rel=2e-5) for step in whole]
        assert [norm for _, norm in looped] == [pytest.approx(norm, rel=2e-5) for _, norm in whole_loop]
