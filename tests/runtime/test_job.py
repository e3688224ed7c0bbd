"""Jobs: where their plan comes from, and models and batches that do not go with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_harness import RankHarness, RanksFailedError
from torch import nn
from training_cases import GLOBAL_BATCH, TOKENS, VOCABULARY, Decoder, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import ModelError, ParaplanError, PlanError, UnsupportedPlanError, UsageError
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.engine import Engine
from paraplan.runtime.structure.weights import check_own_memory

TWO_STAGES = ParallelPlan(pp=2, pipeline_schedule="gpipe", num_microbatches=2, micro_batch_size=6)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch(size: int = GLOBAL_BATCH, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(VOCABULARY, (size, tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def test_a_script_without_a_launcher_is_one_process() -> None:
    job = runtime.init()
    assert job.plan == ParallelPlan()
    assert job.file is None
    assert job.is_main
    job.close()


def test_a_plan_for_other_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match="is for 8 ranks, and this job has 1"):
        runtime.init(ParallelPlan(dp=8))


def test_a_plan_that_cannot_be_executed_is_refused_at_the_start() -> None:
    with pytest.raises(UnsupportedPlanError, match="offload=parameters, zero_stage=0"):
        runtime.init(ParallelPlan(offload="parameters"))
    narrow = TrainingSpec(global_batch_size=1, seq_length=8, precision="bf16", linear_precision="mxfp8")
    with pytest.raises(UnsupportedPlanError, match="linear_precision='mxfp8': the runtime has torchao's layers"):
        runtime.init(PlanFile(plan=ParallelPlan(), training=narrow))


def test_the_precision_is_that_of_the_plan_file() -> None:
    training = TrainingSpec(global_batch_size=1, seq_length=8, precision="bf16")
    assert runtime.init(PlanFile(plan=ParallelPlan(), training=training)).precision == "bf16"
    assert runtime.init(PlanFile(plan=ParallelPlan())).precision == "fp32"
    with pytest.raises(PlanError, match="precision=fp32, but the plan was made for bf16"):
        runtime.init(PlanFile(plan=ParallelPlan(), training=training), precision="fp32")


def test_a_model_that_trains_whole_under_a_plan_for_adapters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    training = TrainingSpec(global_batch_size=1, seq_length=8, precision="fp32", train="lora:r=16")
    frozen = Decoder(2)
    next(iter(frozen.parameters())).requires_grad_(False)
    for model, is_told in ((frozen, False), (Decoder(2), True)):
        caplog.clear()
        job = runtime.init(PlanFile(plan=ParallelPlan(), training=training))
        job.prepare(model, loss_fn=loss_fn, optimizer=sgd)
        assert ("the plan was made for --train lora:r=16" in caplog.text) is is_told


def test_a_plan_for_another_model_is_refused_and_nothing_is_trained() -> None:
    model = Decoder(3)
    count = sum(parameter.numel() for parameter in model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = ModelReference(name="other", num_parameters=count + 1)
    job = runtime.init(PlanFile(plan=ParallelPlan(), model=reference))
    with pytest.raises(PlanError, match=f"other with {count + 1:,} parameters, and this model has {count:,}"):
        job.prepare(model, loss_fn=loss_fn, optimizer=sgd)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    right = PlanFile(plan=ParallelPlan(), model=reference.replace(num_parameters=count))
    runtime.init(right).prepare(model, loss_fn=loss_fn, optimizer=sgd)


def test_parameters_over_one_memory_are_refused_where_a_plan_would_part_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    check_own_memory(model, "ZeRO-3")
    flat = torch.zeros(40)  # as an optimizer that flattens parameters lays them out
    for one, start in zip(model.parameters(), (0, 16, 20, 36), strict=True):
        one.data = flat[start : start + one.numel()].view(one.shape)
    check_own_memory(model, "ZeRO-3")
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ModelError, match=r"0\.weight and 1\.weight are two parameters over the same memory"):
        check_own_memory(model, "ZeRO-3")


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Decoder(2)
    with pytest.raises(ModelError, match="positions is on the meta device"):
        runtime.init().prepare(model, loss_fn=loss_fn, optimizer=sgd)


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"1.weight has no shape yet: .*hint: call the model once"):
        runtime.init().prepare(nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4)), loss_fn=loss_fn, optimizer=sgd)


def test_recompute_needs_blocks() -> None:
    job = runtime.init(ParallelPlan(recompute="full"))
    with pytest.raises(PlanError, match="Linear has no repeated blocks to recompute"):
        job.prepare(nn.Linear(2, 2), loss_fn=loss_fn, optimizer=sgd)


def test_a_batch_that_is_not_the_plans_is_refused() -> None:
    job = runtime.init(ParallelPlan(micro_batch_size=2, num_microbatches=3))
    assert len(job.shard(TokenPairs())) == len(TokenPairs()) // 6
    with pytest.raises(PlanError, match="batch_size=8, but the plan is for a global batch of 6"):
        job.shard(TokenPairs(), batch_size=8)


def test_a_step_of_another_size_than_the_plans_is_refused_with_the_numbers() -> None:
    job = runtime.init(ParallelPlan(micro_batch_size=2, num_microbatches=3))
    engine = job.prepare(Decoder(2), loss_fn=loss_fn, optimizer=sgd)
    with pytest.raises(UsageError, match="12 sequences on rank 0, but the plan takes micro_batch_size=2 x"):
        engine.step(*batch(12))
    assert engine.step(*batch(6)).shape == ()
    engine.step(*batch(5))  # the last of an epoch
    with pytest.raises(UsageError, match=r"two steps in a row have fewer sequences than the plan's 6 on a rank: \[5\]"):
        engine.step(*batch(5))
    with pytest.raises(UsageError, match="no sequence on any rank"):
        engine.step(*(tensor[:0] for tensor in batch(5)))


def test_steps_on_the_spot_take_any_size() -> None:
    engine = runtime.init().prepare(Decoder(2), loss_fn=loss_fn, optimizer=sgd)
    for size in (5, 4, 7):
        engine.step(*batch(size))
    assert engine.num_steps == 3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda outputs, targets: outputs, r"a tensor of shape \(5, 8, 24\)"),
        (lambda outputs, targets: 1.0, "float"),
        (lambda outputs, targets: targets.sum(), r"a tensor of shape \(\)"),
        (lambda outputs, targets: outputs.detach().mean(), "a number that has no gradient"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(bad: Callable[..., object], words: str) -> None:
    engine = runtime.init().prepare(Decoder(2), loss_fn=bad, optimizer=sgd)
    with pytest.raises(UsageError, match=f"loss_fn returned {words}"):
        engine.step(*batch(5))


def test_evaluation_changes_nothing_and_has_no_dropout() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.5), nn.Linear(8, VOCABULARY))
    engine = runtime.init().prepare(model, loss_fn=loss_fn, optimizer=sgd)
    first, second = engine.eval_step(*batch()), engine.eval_step(*batch())
    assert torch.equal(first, second)
    assert engine.module.training
    assert all(parameter.grad is None for parameter in engine.parameters.values())


def test_clipping_bounds_the_gradient_and_reports_its_norm() -> None:
    engines = [
        runtime.init().prepare(Decoder(2), loss_fn=loss_fn, optimizer=sgd, max_grad_norm=bound)
        for bound in (None, 1e-3)
    ]
    for engine in engines:
        engine.step(*batch())
    free, bound = engines
    assert free.grad_norm is None
    norm = torch.cat([parameter.grad.flatten() for parameter in bound.parameters.values()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert bound.grad_norm is not None
    assert bound.grad_norm.item() > 1e-2


# What only several ranks can show.


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except ParaplanError as error:
        return str(error)
    return "no error"


def _stage_engine(plan: ParallelPlan, model: nn.Module | None = None, loss: Callable[..., object] = loss_fn) -> Engine:
    return runtime.init(plan).prepare(
        model or Decoder(4), loss_fn=loss, optimizer=sgd, example_inputs=torch.zeros(2, TOKENS, dtype=torch.long)
    )


def _launched(path: str) -> tuple[str, int]:
    os.environ["PARAPLAN_PLAN"] = path
    job = runtime.init()
    return job.plan.describe(), job.world.rank


@pytest.mark.ranks
def test_the_launchers_plan_reaches_the_ranks(tmp_path: Path, ranks: RankHarness) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan=TWO_STAGES).to_json())
    assert ranks.run(_launched, str(path), size=2) == [(TWO_STAGES.describe(), 0), (TWO_STAGES.describe(), 1)]


@pytest.mark.ranks
def test_a_launchers_plan_that_is_missing_or_broken_is_named(tmp_path: Path, ranks: RankHarness) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(RanksFailedError, match=r"cannot read the plan .*plan\.json"):
        ranks.run(_launched, str(path), size=1)
    path.write_text('{"plan": {"dp": 0}}')
    with pytest.raises(RanksFailedError, match=r"plan\.json: plan\.dp: .*greater than 0"):
        ranks.run(_launched, str(path), size=1)


def _other_blocks() -> str:
    model = Decoder(4)
    file = PlanFile(plan=TWO_STAGES, model=ModelReference(name="other", num_blocks=6))
    return _refusal(lambda: runtime.init(file).prepare(model, loss_fn=loss_fn, optimizer=sgd))


@pytest.mark.ranks
def test_a_pipeline_for_other_blocks_is_refused(ranks: RankHarness) -> None:
    assert "6 blocks, and this model has 4" in ranks.run(_other_blocks, size=2)[0]


def _other_models() -> str:
    job = runtime.init()
    model = Decoder(2 + job.world.rank)
    return _refusal(lambda: job.prepare(model, loss_fn=loss_fn, optimizer=sgd))


@pytest.mark.ranks
def test_ranks_with_other_models_all_say_which(ranks: RankHarness) -> None:
    for message in ranks.run(_other_models, size=2):
        assert "ranks [1] have built another model than rank 0" in message


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Embedding(VOCABULARY, VOCABULARY), nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.used(tokens)


class UsedOutside(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.layers[0].up.bias.sum()


def _used_outside() -> str:
    plan = ParallelPlan(dp=2, zero_stage=3, micro_batch_size=4)
    engine = runtime.init(plan).prepare(UsedOutside(2), loss_fn=loss_fn, optimizer=sgd)
    return _refusal(lambda: engine.step(*batch(4)))


def _train_half_used(plan: ParallelPlan) -> str:
    engine = runtime.init(plan).prepare(HalfUsed(), loss_fn=loss_fn, optimizer=sgd)
    return _refusal(lambda: [engine.step(*batch(4)) for _ in range(2)])


@pytest.mark.ranks
def test_parameters_without_a_part_in_the_loss_are_left_alone(ranks: RankHarness) -> None:
    for plan in (ParallelPlan(dp=2, micro_batch_size=4), ParallelPlan(dp=2, zero_stage=2, micro_batch_size=4)):
        assert ranks.run(_train_half_used, plan, size=2) == ["no error"] * 2


@pytest.mark.ranks
def test_parameters_that_are_used_outside_of_their_block_are_refused_under_zero(ranks: RankHarness) -> None:
    for message in ranks.run(_used_outside, size=2):
        assert "zero_stage=3: the model computes with a parameter outside of the forward pass" in message


def _no_blocks() -> str:
    return _refusal(lambda: _stage_engine(TWO_STAGES, nn.Bilinear(2, 2, 2)))


@pytest.mark.ranks
def test_a_pipeline_over_a_model_without_blocks_is_refused(ranks: RankHarness) -> None:
    assert "Bilinear has no repeated blocks to cut between" in ranks.run(_no_blocks, size=2)[0]


@pytest.mark.ranks
def test_a_stages_error_that_a_user_can_mend_comes_out_as_it_is(ranks: RankHarness) -> None:
    # The first stage waits for a gradient that never comes, and ends with its peer.
    with pytest.raises(RanksFailedError) as failure:
        ranks.run(_last_stage_raises, size=2)
    assert "paraplan.errors.UsageError: loss_fn returned a tensor of shape (" in str(failure.value)


def _last_stage_raises() -> None:
    _stage_engine(TWO_STAGES, loss=lambda outputs, targets: outputs).step(*batch())


def _changing_lengths(plan: ParallelPlan | None) -> list[float]:
    torch.manual_seed(0)
    engine = _stage_engine(plan) if plan else runtime.init().prepare(Decoder(4), loss_fn=loss_fn, optimizer=sgd)
    losses = []
    for tokens in (6, 3, 6, 2, 5, 4, 1, 3):  # more lengths than schedules are kept for
        losses.append(engine.step(*batch(12, tokens)).item())
        losses.append(engine.eval_step(*batch(12, tokens)).item())
    return losses


@pytest.mark.ranks
def test_a_pipeline_takes_sequences_of_another_length_in_every_step(ranks: RankHarness) -> None:
    expected = ranks.run_alone(_changing_lengths, None)
    for losses in ranks.run(_changing_lengths, TWO_STAGES, size=2):
        assert losses == pytest.approx(expected, rel=1e-5)


def _dropout_draw() -> float:
    torch.manual_seed(4)
    runtime.init().prepare(Decoder(2), loss_fn=loss_fn, optimizer=sgd)
    return torch.rand(()).item()


@pytest.mark.ranks
def test_ranks_with_one_seed_draw_different_dropout(ranks: RankHarness) -> None:
    first, second = ranks.run(_dropout_draw, size=2)
    assert first != second
    assert first == ranks.run_alone(_dropout_draw)
