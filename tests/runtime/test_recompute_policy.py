"""Recompute by block and by operator: the gradients of one process, with less run again or less kept."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import HIDDEN, TOKENS, VOCABULARY, AttentionLayer, Transformer, loss_fn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.runtime import RecomputePolicy
from paraplan.runtime.recompute.blocks import recompute_blocks
from paraplan.runtime.recompute.policy import recomputed_blocks

BATCH = 12
NAMES = [f"layers.{number}" for number in range(6)]
POLICIES = {
    "none": None,
    "products": RecomputePolicy(keep=("matmul",)),
    "mixed": RecomputePolicy(
        blocks=slice(0, None, 2), keep=("addmm", torch.ops.aten.scaled_dot_product_attention.default)
    ),
    "selective": RecomputePolicy(blocks=(1, 3)),
}


class DropoutLayer(AttentionLayer):
    """Dropout behind attention, within it and in the MLP."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropped = 0.2 if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropped)
        out = self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        hidden = hidden + F.dropout(out, 0.2, self.training)
        inner = F.dropout(F.gelu(self.up(self.mlp_norm(hidden))), 0.2, self.training)
        return hidden + self.down(inner)


def trained(plan: ParallelPlan, policy: str, layer: type[nn.Module] = AttentionLayer) -> Any:
    """Return two losses, the norm, and all gradients whole, of a model with four blocks."""
    warnings.simplefilter("error")
    job = runtime.init(plan, precision="fp32")
    torch.manual_seed(0)
    model = Transformer(layer, num_layers=4)
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_grad_norm=100.0,
        verify="off",
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        recompute=POLICIES[policy],
    )
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, BATCH, TOKENS + 1), generator=generator)
    share = BATCH // job.dp
    rows = slice(job.dp_rank * share, (job.dp_rank + 1) * share)
    torch.manual_seed(5 + job.dp_rank)
    losses = [engine.step(batch[rows, :-1], batch[rows, 1:]).item() for batch in tokens]
    gradients = {
        name: engine.whole(name, held.grad).clone() for name, held in engine.parameters.items() if held.grad is not None
    }
    return losses, engine.grad_norm.item(), gradients


def trained_all(cases: list[tuple[ParallelPlan, str]], layer: type[nn.Module]) -> list[Any]:
    return [trained(plan, policy, layer) for plan, policy in cases]


def plan_of(**options: Any) -> ParallelPlan:
    shares = options.get("dp", 1) * options.setdefault("num_microbatches", 1)
    return ParallelPlan(**options, micro_batch_size=BATCH // shares)


def assert_same(found: list[Any], expected: Any) -> None:
    """Assert that the ranks' losses and norms, and their gradients together, are those of one process."""
    gradients: dict[str, torch.Tensor] = {}
    for losses, norm, held in found:
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert norm == pytest.approx(expected[1], rel=1e-5)
        gradients |= held
    assert gradients.keys() == expected[2].keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[2][name], rtol=1e-4, atol=2e-6, msg=lambda text, at=name: at + text
        )


TWO_RANKS = [
    plan_of(dp=2),
    plan_of(dp=2, zero_stage=1),
    plan_of(dp=2, zero_stage=2, num_microbatches=3),
    plan_of(dp=2, zero_stage=3, num_microbatches=2),
    plan_of(tp=2),
    plan_of(tp=2, sequence_parallel=True),
    plan_of(cp=2),
    plan_of(pp=2, pipeline_schedule="1f1b", num_microbatches=3),
    plan_of(pp=2, pipeline_schedule="zero_bubble", num_microbatches=3),
    plan_of(pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2, num_microbatches=2),
]
FOUR_RANKS = [
    plan_of(dp=2, tp=2, zero_stage=3),
    plan_of(pp=2, tp=2, sequence_parallel=True, pipeline_schedule="zero_bubble", num_microbatches=3),
    plan_of(dp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2),
]


@pytest.fixture(scope="module")
def one_process(ranks: RankHarness) -> Any:
    return ranks.run_alone(trained, plan_of(), "none")


@pytest.mark.ranks
def test_policies_train_as_one_process_under_every_axis(ranks: RankHarness, one_process: Any) -> None:
    mixed = [TWO_RANKS[3], TWO_RANKS[8]]
    cases = [(plan, "mixed") for plan in mixed]
    # A policy acts in the passes, in which parameters are whole until ZeRO-3, and schedules of whole passes are alike;
    # layers are split with their tokens.
    seldom = [TWO_RANKS[number] for number in (0, 1, 2, 4, 7, 9)]
    cases += [(plan, "products") for plan in TWO_RANKS if plan not in mixed + seldom]
    cases += with_all([(plan, "products") for plan in mixed + seldom])
    cases += [(plan.replace(recompute="selective"), "selective") for plan in (TWO_RANKS[0], *with_all([TWO_RANKS[8]]))]
    found = ranks.run(trained_all, cases, AttentionLayer, size=2)
    for number in range(len(cases)):
        assert_same([answers[number] for answers in found], one_process)


