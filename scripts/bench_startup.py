"""CPU and wall time from the shell of paraplan's planning commands, beside `import torch` and `torchrun --help`.

    python scripts/bench_startup.py [--runs 7]

The commands take turns, so that all of them see the same machine; medians are printed, and ratios to `import torch`.
paraplan is compiled before, as pip compiles torch and every wheel.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import paraplan


def commands() -> dict[str, list[str]]:
    """Return the command lines by title; the baselines only where torch is installed."""
    paraplan = [sys.executable, "-m", "paraplan"]
    hardware = ["--profile", "dgx-h100"]
    training = ["--seq-len", "4096", "--global-batch", "64"]
    rows = {
        "paraplan --version": [*paraplan, "--version"],
        "paraplan topo --json": [*paraplan, "topo", *hardware, "--json"],
        "paraplan estimate --json": [*paraplan, "estimate", "llama-3-8b", *hardware, "--dp", "8", "--json"],
        "paraplan recommend --json": [*paraplan, "recommend", "llama-3-8b", *hardware, *training, "--json"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
        rows["python -c 'import torch'"] = [sys.executable, "-c", "import torch"]
        torchrun = shutil.which(
            "torchrun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        )
        if torchrun:
            rows["torchrun --help"] = [torchrun, "--help"]
    return rows


def run(command: list[str]) -> tuple[float, float]:
    """Return CPU and wall seconds of one run; end the benchmark if the command fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    finished = subprocess.run(command, capture_output=True, check=False)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode:
        sys.exit(f"{' '.join(command)} ended with {finished.returncode}:\n{finished.stderr.decode()}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall_s


def main() -> None:
    """Run the benchmark and print one row a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    compileall.compile_dir(str(Path(paraplan.__file__).parent), quiet=1)
    rows = commands()
    times: dict[str, list[tuple[float, float]]] = {title: [] for title in rows}
    for number in range(runs + 1):
        for title, command in rows.items():
            measured = run(command)
            if number:  # the first round warms the file cache
                times[title].append(measured)
    medians = {
        title: (statistics.median(cpu for cpu, _ in pairs), statistics.median(wall for _, wall in pairs))
        for title, pairs in times.items()
    }
    torch_s = medians.get("python -c 'import torch'", (None, None))[0]
    print(f"median of {runs} runs, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{'command':<28} {'CPU s':>7} {'wall s':>7} {'CPU / import torch':>19}")
    for title, (cpu_s, wall_s) in medians.items():
        ratio = f"{cpu_s / torch_s:19.2f}" if torch_s else f"{'-':>19}"
        print(f"{title:<28} {cpu_s:7.3f} {wall_s:7.3f} {ratio}")


if __name__ == "__main__":
    main()
