"""Shapes that are remembered are those that torch works out, of every operation of real models."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from case_selection import with_all
from torch import Tensor, nn

from paraplan.model.trace_shapes import MetaShapes
from paraplan.model.trace_torch_private import TorchDispatchMode, pytree
from paraplan.runtime.structure.meta import WAYS_TO_RUN

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

TOKENS = torch.zeros(2, 8, dtype=torch.long, device="meta")


class Seen(TorchDispatchMode):
    """Lists each operation with the forms of what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor)]
        self.returned.append((str(func), [(one.shape, one.stride(), one.dtype, one.device) for one in tensors]))
        return out


def steps(model: nn.Module, *, remembers: bool, times: int = 1) -> list[list[tuple[str, list[Any]]]]:
    """Return what the operations of forward and backward passes returned, of each pass."""
    found = []
    for _ in range(times):
        with MetaShapes() if remembers else nullcontext(), WAYS_TO_RUN[-1](), Seen() as seen:
            out = model(TOKENS)
            logits = out if isinstance(out, Tensor) else out.logits
            logits.float().logsumexp(-1).mean().backward()
        model.zero_grad()
        found.append(seen.returned)
    return found


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "gpt_oss", *with_all(["llama", "mixtral", "falcon"])])
def test_models_of_transformers_have_the_shapes_that_torch_works_out(family: str) -> None:
    pytest.importorskip("transformers")
    from tiny_transformers import build

    model = build(family).to("meta", torch.bfloat16)
    (expected,) = steps(model, remembers=False)
    assert steps(model, remembers=True, times=2) == [expected, expected]


class Odd(nn.Module):
    """Views, writes, several outputs, values of other types that are equal, and what depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        first, second = hidden.transpose(1, 2).split(4)[0].topk(2, dim=1)
        assert second.dtype == torch.long
        assert first.untyped_storage().data_ptr() == 0
        assert (tokens + 1).dtype == torch.long
        assert (tokens + 1.0).dtype == torch.float32
        assert (tokens + True).dtype == torch.long
        whole = torch.empty(2, 8, 8)
        whole.copy_(hidden.detach()).mul_(2)
        assert hidden.view(-1).untyped_storage()._cdata == hidden.untyped_storage()._cdata
        return torch.cat([hidden, whole.to(torch.float64).float()], dim=-1)


def test_views_share_storage_and_numbers_of_another_type_give_another_one() -> None:
    model = Odd().to("meta")
    (expected,) = steps(model, remembers=False)
    assert steps(model, remembers=True, times=3) == [expected] * 3


def test_two_results_are_two_tensors_and_values_are_computed_as_ever() -> None:
    with MetaShapes():
        first, second = (torch.ones(3, device="meta") + 1 for _ in range(2))
        assert first is not second
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
        with pytest.raises(NotImplementedError):
            torch.ones(3, device="meta").nonzero()
