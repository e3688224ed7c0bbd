"""Measure what it costs ranks to note their steps: with marks and without, in turns, in one job.

    python scripts/bench_step_marks.py [--blocks 1200] [--steps 4] [--waits 0 50 200]

Two ranks train a small model under DDP on CPUs; beside it they make so many collectives in each step. Every other block
of steps is noted. Shown: the CPU time of the main thread for a step without marks (medians of the blocks), what marks
add to it, and which share of the step's wall time that is, with half of what holds two thirds of such medians (by the
quartiles of the blocks). CPU time, because what else the machine does is not in it; its clock is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WARM_STEPS = 100


def measure(num_waits: int, *, num_blocks: int, num_steps: int) -> tuple[float, float, float, float]:
    """Return CPU seconds of a step without marks, those that marks add, how sure that is, and its wall seconds."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from paraplan.launch.ranks.step_marks import MARKS_FILE, StepMarks
    from paraplan.launch.torch_private.step_hooks import mark_steps

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        marks = StepMarks(str(Path(folder) / MARKS_FILE))
        mark_steps(marks)
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        batch, token = torch.randn(128, 256), torch.ones(1)
        cpu_s: dict[bool, list[float]] = {True: [], False: []}
        wall_s = []

        def step() -> None:
            model(batch).square().mean().backward()
            for _ in range(num_waits):
                dist.all_reduce(token)
            optimizer.step()
            optimizer.zero_grad()

        for pair in range(num_blocks // 2):
            for is_on in (pair % 2 == 0, pair % 2 == 1):
                step()  # in which the last note of the block before ends
                marks.is_on = is_on
                marks.is_noting &= is_on
                step()
                began = time.thread_time(), time.perf_counter()
                for _ in range(num_steps):
                    step()
                if 2 * pair * num_steps >= _WARM_STEPS:
                    cpu_s[is_on].append((time.thread_time() - began[0]) / num_steps)
                    wall_s.append((time.perf_counter() - began[1]) / num_steps)
    plain_s = statistics.median(cpu_s[False])
    # neighbours in time, so that a change of the machine's speed is in both
    added = [on - off for on, off in zip(cpu_s[True], cpu_s[False], strict=True)]
    first, _, third = statistics.quantiles(added, n=4)
    error_s = 1.25 * (third - first) / 1.35 / len(added) ** 0.5  # of the median of normal numbers
    return plain_s, statistics.median(added), error_s, statistics.median(wall_s)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--waits", type=int, nargs="+", default=[0, 50, 200])
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "paraplan", "launch", "--no-logs", "--no-straggler-watch", "--skip-preflight"]
        raise SystemExit(subprocess.call([*command, "--nproc-per-node", "2", __file__, *sys.argv[1:]]))
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for num_waits in options.waits:
        plain_s, added_s, error_s, wall_s = measure(num_waits, num_blocks=options.blocks, num_steps=options.steps)
        if dist.get_rank() == 0:
            print(
                f"{num_waits + 1:4d} waits a step: {plain_s * 1e3:.2f} ms CPU of {wall_s * 1e3:.1f} ms, marks add "
                f"{added_s * 1e6:.0f} us = {added_s / wall_s:.2%} of the step, give or take {error_s / wall_s:.2%}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
