"""Inject faults into training jobs on CPU ranks, and count what `paraplan launch` says of them.

    python scripts/straggler_proof.py [--faults 200] [--clean 100] [--json FILE] [--seed N]

A job trains a small model under DDP with faults one after another, each for 45 steps, with 50 steps between them.
Kinds: slow matmuls (as many more as the size says), a data loader that waits, a process that is stopped now and then
(SIGSTOP), garbage collection, a script that waits for something else, jitter (in each step another rank, drawn by
chance), and with two hosts (network namespaces with names of their own; needs root): all ranks of a host that are slow,
and a link that is slow (a token bucket or netem on one host's interface).

A fault counts as said if the line comes within 30 steps of its begin and names the right rank, host or link, or says
jitter without a name; whether the part of the step is right is counted apart. Every other line is a false alarm.
precision = said / (said + false alarms), those of the clean runs included; recall = said / faults.

Each rank also notes the CPU time of the same passes in every step, which no fault touches. Where a rank's are 15 %
longer than another's in half of the steps, its core is slower, as happens on machines that others share. Lines that
this bears out are true, and faults that come meanwhile may not be told from it: both are counted apart, and the raw
rates count them as wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "launch"))
namespaces: Any = importlib.import_module("nodes")  # those of the tests

FAULT_STEPS, CLEAN_STEPS, WARM_STEPS = 45, 50, 35
SAID_WITHIN = 30
SLOWER_CORE, OF_STEPS = 1.15, 0.5  # of passes beside those of another rank, in this share of the steps
STEP_S = 0.027  # CPU time of a step before its backward pass
ONE_HOST = ("matmul", "loader", "pause", "collection", "wait", "jitter")
TWO_HOSTS = ("host", "link", "matmul", "jitter")
PARTS = {"matmul": "compute", "host": "compute", "loader": "loader", "pause": "pause", "collection": "collection"}
PARTS |= {"wait": "wait"}

SCRIPT = """
import gc, json, os, random, subprocess, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

spec = json.loads(open(sys.argv[1]).read())
faults, total, width = spec["faults"], spec["steps"], spec["width"]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
is_first_here = os.environ["LOCAL_RANK"] == "0"
dice = random.Random(11)
now = {"step": 1}
usual = {"s": 0.03}

def active():
    return next((f for f in faults if f["start"] <= now["step"] < f["start"] + spec["fault_steps"]), None)

def hits(fault, *kinds):
    return fault is not None and fault["kind"] in kinds and rank in fault["ranks"]

class Batches(Dataset):
    def __len__(self):
        return 1 << 30
    def __getitem__(self, index):
        fault = active()
        if index % 64 == 0 and hits(fault, "loader"):
            time.sleep(fault["size"] * usual["s"])
        return torch.randn(width)

