"""Slurm, through sbatch, scontrol, sacct and scancel. Options and states as in their manuals (22.05 and later)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence

from paraplan.interop.export import export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.launch.nodes.batch_systems import slurm_seconds
from paraplan.submit.handle import Handle
from paraplan.submit.scheduler import FilesWay, JobState, Scheduler, SchedulerError, StateName, call, option_words
from paraplan.units import one_line

_IS_DOWN = "ask its administrators whether slurmctld runs (scontrol ping); nothing was changed"
_REFUSED = "nothing was submitted; sbatch --parsable has to print the number of a job"
_STATES: dict[str, StateName] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED"), "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"), "running"),
    "COMPLETED": "done",
    "CANCELLED": "canceled",
}
"""All others are ends that failed: FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, PREEMPTED, DEADLINE, BOOT_FAIL."""
_EARLY_S = 60
"""How much earlier than --signal says Slurm may send it (man sbatch)."""

_SHORT_S = 300
"""A job with a shorter time limit than this is told to save later than the script says: not right at its start."""

_LOOK_S, _ASK_S = 0.5, 5.0
"""How often the log is looked at, and the controller asked: a site's controller serves all its users."""


class Slurm(Scheduler):
    """Batch jobs whose files are where the nodes see them."""

    title, client = "Slurm", "sbatch"
    files: FilesWay = "shared"
    exclude_option = "exclude"

    def export(self, subject: Subject, options: Mapping[str, str]) -> Exported:
        """Return the batch script."""
        return export_plan(subject, "slurm")

    def cluster(self, options: Mapping[str, str]) -> str:
        """Return ClusterName of the controller's configuration."""
        found = re.search(
            r"^ClusterName\s*=\s*(\S+)", call(["scontrol", "show", "config"], hint=_IS_DOWN), re.MULTILINE
        )
        return "" if found is None else found[1]

    def submission(self, job: Handle) -> Sequence[str]:
        """Return sbatch's words: what the user named comes before what has to be."""
        needed = [f"--chdir={job.work_folder}", f"--output={job.log}", "--open-mode=append", f"--job-name={job.name}"]
        limit_s = slurm_seconds(job.options.get("time", ""))
        if limit_s is not None and limit_s < _SHORT_S and "signal" not in job.options:
            needed.append(f"--signal=USR1@{max(1, (limit_s - _EARLY_S) // 2)}")
        return ["sbatch", "--parsable", *option_words(job.options), *needed, job.document]

    def job_id(self, job: Handle, output: str) -> str:
        """Return the number of `--parsable`, which the name of a cluster may follow."""
        number = output.strip().rpartition("\n")[2].split(";")[0]
        if not number.isdecimal():
            raise SchedulerError(f"sbatch does not say which job it is: {one_line(output)[:80]!r}", hint=_REFUSED)
        return number

    def state(self, job: Handle) -> JobState:
        """Ask the controller, and where it has forgotten the job the accounting."""
        try:
            text = call(["scontrol", "show", "job", "--oneliner", job.job_id or ""], hint=_IS_DOWN)
        except SchedulerError as error:
            if "Invalid job id" not in error.message:
                raise
            return self._accounted(job)
        fields = dict(re.findall(r"(\w+)=(\S*)", text))
        word, reason = fields.get("JobState", ""), fields.get("Reason", "None")
        words = [word] + ([reason] if reason != "None" else [])
        words += [f"on {fields['NodeList']}"] if fields.get("NodeList", "(null)") != "(null)" else []
        restarts = fields.get("Restarts", "0")
        words += [f"queued again {restarts} time{'s' if restarts != '1' else ''}"] if restarts != "0" else []
        return _state(word, ", ".join(words), fields.get("ExitCode", ""))

    def _accounted(self, job: Handle) -> JobState:
        words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode"]
        try:
            lines = call([*words, f"--jobs={job.job_id}"], hint=_IS_DOWN).split()
        except SchedulerError:
            lines = []
        if not lines:
            return JobState("unknown", "Slurm has forgotten it: it ended some time ago, and no accounting is kept")
        word, _, code = lines[-1].partition("|")
        return _state(word, word, code)

    def logs(self, job: Handle, *, follow: bool) -> Iterator[str]:
        """Yield the lines of the log, which all nodes of the job write to."""
        asked, rest, position = 0.0, "", 0
        state = None
        while True:
            with_end = not follow or (state is not None and state.has_ended)
            if job.log.exists():
                with job.log.open(encoding="utf-8", errors="replace", newline="\n") as log:
                    log.seek(position)
                    rest += log.read()
                    position = log.tell()
                *lines, rest = rest.split("\n")
                yield from lines
            if with_end:
                yield from [rest] if rest else []
                return
            time.sleep(_LOOK_S)
            if time.monotonic() - asked > _ASK_S:
                state, asked = self.state(job), time.monotonic()

    def cancel(self, job: Handle) -> None:
        """Have Slurm end it; by its name alone those of this user are meant."""
        which = [job.job_id] if job.job_id else ["--me", f"--name={job.name}"]
        call(["scancel", *which], hint=_IS_DOWN)


def _state(word: str, words: str, exit_code: str) -> JobState:
    """Return the state of Slurm's word, `CANCELLED by 0` too, and of its exit code `status:signal`."""
    name = _STATES.get(word.split()[0] if word.split() else "", "failed")
    status, _, number = exit_code.partition(":")
    is_known = name in ("done", "failed") and status.isdecimal()
    signaled = int(number) if number.isdecimal() else 0
    return JobState(name, words, (128 + signaled if signaled else int(status)) if is_known else None)


SCHEDULER: Scheduler = Slurm()
