"""What commands take from the shell: planning, searches beside their limits, and launches beside torchrun's.

    python scripts/bench_commands.py [planning] [search] [launch] [--rounds 10] [--json FILE]
    python scripts/bench_commands.py search --sizes        on 32 to 131,072 GPUs as well
    python scripts/bench_commands.py launch --ranks 2 8

Commands take turns, so that what else the machine does strikes all of them alike; medians are shown. CPU time is that
of a command with all its processes. paraplan is compiled before, as pip compiles torch and every wheel. Of launches
there are the time until the last rank's first line, and the largest sum of proportional memory (PSS: shared pages count
in parts), read in one more round. Status 1 where a search or `recommend` is over its limit.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import paraplan

PARAPLAN = [sys.executable, "-m", "paraplan"]
TRAINING = ["--profile", "dgx-h100", "--seq-len", "8192", "--global-batch", "64"]
PLANNING = {
    "import torch": [sys.executable, "-c", "import torch"],
    "torchrun --help": [sys.executable, "-m", "torch.distributed.run", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "paraplan --version": [*PARAPLAN, "--version"],
    "paraplan topo": [*PARAPLAN, "topo", "--profile", "dgx-h100", "--json"],
    "paraplan estimate": [*PARAPLAN, "estimate", "llama-3-8b", "--profile", "dgx-h100", "--dp", "8", "--json"],
    "paraplan recommend": [*PARAPLAN, "recommend", "llama-3-8b", *TRAINING, "--json"],
}
MOST_RECOMMEND_S = 1.0

SEARCH = """
import json, sys
import paraplan
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME
from paraplan.search.search import search
model, machine, nodes, batch, length, framework = sys.argv[1:]
workload = paraplan.load_workload(model, machine, num_nodes=int(nodes), seq_length=int(length),
    global_batch_size=int(batch), framework=framework)
result = search(workload, executor=OWN_RUNTIME if framework == "paraplan" else ANYTHING)
print(json.dumps({"plans": result.plans_considered, "memory of": result.plans_priced, "time of": result.times_priced,
    "plan": result.best.plan.describe(), "step_time_s": result.best.step.step_time_s}))
"""
SEARCHES = {
    "GPT-3 175B, 1,024 A100": ("gpt3-175b", "dgx-a100", "128", "1536", "2048", "paraplan"),
    "batch 3,840, every plan of Megatron-Core": ("gpt3-175b", "dgx-a100", "128", "3840", "2048", "megatron-core"),
    "Llama-3-405B, 16,384 H100": ("llama-3-405b", "dgx-h100", "2048", "2048", "8192", "paraplan"),
}
"""Model, machine, nodes, batch, tokens of a sequence, and the framework of which all plans are priced."""
MOST_SEARCH_S, MOST_SEARCH_BYTES = 10.0, 2**30

LAUNCHERS = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "paraplan": [*PARAPLAN, "launch"]}
SCRIPTS = {
    "no torch": "import os, time; os.write(1, f'{time.time()}\\n'.encode())",
    "import torch": "import os, time, torch; os.write(1, f'{time.time()}\\n'.encode()); time.sleep(0.2)",
    "gloo barrier": (
        "import os, time, torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); "
        "os.write(1, f'{time.time()}\\n'.encode()); dist.destroy_process_group()"
    ),
}


@dataclass(frozen=True)
class Run:
    """One command that ended well. `peak_bytes` is the largest resident size of one of its processes."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    started_s: float
    output: str


def run(command: list[str], environment: Mapping[str, str], watch: Callable[[int], object] = lambda pid: None) -> Run:
    """Run a command, `watch` with its process id meanwhile; end this script where it fails."""
    with tempfile.TemporaryFile() as errors:
        started_s, began_s = time.time(), time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        watch(process.pid)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began_s
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read().decode(errors='replace')}")
    return Run(wall_s, usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss, started_s, output)


