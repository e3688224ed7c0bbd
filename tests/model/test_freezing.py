from __future__ import annotations

from typing import Any

import pytest
import torch

from paraplan.errors import PlanError
from paraplan.model.config_file import ModelConfig
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.reader import read_fields, read_model
from paraplan.model.saved import saved_bytes
from paraplan.model.shapes import TransformerShapes, model_from_shapes
from paraplan.model.spec import ModelSpec
from paraplan.model.trainable import InputCopy, parse_trainable

HIDDEN, INNER, TOKENS = 256, 896, 512
# peft asks transformers by a name that this will drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def llama(num_layers: int = 4) -> ModelSpec:
    return model_from_shapes(
        TransformerShapes(
            num_layers=num_layers,
            hidden_size=HIDDEN,
            num_heads=8,
            num_kv_heads=2,
            ffn_hidden_size=INNER,
            vocab_size=1024,
            max_seq_length=TOKENS,
            activation="swiglu",
            tied_embeddings=False,
        )
    )


def saved_per_token(model: ModelSpec) -> float:
    block = model.runs[0].block
    return saved_bytes(block.saved, seq_length=TOKENS, micro_batch_size=1, kernel="sdpa") / TOKENS


def test_nothing_changes_where_all_trains() -> None:
    model = llama()
    assert freeze(model, parse_trainable("full"), FrozenStorage()) is model


def test_lora_trains_two_small_matrices_beside_each_layer() -> None:
    frozen = freeze(llama(), parse_trainable("lora:r=8,targets=q|v"), FrozenStorage())
    assert frozen.num_trained == 4 * (8 * (HIDDEN + HIDDEN) + 8 * (HIDDEN + HIDDEN // 4))
    assert frozen.parameters.total == llama().parameters.total + frozen.num_trained


@pytest.mark.parametrize(("words", "saved"), [("", None), ("+head+embeddings", ["embed_tokens", "lm_head"])])
def test_parameters_of_adapters_are_those_that_peft_counts(words: str, saved: list[str] | None) -> None:
    transformers = pytest.importorskip("transformers", reason="builds the model")
    peft = pytest.importorskip("peft", reason="counts peft's parameters")
    model = llama()
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1024,
    )
    with torch.device("meta"):
        adapted = peft.get_peft_model(
            transformers.LlamaForCausalLM(config),
            peft.LoraConfig(r=16, target_modules="all-linear", modules_to_save=saved),
        )
    frozen = freeze(model, parse_trainable(f"lora:r=16{words}"), FrozenStorage())
    assert frozen.parameters.total == sum(one.numel() for one in adapted.parameters())
    norms = HIDDEN if saved else 0  # the head's norm trains with it here, and not in peft
    assert frozen.num_trained == adapted.get_nb_trainable_parameters()[0] + norms


def test_older_bitsandbytes_keeps_the_inputs_of_products_in_four_bits() -> None:
    plain, kept = (
        saved_per_token(freeze(llama(), parse_trainable("lora:r=8,targets=q"), storage))
        for storage in (FrozenStorage(weights="nf4"), FrozenStorage(weights="nf4", keeps_quantized_inputs=True))
    )
    whole = FrozenStorage(weights="bf16", keeps_quantized_inputs=True)
    assert saved_per_token(freeze(llama(), parse_trainable("lora:r=8,targets=q"), whole)) == plain
    # Of the attention and of the MLP in, and the MLP's inner output; sdpa keeps the attention's output itself.
    assert kept - plain == pytest.approx(2 * (2 * HIDDEN + INNER), rel=0.01)


# Bytes for a token and hidden feature that torch's saved tensors of peft's model take in one block of these shapes, as
# measured with its storages counted: 51.16 where adapters copy their input in fp32, 36.66 where they share it.
@pytest.mark.parametrize(("copies", "measured"), [("fp32", 51.16), ("shared", 36.66)])
def test_what_a_block_keeps_is_what_torch_keeps_of_a_peft_model(copies: InputCopy, measured: float) -> None:
    frozen = freeze(llama(), parse_trainable("lora:r=16,targets=q|k|v|o"), FrozenStorage(input_copies=copies))
    assert saved_per_token(frozen) / HIDDEN == pytest.approx(measured, rel=0.01)


MIXTURE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 16},
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 16, "first_k_dense_replace": 0},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.filterwarnings("ignore")
def test_a_mixture_with_adapters_keeps_what_torch_keeps_of_a_peft_model(model_type: str) -> None:
    pytest.importorskip("transformers", reason="builds the model")
    peft = pytest.importorskip("peft", reason="puts adapters into the model")
    from paraplan.model.trace import trace_module
    from paraplan.model.transformers_model import library_factory

    config = ModelConfig("mixture", {"model_type": model_type} | MIXTURE | MIXTURES[model_type])
    build, tokens = library_factory(config), 1024

    def adapted() -> Any:
        targets = ["q_proj", "q_b_proj", "o_proj"]
        module = peft.get_peft_model(build().to(torch.bfloat16), peft.LoraConfig(r=4, target_modules=targets))
        module.enable_input_require_grads()
        return module

    targets = "q|o" if "q_lora_rank" not in config.fields else "q_b_proj|o"
    ours = freeze(read_fields(config), parse_trainable(f"lora:r=4,targets={targets}"), FrozenStorage())
    theirs = trace_module(adapted, seq_length=tokens)
    kept, traced = (
        saved_bytes(model.blocks[-1].saved, seq_length=tokens, micro_batch_size=1, kernel="sdpa")
        for model in (ours, theirs)
    )
    assert ours.num_trained == theirs.num_trained
    assert kept == pytest.approx(traced, rel=0.02)


