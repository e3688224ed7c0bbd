"""Inputs that models of the transformers library take, without values: token ids, pixels, sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

Inputs = dict[str, torch.Tensor]
Attempt = Literal["main", "kinds", "all"]
ATTEMPTS: tuple[Attempt, ...] = ("main", "kinds", "all")
"""Inputs that are tried in turn: the one that the class names as its main one, with it which tokens stand for pictures
(none does), as some ask for in training, and all of its inputs that are known here."""

IMAGE_SIZE = 224
"""Pixels each way where a configuration states none, as of most image classifiers (ImageNet's crops)."""
SOUND_FRAMES = 1_000
"""Frames of a spectrum with one in 10 ms: ten seconds."""
SOUND_SAMPLES = 160_000
"""Ten seconds at 16 kHz, where a model reads the wave itself."""


def library_inputs(module: Any, config: Any, attempt: Attempt = "main") -> Callable[[int, int], Inputs] | None:
    """Return what makes the inputs of a transformers model (`example_inputs`), None where token ids alone will do.

    They depend on a number of sequences and their tokens; the latter are at most the positions of a text tower.
    """
    main, accepted = module.main_input_name, inspect.signature(module.forward).parameters
    wanted = [main]
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        wanted.append("decoder_input_ids")
    if attempt != "main":
        further = _KINDS if attempt == "kinds" else _MAKERS
        wanted += [name for name in further if name in accepted and name not in wanted]
    wanted = [name for name in wanted if name in _MAKERS]
    if wanted in ([], ["input_ids"]):
        return None
    return lambda batch, length: {name: _MAKERS[name](config, batch, length) for name in wanted}


def _token_ids(config: Any, batch: int, length: int) -> torch.Tensor:
    text = getattr(config, "text_config", config)
    is_tower = text is not config and hasattr(config, "vision_config")
    positions = getattr(text, "max_position_embeddings", None) if is_tower else None
    return torch.zeros(batch, min(length, positions or length), dtype=torch.long)


def _pixels(config: Any, batch: int, _: int) -> torch.Tensor:
    vision = _tower(config, "vision_config")
    size = _first(vision, ("image_size", "img_size", "crop_size"), IMAGE_SIZE)
    if isinstance(size, Mapping):
        size = (size.get("height", IMAGE_SIZE), size.get("width", IMAGE_SIZE))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _first(vision, ("num_channels", "in_channels", "in_chans"), 3)
    frames = _first(vision, ("num_frames",), None)
    shape = (channels, height, width) if frames is None else (frames, channels, height, width)
    return torch.zeros(batch, *shape, dtype=torch.bfloat16)


def _spectrum(config: Any, batch: int, _: int) -> torch.Tensor:
    sound = _tower(config, "audio_config")
    bins = _first(sound, ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 80)
    positions = _first(sound, ("max_source_positions",), None)
    shape = (SOUND_FRAMES, bins) if positions is None else (bins, 2 * positions)  # Whisper's come channels first
    return torch.zeros(batch, *shape, dtype=torch.bfloat16)


def _wave(config: Any, batch: int, _: int) -> torch.Tensor:
    sound = _tower(config, "audio_config")
    bins, longest = _first(sound, ("num_mel_bins",), None), _first(sound, ("max_length",), None)
    if bins is not None and longest is not None:  # a spectrum under the name of a wave
        return torch.zeros(batch, longest, bins, dtype=torch.bfloat16)
    return torch.zeros(batch, SOUND_SAMPLES, dtype=torch.bfloat16)


_MAKERS: dict[str, Callable[[Any, int, int], torch.Tensor]] = {
    "input_ids": _token_ids,
    "decoder_input_ids": _token_ids,
    "pixel_values": _pixels,
    "input_features": _spectrum,
    "input_values": _wave,
    "mm_token_type_ids": _token_ids,
}
_KINDS = ("mm_token_type_ids",)


def _tower(config: Any, name: str) -> Any:
    return getattr(config, name, None) or config


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    return next((found for name in names if (found := getattr(config, name, None)) is not None), default)
