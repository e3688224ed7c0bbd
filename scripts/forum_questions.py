"""Questions that people ask in forums, our answers in two lines, and what is published or usual beside them.

    python scripts/forum_questions.py [--only WORD] [--json]

Each question is a command line, run as a user would. `expected` is what the answer of somebody who does this for a
living has in it; an answer without it is marked, and the script ends with the number of those.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

GUIDE = "huggingface.co/docs/transformers/perf_train_gpu_many"
TORCHTITAN = "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TORCHTUNE = "github.com/pytorch/torchtune README, memory and speed of recipes"
LLAMA3 = "Llama 3, arXiv:2407.21783, table 4"
MEGATRON = "Narayanan et al. 2021, arXiv:2104.04473, table 1"
DEEPSEEK = "DeepSeek-V3, arXiv:2412.19437, section 3.2"
TRL = "huggingface.co/docs/trl: DPO, GRPO and SFT trainers, speeding up training"
QLORA = "Dettmers et al. 2023, arXiv:2305.14314"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md"


class Question(NamedTuple):
    """What is asked, the command that answers, what an expert's answer has in it, and where that is said."""

    asked: str
    command: str
    expected: str
    usual: str
    source: str


QUESTIONS = (
    Question(
        "Llama-3-8B, full training on two RTX 4090",
        "recommend llama-3-8b --profile 2xrtx-4090 --seq-len 2k --global-batch 16",
        r"offload|LoRA|lora",
        "does not fit without offload; LoRA or QLoRA",
        TORCHTUNE,
    ),
    Question(
        "8B with LoRA on one RTX 4090",
        "recommend llama-3-8b --profile 1xrtx-4090 --seq-len 2k --global-batch 16 --train lora:r=16",
        r"fits: ",
        "LoRA in bf16 takes about 18 to 20 GiB of 24",
        TORCHTUNE,
    ),
    Question(
        "8B with QLoRA on one 16 GB T4",
        "recommend llama-3-8b --profile 1xt4 --seq-len 512 --global-batch 16 --train lora --base-weights nf4:double "
        "--precision fp16",
        r"fits: ",
        "7B in 4 bits trains in 6 to 10 GB",
        QLORA,
    ),
    Question(
        "Llama-3-70B with QLoRA on two RTX 4090",
        "recommend llama-3-70b --profile 2xrtx-4090 --seq-len 1k --global-batch 16 --train lora:r=16 "
        "--base-weights nf4:double",
        r"fits: |no plan fits",
        "FSDP and QLoRA, as answer.ai showed for two 24 GB cards",
        "answer.ai/posts/2024-03-06-fsdp-qlora.html",
    ),
    Question(
        "8B on four RTX 3090 without NVLink",
        "recommend llama-3-8b --profile 4xrtx-3090 --seq-len 2k --global-batch 16",
        r"offload|LoRA|lora",
        "FSDP with offload, or LoRA",
        GUIDE,
    ),
    Question(
        "8B on p4d.24xlarge (8 A100 40 GB)",
        "recommend llama-3-8b --profile p4d.24xlarge --seq-len 4k --global-batch 64",
        r"FSDP|ZeRO-3|tensor 2",
        "FSDP over 8 GPUs with activation checkpointing",
        "github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking",
    ),
    Question(
        "8B on one H100, everything trained",
        "recommend llama-3-8b --profile 1xh100 --seq-len 4k --global-batch 16",
        r"bf16-pure|8bit|LoRA|lora|offload",
        "pure bf16 with an 8-bit optimizer, or LoRA",
        TORCHTUNE,
    ),
    Question(
        "8B on 8 H100 at 4k",
        "recommend llama-3-8b --profile 8xh100 --seq-len 4k --global-batch 64",
        r"FSDP \(ZeRO-3\) over 8",
        "FSDP over 8 GPUs",
        TORCHTITAN,
    ),
    Question(
        "8B on 8 H100 in torchtitan with torch.compile",
        "recommend llama-3-8b --profile 8xh100 --seq-len 8k --global-batch 64 --framework torchtitan --compile",
        r"FSDP",
        "FSDP over 8 GPUs, local batch 1 to 2, compile",
        TORCHTITAN,
    ),
    Question(
        "70B on 8 H100",
        "recommend llama-3-70b --profile 8xh100 --seq-len 4k --global-batch 64",
        r"offload|no plan fits|LoRA|lora",
        "not without offload; 16 GPUs or more",
        GUIDE,
    ),
    Question(
        "70B on 64 H100 at 8k",
        "recommend llama-3-70b --profile dgx-h100 --nodes 8 --seq-len 8k --global-batch 128",
        r"FSDP|tensor",
        "FSDP over 64, or tensor 4 to 8 with a pipeline",
        TORCHTITAN,
    ),
    Question(
        "70B on 512 H100 in torchtitan",
        "recommend llama-3-70b --profile dgx-h100 --nodes 64 --seq-len 8k --global-batch 512 --framework torchtitan",
        r"FSDP|hybrid|tensor",
        "FSDP with tensor 8, or hybrid sharding",
        TORCHTITAN,
    ),
    Question(
        "72B at 32k tokens on 64 H100",
        "recommend llama-3-70b --profile dgx-h100 --nodes 8 --seq-len 32k --global-batch 64",
        r"context|tensor",
        "tensor 8 and context 2 to 4",
        LLAMA3,
    ),
    Question(
        "Qwen2.5-7B, no length said",
        "recommend qwen2.5-7b --profile 8xh100",
        r"of 4096 tokens",
        "4,096 tokens, and not the 131,072 that it takes",
        GUIDE,
    ),
    Question(
        "Mixtral 8x7B on 16 A100 in Megatron-Core",
        "recommend mixtral-8x7b --profile dgx-a100-80gb --nodes 2 --seq-len 4k --global-batch 256 "
        "--framework megatron-core",
        r"expert",
        "expert 8 with tensor 1 to 2 and a pipeline of 4",
        BRIDGE,
    ),
    Question(
        "DeepSeek-V3 on 2,048 H800",
        "recommend deepseek-v3 --profile hgx-h800 --nodes 256 --seq-len 4k --global-batch 15360 "
        "--framework megatron-core",
        r"expert",
        "pipeline 16, expert 64, ZeRO-1, fp8",
        DEEPSEEK,
    ),
    Question(
        "405B on 16,384 H100 at 8k",
        "recommend llama-3-405b --profile dgx-h100 --nodes 2048 --seq-len 8k --global-batch 2048 "
        "--framework megatron-core",
        r"tensor 8 .*pipeline|pipeline.* tensor 8|tensor 8",
        "tensor 8, pipeline 16, data 128",
        LLAMA3,
    ),
    Question(
        "405B on 16,384 H100 at 131k",
        "recommend llama-3-405b --profile dgx-h100 --nodes 2048 --seq-len 128k --global-batch 128 "
        "--framework megatron-core",
        r"context",
        "tensor 8, context 16, pipeline 16",
        LLAMA3,
    ),
    Question(
        "GPT-3 175B on 1,024 A100",
        "recommend gpt3-175b --profile dgx-a100-80gb --nodes 128 --seq-len 2k --global-batch 1536 "
        "--framework megatron-core",
        r"tensor|ZeRO",
        "tensor 8 inside of a machine, pipeline 8 to 16 between them",
        MEGATRON,
    ),
    Question(
        "BERT-large on 4 T4",
        "recommend {bert} --profile 4xt4 --seq-len 128 --global-batch 64 --precision fp16",
        r"DDP",
        "DDP in fp16",
        GUIDE,
    ),
    Question(
        "GPT-2 on 8 H100",
        "recommend gpt2 --profile 8xh100 --global-batch 512",
        r"DDP",
        "DDP",
        GUIDE,
    ),
    Question(
        "ViT-H on 8 A100",
        "recommend {vit} --profile 8xa100-80gb --global-batch 1024",
        r"DDP|ZeRO-[12]",
        "DDP",
        GUIDE,
    ),
    Question(
        "T5-11B on 8 A100 80 GB",
        "recommend {t5} --profile 8xa100-80gb --seq-len 512 --global-batch 64",
        r"FSDP|ZeRO|tensor",
        "FSDP or ZeRO-3",
        GUIDE,
    ),
    Question(
        "Whisper-large on 4 RTX 4090",
        "recommend {whisper} --profile 4xrtx-4090 --seq-len 448 --global-batch 64",
        r"DDP|ZeRO|FSDP",
        "DDP, or ZeRO-2",
        "huggingface.co/blog/fine-tune-whisper",
    ),
    Question(
        "CLIP ViT-L/14 on 8 A100",
        "recommend {clip} --profile 8xa100-80gb --seq-len 77 --global-batch 4096",
        r"DDP|ZeRO",
        "DDP",
        "github.com/mlfoundations/open_clip",
    ),
    Question(
        "Mamba-2.8B on 8 H100",
        "recommend {mamba} --profile 8xh100 --seq-len 1k --global-batch 64",
        r"(DDP|ZeRO|FSDP)",
        "data parallelism; with mamba_ssm's kernels",
        "github.com/state-spaces/mamba",
    ),
    Question(
        "8B with an optimizer named as in transformers",
        "estimate llama-3-8b --profile 8xh100 --seq-len 4k --dp 8 --zero 3 --optimizer paged_adamw_8bit",
        r"fits|Peak|peak",
        "transformers' names of --optim are known",
        "huggingface.co/docs/transformers/perf_train_gpu_one",
    ),
    Question(
        "70B on 8 MI300X",
        "recommend llama-3-70b --profile 8xmi300x --seq-len 4k --global-batch 64",
        r"FSDP|tensor",
        "FSDP over 8 GPUs: 1.5 TB hold it",
        "rocm.docs.amd.com, training with PyTorch",
    ),
    Question(
        "8B on Standard_ND96asr_v4 (Azure)",
        "recommend llama-3-8b --profile Standard_ND96asr_v4 --seq-len 4k --global-batch 64",
        r"A100",
        "8 A100 40 GB: FSDP with checkpointing",
        GUIDE,
    ),
    Question(
        "a machine that no list has: four RTX 3090 on PCIe, 10 GbE",
        "recommend gpt2-xl --gpu rtx-3090 --num-gpus 4 --link pcie --network 10g --global-batch 64",
        r"4 x NVIDIA GeForce RTX 3090",
        "the machine as it was described",
        GUIDE,
    ),
    Question(
        "Apple's GPU",
        "recommend gpt2 --profile mps --global-batch 8",
        r"Apple",
        "a sentence on what works",
        "pytorch.org/docs/stable/notes/mps.html",
    ),
    Question(
        "two machines of 8 RTX 4090 over 10 GbE",
        "recommend llama-2-7b --profile 8xrtx-4090 --nodes 2 --network 10g --seq-len 2k --global-batch 64",
        r"pipeline|no plan",
        "a pipeline over the slow link",
        GUIDE,
    ),
    Question(
        "fewest H100s for 70B",
        "recommend llama-3-70b --profile dgx-h100 --nodes 8 --seq-len 4k --global-batch 64 --find fewest-gpus",
        r"fewest GPUs that fit: (16|32)",
        "16 with everything sharded",
        GUIDE,
    ),
    Question(
        "the largest model on four A100",
        "recommend --profile 4xa100-80gb --find largest-model --seq-len 2k",
        r"largest bundled model",
        "13 to 30 B with full sharding",
        GUIDE,
    ),
    Question(
        "the largest batch of 8B on 8 H100",
        "recommend llama-3-8b --profile 8xh100 --seq-len 4k --find largest-batch",
        r"largest batch",
        "a number of sequences without accumulation",
        GUIDE,
    ),
    Question(
        "the longest sequence of 8B on 8 H100",
        "recommend llama-3-8b --profile 8xh100 --global-batch 8 --find longest-sequence",
        r"longest sequence",
        "several 100 k tokens with context parallelism",
        GUIDE,
    ),
    Question(
        "8B, 1T tokens, $2.5 a GPU-hour",
        "recommend llama-3-8b --profile 8xh100 --seq-len 8k --global-batch 512 --tokens 1T --price $2.5",
        r"GPU-hours",
        "days, GPU-hours and money",
        LLAMA3,
    ),
    Question(
        "8B, 1T tokens in 30 days: how many H100?",
        "recommend llama-3-8b --profile dgx-h100 --seq-len 8k --global-batch 1024 --find by-date --tokens 1T --days 30",
        r"or less: 64",
        "about 64 at 9 k tokens a second each",
        TORCHTITAN,
    ),
    Question(
        "Llama-3.2-1B, everything trained, on one RTX 4090",
        "recommend llama-3.2-1b --profile 1xrtx-4090 --seq-len 2k --global-batch 16",
        r"fits: (?!.*offload)",
        "fits with a fused optimizer",
        TORCHTUNE,
    ),
    Question(
        "DPO of an 8B with LoRA on one A100",
        "recommend llama-3-8b --profile 1xa100-80gb --seq-len 2k --global-batch 32 --task dpo --train lora:r=16",
        r"base model without its adapters",
        "no second model: the reference is the base with the adapters off",
        TRL,
    ),
    Question(
        "DPO of an 8B, everything trained, on 8 H100",
        "recommend llama-3-8b --profile 8xh100 --seq-len 2k --global-batch 64 --task dpo",
        r"ZeRO-[23]",
        "FSDP or ZeRO-3: two models to hold",
        TRL,
    ),
    Question(
        "GRPO of an 8B on 8 H100 with vLLM on the same GPUs",
        "recommend llama-3-8b --profile 8xh100 --seq-len 2k --global-batch 128 --task grpo:completion=1k --train lora",
        r"generation: each GPU keeps",
        "vLLM reserves 30 % of each GPU beside the trainer",
        TRL,
    ),
    Question(
        "samples of 500 tokens in sequences of 4,096",
        "recommend llama-3-8b --profile 8xh100 --seq-len 4k --global-batch 64 --sample-len 500",
        r"packed, ",
        "pack them: padding wastes seven eighths",
        TRL,
    ),
    Question(
        "tensor parallelism of 3 on 8 GPUs",
        "estimate llama-3-8b --profile 8xh100 --tp 3",
        r"use --tp 1, 2, 4 or 8|tp=3",
        "3 divides neither heads nor the machine",
        MEGATRON,
    ),
)
CONFIGS: dict[str, dict[str, object]] = {
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "image_size": 224,
        "patch_size": 14,
        "num_channels": 3,
        "hidden_act": "gelu",
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 1024,
        "d_ff": 65536,
        "d_kv": 128,
        "num_heads": 128,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "vocab_size": 32128,
    },
    "whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 1280,
        "encoder_layers": 32,
        "decoder_layers": 32,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
        "num_mel_bins": 80,
        "vocab_size": 51865,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
    "clip": {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 768,
        "text_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
        },
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
    },
    "mamba": {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "vocab_size": 50280,
        "state_size": 16,
    },
}
"""Shapes of published models that are not bundled, from their config.json on the hub."""


