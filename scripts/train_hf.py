"""Train any causal language model of transformers from scratch on a folder of text, under any plan.

    python scripts/train_hf.py --config gpt2 --small --data ~/texts
    paraplan launch --plan plan.json scripts/train_hf.py --config path/to/config.json --data ~/texts --checkpoint run1

The model is built from its configuration and is not rewritten: the plan decides how it is split. Text is read as bytes,
one token each, so that no tokenizer has to be downloaded; every vocabulary of 256 or more will do.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

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
)

from paraplan import runtime
from paraplan.errors import ModelError, UsageError
from paraplan.model.config_file import load_config
from paraplan.model.reader import find_config
from paraplan.model.shrink import Smaller, shrink_fields
from paraplan.model.transformers_model import library_factory


def build_model(path: Path, *, seq_length: int, is_small: bool) -> nn.Module:
    """Return an untrained model of the class that the configuration in `path` names; torch's seed decides its weights.

    `is_small` makes it one of the same structure that trains on a CPU. Raises `ModelError` where transformers has no
    such class, or the vocabulary has no room for bytes.
    """
    config = load_config(path)
    if is_small:
        fields = shrink_fields(dict(config.fields), Smaller(num_layers=4, tp=2, seq_length=seq_length))
        config = replace(config, fields=fields | {"vocab_size": VOCABULARY})
    model: nn.Module = library_factory(config)().float()
    vocabulary = config.count("vocab_size", default=VOCABULARY)
    if vocabulary < VOCABULARY:
        raise ModelError(f"{path}: vocab_size={vocabulary} has no room for {VOCABULARY} bytes")
    return model


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def train(arguments: argparse.Namespace) -> None:
    """Train under the plan of the launcher."""
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps} trains nothing")
    job = runtime.init(strategy=arguments.strategy, metrics=arguments.metrics)
    batch_size, seq_length = batch_and_seq_length(job, arguments)
    torch.manual_seed(arguments.seed)
    model = build_model(find_config(arguments.config), seq_length=seq_length, is_small=arguments.small)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=arguments.lr, fused=torch.cuda.is_available()),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=0.1, total_iters=max(1, arguments.steps // 10)
        ),
        max_grad_norm=1.0,
        compile_backend="inductor" if arguments.compile else None,
        example_inputs=torch.zeros(2, seq_length, dtype=torch.long),
    )
    if arguments.checkpoint is not None:
        engine.resume(arguments.checkpoint)
    text, _ = read_text(arguments.data)
    batches = job.shard(
        Windows(bytes_of(text), seq_length),
        batch_size=batch_size,
        seed=arguments.seed,
        epochs=MANY_EPOCHS,
        skip=engine.num_steps,
    )
    if job.is_main:
        print(f"{type(model).__name__}, {num_parameters:,} parameters, plan: {job.plan.describe()}", flush=True)
    show_steps(engine, arguments.steps, every=arguments.log_every)
    for inputs, targets in islice(batches, max(0, arguments.steps - engine.num_steps)):
        engine.step(inputs, targets)
        if arguments.checkpoint is not None and engine.num_steps % arguments.save_every == 0:
            engine.save(arguments.checkpoint, wait=False)
    if arguments.checkpoint is not None:
        engine.save(arguments.checkpoint)
    if arguments.export is not None:
        engine.export(arguments.export)
    job.close()


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = options_of_training(
        "Train a model of transformers from scratch on text.", steps=100, lr=1e-3, log_every=10
    )
    parser.add_argument("--config", required=True, help="a config.json, a folder with one, or a bundled name")
    parser.add_argument("--small", action="store_true", help="a small model of the same structure")
    parser.add_argument("--strategy", choices=["ddp", "dp"], default="ddp", help="dp: one process over all its GPUs")
    parser.add_argument("--compile", action="store_true", help="compile the repeated blocks")
    parser.add_argument("--metrics", type=Path, help="a file for a line of JSON for every step")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from, if it exists, and to write")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--export", type=Path, help="a safetensors file for the weights at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main(train, parse_arguments)
