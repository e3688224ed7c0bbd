"""Measure how long ranks need from the end of one (kill -9) to their next collective, with and without spare processes.

    python scripts/bench_restart.py [--ranks 8] [--trials 3] [--only WORDS]

Each trial launches a job, kills one rank once all have trained for a while, and reads when rank 0 has done its next
step. It shows a table in Markdown: the median and the range of the trials.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_TRAINS_S = 10  # spares import meanwhile what ranks have imported
_BEGIN = """
import os, signal, sys, time
import torch
"""
_LOOP = """
began, attempt = time.time(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(10**9):
    train_step()
    if rank == 0 and step == 0:
        print(f"stepped at {time.time():.3f}", flush=True)
    if attempt == 0 and step % 10 == 0 and rank == 1 and time.time() - began > float(sys.argv[1]):
        print(f"dies at {time.time():.3f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 1 and step == 3:
        break
    time.sleep(0.1)
"""
SCRIPTS = {
    "DDP": _BEGIN
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())

def train_step():
    loss = model(torch.ones(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    + _LOOP
    + "dist.destroy_process_group()\n",
    "paraplan.runtime": _BEGIN
    + """
from paraplan import runtime

job = runtime.init()
rank = job.world.rank
engine = job.prepare(
    torch.nn.Sequential(torch.nn.Linear(64, 64)),
    loss_fn=torch.nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    example_inputs=torch.ones(2, 64),
    verify="off",
)

def train_step():
    engine.step(torch.ones(8, 64), torch.ones(8, 64)).item()
"""
    + _LOOP
    + "job.close()\n",
}
WAYS = ("all ranks begin anew", "as many spares as ranks")
STARTS = {"fork": [], "exec": ["--start-method", "exec"]}


def measure(script: str, options: list[str], *, ranks: int) -> float:
    """Return the seconds from the end of a rank to the next step of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script)
        words = ["--no-logs", "--max-restarts", "1", "--nproc-per-node", str(ranks), *options, str(path)]
        command = [sys.executable, "-m", "paraplan", "launch", *words, str(_TRAINS_S)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = [float(time_s) for time_s in re.findall(r"(?:stepped|dies) at ([\d.]+)", done.stdout)]
    if done.returncode or len(found) != 3:
        raise SystemExit(f"the job failed:\n{done.stdout}{done.stderr}")
    return found[2] - found[1]


def main() -> None:
    """Measure, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose names hold these words")
    given = parser.parse_args()
    print(f"{given.ranks} ranks, {os.cpu_count()} cores, torch {torch.__version__}, {given.trials} trials")
    print("| script | ranks start by | restart | seconds to the next step |\n| --- | --- | --- | --- |")
    for name, script in SCRIPTS.items():
        for start, start_options in STARTS.items():
            for way in WAYS:
                options = [] if way == WAYS[0] else ["--spare-ranks", str(given.ranks)]
                case = f"| {name} | {start} | {way} |"
                if given.only not in case:
                    continue
                times = [measure(script, [*start_options, *options], ranks=given.ranks) for _ in range(given.trials)]
                print(f"{case} {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) |", flush=True)


if __name__ == "__main__":
    main()
