"""SkyPilot, through `sky jobs`: managed jobs, which it starts again where machines are taken away."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from paraplan.interop.export import export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.submit.handle import Handle
from paraplan.submit.scheduler import FilesWay, JobState, Scheduler, StateName, call, lines_of, option_words

_IS_DOWN = "sky api info says which server is meant, and sky check which clouds are open"
_STATES: dict[str, StateName] = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING", "DEPRECATED_SUBMITTED"), "queued"),
    **dict.fromkeys(("RUNNING", "RECOVERING", "CANCELLING"), "running"),
    "SUCCEEDED": "done",
    "CANCELLED": "canceled",
    **dict.fromkeys(
        ("FAILED", "FAILED_SETUP", "FAILED_PRECHECKS", "FAILED_NO_RESOURCE", "FAILED_CONTROLLER"), "failed"
    ),
}
"""The words of ManagedJobStatus."""


class SkyPilot(Scheduler):
    """Managed jobs of the API server that sky talks to."""

    title, client = "SkyPilot", "sky"
    files: FilesWay = "uploaded"

    def export(self, subject: Subject, options: Mapping[str, str]) -> Exported:
        """Return the task."""
        return export_plan(subject, "skypilot")

    def cluster(self, options: Mapping[str, str]) -> str:
        """Return the address of the API server; a local one without."""
        return os.environ.get("SKYPILOT_API_SERVER_ENDPOINT", "local")

    def submission(self, job: Handle) -> Sequence[str]:
        """Return the words of `sky jobs launch`, which uploads the folder that it is called in."""
        words = ["--yes", "--detach-run", f"--name={job.name}"]
        return ["sky", "jobs", "launch", *words, *option_words(job.options), job.document]

    def state(self, job: Handle) -> JobState:
        """Find the job in the queue by its name."""
        for line in call(["sky", "jobs", "queue", "--all"], hint=_IS_DOWN).splitlines():
            words = re.split(r"\s+", line)
            if job.name in words:
                found = [word for word in words if word in _STATES]
                if found:
                    return JobState(_STATES[found[0]], found[0])
        return JobState("unknown", "sky jobs queue does not list it")

    def logs(self, job: Handle, *, follow: bool) -> Iterator[str]:
        """Yield what the nodes have written."""
        yield from lines_of(["sky", "jobs", "logs", f"--name={job.name}", *([] if follow else ["--no-follow"])])

    def cancel(self, job: Handle) -> None:
        """Have it ended, and its machines given back."""
        call(["sky", "jobs", "cancel", "--yes", f"--name={job.name}"], hint=_IS_DOWN)


SCHEDULER: Scheduler = SkyPilot()