def test_frozen_layers_keep_no_inputs_and_adapters_do() -> None:
    model = llama()
    only_norms = freeze(model, parse_trainable("norms"), FrozenStorage())
    kept = {tensor.role for tensor in only_norms.runs[0].block.saved}
    assert not kept & {"attention_input", "mlp_input", "mlp_inner_output"}
    with_mlp = freeze(model, parse_trainable("lora:r=8,targets=gate"), FrozenStorage(input_copies="shared"))
    kept = {tensor.role for tensor in with_mlp.runs[0].block.saved}
    assert "mlp_input" in kept
    assert "attention_input" not in kept


def test_dropout_keeps_a_mask_and_a_copy_of_the_input() -> None:
    plain, dropped = (
        freeze(llama(), parse_trainable(f"lora:r=8,targets=q{rest}"), FrozenStorage(input_copies="shared"))
        for rest in ("", ",dropout=0.1")
    )
    assert saved_per_token(dropped) - saved_per_token(plain) == HIDDEN * (2 + 1) - 2 * HIDDEN


def test_blocks_before_the_first_that_trains_have_no_backward_pass() -> None:
    frozen = freeze(llama(), parse_trainable("layers:last1"), FrozenStorage())
    assert [(run.count, run.block.has_backward) for run in frozen.runs] == [(3, False), (1, True)]
    assert frozen.num_trained == llama().runs[0].block.num_parameters


def test_quantized_weights_are_those_of_linear_layers_alone() -> None:
    frozen = freeze(llama(), parse_trainable("lora:r=8"), FrozenStorage(weights="nf4"))
    each = {one.name: one.frozen_bytes for one in frozen.runs[0].block.parameters}
    assert each["mlp.up_proj.weight"] == HIDDEN * INNER / 2 + HIDDEN * INNER / 64 * 4 + 64
    assert each["input_layernorm.weight"] == 2 * HIDDEN
    assert frozen.embedding.parameters[0].frozen_bytes == 2 * HIDDEN * 1024


def test_adapters_stand_beside_linear_layers_and_not_beside_routers_and_fused_experts() -> None:
    frozen = freeze(read_model("mixtral-8x7b"), parse_trainable("lora:r=16"), FrozenStorage())
    adapted = {one.name.partition(".lora")[0] for one in frozen.runs[0].block.parameters if "lora" in one.name}
    assert adapted == {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lora:r=512", "larger than"),
        ("lora:targets=query_proj", "no linear layer is called 'query_proj'"),
        ("layers:last9", "the model has 4"),
    ],
)
def test_what_a_model_does_not_have_is_refused(words: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        freeze(llama(), parse_trainable(words), FrozenStorage())
