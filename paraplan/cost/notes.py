"""What is to know of a workload that is no mistake, whatever its plan."""

from __future__ import annotations

from paraplan.cost.estimate import assumed_speeds
from paraplan.cost.generation import task_notes
from paraplan.cost.stored_weights import storage_notes
from paraplan.cost.workload import Workload
from paraplan.plan.training import training_notes


def workload_notes(workload: Workload) -> tuple[str, ...]:
    """Return what to know of the training, of frozen weights, and of speeds that are assumed, a sentence each."""
    notes = training_notes(workload.model, workload.training) + storage_notes(workload)
    return notes + task_notes(workload) + assumed_speeds(workload)
