from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.reader import find_config
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]
HIDDEN, LENGTH = 128, 128
SIZES = {
    "gpt2": {"n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen3": {
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 352,
    },
}


def kept_by_compiled_block(config: Any, *, autocast: bool, fp32_stream: bool) -> float:
    """Return the bytes that a compiled block keeps for one more sequence, as torch's saved tensors tell."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    block = model.transformer.h[0] if config.model_type == "gpt2" else model.model.layers[0]
    torch.compiler.reset()  # past so many kinds of inputs, code is no longer compiled
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    compiled = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False)

    def kept(micro_batch_size: int) -> int:
        stream = torch.randn(micro_batch_size, LENGTH, HIDDEN, dtype=torch.float32 if fp32_stream else torch.bfloat16)
        options: dict[str, Any] = {}
        if config.model_type != "gpt2":
            positions = torch.arange(LENGTH)[None]
            options["position_embeddings"] = model.model.rotary_emb(stream, positions)
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        stream.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            compiled(stream, **options)  # compiles, which packs tensors without values
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = compiled(stream, **options)
        del result
        return sum(size for address, size in storages.items() if address not in weights)

    return float(kept(4) - kept(2)) / 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own code asks for it
@pytest.mark.parametrize(
    ("precision", "zero_stage", "is_first", "family"),
    [
        ("bf16", 3, False, "qwen3"),
        # Families differ in operators, of which this one has most, and precisions in types: there are fewest of fp32.
        pytest.param("bf16", 0, True, "gpt2", marks=pytest.mark.with_all),
        pytest.param("fp32", 0, True, "gpt2", marks=pytest.mark.with_all),
        pytest.param("bf16", 0, True, "qwen3", marks=pytest.mark.with_all),
        pytest.param("fp32", 0, True, "qwen3", marks=pytest.mark.with_all),
        pytest.param("bf16", 3, False, "gpt2", marks=pytest.mark.with_all),
    ],
)
def test_a_compiled_block_keeps_what_torch_compile_keeps(
    workload: MakeWorkload, tmp_path: Path, family: str, precision: str, zero_stage: int, is_first: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=1, vocab_size=64, **SIZES[family])
    config.use_cache = False
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    # ZeRO gathers 16-bit weights, which keep the residual stream in 16 bits.
    fp32_stream = zero_stage == 0
    measured = kept_by_compiled_block(config, autocast=precision != "fp32", fp32_stream=fp32_stream)

    made = workload(str(tmp_path), seq_length=LENGTH, precision=precision, compiled=True)
    table = PlanTable.of_plans([ParallelPlan(dp=8, zero_stage=zero_stage)])
    costs = block_costs(made, table)
    kept = costs.saved_bytes if is_first else costs.later_saved_bytes
    assert kept[0, 0] == pytest.approx(measured, rel=0.01)


def test_compiled_blocks_move_less_and_keep_less_and_the_head_is_as_it_was(workload: MakeWorkload) -> None:
    plain, compiled = (workload("llama-3-8b", compiled=is_compiled) for is_compiled in (False, True))
    table = PlanTable.of_plans([ParallelPlan(dp=8, zero_stage=3)])
    before, after = block_costs(plain, table), block_costs(compiled, table)
    assert after.saved_bytes[0, 0] < before.saved_bytes[0, 0]
    assert after.forward_s[0, 0] < before.forward_s[0, 0]
    assert after.backward_s[0, 0] < before.backward_s[0, 0]
    assert after.head_s == before.head_s
    assert after.head_saved_bytes == before.head_saved_bytes


def test_the_first_published_gain_of_torch_compile_is_found(workload: MakeWorkload, tmp_path: Path) -> None:
    # nanoGPT's README, "efficiency notes": GPT-2 on an A100, 12 sequences of 1,024, from about 250 ms to 135 ms. Its
    # vocabulary is padded.
    padded = tmp_path / "padded.json"
    padded.write_text(json.dumps(json.loads(find_config("gpt2").read_text()) | {"vocab_size": 50304}))
    plan = ParallelPlan(micro_batch_size=12)
    plain, compiled = (
        estimate_plan(
            workload(
                str(padded),
                profile="dgx-a100-40gb",
                seq_length=1024,
                global_batch_size=12,
                attention="eager",
                compiled=each,
            ),
            plan,
        ).step.step_time_s
        for each in (False, True)
    )
    assert plain == pytest.approx(0.250, rel=0.15)
    assert compiled == pytest.approx(0.135, rel=0.15)


def test_what_complex_numbers_turn_is_moved_in_fp32_under_torch_compile(workload: MakeWorkload) -> None:
    table = PlanTable.of_plans([ParallelPlan(dp=8, zero_stage=3)])

    def forward_s(framework: str, *, compiled: bool) -> float:
        made = workload("llama-3-8b", "dgx-a100", seq_length=8192, attention="flash", compiled=compiled)
        made = Workload.of(made.model, made.training, made.cluster, framework=framework)
        return float(block_costs(made, table).forward_s[0, 0])

    added_s = forward_s("torchtitan", compiled=True) - forward_s("fsdp", compiled=True)
    tokens, turned = 1 * 8192, (32 + 8) * 128
    rate = workload("llama-3-8b", "dgx-a100").memory_bandwidth_bytes_per_s
    assert added_s == pytest.approx(16 * tokens * turned / rate, rel=1e-6)
    # Without torch.compile each operation reads and writes, complex or not.
    assert forward_s("torchtitan", compiled=False) == forward_s("fsdp", compiled=False)


def test_causal_attention_of_short_sequences_is_slower(workload: MakeWorkload) -> None:
    tokens = 16384

    def forward_s(length: int) -> float:
        made = workload("llama-3-8b", "dgx-a100", seq_length=length, global_batch_size=128, attention="flash")
        table = PlanTable.of_plans([ParallelPlan(dp=8, micro_batch_size=tokens // length)])
        return float(block_costs(made, table).forward_s[0, 0])

    def scores(length: int) -> float:  # half of them, and more beside the diagonal
        return (1 + 350 / length) * 0.5 * tokens * length

    # Of as many tokens attention alone differs.
    differences = [forward_s(tokens) - forward_s(length) for length in (2048, 4096)]
    expected = [scores(tokens) - scores(length) for length in (2048, 4096)]
    assert differences[0] / differences[1] == pytest.approx(expected[0] / expected[1], rel=1e-6)
