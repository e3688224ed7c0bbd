"""Fine-tune a causal language model by LoRA on text, under any plan, and write the adapters in peft's own files.

    python scripts/train_lora.py --model path/to/llama --data ~/texts --output adapters
    paraplan launch --plan plan.json scripts/train_lora.py --model path/to/llama --data ~/texts --output adapters

`--model` is a folder that transformers and peft read: configuration, weights and, where there is one, the tokenizer.
Without a tokenizer text is read as bytes, one token each. By default the text is the sources of Python's own standard
library. The model is peft's, untouched: what `--train lora:...` of the plan says is given to it as its LoraConfig.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_hf import loss_fn
from train_lm import (
    MANY_EPOCHS,
    VOCABULARY,
    Windows,
    batch_and_seq_length,
    bytes_of,
    main,
    options_of_training,
    read_text,
    show_steps,
    show_validation,
)

from paraplan import runtime
from paraplan.errors import ModelError, UsageError
from paraplan.model.trainable import AdapterSpec
from paraplan.plan.training import TrainingPrecision, TrainingSpec

MOST_CHARACTERS = 2**20  # of the text: a tokenizer takes a second for so many
B_RATE = 16.0  # of the B matrices beside that of A: LoRA+ (Hayou et al. 2024, section 5)


def adapter_of(planned: TrainingSpec | None, rank: int) -> AdapterSpec:
    """Return what the plan trains, or LoRA of `rank` beside all linear layers where it does not say."""
    adapter = None if planned is None else planned.trainable.adapter
    if adapter is not None and adapter.kind == "ia3":
        raise UsageError(
            "the plan trains ia3, and this script trains LoRA", hint="make the plan with --train lora:r=16"
        )
    return adapter or AdapterSpec(rank=rank)


def build_model(folder: Path, adapter: AdapterSpec, precision: TrainingPrecision) -> nn.Module:
    """Return the model in `folder` with new adapters. Frozen weights are in the type that matmuls compute in."""
    try:
        import peft
        import transformers
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed", hint="pip install transformers peft") from None
    transformers.utils.logging.disable_progress_bar()
    types = {"fp32": torch.float32, "fp16": torch.float16}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=types.get(precision, torch.bfloat16), local_files_only=True
    )
    model.config.use_cache = False
    linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    targets = sorted(name for name in linear if name.startswith(adapter.targets))
    if adapter.targets != ("all-linear",) and not targets:
        raise ModelError(
            f"no linear layer of the model is named {' or '.join(adapter.targets)}",
            hint=f"it has {', '.join(sorted(linear))}",
        )
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=2 * adapter.rank,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.is_scaled_by_root,
        use_dora=adapter.kind == "dora",
        target_modules=targets or "all-linear",
    )
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=precision != "bf16-pure")
    return adapted


def tokens_of(text: bytes, folder: Path, vocabulary: int) -> torch.Tensor:
    """Return the tokens of `text` by the tokenizer in `folder`, or its bytes where there is none."""
    if (folder / "tokenizer_config.json").exists():
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return torch.tensor(tokenizer(text.decode(errors="replace")[:MOST_CHARACTERS])["input_ids"])
    if vocabulary < VOCABULARY:
        raise ModelError(f"{folder}: vocab_size={vocabulary} has no room for {VOCABULARY} bytes")
    return bytes_of(text[:MOST_CHARACTERS])


def make_optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return AdamW over the adapters, whose B matrices learn faster (LoRA+)."""
    named = [(name, one) for name, one in parameters.named() if one.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for name, one in named if "lora_B" not in name]},
        {"params": [one for name, one in named if "lora_B" in name], "lr": rate * B_RATE},
    ]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=0.0, fused=torch.cuda.is_available())


def train(arguments: argparse.Namespace) -> None:
    """Train under the plan of the launcher, and print the validation loss before and after."""
    if not (arguments.model / "config.json").is_file():
        raise UsageError(f"--model {arguments.model} holds no config.json", hint="name a folder with a model")
    job = runtime.init()
    batch_size, seq_length = batch_and_seq_length(job, arguments)
    torch.manual_seed(arguments.seed)
    adapter = adapter_of(job.file.training if job.file is not None else None, arguments.rank)
    model: Any = build_model(arguments.model, adapter, job.precision)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    texts = [tokens_of(text, arguments.model, model.config.vocab_size) for text in read_text(arguments.data)]
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: make_optimizer(parameters, arguments.lr),
        max_grad_norm=1.0,
        example_inputs=torch.zeros(2, seq_length, dtype=torch.long),
    )
    training, validation = (Windows(tokens, seq_length) for tokens in texts)
    batches = job.shard(training, batch_size=batch_size, seed=arguments.seed, epochs=MANY_EPOCHS)
    held_out = job.shard(validation, batch_size=batch_size, shuffle=False)

    if job.is_main:
        print(f"{trained:,} parameters train, plan: {job.plan.describe()}", flush=True)
    show_validation(job, engine, held_out, arguments.eval_batches, unit="token")
    show_steps(engine, arguments.steps, every=arguments.log_every)
    for inputs, targets in islice(batches, arguments.steps):
        engine.step(inputs, targets)
    engine.finish()
    show_validation(job, engine, held_out, arguments.eval_batches, unit="token")
    engine.export_adapters(arguments.output)
    job.close()


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line; the rate is that of the A matrices."""
    parser = options_of_training("Fine-tune a causal language model by LoRA on text.", steps=100, lr=2e-4, log_every=10)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a model that transformers reads")
    parser.add_argument("--output", type=Path, default=Path("adapters"), help="a folder for the adapters")
    parser.add_argument("--rank", type=int, default=16, help="where the plan names no adapters")
    parser.add_argument("--eval-batches", type=int, default=4, help="batches of each validation")
    return parser.parse_args()


if __name__ == "__main__":
    main(train, parse_arguments)
