"""Towers beside language models: weights part by part, work by the tokens of pictures, and what trains of them."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
from tower_variants import TOWERS, tower_fields

from paraplan.errors import PlanError
from paraplan.model.config_file import ModelConfig
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.reader import read_fields
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import ModelSpec
from paraplan.model.towers import is_of_tower, with_media
from paraplan.model.trainable import parse_trainable

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def _model(family: str, seed: int = 0, **fields: Any) -> ModelSpec:
    draw = random.Random(f"{family} {seed}")  # noqa: S311  # no secret: the same seed must give the same config
    return read_fields(ModelConfig("config", tower_fields(family, draw.choice) | fields))


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_works_in_proportion_to_its_tokens(family: str) -> None:
    model = _model(family)
    few, many = (with_media(model, {"image": count}, 1024) for count in (64, 256))
    assert with_media(model, {"image": 0}, 1024) == model
    for block, more in zip(few.media, many.media, strict=True):
        linear, four = (
            sum(one.flops_per_token for one in each.matmuls if not one.of_activations) for each in (block, more)
        )
        assert four == pytest.approx(4 * linear)
    assert few.parameters == many.parameters == model.parameters


def test_pictures_of_one_size_attend_to_themselves_others_to_all_patches_of_a_sequence() -> None:
    def attention(family: str, tokens: int) -> float:
        tower = with_media(_model(family), {"image": tokens}, 1024).media[0]
        return sum(one.flops_per_token for one in tower.matmuls if one.of_activations) / tokens

    assert attention("gemma3", 256) == pytest.approx(attention("gemma3", 64))
    assert attention("qwen3_vl", 256) == pytest.approx(4 * attention("qwen3_vl", 64))


def test_tokens_of_pictures_that_do_not_fit_or_have_no_tower_are_refused() -> None:
    with pytest.raises(PlanError, match="more than the 1024 tokens of a sequence"):
        with_media(_model("gemma3"), {"image": 2000}, 1024)
    with pytest.raises(PlanError, match="--audio-tokens 5"):
        with_media(_model("gemma3"), {"audio": 5}, 1024)


def _trained(model: ModelSpec, words: str) -> tuple[set[str], dict[str, bool]]:
    """Return which parts of the embedding train, and which work has a backward pass."""
    frozen = freeze(with_media(model, {"image": 64}, 256), parse_trainable(words), FrozenStorage())
    parts = {
        one.name.partition(".")[0] if is_of_tower(one) else "text" for one in frozen.embedding.parameters if one.trains
    }
    return parts, {block.kind: block.has_backward for block in frozen.media}


@pytest.mark.parametrize(
    ("words", "parts", "tower", "projector"),
    [
        ("full", {"text", "tower", "projector"}, True, True),
        ("text", {"text"}, False, False),
        ("text+projector", {"text", "projector"}, False, True),
        ("text+projector+tower", {"text", "tower", "projector"}, True, True),
        ("lora:r=4", set(), False, False),
        ("lora:r=4+projector", {"projector"}, False, True),
        ("lora:r=4+tower", {"tower"}, True, True),
    ],
)
def test_what_trains_of_a_tower_is_named(words: str, parts: set[str], tower: bool, projector: bool) -> None:
    assert _trained(_model("qwen2_5_vl"), words) == (parts, {"tower": tower, "projector": projector})


def test_words_for_towers_need_one_and_all_of_a_language_model_trains_once() -> None:
    llama = read_fields(
        ModelConfig(
            "config",
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 96,
            },
        )
    )
    with pytest.raises(PlanError, match="has no tower"):
        freeze(llama, parse_trainable("text+projector"), FrozenStorage())
    assert not freeze(llama, parse_trainable("text"), FrozenStorage()).is_partly_frozen  # text is all that it has
    with pytest.raises(PlanError, match="trains already"):
        parse_trainable("text+lora:r=8")
    assert parse_trainable("projector+text").text == "text+projector"


# A tower of transformers by its family: the class, how its config is found, and the patches of one picture.
_MODULES = {
    "gemma3": "SiglipVisionModel",
    "llava": "CLIPVisionModel",
    "internvl": "InternVLVisionModel",
    "llama4": "Llama4VisionModel",
}


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", _MODULES)
def test_towers_of_transformers_compute_and_keep_the_same(family: str) -> None:
    import torch
    import transformers

    from paraplan.model.trace import trace_module

    draw = random.Random(f"{family} 1")  # noqa: S311  # no secret: the same seed must give the same config
    fields = tower_fields(family, draw.choice)
    square = [224, 224] if family == "internvl" else 224
    fields["vision_config"] |= {"vision_use_head": False, "image_size": square}
    model = read_fields(ModelConfig("config", fields))
    work = model.towers[0]
    patches = work.picture_patches
    assert patches is not None

    def build() -> Any:
        config = transformers.AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k != "model_type"})
        module = getattr(transformers, _MODULES[family])(config.vision_config)
        module.example_inputs = lambda batch, _: {"pixel_values": torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16)}
        return module

    traced = trace_module(build, seq_length=patches, micro_batch_size=1)
    tokens = int(patches / work.patches_per_token)
    tower = with_media(model, {"image": tokens}, tokens).media[0]
    flops = sum(one.flops_per_token for one in tower.matmuls) * tokens
    class_token = 0 if family == "gemma3" else 1
    # One token of a class is in every product but the first.
    assert flops == pytest.approx(traced.flops_per_token(patches) * patches, rel=2.5 * class_token / patches + 1e-9)
    kept = saved_bytes(
        [one for one in tower.saved if one.role != "layer_inputs"], seq_length=tokens, micro_batch_size=1, kernel="sdpa"
    )
    expected = sum(
        saved_bytes(block.saved, seq_length=patches, micro_batch_size=1, kernel="sdpa")
        for block in (traced.embedding, *traced.blocks, traced.head)
    )
    if family == "llava":  # CLIP's norm of the class token, which LLaVA does not read, keeps what the last layer gives
        expected -= 2 * fields["vision_config"]["hidden_size"] * (patches + 1)
    assert kept == pytest.approx(expected, rel=0.01 + class_token / patches)
