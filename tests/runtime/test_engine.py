"""What a step does beside the plan: exact means, fp16, schedulers, compiled blocks, and numbers about itself."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import HIDDEN, TOKENS, VOCABULARY, Decoder, RoutedExperts, Transformer

from paraplan import runtime
from paraplan.errors import ParaplanError, PlanError, UsageError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import compiled_reason
from paraplan.runtime.engine import Engine
from paraplan.runtime.step.faults import RankMemoryError

BATCH = 12


class MaskedPairs:
    """Samples of which some have few targets, and one has none."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self._tokens = torch.randint(VOCABULARY, (count, TOKENS + 1), generator=generator)
        self._is_masked = torch.rand(count, TOKENS, generator=generator) < torch.rand(count, 1, generator=generator)
        self._is_masked[0] = True

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._tokens[index]
        return row[:-1], row[1:].masked_fill(self._is_masked[index], -100)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True)


def example() -> torch.Tensor:
    return torch.zeros(2, TOKENS, dtype=torch.long)


def prepared(plan: ParallelPlan | None, model: nn.Module, **options: object) -> tuple[runtime.Job, Engine]:
    job = runtime.init(plan, precision=options.pop("precision", "fp32"), shows_progress=False)
    options.setdefault("optimizer", adamw)
    return job, job.prepare(model, loss_fn=loss_fn, example_inputs=example(), **options)


def train_masked(cases: list[tuple[ParallelPlan, int]]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return the losses and final parameters of an epoch for every plan and size of the data."""
    results = []
    for plan, count in cases:
        torch.manual_seed(0)
        job, engine = prepared(plan, Transformer(num_layers=num_layers_of(plan)), verify="off")
        batches = job.shard(MaskedPairs(count), batch_size=BATCH, drop_last=False)
        losses = []
        for inputs, targets in batches:
            losses += [engine.eval_step(inputs, targets).item(), engine.step(inputs, targets).item()]
        results.append((losses, {name: engine.whole(name).clone() for name in engine.parameters}))
    return results


def num_layers_of(plan: ParallelPlan) -> int:
    """Return how deep a model the plan trains: depth does not change what a mean goes over."""
    return max(2, plan.num_stages)


def train_plainly(num_layers: int, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the same of plain torch: every global batch in one piece."""
    torch.manual_seed(0)
    model, data = Transformer(num_layers=num_layers), MaskedPairs(count)
    optimizer = adamw(list(model.parameters()))
    losses = []
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, count, BATCH):
        inputs, targets = map(torch.stack, zip(*(data[i] for i in order[start : start + BATCH]), strict=True))
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses += [loss.item(), loss.item()]
    return losses, dict(model.named_parameters())


def plan_of(**fields: object) -> ParallelPlan:
    plan = ParallelPlan.model_validate({"num_microbatches": 3} | fields)
    return plan.replace(micro_batch_size=BATCH // (plan.dp * plan.num_microbatches))


SHORT_COUNTS = [19, 13]  # a last batch of 7, and one of 1, of which a rank has nothing


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plans",
    [
        [
            plan_of(),
        ],
        [
            plan_of(dp=2),
            plan_of(pp=2, pipeline_schedule="zero_bubble", num_microbatches=6),
            plan_of(cp=2),
            # A mean is that of DDP, and of another schedule; split layers have whole sequences.
            *with_all(
                [
                    plan_of(dp=2, zero_stage=3, recompute="full"),
                    plan_of(pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2, num_microbatches=6),
                    plan_of(tp=2),
                    plan_of(dp=2, zero_stage=1),
                    plan_of(dp=2, zero_stage=2),
                    plan_of(pp=2, pipeline_schedule="gpipe"),
                    plan_of(pp=2, pipeline_schedule="1f1b"),
                ]
            ),
        ],
        *with_all(  # two ranks have each of these
            [
                [
                    plan_of(dp=2, pp=2, pipeline_schedule="1f1b", zero_stage=1),
                    plan_of(dp=4),
                    plan_of(dp=2, tp=2, zero_stage=3),
                ]
            ]
        ),
    ],
    ids=lambda plans: f"{plans[0].world_size} ranks",
)
def test_the_loss_is_the_mean_over_all_targets_of_short_and_masked_batches(
    plans: list[ParallelPlan], ranks: RankHarness
) -> None:
    # Of neighbours, which do much alike, each with one of the two.
    cases = [(plan, SHORT_COUNTS[index % 2]) for index, plan in enumerate(plans, start=1)]
    cases += with_all([(plan, SHORT_COUNTS[index % 2]) for index, plan in enumerate(plans)])
    expected = {key: train_plainly(*key) for key in {(num_layers_of(plan), count) for plan, count in cases}}
    by_rank = ranks.run(train_masked, cases, size=plans[0].world_size, timeout_s=240.0)
    for results in by_rank:
        for (plan, count), (losses, parameters) in zip(cases, results, strict=True):
            reference_losses, reference = expected[num_layers_of(plan), count]
            assert losses == pytest.approx(reference_losses, rel=1e-5), plan.describe()
            for name, value in parameters.items():
                torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5)


