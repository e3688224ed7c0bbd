"""Activations that wait in the host's memory: the same training, and nothing of early blocks beside them."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import TOKENS, VOCABULARY, build
from torch.multiprocessing.reductions import StorageWeakRef

from paraplan import runtime
from paraplan.errors import PlanError, UnsupportedPlanError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.engine import Engine
from paraplan.runtime.fake.run import trace_memory

BATCH = 8
ONE = ParallelPlan(micro_batch_size=BATCH)
STAGES: dict[str, Any] = {"pp": 2, "num_microbatches": 4, "micro_batch_size": 2}
PLANS = [
    ParallelPlan(dp=2, zero_stage=3, recompute="full", num_microbatches=2, micro_batch_size=2),
    ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=BATCH),
    ParallelPlan(**STAGES, pipeline_schedule="1f1b", recompute="full"),
    *with_all(
        [
            ParallelPlan(dp=2, zero_stage=3, micro_batch_size=4),
            ParallelPlan(**STAGES, pipeline_schedule="zero_bubble"),
            ParallelPlan(cp=2, recompute="selective", micro_batch_size=BATCH),
            ParallelPlan(dp=2, ep=2, zero_stage=2, recompute="full", micro_batch_size=4),
        ]
    ),
]


def file_of(plan: ParallelPlan, *, offloads: bool, compiled: bool = False) -> PlanFile:
    training = TrainingSpec(
        global_batch_size=BATCH, seq_length=TOKENS, precision="fp32", offloads_activations=offloads, compiled=compiled
    )
    return PlanFile(plan=plan, training=training)


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def prepared(
    plan: ParallelPlan, *, offloads: bool, family: str = "llama", loss: Any = loss_fn, **more: Any
) -> tuple[Engine, Any, torch.Tensor]:
    """Return an engine, and this rank's share of a batch."""
    job = runtime.init(file_of(plan, offloads=offloads), shows_progress=False)
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    size = BATCH // plan.dp
    own = tokens[size * job.mesh.coordinate("dp") :][:size]
    engine = job.prepare(
        build(family, **more),
        loss_fn=loss,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.1),
        verify="off",
        example_inputs={"input_ids": tokens[:2, :-1]},
    )
    return engine, {"input_ids": own[:, :-1]}, own[:, 1:]


def train(plan: ParallelPlan, offloads: bool, family: str = "llama") -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, inputs, targets = prepared(plan, offloads=offloads, family=family)
    losses = [engine.step(inputs, targets).item() for _ in range(3)]
    losses.append(engine.eval_step(inputs, targets).item())
    return losses, {name: engine.whole(name).clone() for name in engine.parameters}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_numbers_are_those_without_it(recompute: Any) -> None:
    plan = ONE.replace(recompute=recompute)
    expected, found = train(plan, False), train(plan, True)
    assert found[0] == expected[0]
    for name, parameter in expected[1].items():
        assert torch.equal(found[1][name], parameter), name


@pytest.mark.ranks
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
def test_it_goes_with_every_axis(plan: ParallelPlan, ranks: RankHarness) -> None:
    family = "mixtral" if plan.ep > 1 else "llama"
    losses, parameters = ranks.run_alone(train, ONE, False, family)
    for found, held in ranks.run(train, plan, True, family, size=plan.world_size):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, parameter in held.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offloads", [False, True])
def test_what_a_block_has_kept_goes_once_the_next_has_run(offloads: bool) -> None:
    kept: list[Any] = []
    alive: dict[str, list[int]] = {"forward": [], "backward": []}
    gc.freeze()  # each of twenty collections would go over all that earlier tests have left

    def count(phase: str) -> None:
        gc.collect()
        alive[phase].append(sum(not one.expired() for one in kept))

    def note(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        count("forward")
        kept.append(StorageWeakRef(args[0].untyped_storage()))  # a product, which the layer's own backward pass reads

    engine, inputs, targets = prepared(ONE, offloads=offloads, num_hidden_layers=5)
    for name, module in engine.module.named_modules():
        if name.endswith("mlp.down_proj"):
            module.register_forward_pre_hook(note)
            module.register_full_backward_hook(lambda *_: count("backward"))
    engine.step(inputs, targets)
    kept.clear()
    alive |= {"forward": [], "backward": []}
    engine.step(inputs, targets)
    assert alive["forward"] == ([0, 1, 1, 1, 1] if offloads else [0, 1, 2, 3, 4])  # beside the one at work
    assert alive["backward"] == ([0, 0, 0, 0, 0] if offloads else [4, 3, 2, 1, 0])  # copies come back in their place


def test_compiled_blocks_and_kept_operations_do_not_go_with_it() -> None:
    with pytest.raises(UnsupportedPlanError, match="what compiled blocks keep is the compiler's choice"):
        runtime.init(file_of(ONE, offloads=True, compiled=True))
    with pytest.raises(UnsupportedPlanError, match="results of operations that are kept stay on the GPU"):
        runtime.init(file_of(ONE.replace(recompute="selective_ops"), offloads=True))


def test_a_model_without_blocks_has_nothing_to_offload() -> None:
    job = runtime.init(file_of(ONE, offloads=True))
    with pytest.raises(UnsupportedPlanError, match="Linear has no repeated blocks, whose activations wait"):
        job.prepare(torch.nn.Linear(4, 4), loss_fn=loss_fn, optimizer=lambda held: torch.optim.SGD(held, lr=0.1))


def test_a_run_without_values_says_that_it_cannot_tell() -> None:
    training = file_of(ONE, offloads=True).training
    assert training is not None
    with pytest.raises(PlanError, match="which activations wait on the host cannot be told apart"):
        trace_memory(partial(build, "llama"), plan=ONE, training=training)
