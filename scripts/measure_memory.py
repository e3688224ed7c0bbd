#!/usr/bin/env python3
"""Measure the peak memory of training on one GPU with one setting changed at a time, beside the estimate.

    python scripts/measure_memory.py                  measure, write profiles/measured/GPU-DATE.json, compare
    python scripts/measure_memory.py --list           the grid with what is predicted; needs no GPU
    python scripts/measure_memory.py --compare FILE   an earlier file with today's estimate; needs no GPU

Each case trains a Hugging Face model of random weights for a few steps with the runtime's own engine in one process,
and reads `torch.cuda.max_memory_allocated`. Ends with status 3 where there is no GPU, 1 where the mean error is above
the aim of 3 %, 2 where nothing could be compared.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_trainings import bundled_config, engine_step, machine_facts

from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, UsageError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.support import RUNNABLE_RECOMPUTE
from paraplan.plan.training import AttentionKind, OptimizerName, TrainingPrecision, TrainingSpec
from paraplan.resources import profiles_folder
from paraplan.units import format_bytes

SCHEMA_VERSION = 1
AIM = 0.03
NUM_STEPS, NUM_TIMED = 3, 5
MEASURED = ("peak_bytes", "device_bytes", "reserved_bytes", "step_s", "busy_s")
MODELS = ("gpt2", "gpt2-medium", "qwen2.5-0.5b", "llama-3.2-1b")
SEQUENCES = (512, 1024)
ATTENTIONS: tuple[AttentionKind, ...] = ("sdpa", "eager")
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "sgd_momentum", "sgd")
PRECISIONS: tuple[TrainingPrecision, ...] = ("bf16", "fp32")


@dataclass(frozen=True)
class Case:
    """One setting of the grid, in one process on one GPU."""

    model: str = "gpt2"
    seq_length: int = 1024
    micro_batch_size: int = 4
    num_microbatches: int = 1
    recompute: Recompute = "none"
    attention: AttentionKind = "sdpa"
    optimizer: OptimizerName = "adamw"
    precision: TrainingPrecision = "bf16"

    @property
    def plan(self) -> ParallelPlan:
        """One process with these micro-batches."""
        return ParallelPlan(
            micro_batch_size=self.micro_batch_size,
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
        )

    @property
    def training(self) -> TrainingSpec:
        """The training of one step."""
        return TrainingSpec(
            global_batch_size=self.micro_batch_size * self.num_microbatches,
            seq_length=self.seq_length,
            precision=self.precision,
            optimizer=self.optimizer,
            attention=self.attention,
        )


@dataclass(frozen=True)
class Row:
    """A case and what was measured of it: None where it ran out of memory."""

    case: Case
    peak_bytes: int | None
    device_bytes: int | None = None
    reserved_bytes: int | None = None
    step_s: float | None = None
    busy_s: float | None = None


def grid(models: Iterable[str] = MODELS) -> list[Case]:
    """Return for each model its base case, and cases that differ from it in one setting."""
    changes: dict[str, Iterable[Any]] = {
        "seq_length": SEQUENCES,
        "micro_batch_size": (1, 8),
        "num_microbatches": (4,),
        "recompute": RUNNABLE_RECOMPUTE,
        "attention": ATTENTIONS,
        "optimizer": OPTIMIZERS,
        "precision": PRECISIONS,
    }
    cases: dict[Case, None] = {}
    for model in models:
        base = Case(model)
        cases[base] = None
        for name, values in changes.items():
            cases |= dict.fromkeys(replace(base, **{name: value}) for value in values)
    return list(cases)


def predict(case: Case) -> int:
    """Return the predicted peak in bytes, as torch's allocator counts."""
    return estimated(case).peak_memory_bytes


def estimated(case: Case, *, profile: str = "dgx-h100") -> PlanEstimate:
    """Return what is predicted on one GPU of a machine; which one it is does not enter what is allocated."""
    spec = read_model(case.model, seq_length=case.seq_length)
    cluster = cluster_from_profile(profile, gpus_per_node=1)
    workload = Workload.of(spec, case.training, cluster, load_link_speeds())
    return estimate_plan(workload, case.plan)


def train(
    case: Case, *, num_steps: int = NUM_STEPS, num_timed: int = 0, before_steps: Callable[[], None] = lambda: None
) -> tuple[float, float] | None:
    """Train `case` for a few steps in this process, on the GPU where there is one; `before_steps` is called first.

    Returns, on a GPU, the mean seconds of `num_timed` steps more, and how long kernels run in one of them.
    """
    import torch

    options: dict[str, Any] = {"precision": case.precision, "attention": case.attention, "optimizer": case.optimizer}
    with engine_step(bundled_config(case.model, {}), case.plan, seq_length=case.seq_length, **options) as step:
        before_steps()
        for _ in range(num_steps):
            loss = step()
        loss.item()  # waits for the GPU
        if not num_timed or not torch.cuda.is_available():
            return None
        started_s = time.perf_counter()
        for _ in range(num_timed):
            loss = step()
        loss.item()
        step_s = (time.perf_counter() - started_s) / num_timed
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step().item()
        on_gpu = [event for event in profile.events() if event.device_type.name == "CUDA"]
        return step_s, sum(event.time_range.elapsed_us() for event in on_gpu) / 1e6


