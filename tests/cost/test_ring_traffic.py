"""What the ring of torch's context parallelism moves beyond attention, counted by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from paraplan.cost.communication.exchanges import RING_BYTES

HEADS, TOKENS, WIDTH = 4, 512, 64
VIEWS = {"view", "slice", "unsqueeze", "squeeze", "alias", "detach", "reshape", "split", "chunk", "empty_like"}


class Bytes(TorchDispatchMode):
    """Counts what operations read and write, without views and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        given = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].rstrip("_")
        if name not in VIEWS and "c10d" not in func._schema.name:
            read = [] if name == "zeros_like" else tree_leaves((args, kwargs))
            tensors = [one for one in (*read, *tree_leaves(given)) if isinstance(one, torch.Tensor)]
            self.total += sum(one.numel() * one.element_size() for one in tensors)
        return given


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param // 2, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def per_element(run: Callable[[], object], ranks: int) -> float:
    with Bytes() as counted:
        run()
    return counted.total / (HEADS * TOKENS * WIDTH * ranks)


def test_a_step_of_torchs_ring_moves_what_the_profile_says(ranks: int) -> None:
    query, key, value, out = (torch.zeros(1, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(4))
    group = dist.group.WORLD
    assert group is not None

    def forward_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> object:
        with _disable_current_modes():
            return torch.zeros_like(query), torch.zeros(query.shape[:3])

    def backward_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> object:
        with _disable_current_modes():
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    forward = per_element(
        lambda: ring._templated_ring_attention(group, 2, forward_kernel, query, key, value, is_causal=True), ranks
    )
    backward = per_element(
        lambda: ring._templated_ring_attention_backward(
            group,
            2,
            backward_kernel,
            out,
            "grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=torch.zeros(query.shape[:3]),
            is_causal=True,
        ),
        ranks,
    )
    told = [queries + 2 * keys for queries, keys in zip(*RING_BYTES, strict=True)]
    assert [forward, backward] == pytest.approx(told, rel=0.25)
