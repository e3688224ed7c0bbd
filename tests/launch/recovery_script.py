"""A training script for tests of recovery: a small model, exact data by step, and faults at chosen steps."""

from __future__ import annotations

from pathlib import Path

from forked_launcher import ForkedLauncher

SCRIPT = """
import os
import signal
import sys
import time

import torch
from torch import nn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan

options = dict(word.split("=") for word in sys.argv[1:])
batch = int(options.get("batch", 16))
steps, every = int(options["steps"]), int(options.get("save", 0))
faults = [word.split("@") for word in options.get("faults", "").split(",") if word]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
plans = options.get("plans", "dp").split(",")
words = plans[min(attempt, len(plans) - 1)]
size = int(os.environ.get("WORLD_SIZE", 1))
plan = None
if words == "zero3":
    plan = ParallelPlan(dp=size, zero_stage=3 if size > 1 else 0, micro_batch_size=batch // size)
elif words == "pp2":
    plan = ParallelPlan(
        dp=size // 2, pp=2, micro_batch_size=batch // size, num_microbatches=2, pipeline_schedule="gpipe"
    )
job = runtime.init(plan)
torch.manual_seed(0)
dropout = float(options.get("dropout", 0.1))
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(dropout), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
engine = job.prepare(
    model,
    loss_fn=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    example_inputs=torch.ones(2, 16),
    verify="off",  # losses are compared with those of a job that nothing disturbs
)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.randn(16, generator=generator), torch.randn(4, generator=generator)


engine.resume(options["folder"])
if job.is_main:
    print(f"begins after {engine.num_steps} steps at {time.time():.3f}", flush=True)
for inputs, targets in job.shard(Samples(), batch_size=batch, skip=engine.num_steps):
    loss = engine.step(inputs, targets).item()
    if job.is_main:
        print(f"step {engine.num_steps} {loss!r} {time.time():.3f}", flush=True)
    time.sleep(float(options.get("pause", 0)))
    if attempt < len(faults) and faults[attempt] == [str(job.world.rank), str(engine.num_steps)]:
        print(f"dies at {time.time():.3f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if every and engine.num_steps % every == 0:
        engine.save(options["folder"])
    if engine.num_steps >= steps:
        break
job.close()
"""


def losses(stdout: str) -> dict[int, float]:
    """Return the losses that the script has printed, by step: of a step that was done again, the last one."""
    found = {}
    for line in stdout.splitlines():
        words = line.split()
        if words[:1] == ["step"] and len(words) == 4:
            found[int(words[1])] = float(words[2])
    return found


def read_until_line(process: ForkedLauncher, beginning: str) -> None:
    """Return once a process has written a line that begins so; it must not end before."""
    assert process.stdout is not None
    line = " "
    while not line.startswith(beginning):
        line = process.stdout.readline()
        assert line, f"it has ended before {beginning!r}"


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in [child, *descendants(child)]]
