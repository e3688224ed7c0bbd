"""Splits as data: styles by patterns of names, given by a user or written down from what was found."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import FAMILIES, TOKENS, VOCABULARY, build
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError, PlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.split.patterns import GivenSplit
from paraplan.runtime.split.tensor_parallel import find_tensor_split
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.model_structure import ModelStructure

HIDDEN, BATCH = 16, 4
PLAN = ParallelPlan(tp=2, micro_batch_size=BATCH)
ROUND = ["gpt2", "gpt_oss", *with_all(["bloom", "phi3", "llama", "qwen2_moe", "bert"])]


class Attention(nn.Module):
    """Attention whose code names heads and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = 4, HIDDEN
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(hidden).split(self.width, dim=-1)
        heads = [part.view(*hidden.shape[:2], self.num_heads, 4).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(*hidden.shape[:2], self.width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.down(F.gelu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(24, HIDDEN), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


SPLIT = {
    "layers.*.attention": "divide(num_heads, width)",
    "layers.*.attention.qkv": "packed(3)",
    "layers.*.attention.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "words": "vocabulary",
    "head": "vocabulary",
}
WRONG: dict[str, tuple[Mapping[str, str], str]] = {
    "style": ({"layers.*.up": "columns"}, "'layers.*.up' has the style 'columns'"),
    "no argument": ({"layers.*.attention.qkv": "packed"}, "has the style 'packed'"),
    "an argument": ({"layers.*.up": "colwise(2)"}, "has the style 'colwise(2)'"),
    "no such name": ({"layers.*.upp": "colwise"}, "no module of the model is named 'layers.*.upp'"),
    "no layer": ({"head": "vocabulary"}, "it names no layer of block layers.0"),
    "no linear layer": ({"layers.*.norm": "colwise"}, "layers.0.norm (LayerNorm) is no linear layer"),
    "no experts": ({"layers.*.up": "experts"}, "layers.0.up holds no stacked weights of experts"),
    "parts": (SPLIT | {"layers.*.attention.qkv": "packed(16, 16)"}, "does not make up the 48 outputs"),
    "no number": (SPLIT | {"layers.*.attention": "divide(heads)"}, "heads=None of a Attention is not divided by tp=2"),
}


def trained(split: Mapping[str, str] | None, plan: ParallelPlan = PLAN) -> list[float] | str:
    torch.manual_seed(0)
    job = runtime.init(plan, shows_progress=False)
    tokens = torch.randint(24, (BATCH, 8), generator=torch.Generator().manual_seed(1))
    try:
        engine = job.prepare(
            Model(),
            loss_fn=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            example_inputs=tokens[:2],
            split=split,
        )
    except ParaplanError as error:
        return str(error)
    return [engine.step(tokens, tokens).item() for _ in range(3)]


def _given() -> list[list[float] | str]:
    tokens = PLAN.replace(sequence_parallel=True)
    return [trained(SPLIT), trained(SPLIT, tokens), trained({"layers.*.up": "colwise", "layers.*.down": "rowwise"})]


def _refused() -> dict[str, list[float] | str]:
    return {name: trained(split) for name, (split, _) in WRONG.items()}


@pytest.mark.ranks
def test_a_given_split_trains_as_one_process(ranks: RankHarness) -> None:
    expected = ranks.run_alone(trained, None, ParallelPlan(micro_batch_size=BATCH))
    for found in ranks.run(_given, size=2):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks
def test_a_given_split_that_does_not_fit_the_model_is_refused_with_the_name(ranks: RankHarness) -> None:
    for found in ranks.run(_refused, size=2):
        for name, (_, words) in WRONG.items():
            assert isinstance(found[name], str), name
            assert words in found[name], (name, found[name])


def _round_trips() -> dict[str, tuple[dict[str, str], bool]]:
    logging.disable()
    job = runtime.init(PLAN)
    found: dict[str, tuple[dict[str, str], bool]] = {}
    for family in ROUND:
        torch.manual_seed(0)
        model: Any = build(family)
        tokens = torch.randint(1, VOCABULARY, (2, TOKENS))
        structure = ModelStructure(model, find_blocks(model), {"input_ids": tokens})
        tried = find_tensor_split(structure, mesh=job.mesh, sequence_parallel=False)
        patterns = tried.patterns
        again = find_tensor_split(structure, mesh=job.mesh, sequence_parallel=False, given=patterns)
        same = all(
            one.roles == again.blocks[name].roles and one.divided == again.blocks[name].divided
            for name, one in tried.blocks.items()
        )
        ends = [(one.vocabulary.embeddings, one.vocabulary.heads) for one in (tried, again)]
        found[family] = patterns, same and ends[0] == ends[1]
    return found


@pytest.mark.ranks
def test_a_split_that_was_found_is_read_back_as_it_was(ranks: RankHarness) -> None:
    assert set(ROUND) <= set(FAMILIES)
    for found in ranks.run(_round_trips, size=2):
        for family, (patterns, is_same) in found.items():
            assert is_same, (family, patterns)
            assert not any(re.search(r"\.\d+\.", pattern) for pattern in patterns), family  # one line for all blocks
        assert found["gpt2"][0]["transformer.h.*.attn"] == "divide(embed_dim, num_heads, split_size)"


def test_a_star_stands_for_one_part_of_a_name() -> None:
    model = copy.deepcopy(Model())
    assert GivenSplit.of(SPLIT, model).style_of("layers.1.attention.qkv") == ("packed", ["3"])
    assert GivenSplit.of({"layers.0.up": "colwise"}, model).style_of("layers.1.up")[0] == "whole"
    with pytest.raises(PlanError, match="no module"):
        GivenSplit.of({"layers.*": "whole", "*.up": "colwise"}, model)
