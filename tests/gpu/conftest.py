"""Checks on a GPU are left out where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gpu_cases import HAS_GPU, TRIES

sys.path.append(str(Path(__file__).parents[1] / "launch"))  # how jobs are started and what is left of them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all checks of this folder, and say why they are left out."""
    for item in items:
        if "tests/gpu/" not in str(item.path):
            continue
        item.add_marker(pytest.mark.gpu)
        if not HAS_GPU and (not TRIES or item.get_closest_marker("cuda_only")):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _from_an_empty_gpu() -> None:
    if HAS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
