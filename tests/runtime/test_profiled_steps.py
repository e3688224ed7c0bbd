"""`paraplan compare` on traces that torch.profiler makes of real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankHarness
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from typer.testing import CliRunner

from paraplan.cli.main import app

NUM_STEPS = 2


def _train_under_a_profiler(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))))
    optimizer = torch.optim.AdamW(model.parameters())
    packed = Path(folder) / f"{rank}.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=NUM_STEPS),
        on_trace_ready=lambda found: found.export_chrome_trace(str(packed)),
    ) as profiler:
        for _ in range(1 + NUM_STEPS):
            inputs = torch.randn(32, 64)
            model(inputs).square().mean().backward()
            gathered = torch.empty(64, 64)
            dist.all_gather_into_tensor(gathered, inputs)
            (dist.send if rank == 0 else dist.recv)(inputs, 1 - rank)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


@pytest.mark.ranks
def test_a_profiled_run_is_laid_beside_its_prediction(tmp_path: Path, ranks: RankHarness) -> None:
    ranks.run(_train_under_a_profiler, str(tmp_path), size=2)
    predicted = tmp_path / "predicted.json"
    plan = ["gpt2", "--profile", "rtx-3090-x2", "--seq-len", "64", "--global-batch", "8", "--dp", "2"]
    assert CliRunner().invoke(app, ["estimate", *plan, "--trace", str(predicted)]).exit_code == 0
    for rank in range(2):
        words = ["compare", str(predicted), str(tmp_path / f"{rank}.json.gz")]
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        run = found["measured"]
        assert (run["rank"], run["world_size"], run["steps"], run["on_gpu"]) == (rank, 2, NUM_STEPS, False)
        assert run["compute_s"] + run["exposed_s"] + run["idle_s"] == pytest.approx(run["step_s"])
        assert 0 < run["optimizer_s"] < run["compute_s"]
        assert {"all_reduce", "all_gather", "send_recv"} <= set(run["communication_s"])
        assert all(seconds > 0 for seconds in run["communication_s"].values())
        assert found["findings"]
        # Lines break where the path of the trace is long.
        text = " ".join(CliRunner().invoke(app, words, env={"COLUMNS": "100"}).stdout.split())
        for word in (f"rank {rank}: ", "mean of 2 steps", "all-gather", "of it the optimizer's step", "Largest"):
            assert word in text
