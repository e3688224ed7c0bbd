"""What tests of several folders take: workloads of bundled models, ranks, and which cases run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
from case_selection import run_all
from hypothesis import HealthCheck, settings
from rank_harness import RankHarness

from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.reader import read_model
from paraplan.plan.training import TrainingSpec

MakeWorkload = Callable[..., Workload]

# Threads of libgomp spin while they wait for each other. In ranks whose library asks for more than one thread that was
# two thirds of the processors' time. Read when libgomp is loaded: here, and in all processes of tests.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Examples are not timed: a busy machine is no finding. Every run tries the same examples, so that a failure comes with
# the change that caused it; HYPOTHESIS_PROFILE=explore looks for others, and for more of them.
settings.register_profile(
    "repeatable", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what runs every case of tests that otherwise run enough of them."""
    parser.addoption("--all", action="store_true", help="every case of the tests that otherwise run enough of them")


def pytest_configure(config: pytest.Config) -> None:
    """Say before modules of tests are imported whether every case is to run: some choose theirs there."""
    run_all(config.getoption("--all"))
    gc.disable()  # until all modules are imported: nearly all that they make stays


def pytest_collection_finish() -> None:
    """Collect garbage from here on, seldom, and never look at what the imports have left: a million objects."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # trees and tables of a test are large: each collection walks over them again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases that are marked `with_all` out where they are not asked for."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("with_all") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("with_all") is None]


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> Iterator[None]:
    """Have children end at SIGINT also where a script started the tests in the background: there it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Leave the other cores to other workers: threads that wait for each other where these compute spin meanwhile."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_defaults_of_the_user() -> None:
    os.environ["PARAPLAN_CONFIG"] = "/nonexistent/config.json"
    os.environ["PARAPLAN_HISTORY"] = "/nonexistent/runs.json"


@pytest.fixture(scope="session", autouse=True)
def _no_colors_of_the_user() -> None:
    """Have text without colors. Its width is that of the terminal: tests compare words, or say their width."""
    for name in ("LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def ranks() -> RankHarness:
    return RankHarness()


@pytest.fixture(scope="session")
def workload() -> MakeWorkload:
    """Return what makes workloads; one of the same words is the same one, with the costs that it has looked up."""

    @lru_cache(maxsize=128)
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
