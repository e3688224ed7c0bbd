"""A plan is checked in numbers also where no copy of the whole model fits: its blocks get their weights one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from test_first_step import DropoutLayer, batch_of, first_step, plain, prepared, ranked, with_layers
from torch import nn
from training_cases import Layer

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks import references

PLANS = {
    "tp2": ParallelPlan(tp=2, micro_batch_size=4),
    "pp2": ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2),
    "zero bubble": ParallelPlan(pp=2, pipeline_schedule="zero_bubble", num_microbatches=2, micro_batch_size=2),
    "zero1": ParallelPlan(dp=2, zero_stage=1, micro_batch_size=2),
    "zero3, recompute": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=2, recompute="full"),
}


@contextmanager
def memory_for(model: nn.Module, *, whole: bool) -> Iterator[None]:
    """Have as much free memory as a copy of `model` needs, or one byte of it too little for all weights."""
    size = sum(map(references._size_bytes, model.parameters())) - (not whole)
    before = references._SHARE_OF_MEMORY, references._free_bytes
    references._SHARE_OF_MEMORY, references._free_bytes = 1.0, lambda mesh: references._COPIES * size
    try:
        yield
    finally:
        references._SHARE_OF_MEMORY, references._free_bytes = before


class CountingLayer(Layer):
    """Writes a buffer and reads it, as routers do that correct themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return super().forward(hidden, scale) * (1 + 0.1 * self.seen)


def tied() -> nn.Module:
    """Return a model whose blocks share a part with each other and one with the model, a frozen one among them."""
    model: Any = plain(4)
    model.layers[1].norm = model.layers[0].norm
    model.layers[3].norm = model.norm
    model.layers[2].requires_grad_(False)
    return model


class ScarceLayer(Layer):
    """Has too little memory at one call of a copy of it, on the last rank alone."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.first = id(self)
        self.left = call

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if id(self) != self.first and not hidden.is_meta:
            self.left -= 1
            if not self.left and torch.distributed.get_rank():
                raise torch.OutOfMemoryError("too little memory")
        return super().forward(hidden, scale)


def scarce(call: int) -> nn.Module:
    model: Any = plain()
    layer = ScarceLayer(call)
    layer.load_state_dict(model.layers[1].state_dict())
    model.layers[1] = layer
    return model


MAKES: dict[str, Callable[[], nn.Module]] = {
    "wrong": ranked,
    "right": plain,
    "tied": tied,
    "dropout": partial(with_layers, DropoutLayer),
    "counting": partial(with_layers, CountingLayer),
}


def verified(cases: list[tuple[str, str]]) -> dict[str, str]:
    said = {}
    for name, kind in cases:
        with memory_for(tied() if kind == "tied" else plain(), whole=False):
            said[f"{name}, {kind}"] = first_step(PLANS[name], MAKES[kind])
    return said


def streamed_names(*, whole: bool) -> set[str]:
    """Return the blocks that a reference streams."""
    with memory_for(plain(), whole=whole):
        engine = prepared(PLANS["zero1"])
    verification = engine._batches._check._verification
    assert verification is not None
    return set(verification._reference._streamed)


def chosen() -> tuple[set[str], set[str]]:
    return streamed_names(whole=True), streamed_names(whole=False)


CALLS = with_all([1, 2, 3, 4, 5]) or [1, 4]
"""Calls of a copy of a block at which memory ends: in forward passes, and in backward passes."""


def given_up() -> list[float]:
    """Return the losses of steps whose check has too little memory in a forward pass, and in the backward pass."""
    losses = []
    for call in CALLS:
        with memory_for(plain(), whole=False):
            engine = prepared(PLANS["zero1"], partial(scarce, call))
        losses.append(float(engine.step(*batch_of(PLANS["zero1"]))))
    return losses


@pytest.mark.ranks
def test_a_model_of_which_no_copy_fits_is_checked_by_one_block_at_a_time(ranks: RankHarness) -> None:
    words = "UnsupportedPlanError: this model does not train under '"
    cases = [(name, "wrong") for name in ("tp2", "zero3, recompute")]
    # Which is right too: a tie is of two stages.
    cases += [("pp2", "tied")]
    # What blocks draw and write is put back in one way: seen in passes of stages, and of split layers.
    cases += [("zero bubble", "dropout"), ("tp2", "counting")]
    every = [
        (name, kind) for name in PLANS for kind in MAKES if kind != "counting" or name in ("tp2", "zero3, recompute")
    ]
    cases += with_all([case for case in every if case not in cases])
    for said in ranks.run(verified, cases, size=2):
        assert len(said) == len(cases)
        for case, text in said.items():
            if case.endswith("wrong"):
                assert text.startswith(words), case
                assert text.endswith("unchanged=True, steps=0"), case
            else:
                assert text == "no error unchanged=False, steps=1", case


@pytest.mark.ranks
def test_blocks_are_streamed_only_where_the_whole_model_does_not_fit(ranks: RankHarness) -> None:
    for whole, streamed in ranks.run(chosen, size=2):
        assert whole == set()
        assert streamed == {"layers.0", "layers.1"}


@pytest.mark.ranks
def test_a_check_without_the_memory_for_it_lets_the_training_go_on(ranks: RankHarness) -> None:
    losses = [loss for found in ranks.run(given_up, size=2) for loss in found]
    assert losses == losses[:1] * 2 * len(CALLS)
