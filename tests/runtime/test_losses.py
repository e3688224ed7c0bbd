"""What `loss_fn` may return: the loss and gradients of a batch that is divided are those of one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_transformers
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, VOCABULARY, Decoder

from paraplan import runtime
from paraplan.errors import ParaplanError, UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.engine import Engine

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
        weighed_classes,
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
        added_up,
        side_by_side,
        without_nan,
        of_all,
        plain_mean,
        soft_targets,
        divergence,
        summed,
        sum_and_count,
    )
}


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
    loss = LOSSES[name](model(inputs), targets)
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


def divided(name: str, plan: ParallelPlan, masked: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return the losses of eval_step and step, and the gradients, of a batch that `plan` divides."""
    engine = prepared(LOSSES[name], plan)
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
            engine = prepared(own_loss, cut_into(count), copy.deepcopy(model), example_inputs=None)
            assert engine.step(labelled(masked), torch.zeros(BATCH)).item() == pytest.approx(loss, rel=1e-6)
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


def test_another_metric_in_a_later_step_is_refused() -> None:
    names = iter(["first", "first", "second"])
    engine = prepared(lambda x, t: (plain_mean(x, t), {next(names): 1.0}), None)
    engine.step(*batch_of(2))
    engine.step(*batch_of(2))
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


def over_the_deviation(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    return plain_mean(logits, targets) / logits.std()


TWO_STAGES = ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2)
REFUSED = {"contrastive": contrastive, "balance": balance, "over_the_deviation": over_the_deviation}


def refusal(engine: Engine, batch: tuple[torch.Tensor, Targets]) -> str:
    """Return what a step is refused with, once it is seen that it has changed nothing."""
    before = copy.deepcopy(engine.module.state_dict())
    try:
        engine.step(*batch)
    except ParaplanError as error:
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_does_not_add_up_over_the_parts_of_a_batch_is_refused(name: str) -> None:
    said = refusal(prepared(REFUSED[name], cut_into(2)), batch_of(2))
    assert "UnsupportedPlanError: the loss of two sequences together is " in said
    assert "does not add up over the parts of a batch, which dp=1 x num_microbatches=2 divides" in said
    assert "return (loss_sum, count) from loss_fn" in said
    assert refusal(prepared(REFUSED[name], cut_into(1)), batch_of(2)) == "no error"


@pytest.mark.parametrize("plan", [cut_into(2), TWO_STAGES], ids=["micro-batches", "stages"])
def test_outputs_are_gathered_only_where_they_are_there_together(plan: ParallelPlan) -> None:
    job = runtime.init(ParallelPlan(), shows_progress=False)
    with pytest.raises(UnsupportedPlanError, match="gather_outputs needs the outputs of a whole step at once"):
        replace(job, plan=plan).prepare(model_of(), loss_fn=contrastive, optimizer=sgd, gather_outputs=True)