def ask(question: Question, folder: Path) -> dict[str, object]:
    """Return the answer of one question: its lines, whether it has what is expected, and seconds."""
    paths = {name: str(folder / name) for name in CONFIGS}
    words = shlex.split(question.command.replace("$", "\\$").format(**paths))
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "paraplan", *words], capture_output=True, text=True, env={**_environment()}
    )
    text = re.sub(r"\n +", " ", done.stderr + done.stdout)
    lines = [line for line in text.splitlines() if line.startswith(_TOLD)]
    return {
        "asked": question.asked,
        "command": shlex.join(["paraplan", *words]),
        "answer": [re.sub(r"\s+", " ", line) for line in lines],
        "usual": question.usual,
        "source": question.source,
        "as_expected": bool(re.search(question.expected, text)),
        "seconds": time.perf_counter() - started,
    }


_TOLD = (
    "error",
    "hint",
    "Plan  ",
    "Memory",
    "Speed",
    "Found",
    "Peak",
    "note: the largest",
    "Would fit",
    "Instead",
    "Samples",
)


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"COLUMNS": "400", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    """Ask all questions and print the answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="questions with this word")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    answers = []
    with tempfile.TemporaryDirectory(prefix="paraplan-questions-") as name:
        folder = Path(name)
        for model, fields in CONFIGS.items():
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(fields))
        for number, question in enumerate(QUESTIONS, start=1):
            if options.only not in f"{question.asked} {question.command}":
                continue
            found = ask(question, folder)
            answers.append(found)
            if not options.json:
                _show(number, found)
    if options.json:
        print(json.dumps(answers, indent=2))
    others = [found["asked"] for found in answers if not found["as_expected"]]
    print(f"{len(answers) - len(others)} of {len(answers)} answers have what is expected", file=sys.stderr)
    return len(others)


def _show(number: int, found: dict[str, object]) -> None:
    mark = "" if found["as_expected"] else "   <-- without what is expected"
    print(f"{number}. {found['asked']}  ({found['seconds']:.1f} s){mark}")
    print(f"   $ {found['command']}")
    answer = found["answer"]
    assert isinstance(answer, list)
    for line in answer:
        print(f"   {line}")
    print(f"   usual: {found['usual']} [{found['source']}]\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
