"""Towers beside language models: weights part by part, work by the tokens of pictures, and what trains of them."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
from case_selection import with_all
from tower_variants import TOWERS, tower_fields

from paraplan.errors import PlanError
from paraplan.model.config_file import ModelConfig
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.reader import read_fields
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import AttentionKernel, ModelSpec
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
    with pytest.raises(PlanError, match="audio_tokens=5"):
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


# One family of each tower of pictures that attends in its own way; Llama 4's is above.
_WHOLE = ("qwen2_5_vl", "gemma3", "mistral3", "llava", "gemma4")
# Qwen2-VL, Qwen3-VL and GLM-4V are Qwen2.5-VL without windows, InternVL and SmolVLM have CLIP's and SigLIP's blocks.
_WHOLE += tuple(with_all(["qwen2_vl", "qwen3_vl", "internvl", "smolvlm", "glm4v"]))


def _pixels(family: str, config: Any) -> dict[str, Any]:
    """Return the inputs of one picture: 24 by 24 patches where it may have any size."""
    import torch

    size, patch = getattr(config, "image_size", 0), getattr(config, "patch_size", 14)
    if family in {"gemma3", "llava", "internvl"}:
        return {"pixel_values": torch.zeros(1, 3, *(size if isinstance(size, list | tuple) else [size, size]))}
    if family in {"smolvlm", "idefics3"}:
        return {"pixel_values": torch.ones(1, 1, 3, size, size)}  # a picture of zeros counts as padding
    if family == "mistral3":
        side = 24 * patch
        return {"pixel_values": torch.zeros(1, 3, side, side), "image_sizes": torch.tensor([[side, side]])}
    if family == "gemma4":
        grid = torch.stack(torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij"), -1)
        return {"pixel_values": torch.zeros(1, 576, 3 * patch**2), "image_position_ids": grid.reshape(1, 576, 2)}
    frames = getattr(config, "temporal_patch_size", 2)
    return {"pixel_values": torch.zeros(576, 3 * frames * patch**2), "image_grid_thw": torch.tensor([[1, 24, 24]])}


def _counted(family: str, kernel: AttentionKernel, depth: int) -> tuple[float, float, float, float]:
    """Return FLOPs and saved bytes of a tower of so many layers as read, and each as torch counts it."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    draw = random.Random(f"{family} 1")  # noqa: S311  # no secret: the same seed must give the same config
    fields = tower_fields(family, draw.choice)
    if family == "gemma4":
        fields["audio_config"] = None
    vision = fields["vision_config"]
    vision["depth" if "depth" in vision else "num_hidden_layers"] = depth
    if "image_size" in vision:
        vision["image_size"] = [224, 224] if family == "internvl" else 224
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k != "model_type"})
    whole = getattr(transformers, fields["architectures"][0])
    model = whole._from_config(config, attn_implementation=kernel, dtype=torch.bfloat16).train()
    pixels = {k: v.bfloat16() if v.is_floating_point() else v for k, v in _pixels(family, config.vision_config).items()}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        features = getattr(model, "model", model)
        features = features if hasattr(features, "get_image_features") else model
        output = features.get_image_features(**pixels, return_dict=True).pooler_output
    parts = [output] if torch.is_tensor(output) else output
    tokens = sum(one.numel() // one.shape[-1] for one in parts)
    media = with_media(read_fields(ModelConfig("config", fields)), {"image": tokens}, tokens).media
    saved = [one for block in media for one in block.saved if one.role != "layer_inputs"]
    return (
        tokens * sum(one.flops_per_token for block in media for one in block.matmuls),
        float(counter.get_total_flops()),
        saved_bytes(saved, seq_length=tokens, micro_batch_size=1, kernel=kernel),
        float(sum(one.nbytes() for one in kept.values())),
    )


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", _WHOLE)
def test_layers_of_towers_do_what_torch_counts_of_them(family: str) -> None:
    # Two layers more, so that what a picture needs once, and a token of a class, stay out of it.
    class_token = 0.006 if family in {"llava", "internvl"} else 0.0
    # What sdpa keeps is of its kernel, not of the family: one whose pictures have any size, one with a class token.
    has_sdpa = family in {"qwen2_5_vl", "llava"} or (family != "gemma4" and with_all([1]))
    kernels: tuple[AttentionKernel, ...] = ("eager", "sdpa") if has_sdpa else ("eager",)
    for kernel in kernels:
        short, long = (_counted(family, kernel, depth) for depth in (2, 4))
        flops, counted_flops, saved, counted_saved = (more - less for less, more in zip(short, long, strict=True))
        if kernel == "eager":  # torch does not count its attention on CPUs
            assert flops == pytest.approx(counted_flops, rel=1e-9 + 1.5 * class_token)
            assert long[0] == pytest.approx(long[1], rel=0.02)  # Gemma 4 pools by a product, a class token is one more
        assert saved == pytest.approx(counted_saved, rel=0.01 + class_token)
        assert long[2] == pytest.approx(long[3], rel=0.03 if kernel == "eager" else 0.10)
