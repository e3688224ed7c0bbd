"""Submitting a training to a scheduler, and asking of it later."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paraplan.errors import UsageError
from paraplan.interop.exported import Exported, Subject
from paraplan.plan.files import ClusterReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.submit.handle import Handle, jobs_folder, new_name
from paraplan.submit.package import Package, find_package
from paraplan.submit.scheduler import JobState, Scheduler, SchedulerError, call, find_scheduler, require_client

_OURS = Path(".paraplan")
"""Where plan and document are in a package."""


@dataclass(frozen=True)
class Submission:
    """A job to be submitted. Without a plan ranks plan when they start, on `nodes` x `gpus_per_node`."""

    to: str
    script: str
    arguments: tuple[str, ...] = ()
    plan: PlanFile | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    image: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    in_place: bool = False
    on_cpu: bool = False
    exclude: tuple[str, ...] = ()
    """Hosts that the job is not to run on."""


@dataclass(frozen=True)
class Draft:
    """A job as it would be submitted: nothing is written, and no scheduler asked."""

    scheduler: Scheduler
    exported: Exported
    plan: PlanFile
    handle: Handle
    package: Package | None
    """None where an image, or the folder itself, holds the files."""

    @property
    def command(self) -> str:
        """The client's command, for a shell."""
        return shlex.join(self.scheduler.submission(self.handle))


def draft_job(wanted: Submission, current_folder: Path) -> Draft:
    """Return the job that would be submitted. Raises `UsageError` for a script that the job would not have."""
    scheduler = find_scheduler(wanted.to)
    if wanted.in_place and scheduler.files != "shared":
        raise UsageError(f"--in-place: nodes of {scheduler.title} do not see this folder", hint="leave it out")
    script = _script(wanted.script, current_folder)
    has_package = scheduler.files != "image" and not wanted.in_place
    package = find_package(current_folder) if has_package else None
    name = new_name(wanted.script)
    folder = jobs_folder() / name
    root, work = folder, current_folder
    if package is not None:
        root = folder / "package"
        if not script.is_relative_to(package.root) or script.relative_to(package.root) not in package.files:
            where = "is outside of" if not script.is_relative_to(package.root) else "is left out by .gitignore in"
            hint = "submit from its folder" + (
                ", or run it where it is: --in-place" if scheduler.files == "shared" else ""
            )
            raise UsageError(f"the script {wanted.script} {where} {package.root}, whose files are packed", hint=hint)
        if scheduler.files == "uploaded":  # starts at the top of what was uploaded
            work, started = root, script.relative_to(package.root)
        else:
            work = root / current_folder.relative_to(package.root)
            started = Path(os.path.relpath(script, current_folder))
    else:
        started = Path(wanted.script)
    plan = wanted.plan or _plan_of_layout(wanted)
    ours = root / _OURS if package is not None else folder
    subject = Subject(
        file=plan,
        path=os.path.relpath(ours / "plan.json", work) if package is not None else str(ours / "plan.json"),
        script=str(started),
        arguments=wanted.arguments,
        image=wanted.image,
        job_name=name,
        is_planned=wanted.plan is not None,
        plans_again=wanted.plan is not None and None not in (wanted.plan.model, wanted.plan.training),
        needs_gpus=not wanted.on_cpu,
    )
    options = {**wanted.options, **_exclusion(scheduler, wanted)}
    exported = scheduler.export(subject, options)
    handle = Handle(
        name=name,
        scheduler=wanted.to,
        cluster="",
        folder=folder,
        work_folder=work,
        document=str(ours / f"job.{_SUFFIXES.get(exported.target, 'yaml')}"),
        script=shlex.join([wanted.script, *wanted.arguments]),
        plan=plan.plan.describe() if wanted.plan is not None else "made by the ranks",
        options=options,
        submitted_s=time.time(),
    )
    return Draft(scheduler, exported, plan, handle, package)


def _exclusion(scheduler: Scheduler, wanted: Submission) -> dict[str, str]:
    """Return the option of the client that leaves hosts out, beside those that the user's own option names."""
    if not wanted.exclude:
        return {}
    name = getattr(scheduler, "exclude_option", None)
    if name is None:
        raise UsageError(
            f"--exclude: the client of {scheduler.title} leaves out no hosts by name",
            hint="take them out of the cluster: kubectl cordon NODE" if wanted.to == "k8s" else "leave it out",
        )
    return {name: ",".join(filter(None, [wanted.options.get(name), *wanted.exclude]))}


_SUFFIXES = {"slurm": "sbatch", "ray": "py"}


