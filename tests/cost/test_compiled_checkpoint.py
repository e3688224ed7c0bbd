"""What torch.compile makes of checkpointed blocks whose attention it cannot follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


@torch._dynamo.disable
def opaque(values: Tensor) -> Tensor:
    """Stand for a kernel of another package."""
    return values.cumsum(1)


class Block(nn.Module):
    """Linear layers around an attention core."""

    def __init__(self, attention: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.attention = nn.Linear(8, 8), nn.Linear(8, 8), attention

    def forward(self, values: Tensor) -> Tensor:
        """Return what the block gives."""
        last: Tensor = self.last(self.attention(self.first(values).relu()).relu())
        return last


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("attention", "is_checkpointed", "is_compiled"),
    [(torch.relu, False, True), (torch.relu, True, True), (opaque, False, True), (opaque, True, False)],
    ids=["plain", "checkpointed", "broken graph", "broken graph, checkpointed"],
)
def test_nothing_of_a_checkpointed_block_is_compiled_where_its_attention_breaks_the_graph(
    attention: Callable[[Tensor], Tensor], *, is_checkpointed: bool, is_compiled: bool
) -> None:
    torch._dynamo.reset()
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        def run(*inputs: object) -> object:
            ran.append(len(graph.graph.nodes))
            return graph.forward(*inputs)

        return run

    block = Block(attention)
    wrapped = checkpoint_wrapper(block, preserve_rng_state=False) if is_checkpointed else block
    wrapped.compile(backend=backend)
    wrapped(torch.ones(2, 4, 8)).sum().backward()
    assert bool(ran) == is_compiled
