from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.api.models import bundled_models, load_model
from paraplan.api.workloads import trainable_words, training_of
from paraplan.errors import PlanError
from paraplan.model.freezing import linear_layers
from paraplan.model.trainable import ALL_LINEAR, AdapterSpec, Trainable, parse_trainable, targeted_layers
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import TrainingSpec

LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")


def test_words_say_what_trains() -> None:
    assert parse_trainable("full").is_full
    assert parse_trainable("lora").adapter == AdapterSpec()
    lora = parse_trainable("lora:r=8,targets=q|v,dropout=0.05+head")
    assert lora.adapter == AdapterSpec(rank=8, targets=("q", "v"), dropout=0.05)
    assert lora.head
    assert parse_trainable("layers:last4").last_layers == 4
    assert parse_trainable("rslora:r=64,alpha=16").adapter == AdapterSpec(rank=64, is_scaled_by_root=True)
    assert parse_trainable("ia3").adapter == AdapterSpec(kind="ia3", targets=("k", "v", "down"))


TARGETS = st.lists(st.sampled_from(["q", "v", "o_proj"]), min_size=1, unique=True).map(tuple) | st.just((ALL_LINEAR,))


@given(
    kind=st.sampled_from(["lora", "dora"]),
    rank=st.integers(1, 256),
    targets=TARGETS,
    dropout=st.sampled_from([0.0, 0.05, 0.5]),
    head=st.booleans(),
    norms=st.booleans(),
    last=st.none() | st.integers(1, 9),
)
def test_the_words_of_what_trains_say_it_again(
    kind: str, rank: int, targets: tuple[str, ...], dropout: float, head: bool, norms: bool, last: int | None
) -> None:
    adapter = AdapterSpec.model_validate({"kind": kind, "rank": rank, "targets": targets, "dropout": dropout})
    one = Trainable(adapter=adapter, head=head, norms=norms, last_layers=last)
    assert parse_trainable(one.text) == one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lora:r=0", "rank of 0"),
        ("lorra", "does not know 'lorra'"),
        ("lora:dropout=1.5", "does not know 'dropout=1.5'"),
        ("layers:last0", "does not know"),
        ("lora+dora", "adapters twice"),
        ("", "does not know ''"),
    ],
)
def test_words_that_say_nothing_are_refused_with_what_would_do(words: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        parse_trainable(words)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("words", "weights", "read"),
    [
        ("qlora", None, ("lora:r=16", "nf4:double")),
        ("QLoRA:r=8,targets=q|v", None, ("lora:r=8,targets=q|v", "nf4:double")),
        ("head+qlora:r=8", "mxfp4", ("lora:r=8+head", "mxfp4")),
        ("lora:r=8", None, ("lora:r=8", None)),
        (" lora:r=8 ", None, ("lora:r=8", None)),
    ],
)
def test_qlora_is_lora_over_weights_of_fewer_bits(
    words: str, weights: WeightFormat | None, read: tuple[str, str | None]
) -> None:
    training = TrainingSpec(global_batch_size=8, seq_length=128, train=trainable_words(words), base_weights=weights)
    assert (training.train, training.base_weights) == read
    assert training == TrainingSpec(global_batch_size=8, seq_length=128, train=words, base_weights=weights)


def test_qlora_over_weights_of_16_bits_is_refused() -> None:
    with pytest.raises(PlanError, match="base weights in bf16: QLoRA is") as caught:
        TrainingSpec(global_batch_size=8, seq_length=128, train="qlora:r=8", base_weights="bf16")
    assert caught.value.hint
    with pytest.raises(PlanError, match="does not know 'qlorra'"):
        trainable_words("qlorra")


def test_targets_are_found_by_short_names_and_whole_ones() -> None:
    assert targeted_layers(AdapterSpec(targets=("q", "v_proj")), LAYERS) == {"self_attn.q_proj", "self_attn.v_proj"}
    assert targeted_layers(AdapterSpec(), LAYERS) == set(LAYERS)


def test_a_target_that_no_layer_has_is_refused_with_near_names() -> None:
    with pytest.raises(PlanError, match="no linear layer is called 'q_prj'") as caught:
        targeted_layers(AdapterSpec(targets=("q_prj",)), LAYERS)
    assert caught.value.hint is not None
    assert "q_proj" in caught.value.hint


@pytest.mark.parametrize("name", sorted(bundled_models()))
def test_qkv_means_the_layers_that_every_bundled_model_has_for_it(name: str) -> None:
    model = load_model(name)
    training = training_of(model, seq_length=1024, global_batch_size=8, train="lora:r=8,targets=qkv")
    layers = tuple(one.name for run in model.runs for one in linear_layers(run.block))
    assert training.trainable.adapter is not None
    found = targeted_layers(training.trainable.adapter, layers)
    assert found == targeted_layers(AdapterSpec(rank=8, targets=("qkv",)), layers)
    assert found
    assert not any(name.rpartition(".")[2].startswith(("o_proj", "gate", "up", "down")) for name in found)
    if {"self_attn.q_proj", "self_attn.v_proj"} <= set(layers):
        assert training.train.startswith("lora:r=8,targets=q|k|v")


def test_the_words_of_qlora_stay_qlora_where_layers_are_named_apart() -> None:
    training = training_of(
        load_model("glm-4.5-air"), seq_length=1024, global_batch_size=8, train="lora:r=8,targets=qkv|o"
    )
    assert training.train == "lora:r=8,targets=q|k|v|o"
