"""What `loss_fn` may return: loss and gradients of a divided batch are those of one process, or it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_transformers
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, VOCABULARY, Decoder

from paraplan import runtime
from paraplan.errors import ParaplanError, UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.checks.comparison import ROUNDING, Comparison
from paraplan.runtime.engine import Engine
from paraplan.runtime.mesh import build_mesh
from paraplan.runtime.world import read_world

BATCH = 4
Targets = dict[str, torch.Tensor]
Loss = Callable[[Any, Any], Any]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# What a loss may compute


def token_losses(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the loss of every target, also of those that the mask leaves out."""
    return F.cross_entropy(logits.flatten(0, 1), targets["tokens"].flatten(), reduction="none")


def mask_of(targets: Targets) -> torch.Tensor:
    return targets["mask"].flatten()


def ignored(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets["labels"].flatten())


def weighed_classes(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    weight = torch.linspace(0.1, 2.0, VOCABULARY)
    return F.cross_entropy(logits.flatten(0, 1), targets["labels"].flatten(), weight=weight)


def another_index(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    labels = targets["labels"].clamp(min=-1).flatten()
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels, ignore_index=-1)


def smoothed(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.flatten(0, 1), targets["labels"].flatten())


def masked_sum(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (token_losses(logits, targets) * mask_of(targets)).sum() / mask_of(targets).sum()


def clamped(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (token_losses(logits, targets) * mask_of(targets)).sum() / mask_of(targets).sum().clamp(min=1)


def kept_from_zero(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (token_losses(logits, targets) * mask_of(targets)).sum() / (mask_of(targets).sum() + 1e-8)


def read_count(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (token_losses(logits, targets) * mask_of(targets)).sum() / mask_of(targets).sum().item()


def shares(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (token_losses(logits, targets) * mask_of(targets) / mask_of(targets).sum().clamp(min=1)).sum()


def picked(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return token_losses(logits, targets)[mask_of(targets).bool()].mean()


def selected(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return token_losses(logits, targets).masked_select(mask_of(targets) > 0).mean()


def with_z_loss(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    mask, z = mask_of(targets), logits.logsumexp(-1).flatten().square()
    z_loss = (z * mask).sum() / mask.sum().clamp(min=1)
    return masked_sum_of_one_mask(token_losses(logits, targets), mask) + 1e-2 * z_loss


def masked_sum_of_one_mask(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def two_means(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    labels = targets["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels) + 0.3 * F.cross_entropy(-logits.flatten(0, 1), labels)


def added_up(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """As code adds that begins with zeros: means over targets, over those but the first, and over all logits."""
    total = torch.zeros((), device=logits.device)
    total += ignored(logits, targets)
    total += 0.3 * F.cross_entropy(logits[:, 1:].flatten(0, 1), targets["labels"][:, 1:].flatten()) - 1
    total -= logits.square().mean() / 100
    total *= 2
    return total


def side_by_side(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return torch.stack([masked_sum(logits, targets), logits.square().mean(), of_all(logits, targets)]).mean()


def without_nan(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return token_losses(logits, targets).masked_fill(mask_of(targets) == 0, torch.nan).nanmean()


def of_all(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return F.mse_loss(logits.sigmoid().mean(-1), targets["mask"])


def plain_mean(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return token_losses(logits, targets).mean()


def soft_targets(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    wanted = F.one_hot(targets["tokens"], VOCABULARY).float() * 0.8 + 0.2 / VOCABULARY
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


def divergence(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    wanted = F.one_hot(targets["tokens"], VOCABULARY).float() * 0.8 + 0.2 / VOCABULARY
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")


def summed(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets["labels"].flatten(), reduction="sum")


def sum_and_count(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    return (token_losses(logits, targets) * mask_of(targets)).sum(), mask_of(targets).sum()


LOSSES: dict[str, Loss] = {
    one.__name__: one
    for one in (
        ignored,
        another_index,
        smoothed,
        masked_sum,
        clamped,
        kept_from_zero,
        read_count,
        shares,
        picked,
        selected,
        with_z_loss,
        two_means,
        without_nan,
        sum_and_count,
    )
}
SEQUENCES: dict[str, Loss] = {one.__name__: one for one in (of_all, plain_mean, soft_targets, divergence)}
"""Means over all targets, of which `labels` leave some out."""
OTHERWISE: dict[str, Loss] = {one.__name__: one for one in (weighed_classes, added_up, side_by_side, summed)}


def batch_of(masked: int, size: int = BATCH) -> tuple[torch.Tensor, Targets]:
    """Return a batch with another number of targets in each sequence, and none in sequence `masked`."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=generator)
    mask = (torch.arange(TOKENS) <= torch.arange(size)[:, None] + 1).float()
    mask[masked] = 0
    targets = tokens[:, 1:]
    return tokens[:, :-1], {"tokens": targets, "mask": mask, "labels": targets.masked_fill(mask == 0, -100)}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(2)


def plain(name: str, masked: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of the whole batch in plain torch."""
    model, (inputs, targets) = model_of(), batch_of(masked)
    loss = (LOSSES | SEQUENCES | OTHERWISE)[name](model(inputs), targets)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.item(), {key: value.grad for key, value in model.named_parameters()}


def prepared(loss: Loss, plan: ParallelPlan | None, model: nn.Module | None = None, **options: Any) -> Engine:
    job = runtime.init(plan, shows_progress=False)
    example = torch.zeros(2, TOKENS, dtype=torch.long)
    return job.prepare(model or model_of(), loss_fn=loss, optimizer=sgd, **({"example_inputs": example} | options))


def share_of(batch: tuple[torch.Tensor, Targets], plan: ParallelPlan) -> tuple[torch.Tensor, Targets]:
    """Return this rank's share of a batch under a plan of dp alone."""
    rank = torch.distributed.get_rank() if plan.dp > 1 else 0
    size = len(batch[0]) // plan.dp
    rows = slice(rank * size, (rank + 1) * size)
    return batch[0][rows], {key: value[rows] for key, value in batch[1].items()}


def divided(name: str, plan: ParallelPlan, masked: int, **options: Any) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return the losses of eval_step and step, and the gradients, of a batch that `plan` divides."""
    engine = prepared((LOSSES | SEQUENCES)[name], plan, **options)
    batch = share_of(batch_of(masked), plan)
    losses = engine.eval_step(*batch).item(), engine.step(*batch).item()
    return *losses, {key: engine.whole(key, value.grad) for key, value in engine.parameters.items()}


def cut_into(count: int, **fields: Any) -> ParallelPlan:
    dp = fields.get("dp", 1)
    return ParallelPlan(num_microbatches=count, micro_batch_size=BATCH // count // dp, **fields)


def assert_same(
    found: tuple[float, float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]], case: str
) -> None:
    assert found[:2] == (pytest.approx(expected[0], rel=1e-6),) * 2, case
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-5, atol=1e-6, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_have_the_loss_and_the_gradients_of_the_whole_batch(name: str) -> None:
    # The check of the first step looks at two sequences: at the one without targets, and not.
    for masked, counts in ((0, (4, *with_all([1, 2]))), (2, (2, *with_all([1, 4])))):
        expected = plain(name, masked)
        for count in counts:
            assert_same(divided(name, cut_into(count), masked), expected, f"{name}, {count}, {masked}")


def test_a_mean_over_all_targets_is_that_of_the_batch_where_these_are_counted() -> None:
    for name in SEQUENCES:
        found = divided(name, cut_into(2), 2, count_targets=lambda targets: float(len(targets["mask"])))
        assert_same(found, plain(name, 2), name)


def told(caplog: pytest.LogCaptureFixture, loss: Loss, plan: ParallelPlan, **options: Any) -> list[str]:
    """Return what a first step says."""
    caplog.clear()
    prepared(loss, plan, **options).step(*batch_of(2))
    return [record.getMessage() for record in caplog.records]


def test_a_mean_over_other_targets_than_are_counted_is_told_with_both_losses(caplog: pytest.LogCaptureFixture) -> None:
    for name in (*SEQUENCES, "weighed_classes"):
        (said,) = told(caplog, (SEQUENCES | OTHERWISE)[name], cut_into(4))
        words, number = said.split(" of the whole batch, ")[0].rsplit(" ", 1)
        assert words == "the mean of loss_fn goes over other targets than are counted: loss", name
        assert float(number) == pytest.approx(plain(name, 2)[0], rel=1e-6)
        assert "return (loss_sum, count) from loss_fn, or give job.prepare(" in said
    (said,) = told(caplog, summed, cut_into(4))
    assert said.startswith("loss_fn returns a sum, and is taken for a mean over its micro-batch: loss ")
    for loss in (added_up, side_by_side):
        assert len(told(caplog, loss, cut_into(4))) == 1
    for loss in (ignored, masked_sum, sum_and_count):
        assert told(caplog, loss, cut_into(4)) == []


def over_positives(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * targets.flatten()).sum() / targets.sum().clamp(min=1)


def in_pairs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compare sequences with their neighbours, which no cut parts."""
    return F.mse_loss(logits[::2] * targets[::2, :, None], logits[1::2])


def test_counts_of_other_targets_are_told_where_parts_have_as_many_of_them(caplog: pytest.LogCaptureFixture) -> None:
    tokens = batch_of(2)[0]
    rows = torch.tensor([3, 1, 1, 3])  # positives of each sequence: four in each of two parts, as in their mean
    targets = (torch.arange(TOKENS) < rows[:, None]).long()
    for loss, said in ((over_positives, 1), (in_pairs, 0)):
        caplog.clear()
        prepared(loss, cut_into(2)).step(tokens, targets)
        assert len(caplog.records) == said, loss.__name__
        assert all("the mean of loss_fn goes over other targets" in one.getMessage() for one in caplog.records)
    caplog.clear()
    prepared(over_positives, cut_into(2)).step(tokens, targets[1:2].repeat(BATCH, 1))  # as many in every sequence
    assert not caplog.records


def test_the_index_that_a_loss_ignores_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    inputs, targets = batch_of(2)
    labels = targets["labels"].clamp(min=0).flatten(0, 1).view(BATCH, TOKENS)
    reference = model_of()
    expected = F.cross_entropy(reference(inputs).flatten(0, 1), labels.flatten(), ignore_index=0)

    class Loss(nn.CrossEntropyLoss):
        def forward(self, logits: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return super().forward(logits.flatten(0, 1), given.flatten())

    engine = prepared(Loss(ignore_index=0), cut_into(2))
    assert engine.step(inputs, labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert not caplog.records


# Losses that the model computes


class OwnLoss(nn.Module):
    """Computes its loss itself, from labels among its inputs, which it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.decoder(tokens)
        kept = (labels[:, 1:] != -100).float()
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return {"logits": logits, "loss": (losses.view_as(kept) * kept).sum() / kept.sum()}


def own_loss(outputs: dict[str, torch.Tensor], targets: Any) -> torch.Tensor:
    return outputs["loss"]


def labelled(masked: int) -> dict[str, torch.Tensor]:
    inputs, targets = batch_of(masked)
    return {"tokens": inputs, "labels": targets["labels"]}


def test_a_loss_that_the_model_computes_counts_its_targets() -> None:
    for masked in (0, 2):
        torch.manual_seed(0)
        model = OwnLoss()
        reference = copy.deepcopy(model)
        reference(**labelled(masked))["loss"].backward()
        loss = reference(**labelled(masked))["loss"].item()
        for count in (1, 2, 4):
            counted = {"example_inputs": None, "count_targets": lambda labels: (labels[:, 1:] != -100).sum()}
            engine = prepared(own_loss, cut_into(count), copy.deepcopy(model), **counted)
            batch = labelled(masked)
            assert engine.step(batch, batch["labels"]).item() == pytest.approx(loss, rel=1e-6)
            for name, one in reference.named_parameters():
                torch.testing.assert_close(engine.parameters[name].grad, one.grad, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_model_of_transformers_counts_the_labels_that_it_shifts() -> None:
    for family in ("llama", "gpt2"):
        torch.manual_seed(0)
        model = tiny_transformers.build(family)
        inputs, targets = batch_of(2)
        batch = {"input_ids": inputs, "labels": targets["labels"]}
        reference = copy.deepcopy(model)
        expected = reference(**batch).loss
        expected.backward()
        for count in (2, 4):
            engine = prepared(lambda x, t: x.loss, cut_into(count), copy.deepcopy(model), example_inputs=None)
            assert engine.step(batch, torch.zeros(BATCH)).item() == pytest.approx(expected.item(), rel=1e-6)
            for name, one in reference.named_parameters():
                torch.testing.assert_close(engine.parameters[name].grad, one.grad, rtol=1e-5, atol=1e-6)


def test_models_of_transformers_that_compute_a_loss_by_themselves_shift_nothing() -> None:
    sizes = {"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    sizes |= {f"{part}_{name}": 16 for part in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    sizes |= {"max_position_embeddings": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model("marian", **sizes)
    config.use_cache = False
    model = transformers.MarianMTModel(config)
    inputs, targets = batch_of(2)
    batch = {"input_ids": inputs, "labels": targets["labels"]}
    expected = copy.deepcopy(model)(**batch).loss.item()  # by name its loss is that of causal models
    engine = prepared(lambda x, t: x.loss, cut_into(4), model, example_inputs=None)
    assert engine.step(batch, torch.zeros(BATCH)).item() == pytest.approx(expected, rel=1e-6)


def test_targets_that_the_user_counts_may_be_none_in_a_micro_batch() -> None:
    expected = plain("masked_sum", 2)
    engine = prepared(masked_sum, cut_into(4), count_targets=lambda targets: targets["mask"].sum())
    assert engine.step(*batch_of(2)).item() == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(engine.parameters[name].grad, gradient, rtol=1e-5, atol=1e-6)


# Forms, and numbers beside the loss


def hits(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return ((logits.argmax(-1) == targets["tokens"]) * targets["mask"]).sum()


def with_metrics(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, dict[str, Any]]:
    z = (logits.logsumexp(-1) * targets["mask"]).sum() / targets["mask"].sum().clamp(min=1)
    return masked_sum(logits, targets), {"z": z, "accuracy": (hits(logits, targets), targets["mask"].sum())}


def sum_with_metrics(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    return *sum_and_count(logits, targets), with_metrics(logits, targets)[1]


def with_extremes(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, dict[str, Any]]:
    z = logits.logsumexp(-1)
    return masked_sum(logits, targets), {"top": (z.max(), "max"), "least": (z.min(), "min"), "rows": (len(z), "sum")}


def extremes_of(plan: ParallelPlan) -> dict[str, float]:
    engine = prepared(with_extremes, plan)
    engine.step(*share_of(batch_of(2), plan))
    return {name: value.item() for name, value in engine.metrics.items()}


def with_perplexity(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    total, count = sum_and_count(logits, targets)
    return total, count, {"perplexity": (total / count).exp()}


def test_a_metric_that_is_no_mean_is_told(caplog: pytest.LogCaptureFixture) -> None:
    batch = batch_of(2)
    prepared(with_perplexity, cut_into(4)).step(*batch)
    (said,) = [one.getMessage() for one in caplog.records]
    whole = with_perplexity(model_of()(batch[0]), batch[1])[2]["perplexity"].item()
    assert said.startswith(f"a metric is no mean over its targets: {whole:.6g} of the whole batch, ")


def test_metrics_that_are_no_means_are_brought_together_as_they_say() -> None:
    with torch.no_grad():
        z = model_of()(batch_of(2)[0]).logsumexp(-1)
    expected = {"top": z.max().item(), "least": z.min().item(), "rows": BATCH}
    for count in (1, 4):
        assert extremes_of(cut_into(count)) == pytest.approx(expected, rel=1e-5)


def expected_metrics() -> tuple[float, float]:
    """Return the z and the accuracy of the whole batch."""
    with torch.no_grad():
        _, metrics = with_metrics(model_of()(batch_of(2)[0]), batch_of(2)[1])
    return metrics["z"].item(), float(metrics["accuracy"][0] / metrics["accuracy"][1])


def found_metrics(plan: ParallelPlan) -> list[tuple[float, float]]:
    """Return them as eval_step and step of an engine give them, for both forms of a loss."""
    found = []
    for loss in (with_metrics, sum_with_metrics):
        engine = prepared(loss, plan)
        batch = share_of(batch_of(2), plan)
        for call in (engine.eval_step, engine.step):
            call(*batch)
            assert list(engine.metrics) == ["z", "accuracy"]
            found.append((engine.metrics["z"].item(), engine.metrics["accuracy"].item()))
    return found


def test_metrics_beside_the_loss_are_those_of_the_whole_batch() -> None:
    for count in (1, 2, 4):
        assert found_metrics(cut_into(count)) == [pytest.approx(expected_metrics(), rel=1e-5)] * 4


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda x, t: (plain_mean(x, t), torch.ones(2)), r"returned a tensor of shape \(2,\) as its count"),
        (lambda x, t: (plain_mean(x, t), "four"), "returned str as its count"),
        (lambda x, t: (plain_mean(x, t), -4), "returned -4 as its count"),
        (lambda x, t: (plain_mean(x, t), torch.tensor(-4.0)), "returned -[0-9]+ as its count"),
        (lambda x, t: (plain_mean(x, t), 1, 2), "returned 3 values"),
        (lambda x, t: (plain_mean(x, t), {"acc": torch.ones(2)}), "returned the metric 'acc' as Tensor"),
        (lambda x, t: (plain_mean(x, t), {"acc": (1, 2, 3)}), "returned the metric 'acc' as tuple"),
        (lambda x, t: (plain_mean(x, t), {3: 1.0}), "returned the metric 3 as float"),
        (lambda x, t: {"loss": plain_mean(x, t)}, "returned dict, not one number"),
        (lambda x, t: [plain_mean(x, t)], "returned list, not one number"),
        (lambda x, t: None, "returned NoneType, not one number"),
        (lambda x, t: (plain_mean(x, t).detach(), 4), "returned a number that has no gradient"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_loss_may_not_return_is_said(bad: Loss, words: str, count: int) -> None:
    engine = prepared(bad, cut_into(count))
    before = copy.deepcopy(engine.module.state_dict())
    with pytest.raises(UsageError, match=f"loss_fn {words}"):
        engine.step(*batch_of(2))
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())


def test_steps_that_count_no_target_are_told_and_refused_where_all_do(caplog: pytest.LogCaptureFixture) -> None:
    for count in (1, 2):
        engine = prepared(lambda x, t: (plain_mean(x, t), 0), cut_into(count))
        engine.step(*batch_of(2))
        assert "step 1 trains nothing: its loss goes over 0 targets" in caplog.text
        with pytest.raises(UsageError, match="has counted 0 targets in each of 2 steps"):
            engine.step(*batch_of(2))
    empty = prepared(masked_sum, cut_into(2), count_targets=lambda targets: 0.0 * targets["mask"].sum())
    assert empty.step(*batch_of(2)).item() == 0.0
    with pytest.raises(UsageError, match="has counted 0 targets in each of 2 steps"):
        empty.step(*batch_of(2))


def test_another_metric_in_a_later_step_is_refused() -> None:
    name = "first"
    engine = prepared(lambda x, t: (plain_mean(x, t), {name: 1.0}), None)
    engine.step(*batch_of(2))
    engine.step(*batch_of(2))
    name = "second"
    with pytest.raises(UsageError, match="the metric 'second', which it did not return at first"):
        engine.step(*batch_of(2))


# Refusals


def contrastive(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Compare the sequences of a batch with each other."""
    vectors = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(vectors)))


def balance(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Add what routers of experts are kept balanced by: a product of means over the batch."""
    shares = logits.softmax(-1).flatten(0, 1)
    chosen = F.one_hot(shares.argmax(-1), VOCABULARY).float()
    return ignored(logits, targets) + 10 * VOCABULARY * (shares.mean(0) * chosen.mean(0)).sum()


def varied(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Add the square of a mean over the batch, which is near a mean with other weights."""
    return ignored(logits, targets) + 0.1 * logits.softmax(-1).flatten(0, 1).mean(0).square().sum()


def over_the_deviation(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return plain_mean(logits, targets) / logits.std()


TWO_STAGES = ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2)
COMPARING = {"contrastive": contrastive, "balance": balance, "varied": varied, "over_the_deviation": over_the_deviation}


def refusal(engine: Engine, batch: tuple[torch.Tensor, Targets]) -> str:
    """Return what a step is refused with, once it is seen that it has changed nothing."""
    before = copy.deepcopy(engine.module.state_dict())
    try:
        engine.step(*batch)
    except ParaplanError as error:
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("name", COMPARING)
def test_a_loss_that_compares_sequences_is_told_or_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = told(caplog, COMPARING[name], cut_into(2))
    model, (inputs, targets) = model_of(), batch_of(2)
    whole = COMPARING[name](model(inputs), targets).item()
    words, number = said.split(" of the whole batch, ")[0].rsplit(" ", 1)
    assert (words, float(number)) == ("this model compares samples: loss", pytest.approx(whole, rel=1e-6))
    assert " in 2 parts; parts are computed by themselves, as DDP does" in said
    engine = prepared(COMPARING[name], cut_into(2), batch_coupling="refuse")
    assert refusal(engine, batch_of(2)).startswith("UnsupportedPlanError: this model compares samples: loss ")
    assert told(caplog, COMPARING[name], cut_into(1)) == []


@pytest.mark.parametrize("plan", [cut_into(2), TWO_STAGES], ids=["micro-batches", "stages"])
def test_outputs_are_gathered_only_where_they_are_there_together(plan: ParallelPlan) -> None:
    job = runtime.init(ParallelPlan(), shows_progress=False)
    with pytest.raises(UnsupportedPlanError, match="batch_coupling='gather' needs the outputs of a whole step at once"):
        replace(job, mesh=replace(job.mesh, plan=plan)).prepare(
            model_of(), loss_fn=contrastive, optimizer=sgd, batch_coupling="gather"
        )


class Noisy(nn.Module):
    """Draws noise in evaluation too, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(tokens)
        return logits + torch.randn_like(logits)


def test_noise_in_evaluation_is_no_comparison_of_sequences(caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    prepared(plain_mean, cut_into(2), Noisy(), count_targets=lambda given: float(len(given["mask"]))).step(*batch_of(2))
    assert not caplog.records


class _LessItsMean(torch.autograd.Function):
    """Couples the sequences of a batch in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] - gradients[0].mean(0, keepdim=True)


def less_its_mean(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return ignored(_LessItsMean.apply(logits), targets)  # type: ignore[no-untyped-call]


def slightly_balanced(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Add a term that moves the loss by less than rounding does, and its gradients by more."""
    shares = logits.softmax(-1).flatten(0, 1)
    return ignored(logits, targets) + 0.01 * (shares.mean(0) * shares.mean(0)).sum()


def of_gradients(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Add what gradients within the loss come to, for which a pass without them is none."""
    (gradient,) = torch.autograd.grad(token_losses(logits, targets).sum(), logits, create_graph=True)
    return plain_mean(logits, targets) + gradient.square().mean()


def test_a_loss_that_takes_gradients_is_tried_with_them(caplog: pytest.LogCaptureFixture) -> None:
    counted = {"count_targets": lambda targets: float(len(targets["mask"]))}
    assert told(caplog, of_gradients, cut_into(2), **counted) == []
    whole = told(caplog, lambda logits, targets: of_gradients(logits, targets).sqrt(), cut_into(2), **counted)
    assert len(whole) == 1


BY_GRADIENTS = {"in the backward pass": less_its_mean, "by a small term": slightly_balanced}


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_what_shows_in_gradients_alone_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = told(caplog, BY_GRADIENTS[name], cut_into(2))
    assert said.startswith("this model compares samples: the gradient of ")
    assert " off in 2 parts with weights shaken a little, and the loss is alike" in said


def test_what_lies_behind_zeros_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.gate = Decoder(2), nn.Parameter(torch.zeros(()))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = self.decoder(tokens)
            return logits - self.gate * logits.mean(0, keepdim=True)

    caplog.clear()
    prepared(ignored, cut_into(2), Mixing()).step(*batch_of(2))
    (record,) = caplog.records
    assert record.getMessage().startswith("this model compares samples: loss ")


class OwnCasts(nn.Module):
    """A decoder that casts by itself, as scripts with a `with autocast` of their own do; `couples` compares samples."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.decoder, self.couples = Decoder(2), couples

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.decoder(tokens)
        return logits.float() * (2.0 if not self.couples else 2.0 + logits.float().std(0, keepdim=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rounding_of_a_model_that_casts_by_itself_is_not_told(
    precision: TrainingPrecision, caplog: pytest.LogCaptureFixture
) -> None:
    for couples in (False, True):
        torch.manual_seed(0)
        caplog.clear()
        job = runtime.init(cut_into(2), precision=precision, shows_progress=False)
        engine = job.prepare(OwnCasts(couples), loss_fn=ignored, optimizer=sgd)
        engine.step(*batch_of(2))
        assert ["compares samples" in one.getMessage() for one in caplog.records] == [True] * couples


def test_a_term_that_begins_later_is_told_where_a_step_is_checked_again(caplog: pytest.LogCaptureFixture) -> None:
    strength = 0.0

    def growing(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
        return ignored(logits, targets) + strength * contrastive(logits, targets)

    said = []
    engine = prepared(growing, cut_into(2))
    for step in range(1, 11):
        caplog.clear()
        engine.step(*batch_of(2))
        said.append(len(caplog.records))
        strength = 0.1 * (step > 2)
    assert said == [0] * 9 + [1]
    seldom = prepared(growing, cut_into(2), verify_every=0)
    caplog.clear()
    strength = 0.0
    for later in (0.1, 0.1, 0.1):
        seldom.step(*batch_of(2))
        strength = later
    assert not caplog.records


def test_forms_of_a_loss_stay() -> None:
    forms = {"sums": True}

    def changing(logits: torch.Tensor, targets: Targets) -> Any:
        return sum_and_count(logits, targets) if forms["sums"] else masked_sum(logits, targets)

    engine = prepared(changing, cut_into(2))
    engine.step(*batch_of(2))
    forms["sums"] = False
    with pytest.raises(UsageError, match=r"a mean for some micro-batches, and \(loss_sum, count\) for others"):
        engine.step(*batch_of(2))


# Ranks


DIVIDED = (
    "ignored",
    "masked_sum",
    "read_count",
    "picked",
    "with_z_loss",
    "without_nan",
    "sum_and_count",
)


def losses_on_ranks(sharded: Sequence[str]) -> tuple[dict[str, Any], list[Any], dict[str, str]]:
    losses = {}
    for name in with_all(DIVIDED) or (*sharded, "read_count", "with_z_loss"):
        for count, masked in ((1, 2), (2, 0)) if with_all(DIVIDED) else ((1, 2) if name in sharded else (2, 0),):
            losses[f"{name} {count} {masked}"] = divided(name, cut_into(count, dp=2), masked)
    for name in sharded:
        losses[f"{name} 1 1"] = divided(name, cut_into(1, dp=2, zero_stage=2), 1)
    metrics = [found_metrics(cut_into(2, dp=2)), found_metrics(TWO_STAGES)]
    assert extremes_of(cut_into(2, dp=2)) == pytest.approx(extremes_of(TWO_STAGES), rel=1e-5)
    plan = cut_into(1, dp=2)
    strict = {"batch_coupling": "refuse"}
    refused = {
        name: refusal(prepared(loss, plan, **strict), share_of(batch_of(2), plan))
        for name, loss in COMPARING.items()
        if name == "contrastive" or with_all([name])  # micro-batches are refused with each, above
    }
    refused["stages"] = refusal(prepared(balance, TWO_STAGES, **strict), batch_of(2))
    of_stages = [*BY_GRADIENTS.items()][:1] + with_all([*BY_GRADIENTS.items()][1:])
    for place, divided_by in enumerate((plan, cut_into(1, dp=2, zero_stage=3), TWO_STAGES)):
        for name, loss in of_stages if place else with_all([*BY_GRADIENTS.items()]):
            batch = share_of(batch_of(2), divided_by)
            refused[f"{name} {place}"] = refusal(prepared(loss, divided_by, **strict), batch)
    return losses, metrics, refused


def inside(model: nn.Module) -> nn.Module:
    """Have `model` return a loss of its batch beside its outputs."""
    plain_forward = model.forward
    model.forward = lambda ids: (out := plain_forward(ids), contrastive(out, {}))  # type: ignore[method-assign]
    return model


def gathered_losses() -> tuple[dict[str, Any], dict[str, str]]:
    """Return what losses over the global batch come to under plans of data parallelism, and what is refused."""
    found, refused = {}, {}
    for plan in (cut_into(1, dp=2), cut_into(1, dp=2, zero_stage=3)):
        chosen = [*COMPARING.items()] if not plan.zero_stage or with_all(["shards too"]) else [*COMPARING.items()][:1]
        for name, loss in chosen:
            engine = prepared(loss, plan, batch_coupling="gather")
            batch = share_of(batch_of(2), plan)
            losses = engine.eval_step(*batch).item(), engine.step(*batch).item()
            gradients = {key: engine.whole(key, value.grad) for key, value in engine.parameters.items()}
            found[f"{name} {plan.zero_stage}"] = (*losses, gradients)
        options = {"batch_coupling": "gather"}
        own = prepared(lambda outputs, _: outputs[1], plan, inside(model_of()), **options)
        refused[f"in the model {plan.zero_stage}"] = refusal(own, batch)
    uneven = prepared(contrastive, plan, batch_coupling="gather")
    rank = torch.distributed.get_rank()
    refused["uneven"] = refusal(uneven, (batch[0][rank:], {key: value[rank:] for key, value in batch[1].items()}))
    whole = prepared(contrastive, ParallelPlan(tp=2, micro_batch_size=4), batch_coupling="gather")
    found["contrastive tp"] = (*[whole.step(*batch_of(2)).item()] * 2, {})
    return found, refused


@pytest.mark.ranks
def test_a_loss_over_the_global_batch_is_that_of_one_process_where_its_outputs_are_gathered(ranks: RankHarness) -> None:
    for found, refused in ranks.run(gathered_losses, size=2):
        for case, values in found.items():
            model, (inputs, targets) = model_of(), batch_of(2)
            loss = COMPARING[case.split()[0]](model(inputs), targets)
            loss.backward()
            gradients = {key: value.grad for key, value in model.named_parameters() if key in values[2]}
            assert_same(values, (loss.item(), gradients), case)
        assert "batch_coupling='gather', and the ranks have [2, 1] sequences" in refused.pop("uneven")
        for said in refused.values():
            assert "where its outputs are gathered from dp=2 ranks: loss_fn does not compute it" in said


@pytest.mark.ranks
def test_ranks_have_losses_gradients_metrics_and_refusals_of_one_process(ranks: RankHarness) -> None:
    # Gradients are summed the same way whatever weighs them: a mean, a mask, a sum, and a sum with its count.
    sharded = with_all(DIVIDED) or ("ignored", "sum_and_count")
    for losses, metrics, refused in ranks.run(losses_on_ranks, sharded, size=2):
        for case, found in losses.items():
            name, _, masked = case.split()
            assert_same(found, plain(name, int(masked)), case)
        assert metrics == [[pytest.approx(expected_metrics(), rel=1e-5)] * 4] * 2
        for name, said in refused.items():
            kind = "the gradient of " if name.startswith(tuple(BY_GRADIENTS)) else "loss "
            assert said.startswith(f"UnsupportedPlanError: this model compares samples: {kind}"), name


@pytest.mark.parametrize(
    ("elements", "off", "is_told"), [(64, 3e-5, True), (64, 5e-6, False), (1, 3e-5, False), (1, 3e-4, True)]
)
def test_a_gradient_of_few_elements_may_be_further_off_for_what_they_sum_may_cancel(
    elements: int, off: float, is_told: bool
) -> None:
    expected = {"gate": torch.full((elements,), 0.1), "weight": torch.ones(64)}
    found = {"gate": expected["gate"] * (1.0 + off), "weight": expected["weight"]}
    worst = Comparison.of(1.0, 1.0, found, expected).worst(ROUNDING[False], build_mesh(ParallelPlan(), read_world({})))
    assert (worst is not None) is is_told
