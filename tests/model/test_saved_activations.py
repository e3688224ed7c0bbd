from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import bundled_models, read_fields, read_model
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import BlockSpec

COUNTED = json.loads((Path(__file__).parent / "counted_variants.json").read_text(encoding="utf-8"))["variants"]


def _fused(block: BlockSpec, seq_length: int, kernel: str, *, core: bool = True) -> float:
    tensors = [tensor for tensor in block.saved_fused if core or not tensor.in_attention_core]
    return saved_bytes(tensors, seq_length=seq_length, micro_batch_size=1, kernel=kernel)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "s"), [("gpt3-175b", 2048), ("gpt2", 1024), ("gpt2-xl", 512)])
def test_a_gpt_block_keeps_what_korthikanti_counts(name: str, s: int) -> None:
    # Korthikanti et al. 2022, table 2, without parallelism: sbh (34 + 5 a s / h). It leaves out the norms' statistics.
    model = read_model(name)
    block = model.blocks[0]
    assert block.attention is not None
    h, a = model.hidden_size, block.attention.num_heads
    assert _fused(block, s, "eager") == pytest.approx(s * h * (34 + 5 * a * s / h), rel=1e-3)


def test_selective_recompute_leaves_34_sbh() -> None:
    # Korthikanti et al. 2022, table 2, last rows: 34 sbh / t with the attention core recomputed.
    model = read_model("gpt3-175b")
    s, h = 2048, model.hidden_size
    assert _fused(model.blocks[0], s, "eager", core=False) == pytest.approx(34 * s * h, rel=1e-3)


def test_tensor_parallelism_alone_leaves_10_sbh_undivided() -> None:
    # Korthikanti et al. 2022, table 2: sbh (10 + 24/t + 5as/(ht)) with tensor, all / t with sequence parallelism.
    model = read_model("gpt3-175b")
    s, h = 2048, model.hidden_size
    by_split = {
        split: saved_bytes(
            [
                tensor
                for tensor in model.blocks[0].saved_fused
                if tensor.split == split and not tensor.in_attention_core
            ],
            seq_length=s,
            micro_batch_size=1,
            kernel="eager",
        )
        for split in ("tensor", "sequence", "none")
    }
    assert by_split["sequence"] == pytest.approx(10 * s * h, rel=2e-3)
    assert by_split["tensor"] == pytest.approx(24 * s * h, rel=1e-3)
    assert by_split["none"] == 0


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "llama-3-405b"])
def test_a_llama_block_under_flash_attention_keeps_the_closed_form(name: str) -> None:
    # By hand, in half precision without dropout: two norm inputs and outputs, query and attention output 2h each;
    # keys and values 2hk/a each; gate, up and product 2f each; one fp32 number a head. The norms' roots are left out.
    model = read_model(name)
    block = model.blocks[0]
    assert block.attention is not None
    h, a, k = model.hidden_size, block.attention.num_heads, block.attention.num_kv_heads
    f = next(matmul.n for matmul in block.matmuls if matmul.name == "mlp.up_proj")
    assert _fused(block, 1, "flash") == pytest.approx(12 * h + 4 * h * k / a + 6 * f + 4 * a, rel=1e-3)


def test_modules_keep_more_than_fused_kernels_and_flash_less_than_eager() -> None:
    for case in COUNTED:
        for block in read_fields(ModelConfig("variant", case["config"])).blocks:
            fused, modules = (
                saved_bytes(tensors, seq_length=512, micro_batch_size=1, kernel="eager")
                for tensors in (block.saved_fused, block.saved)
            )
            flash = saved_bytes(block.saved, seq_length=512, micro_batch_size=1, kernel="flash")
            assert fused <= modules
            assert flash <= modules
            has_kernels = any(one.kernels is not None for one in block.saved)
            assert (flash < modules) == has_kernels  # MiniMax's linear attention has one way to run


def test_only_eager_attention_grows_with_the_square_of_the_sequence() -> None:
    block = read_model("llama-3-8b").blocks[0]

    def kept(seq_length: int, kernel: str) -> float:
        return saved_bytes(block.saved, seq_length=seq_length, micro_batch_size=1, kernel=kernel)  # type: ignore[arg-type]

    assert kept(2048, "flash") == 2 * kept(1024, "flash")
    scores = 32 * (4 + 2)  # fp32 probabilities and their half-precision copy for each of 32 heads
    assert kept(2048, "eager") - 2 * kept(1024, "eager") == scores * (2048**2 - 2 * 1024**2)


def test_in_fp32_the_copies_in_half_precision_are_not_kept() -> None:
    block = read_model("llama-3-8b").blocks[0]
    pairs = [tensor for tensor in block.saved if tensor.elements_per_token_pair]
    in_fp32 = saved_bytes(pairs, seq_length=64, micro_batch_size=1, kernel="eager", bytes_per_element=4)
    assert in_fp32 == 4 * 32 * 64**2


def test_a_tensor_shared_by_the_batch_is_kept_once() -> None:
    rotary = [tensor for tensor in read_model("llama-3-8b").embedding.saved if tensor.is_shared_by_batch]
    assert rotary
    one, four = (saved_bytes(rotary, seq_length=64, micro_batch_size=b, kernel="flash") for b in (1, 4))
    assert one == four == 64 * 2 * 128 * 2


def test_dropout_keeps_masks_only_where_the_config_trains_with_it() -> None:
    fields = json.loads(bundled_models()["gpt2"].read_text(encoding="utf-8"))
    without = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    model = read_fields(ModelConfig("gpt2", fields | without))
    kinds = {tensor.element_type for block in (model.embedding, *model.blocks) for tensor in block.saved}
    assert "mask" not in kinds
    assert "mask" in {tensor.element_type for tensor in read_model("gpt2").blocks[0].saved}
