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
from paraplan.model.families_experts import EXPERTS, deepseek, qwen3_moe_layers
from paraplan.model.spec import ModelSpec

Reader = Callable[[ModelConfig], ModelSpec]


def _modern(family: ModernFamily) -> Reader:
    return partial(read_modern, family=family)


def _described(describe: Callable[[ModelConfig], DecoderShape]) -> Reader:
    def read(config: ModelConfig) -> ModelSpec:
        return build_decoder(config, describe(config))

    return read


QWEN3_MOE = MODERN["qwen3"]._replace(head_dim=None, kv_heads=4, layers=qwen3_moe_layers)

READERS: dict[str, Reader] = {
    **{name: _modern(family) for name, family in (MODERN | EXPERTS | {"qwen3_moe": QWEN3_MOE}).items()},
    **{name: _described(describe) for name, describe in CLASSIC.items()},
    "deepseek_v2": _described(deepseek),
    "deepseek_v3": _described(deepseek),
    "t5": t5,
    **ENCODERS,
}
"""Reader by the `model_type` of a config."""
