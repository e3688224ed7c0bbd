#!/usr/bin/env python3
"""Calibrate this machine's CPU, predict the steps of small trainings on it, run them, and compare.

    python scripts/check_predicted_steps.py [--seconds 60] [--steps 12] [--plan dp2 ...]

Trained is the byte-level model of `scripts/train_lm.py` in fp32, in one process and in two, by the commands that a user
types. The machine is calibrated once for each number of ranks; nothing is fitted to the steps. Shown is what the run
says at its end: the median of its steps, how long they take without waits for other programs, and the prediction. There
is no limit of error here: ends with status 1 only where a command fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_lm.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in every rank: threads that wait for each other suffer most from other load
TRAINING = ("--seq-len", "128", "--global-batch", "16", "--precision", "fp32")
PLANS = {
    "one": (1, "--dp 1 --micro-batch 16"),
    "dp2": (2, "--dp 2 --zero 0 --micro-batch 8"),
    "zero3": (2, "--dp 2 --zero 3 --micro-batch 8"),
    "pp2": (2, "--pp 2 --schedule 1f1b --micro-batch 4"),
}
"""Ranks, and the options of a plan."""
SIZES = ((4, 128, 4), (4, 256, 4), (6, 384, 6))
"""Layers, width and heads."""
FACTORY = """
import sys
sys.path.insert(0, {!r})
from train_lm import build_model

def model():
    return build_model({}, {}, {})
"""


def paraplan(folder: Path, *words: object) -> str:
    """Run a command in `folder` and return what it writes; end this script where it fails."""
    command = [sys.executable, "-m", "paraplan", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=os.environ | ONE_THREAD, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"paraplan {' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> None:
    """Calibrate, run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each calibration")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plan", action="append", choices=PLANS, help="only this plan; may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in arguments.plan or PLANS:
            ranks, plan = PLANS[name]
            profile = folder / f"machine-{ranks}.json"
            if not profile.exists():
                paraplan(folder, "calibrate", "--ranks", ranks, "--seconds", arguments.seconds, "-o", profile)
            for layers, hidden, heads in SIZES:
                (folder / "small.py").write_text(FACTORY.format(str(SCRIPT.parent), layers, hidden, heads))
                hardware = ("--profile", profile, "--gpus-per-node", ranks)
                paraplan(folder, "recommend", "small.py:model", *hardware, *TRAINING, *plan.split(), "-o", "plan.json")
                shape = ("--layers", layers, "--hidden", hidden, "--heads", heads, "--eval-batches", 1)
                said = paraplan(folder, "launch", "--plan", "plan.json", SCRIPT, *shape, "--steps", arguments.steps)
                compared = next((line for line in said.splitlines() if "predicted" in line), said)
                print(f"{layers} x {hidden}, {name}: {compared.removeprefix('paraplan: ')}", flush=True)


if __name__ == "__main__":
    main()
