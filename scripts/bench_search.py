"""How long the search takes: three questions with their limits, and seconds by the number of GPUs.

    python scripts/bench_search.py [--sizes] [--plot FILE.svg] [--json]

Each question is asked in a process of its own, of which the CPU time and the peak memory are read. Python may keep
its bytecode, as it does for an installed package, in a folder that is gone afterwards. `--sizes` searches
GPT-3 175B on 8 to 131,072 A100s as well; `--plot` draws that. Ends with 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

SIZES = tuple(8 * 4**power for power in range(8))
ONE_SEARCH = """
import json, resource, sys, time
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.training import TrainingSpec
from paraplan.search.search import search
from dataclasses import replace
model, profile, nodes, batch, length, framework = sys.argv[1:]
training = TrainingSpec(global_batch_size=int(batch), seq_length=int(length))
cluster = cluster_from_profile(profile, num_nodes=int(nodes))
workload = Workload.of(read_model(model), training, cluster, load_link_speeds())
if framework:
    workload = replace(workload, framework=load_framework(framework))
result = search(workload, executor=ANYTHING if framework else OWN_RUNTIME)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024,
    "considered": result.plans_considered, "priced": result.plans_priced, "timed": result.times_priced,
    "plan": result.best.plan.describe(), "step_time_s": result.best.step.step_time_s}))
"""


class Question(NamedTuple):
    """A search and its limits: CPU seconds of the whole process, and its peak memory. A framework prices all plans."""

    title: str
    model: str
    profile: str
    nodes: int
    batch: int
    length: int
    framework: str = ""
    limit_s: float = 10.0
    limit_bytes: float = 2.0**30


QUESTIONS = (
    Question("GPT-3 175B, 1,024 A100", "gpt3-175b", "dgx-a100", 128, 1536, 2048),
    Question("batch 3,840, every plan of Megatron-Core", "gpt3-175b", "dgx-a100", 128, 3840, 2048, "megatron-core"),
    Question("Llama-3-405B, 16,384 H100", "llama-3-405b", "dgx-h100", 2048, 2048, 8192),
)
COMMAND = ("recommend", "llama-3-8b", "--profile", "dgx-h100", "--seq-len", "8192", "--global-batch", "64")


def environment() -> dict[str, str]:
    """Return the environment of what is measured: one core, and bytecode that is kept from run to run."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": _bytecode().name}


@cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="paraplan-bench-")


def ask(question: Question) -> dict[str, float | str]:
    """Return what a search took and found, in a process of its own on one core."""
    words = [question.model, question.profile, str(question.nodes), str(question.batch), str(question.length)]
    words.append(question.framework)
    finished = subprocess.run(
        [sys.executable, "-c", ONE_SEARCH, *words], capture_output=True, text=True, check=True, env=environment()
    )
    found: dict[str, float | str] = json.loads(finished.stdout)
    return found


def time_command() -> float:
    """Return the seconds of the whole command from the shell: the fastest of five."""
    words = [sys.executable, "-m", "paraplan", *COMMAND]
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True, env=environment())
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def by_size() -> list[tuple[int, dict[str, float | str]]]:
    """Return what the search of GPT-3 175B takes on each number of GPUs; the batch grows with them."""
    found = []
    for gpus in SIZES:
        nodes = gpus // 8
        batch = max(1536, gpus // 8)
        try:
            found.append((gpus, ask(Question("", "gpt3-175b", "dgx-a100", nodes, batch, 2048))))
        except subprocess.CalledProcessError as error:
            words = error.stderr.strip().splitlines()[-1].split("Error: ")[-1]
            found.append((gpus, {"plan": words.partition(" with ")[0]}))
    return found


def draw(points: list[tuple[int, float]]) -> str:
    """Return an SVG of CPU seconds over GPUs, both logarithmic."""
    low, high = (math.log10(value) for value in (0.1, 100))
    first, last = math.log10(points[0][0]), math.log10(points[-1][0])

    def at(gpus: int, seconds: float) -> tuple[float, float]:
        across = (math.log10(gpus) - first) / (last - first)
        up = (math.log10(max(seconds, 0.1)) - low) / (high - low)
        return 60 + 500 * across, 260 - 220 * up

    line = " ".join(f"{x:.0f},{y:.0f}" for x, y in (at(*point) for point in points))
    marks = "".join(
        f'<text x="{at(gpus, 1)[0]:.0f}" y="280" font-size="11" text-anchor="middle">{gpus:,}</text>'
        for gpus, _ in points
    )
    ticks = "".join(
        f'<text x="52" y="{at(8, value)[1] + 4:.0f}" font-size="11" text-anchor="end">{value:g} s</text>'
        for value in (0.1, 1, 10, 100)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 300" font-family="sans-serif">'
        '<rect width="600" height="300" fill="white"/>'
        f'<polyline points="{line}" fill="none" stroke="black" stroke-width="2"/>{marks}{ticks}'
        '<text x="310" y="296" font-size="11" text-anchor="middle">GPUs</text>'
        '<text x="310" y="20" font-size="13" text-anchor="middle">CPU seconds of the search, GPT-3 175B</text></svg>\n'
    )


def main() -> int:
    """Run the benchmark; return 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="search on 8 to 131,072 GPUs too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds by GPUs as SVG (implies --sizes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    asked = [(question, ask(question)) for question in QUESTIONS]
    command_s = time_command()
    sizes = by_size() if arguments.sizes or arguments.plot else []
    if arguments.plot:
        arguments.plot.write_text(draw([(gpus, float(found["cpu_s"])) for gpus, found in sizes if "cpu_s" in found]))
    misses = [question.title for question, found in asked if float(found["cpu_s"]) > question.limit_s]
    misses += [question.title for question, found in asked if float(found["peak_bytes"]) > question.limit_bytes]
    misses += ["the command"] if command_s > 1.0 else []
    if arguments.json:
        report = {"questions": {question.title: found for question, found in asked}, "command_s": command_s}
        print(json.dumps(report | {"sizes": dict(sizes), "misses": misses}, indent=2))
        return 1 if misses else 0
    print(f"{'search':40} {'plans':>12} {'memory of':>11} {'time of':>9} {'CPU':>8} {'limit':>7} {'peak':>9}")
    for question, found in asked:
        print(
            f"{question.title:40} {found['considered']:>12,} {found['priced']:>11,} {found['timed']:>9,} "
            f"{found['cpu_s']:>6.1f} s {question.limit_s:>5.0f} s {float(found['peak_bytes']) / 2**20:>5.0f} MiB"
        )
        print(f"    {found['plan']}: {found['step_time_s']:.2f} s")
    print(f"paraplan {' '.join(COMMAND)}: {command_s:.2f} s (limit 1 s)")
    if sizes:
        print(f"\n{'GPUs':>8} {'plans':>13} {'CPU':>8}  plan")
        for gpus, found in sizes:
            if "cpu_s" in found:
                print(f"{gpus:>8,} {found['considered']:>13,} {found['cpu_s']:>6.1f} s  {found['plan']}")
            else:
                print(f"{gpus:>8,} {'':>13} {'':>8}  {found['plan']}")
    if misses:
        print(f"over the limit: {', '.join(misses)}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
