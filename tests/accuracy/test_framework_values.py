from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.prediction import is_standard, predict_run
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.run_workload import BundledData, framework_of_run, plan_of_run, workload_of_run
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import GROUPS, FrameworkCatalog
from paraplan.errors import ParaplanError
from paraplan.model.named import known_configs
from paraplan.resources import profiles_folder

CATALOG = FrameworkCatalog()
UNPROVEN = ("assumed", "memory")
NEAR = 1e-4


def unproven_values() -> Iterator[tuple[str, str, str]]:
    """Yield the values of frameworks' own files that no code, measurement or document holds."""
    for name in (*CATALOG.names(), *CATALOG.measured_names()):
        profile = CATALOG.bundled(name)
        for group_name in GROUPS:
            group = getattr(profile, group_name)
            for field in sorted(group.model_fields_set - {"sources"}):
                info = type(group).model_fields[field]
                if info.is_required() or getattr(group, field) == info.get_default(call_default_factory=True):
                    continue
                sources = sorted(group.sources, key=lambda source: not source.fields)
                held = next((one for one in sources if field in one.fields or not one.fields), None)
                if held is not None and held.source_kind in UNPROVEN:
                    yield name, group_name, field


@cache
def scored_rows() -> dict[str, list[MeasuredRun]]:
    """Return the rows of the bundled tables whose errors count, by the framework that they are predicted as."""
    data, rows = BundledData(configs=known_configs()), dict[str, list[MeasuredRun]]()
    folder = profiles_folder() / "runs"
    for path in (*sorted(folder.glob("*.csv")), *sorted(folder.glob("known/*.csv"))):
        for run in read_runs(path.read_text(), source=path.name):
            is_scored = isinstance(run, MeasuredRun) and (
                is_standard(run) if path.parent != folder else run.quality != "C"
            )
            if is_scored and isinstance(run, MeasuredRun):
                name = framework_of_run(run, data.frameworks).name
                rows.setdefault(name, []).append(data.completed(run))
    return rows


class ChangedCatalog(FrameworkCatalog):
    """The bundled profiles, one of them with its own value replaced."""

    def __init__(self, changed: FrameworkProfile) -> None:
        super().__init__()
        self._loaded[changed.name] = changed


def predicted(run: MeasuredRun, data: BundledData) -> RunPrediction | None:
    with suppress(ParaplanError, ValueError):  # rows that are not modelled
        workload = workload_of_run(run, data)
        return predict_run(run, workload, plan_of_run(run, workload.framework))
    return None


@pytest.mark.parametrize(("name", "group", "field"), list(unproven_values()))
def test_a_value_that_nothing_holds_moves_a_scored_row(name: str, group: str, field: str) -> None:
    profile = CATALOG.bundled(name)
    default: Any = type(getattr(profile, group)).model_fields[field].get_default(call_default_factory=True)
    changed = ChangedCatalog(profile.changed(**{group: {field: default}}))
    both = [BundledData(configs=known_configs()), BundledData(configs=known_configs(), frameworks=changed)]
    rows = scored_rows().get(name, [])
    assert any(_differ(*(predicted(run, data) for data in both)) for run in rows), "leave it out, or say what holds it"


def _differ(one: RunPrediction | None, other: RunPrediction | None) -> bool:
    if one is None or other is None:
        return one is not other
    pairs = [
        (one.predicted_step_time_s, other.predicted_step_time_s),
        (one.predicted_peak_memory_bytes, other.predicted_peak_memory_bytes),
    ]
    return any(a != pytest.approx(b, rel=NEAR) for a, b in pairs)
