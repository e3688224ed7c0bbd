from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.model.flops import training_flops
from paraplan.model.reader import read_model


@pytest.mark.parametrize(("recompute", "factor", "head"), [("none", 72, 12), ("full", 96, 16)])
def test_gpt3_needs_the_flops_of_narayanan(recompute: str, factor: int, head: int) -> None:
    # Narayanan et al. 2021 (SC'21), equation 3, per token; without recompute 72 ... (1 + s/6h + V/12Lh).
    h, layers, vocabulary, s = 12_288, 96, 51_200, 2_048
    flops = training_flops(read_model("gpt3-175b"), seq_length=s, recompute=recompute)  # type: ignore[arg-type]
    expected = factor * layers * h**2 * (1 + s / (6 * h) + vocabulary / (head * layers * h))
    assert flops.hardware_flops == pytest.approx(expected, rel=1e-12)


def test_without_attention_a_token_needs_six_flops_for_each_weight_it_meets() -> None:
    model = read_model("llama-3-8b")
    weights = model.parameters.total - model.parameters.embedding - (2 * 32 + 1) * 4096  # norms multiply no matrix
    assert training_flops(model, seq_length=8192).linear_flops == 6 * weights


def test_attention_takes_palms_12_lhqt() -> None:
    # Chowdhery et al. 2022, appendix B: 12 L H Q T FLOPs a token for L layers of H heads of width Q, T tokens.
    flops = training_flops(read_model("llama-3-8b"), seq_length=8192)
    assert flops.attention_flops == 12 * 32 * 32 * 128 * 8192


def test_a_token_meets_only_its_own_experts() -> None:
    model = read_model("mixtral-8x7b")
    idle = 32 * 6 * 3 * 4096 * 14_336  # six of eight experts in each of 32 layers
    weights = model.parameters.total - model.parameters.embedding - (2 * 32 + 1) * 4096 - idle
    assert training_flops(model, seq_length=1).linear_flops == 6 * weights


def test_model_flops_do_not_depend_on_recompute() -> None:
    model = read_model("gpt2")
    kinds = [training_flops(model, seq_length=1024, recompute=kind) for kind in ("none", "selective", "full")]
    assert len({flops.model_flops for flops in kinds}) == 1
    assert [flops.recompute_flops for flops in kinds] == sorted(flops.recompute_flops for flops in kinds)
    assert kinds[1].recompute_flops == kinds[1].attention_flops / 3


def test_a_window_bounds_attention() -> None:
    block = read_model("mistral-7b").blocks[0]
    assert block.attention is not None
    windowed = block.attention.replace(window=4096)
    assert windowed.flops_per_token(32_768) == block.attention.flops_per_token(4096)
    assert windowed.flops_per_token(1024) == block.attention.flops_per_token(1024)


@given(batch=st.integers(1, 512), seq_length=st.integers(1, 4096))
def test_a_step_is_its_tokens(batch: int, seq_length: int) -> None:
    token = training_flops(read_model("gpt2"), seq_length=seq_length, recompute="full")
    step = token.of_step(batch)
    assert step.model_flops == pytest.approx(token.model_flops * batch * seq_length)
    assert step.hardware_flops == pytest.approx(step.linear_flops + step.attention_flops + step.recompute_flops)
