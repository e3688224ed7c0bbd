"""The plan file: a plan with what it was made for. People read and edit it; launch, estimate and export read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from paraplan.arguments import checked
from paraplan.errors import PlanError
from paraplan.plan.kept_runs import PlainPrediction
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record

SCHEMA_VERSION: Literal[1] = 1


class ModelReference(Record):
    """The model that a plan was made for, as far as a run can check it. Counts are None where nothing was known."""

    name: str
    source: str | None = None
    num_parameters: int | None = None
    num_blocks: int | None = None
    num_experts: int | None = None


class ClusterReference(Record):
    """The machines that a plan was made for. `host_memory_bytes` are those of each, None where the profile says it."""

    name: str
    num_nodes: int
    gpus_per_node: int
    host_memory_bytes: int | None = None


class PlannedMemory(Record):
    """The parts of the predicted peak of the fullest rank."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    activation_bytes: int
    workspace_bytes: int


class PlannedEstimate(Record):
    """Prediction for a plan: the figures that a run is compared with.

    `model_flops_per_step` are those of the whole model for a global batch, recomputation not counted. `smaller_plan`
    describes the fastest plan of the search that needs clearly less memory.
    """

    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_memory_bytes: int | None = None
    memory: PlannedMemory | None = None
    model_flops_per_step: float | None = None
    smaller_plan: str | None = None
    plain: PlainPrediction | None = None
    """Prediction before the user's own runs corrected it."""


class PlannedPlacement(Record):
    """Local rank i of each node runs on GPU `local_gpus[i]`; the slowest link that each axis then crosses.

    To follow it, list the GPUs in that order in CUDA_VISIBLE_DEVICES.
    """

    local_gpus: tuple[int, ...]
    slowest_bytes_per_s: dict[Axis, float]

    @property
    def skips_gpus(self) -> bool:
        """Whether a GPU stays idle that is numbered before one in use, as a slower kind of a mixed machine does."""
        return sorted(self.local_gpus) != list(range(len(self.local_gpus)))


class PlanFile(Record):
    """A plan, its model, its training, its machines and its prediction, in one JSON object.

    `framework` names another framework that the plan was made for: paraplan does not launch it.
    """

    schema_version: Literal[1] = 1
    plan: ParallelPlan
    model: ModelReference | None = None
    training: TrainingSpec | None = None
    cluster: ClusterReference | None = None
    estimate: PlannedEstimate | None = None
    placement: PlannedPlacement | None = None
    framework: str | None = None

    @checked
    def save(self, path: str | Path) -> None:
        """Write the file. Raises `PlanError` where the path cannot be written."""
        try:
            Path(path).write_text(self.to_json() + "\n")
        except OSError as error:
            raise PlanError(
                f"cannot write {path}: {error.strerror}", hint="choose a folder that exists and is yours"
            ) from None

    def __repr__(self) -> str:
        return f"<PlanFile {self}>"

    def __str__(self) -> str:
        return f"plan for {self.model.name}: {self.plan.describe()}" if self.model else self.plan.describe()

    @classmethod
    def from_json(cls, text: str, *, source: str) -> PlanFile:
        """Read the JSON of a plan file; `source` names it in errors. Raises `PlanError` naming the field at fault."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{source} is not JSON: {error}", hint="write one with paraplan recommend -o") from None
        if not isinstance(data, dict) or "plan" not in data:
            raise PlanError(f"{source} has no field 'plan'", hint="write one with paraplan recommend -o")
        version = data.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"{source} has schema_version {version!r}, and this paraplan reads {SCHEMA_VERSION}",
                hint="make the plan again with paraplan recommend -o",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "plan"
            message = first["msg"].removeprefix("Value error, ")
            raise PlanError(
                f"{source}: {field}: {message} (found {_shortened(first['input'])})", hint="fix that field"
            ) from None


def _shortened(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
