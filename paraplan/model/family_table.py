"""The one table from `model_type` to the reader of its config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import DecoderShape, build_decoder
from paraplan.model.encoder_decoder import t5
from paraplan.model.encoders import ENCODERS
from paraplan.model.families import MODERN, ModernFamily, read_modern
from paraplan.model.families_classic import CLASSIC
from paraplan.model.families_deepseek_v4 import deepseek_v4
from paraplan.model.families_dense import DENSE
from paraplan.model.families_experts import EXPERTS
from paraplan.model.families_gemma import gemma4
from paraplan.model.families_gemma3n import gemma3n
from paraplan.model.families_latent import LATENT, LatentFamily, latent_shape
from paraplan.model.families_linear import LINEAR
from paraplan.model.families_multimodal import MULTIMODAL, TEXT_PARTS, is_described, read_multimodal, thinker
from paraplan.model.spec import ModelSpec

Reader = Callable[[ModelConfig], ModelSpec]


def _modern(family: ModernFamily) -> Reader:
    return partial(read_modern, family=family)


def _described(describe: Callable[[ModelConfig], DecoderShape]) -> Reader:
    def read(config: ModelConfig) -> ModelSpec:
        return build_decoder(config, describe(config))

    return read


def _latent(family: LatentFamily) -> Reader:
    return _described(partial(latent_shape, family=family))


_TEXT: dict[str, Reader] = {
    **{name: _modern(family) for name, family in (MODERN | DENSE | EXPERTS | LINEAR).items()},
    **{name: _described(describe) for name, describe in CLASSIC.items()},
    **{name: _latent(family) for name, family in LATENT.items()},
    "deepseek_v4": deepseek_v4,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "t5": t5,
    **ENCODERS,
}
_PARTS = _TEXT | {name: _modern(family) for name, family in TEXT_PARTS.items()}


def _multimodal(name: str) -> Reader:
    return partial(read_multimodal, family=MULTIMODAL[name], readers=_PARTS)


def _speaking(name: str) -> Reader:
    return partial(thinker, family=MULTIMODAL[f"{name}_thinker"], readers=_PARTS)


READERS: dict[str, Reader] = (
    _TEXT
    | {name: _multimodal(name) for name in MULTIMODAL}
    | {name: _speaking(name) for name in ("qwen2_5_omni", "qwen3_omni_moe")}
)
"""Reader by the `model_type` of a config."""


def is_read(config: ModelConfig) -> bool:
    """Return whether a reader describes a config: of one with parts, each of them."""
    if config.model_type in MULTIMODAL:
        return is_described(config, _PARTS)
    return config.model_type in READERS
