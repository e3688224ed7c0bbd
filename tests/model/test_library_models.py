"""Models of transformers that no reader describes: their inputs, repeated blocks, loops and convolutions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
from torch import nn

from paraplan.errors import ModelError
from paraplan.model import trace
from paraplan.model.reader import read_model
from paraplan.model.spec import ModelSpec
from paraplan.model.trace import trace_module
from paraplan.model.trace_inputs import library_inputs
from paraplan.plan.compatibility import why_tp

TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
VISION = TEXT | {"image_size": 32, "patch_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 100,
        "vocab_size": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
    "clip": {
        "architectures": ["CLIPModel"],
        "text_config": TEXT | {"vocab_size": 512, "eos_token_id": 2},
        "vision_config": VISION,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "state_size": 8,
    },
    "wav2vec2": {"architectures": ["Wav2Vec2Model"]} | TEXT | {"num_conv_pos_embedding_groups": 4},
    "resnet": {
        "architectures": ["ResNetForImageClassification"],
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 64, 64],
    },
    "bart": {
        "architectures": ["BartForConditionalGeneration"],
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_layerdrop": 0.5,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 512,
    },
}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(model_type: str, *, length: int = 64) -> ModelSpec:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(MODELS[model_type] | {"model_type": model_type}))
        return read_model(str(path), seq_length=length)

    return read


@contextmanager
def every_block_runs(*_: Any) -> Iterator[None]:
    yield


LIKE_WHISPER = ("bart", "clip", "wav2vec2")
"""Their blocks are transformers' layers too."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=[pytest.mark.with_all] * (one in LIKE_WHISPER)) for one in MODELS]
)
def test_blocks_that_are_alike_cost_what_they_cost_when_each_runs(
    model_type: str, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 16 if model_type == "mamba" else 64  # a loop over tokens
    found = read(model_type, length=length)
    monkeypatch.setattr(trace, "skipped_repeats", every_block_runs)
    assert found == read(model_type, length=length)
    assert found.flops_per_token(64) > 0


def test_both_towers_of_a_model_of_text_and_pictures_run(read: Any) -> None:
    clip = read("clip")
    assert clip.num_blocks == 8
    assert all(run.block.matmuls for run in clip.runs)


def test_which_tokens_are_pictures_is_said_to_a_model_that_asks_for_it_in_training() -> None:
    class Asking(nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor | None = None) -> None: ...

    config = SimpleNamespace(is_encoder_decoder=False)
    made = library_inputs(Asking(), config, "kinds")
    assert library_inputs(Asking(), config) is None
    assert made is not None
    assert {name: tuple(one.shape) for name, one in made(2, 8).items()} == {
        "input_ids": (2, 8),
        "mm_token_type_ids": (2, 8),
    }


def test_no_layer_is_dropped(read: Any) -> None:
    assert all(run.block.matmuls for run in read("bart").runs)


def test_a_loop_over_tokens_counts_as_one_kernel(read: Any) -> None:
    short, long = read("mamba", length=16), read("mamba", length=32)
    blocks = [model.runs[0].block for model in (short, long)]
    assert all(block.loops_over_tokens for block in blocks)
    assert len(blocks[0].matmuls) == len(blocks[1].matmuls)
    assert short.flops_per_token(16) == pytest.approx(long.flops_per_token(32), rel=0.05)


def test_a_convolution_is_a_product_of_patches_and_filters() -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(8, 32, 3, padding=1, groups=2)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            filtered: torch.Tensor = self.convolution(pixels)
            return filtered

        def example_inputs(self, batch: int, _: int) -> torch.Tensor:
            return torch.zeros(batch, 8, 16, 16, dtype=torch.bfloat16)

    (run,) = trace_module(Picture, seq_length=16).runs
    (matmul,) = run.block.matmuls
    assert (matmul.k, matmul.n) == (4 * 3 * 3, 16)
    assert matmul.rows_per_token * 16 == 2 * 16 * 16


def test_weights_that_layers_share_work_in_each() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                hidden = self.layers[0](hidden)
            return hidden

        def example_inputs(self, batch: int, length: int) -> torch.Tensor:
            return torch.zeros(batch, length, 16, dtype=torch.bfloat16)

    (run,) = trace_module(Shared, seq_length=16).runs
    assert sum(one.rows_per_token for one in run.block.matmuls) == 5


def test_a_model_that_does_not_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "autoformer", "architectures": ["AutoformerForPrediction"]}))
    with pytest.raises(ModelError) as refused:
        read_model(str(path), seq_length=32)
    assert "no reader describes model_type='autoformer'" in refused.value.message
    assert "example_inputs" in str(refused.value.hint)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        returned: torch.Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return returned


class Planned(nn.Module):
    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Pair()])
        self.config = SimpleNamespace(base_model_tp_plan=plan)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def example_inputs(self, batch: int, length: int) -> torch.Tensor:
        return torch.zeros(batch, length, 16, dtype=torch.bfloat16)


def test_a_config_with_a_plan_says_how_tp_divides_a_factorys_module() -> None:
    planned, plain = (
        trace_module(partial(Planned, plan), seq_length=16)
        for plan in ({"layers.*.up": "colwise", "layers.*.down": "rowwise"}, {})
    )
    assert {run.block.tp_limit for run in planned.runs} == {64}
    refused = why_tp(plain, 2)
    assert refused is not None
    assert "base_model_tp_plan" in str(refused.hint)
    assert why_tp(planned, 2) is None
