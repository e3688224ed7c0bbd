"""Models built without values, whose weights are read from files straight into parts and shards."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import GLOBAL_BATCH, MODELS, TOKENS, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import ModelError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.boxes import CheckpointError

PLANS = {
    2: [
        ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6, offload="parameters"),
        ParallelPlan(pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2, micro_batch_size=12),
        *with_all([ParallelPlan(cp=2, zero_stage=1, micro_batch_size=12)]),
        ParallelPlan(tp=2, micro_batch_size=12),
        *with_all([ParallelPlan(dp=2, micro_batch_size=6)]),  # whole parameters are read by stages
    ],
    4: [
        *with_all([ParallelPlan(tp=2, dp=2, zero_stage=3, micro_batch_size=6)]),
        *with_all([ParallelPlan(pp=2, dp=2, zero_stage=1, pipeline_schedule="gpipe", micro_batch_size=6)]),
    ],
}


def losses(model: nn.Module, plan: ParallelPlan | None, weights: str | None) -> list[float]:
    job = runtime.init(plan)
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.1),
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        weights=weights,
        verify="auto" if plan is not None and plan.zero_stage == 3 and plan.tp == 1 else "off",  # it reads them too
    )
    batches = job.shard(TokenPairs(), batch_size=GLOBAL_BATCH)
    return [engine.step(*batch).item() for batch, _ in zip(batches, range(2), strict=False)]


def _saved_and_trained(folder: str, model_name: str) -> list[float]:
    from safetensors.torch import save_model

    torch.manual_seed(0)
    model = MODELS[model_name]()
    save_model(model, str(Path(folder) / f"{model_name}.safetensors"))
    return losses(model, None, None)


def _trained_from_file(folder: str, cases: list[tuple[str, ParallelPlan | None]]) -> list[list[float]]:
    found = []
    for model_name, plan in cases:
        with runtime.without_weights():
            model = MODELS[model_name]()
        assert all(parameter.is_meta for parameter in model.parameters())
        found.append(losses(model, plan, str(Path(folder) / f"{model_name}.safetensors")))
    return found


@pytest.mark.ranks
def test_ranks_read_their_parts_of_a_model_that_none_of_them_has_built(ranks: RankHarness, tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = {name: ranks.run_alone(_saved_and_trained, folder, name) for name in ("two blocks", "tied")}
    for size, plans in PLANS.items():
        # The tied model takes a mean over the tokens so far, which context parallelism refuses.
        cases = [("two blocks" if plan.cp > 1 else name, plan) for name, plan in zip(cycle(expected), plans)]
        others = [("two blocks", plan) for plan in plans if plan.num_stages <= 2]
        others += [("tied", plan) for plan in plans if plan.cp == 1]
        cases += with_all([case for case in others if case not in cases])
        if not cases:
            continue
        for found in ranks.run(_trained_from_file, folder, cases, size=size, timeout_s=240.0):
            for (name, plan), seen in zip(cases, found, strict=True):
                assert seen == pytest.approx(expected[name], rel=1e-5), (name, plan.describe())


def test_one_process_reads_a_folder_of_files(tmp_path: Path) -> None:
    expected = _saved_and_trained(str(tmp_path), "decoder")
    torch.manual_seed(7)
    assert losses(MODELS["decoder"](), None, str(tmp_path)) == pytest.approx(expected, rel=1e-6)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    _saved_and_trained(str(tmp_path), "decoder")
    with runtime.without_weights():
        other, wider = MODELS["sequential"](), nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))
    with pytest.raises(ModelError, match=r"holds no 0\.weight"):
        losses(other, None, str(tmp_path))
    with pytest.raises(UsageError, match="holds no weights"):
        losses(wider, None, str(tmp_path / "absent"))
    file = tmp_path / "decoder.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"decoder.safetensors cannot be read: .*"):
        losses(wider, None, str(tmp_path))