def measure(case: Case) -> Row:
    """Return what one GPU allocates at most while it trains `case`."""
    import torch

    try:
        times = train(case, num_timed=NUM_TIMED, before_steps=torch.cuda.reset_peak_memory_stats)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        peaks = torch.cuda.max_memory_allocated(), total - free, torch.cuda.max_memory_reserved()
        return Row(case, *peaks, *(times or ()))
    except torch.cuda.OutOfMemoryError:
        return Row(case, None)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def to_json(machine: dict[str, Any], rows: Iterable[Row]) -> str:
    """Return the text of a file of measurements."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "unit": "bytes, torch.cuda.max_memory_allocated over the steps after the model is in place; device_bytes is "
        "what the driver reports in use then, by all processes; step_s is the mean of later steps in seconds, of which "
        "kernels run for busy_s",
        **machine,
        "rows": [asdict(row.case) | {name: getattr(row, name) for name in MEASURED} for row in rows],
    }
    return json.dumps(content, indent=1) + "\n"


def from_json(text: str, *, source: str) -> list[Row]:
    """Return the rows of a file of measurements; raises UsageError for another format."""
    try:
        content = json.loads(text)
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version={content['schema_version']!r}, expected {SCHEMA_VERSION}")
        rows = []
        for row in content["rows"]:
            measured = {name: row.pop(name) for name in MEASURED if name in row or name in MEASURED[:2]}
            rows.append(Row(Case(**row), **measured))
        return rows
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source} holds no measurements of this script: {error}") from error


def print_comparison(rows: Iterable[Row]) -> int:
    """Print each row beside the estimate, and return the exit status."""
    print(f"{'case':<74}{'measured':>10}{'predicted':>11}{'error':>8}")
    errors = []
    for row in rows:
        case, predicted = row.case, predict(row.case)
        words = (
            f"{case.model} {case.micro_batch_size}x{case.num_microbatches}x{case.seq_length} {case.precision} "
            f"{case.attention} {case.optimizer} recompute {case.recompute}"
        )
        if row.peak_bytes is None:
            print(f"{words:<74}{'too much':>10}{format_bytes(predicted):>11}")
            continue
        errors.append(predicted / row.peak_bytes - 1)
        print(f"{words:<74}{format_bytes(row.peak_bytes):>10}{format_bytes(predicted):>11}{errors[-1]:>+8.1%}")
    if not errors:
        print("nothing was measured", file=sys.stderr)
        return 2
    mean = sum(map(abs, errors)) / len(errors)
    print(f"{len(errors)} rows: mean error {mean:.1%}, largest {max(errors, key=abs):+.1%}; aim {AIM:.0%}")
    return 0 if mean <= AIM else 1


def measure_grid(cases: list[Case], output: Path | None) -> int:
    """Measure all cases, write them, compare them, and return the exit status."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        print("error: measuring needs torch and transformers; pip install them", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("error: torch sees no GPU here, so there is nothing to measure", file=sys.stderr)
        print("hint: --list shows the grid and its predictions, --compare FILE an earlier measurement", file=sys.stderr)
        return 3
    machine = machine_facts()
    gpu = str(machine["gpu"]).lower().replace(" ", "-")
    path = output or profiles_folder() / "measured" / f"memory-{gpu}-{machine['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, case in enumerate(cases, start=1):
        print(f"{number}/{len(cases)} {case}", file=sys.stderr)
        rows.append(measure(case))
        path.write_text(to_json(machine, rows), encoding="utf-8")  # what is there if time ends it
    print(f"written to {path}", file=sys.stderr)
    return print_comparison(rows)


def main(words: list[str] | None = None) -> int:
    """Do as the arguments say, by default those of the process, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="only this bundled model or configuration; may be repeated")
    parser.add_argument("--output", type=Path, help="the file to write (default: in profiles/measured)")
    parser.add_argument("--list", action="store_true", help="print the grid with its predictions and end")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare an earlier file with the estimate")
    arguments = parser.parse_args(words)
    if arguments.compare is not None:
        return print_comparison(from_json(arguments.compare.read_text(encoding="utf-8"), source=str(arguments.compare)))
    cases = grid(arguments.model or MODELS)
    if arguments.list:
        for case in cases:
            print(f"{format_bytes(predict(case)):>10}  {case}")
        return 0
    return measure_grid(cases, arguments.output)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ParaplanError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
