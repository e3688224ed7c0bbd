"""Which experts are found, and what is said where they cannot be shared out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training_cases import MODELS

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.experts.layers import check_experts, find_experts
from paraplan.runtime.shards.sharding import Sharding


def test_stacked_weights_and_lists_of_experts_are_found() -> None:
    mixtures = ("mixture", "routed", "listed", "named", "sorted")
    found = {model: find_experts(MODELS[model]()) for model in (*mixtures, "attention", "experts")}
    assert {model: [*layers] for model, layers in found.items()} == {
        **{name: ["layers.0.experts", "layers.1.experts"] for name in mixtures},
        "attention": [],
        "experts": [],  # in a module with other weights
    }
    for model in ("listed", "named"):
        assert {(one.num_experts, one.is_list) for one in found[model].values()} == {(4, True)}
    assert not find_experts(nn.Sequential(nn.Conv1d(4, 4, 3, bias=False), nn.Conv1d(4, 4, 3, bias=False)))


@pytest.mark.parametrize(
    ("model", "ep", "tp", "words"),
    [
        ("attention", 2, 1, "ep=2: Transformer has no experts"),
        ("routed", 3, 1, "ep=3 does not divide the 4 experts of layers.0.experts"),
        ("listed", 2, 2, "ep=2, tp=2: layers.0.experts is a list of experts"),
    ],
)
def test_what_cannot_be_shared_out_is_one_sentence(model: str, ep: int, tp: int, words: str) -> None:
    with pytest.raises(UnsupportedPlanError) as refused:
        check_experts(MODELS[model](), ep=ep, tp=tp)
    assert refused.value.message.startswith(words)
    assert refused.value.hint


def test_a_tensor_of_one_rank_is_empty_on_the_others() -> None:
    whole, sharding = torch.arange(6.0).view(3, 2), Sharding(dim=0, segments=(3,), size=2, owner=1)
    parts = [sharding.part(whole, rank) for rank in range(2)]
    assert [len(part) for part in parts] == [0, 3]
    assert sharding.whole_shape(parts[0].shape) == (3, 2)
    assert torch.equal(sharding.join(parts), whole)
