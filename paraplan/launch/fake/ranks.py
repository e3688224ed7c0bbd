"""`paraplan launch --fake N train.py`: the real script as ranks of a world that is not there, one of each role.

Each rank runs in a process of its own without GPUs, other ranks or values, forked from one that has imported torch
(`paraplan.runtime.fake.script`), and is compared with the estimate of the plan's model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paraplan.errors import ParaplanError, PlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.cluster import Cluster
from paraplan.launch.fake.report import FakeLaunchReport, estimate_stages, render_report
from paraplan.launch.faults.report import say
from paraplan.launch.planning import RunPython, make_plan, run_python
from paraplan.launch.ranks.limits import usable_cores
from paraplan.launch.ranks.spawning import unwound_by_sigterm
from paraplan.launch.request import PLAN_VARIABLE, check_script, planner_request, read_plan_file
from paraplan.launch.spec import AUTO, ArgumentError, LaunchSpec
from paraplan.plan.fake import MOST_FAKE_RANKS, FakeRankReport
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.plan.support import check_supported
from paraplan.units import printable, ranks_in_words

_MOST_STAGES = 4
_GPUS_OF_NODE, _GPU_BYTES = 8, 80 * 2**30  # what torch.cuda says where no profile does


class FakeRankError(ParaplanError):
    """A rank whose script failed; its own words are in the message."""

    exit_status = 1


def show_fake_launch(spec: LaunchSpec, *, run: RunPython = subprocess.run) -> int:
    """Run the ranks that `spec` name without GPUs and print what they found; return the exit status.

    `run` runs them, and what plans and estimates for them. The status is 1 where a rank needs more than the memory of
    the profile's GPU. Raises `ArgumentError`, `PlanError` and `FakeRankError`.
    """
    num_ranks = _checked_size(spec)
    cluster = None if spec.profile is None else cluster_from_profile(spec.profile)
    with unwound_by_sigterm(), tempfile.TemporaryDirectory(prefix="pp_") as folder, ThreadPoolExecutor(1) as pool:
        path = _plan_path(spec, Path(folder), num_ranks, run)
        file = None if path is None else _checked_plan(path, spec, num_ranks)
        plan = file.plan if file is not None else ParallelPlan(dp=num_ranks)
        ranks = _ranks(spec, plan)
        planned = "" if file is None else f": {plan.describe()}"
        say(f"running {ranks_in_words(ranks)} of {num_ranks} without a GPU{planned}")
        plan_path = None if path is None else str(path.resolve())
        # made beside the ranks
        estimates = pool.submit(estimate_stages, file, plan_path=plan_path, profile=spec.profile, run=run)
        done = _run(spec, ranks, plan_path, Path(folder), cluster, run)
        reports = [_report(rank, Path(folder), done) for rank in ranks]
        stages, reason = estimates.result()
        if file is not None and any(one.plan != plan for one in reports):
            stages, reason = (), "the script does without paraplan.runtime, so the plan is not what it runs"
    report = FakeLaunchReport(
        script=spec.training_script,
        ranks=tuple(reports),
        estimates=tuple(stages[one.pipeline_stage] for one in reports) if stages else (),
        no_estimate=reason,
        gpu_memory_bytes=None if cluster is None else cluster.gpu_memory_bytes,
        profile=spec.profile,
    )
    sys.stdout.write(report.to_json() + "\n" if spec.json else printable(render_report(report)))
    return 0 if report.fits is not False else 1


def _checked_size(spec: LaunchSpec) -> int:
    """Return the size of the world. Raises `ArgumentError` for a command line that cannot be followed."""
    num_ranks = spec.fake or 0
    if not 1 <= num_ranks <= MOST_FAKE_RANKS:
        raise ArgumentError(f"--fake {num_ranks} is outside 1..{MOST_FAKE_RANKS} ranks", hint="give the world's size")
    contradicting = {
        "--nnodes": spec.nodes,
        "--nproc-per-node": spec.nproc_per_node,
        "--hostfile": spec.hostfile,
        "--gpus": spec.gpus,
        "--dry-run": spec.dry_run,
        "--no-python": spec.no_python,
        "--run-path": spec.run_path,
    }
    for option in (option for option, value in contradicting.items() if value):
        said = f"--fake {num_ranks} and {option} contradict each other: no rank is started"
        raise ArgumentError(said, hint="leave one of them out")
    if spec.fake_rank is not None and not 0 <= spec.fake_rank < num_ranks:
        raise ArgumentError(f"--fake-rank {spec.fake_rank} is outside a world of {num_ranks} ranks", hint="from 0 on")
    check_script(spec, Path.cwd())
    if spec.plan == AUTO and spec.model is None:
        hint = "name the model, or a plan file"
        raise ArgumentError("--fake --plan auto needs --model, to make a plan for", hint=hint)
    return num_ranks


def _plan_path(spec: LaunchSpec, folder: Path, num_ranks: int, run: RunPython) -> Path | None:
    """Return the plan file that is asked for, None for none; with --model it is made in `folder`."""
    planner = planner_request(spec, num_gpus=0)
    if planner is None:
        return None if spec.plan_path is None else Path.cwd() / spec.plan_path
    assert planner.profile is not None  # the one asked for, or that of CPUs
    cluster = cluster_from_profile(planner.profile)
    per_node = num_ranks if cluster.gpu.vendor == "cpu" else min(num_ranks, cluster.gpus_per_node)
    if num_ranks % per_node:
        raise ArgumentError(
            f"--fake {num_ranks} is not a multiple of the {per_node} GPUs of a {planner.profile}",
            hint=f"use --fake {num_ranks // per_node * per_node}",
        )
    path, num_nodes = folder / "plan.json", num_ranks // per_node
    text = make_plan(planner, num_nodes=num_nodes, ranks_per_node=per_node, environment=dict(os.environ), run=run)
    path.write_text(text, encoding="utf-8")
    return path


def _checked_plan(path: Path, spec: LaunchSpec, num_ranks: int) -> PlanFile:
    """Return the plan file at `path`. Raises `PlanError` for a plan that cannot be run so."""
    file = read_plan_file(path)
    name = spec.plan if spec.model is None else f"made for {spec.model}"
    if file.plan.world_size != num_ranks:
        raise PlanError(
            f"the plan {name}, '{file.plan.describe()}', is for {file.plan.world_size} ranks, "
            f"and --fake says {num_ranks}",
            hint=f"use --fake {file.plan.world_size}, or make a plan for {num_ranks}",
        )
    precision = file.training.precision if file.training is not None else "fp32"
    check_supported(file.plan, precision=precision, training=file.training)
    return file


def _ranks(spec: LaunchSpec, plan: ParallelPlan) -> list[int]:
    """Return the ranks to run: the one asked for, or the first of each pipeline stage that differs from the others."""
    if spec.fake_rank is not None:
        return [spec.fake_rank]
    stages = range(plan.pp) if plan.pp <= _MOST_STAGES else (0, 1, plan.pp - 1)
    grid = RankGrid.of_plan(plan)
    return [grid.rank(pp=stage) for stage in stages]


def _run(
    spec: LaunchSpec, ranks: Sequence[int], plan_path: str | None, folder: Path, cluster: Cluster | None, run: RunPython
) -> subprocess.CompletedProcess[str]:
    """Run the script as each of `ranks`, as many at once as there are cores, which leave reports in `folder`."""
    assert spec.fake is not None
    num_gpus = min(spec.fake, _GPUS_OF_NODE if cluster is None else cluster.gpus_per_node)
    memory = _GPU_BYTES if cluster is None else cluster.gpu_memory_bytes
    words = [str(folder), str(max(1, usable_cores())), ",".join(map(str, ranks)), str(num_gpus), str(memory)]
    words += [*(["-m"] if spec.module else []), spec.training_script, *spec.training_script_args]
    environment = _environment(os.environ, size=spec.fake, plan_path=plan_path)
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))  # torch makes it on import
    return run_python("paraplan.runtime.fake.script", *words, environment=environment, patience_s=None, run=run)


def _report(rank: int, folder: Path, done: subprocess.CompletedProcess[str]) -> FakeRankReport:
    report, said, status = (folder / f"{rank}.{kind}" for kind in ("json", "err", "status"))
    ended = int(status.read_text(encoding="ascii")) if status.exists() else done.returncode
    if ended or not report.exists():
        words = said.read_text(encoding="utf-8", errors="replace") if said.exists() else done.stderr
        raise _rank_error(rank, ended, words)
    return FakeRankReport.model_validate_json(report.read_text(encoding="utf-8"))


def _environment(outer: Mapping[str, str], *, size: int, plan_path: str | None) -> dict[str, str]:
    dropped = {PLAN_VARIABLE, "PARAPLAN_METRICS"}
    found = {name: value for name, value in outer.items() if name not in dropped} | {
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    found.setdefault("OMP_NUM_THREADS", "1")
    # transformers would load weights to the GPU by threads of its own, to which the modes of a fake GPU do not reach.
    found.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    return found if plan_path is None else found | {PLAN_VARIABLE: plan_path}


def _rank_error(rank: int, status: int, said: str) -> ParaplanError:
    """Return what a rank said as an error of this launch: its own message and hint, or its traceback."""
    lines = said.strip().splitlines()
    starts = ("error: ", "hint: ")
    message, hint = (next((one.removeprefix(at) for one in lines if one.startswith(at)), None) for at in starts)
    if message is None:
        message, hint = "\n".join(["its script failed:", *lines]), None
    error = FakeRankError(f"rank {rank}: {message}", hint=hint)
    error.exit_status = status if 0 < status < 128 else 1
    return error
