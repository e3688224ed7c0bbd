#!/usr/bin/env python3
"""Train tiny models of many kinds under every kind of plan on two ranks, and compare with plain torch: a table.

    paraplan launch --nproc-per-node 2 scripts/check_families.py [FAMILY ...]
    paraplan launch --nproc-per-node 2|4|8 scripts/check_families.py --experts [FAMILY ...]

Each model is built from scratch by transformers, with its own loss (labels among its inputs, some of them masked). Loss
and every gradient of a first step are compared with those of the whole batch in one piece. Status 1 if any is wrong.
With `--experts` every model with experts is taken that shrinks by its configuration alone, of text or given text alone,
under plans with ep, without the check of `prepare`, whose work this is.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.model.shrink import Smaller
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks.references import Verify
from paraplan.script_check.small_model import build_small

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))
tiny_transformers: Any = importlib.import_module("tiny_transformers")  # those of the tests

BATCH, TOKENS, VOCABULARY, CLASSES = 8, 12, tiny_transformers.VOCABULARY, 3
LOSS_TOLERANCE, GRADIENT_TOLERANCE, EXPERTS_TOLERANCE = 1e-5, 1e-4, 1e-5
ROUNDINGS = 4  # as much as this many times what rounding the weights otherwise moves is allowed too
LARGEST = 20_000_000  # parameters of a model that is taken with --experts

PLANS = {
    "DDP": ParallelPlan(dp=2, num_microbatches=2, micro_batch_size=2),
    "ZeRO-3": ParallelPlan(dp=2, zero_stage=3, num_microbatches=2, micro_batch_size=2),
    "pp 1F1B": ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=4, micro_batch_size=2),
    "pp zero bubble": ParallelPlan(pp=2, pipeline_schedule="zero_bubble", num_microbatches=4, micro_batch_size=2),
    "tp": ParallelPlan(tp=2, num_microbatches=2, micro_batch_size=4),
    "tp, sequence parallel": ParallelPlan(tp=2, sequence_parallel=True, num_microbatches=2, micro_batch_size=4),
    "cp": ParallelPlan(cp=2, num_microbatches=2, micro_batch_size=4),
}
COMPILED = ", compiled"
PLANS |= {name + COMPILED: PLANS[name] for name in ("tp, sequence parallel", "cp")}

EXPERT_PLANS = {
    "ep 2": ParallelPlan(dp=2, ep=2, num_microbatches=2, micro_batch_size=2),
    "ep 2, ZeRO-3": ParallelPlan(dp=2, ep=2, zero_stage=3, num_microbatches=2, micro_batch_size=2),
    "ep 4": ParallelPlan(dp=4, ep=4, num_microbatches=2),
    "ep 2 of 4, ZeRO-3": ParallelPlan(dp=4, ep=2, zero_stage=3, num_microbatches=2),
    "ep 2, pp 1F1B": ParallelPlan(
        dp=2, pp=2, ep=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2, zero_stage=1
    ),
    "ep 2, tp": ParallelPlan(dp=2, tp=2, ep=2, num_microbatches=2, micro_batch_size=2),
    "ep 4, cp": ParallelPlan(dp=2, cp=2, ep=4, num_microbatches=2, micro_batch_size=2),
    "ep 4 of 8, ZeRO-2": ParallelPlan(dp=8, ep=4, zero_stage=2),
    "ep 4, pp 1F1B": ParallelPlan(dp=4, pp=2, ep=4, pipeline_schedule="1f1b", num_microbatches=2, zero_stage=1),
    "ep 4, tp, cp": ParallelPlan(dp=2, tp=2, cp=2, ep=4, num_microbatches=2, micro_batch_size=2),
}
DRAWING = ("phimoe",)
"""Families whose routers draw random numbers in training: they are compared as in evaluation."""

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
_WIDE = _SIZES | {"vocab_size": VOCABULARY, "num_attention_heads": 4, "intermediate_size": 48}
_BART = {
    f"{part}_{size}": number
    for part in ("encoder", "decoder")
    for size, number in (("attention_heads", 4), ("ffn_dim", 48), ("layers", 2))
}
_IMAGES = {"image_size": 32, "num_labels": CLASSES}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n_text": (  # whose last two layers attend to the keys and values of those before them
        "CausalLM",
        _WIDE
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
        | {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "mamba": ("CausalLM", _SIZES | {"vocab_size": VOCABULARY, "state_size": 8}),
    "mamba2": (
        "CausalLM",
        _SIZES
        | {"vocab_size": VOCABULARY, "state_size": 8, "chunk_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    ),
    "rwkv": ("CausalLM", _SIZES | {"vocab_size": VOCABULARY, "context_length": 64}),
    "albert": ("MaskedLM", _WIDE | {"embedding_size": 16}),
    "t5": (
        "Seq2SeqLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "bart": ("Seq2SeqLM", _BART | {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64}),
    "vit": ("ImageClassification", _WIDE | _IMAGES | {"patch_size": 8}),
    "swin": (
        "ImageClassification",
        _IMAGES | {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2},
    ),
    "convnext": ("ImageClassification", _IMAGES | {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}),
}
"""Families that the tests of tiny models leave out, each with its task."""
DECODERS = (
    *("llama", "qwen3", "gpt2", "gemma3_text", "gpt_oss", "llama4_text", "mixtral", "qwen3_moe", "deepseek_v3"),
    "bert",
)
WINDOWS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 4, "no_rope_layers": [1, 0]},
}
_PARTLY_ROTATED = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
_GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
EXPERT_FIELDS: dict[str, dict[str, Any]] = {  # which default configurations leave out, or have without experts
    "beam": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    | {"mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "doge": {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_theta": 5e5, "mrope_section": [22, 22, 20]}}},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"text_config": _GEMMA_EXPERTS},
    "gemma4_text": _GEMMA_EXPERTS,
    "glm4v_moe": {"text_config": {"rope_parameters": _PARTLY_ROTATED | {"mrope_section": [8, 12, 12]}}},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granitemoehybrid": _WIDE
    | {"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8}
    | {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 48, "zero_expert_num": 2},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": BATCH * TOKENS},
    "step3p7": {"text_config": {"sliding_window": 8, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "switch_transformers": {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "decoder_start_token_id": 0}
    | {"router_jitter_noise": 0.0},
}


def build(family: str) -> nn.Module:
    """Return a model of `family` without dropout; torch's seed decides its weights."""
    if family in tiny_transformers.FAMILIES:
        small: nn.Module = tiny_transformers.build(family, **WINDOWS.get(family, {}))
        return small
    head, fields = OTHERS[family]
    config = transformers.AutoConfig.for_model(family, **fields)
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config, dtype=torch.float32)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return model.train()