def test_a_loss_that_becomes_something_else_is_refused() -> None:
    calls: list[int] = []

    def changing(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
        calls.append(1)
        return masked_sum(logits, targets) if len(calls) <= tried else logits.std()

    tried = 10**6
    prepared(changing, cut_into(2)).step(*batch_of(2))
    tried, calls = len(calls), []
    engine = prepared(changing, cut_into(2))
    engine.step(*batch_of(2))
    with pytest.raises(UsageError, match="a mean over a known number of targets at first, and now something else"):
        engine.step(*batch_of(2))


def means_over_two_masks(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    losses, other = token_losses(logits, targets), targets["other"].flatten()
    return masked_sum_of_one_mask(losses, mask_of(targets)) + masked_sum_of_one_mask(losses.square(), other)


@pytest.mark.parametrize("in_proportion", [True, False])
def test_means_over_other_numbers_of_targets_are_counted_before_a_step_where_these_are_in_no_proportion(
    in_proportion: bool,
) -> None:
    inputs, targets = batch_of(2)
    targets["mask"] = torch.ones(BATCH, TOKENS)
    targets["other"] = torch.ones(BATCH, TOKENS)
    targets["other"][:, 0] = 0.0
    targets["other"][3, 1] = float(in_proportion)
    reference = model_of()
    expected = means_over_two_masks(reference(inputs), targets)
    expected.backward()
    passes: list[int] = []

    def noted(logits: torch.Tensor, given: Targets) -> torch.Tensor:
        passes.append(len(logits))
        return means_over_two_masks(logits, given)

    engine = prepared(noted, cut_into(2))
    assert engine.eval_step(inputs, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    for once in (2, 6), (2, 4):
        passes.clear()
        engine.optimizer.param_groups[0]["lr"] = 0.0
        assert engine.step(inputs, targets).item() == pytest.approx(expected.item(), rel=1e-6)
        for name, one in reference.named_parameters():
            torch.testing.assert_close(engine.parameters[name].grad, one.grad, rtol=1e-5, atol=1e-6)
        assert len(passes) == once[0 if in_proportion else 1]


def weighed_by_uncertainty(outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
    logits, size = outputs
    return masked_sum(logits, targets) * (-size).exp() + size + 1e-2 * size.square().sum()


def test_parameters_in_the_loss_count_as_constants_of_the_batch() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.size = model_of(), nn.Parameter(torch.tensor(0.3))

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.decoder(tokens), self.size

    reference, batch = Weighed(), batch_of(2)
    weighed_by_uncertainty(reference(batch[0]), batch[1]).backward()
    engine = prepared(weighed_by_uncertainty, cut_into(2), Weighed())
    engine.step(*batch)
    for name, one in reference.named_parameters():
        torch.testing.assert_close(engine.parameters[name].grad, one.grad, rtol=1e-5, atol=1e-6)


# Ranks


DIVIDED = (
    "ignored",
    "masked_sum",
    "read_count",
    "picked",
    "added_up",
    "with_z_loss",
    "without_nan",
    "summed",
    "sum_and_count",
)


def losses_on_ranks(sharded: Sequence[str]) -> tuple[dict[str, Any], list[Any], dict[str, str]]:
    losses = {}
    for name in DIVIDED:
        for count, masked in ((1, 2), (2, 0)):
            losses[f"{name} {count} {masked}"] = divided(name, cut_into(count, dp=2), masked)
    for name in sharded:
        losses[f"{name} 1 1"] = divided(name, cut_into(1, dp=2, zero_stage=2), 1)
    metrics = [found_metrics(cut_into(2, dp=2)), found_metrics(TWO_STAGES)]
    plan = cut_into(1, dp=2)
    refused = {name: refusal(prepared(loss, plan), share_of(batch_of(2), plan)) for name, loss in REFUSED.items()}
    refused["stages"] = refusal(prepared(balance, TWO_STAGES), batch_of(2))
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
        for name, loss in REFUSED.items():
            engine = prepared(loss, plan, gather_outputs=True)
            batch = share_of(batch_of(2), plan)
            losses = engine.eval_step(*batch).item(), engine.step(*batch).item()
            gradients = {key: engine.whole(key, value.grad) for key, value in engine.parameters.items()}
            found[f"{name} {plan.zero_stage}"] = (*losses, gradients)
        options = {"gather_outputs": True, "verify": "off"}
        own = prepared(lambda outputs, _: outputs[1], plan, inside(model_of()), **options)
        refused[f"in the model {plan.zero_stage}"] = refusal(own, batch)
    uneven = prepared(contrastive, plan, gather_outputs=True)
    rank = torch.distributed.get_rank()
    refused["uneven"] = refusal(uneven, (batch[0][rank:], {key: value[rank:] for key, value in batch[1].items()}))
    whole = prepared(contrastive, ParallelPlan(tp=2, micro_batch_size=4), gather_outputs=True)
    found["contrastive tp"] = (*[whole.step(*batch_of(2)).item()] * 2, {})
    return found, refused


@pytest.mark.ranks
def test_a_loss_over_the_global_batch_is_that_of_one_process_where_its_outputs_are_gathered(ranks: RankHarness) -> None:
    for found, refused in ranks.run(gathered_losses, size=2):
        for case, values in found.items():
            model, (inputs, targets) = model_of(), batch_of(2)
            loss = REFUSED[case.split()[0]](model(inputs), targets)
            loss.backward()
            gradients = {key: value.grad for key, value in model.named_parameters() if key in values[2]}
            assert_same(values, (loss.item(), gradients), case)
        assert "gather_outputs, and the ranks have [2, 1] sequences" in refused.pop("uneven")
        for said in refused.values():
            assert "where its outputs are gathered from dp=2 ranks: loss_fn does not compute it" in said


@pytest.mark.ranks
def test_ranks_have_losses_gradients_metrics_and_refusals_of_one_process(ranks: RankHarness) -> None:
    # Gradients are summed the same way whatever weighs them: a mean, a mask, a sum, and a sum with its count.
    sharded = with_all(DIVIDED) or ("ignored", "masked_sum", "summed", "sum_and_count")
    for losses, metrics, refused in ranks.run(losses_on_ranks, sharded, size=2):
        for case, found in losses.items():
            name, _, masked = case.split()
            assert_same(found, plain(name, int(masked)), case)
        assert metrics == [[pytest.approx(expected_metrics(), rel=1e-5)] * 4] * 2
        for said in refused.values():
            assert said.startswith("UnsupportedPlanError: the loss of two sequences together is ")