def in_turns(commands: Mapping[str, list[str]], rounds: int, environment: Mapping[str, str]) -> dict[str, list[Run]]:
    """Return the runs of each command; a round before warms the file cache."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            done = run(command, environment)
            if number:
                runs[name].append(done)
    return runs


def planning(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, object]:
    """Show what planning commands take, and their CPU time as a share of that of `import torch`."""
    print(f"{'command':<28}{'CPU s':>8}{'wall s':>8}{'CPU / import torch':>20}")
    rows: dict[str, object] = {}
    torch_s = 0.0
    for name, runs in in_turns(PLANNING, options.rounds, environment).items():
        cpu_s, wall_s = statistics.median(one.cpu_s for one in runs), statistics.median(one.wall_s for one in runs)
        torch_s = torch_s or cpu_s
        print(f"{name:<28}{cpu_s:8.3f}{wall_s:8.3f}{cpu_s / torch_s:20.2f}")
        rows[name] = {"cpu_s": cpu_s, "wall_s": wall_s}
        if name == "paraplan recommend" and min(one.wall_s for one in runs) > MOST_RECOMMEND_S:
            options.misses.append(name)
    return rows


def search(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, object]:
    """Show what searches take, each in a process of its own on one core."""
    asked = dict(SEARCHES)
    for gpus in (8 * 4**power for power in range(1, 8)) if options.sizes else ():  # 8 cannot hold this model
        asked[f"GPT-3 175B, {gpus:,} A100"] = (
            "gpt3-175b",
            "dgx-a100",
            f"{gpus // 8}",
            f"{max(1536, gpus // 8)}",
            "2048",
            "paraplan",
        )
    print(f"{'search':<42}{'plans':>12}{'memory of':>11}{'time of':>9}{'CPU':>9}{'peak':>10}")
    rows: dict[str, object] = {}
    for title, words in asked.items():
        done = run([sys.executable, "-c", SEARCH, *words], {**environment, "OPENBLAS_NUM_THREADS": "1"})
        answer = json.loads(done.output)
        print(
            f"{title:<42}{answer['plans']:>12,}{answer['memory of']:>11,}{answer['time of']:>9,}{done.cpu_s:>7.1f} s"
            f"{done.peak_bytes / 2**20:>6.0f} MiB\n    {answer['plan']}: {answer['step_time_s']:.2f} s"
        )
        rows[title] = answer | {"cpu_s": done.cpu_s, "peak_bytes": done.peak_bytes}
        if title in SEARCHES and (done.cpu_s > MOST_SEARCH_S or done.peak_bytes > MOST_SEARCH_BYTES):
            options.misses.append(title)
    return rows


def launch(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, object]:
    """Show what launches of small scripts take, beside torchrun's."""
    environment = {name: value for name, value in environment.items() if not name.startswith(("PET_", "OMP_"))}
    print(f"{'script':<14}{'ranks':>5}{'last first line s':>22}{'wall s':>22}{'CPU s':>22}{'peak PSS MiB':>22}")
    print(" " * 19 + f"{'torchrun':>10}{'ours':>12}" * 4)
    rows: dict[str, object] = {}
    for name, text in SCRIPTS.items():
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                script = Path(folder, "script.py")
                script.write_text(text + "\n")
                words = ["--nproc-per-node", str(ranks), str(script)]
                commands = {launcher: [*command, *words] for launcher, command in LAUNCHERS.items()}
                medians = {key: _medians(runs) for key, runs in in_turns(commands, options.rounds, environment).items()}
                for launcher, command in commands.items():
                    medians[launcher].append(peak_pss_mib(command, environment))
            cells = (
                f"{theirs:10.2f}{ours:7.2f} x{ours / theirs:<3.2f}"
                for theirs, ours in zip(*medians.values(), strict=True)
            )
            print(f"{name:<14}{ranks:5}" + "".join(cells), flush=True)
            rows[f"{name}, {ranks} ranks"] = medians
    return rows


def _medians(runs: list[Run]) -> list[float]:
    first_lines = (max(map(float, one.output.split())) - one.started_s for one in runs)
    columns = (first_lines, (one.wall_s for one in runs), (one.cpu_s for one in runs))
    return [statistics.median(column) for column in columns]


def peak_pss_mib(command: list[str], environment: Mapping[str, str]) -> float:
    """Return the largest proportional memory of a command's processes; reading it every 20 ms takes CPU time too."""
    peaks, done = [0], threading.Event()

    def sample(pid: int) -> None:
        while not done.wait(0.02):
            peaks.append(sum(_pss_kib(each) for each in _family(pid)))

    run(command, environment, watch=lambda pid: threading.Thread(target=sample, args=(pid,), daemon=True).start())
    done.set()
    return max(peaks) / 1024


def _family(root: int) -> set[int]:
    family, waiting = set[int](), [root]
    while waiting:
        family.add(pid := waiting.pop())
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += map(int, children.read_text().split())
    return family


def _pss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


TABLES = {part.__name__: part for part in (planning, search, launch)}


def main() -> int:
    """Show the tables that are asked for, by default all; return 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; all by default")
    parser.add_argument("--rounds", type=int, default=10, help="of commands that take turns")
    parser.add_argument("--sizes", action="store_true", help="search on 32 to 131,072 GPUs too")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="of launches")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args(namespace=argparse.Namespace(misses=[]))
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}: choose from {', '.join(TABLES)}")
    compileall.compile_dir(str(Path(paraplan.__file__).parent), quiet=1)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="paraplan-bench-") as bytecode:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        for name in options.tables or TABLES:
            figures[name] = TABLES[name](options, kept | {"PYTHONPYCACHEPREFIX": bytecode})
            if options.json:  # what has been measured is kept if the rest is cut off
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.misses:
        print(f"over the limit: {', '.join(options.misses)}")
    return 1 if options.misses else 0


if __name__ == "__main__":
    sys.exit(main())
