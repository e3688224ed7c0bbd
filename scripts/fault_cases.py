"""The faults of `fault_table.py`: what strikes a job, and which words name the cause."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TRAIN = """
import datetime, json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

folder, seconds = Path(os.environ["FOLDER"]), float(os.environ.get("GLOO_SECONDS", "1800"))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.ones(1)
dist.all_reduce(total)
Path(folder, f"new{rank}").write_text(f"{os.getpid()} {int(total)} {os.environ['MASTER_PORT']}")
os.rename(folder / f"new{rank}", folder / f"pid{rank}")
while True:
    strike = json.loads((folder / "strike").read_text()) if (folder / "strike").exists() else {}
    if strike.get("rank") == rank:
        if strike["does"] == "raise":
            raise ValueError("the real bug")
        if strike["does"] == "exit":
            os._exit(3)
        if strike["does"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if strike["does"] == "skip":
            time.sleep(600)
    total.fill_((folder / "stop").exists())
    dist.all_reduce(total)
    if total.item():  # all leave in the same pass, whoever has seen it
        break
    time.sleep(0.1)
dist.barrier()
"""
WITH_CHILDREN = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n" + TRAIN
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAIN
WRITES = """
import os
for number in range(20_000):
    print(f"{number:>50}")
"""

CLOCK = """
import copyreg, datetime, os, time
seconds = float(os.environ["SHIFTED_BY"])
wall, wall_ns, real = time.time, time.time_ns, datetime.datetime
time.time = lambda: wall() + seconds
time.time_ns = lambda: wall_ns() + int(seconds * 1e9)


class Shifted(real):
    @classmethod
    def now(cls, tz=None):
        return real.now(tz) + datetime.timedelta(seconds=seconds)


datetime.datetime = Shifted
for one in (real, Shifted):
    copyreg.pickle(one, lambda moment: (Shifted.fromisoformat, (moment.isoformat(),)))
"""

SILENT = """
import socket, sys, time
listener = socket.create_server(("", int(sys.argv[1])))
held = []
while True:
    held.append(listener.accept())
"""


@dataclass(frozen=True)
class Case:
    """One fault, and what is to be said of it."""

    name: str
    cause: str | Mapping[str, str] | None
    """Pattern of what names the cause in the output of a launcher, for both or for each; None: see `verdict`."""
    strike: Callable[[Any], None] = lambda job: None
    """Brings the fault about, once the ranks have met or, without `meets`, once the launchers have started."""
    verdict: Callable[[Any], str] | None = None
    """What became of the job, in place of whether the cause was named."""
    options: Sequence[object] | Callable[[Any, int], Sequence[object]] = ()
    """Those of a node's launcher, or what makes them of the job and the node's number."""
    own_options: Sequence[object] = ()
    """Those of paraplan alone."""
    before: Callable[[Any], None] = lambda job: None
    """What is to be there before the launchers start."""
    script: str = TRAIN
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of further files beside the script."""
    environment: Callable[[Any, int], Mapping[str, str]] = lambda job, index: {}
    """Variables of a node's launcher."""
    nodes: tuple[int, ...] = (0, 1)
    """On which nodes a launcher is started."""
    watched: tuple[int, ...] | None = None
    """Nodes whose launchers are to name the cause and to end; None: all."""
    meets: bool = True
    ends: bool = True
    """Whether the launchers are to end; those that wait on are ended once the cause was named."""
    rendezvous: str = "static"

    def words(self, job: Any, index: int) -> list[str]:
        """Return the options of a node's launcher."""
        options = self.options(job, index) if callable(self.options) else self.options
        words: list[object] = ["--nproc-per-node", 2, *options]
        first = job.hosts.addresses[0]
        if "--nnodes" not in words and len(self.nodes) > 1:
            words += ["--nnodes", 2]
        if "--nnodes" in words and self.rendezvous == "static":
            words += ["--node-rank", index, "--master-addr", first, "--master-port", job.port]
        elif "--nnodes" in words:
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{job.port}", "--rdzv-id", "7"]
        if job.launcher == "paraplan":
            words += self.own_options
        return list(map(str, words))

    def is_named(self, job: Any, index: int) -> bool:
        """Whether the launcher of a node has named the cause."""
        pattern = self.cause if isinstance(self.cause, str) else (self.cause or {}).get(job.launcher)
        return pattern is not None and re.search(pattern, job.said(index)) is not None


def _failed_first(rank: int, words: str = "") -> dict[str, str]:
    """Return what names `rank` as the one that failed first, as each launcher writes it."""
    return {
        "paraplan": f"rank {rank} failed first.*{words}",
        "torchrun": rf"(?s){words}.*Root Cause.*?rank\s*: {rank} ",
    }


def _does(rank: int, what: str) -> Callable[[Any], None]:
    def strike(job: Any) -> None:
        (job.folder / "strike.new").write_text(json.dumps({"rank": rank, "does": what}))
        (job.folder / "strike.new").rename(job.folder / "strike")

    return strike


def _to_rank(rank: int, number: signal.Signals) -> Callable[[Any], None]:
    return lambda job: os.kill(job.rank_pid(rank), number)


def _to_launcher(index: int, number: signal.Signals) -> Callable[[Any], None]:
    return lambda job: job.signal_launcher(index, number)


def _come_back(job: Any) -> None:
    """Kill the launcher of node 1, start another one, and let the job end once all ranks have met again."""
    job.signal_launcher(1, signal.SIGKILL)
    for rank in range(4):
        (job.folder / f"pid{rank}").unlink()
    time.sleep(1)
    job.start(1)
    job.wait_until_met()
    (job.folder / "stop").touch()


def _stop(job: Any) -> None:
    (job.folder / "stop").touch()


def _small_disk(job: Any, index: int) -> Sequence[object]:
    """Return the options that write logs to a disk of 256 KiB."""
    logs = job.folder / "logs"
    if not logs.exists():
        logs.mkdir()
        subprocess.run(
            [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(logs)], check=True
        )
    return ["--tee", 3, "--log-dir", logs]


def _behind(job: Any, index: int) -> dict[str, str]:
    """Return what has the clocks of Python on node 1 be a minute late."""
    return {"SHIFTED_BY": "-60", "PYTHONPATH": f"{job.folder / 'clock'}:{job.root}"} if index else {}


def _world(job: Any) -> str:
    sizes = {path.read_text().split()[1] for path in job.folder.glob("pid?")}
    return f"trains with a world of {' and of '.join(sorted(sizes))}" if sizes else "does not train"


def _again(job: Any) -> str:
    return "all four ranks train again" if (job.folder / "stop").exists() else "the four ranks do not meet again"


CASES = [
    Case("a rank of node 1 is killed (SIGKILL)", _failed_first(2), _to_rank(2, signal.SIGKILL)),
    Case("a rank of node 1 raises an error", _failed_first(3, "the real bug"), _does(3, "raise")),
    Case("a rank of node 1 leaves by `os._exit(3)`", _failed_first(3), _does(3, "exit")),
    Case("a rank of node 0 crashes (SIGSEGV)", _failed_first(1), _to_rank(1, signal.SIGSEGV)),
    Case(
        "a rank is stopped (SIGSTOP); collectives time out after 6 s",
        "rank 3 (was|is) stopped, by SIGSTOP",
        _does(3, "stop"),
        environment=lambda job, index: {"GLOO_SECONDS": "6"},
    ),
    Case(
        "a rank stays away from collectives that wait for half an hour (`--hang-timeout 4`)",
        "never came.*rank 3",
        _does(3, "skip"),
        own_options=["--hang-timeout", 4],
    ),
    Case(
        "the launcher of node 1 is killed (SIGKILL)",
        "node1: its launcher is gone",
        _to_launcher(1, signal.SIGKILL),
        watched=(0,),
    ),
    Case("node 1 is preempted: SIGTERM to its launcher", "SIGTERM ended", _to_launcher(1, signal.SIGTERM)),
    Case(
        "the launcher of node 0, which holds the store, is killed",
        "the node that hosts the rendezvous is lost",
        _to_launcher(0, signal.SIGKILL),
        watched=(1,),
        rendezvous="c10d",
    ),
    Case(
        "elastic (`--nnodes 1:2`): the launcher of node 1 is killed, another one is started",
        None,
        _come_back,
        verdict=_again,
        options=("--nnodes", "1:2", "--max-restarts", 3),
        rendezvous="c10d",
    ),
    Case(
        "the clock of node 1 is 60 s late",
        None,
        _stop,
        verdict=_world,
        environment=_behind,
        files={"clock/sitecustomize.py": CLOCK},
        rendezvous="c10d",
    ),
    *(
        Case(
            f"node 1 does not come{words}",
            "waiting .* for .*(node|1 of 2)",
            nodes=(0,),
            meets=False,
            ends=False,
            options=("--nnodes", 2),
            rendezvous=rendezvous,
        )
        for words, rendezvous in (("", "static"), (" (c10d)", "c10d"))
    ),
    Case(
        "`--nnodes 2` on node 0, `--nnodes 3` on node 1",
        "--nnodes",
        meets=False,
        ends=False,
        rendezvous="c10d",
        options=lambda job, index: ["--nnodes", 2 + index],
    ),
    Case(
        "another program holds the port of node 0, and says nothing",
        "silent.py|nothing of this job|says nothing|does not answer",
        meets=False,
        ends=False,
        before=lambda job: job.start_beside(0, "silent.py", job.port),
        files={"silent.py": SILENT},
        rendezvous="c10d",
    ),
    Case("Ctrl-C; ranks have started daemons", None, lambda job: job.interrupt(0), nodes=(0,), script=WITH_CHILDREN),
    Case(
        "the only launcher is killed (SIGKILL)", None, _to_launcher(0, signal.SIGKILL), nodes=(0,), script=WITH_CHILDREN
    ),
    Case(
        "SIGTERM to the launcher of ranks that ignore it",
        None,
        _to_launcher(0, signal.SIGTERM),
        nodes=(0,),
        script=DEAF,
    ),
    Case(
        "the disk of the logs is full (`--tee 3`: ranks write to it themselves)",
        None,
        nodes=(0,),
        meets=False,
        script=WRITES,
        options=_small_disk,
        verdict=lambda job: f"{len(re.findall(r' [0-9]+$', job.said(0), re.MULTILINE)):,} of 40,000 lines shown",
    ),
]
