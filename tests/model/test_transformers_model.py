"""Configurations of families that no reader describes: built by transformers without values, and traced."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paraplan.api.models import usual_length
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import ModelError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="torch or transformers is not installed",
)
UNREAD: dict[str, Any] = {
    "model_type": "helium",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def _write(folder: Path, **changes: object) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(UNREAD | changes), encoding="utf-8")
    return str(path)


@needs_transformers
def test_a_family_without_a_reader_is_counted_as_transformers_builds_it(tmp_path: Path) -> None:
    model = read_model(_write(tmp_path), seq_length=64)
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64  # query, key, value, output; gated MLP; two norms
    assert (model.parameters.embedding, model.parameters.blocks, model.parameters.head) == (
        128 * 64,
        3 * block,
        128 * 64 + 64,
    )
    assert (model.name, model.model_type, model.max_seq_length, model.num_blocks) == ("model", "helium", 256, 3)
    products = 2 * (3 * (block - 2 * 64) + 128 * 64)
    assert model.flops_per_token(64, with_attention=False) == products


@needs_transformers
def test_an_encoder_decoder_and_an_image_model_get_their_own_inputs(tmp_path: Path) -> None:
    text: dict[str, Any] = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
    text |= {
        "num_hidden_layers": 2,
        "d_model": 64,
        "d_ff": 96,
        "d_kv": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
    }
    image: dict[str, Any] = {
        "model_type": "deit",
        "architectures": ["DeiTForImageClassification"],
        "image_size": 32,
        "patch_size": 16,
        "num_hidden_layers": 2,
    }
    assert read_model(_write(tmp_path, **image)).num_blocks == 2
    assert read_model(_write(tmp_path, **text), seq_length=16).num_blocks == 4


SPEECH: dict[str, Any] = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_source_positions": 512,
    "max_target_positions": 448,
    "max_position_embeddings": None,
}


@needs_transformers
def test_attention_over_sound_is_attention_whatever_the_length_of_the_text(tmp_path: Path) -> None:
    path = _write(tmp_path, **SPEECH)
    models = {length: read_model(path, seq_length=length) for length in (128, 511, 512)}
    for length, model in models.items():
        encoder, decoder = model.runs[0].block, model.runs[-1].block
        heard = 4.0 * 512 * 512 * 128  # both products of the encoder's attention, all heads
        apart = [one for one in (encoder.attention, encoder.cross_attention) if one is not None]
        assert sum(one.flops_per_token(length) for one in apart) * length == pytest.approx(heard)
        assert decoder.attention is not None
        assert decoder.cross_attention is not None
        assert decoder.cross_attention.flops_per_token(length) == pytest.approx(4.0 * 512 * 128)
        assert not any(one.name.startswith("attention") for one in (*encoder.matmuls, *decoder.matmuls))
    plan, cluster = ParallelPlan(micro_batch_size=256), cluster_from_profile("1xa100")

    def step_s(length: int) -> float:
        training = TrainingSpec(global_batch_size=256, seq_length=length, precision="bf16")
        return estimate_plan(Workload.of(models[length], training, cluster), plan).step.step_time_s

    assert step_s(128) < step_s(511) == pytest.approx(step_s(512), rel=0.02)


@needs_transformers
def test_the_length_of_a_speech_model_is_that_of_its_text(tmp_path: Path) -> None:
    model = read_model(_write(tmp_path, **SPEECH))
    assert model.max_seq_length == 448
    assert usual_length(model) == 448


@needs_transformers
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["pipeline"]}, "architectures names 'pipeline', which transformers"),
        ({"architectures": ["GraniteForTelepathy"]}, "architectures names 'GraniteForTelepathy'"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "deit"}, "language model or classifier|failed while"),
    ],
)
def test_what_transformers_cannot_build_is_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(_write(tmp_path, **changes))


@needs_transformers
@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_packages_that_transformers_needs_are_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": {}}
    path.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ModelError) as refused:
        read_model(str(path))
    assert refused.value.message.endswith("which are not installed")
    assert "timm" in refused.value.message
    assert "text_config as a file of its own" in str(refused.value.hint)


@needs_transformers
def test_code_of_a_configuration_is_not_executed_for_a_type_that_transformers_knows(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    auto_map = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}
    path = _write(tmp_path, auto_map=auto_map, trust_remote_code=True)
    assert read_model(path, seq_length=16).model_type == "helium"


def _read_in_new_process(reference: str, before: str = "", **environment: str) -> str:
    code = (
        f"import sys\n{before}\n"
        "from paraplan.errors import ModelError\n"
        "from paraplan.model.reader import read_model\n"
        f"try: read_model({reference!r})\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return done.stdout


def test_a_hub_that_cannot_be_reached_is_told() -> None:
    told = _read_in_new_process("nobody/no-such-model", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and it is not in the cache" in told
    assert "check the name, the network" in told


def test_without_transformers_an_unknown_type_says_that_it_may_help(tmp_path: Path) -> None:
    told = _read_in_new_process(_write(tmp_path), before="sys.modules['transformers'] = None")
    assert "no reader knows model_type='helium'" in told
    assert "install transformers" in told
