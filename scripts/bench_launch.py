"""Measure the start of a job: `paraplan launch` beside torchrun, in interleaved pairs, on this machine.

    python scripts/bench_launch.py [--ranks 2 8] [--pairs 10] [--json FILE]
    python scripts/bench_launch.py --launches 200     # what so many launches leave behind

For each script and number of ranks, the median over the pairs of: wall time from the command to the first line that the
last rank prints, wall time of the whole command, CPU time of the command with all its ranks, and the largest sum of
proportional memory (PSS: shared pages count in parts) of the command's processes while it ran. Pairs are interleaved so
that what else the machine does strikes both alike. paraplan is compiled before, as pip compiles torch and every wheel.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import paraplan

SCRIPTS = {
    "no torch": "import os, time; os.write(1, f'{time.time()}\\n'.encode())",
    "import torch": "import os, time, torch; os.write(1, f'{time.time()}\\n'.encode()); time.sleep(0.2)",
    "gloo barrier": (
        "import os, time, torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); "
        "os.write(1, f'{time.time()}\\n'.encode()); dist.destroy_process_group()"
    ),
}
LAUNCHERS = {"torchrun": ["-m", "torch.distributed.run"], "paraplan": ["-m", "paraplan", "launch"]}


class Run(NamedTuple):
    """One launch. `peak_pss_mib` is None where it was not sampled."""

    first_line_s: float
    wall_s: float
    cpu_s: float
    peak_pss_mib: float | None


def measure(launcher: list[str], script: Path, *, num_ranks: int, sample_memory: bool) -> Run:
    """Launch `script` once on `num_ranks` ranks. Raises RuntimeError when the job fails."""
    command = [sys.executable, *launcher, "--nproc-per-node", str(num_ranks), str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "OMP_"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s, started = time.time(), time.perf_counter()
    process = subprocess.Popen(
        command, cwd=script.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peak = _PeakMemory(process.pid) if sample_memory else None
    output, errors = process.communicate()
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode or len(output.split()) != num_ranks:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{errors}")
    return Run(
        first_line_s=max(map(float, output.split())) - start_s,
        wall_s=wall_s,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        peak_pss_mib=peak.stop() if peak else None,
    )


class _PeakMemory:
    """Samples the proportional memory of a process and its descendants every 20 ms."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_kib = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> float:
        """Return the peak in MiB."""
        self._done.set()
        self._thread.join()
        return self._peak_kib / 1024

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self._peak_kib = max(self._peak_kib, sum(_pss_kib(pid) for pid in _family(self._pid)))


def _family(root: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {root}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return family


def _pss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def compare(script: Path, *, num_ranks: int, num_pairs: int) -> dict[str, Run]:
    """Return the medians of each launcher over `num_pairs` interleaved pairs; memory is sampled in one more run."""
    runs: dict[str, list[Run]] = {name: [] for name in LAUNCHERS}
    for _ in range(num_pairs):
        for name, launcher in LAUNCHERS.items():
            runs[name].append(measure(launcher, script, num_ranks=num_ranks, sample_memory=False))
    medians = {}
    for name, launcher in LAUNCHERS.items():
        sampled = measure(launcher, script, num_ranks=num_ranks, sample_memory=True)  # sampling itself takes CPU time
        times = [statistics.median(column) for column in zip(*[run[:3] for run in runs[name]], strict=True)]
        medians[name] = Run(times[0], times[1], times[2], sampled.peak_pss_mib)
    return medians


def count_leftovers(num_launches: int) -> dict[str, int]:
    """Launch a job of 2 ranks so often; return what is there afterwards and was not before, by kind.

    A process with a port or a file counts as long as it lives; shared memory of other programs counts too.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        script = Path(folder) / "job.py"
        script.write_text(SCRIPTS["gloo barrier"].split("os.write")[0] + "dist.destroy_process_group()\n")
        command = [sys.executable, *LAUNCHERS["paraplan"], "--no-logs", "--nproc-per-node", "2", str(script)]
        before = _resources(Path(scratch))
        for number in range(num_launches):
            subprocess.run(command, cwd=folder, env=os.environ | {"TMPDIR": scratch}, check=True, capture_output=True)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} launches", flush=True)
        after = _resources(Path(scratch))
        return {kind: len(after[kind] - before[kind]) for kind in after}


def _resources(scratch: Path) -> dict[str, set[str]]:
    """Return processes that have `scratch` in their environment and what they listen on, shared memory and files."""
    processes, ports = set(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={scratch}".encode() in path.read_bytes():
                processes.add(path.parent.name)
                ports |= {str(link.readlink()) for link in (path.parent / "fd").iterdir()} & _listening_sockets()
    return {
        "processes": processes,
        "ports": ports,
        "shared memory": {path.name for path in Path("/dev/shm").glob("*")},  # noqa: S108
        "temporary files": {path.name for path in scratch.glob("*")},
    }


def _listening_sockets() -> set[str]:
    """Return the sockets of this host that listen, as their descriptors are shown in /proc."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


LONG_LIVED = """
import json, os, sys, threading
from pathlib import Path
from paraplan.launch.run import main

def count():
    children = sum(
        (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        for folder in Path("/proc").glob("[0-9]*") if (folder / "stat").exists()
    )
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "children": children}

main(["--nproc-per-node", "2", sys.argv[1]])  # torch opens some things once
before = count()
for _ in range(int(sys.argv[2]) - 1):
    main(["--nproc-per-node", "2", sys.argv[1]])
print(json.dumps({kind: number - before[kind] for kind, number in count().items()}))
"""


def count_in_one_process(num_launches: int) -> dict[str, int]:
    """Launch so often from one Python program; return what that has more of at the end than after the first launch."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text("pass\n")
        (Path(folder) / "program.py").write_text(LONG_LIVED)
        command = [sys.executable, "program.py", "job.py", str(num_launches)]
        done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, and print one line for each script and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks")
    parser.add_argument("--pairs", type=int, default=10, help="interleaved pairs for each line")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="which scripts to launch")
    parser.add_argument("--json", type=Path, help="write the medians to this file too")
    parser.add_argument("--launches", type=int, help="measure nothing: launch so often, and count what is left behind")
    options = parser.parse_args()
    if options.launches:
        left = count_leftovers(options.launches) | count_in_one_process(options.launches)
        print(", ".join(f"{kind}: {count} left" for kind, count in left.items()))
        return
    compileall.compile_dir(str(Path(paraplan.__file__).parent), quiet=1)
    results = []
    print(f"{'script':14}{'ranks':>5}   {'last first line s':^21}{'wall s':^21}{'CPU s':^21}{'peak PSS MiB':^21}")
    print(f"{'':22}" + f"{'torchrun':>8}{'ours':>7}{'':6}" * 4)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.scripts:
            script = Path(folder) / f"{name.replace(' ', '_')}.py"
            script.write_text(SCRIPTS[name] + "\n")
            for num_ranks in options.ranks:
                medians = compare(script, num_ranks=num_ranks, num_pairs=options.pairs)
                cells = [
                    f"{theirs:8.2f}{ours:7.2f} x{ours / theirs:<4.2f}"
                    for theirs, ours in zip(medians["torchrun"], medians["paraplan"], strict=True)
                    if theirs is not None and ours is not None
                ]
                print(f"{name:14}{num_ranks:5}   " + "".join(cells), flush=True)
                results.append({"script": name, "ranks": num_ranks} | {k: v._asdict() for k, v in medians.items()})
                if options.json:  # what has been measured is kept if the rest is cut off
                    options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