def uneven_shares() -> float:
    job, engine = prepared(None, seeded_decoder())
    inputs, targets = next(iter(job.shard(MaskedPairs(12), batch_size=12, shuffle=False)))
    rank = job.world.rank
    return engine.step(inputs[: 6 - rank], targets[: 6 - rank]).item()


def seeded_decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(2)


@pytest.mark.ranks
def test_ranks_with_shares_of_other_sizes_give_the_mean_over_all(ranks: RankHarness) -> None:
    data = MaskedPairs(12)
    inputs, targets = map(torch.stack, zip(*(data[i] for i in range(11)), strict=True))
    expected = loss_fn(seeded_decoder()(inputs), targets).item()
    assert ranks.run(uneven_shares, size=2) == [pytest.approx(expected, rel=1e-5)] * 2


def test_a_user_says_what_a_mean_goes_over() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 6.0])
    model = nn.Linear(3, 1)
    inputs, targets = torch.randn(6, 3), torch.randn(6)

    def weighted(outputs: torch.Tensor, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        squares = (outputs.squeeze(1) - pair["value"]).square()
        return (squares * pair["weight"]).sum() / pair["weight"].sum()

    batch = {"value": targets, "weight": weights}
    expected = weighted(model(inputs), batch).item()
    for count in (1, 3):
        job = runtime.init(ParallelPlan(num_microbatches=count, micro_batch_size=6 // count))
        engine = job.prepare(
            copy.deepcopy(model),
            loss_fn=weighted,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            count_targets=lambda pair: pair["weight"].sum(),
        )
        assert engine.step(inputs, batch).item() == pytest.approx(expected, rel=1e-6)


# fp16


def train_in_fp16(plans: list[ParallelPlan]) -> list[tuple[list[float], float, int]]:
    results = []
    for plan in plans:
        torch.manual_seed(0)
        job, engine = prepared(plan, Decoder(4), precision="fp16", max_grad_norm=1.0, verify="off")
        batches = job.shard(MaskedPairs(36), batch_size=BATCH)
        losses = [engine.step(*batch).item() for batch in batches]
        scale = engine.loss_scale
        results.append((losses, scale.scale, scale.skipped_steps))
    return results


@pytest.mark.ranks
def test_fp16_stays_near_fp32_under_every_kind_of_plan(ranks: RankHarness) -> None:
    torch.manual_seed(0)
    job, engine = prepared(None, Decoder(4), max_grad_norm=1.0)
    expected = [engine.step(*batch).item() for batch in job.shard(MaskedPairs(36), batch_size=BATCH)]
    plans = [plan_of(dp=2, zero_stage=2), plan_of(pp=2, pipeline_schedule="1f1b"), plan_of(tp=2)]
    for results in ranks.run(train_in_fp16, plans, size=2, timeout_s=120.0):
        for (losses, scale, skipped), plan in zip(results, plans, strict=True):
            assert losses == pytest.approx(expected, rel=1e-2), plan.describe()
            assert losses != pytest.approx(expected, rel=1e-7)
            assert (scale, skipped) == (2.0**16, 0)


class Steep(nn.Module):
    """Gradients of this parameter are as large as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0**-20))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.weight * values


def overflow_on_one_rank() -> tuple[list[float], int, int, float]:
    job = runtime.init(precision="fp16")
    engine = job.prepare(
        Steep(),
        loss_fn=lambda outputs, targets: outputs.mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2.0**-24),
    )
    weights = []
    for exponent in (1, 114, 1):  # times 2**16, the gradient of the second is beyond fp32, on rank 1 alone
        value = 2.0**exponent if job.world.rank == 1 else 1.0
        engine.step(torch.full((2, 1), value), torch.zeros(2, 1))
        weights.append(engine.parameters["weight"].item())
    return weights, engine.num_steps, engine.loss_scale.skipped_steps, engine.loss_scale.scale


@pytest.mark.ranks
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(ranks: RankHarness) -> None:
    for weights, num_steps, skipped, scale in ranks.run(overflow_on_one_rank, size=2):
        assert weights[0] == weights[1] > weights[2]
        assert (num_steps, skipped, scale) == (3, 1, 2.0**15)


# Schedulers and compiled blocks


def test_a_scheduler_is_stepped_with_the_engine_and_kept_in_checkpoints(tmp_path: Path) -> None:
    def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    _, engine = prepared(None, Decoder(2), scheduler=warmup)
    batch = (example(), example())
    rates = []
    for _ in range(3):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.step(*batch)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075])
    engine.save(tmp_path / "checkpoint")
    _, other = prepared(None, Decoder(2), scheduler=warmup)
    other.load(tmp_path / "checkpoint")
    for one in (engine, other):
        one.step(*batch)
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        one.step(*batch)
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class HeadsOfAnyNumber(nn.Module):
    """A block whose code names no number of heads, so that it runs on some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given = self.norm(hidden)
        heads = [
            project(given).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).flatten(-2))


class ChosenExperts(HeadsOfAnyNumber):
    """The same with experts that tokens choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4), RoutedExperts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        flat = hidden.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(dim=-1).topk(2)
        return hidden + self.experts(flat, chosen, weights).view_as(hidden)


def train_compiled(
    cases: list[tuple[ParallelPlan, str | None]], layer: type[nn.Module] = HeadsOfAnyNumber
) -> list[tuple[list[float], int]]:
    """Return for each case the losses, and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    found = []
    for plan, backend in cases:
        torch.manual_seed(0)
        counters.clear()
        job, engine = prepared(plan, Transformer(layer, num_layers=2), compile_backend=backend, verify="off")
        batches = job.shard(MaskedPairs(24), batch_size=BATCH)
        found.append(([engine.step(*batch).item() for batch in batches], counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.ranks
def test_compiled_blocks_train_as_plain_ones(ranks: RankHarness) -> None:
    # Shards and stages leave the code of a block as it is, of which a backward pass is compiled in the other cases.
    cases = [
        *with_all([(plan_of(dp=2, zero_stage=3), "eager")]),
        (plan_of(tp=2, sequence_parallel=True), "aot_eager"),
        *with_all([(plan_of(cp=2), "aot_eager")]),
        *with_all([(plan_of(dp=2, zero_stage=3), "aot_eager"), (plan_of(pp=2, pipeline_schedule="1f1b"), "aot_eager")]),
        *with_all([(plan_of(dp=2, recompute="full"), "aot_eager"), (plan_of(tp=2), "aot_eager")]),
        (plan_of(pp=2, pipeline_schedule="zero_bubble", recompute="selective"), "aot_eager"),
    ]
    alone = [(plan_of(), None), (plan_of(recompute="full"), "aot_eager")]
    (expected, none), recomputed = ranks.run_alone(train_compiled, alone)
    assert none == 0
    compiled = ranks.run(train_compiled, cases, size=2, timeout_s=240.0)[0]
    for (plan, _), (losses, num_graphs) in zip([alone[1], *cases], [recomputed, *compiled], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), plan.describe()
        # Both blocks have one code, which what the last step or the other block left behind compiles no second time; of
        # blocks with split tokens the first cuts them and the last joins them.
        assert num_graphs == 1 + plan.sequence_parallel or plan.tp * plan.cp == 1, plan.describe()


@pytest.mark.ranks
def test_experts_of_compiled_blocks_run_uncompiled(ranks: RankHarness) -> None:
    cases = [
        (plan_of(dp=2, ep=2, zero_stage=3), "aot_eager"),
        *with_all([(plan_of(dp=2, ep=2, recompute="selective"), "aot_eager"), (plan_of(cp=2, ep=2), "aot_eager")]),
    ]
    ((expected, _),) = ranks.run_alone(train_compiled, [(plan_of(), None)], ChosenExperts)
    compiled = ranks.run(train_compiled, cases, ChosenExperts, size=2, timeout_s=240.0)[0]
    for (plan, _), (losses, num_graphs) in zip(cases, compiled, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), plan.describe()
        assert num_graphs > 1, plan.describe()  # what stands before the experts, and what behind


def test_experts_that_run_again_are_not_compiled() -> None:
    assert compiled_reason(plan_of(dp=2, ep=2), of_any_model=False) is None
    reason = compiled_reason(plan_of(dp=2, ep=2, recompute="full"), of_any_model=False)
    assert reason is not None
    assert reason.startswith("ep=2, recompute=full:")


def test_a_model_without_blocks_has_nothing_to_compile() -> None:
    with pytest.raises(PlanError, match="no repeated blocks to compile"):
        prepared(None, nn.Bilinear(2, 2, 2), compile_backend="aot_eager")


class Dropping(HeadsOfAnyNumber):
    """Such a block that drops some of what it returns."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden), 0.1, self.training)


def compile_split_blocks() -> list[str]:
    plan = plan_of(tp=2, sequence_parallel=True)
    return [
        message_of(lambda: prepared(plan_of(tp=2), Transformer(), compile_backend="aot_eager")),
        message_of(lambda: prepared(plan, Transformer(Dropping), compile_backend="aot_eager")),
    ]


@pytest.mark.ranks
def test_split_blocks_that_cannot_be_compiled_are_named(ranks: RankHarness) -> None:
    sizes, dropping = ranks.run(compile_split_blocks, size=2)[0]
    assert "compile_backend with tp=2: the code of block layers.0 writes sizes of whole tensors" in sizes
    assert "compile_backend with tp=2: block layers.0 draws random numbers (dropout)" in dropping


def train_reduced(plans: list[ParallelPlan]) -> list[tuple[list[float], list[float]]]:
    return [(_losses_of_sums(plan, "fp32"), _losses_of_sums(plan, "bf16")) for plan in plans]


def _losses_of_sums(plan: ParallelPlan, reduce_dtype: str) -> list[float]:
    torch.manual_seed(0)
    job = runtime.init(plan, precision="bf16")
    model = Transformer(num_layers=2)
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=adamw, verify="off", reduce_dtype=reduce_dtype)
    return [engine.step(*batch).item() for batch in job.shard(MaskedPairs(24), batch_size=BATCH)]


@pytest.mark.ranks
def test_gradients_that_travel_in_16_bits_train_nearly_as_others(ranks: RankHarness) -> None:
    plans = [plan_of(dp=2), plan_of(dp=2, zero_stage=2), plan_of(dp=2, zero_stage=3)]
    for whole, rounded in ranks.run(train_reduced, plans, size=2, timeout_s=240.0)[0]:
        assert rounded[0] == whole[0]  # before any gradient has travelled
        assert rounded != whole
        assert rounded == pytest.approx(whole, rel=5e-3)


def test_gradients_of_a_training_in_fp32_do_not_travel_in_16_bits() -> None:
    with pytest.raises(UsageError, match="reduce_dtype='bf16' in a training with precision fp32"):
        prepared(None, Transformer(), reduce_dtype="bf16")


def write_metrics(path: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train_with_metrics(path)
    return said.getvalue()


def train_with_metrics(path: str) -> None:
    file = PlanFile.from_json(Path(path).read_text(), source=path)
    job = runtime.init(file, metrics=f"{path}.jsonl", shows_progress=False)
    engine = job.prepare(Decoder(2), loss_fn=loss_fn, optimizer=adamw, max_grad_norm=1.0)
    for batch in job.shard(MaskedPairs(36)):
        engine.step(*batch)
    job.close()


@pytest.mark.ranks
def test_rank_0_writes_a_line_for_every_step_and_a_comparison_with_the_plan(ranks: RankHarness, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    estimate = {"step_time_s": 1.0, "peak_memory_bytes": 2**30, "model_flops_per_step": 1e9}
    plan = ParallelPlan(dp=2, micro_batch_size=6)
    path.write_text(json.dumps({"plan": plan.model_dump(mode="json"), "estimate": estimate}))
    said, nothing = ranks.run(write_metrics, str(path), size=2)
    assert nothing == ""
    lines = [json.loads(line) for line in Path(f"{path}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.3)
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(BATCH * TOKENS)
        assert line["grad_norm"] > 0
        assert line["learning_rate"] == 1e-2
        assert line["mfu"] is None  # no data sheet says what this CPU reaches
        assert line["peak_memory_bytes"] > 2**20
    assert len(said.splitlines()) == 1
    assert said.startswith("paraplan: step time ")
    assert "(median of 2" in said
    assert ", predicted 1.00 s (" in said
    assert "predicted 1.00 GiB" in said


# Faults


class Exploding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.factor = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens)) * self.factor


def faults(folder: str) -> dict[str, str]:
    """Return what each fault is reported as on this rank."""
    said = {}
    job, engine = prepared(None, Exploding())
    batch = (example(), example())
    engine.step(*batch)
    engine.save(folder)
    if job.world.rank == 1:
        engine.module.factor = math.nan
    for name, call in (("nan", lambda: engine.step(*batch)), ("after nan", lambda: engine.load(folder))):
        said[name] = message_of(call)
    engine.module.factor = 1.0
    said["steps"] = str(engine.num_steps)
    said["other call"] = message_of(lambda: engine.step(*batch) if job.world.rank else engine.eval_step(*batch))
    if job.world.rank:
        engine.step(*batch)
        job.close()
        return said
    engine.step(*batch)
    said["left"] = message_of(lambda: engine.step(*batch))
    return said


def message_of(call: object) -> str:
    try:
        call()
    except ParaplanError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_faults_of_some_ranks_are_named_on_all(ranks: RankHarness, tmp_path: Path) -> None:
    first, second = ranks.run(faults, str(tmp_path / "checkpoint"), size=2)
    for said in (first, second):
        assert "the loss is nan in step 2 on rank 1; the weights of that step were not saved" in said["nan"]
        assert said["after nan"] == "no error"
        assert said["steps"] == "1"
        assert "after 1 steps rank 0 calls engine.eval_step, and rank 1 engine.step" in said["other call"]
    assert "rank 1 has ended after 2 steps, and rank 0 goes on with step after 2" in first["left"]


def out_of_memory(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_names_the_part_that_was_exceeded_and_a_way_out() -> None:
    parts = {"parameter_bytes": 100, "gradient_bytes": 10**9, "optimizer_state_bytes": 10**9}
    estimate = {"peak_memory_bytes": 3 * 10**9, "memory": parts | {"activation_bytes": 10**9, "workspace_bytes": 0}}
    for smaller, hint in ((None, "micro_batch_size=2 with twice the micro-batches or recompute=full"), ("pp2", "pp2")):
        file = {"plan": {"micro_batch_size": 4}, "estimate": estimate | {"smaller_plan": smaller}}
        job = runtime.init(PlanFile.from_json(json.dumps(file), source="plan"), shows_progress=False)
        engine = job.prepare(Decoder(2), loss_fn=out_of_memory, optimizer=adamw)
        with pytest.raises(RankMemoryError) as raised:
            engine.step(torch.zeros(4, TOKENS, dtype=torch.long), torch.zeros(4, TOKENS, dtype=torch.long))
        assert "rank 0 is out of memory in step 1" in raised.value.message
        assert "(100 B predicted)" in raised.value.message
        assert (
            "more than predicted: parameters. CUDA out of memory. Tried to allocate 2.00 GiB." in raised.value.message
        )
        assert hint in raised.value.hint