@pytest.mark.ranks
def test_recompute_of_chosen_operations_trains_as_one_process_under_every_axis(
    ranks: RankHarness, one_process: Any
) -> None:
    first = [TWO_RANKS[5], TWO_RANKS[8]]  # replicas are below, others as above
    plans = [*first, *with_all([plan for plan in TWO_RANKS if plan not in first])]
    cases = [(plan.replace(recompute="selective_ops"), "none") for plan in plans]
    cases.append((TWO_RANKS[0].replace(recompute="selective_ops"), "mixed"))
    found = ranks.run(trained_all, cases, AttentionLayer, size=2)
    for number in range(len(cases)):
        assert_same([answers[number] for answers in found], one_process)


@pytest.mark.with_all  # each axis has them, above
@pytest.mark.ranks
def test_policies_train_as_one_process_where_axes_meet(ranks: RankHarness, one_process: Any) -> None:
    cases = list(zip(FOUR_RANKS, ("products", "mixed", "products"), strict=True))
    cases = [cases[1], *with_all([cases[0], cases[2]])]  # replicas cut nothing of what a rank computes again
    found = ranks.run(trained_all, cases, AttentionLayer, size=4)
    for number in range(len(cases)):
        assert_same([answers[number] for answers in found], one_process)


@pytest.mark.ranks
def test_dropout_is_that_of_the_same_plan_without_recompute(ranks: RankHarness) -> None:
    some = [TWO_RANKS[5], *with_all([TWO_RANKS[3], TWO_RANKS[6], TWO_RANKS[8]])]  # others draw as one process does
    cases = [(plan, policy) for plan in some for policy in ("none", "products")]
    for answers in ranks.run(trained_all, cases, DropoutLayer, size=2):
        for start in range(0, len(cases), 2):
            assert_same([answers[start + 1]], answers[start])


