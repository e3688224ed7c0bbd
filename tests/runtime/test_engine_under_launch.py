"""Faults of one rank, as a user of `paraplan launch` sees them: one error, and the end of all ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_launch import launch_forked
from rank_harness import RankHarness

SCRIPT = """
import math
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from paraplan import runtime

fault = sys.argv[1]
job = runtime.init()
factor = math.nan if fault == "nan" and job.world.rank else 1
width = 9 if fault == "model" and job.world.rank else 8
model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 4))
engine = job.prepare(
    model,
    loss_fn=lambda outputs, targets: F.mse_loss(outputs, targets) * factor,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
for step in range(2 if fault == "data" and job.world.rank else 3):
    if fault == "absence" and step == 2:
        if job.world.rank:
            time.sleep(600)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    engine.step(torch.ones(2, 8), torch.ones(2, 4))
"""

EXPECTED = {
    "nan": (1, "the loss is nan in step 1 on rank 1"),
    "model": (2, r"ranks \[1\] have built another model than rank 0 \(121 parameters against 108"),
    "data": (1, "rank 1 has ended after 2 steps, and rank 0 goes on with step after 2"),
    "absence": (
        1,
        r"a collective timed out: rank 0 waited 2 s in all_gather number \d+ of ranks 0-1; rank 1 never entered it\n"
        r"  rank 1 was in <module> \(script.py:\d+\)",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_of_one_rank_is_one_error_and_the_end_of_the_job(
    fault: str, ranks: RankHarness, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ("--nproc-per-node", "2", "--no-logs", str(script), fault)
    ended = launch_forked(ranks, tmp_path, *words, environment={"OMP_NUM_THREADS": "1"})
    status, said = EXPECTED[fault]
    assert ended.returncode == status, ended.stderr
    assert re.search(said, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("hint:") == 1