def batch_of(family: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the inputs of a global batch with the labels among them; sequences have different numbers of these."""
    generator = torch.Generator().manual_seed(3)
    if OTHERS.get(family, ("",))[0] == "ImageClassification":
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    ids = torch.randint(1, min([VOCABULARY, *tables]), (BATCH, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:3, 4:] = -100
    labels[5, 2:] = -100
    return {"input_ids": ids, "labels": labels}


def classes() -> dict[str, str]:
    """Return the class of each family that makes logits of tokens: alone, of a translation, or beside images."""
    from transformers.models.auto import modeling_auto as auto

    tables: list[dict[str, Any]] = [
        *(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ]
    return {family: name for table in tables for family, name in table.items() if isinstance(name, str)}


def build_shrunk(family: str) -> nn.Module:
    """Return a small model of `family` by its default configuration."""
    with tempfile.TemporaryDirectory() as folder:
        words = {"model_type": family, "architectures": [classes()[family]]} | EXPERT_FIELDS.get(family, {})
        (Path(folder) / "config.json").write_text(json.dumps(words), encoding="utf-8")
        model = build_small(folder, Smaller(num_layers=2, tp=1, cp=1, seq_length=TOKENS, keeps_width=False))
        return model.train(family not in DRAWING)


def families_with_experts() -> list[str]:
    """Return the families of transformers whose code has experts."""
    modules = {
        family: inspect.getmodule(getattr(transformers, name))
        for family, name in sorted(classes().items())
        if hasattr(transformers, name)
    }
    return [
        family
        for family, module in modules.items()
        if module and re.search(r"Experts\(|MoE\(", inspect.getsource(module))
    ]


def why_left_out(family: str) -> str | None:
    """Return why a family has no row: its configuration alone makes no small model with experts."""
    try:
        model = build_shrunk(family)
        with torch.no_grad():
            losses = [float(model(**batch_of(family, model)).loss) for _ in range(2)]
    except Exception as error:  # whatever their code raises for so small a model
        return f"does not run so small ({type(error).__name__})"
    if losses[0] != losses[1]:
        return "draws random numbers, of which ranks have others than one process"
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"still has {count:,} parameters" if count > LARGEST else None


def alone(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one process, and its gradients by the names of parameters."""
    loss = model(**batch).loss
    loss.backward()
    return loss, {name: held.grad for name, held in model.named_parameters() if held.grad is not None}


def shaken(model: nn.Module) -> nn.Module:
    """Return `model` with every weight moved by at most the rounding of its type."""
    with torch.no_grad():
        for held in model.parameters():
            held.mul_(1 + torch.empty_like(held).uniform_(-1, 1) * torch.finfo(held.dtype).eps)
    return model


def verdict(
    family: str,
    plan: ParallelPlan,
    *,
    compile_backend: str | None = None,
    make: Callable[[str], nn.Module] = build,
    tolerance: float = GRADIENT_TOLERANCE,
    verify: Verify = "auto",
) -> str:
    """Return "right", why the plan is refused, or by how much it is wrong."""
    torch.manual_seed(0)
    model = make(family)
    batch = batch_of(family, model)
    expected, gradients = alone(copy.deepcopy(model), batch)
    _, rounded = alone(shaken(copy.deepcopy(model)), batch)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    try:
        job = runtime.init(plan, shows_progress=False)
        engine = job.prepare(
            model,
            loss_fn=lambda outputs, _: outputs.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            example_inputs={name: value[:2] for name, value in batch.items()},
            compile_backend=compile_backend,
            verify=verify,
        )
        share = BATCH // job.dp
        own = {name: value[job.dp_rank * share : (job.dp_rank + 1) * share] for name, value in batch.items()}
        loss = engine.step(own, own["labels"])
    except ParaplanError as error:
        return str(error.message)
    except Exception as error:  # in torch's words, of which the table has the first line
        return f"WRONG: {type(error).__name__}: {str(error).splitlines()[0]}"
    off = abs(loss.item() - expected.item()) / abs(expected.item())
    errors = {"loss": off / LOSS_TOLERANCE}
    for name, held in engine.parameters.items():
        if name in gradients:  # of an expert, some ranks have none
            scale = max(float(gradients[name].abs().max()), 1e-3 * largest)
            whole = engine.whole(name, torch.zeros_like(held) if held.grad is None else held.grad)
            allowed = max(tolerance * scale, ROUNDINGS * float((rounded[name] - gradients[name]).abs().max()))
            errors[name] = float((whole - gradients[name]).abs().max()) / allowed
    worst = max(errors, key=lambda name: errors[name])
    return "right" if errors[worst] <= 1.0 else f"WRONG: {worst}, {errors[worst]:.0f} times what is allowed"


def print_table(families: list[str], plans: dict[str, ParallelPlan], cell: Callable[..., str], *, is_main: bool) -> int:
    """Print a row for each family, and why plans were refused; return 1 where one was wrong."""
    reasons: list[str] = []
    rows = [["model", *plans], ["---"] * (len(plans) + 1)]
    for family in families:
        row = [family]
        for name, plan in plans.items():
            result = cell(family, plan, compile_backend="aot_eager" if name.endswith(COMPILED) else None)
            if result != "right" and not result.startswith("WRONG"):
                why = re.sub(r"^rank \d+ ended [^:]*: ", "", result)
                reasons += [why] if why not in reasons else []
                result = f"refused ({reasons.index(why) + 1})"
            row.append(result)
        rows.append(row)
        if is_main:
            print(*(f"| {' | '.join(cells)} |" for cells in (rows if len(rows) == 3 else [row])), sep="\n", flush=True)
    if is_main:
        print("", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)), sep="\n")
    return int(any(cell.startswith("WRONG") for row in rows for cell in row))


def main(arguments: list[str]) -> int:
    """Print the table; return the status."""
    torch.set_num_threads(1)
    families = [one for one in arguments if not one.startswith("--")]
    if "--experts" not in arguments:
        is_main = runtime.init(ParallelPlan(dp=2), shows_progress=False).is_main
        return print_table(families or [*DECODERS, *OTHERS], PLANS, verdict, is_main=is_main)
    job = runtime.init(shows_progress=False)
    plans = {name: plan for name, plan in EXPERT_PLANS.items() if plan.world_size == job.world.size}
    left_out = {family: why_left_out(family) for family in families or families_with_experts()}
    for family, why in left_out.items():
        if why is not None and job.is_main:
            sys.stderr.write(f"{family} {why}\n")
    cell = partial(verdict, make=build_shrunk, tolerance=EXPERTS_TOLERANCE, verify="off")
    return print_table([one for one, why in left_out.items() if why is None], plans, cell, is_main=job.is_main)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