class Calls(TorchDispatchMode):
    """Counts the calls of each operator, and follows the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def num_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


def counted(policy: RecomputePolicy | None, recompute: Recompute = "none") -> tuple[Counter[str], int]:
    """Return the operators of a backward pass of four blocks, and the bytes that the forward pass left for it."""
    torch.manual_seed(0)
    blocks = [AttentionLayer() for _ in range(4)]
    again = recomputed_blocks(policy, ParallelPlan(recompute=recompute), NAMES[:4])
    recompute_blocks(blocks, again)
    hidden = torch.randn(2, TOKENS, HIDDEN, requires_grad=True)
    with Calls() as forward:
        for block in blocks:
            hidden = block(hidden)
    for weight in (weight for block in blocks for weight in block.parameters()):  # which views hold on to
        forward.made.pop(weight.untyped_storage()._cdata, None)
    kept = forward.num_bytes
    with Calls() as backward:
        hidden.sum().backward()
    return backward.counts, kept


def test_what_is_kept_is_not_run_again_and_the_rest_takes_less_memory() -> None:
    policies = (None, RecomputePolicy(), RecomputePolicy(keep="matmul"), RecomputePolicy(blocks=2))
    (none, all_bytes), (full, full_bytes), (products, product_bytes), (half, half_bytes) = map(counted, policies)
    hidden_bytes = 2 * TOKENS * HIDDEN * 4
    assert full_bytes == 4 * hidden_bytes  # what every block returns
    assert half_bytes == (all_bytes + full_bytes) / 2
    assert product_bytes == full_bytes + 4 * (3 + 1 + 4) * hidden_bytes + 4 * hidden_bytes  # and of `down`, for nothing
    assert product_bytes < all_bytes
    linear, attention = "aten.addmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert full[linear] == 4 * 3  # nothing in the backward pass reads the last product of a block
    assert (none[linear], products[linear], half[linear]) == (0, 0, 2 * 3)
    assert (none["aten.gelu.default"], products["aten.gelu.default"]) == (0, 4)
    assert (none[attention], products[attention], full[attention]) == (0, 4, 4)
    assert counted(RecomputePolicy(keep=("scaled_dot_product_attention",)))[0][attention] == 0


def gradients_of(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *keep: str, again: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    block = nn.Module()
    block.forward = lambda one: function(one, weight)  # type: ignore[method-assign]
    if again:
        recompute_blocks([block], recomputed_blocks(RecomputePolicy(keep=keep), ParallelPlan(), ["0"]))
    block(given).sum().backward()
    assert given.grad is not None
    assert weight.grad is not None
    return [given.grad, weight.grad, torch.rand(3)]


def test_chosen_operations_are_attention_and_every_second_linear_layer() -> None:
    (full, full_bytes), (chosen, chosen_bytes) = counted(None, "full"), counted(None, "selective_ops")
    hidden_bytes = 2 * TOKENS * HIDDEN * 4
    statistics = chosen_bytes - full_bytes - 4 * (3 + 1 + 4) * hidden_bytes  # of qkv, attention and up, in four blocks
    assert 0 <= statistics < 4 * hidden_bytes
    # Of qkv, out, up and down the second runs again; the last one would, and nothing reads it.
    assert (full["aten.addmm.default"], chosen["aten.addmm.default"]) == (4 * 3, 4)
    assert chosen["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 0
    assert chosen["aten.gelu.default"] == 4


def test_a_kept_result_that_is_written_later_is_computed_again() -> None:
    def scaled_in_place(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh((given @ weight).mul_(3.0).add_(1.0) @ weight)

    expected = gradients_of(scaled_in_place, again=False)
    for found, one in zip(gradients_of(scaled_in_place, "mm", again=True), expected, strict=True):
        assert torch.equal(found, one)


def test_what_is_drawn_behind_a_kept_drawing_operator_is_drawn_again_the_same() -> None:
    def drops(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = given * torch.bernoulli(torch.full((4, 4), 0.5))
        return torch.tanh(torch.dropout(first @ weight, 0.5, train=True) @ weight)

    expected = gradients_of(drops, again=False)
    for found, one in zip(gradients_of(drops, "bernoulli", again=True), expected, strict=True):
        assert torch.equal(found, one)


def test_blocks_are_chosen_by_number_by_slice_and_by_name() -> None:
    staged = ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2)

    def chosen(blocks: Any, plan: ParallelPlan = staged) -> list[int]:
        return sorted(recomputed_blocks(RecomputePolicy(blocks=blocks), plan, NAMES).numbers)

    assert chosen(None) == [0, 1, 2, 3, 4, 5]
    assert chosen(2) == [0, 1, 3, 4]  # of each of the two stages
    assert chosen(2, ParallelPlan()) == [0, 1]
    assert chosen(slice(1, None, 2)) == [1, 3, 5]
    assert chosen([5, 0]) == [0, 5]
    assert chosen(lambda number, name: number == 1 or name.endswith("4")) == [1, 4]


@pytest.mark.parametrize(
    ("policy", "recompute", "said"),
    [
        (RecomputePolicy(blocks=0), "none", "blocks=0"),
        (RecomputePolicy(blocks=[6]), "none", "block 6, and the model has 6 blocks"),
        (RecomputePolicy(blocks=slice(6, None)), "none", "chooses no block"),
        (RecomputePolicy(keep=["mm", "matmull"]), "none", "'matmull', which torch.ops.aten has not"),
        (RecomputePolicy(keep=["relu_"]), "none", "writes its arguments"),
        (RecomputePolicy(keep=[torch.ops.aten.view.default]), "none", "returns a view"),
        (RecomputePolicy(keep=[torch.mm]), "none", "holds a builtin"),
        (RecomputePolicy(keep=["mm"]), "selective", "recompute=selective keeps all but the attention core"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy: RecomputePolicy, recompute: Any, said: str) -> None:
    with pytest.raises(ParaplanError, match=said):
        recomputed_blocks(policy, ParallelPlan(recompute=recompute), NAMES)


def refused(keep: str, **options: Any) -> str:
    job = runtime.init(plan_of(), precision="fp32")
    engine = job.prepare(
        Transformer(num_layers=2),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        recompute=RecomputePolicy(keep=keep),
        **options,
    )
    tokens = torch.zeros(BATCH, TOKENS + 1, dtype=torch.long)
    engine.step(tokens[:, :-1], tokens[:, 1:])
    return "trained"


def test_operators_that_blocks_never_call_are_refused_with_those_that_they_call() -> None:
    with pytest.raises(ParaplanError, match=r"call none of the operators .* aten.addmm"):
        refused("mm", verify="off")


def test_operators_to_keep_are_refused_where_the_compiler_chooses() -> None:
    with pytest.raises(ParaplanError, match=r"under torch\.compile"):
        refused("addmm", compile_backend="eager")
