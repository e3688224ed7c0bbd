#!/usr/bin/env python3
"""Calibrate this machine's CPU, predict the steps of small trainings on it, run them, and compare.

    python scripts/check_predicted_steps.py [--seconds 60] [--steps 12] [--plan dp2 ...]

Trained is the byte-level model of `scripts/train_lm.py` in fp32, in one process and in two. The machine is calibrated
once for each number of ranks (`paraplan calibrate --ranks`); nothing is fitted to the steps. Without --keep-machine the
profiles are deleted. Other load makes steps longer than any prediction: compare on an idle machine, or look at
the CPU time of a step, which leaves out what a rank waits for: other load, but also other ranks. There is no limit of
error here: ends with status 1 only where a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from train_lm import build_model

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.spec import ModelSpec
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.units import format_seconds

WARM_STEPS = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in every rank: threads that wait for each other suffer most from other load
PLANS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 16},
    "dp2": {"dp": 2, "micro_batch_size": 8},
    "zero3": {"dp": 2, "zero_stage": 3, "micro_batch_size": 8},
    "pp2": {"pp": 2, "pipeline_schedule": "1f1b", "micro_batch_size": 4, "num_microbatches": 4},
}


@dataclass(frozen=True)
class Size:
    """The shape of a model, and the tokens of its sequences."""

    layers: int
    hidden: int
    heads: int
    seq_length: int

    def spec(self) -> ModelSpec:
        """Return the model as the planner sees it, traced."""
        import torch

        from paraplan.model.trace import trace_module

        build = partial(build_model, self.layers, self.hidden, self.heads)
        return trace_module(build, seq_length=self.seq_length, dtype=torch.float32, source="train_lm")


SIZES = (Size(4, 128, 4, 128), Size(4, 256, 4, 128), Size(6, 384, 6, 128))


def calibrate(num_ranks: int, seconds: float, folder: Path) -> Path:
    """Return the profile that `paraplan calibrate` writes for so many CPU processes."""
    path = folder / f"machine-{num_ranks}.json"
    command = [sys.executable, "-m", "paraplan", "calibrate", "--ranks", str(num_ranks), "--seconds", str(seconds)]
    subprocess.run([*command, "-o", str(path)], check=True, capture_output=True, env=os.environ | ONE_THREAD)
    return path


def predict(size: Size, plan: ParallelPlan, profile: Path) -> float:
    """Return the predicted seconds of a step."""
    training = TrainingSpec(global_batch_size=plan.global_batch_size, seq_length=size.seq_length, precision="fp32")
    cluster = cluster_from_profile(str(profile), gpus_per_node=plan.world_size)
    workload = Workload.of(size.spec(), training, cluster, load_link_speeds())
    return estimate_plan(workload, plan).step.step_time_s


@dataclass(frozen=True)
class Measured:
    """Seconds of a step: the median and the fastest by the wall clock, and the CPU time of one rank."""

    median_s: float
    fastest_s: float
    cpu_s: float


def measure(size: Size, plan: ParallelPlan, steps: int, folder: Path) -> Measured:
    """Return what a step took, the first ones left out."""
    plan_path, metrics = folder / "plan.json", folder / "metrics.jsonl"
    training = TrainingSpec(global_batch_size=plan.global_batch_size, seq_length=size.seq_length, precision="fp32")
    plan_path.write_text(PlanFile(plan=plan, training=training).to_json(), encoding="utf-8")
    few_s = run(size, plan, plan_path, metrics, WARM_STEPS, folder)
    metrics.unlink(missing_ok=True)
    many_s = run(size, plan, plan_path, metrics, steps, folder)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = [line["step_time_s"] for line in lines if "step_time_s" in line and line["step"] > WARM_STEPS]
    cpu_s = (many_s - few_s) / (steps - WARM_STEPS) / plan.world_size
    return Measured(statistics.median(times), min(times), cpu_s)


def run(size: Size, plan: ParallelPlan, plan_path: Path, metrics: Path, steps: int, folder: Path) -> float:
    """Train for `steps` steps and return the CPU seconds of the whole job."""
    script = str(Path(__file__).parent / "train_lm.py")
    shape = ["--layers", size.layers, "--hidden", size.hidden, "--heads", size.heads]
    command = [sys.executable, "-m", "paraplan", "launch", "--nproc-per-node", plan.world_size, "--plan", plan_path]
    options = [*shape, "--steps", steps, "--eval-batches", 1, "--log-every", steps]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [str(word) for word in (*command, script, *options)],
        check=True,
        env=os.environ | ONE_THREAD | {"PARAPLAN_METRICS": str(metrics)},
        cwd=folder,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Calibrate, run and compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each calibration")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plan", action="append", choices=PLANS, help="only this plan; may be repeated")
    parser.add_argument("--keep-machine", type=Path, metavar="FOLDER", help="write the profiles here, or take them")
    arguments = parser.parse_args()
    errors = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kept = arguments.keep_machine or folder
        kept.mkdir(parents=True, exist_ok=True)
        print(
            f"{'model':<24}{'plan':<42}{'predicted':>10}{'median':>10}{'':>7}{'fastest':>10}{'':>7}{'CPU':>10}{'':>7}"
        )
        for name in arguments.plan or PLANS:
            plan = ParallelPlan.model_validate(PLANS[name])
            profile = kept / f"machine-{plan.world_size}.json"
            if not profile.exists():
                calibrate(plan.world_size, arguments.seconds, kept)
            for size in SIZES:
                predicted, measured = predict(size, plan, profile), measure(size, plan, arguments.steps, folder)
                errors.append(predicted / measured.median_s - 1)
                shape = f"{size.layers} x {size.hidden}, {size.seq_length} tokens"
                row = f"{shape:<24}{plan.describe():<42}{format_seconds(predicted):>10}"
                for seconds in (measured.median_s, measured.fastest_s, measured.cpu_s):
                    row += f"{format_seconds(seconds):>10}{predicted / seconds - 1:>+7.0%}"
                print(row, flush=True)
    print(
        f"against the median: mean error {statistics.mean(map(abs, errors)):.0%}, bias {statistics.mean(errors):+.0%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