def _script(script: str, current_folder: Path) -> Path:
    path = (current_folder / script).resolve()
    if not path.is_file():
        raise UsageError(f"there is no script {script} in {current_folder}", hint="name a file")
    return path


def _plan_of_layout(wanted: Submission) -> PlanFile:
    """Return DDP over the machines that are asked for: the size of the job, while its ranks make the plan."""
    nodes, per_node = wanted.nodes, wanted.gpus_per_node
    if nodes is None or per_node is None or min(nodes, per_node) < 1:
        raise UsageError(
            f"a job needs a size, and --nodes {nodes} --gpus-per-node {per_node} says none"
            if (nodes, per_node) != (None, None)
            else "a job needs a plan or a size",
            hint="give --plan plan.json (paraplan recommend -o writes one), or --nodes N and --gpus-per-node G",
        )
    cluster = ClusterReference(name="as asked for", num_nodes=nodes, gpus_per_node=per_node)
    return PlanFile(plan=ParallelPlan(dp=nodes * per_node), cluster=cluster)


def submit(draft: Draft) -> Handle:
    """Submit a job and return its handle.

    Raises `SchedulerError` where the scheduler is not here or refuses; then nothing of the job is left, there or here.
    Where it does not answer, the job is ended by its name; where that fails too, its handle stays.
    """
    scheduler = draft.scheduler
    require_client(scheduler)
    handle = draft.handle.replace(cluster=scheduler.cluster(draft.handle.options))
    handle.folder.mkdir(parents=True, mode=0o700)
    try:
        _write(draft, handle)
    except BaseException:
        handle.forget()
        raise
    try:
        root = handle.folder / "package" if draft.package is not None else handle.work_folder
        hint = "nothing was submitted; --option NAME=VALUE is an option of the client, --dry-run shows its command"
        output = call(scheduler.submission(handle), folder=root, hint=hint)
        handle = handle.replace(job_id=scheduler.job_id(handle, output))
        handle.write()
    except BaseException as error:
        if not (isinstance(error, SchedulerError) and error.is_refusal):
            _take_back(scheduler, handle)  # raises where that fails, and the handle stays
        handle.forget()
        raise
    return handle


def _write(draft: Draft, handle: Handle) -> None:
    """Write package, plan, document and handle."""
    if draft.package is not None:
        draft.package.copy_to(handle.folder / "package")
    document = Path(handle.document)
    document.parent.mkdir(exist_ok=True)
    document.write_text(draft.exported.text, encoding="utf-8")
    (document.parent / "plan.json").write_text(draft.plan.to_json(), encoding="utf-8")
    handle.write()


def _take_back(scheduler: Scheduler, handle: Handle) -> None:
    """End a job that may have been submitted. Raises `SchedulerError` where that stays unknown."""
    try:
        scheduler.cancel(handle)
    except SchedulerError as error:
        raise SchedulerError(
            f"whether {handle.name} was submitted is not known: {error.message}",
            hint=f"paraplan cancel {handle.name} ends it",
        ) from None


def _scheduler_of(handle: Handle) -> Scheduler:
    """Return the scheduler of a job. Raises `UsageError` where its client here talks to another cluster."""
    scheduler = find_scheduler(handle.scheduler)
    require_client(scheduler)
    here = scheduler.cluster(handle.options)
    if here != handle.cluster:
        raise UsageError(
            f"{handle.name} was submitted to {scheduler.title} {handle.cluster!r}, and this machine talks to {here!r}",
            hint="ask from a machine of that cluster",
        )
    return scheduler


def job_state(handle: Handle) -> JobState:
    """Return how a job is. Raises what its scheduler raises, and `UsageError` for a job of another cluster."""
    return _scheduler_of(handle).state(handle)


def job_logs(handle: Handle, *, follow: bool = False) -> Iterator[str]:
    """Yield the lines of a job's log, with `follow` until it has ended. Raises as `job_state`."""
    yield from _scheduler_of(handle).logs(handle, follow=follow)


def cancel_job(handle: Handle) -> JobState:
    """End a job, unless it has ended; return how it was. Raises as `job_state`."""
    scheduler = _scheduler_of(handle)
    state = JobState("unknown", "no answer to its submission") if handle.job_id is None else scheduler.state(handle)
    if not state.has_ended:
        scheduler.cancel(handle)
        if handle.job_id is None:
            handle.forget()
    return state


def wait_for_end(handle: Handle, *, patience_s: float, look_s: float = 1.0) -> JobState:
    """Return how a job ended, or how it is after `patience_s`: a log may end before its job."""
    deadline = time.monotonic() + patience_s
    while not (state := job_state(handle)).has_ended and time.monotonic() < deadline:
        with suppress(InterruptedError):
            time.sleep(look_s)
    return state
