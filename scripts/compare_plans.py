"""One training under several plans, their losses side by side: a plan does not change the training.

    python scripts/compare_plans.py                     train_lm.py in one process, DDP, ZeRO-3, PP2, TP2, 3D on 8 ranks
    python scripts/compare_plans.py --steps 50 --plans one ddp 3d
    python scripts/compare_plans.py scripts/train_hf.py --config qwen3-8b --small --data ~/texts

Each plan is started with `paraplan launch`; the losses are those that the engine writes with --metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan

SCRIPTS = Path(__file__).resolve().parent
TOLERANCE = 1e-3  # relative; fp32 sums in another order, carried through all steps


def plans() -> dict[str, ParallelPlan]:
    """Return the plans by name, all for one global batch."""
    return {
        "one": ParallelPlan(micro_batch_size=4, num_microbatches=4),
        "ddp": ParallelPlan(dp=2, micro_batch_size=4, num_microbatches=2),
        "zero3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=4, num_microbatches=2),
        "pp2": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=4),
        "tp2": ParallelPlan(tp=2, micro_batch_size=4, num_microbatches=4),
        "3d": ParallelPlan(
            dp=2, tp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=2
        ),
    }


def losses_under(plan: ParallelPlan, command: list[str], folder: Path) -> list[float]:
    """Return the losses of every step of `command` under `plan`; end with its error where it fails."""
    plan_path, metrics = folder / "plan.json", folder / "metrics.jsonl"
    plan_path.write_text(PlanFile(plan=plan).to_json(), encoding="utf-8")
    metrics.unlink(missing_ok=True)
    launch = [sys.executable, "-m", "paraplan", "launch", "--nproc-per-node", str(plan.world_size), "--no-logs"]
    ended = subprocess.run(
        [*launch, "--plan", str(plan_path), "--metrics", str(metrics), *command],
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{plan.describe()} failed with status {ended.returncode}:\n{ended.stderr}")
    return [json.loads(line)["loss"] for line in metrics.read_text(encoding="utf-8").splitlines()]


def print_table(losses: dict[str, list[float]], every: int) -> float:
    """Print the losses, one plan a column; return the largest difference from the first plan, relative to it."""
    first = next(iter(losses))
    print("step  " + "  ".join(f"{name:>9}" for name in losses))
    steps = range(len(losses[first]))
    for step in steps:
        if step % every == 0 or step == steps[-1]:
            print(f"{step + 1:>4}  " + "  ".join(f"{values[step]:>9.5f}" for values in losses.values()))
    errors = {
        name: max(abs(value / own - 1) for value, own in zip(values, losses[first], strict=True))
        for name, values in losses.items()
    }
    print("diff  " + "  ".join(f"{error:>9.1e}" for error in errors.values()))
    return max(errors.values())


def main() -> None:
    """Run the script of the command line under every plan; status 1 where the losses part."""
    parser = argparse.ArgumentParser(description="Losses of one training under several plans.")
    parser.add_argument("--plans", nargs="+", choices=plans(), default=list(plans()), help="in this order")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="steps between the lines of the table")
    parser.add_argument(
        "--plan-file", action="append", type=Path, default=[], help="a plan of your own; may be repeated"
    )
    arguments, rest = parser.parse_known_args()
    command = rest or [str(SCRIPTS / "train_lm.py"), "--eval-batches", "1"]
    command += ["--steps", str(arguments.steps)]
    chosen = {name: plans()[name] for name in arguments.plans}
    for path in arguments.plan_file:
        chosen[path.stem] = PlanFile.from_json(path.read_text(encoding="utf-8"), source=str(path)).plan
    losses = {}
    with tempfile.TemporaryDirectory(prefix="paraplan_") as folder:
        for name, plan in chosen.items():
            print(f"{name:<6} {plan.describe()}, {plan.world_size} ranks", file=sys.stderr)
            losses[name] = losses_under(plan, command, Path(folder))
    if print_table(losses, arguments.every) > TOLERANCE:
        sys.exit(f"the losses part by more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
