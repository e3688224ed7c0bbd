"""Smaller models of the same structure."""

from __future__ import annotations

import json
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.model.shrink import Smaller, shrink_fields
from paraplan.resources import profiles_folder

TO = Smaller(num_layers=3, tp=2, seq_length=16)

GROUPED = {
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 262000,
    "attention_dropout": 0.1,
    "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}


def test_every_kind_of_layer_stays_and_what_divides_still_does() -> None:
    small = shrink_fields(GROUPED, TO)
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 3
    assert set(small["layer_types"]) == {"sliding_attention", "full_attention"}
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["head_dim"]) == (4, 2, 16)
    assert small["hidden_size"] == 64
    assert small["vocab_size"] == 128
    assert small["sliding_window"] == 8
    assert small["pad_token_id"] < 128
    assert small["eos_token_id"] == [1, 106]
    assert small["attention_dropout"] == 0.0
    assert small["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert small["tie_word_embeddings"] is True


def test_the_width_is_kept_where_only_layers_are_to_go() -> None:
    small = shrink_fields(GROUPED, Smaller(num_layers=2, tp=2, seq_length=16, keeps_width=True))
    assert small["num_hidden_layers"] == 2
    assert small["hidden_size"] == 5376
    assert small["vocab_size"] == 262208


@given(
    heads=st.integers(1, 64),
    ratio=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4, 8]),
    vocabulary=st.integers(200, 10**6),
)
def test_tp_divides_the_smaller_model_exactly_where_it_divides_the_model(
    heads: int, ratio: int, tp: int, vocabulary: int
) -> None:
    fields = {
        "num_attention_heads": heads * ratio,
        "num_key_value_heads": heads,
        "hidden_size": 64 * heads * ratio,
        "vocab_size": vocabulary,
    }
    small = shrink_fields(fields, Smaller(num_layers=2, tp=tp, seq_length=16))
    assert (small["num_key_value_heads"] % tp == 0) == (heads % tp == 0)
    assert (small["vocab_size"] % tp == 0) == (vocabulary % tp == 0)
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert (small["num_attention_heads"] > small["num_key_value_heads"]) == (ratio > 1)
    assert small["hidden_size"] % small["num_attention_heads"] == 0


@given(
    groups=st.integers(1, 32), ratio=st.integers(1, 16), tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2, 4, 8])
)
def test_heads_that_tp_and_cp_share_out_are_shared_out_in_the_smaller_model(
    groups: int, ratio: int, tp: int, cp: int
) -> None:
    def shares(heads: int, groups: int) -> bool:
        return groups % tp == 0 and (heads // tp) % lcm(groups // tp, cp) == 0

    grouped = {
        "num_attention_heads": groups * ratio,
        "num_key_value_heads": groups,
        "hidden_size": 64 * groups * ratio,
    }
    alike = {"n_head": groups, "n_embd": 64 * groups}
    to = Smaller(num_layers=2, tp=tp, cp=cp, seq_length=16)
    small = shrink_fields(grouped, to)
    if shares(groups * ratio, groups):
        assert shares(small["num_attention_heads"], small["num_key_value_heads"])
    if groups % (tp * cp) == 0:
        assert shrink_fields(alike, to)["n_head"] % (tp * cp) == 0


def test_layers_that_a_part_names_by_number_stay_of_every_kind() -> None:
    whole = [4, 8, 12]
    part = {"full_attn_layers": whole, "kda_layers": [place for place in range(1, 14) if place not in whole]}
    part |= {"num_heads": 32, "head_dim": 128}
    small = shrink_fields({"num_hidden_layers": 13, "linear_attn_config": part}, TO)["linear_attn_config"]
    assert (small["num_heads"], small["head_dim"]) == (2, 8)
    assert sorted(small["full_attn_layers"] + small["kda_layers"]) == [1, 2, 3]
    assert small["full_attn_layers"]


@pytest.mark.parametrize(("sections", "rotated"), [([16, 24, 24], 1.0), ([22, 22, 20], 1.0), ([8, 12, 12], 0.5)])
def test_sections_of_rotary_positions_share_a_smaller_head(sections: list[int], rotated: float) -> None:
    rope = {"rope_type": "default", "mrope_section": sections, "partial_rotary_factor": rotated}
    small = shrink_fields(GROUPED | {"rope_parameters": rope}, TO)
    few = small["rope_parameters"]["mrope_section"]
    assert sum(few) == small["head_dim"] * rotated // 2
    assert [few.count(one) > 1 for one in few] == [sections.count(one) > 1 for one in sections]


def test_a_head_with_positions_in_a_part_of_it_keeps_that_part() -> None:
    fields = {"num_attention_heads": 32, "hidden_size": 4096, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
    for head_dim, parts in ((64, 1), (128, 2)):
        small = shrink_fields(fields | {"head_dim": head_dim}, TO)
        assert small["head_dim"] == parts * small["qk_rope_head_dim"]


@pytest.mark.parametrize("path", sorted((profiles_folder() / "models").glob("*.json")), ids=lambda path: path.stem)
def test_bundled_models_become_small(path: object) -> None:
    fields = json.loads(path.read_text())  # type: ignore[attr-defined]
    small = shrink_fields(fields, TO)
    small = small.get("text_config", small)
    width = small.get("hidden_size") or small["n_embd"]
    assert width <= 400  # 25 heads, which tp does not divide, stay as they are
    assert small["vocab_size"] <= 200
