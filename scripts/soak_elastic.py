"""Strike an elastic job with random faults for a long time, and compare its training with one that nothing disturbs.

    python scripts/soak_elastic.py [--faults 100] [--hosts 4] [--seed 1] [--keep]

Needs root and Debian's iproute2: hosts are network namespaces with two ranks each. Ranks are killed, one or two at a
time, or fail; launchers of nodes are killed with all their ranks, and networks of nodes fail; nodes come back after a
while. Node 0 hosts the rendezvous, with which a job ends: its ranks alone are struck. At most
half of the nodes are away at a time. Some faults strike while the ranks still start again from the last one. Copies of
the state are in memory (`--memory-checkpoint`), of each node on the next one too; a checkpoint is written to the disk
now and then, for neighbours that die at once.

At the end every step's loss, those of steps that were done again too, and all parameters are compared with a job of
one process, in double precision; and what is left is counted: processes, temporary files, memory. Status 1 where
anything differs by more than rounding, or is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from fault_table import MARK, ROOT, free_port, named_hosts, namespaces, processes_of

RANKS_PER_NODE = 2
TOLERANCE = 1e-8
"""The share of a rank in the whole loss is in single precision: other numbers of ranks round it otherwise."""
LOSS_TOLERANCE = 1e-6
"""Losses are summed over ranks in single precision."""
PATIENCE_S = 180.0
AHEAD = 60
"""The job ends so many steps after the last fault."""

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan

folder, pause, saves = Path(sys.argv[1]), float(sys.argv[2]), len(sys.argv) == 3
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.set_default_dtype(torch.float64)
plan = ParallelPlan(dp=size, zero_stage=3 if size > 1 else 0, micro_batch_size=24 // size)
job = runtime.init(plan)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
engine = job.prepare(
    model,
    loss_fn=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500),
    example_inputs=torch.ones(2, 16),
    verify="off",
)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.randn(16, generator=generator), torch.randn(4, generator=generator)


engine.resume(folder / "checkpoint")
(folder / f"pid{rank}").write_text(str(os.getpid()))
ends_at = folder / "ends-at"
if job.is_main:
    with open(folder / "steps", "a") as file:
        file.write(f"begins {engine.num_steps} {size}\\n")
for inputs, targets in job.shard(Samples(), batch_size=24, skip=engine.num_steps, seed=3):
    loss = engine.step(inputs, targets).item()
    if job.is_main:
        with open(folder / "steps", "a") as file:
            file.write(f"step {engine.num_steps} {loss!r}\\n")
    if ends_at.exists() and engine.num_steps >= int(ends_at.read_text()):
        break
    if (folder / f"fails{rank}").exists():
        (folder / f"fails{rank}").unlink()
        raise ValueError("a fault that was asked for")
    if saves and engine.num_steps % 20 == 0:
        engine.save(folder / "checkpoint")
    time.sleep(pause)
whole = {name: engine.whole(name) for name in engine.parameters}
if job.is_main:
    torch.save(whole, folder / "parameters.new")
    os.rename(folder / "parameters.new", folder / "parameters")
job.close()
"""


