"""Ray, through `ray job`: the package is uploaded, and a TorchTrainer starts the ranks on the cluster's nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paraplan.interop.export import export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.submit.handle import Handle
from paraplan.submit.scheduler import FilesWay, JobState, Scheduler, StateName, call, lines_of, option_words
from paraplan.units import one_line

_IS_DOWN = "start a cluster (ray start --head), or name its dashboard: --option address=http://HOST:8265"
_DEFAULT = "http://127.0.0.1:8265"
_STATES: dict[str, StateName] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "succeeded": "done",
    "failed": "failed",
    "was stopped": "canceled",
}
"""Words of `ray job status` behind the name of the job."""


class Ray(Scheduler):
    """Jobs of a Ray cluster's dashboard."""

    title, client = "Ray", "ray"
    files: FilesWay = "uploaded"

    def export(self, subject: Subject, options: Mapping[str, str]) -> Exported:
        """Return the program that starts the ranks."""
        return export_plan(subject, "ray")

    def cluster(self, options: Mapping[str, str]) -> str:
        """Return the address of the dashboard: a cluster has no name."""
        given = options.get("address") or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        return given or _DEFAULT

    def submission(self, job: Handle) -> Sequence[str]:
        """Return the words of `ray job submit`, which uploads the package."""
        root = job.folder / "package"
        words = ["--no-wait", f"--submission-id={job.name}", f"--working-dir={root}"]
        options = option_words({"address": self.cluster(job.options)} | job.options)
        return ["ray", "job", "submit", *options, *words, "--", "python", str(Path(job.document).relative_to(root))]

    def state(self, job: Handle) -> JobState:
        """Ask the dashboard."""
        text = call(["ray", "job", "status", f"--address={job.cluster}", job.name], hint=_IS_DOWN)
        found = re.search(rf"'{re.escape(job.name)}':? ({'|'.join(_STATES)})\b", text)
        return JobState(_STATES[found[1]], found[1]) if found else JobState("unknown", one_line(text.strip()[-200:]))

    def logs(self, job: Handle, *, follow: bool) -> Iterator[str]:
        """Yield what the ranks have written, as Ray brings it together."""
        yield from lines_of(
            ["ray", "job", "logs", f"--address={job.cluster}", *(["--follow"] if follow else []), job.name]
        )

    def cancel(self, job: Handle) -> None:
        """Have Ray stop it."""
        call(["ray", "job", "stop", f"--address={job.cluster}", "--no-wait", job.name], hint=_IS_DOWN)


SCHEDULER: Scheduler = Ray()
