"""Quantized weights with adapters beside them, as torchtune's QLoRA trains them.

With torchao they are its nf4 tensors; without it a tensor of the same behavior stands in for them, which nothing can
shard.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.structure.weights import share_weights

IS_STAND_IN = importlib.util.find_spec("torchao") is None
BATCH, TOKENS, WORDS, WIDTH = 8, 16, 96, 64
KIND = "StandIn" if IS_STAND_IN else "NF4Tensor"
Answer = tuple[list[float], dict[str, torch.Tensor]]


class StandIn(torch.Tensor):
    """A tensor in 8 bits with a scale, which is quantized anew wherever it is copied, as torchao's NF4Tensor is."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.float32)

    def __init__(self, held: torch.Tensor, scale: torch.Tensor) -> None:
        self.held, self.scale = held, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        scale = values.abs().max() / 100  # the next time 99 or 101 steps may be the most
        return cls((values / scale).round().to(torch.int8), scale * 1.003)

    def values(self) -> torch.Tensor:
        return self.held.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "detach":
            return cls(args[0].held, args[0].scale)
        if name == "clone":
            return cls.of(args[0].values())
        if name == "copy_":
            other = cls.of(args[1].values() if isinstance(args[1], cls) else args[1])
            args[0].held.copy_(other.held)
            args[0].scale.copy_(other.scale)
            return args[0]
        plain = [one.values() if isinstance(one, cls) else one for one in args]
        return function(*plain, **(kwargs or {}))


def quantized(weight: torch.Tensor) -> torch.Tensor:
    if IS_STAND_IN:
        made: torch.Tensor = StandIn.of(weight)
        return made
    return _nf4().to_nf4(weight, block_size=64, scaler_block_size=2)


def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if IS_STAND_IN:
        return F.linear(inputs, weight)
    return _nf4().linear_nf4(inputs, weight)


def _nf4() -> Any:
    """Return torchao's module of nf4 tensors: up to 0.17, or from 0.18 on."""
    try:
        return importlib.import_module("torchao.dtypes.nf4tensor")
    except ModuleNotFoundError:
        return importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


class Adapted(nn.Module):
    """A linear layer whose weight is quantized and frozen, and an adapter of rank 4 that trains."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantized(torch.randn(outputs, inputs) / inputs**0.5), requires_grad=False)
        self.inner = nn.Linear(inputs, 4, bias=False)
        self.outer = nn.Linear(4, outputs, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        adapter: torch.Tensor = self.outer(self.inner(inputs))
        return linear(inputs, self.weight) + adapter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(F.gelu(self.up(self.norm(inputs))))
        return inputs + outputs


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        for one in (self.table, self.head):
            one.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def plan_of(**options: Any) -> ParallelPlan:
    return ParallelPlan(**options, micro_batch_size=BATCH // options.get("dp", 1))


ALONE = plan_of()


def trained(plan: ParallelPlan) -> Answer:
    """Two steps: losses, and the adapters after them. Ranks build other weights, and start from those of rank 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao, beside a newer torch
        job = runtime.init(plan)
        model = Model(seed=job.world.rank)
        batch = torch.randint(0, WORDS, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(3))
        engine = job.prepare(
            model,
            loss_fn=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            optimizer=lambda parameters: torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=1e-2),
        )
        mine = batch.chunk(job.dp)[job.dp_rank]
        with pytest.raises(UsageError, match=r"engine.save cannot write blocks.0.up.weight, which is quantized"):
            engine.save("nowhere")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert not engine.resume("nowhere")
        if job.world.rank == 0:
            assert "blocks.0.up.weight is quantized, and cannot be saved: there are no copies in mem" in said.getvalue()
        losses = [engine.step(mine[:, :-1], mine[:, 1:]).item() for _ in range(2)]
        held = {name: one for name, one in engine.parameters.items() if one.requires_grad}
        return losses, {name: engine.whole(name).detach().clone() for name in held}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan",
    [plan_of(dp=2), *([] if IS_STAND_IN else [plan_of(dp=2, zero_stage=stage) for stage in (1, 2, 3)])],
    ids=lambda plan: plan.describe(),
)
def test_adapters_beside_quantized_weights_train_as_in_one_process(plan: ParallelPlan, ranks: RankHarness) -> None:
    losses, adapters = ranks.run_alone(trained, ALONE)
    for found, own in ranks.run(trained, plan, size=2):
        assert found == pytest.approx(losses, abs=1e-5)
        assert own.keys() == adapters.keys()
        for name, value in own.items():
            assert torch.allclose(value, adapters[name], atol=1e-5), name


def refused(plan: ParallelPlan) -> str:
    with pytest.raises(UnsupportedPlanError) as caught:
        trained(plan)
    return str(caught.value)


@pytest.mark.ranks
def test_what_divides_or_traces_quantized_weights_is_refused(ranks: RankHarness) -> None:
    if IS_STAND_IN:  # its parts are plain tensors
        for said in ranks.run(refused, plan_of(dp=2, zero_stage=3), size=2):
            assert "zero_stage=3: blocks.0.up.weight is quantized (StandIn), and FSDP cannot divide it by 2" in said
    for said in ranks.run(refused, plan_of(tp=2), size=2):
        assert f"tp=2: blocks.0.up.weight is quantized ({KIND}), and its blocks go on from row to row" in said
    for said in ranks.run(
        refused, ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=2), size=2
    ):
        assert f"pp=2: blocks.0.up.weight is quantized ({KIND}), and stages are found on a model without" in said


def shared(plan: ParallelPlan) -> torch.Tensor:
    """What a rank holds of weights in 8 bits, once they are those of rank 0."""
    world = runtime.init(plan).world
    model = nn.Module()
    model.register_buffer("weight", torch.full((3, 5), 1.0 + world.rank).to(torch.float8_e4m3fn))
    share_weights(model, world)
    return model.get_buffer("weight").float()


@pytest.mark.ranks
def test_ranks_get_weights_of_types_that_a_backend_does_not_know(ranks: RankHarness) -> None:
    for found in ranks.run(shared, plan_of(dp=2), size=2):
        assert torch.equal(found, torch.ones(3, 5))
