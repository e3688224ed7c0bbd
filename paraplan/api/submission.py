"""Trainings submitted to the schedulers of clusters: submit, find, follow, end."""

from __future__ import annotations

from paraplan.submit.exclusion import excluded_hosts as excluded_hosts
from paraplan.submit.handle import Handle as Handle
from paraplan.submit.handle import find_handle as find_job
from paraplan.submit.handle import handles as submitted_jobs
from paraplan.submit.scheduler import JobState as JobState
from paraplan.submit.scheduler import SchedulerError as SchedulerError
from paraplan.submit.scheduler import scheduler_names as scheduler_names
from paraplan.submit.submission import Draft as Draft
from paraplan.submit.submission import Submission as Submission
from paraplan.submit.submission import cancel_job as cancel_job
from paraplan.submit.submission import draft_job as draft_job
from paraplan.submit.submission import job_logs as job_logs
from paraplan.submit.submission import job_state as job_state
from paraplan.submit.submission import submit as submit_draft
from paraplan.submit.submission import wait_for_end as wait_for_end

__all__ = [
    "Draft",
    "Handle",
    "JobState",
    "SchedulerError",
    "Submission",
    "cancel_job",
    "draft_job",
    "excluded_hosts",
    "find_job",
    "job_logs",
    "job_state",
    "scheduler_names",
    "submit_draft",
    "submitted_jobs",
    "wait_for_end",
]
