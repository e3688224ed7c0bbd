"""Scripts of DTensors and of accelerate that run again in the processes of healthy ranks: the same losses as ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import ForkedLaunch, WriteScript

pytestmark = pytest.mark.ranks

MESH = """
    import os, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if attempt < int(sys.argv[1]) and step == 4 + attempt and rank == 1 + attempt:
            os.kill(os.getpid(), 9)
    if rank == 0:
        print(repr(loss.item()), flush=True)
    dist.destroy_process_group()
"""

ACCELERATE = """
    import os, sys
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), accelerator.process_index
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(8):
        loss = model(torch.ones(2, 4) * (rank + 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if attempt < int(sys.argv[1]) and step == 4 and rank == 1 + attempt:
            os.kill(os.getpid(), 9)
    if rank == 0:
        print(repr(loss.item()), flush=True)
    accelerator.end_training()
"""


@pytest.mark.parametrize("text", [MESH, ACCELERATE], ids=["mesh", "accelerate"])
def test_losses_of_ranks_that_have_stayed_twice_are_those_of_a_job_that_nothing_disturbs(
    text: str, launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    if text is ACCELERATE:
        pytest.importorskip("accelerate")
    words = ("--no-logs", "--nproc-per-node", 4, "--max-restarts", 2)
    ended = launch_forked(*words, "--restart-in-process", script(text), 2)
    assert ended.returncode == 0, ended.stderr
    assert "ranks 0, 2-3 stay in their processes; rank 1 takes a spare process" in ended.stderr, ended.stderr
    assert "ranks 0-1, 3 stay in their processes; rank 2 takes a spare process" in ended.stderr, ended.stderr
    assert ended.stdout == launch_forked(*words, script(text), 0).stdout


GROUPS = """
import gc, os, sys, time
import torch, torch.distributed as dist
from paraplan.launch.torch_private import runs

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
with_group = threads()
groups = runs.forget_groups()
gc.collect()
assert not dist.is_initialized()
assert before < with_group == threads()
groups.clear()
until = time.monotonic() + 100  # a thread that has been joined stays in /proc until the kernel has taken it away
while threads() != before and time.monotonic() < until:
    time.sleep(0.01)
assert threads() == before
dist.init_process_group("gloo", init_method=sys.argv[1] + "2", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


def test_threads_of_forgotten_groups_end_once_all_else_has_been_dropped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROUPS, f"file://{tmp_path}/store"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
