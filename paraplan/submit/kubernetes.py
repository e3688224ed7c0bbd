"""Kubernetes, through kubectl: a JobSet, whose image holds the script. Fields as in jobset.x-k8s.io/v1alpha2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from paraplan.interop.export import export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.submit.handle import Handle
from paraplan.submit.scheduler import FilesWay, JobState, Scheduler, SchedulerError, call, lines_of, option_words

_NAMES_OF = "jobset.sigs.k8s.io/jobset-name"
_IS_DOWN = "kubectl cluster-info says whether the cluster answers; --option context=NAME names another"
_OFTEN_GIVEN = ("context", "kubeconfig", "namespace")
"""Options of kubectl that say which cluster is meant, and are given to every command."""
_MOST_PODS = 1024


class Kubernetes(Scheduler):
    """JobSets of the cluster that kubectl talks to."""

    title, client = "Kubernetes", "kubectl"
    files: FilesWay = "image"

    def export(self, subject: Subject, options: Mapping[str, str]) -> Exported:
        """Return the JobSet."""
        return export_plan(subject, "jobset")

    def cluster(self, options: Mapping[str, str]) -> str:
        """Return the context and the namespace."""
        places = {name: options[name] for name in ("kubeconfig",) if name in options}
        context = options.get("context") or call(
            ["kubectl", "config", "current-context", *option_words(places)],
            hint="set one (kubectl config use-context NAME), or name it: --option context=NAME",
        )
        return "/".join([context.strip(), *([options["namespace"]] if "namespace" in options else [])])

    def submission(self, job: Handle) -> Sequence[str]:
        """Return the words that create the JobSet: one that is there already is an error."""
        return ["kubectl", "create", f"--filename={job.document}", *option_words(job.options)]

    def state(self, job: Handle) -> JobState:
        """Read the status of the JobSet."""
        try:
            text = call(["kubectl", "get", "jobset", job.name, "--output=json", *_place(job)], hint=_IS_DOWN)
        except SchedulerError as error:
            if "NotFound" not in error.message:
                raise
            return JobState("unknown", "there is no such JobSet: it was deleted")
        status = json.loads(text).get("status", {})
        conditions = {
            one["type"]: one.get("message", "") for one in status.get("conditions", []) if one["status"] == "True"
        }
        if "Completed" in conditions:
            return JobState("done", "Completed", 0)
        if "Failed" in conditions:
            return JobState("failed", f"Failed: {conditions['Failed']}")
        parts = status.get("replicatedJobsStatus", [])
        is_active = any(part.get("active", 0) for part in parts)
        return JobState("running" if is_active else "queued", "Suspended" if "Suspended" in conditions else "active")

    def logs(self, job: Handle, *, follow: bool) -> Iterator[str]:
        """Yield what the pods have written, each line with its pod."""
        words = [f"--selector={_NAMES_OF}={job.name}", "--prefix", "--tail=-1", f"--max-log-requests={_MOST_PODS}"]
        yield from lines_of(["kubectl", "logs", *words, *(["--follow"] if follow else []), *_place(job)])

    def cancel(self, job: Handle) -> None:
        """Delete the JobSet."""
        call(
            ["kubectl", "delete", "jobset", job.name, "--ignore-not-found", "--wait=false", *_place(job)], hint=_IS_DOWN
        )


def _place(job: Handle) -> list[str]:
    return option_words({name: value for name, value in job.options.items() if name in _OFTEN_GIVEN})


SCHEDULER: Scheduler = Kubernetes()