model = nn.parallel.DistributedDataParallel(
    nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)])
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
batches = iter(DataLoader(Batches(), batch_size=64))
if rank == 0:  # as many passes as make a step of this length on any machine
    batch, found = torch.randn(64, width), []
    for _ in range(30):
        start = time.thread_time()
        model.module(batch)
        found.append(time.thread_time() - start)
    spec["passes"] = max(1, round(spec["step_s"] / sorted(found)[len(found) // 2]))
passes = torch.tensor([spec.get("passes", 0)])
dist.broadcast(passes, src=0)
garbage = []
if any(fault["kind"] == "collection" for fault in faults):
    garbage = [[] for _ in range(400_000)]
    gc.collect()
link = None
began, passed = [], []
while now["step"] <= total:
    fault = active()
    began.append(time.thread_time())
    if 5 < len(began) < 25 and fault is None:
        usual["s"] = sorted(b - a for a, b in zip(began[2:], began[3:]))[len(began[3:]) // 2]
    struck = dice.randrange(size)
    if fault is not None and fault["kind"] == "jitter" and struck == rank:
        time.sleep(fault["size"] * usual["s"])
    if hits(fault, "pause") and now["step"] % 3 == 0:
        pause_s = 3 * fault["size"] * usual["s"]
        later_s = random.random() * usual["s"]
        subprocess.Popen(["sh", "-c", f"sleep {later_s:.3f}; kill -STOP {os.getpid()}; sleep {pause_s:.3f}; "
                          f"kill -CONT {os.getpid()}"])
    if spec["is_on_two_hosts"] and is_first_here and os.environ["GROUP_RANK"] == "1":
        wanted = fault["rate"] if fault is not None and fault["kind"] == "link" else None
        if wanted != link:
            words = ["root", *wanted.split()] if wanted else ["root"]
            subprocess.run(["tc", "qdisc", "replace" if wanted else "del", "dev", "eth0", *words], check=True)
            link = wanted
    batch = next(batches)
    start = time.thread_time()
    for _ in range(int(passes)):
        model.module(batch)
    passed.append(time.thread_time() - start)
    if hits(fault, "matmul", "host"):
        until_s = time.thread_time() + fault["size"] * usual["s"]
        while time.thread_time() < until_s:
            model.module[0](batch)
    if hits(fault, "collection"):
        until_s = time.thread_time() + fault["size"] * usual["s"]
        while time.thread_time() < until_s:
            gc.collect()
    if hits(fault, "wait"):
        time.sleep(fault["size"] * usual["s"])
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    now["step"] += 1
with open(f"passes-{rank}.json", "w") as lines:
    json.dump(passed, lines)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Fault:
    """One fault: `size` is the time that it adds to a step, as a share of the step's own time."""

    kind: str
    ranks: tuple[int, ...]
    start: int
    size: float
    rate: str = ""


def draw_faults(kinds: list[str], *, num_ranks: int, dice: random.Random) -> list[Fault]:
    """Return faults of these kinds, one after another."""
    found = []
    for number, kind in enumerate(kinds):
        start = WARM_STEPS + number * (FAULT_STEPS + CLEAN_STEPS) + dice.randrange(5)
        host = dice.randrange(2)
        ranks = {"jitter": (), "link": (), "host": tuple(range(host * 2, host * 2 + 2))}.get(
            kind, (dice.randrange(num_ranks),)
        )
        least = 0.6 if kind in ("jitter", "pause") else 0.35
        found.append(Fault(kind, ranks, start, round(dice.uniform(least, 1.0), 2), rate_of(kind, dice)))
    return found


def rate_of(kind: str, dice: random.Random) -> str:
    """Return the queueing discipline of a slow link: netem where this kernel has it, else a token bucket."""
    if kind != "link":
        return ""
    if HAS_NETEM:
        return f"netem delay {dice.choice((10, 15, 20))}ms"
    return f"tbf rate {dice.choice((120, 160, 200))}mbit burst 64k latency 100ms"


def has_netem() -> bool:
    """Whether this kernel has netem."""
    words = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    unshare = shutil.which("unshare")
    return (
        unshare is not None and not subprocess.run([unshare, "-n", "sh", "-c", words], capture_output=True).returncode
    )


HAS_NETEM = has_netem()


class Cores:
    """CPU seconds of the same passes by rank and step: how fast the ranks' cores were."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._passes = [json.loads((folder / f"passes-{rank}.json").read_text()) for rank in range(num_ranks)]

    def differ(self, first: int, last: int, ranks: Sequence[int] = ()) -> bool:
        """Whether one rank, of `ranks` where there are some, had a slower core than another in these steps."""
        steps = range(max(0, first - 1), min(last, len(self._passes[0])))
        slower = 0
        for step in steps:
            seconds = [passes[step] for passes in self._passes]
            slower += max(seconds[rank] for rank in ranks or range(len(seconds))) >= SLOWER_CORE * min(seconds)
        return slower >= OF_STEPS * max(1, len(steps))


def run_job(faults: list[Fault], *, num_ranks: int, steps: int, places: Any) -> tuple[list[dict[str, Any]], Cores]:
    """Train under these faults; return the cases of run.json, and how fast the cores were."""
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as scratch:
        folder = Path(scratch)
        spec = {
            "faults": [asdict(fault) for fault in faults],
            "steps": steps,
            "fault_steps": FAULT_STEPS,
            "is_on_two_hosts": places is not None,
            "width": 384,
            "step_s": STEP_S,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "train.py").write_text(SCRIPT)
        launch = [sys.executable, "-m", "paraplan", "launch", "--skip-preflight", "--watch-steps"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PARAPLAN_JOB_TOKEN": "straggler-proof-token",
        }
        tail = ["train.py", "spec.json"]
        if places is None:
            commands = [[*launch, "--log-dir", "run0", "--nproc-per-node", str(num_ranks), *tail]]
        else:
            meet = ["--nnodes", "2", "--nproc-per-node", str(num_ranks // 2), "--rdzv-backend", "c10d"]
            meet += ["--rdzv-endpoint", f"{places.addresses[0]}:29411", "--rdzv-conf", "join_timeout=120"]
            commands = [places.command(index, *launch, "--log-dir", f"run{index}", *meet, *tail) for index in range(2)]
        outputs = [(folder / f"said{index}").open("w+") for index in range(len(commands))]
        jobs = [
            subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
            for command, output in zip(commands, outputs, strict=True)
        ]
        statuses = [job.wait() for job in jobs]
        said = "".join((folder / f"said{index}").read_text() for index in range(len(commands)))
        if any(statuses):
            raise RuntimeError(f"a job ended with status {statuses}:\n{said}")
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("run*/run.json"))]
        return [case for values in found for case in values.get("late", [])], Cores(folder, num_ranks)


def is_right(case: dict[str, Any], fault: Fault) -> bool:
    """Whether a line names what was at fault."""
    kind = {"jitter": "jitter", "link": "link", "host": "host"}.get(fault.kind, "rank")
    return case["kind"] == kind and tuple(case["ranks"]) == fault.ranks


@dataclass
class Count:
    """What was said: faults by kind, those that were said in time, with the right part, and false alarms."""

    injected: Counter[str]
    said: Counter[str]
    right_part: Counter[str]
    steps_to_line: defaultdict[str, list[int]]
    false_alarms: list[str]
    clean_runs: int = 0
    clean_alarms: int = 0
    slower_cores: int = 0
    """Lines that were true of the machine itself."""
    disturbed: int = 0
    """Faults that came while a core was slower, and were not said."""

    def take(self, faults: list[Fault], cases: list[dict[str, Any]], cores: Cores) -> int:
        """Set the lines of one job against its faults; return how many were wrong."""
        left = list(cases)
        for fault in faults:
            mine = [
                case
                for case in left
                if fault.start <= case["said_at_step"] <= fault.start + FAULT_STEPS and is_right(case, fault)
            ]
            left = [case for case in left if case not in mine[:1]]
            is_said = bool(mine) and mine[0]["said_at_step"] - fault.start <= SAID_WITHIN
            if not is_said and cores.differ(fault.start - SAID_WITHIN, fault.start + SAID_WITHIN):
                self.disturbed += 1
                continue
            self.injected[fault.kind] += 1
            if is_said:
                self.said[fault.kind] += 1
                self.steps_to_line[fault.kind].append(mine[0]["said_at_step"] - fault.start)
                self.right_part[fault.kind] += PARTS.get(fault.kind) in (None, mine[0]["part"])
            else:
                print(f"  missed: {fault}, lines: {[case['text'] for case in mine]}", flush=True)
        wrong = [case for case in left if not cores.differ(case["since_step"], case["said_at_step"], case["ranks"])]
        self.slower_cores += len(left) - len(wrong)
        self.false_alarms += [f"step {case['said_at_step']}: {case['text']}" for case in wrong]
        for case in wrong:
            print(f"  false alarm: {case['text']}", flush=True)
        return len(wrong)

    def result(self) -> dict[str, Any]:
        """Return precision, recall and the table by kind."""
        said, injected = sum(self.said.values()), sum(self.injected.values())
        steps = sorted(step for found in self.steps_to_line.values() for step in found)
        return {
            "faults": injected,
            "said_within_30_steps": said,
            "recall": said / injected if injected else None,
            "precision": said / (said + len(self.false_alarms)) if said else None,
            "raw_recall": said / (injected + self.disturbed) if injected else None,
            "raw_precision": said / (said + len(self.false_alarms) + self.slower_cores) if said else None,
            "false_alarms": len(self.false_alarms),
            "clean_runs": self.clean_runs,
            "clean_runs_with_an_alarm": self.clean_alarms,
            "right_part": sum(self.right_part.values()),
            "lines_of_slower_cores": self.slower_cores,
            "faults_beside_slower_cores": self.disturbed,
            "median_steps_to_the_line": steps[len(steps) // 2] if steps else None,
            "by_kind": {kind: [self.said[kind], self.injected[kind]] for kind in sorted(self.injected)},
            "netem": HAS_NETEM,
        }


def batches_of(kinds: list[str], size: int) -> Iterator[list[str]]:
    """Return lists of at most `size` kinds."""
    for start in range(0, len(kinds), size):
        yield kinds[start : start + size]


def main() -> None:
    """Run the jobs and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--per-job", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dice = random.Random(options.seed)  # noqa: S311 (faults, not secrets)
    count = Count(Counter(), Counter(), Counter(), defaultdict(list), [])
    why = namespaces.missing_for_hosts()
    if why is not None:
        print(f"without slow hosts and links: {why}")
    num_far = 0 if why is not None else options.faults * 3 // 10
    near = [ONE_HOST[number % len(ONE_HOST)] for number in range(options.faults - num_far)]
    far = [TWO_HOSTS[number % len(TWO_HOSTS)] for number in range(num_far)]
    jobs = [(kinds, False) for kinds in batches_of(near, options.per_job)]
    jobs += [(kinds, True) for kinds in batches_of(far, options.per_job)]
    started_s = time.monotonic()
    for number, (kinds, is_far) in enumerate(jobs):
        num_ranks = 4 if is_far else dice.choice((2, 2, 3))
        faults = draw_faults(kinds, num_ranks=num_ranks, dice=dice)
        steps = WARM_STEPS + len(faults) * (FAULT_STEPS + CLEAN_STEPS)
        if is_far:
            with namespaces.hosts(2) as places:
                cases, cores = run_job(faults, num_ranks=num_ranks, steps=steps, places=places)
        else:
            cases, cores = run_job(faults, num_ranks=num_ranks, steps=steps, places=None)
        count.take(faults, cases, cores)
        print(f"job {number + 1} of {len(jobs)}, {num_ranks} ranks: {count.result()['by_kind']}", flush=True)
    for number in range(options.clean):
        num_ranks = (2, 3, 2, 4)[number % 4]
        cases, cores = run_job([], num_ranks=num_ranks, steps=90, places=None)
        count.clean_runs += 1
        count.clean_alarms += bool(count.take([], cases, cores))
    result = count.result() | {"seconds": round(time.monotonic() - started_s)}
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
