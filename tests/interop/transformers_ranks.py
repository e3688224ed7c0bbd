"""What ranks do in the tests of exports for transformers: train a small model by an exported file."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch

STEPS, LENGTH, WORDS = 2, 16, 96

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""A small model of each family: the class of its config, and what it has beside the sizes of all."""


def save_model(family: str, folder: str) -> None:
    """Write a small model of a family with random weights."""
    import transformers

    name, others = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(_SIZES | others))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


def _exported(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(path: str, folder: str) -> list[tuple[float, float]]:
    """Return loss and norm of each step of the Trainer that an exported file makes, on the CPU."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    module = _exported(path)
    torch.manual_seed(0)  # of adapters
    trainer = module.train(
        _rows(64),
        module.load_model(folder),
        output_dir=folder + "/out",
        use_cpu=True,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
    )
    return [(line["loss"], float(line["grad_norm"])) for line in trainer.state.log_history if "loss" in line]


def train_in_a_loop(path: str, folder: str, rank: int, ranks: int) -> list[tuple[float, float]]:
    """Return this rank's loss and the norm of each step of the exported loop; `ranks` have sequences of their own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    module = _exported(path)
    module.LEARNING_RATE = 1e-2
    micro = module.training_arguments(folder + "/out", use_cpu=True, report_to=[]).per_device_train_batch_size
    steps = module.training_arguments(folder + "/out", use_cpu=True, report_to=[]).gradient_accumulation_steps
    rows = torch.stack([row["input_ids"] for row in _rows(STEPS * micro * steps * ranks)])
    shares = rows.view(STEPS, steps, ranks, micro, LENGTH)[:, :, rank]
    batches = [[{"input_ids": each, "labels": each} for each in step] for step in shares]
    torch.manual_seed(0)
    model = module.load_model(folder)
    return [(float(loss), float(norm)) for loss, norm in module.train_in_a_loop(batches, model, max_norm=0.5)]
