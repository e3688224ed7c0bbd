"""Checking a plan: ranks started by the launcher, what they found put together, and the axis to blame searched for."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paraplan.errors import ParaplanError
from paraplan.launch.handover import ENTRY
from paraplan.plan.check import CheckReport, CheckRequest, RankFinding, axes_of, without
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan

_SECONDS_TO_END = 10.0


class CheckRunError(ParaplanError):
    """Ranks of a check that failed before they could compare anything."""

    exit_status = 1


LaunchRanks = Callable[[list[str]], tuple[int, str]]
"""Runs the launcher of CPU ranks with these words; gives its exit status and what it said."""


def check_plan(
    request: CheckRequest,
    planned: ParallelPlan,
    *,
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
    launch: LaunchRanks | None = None,
) -> CheckReport:
    """Return whether the plan of `request`, a smaller one than `planned`, trains as one process does.

    Where it does not, it is run again without each of its axes and with one micro-batch, to find what the difference
    goes away without. `say` is told what is run. Raises `CheckRunError` where ranks fail, with the launcher's words,
    or where they have not ended after `timeout_s`. `launch` starts them in another way than by a process of its own.
    """
    launch = launch or partial(launch_on_cpu, timeout_s=timeout_s)
    say(f"{request.plan.describe()} on {request.plan.world_size} CPU ranks, beside one process")
    findings = _run(request, launch)
    report = _report(request, planned, findings)
    if report.is_equal:
        return report
    axes = axes_of(request.plan)
    blame: list[str] = [
        axis for axis in axes if len(axes) == 1 or _is_equal(request, without(request.plan, axis), launch, say)
    ]
    if request.plan.num_microbatches > 1 and request.plan.pp == 1:
        one = request.plan.replace(
            num_microbatches=1, micro_batch_size=request.plan.micro_batch_size * request.plan.num_microbatches
        )
        if _is_equal(request, one, launch, say):
            blame.append("micro-batches")
    return report.replace(blame=tuple(blame))


def _is_equal(request: CheckRequest, plan: ParallelPlan, launch: LaunchRanks, say: Callable[[str], None]) -> bool:
    """Whether `plan` trains as one process; a plan that does not run tells nothing."""
    say(f"{plan.describe()}, to find what is to blame")
    try:
        return not any(finding.gaps for finding in _run(request.replace(plan=plan), launch))
    except CheckRunError:
        return False


def _run(request: CheckRequest, launch: LaunchRanks) -> list[RankFinding]:
    with tempfile.TemporaryDirectory(prefix="paraplan_") as name:
        folder = Path(name)
        plan_path, request_path = folder / "plan.json", folder / "request.json"
        plan_path.write_text(PlanFile(plan=request.plan).to_json(), encoding="utf-8")
        request_path.write_text(request.replace(folder=name).to_json(), encoding="utf-8")
        words = ["--nproc-per-node", str(request.plan.world_size), "--nnodes", "1", "--no-logs", "--plan"]
        words += [str(plan_path), "-m", "paraplan.script_check.plan_rank", str(request_path)]
        status, said = launch(words)
        paths = [folder / f"{rank}.json" for rank in range(request.plan.world_size)]
        if status == 0 and all(path.exists() for path in paths):
            return [RankFinding.model_validate_json(path.read_text(encoding="utf-8")) for path in paths]
    raise CheckRunError(
        f"the ranks of the plan '{request.plan.describe()}' failed, status {status}:\n{said.strip()}",
        hint="this is what training with the plan would end with",
    )


def launch_on_cpu(words: list[str], *, timeout_s: float) -> tuple[int, str]:
    """Run the launcher with CPU ranks; return its exit status and what was said on stderr."""
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name in ("PARAPLAN_PLAN", "PARAPLAN_METRICS"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "-u", str(ENTRY), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as launcher:
        try:
            said = launcher.communicate(timeout=timeout_s)[1]
        except subprocess.TimeoutExpired:
            said = _stop(launcher)
            return 124, f"{said}\nnot done after {timeout_s:.0f} s"
        except BaseException:
            _stop(launcher)
            raise
        return launcher.returncode, said


def _stop(launcher: subprocess.Popen[str]) -> str:
    launcher.terminate()
    try:
        return launcher.communicate(timeout=_SECONDS_TO_END)[1]
    except subprocess.TimeoutExpired:
        launcher.kill()
        return launcher.communicate()[1]


def _report(request: CheckRequest, planned: ParallelPlan, findings: list[RankFinding]) -> CheckReport:
    gaps = [gap for finding in findings for gap in finding.gaps]
    first_step = min((gap.step for gap in gaps), default=0)
    here = [gap for gap in gaps if gap.step == first_step]
    # A parameter tells more than the loss that follows from it; the first of the model, and of its ranks the worst.
    order = {"gradient": 0, "loss": 1, "parameter": 2}
    first = min(here, key=lambda gap: (order[gap.quantity], gap.order, -gap.error, gap.rank), default=None)
    return CheckReport(
        model=request.model,
        num_model_parameters=findings[0].num_parameters,
        planned=planned,
        plan=request.plan,
        num_steps=request.num_steps,
        is_equal=not gaps,
        loss_error=max(finding.loss_error for finding in findings),
        gradient_error=max(finding.gradient_error for finding in findings),
        parameter_error=max(finding.parameter_error for finding in findings),
        losses=findings[0].losses,
        reference_losses=findings[0].reference_losses,
        gap=first,
        num_unequal=len({gap.name for gap in here if gap.quantity != "loss"}),
    )
