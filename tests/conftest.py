"""Workloads for tests of cost and search: bundled models on bundled machines."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from paraplan.cost.workload import Workload
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.training import TrainingSpec

MakeWorkload = Callable[..., Workload]

# Examples are not timed: a busy machine is no finding. Every run tries the same examples, so that a failure comes with
# the change that caused it; HYPOTHESIS_PROFILE=explore looks for others.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what runs every case of tests that otherwise run enough of them."""
    parser.addoption("--all", action="store_true", help="every plan and model of the tests of the runtime")


@pytest.fixture(scope="session")
def workload() -> MakeWorkload:
    def make(
        model: str = "gpt2",
        profile: str = "dgx-h100",
        *,
        num_nodes: int = 1,
        gpus: int | None = None,
        **training: object,
    ) -> Workload:
        values: dict[str, object] = {"global_batch_size": 64, "seq_length": 1024} | training
        cluster = cluster_from_profile(profile, num_nodes=num_nodes, gpus_per_node=gpus)
        return Workload.of(read_model(model), TrainingSpec.model_validate(values), cluster, load_link_speeds())

    return make
