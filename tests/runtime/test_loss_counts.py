"""A loss is known by the functions that made it: a sum, a mean, and over how many targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from paraplan.runtime.step.loss_counts import (
    LossFollower,
    Mean,
    Sum,
    Term,
    Unknown,
)


def terms() -> dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], type[Any] | None, float | None]]:
    """Return losses of rows `x` and a mask `m`, what each is, and over how many it goes."""
    labels = torch.tensor([0, 1, -100, 2])
    weight = torch.tensor([1.0, 2.0, 4.0])
    return {
        "sum": (lambda x, m: x.sum(), Sum, None),
        "scaled sum": (lambda x, m: 3 * -x.nansum(), Sum, None),
        "sum of two": (lambda x, m: x.sum() + x.square().sum(), Sum, None),
        "mean": (lambda x, m: x.mean(), Mean, None),
        "mean of a mean": (lambda x, m: x.mean().mean() / 2, Mean, None),
        "mean and a constant": (lambda x, m: x.mean() + 1, Mean, None),
        "loss": (lambda x, m: F.smooth_l1_loss(x, x * 0), Mean, None),
        "loss summed": (lambda x, m: F.l1_loss(x, x * 0, reduction="sum"), Sum, None),
        "targets": (lambda x, m: F.cross_entropy(x, labels), Mean, 3),
        "named targets": (lambda x, m: F.cross_entropy(input=x, target=labels), Mean, 3),
        "weights": (lambda x, m: F.cross_entropy(x, labels, weight), Mean, 7),
        "no index": (lambda x, m: F.cross_entropy(x, labels.abs() % 3, ignore_index=1), Mean, 2),
        "mask": (lambda x, m: (x * m).sum() / m.sum(), Mean, 3),
        "mask in a call": (lambda x, m: torch.div((x * m).sum(), other=m.sum()), Mean, 3),
        "mask as numbers": (lambda x, m: (x * m).sum() / m.sum().item(), Mean, 3),
        "mask counted": (lambda x, m: (x * m).sum() / m.count_nonzero().clamp(min=1), Mean, 3),
        "no target": (lambda x, m: (x * 0).sum() / (m * 0).sum().clamp(min=1), Mean, 0),
        "small number": (lambda x, m: (x * 0).sum() / ((m * 0).sum() + 1e-8), Mean, 0),
        "picked": (lambda x, m: x[m[:, 0] > 0].mean(), Mean, 9),
        "nan": (lambda x, m: x.masked_fill(m == 0, torch.nan).nanmean(), Mean, 9),
        "nan in a call": (lambda x, m: torch.nanmean(input=x.masked_fill(m == 0, torch.nan)), Mean, 9),
        "a power of a mean": (lambda x, m: x.mean() ** 2, Unknown, None),
        "product of means": (lambda x, m: x.mean() * x.square().mean(), Unknown, None),
        "sum by a constant": (lambda x, m: x.sum() / 12, Unknown, None),
        "nothing": (lambda x, m: x[0, 0], None, None),
    }


@pytest.mark.parametrize("name", terms())
def test_a_number_is_known_by_the_functions_that_made_it(name: str) -> None:
    compute, kind, count = terms()[name]
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    mask = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    with LossFollower() as follower:
        number = compute(rows, mask)
    term: Term | None = follower.term_of(number)
    assert (None if term is None else type(term)) is kind
    known = term.count if isinstance(term, Mean) else None
    assert (None if known is None else float(known)) == count
    assert number.item() == pytest.approx(compute(rows, mask).item(), nan_ok=True)


def test_a_mean_over_no_targets_has_a_gradient_of_zeros() -> None:
    rows, mask = torch.ones(4, requires_grad=True), torch.zeros(4)
    for divisor in (lambda: mask.sum(), lambda: mask.sum().item()):
        with LossFollower():
            loss = (rows * mask).sum() / divisor()
        (gradient,) = torch.autograd.grad(loss, rows)
        assert (loss.item(), gradient.tolist()) == (0.0, [0.0] * 4)


def test_means_over_other_targets_are_added_with_the_counts_of_both() -> None:
    rows, mask = torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 1.0])
    with LossFollower() as follower:
        term = follower.term_of((rows * mask).sum() / mask.sum() + rows[mask < 1].mean())
    assert isinstance(term, Mean)
    assert [(float(part.value), float(part.count)) for part in term.parts] == [(1.0, 3.0), (1.0, 1.0)]
