"""LoRA on fused experts: the parameters that peft counts, and the copies that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paraplan.errors import PlanError
from paraplan.model.expert_adapters import converts
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.reader import read_model
from paraplan.model.spec import ModelSpec
from paraplan.model.trainable import parse_trainable

QWEN: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}
pytestmark = [  # peft asks transformers by a name that this will drop, and warns of names that it made itself
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


def model_of(folder: Path, model_type: str, **fields: Any) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model_type} | fields))
    return read_model(str(path))


def counted_by_peft(targets: Any) -> int:
    transformers = pytest.importorskip("transformers", reason="builds the model")
    peft = pytest.importorskip("peft", reason="counts peft's parameters")
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**QWEN))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    return sum(one.numel() for name, one in adapted.named_parameters() if one.requires_grad and ".gate." not in name)


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ("q|k|v|o", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("q|gate|up|down", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("q|down", ["q_proj", "down_proj"]),
        ("all-linear|experts", "all-linear"),
    ],
)
def test_adapters_on_experts_have_the_parameters_that_peft_makes(tmp_path: Path, words: str, targets: Any) -> None:
    frozen = freeze(
        model_of(tmp_path, "qwen3_moe", **QWEN), parse_trainable(f"lora:r=4,targets={words}"), FrozenStorage()
    )
    assert frozen.num_trained == counted_by_peft(targets)


def test_the_sum_of_experts_and_their_adapters_is_kept_whatever_the_tokens(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen3_moe", **QWEN)
    frozen = freeze(model, parse_trainable("lora:r=4,targets=q|gate|up|down"), FrozenStorage())
    kept = sum(one.elements_of_copy for one in frozen.runs[0].block.saved)
    assert kept == 8 * (64 * 64 + 64 * 32)
    plain = freeze(model, parse_trainable("lora:r=4,targets=q"), FrozenStorage())
    assert not any(one.elements_of_copy for one in plain.runs[0].block.saved)


@pytest.mark.parametrize(("keeps", "elements"), [(True, 8 * (64 * 64 + 64 * 32)), (False, 0)])
def test_quantized_experts_keep_copies_where_they_are_dequantized_before_the_product(
    tmp_path: Path, keeps: bool, elements: int
) -> None:
    model, lora = model_of(tmp_path, "qwen3_moe", **QWEN), parse_trainable("lora:r=4,targets=q")
    storage = FrozenStorage(weights="nf4", reached=frozenset({"linear", "experts"}), keeps_copies=keeps)
    assert sum(one.elements_of_copy for one in freeze(model, lora, storage).runs[0].block.saved) == elements


def test_gate_without_up_is_refused_as_peft_refuses_it() -> None:
    with pytest.raises(PlanError, match="one tensor, and gate alone"):
        freeze(read_model("qwen3-30b-a3b"), parse_trainable("lora:r=4,targets=q|gate"), FrozenStorage())


def test_peft_passes_over_names_of_experts_in_families_that_it_does_not_convert() -> None:
    assert not converts("gpt_oss")
    lora = parse_trainable("lora:r=4,targets=q|gate|up|down")
    assert freeze(read_model("gpt-oss-20b"), lora, FrozenStorage()).num_trained == 24 * 4 * (2880 + 4096)
    with pytest.raises(PlanError, match="no linear layer is called"):
        freeze(read_model("gpt-oss-20b"), parse_trainable("lora:r=4,targets=gate|up"), FrozenStorage())


def test_shared_experts_have_adapters_by_the_same_names() -> None:
    frozen = freeze(read_model("moonlight-16b-a3b"), parse_trainable("lora:r=4,targets=gate|up|down"), FrozenStorage())
    names = {one.name for run in frozen.runs for one in run.block.parameters if one.trains}
    assert "mlp.shared_experts.gate_proj.lora_A.weight" in names
    assert "experts.gate_up_proj.lora_A.weight" in names


def test_the_families_are_those_of_transformers() -> None:
    conversion = pytest.importorskip("transformers.conversion_mapping", reason="has the families")
    known = {name for name, kind in conversion._MODEL_TO_CONVERSION_PATTERN.items() if kind in ("mixtral", "qwen2_moe")}
    assert {name for name in known if name.islower()} == {name for name in known if converts(name)}