class Soak:
    """A job on several hosts, its faults, and what it has done."""

    def __init__(self, hosts: Any, folder: Path, seed: int, pause: float) -> None:
        self.hosts, self.folder, self.pause = hosts, folder, pause
        """The nodes from this one on are taken."""
        self.random = random.Random(seed)  # noqa: S311
        self.endpoint = f"{hosts.addresses[0]}:{free_port()}"
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.away: dict[int, float] = {}
        """Nodes that were taken, and when they come back."""
        self.cut_off: set[int] = set()
        self.recovered_s: list[float] = []
        self.kinds: Counter[str] = Counter()
        (folder / "tmp").mkdir()
        (folder / "train.py").write_text(SCRIPT)

    def start(self, node: int) -> None:
        """Start the launcher of a node."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "PARAPLAN_"))}
        variables |= {"TMPDIR": str(self.folder / "tmp"), MARK: str(self.folder), "PYTHONPATH": str(ROOT)}
        words = [
            "--nnodes",
            f"1:{self.hosts.count}",
            "--nproc-per-node",
            str(RANKS_PER_NODE),
            "--max-restarts",
            "10000",
        ]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--memory-checkpoint", "1"]
        words += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1", "train.py", str(self.folder)]
        command = self.hosts.command(node, sys.executable, "-m", "paraplan", "launch", *words, str(self.pause))
        with (self.folder / f"output-{node}").open("ab") as file:
            self.launchers[node] = subprocess.Popen(
                command, cwd=self.folder, env=variables, stdout=file, stderr=file, start_new_session=True
            )

    def lines(self) -> list[list[str]]:
        """Return what the main ranks have written, of whole lines."""
        path = self.folder / "steps"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many more steps were written. Raises TimeoutError where they are not."""
        begin, deadline = len(self.lines()), time.monotonic() + PATIENCE_S
        while sum(words[0] == "step" for words in self.lines()[begin:]) < count:
            if time.monotonic() > deadline:
                raise TimeoutError("no step since the last fault")
            for node in [node for node, back in self.away.items() if time.monotonic() > back]:
                self.bring_back(node)
            for node, launcher in self.launchers.items():
                if node not in self.away and launcher.poll() is not None:
                    raise TimeoutError(f"the launcher of node {node} ended with {launcher.returncode}")
            time.sleep(0.02)

    def strike(self) -> str:
        """Do something to the job, and return what."""
        here = [node for node in range(1, self.hosts.count) if node not in self.away]
        if 2 * (len(self.away) + 1) > self.hosts.count:
            here = []
        kinds = ["rank killed", "two ranks killed", "rank fails"] + ["node killed", "network cut"] * bool(here)
        kind = self.random.choice(kinds)
        if kind == "node killed":
            node = self.random.choice(here)
            os.killpg(self.launchers[node].pid, signal.SIGKILL)
            self.launchers[node].wait()
            self.away[node] = time.monotonic() + self.random.uniform(0, 8)
        elif kind == "network cut":
            node = self.random.choice(here)
            self.hosts.set_link(node, "down")
            self.cut_off.add(node)
            self.away[node] = time.monotonic() + self.random.uniform(4, 10)
        else:
            for _ in range(2 if kind == "two ranks killed" else 1):
                self._strike_a_rank(fails=kind == "rank fails")
        self.kinds[kind] += 1
        return kind

    def _strike_a_rank(self, *, fails: bool) -> None:
        size = next(int(words[2]) for words in reversed(self.lines()) if words[0] == "begins")
        rank = self.random.randrange(size)
        if fails:
            (self.folder / f"fails{rank}").touch()
            return
        pid = int((self.folder / f"pid{rank}").read_text())
        if pid in processes_of(self.folder):
            os.kill(pid, signal.SIGKILL)

    def bring_back(self, node: int) -> None:
        """Have a node that was taken join again."""
        del self.away[node]
        if node in self.cut_off:  # its launcher has given up, or waits for the network
            self.cut_off.discard(node)
            os.killpg(self.launchers[node].pid, signal.SIGKILL)
            self.launchers[node].wait()
            self.hosts.set_link(node, "up")
        self.start(node)

    def run(self, faults: int) -> None:
        """Strike so many times, and let the job end."""
        for node in range(self.hosts.count):
            self.start(node)
        self.wait_for_steps(5)
        for number in range(1, faults + 1):
            began, kind = time.monotonic(), self.strike()
            if self.random.random() < 0.2:  # the next one comes while ranks start again
                time.sleep(self.random.uniform(0, 1))
            else:
                self.wait_for_steps(3)
                self.recovered_s.append(time.monotonic() - began)
            steps = max(int(words[1]) for words in self.lines() if words[0] == "step")
            print(f"fault {number}: {kind}; {steps} steps, nodes away: {sorted(self.away) or 'none'}", flush=True)
        self.wait_for_steps(3)
        for node in list(self.away):
            self.bring_back(node)
        last = max(int(words[1]) for words in self.lines() if words[0] == "step") + AHEAD
        (self.folder / "ends-at.new").write_text(str(last))
        (self.folder / "ends-at.new").rename(self.folder / "ends-at")
        for launcher in self.launchers.values():
            launcher.wait(timeout=PATIENCE_S)

    def show(self) -> None:
        """Print the last words of all nodes."""
        for node in self.launchers:
            print(f"--- node {node}", (self.folder / f"output-{node}").read_text()[-4000:], sep="\n")

    def end(self) -> None:
        """End what still runs."""
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


def undisturbed(folder: Path, last: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Return losses and parameters of one process that takes the same steps."""
    alone = folder / "alone"
    alone.mkdir()
    (alone / "ends-at").write_text(str(last))
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, folder / "train.py", alone, "0", "saves nothing"], env=variables, cwd=alone, check=True
    )
    lines = [line.split() for line in (alone / "steps").read_text().splitlines()]
    losses = {int(words[1]): float(words[2]) for words in lines if words[0] == "step"}
    return losses, torch.load(alone / "parameters", weights_only=True)


def verdict(soak: Soak) -> tuple[dict[str, Any], bool]:
    """Compare what was done with a job that nothing disturbs; return the figures, and whether all is well."""
    time.sleep(1)
    done = [(int(words[1]), float(words[2])) for words in soak.lines() if words[0] == "step"]
    said = "".join(path.read_text() for path in soak.folder.glob("output-*"))
    last = max(step for step, _ in done)
    left = {
        "processes": len(processes_of(soak.folder)),
        "temporary files": sum(not path.name.startswith("torchinductor") for path in (soak.folder / "tmp").iterdir()),
    }
    losses, parameters = undisturbed(soak.folder, last)
    found = torch.load(soak.folder / "parameters", weights_only=True)
    off = max(abs(loss - losses[step]) for step, loss in done)
    parameters_off = max(float((found[name] - value).abs().max()) for name, value in parameters.items())
    recovered = sorted(soak.recovered_s)
    figures = {
        "faults": dict(soak.kinds),
        "attempts": sum(words[0] == "begins" for words in soak.lines()),
        "steps": last,
        "steps done again": len(done) - len({step for step, _ in done}),
        "steps never done": last - len({step for step, _ in done}),
        "largest difference of a loss": off,
        "largest difference of a parameter": parameters_off,
        "seconds until three more steps, median and longest": [recovered[len(recovered) // 2], recovered[-1]],
        "attempts that went on from memory": said.count("from the copy in memory"),
        "statuses": [launcher.returncode for launcher in soak.launchers.values()],
        "left": left,
    }
    is_well = off < LOSS_TOLERANCE and parameters_off < TOLERANCE and not any(left.values())
    statuses = [launcher.returncode for launcher in soak.launchers.values()]
    return figures, is_well and not figures["steps never done"] and not any(statuses)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=4, choices=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between steps")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the job")
    arguments = parser.parse_args()
    if reason := namespaces.missing_for_hosts():
        sys.exit(f"error: no hosts can be made: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    try:
        with named_hosts(arguments.hosts) as hosts:
            soak = Soak(hosts, folder, arguments.seed, arguments.pause)
            try:
                soak.run(arguments.faults)
            except BaseException:
                soak.show()
                raise
            finally:
                soak.end()
            figures, is_well = verdict(soak)
    finally:
        if arguments.keep:
            print(folder)
        else:
            shutil.rmtree(folder)
    print(json.dumps(figures, indent=1))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
