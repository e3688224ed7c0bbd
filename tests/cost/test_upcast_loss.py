"""What torchtitan's loss allocates: counted in torch's own operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

TORCHTITAN = load_framework("torchtitan")


class Allocations(TorchDispatchMode):
    """The bytes of storages that operations made and that are alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, 0)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_torchtitans_loss_on_upcast_logits_holds_twelve_bytes_a_logit() -> None:
    tokens, vocabulary = 64, 4096
    hidden = torch.randn(tokens, 2, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, 2, dtype=torch.bfloat16)
    with Allocations() as allocations:
        logits = hidden @ head.t()
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.randint(vocabulary, (tokens,)))
        del logits
        allocations.peak = 0
        loss.backward()
    each = TORCHTITAN.loss.peak_logit_bytes
    assert allocations.peak / (tokens * vocabulary) == pytest.approx(each, rel=0.02)


def test_torchtitans_loss_on_divided_logits_holds_sixteen(workload: Callable[..., Workload]) -> None:
    model = workload("llama-3-8b", seq_length=8192)
    plan = ParallelPlan(tp=8, sequence_parallel=True, recompute="full", micro_batch_size=8)
    whole = TORCHTITAN.changed(loss={"parallel_logit_bytes": None})
    peaks = [evaluate_plan(replace(model, framework=each), plan).memory[0].total_bytes for each in (whole, TORCHTITAN)]
    assert peaks[1] - peaks[0] == pytest.approx((16 - 12) * 8 * 8192 * 128256 / 8, rel=0.01)
