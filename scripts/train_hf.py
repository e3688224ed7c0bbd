"""Train any causal language model of transformers from scratch on a folder of text, under any plan.

    python scripts/train_hf.py --config gpt2 --small --data ~/texts
    paraplan launch --plan plan.json scripts/train_hf.py --config path/to/config.json --data ~/texts --checkpoint run1

The model is built from its configuration and is not rewritten: the plan decides how it is split. Text is read as bytes,
one token each, so that no tokenizer has to be downloaded; every vocabulary of 256 or more will do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_lm import Progress, Windows, read_text

from paraplan import runtime
from paraplan.errors import ModelError, ParaplanError, UsageError
from paraplan.model.reader import find_config
from paraplan.model.shrink import Smaller, shrink_fields

BYTES = 256


def build_model(path: Path, *, seq_length: int, is_small: bool) -> nn.Module:
    """Return an untrained model of the class that the configuration in `path` names; torch's seed decides its weights.

    `is_small` makes it one of the same structure that trains on a CPU. Raises `ModelError` where transformers has no
    such class, or the vocabulary has no room for bytes.
    """
    import transformers

    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    architecture = (fields.get("architectures") or [None])[0]
    model_class = getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ModelError(f"{path}: transformers {transformers.__version__} has no {architecture}")
    if is_small:
        vocabulary = fields.get("vocab_size", BYTES)
        fields = shrink_fields(fields, Smaller(num_layers=4, tp=2, seq_length=seq_length))
        fields["vocab_size"] = max(BYTES, min(vocabulary, BYTES))
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    config.use_cache = False
    if config.vocab_size < BYTES:
        raise ModelError(f"{path}: vocab_size={config.vocab_size} has no room for {BYTES} bytes")
    model: nn.Module = model_class(config)
    return model.float()


class AsKeywords:
    """Windows of text as transformers wants them: inputs by keyword."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int, /) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs, targets = self._windows[index]
        return {"input_ids": inputs}, targets


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def train(arguments: argparse.Namespace) -> None:
    """Train under the plan of the launcher."""
    job = runtime.init(strategy=arguments.strategy, metrics=arguments.metrics)
    planned = job.file.training if job.file is not None else None
    seq_length = arguments.seq_len or (planned.seq_length if planned is not None else 128)
    batch_size = arguments.batch or (job.plan.global_batch_size if job.file is not None else 16)
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
        example_inputs={"input_ids": torch.zeros(2, seq_length, dtype=torch.long)},
    )
    if arguments.checkpoint is not None:
        engine.resume(arguments.checkpoint)
    text, _ = read_text(arguments.data)
    batches = job.shard(
        AsKeywords(Windows(text, seq_length)),
        batch_size=batch_size,
        seed=arguments.seed,
        epochs=10**6,
        skip=engine.num_steps,
    )
    if job.is_main:
        print(f"{type(model).__name__}, {num_parameters:,} parameters, plan: {job.plan.describe()}", flush=True)
    progress = Progress(arguments.steps, arguments.log_every, done=engine.num_steps, is_shown=job.is_main)
    engine.expect(arguments.steps)
    rest = islice(batches, max(0, arguments.steps - engine.num_steps))
    for step, (inputs, targets) in enumerate(rest, start=engine.num_steps + 1):
        loss = engine.step(inputs, targets)
        if progress.wants(step):
            progress.show(step, loss.item())
        if arguments.checkpoint is not None and step % arguments.save_every == 0:
            engine.save(arguments.checkpoint, wait=False)
    if arguments.checkpoint is not None:
        engine.save(arguments.checkpoint)
    if arguments.export is not None:
        engine.export(arguments.export)
    job.close()


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a model of transformers from scratch on text.")
    parser.add_argument("--config", required=True, help="a config.json, a folder with one, or a bundled name")
    parser.add_argument("--data", type=Path, required=True, help="a folder of text files")
    parser.add_argument("--small", action="store_true", help="a small model of the same structure")
    parser.add_argument("--strategy", choices=["ddp", "dp"], default="ddp", help="dp: one process over all its GPUs")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch", type=int, help="global batch in sequences (default: the plan's, or 16)")
    parser.add_argument("--seq-len", type=int, help="bytes in a sequence (default: the plan's, or 128)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--compile", action="store_true", help="compile the repeated blocks")
    parser.add_argument("--log-every", type=int, default=10, help="steps between lines where there is no terminal")
    parser.add_argument("--metrics", type=Path, help="a file for a line of JSON for every step")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from, if it exists, and to write")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--export", type=Path, help="a safetensors file for the weights at the end")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps} trains nothing")
    return arguments


if __name__ == "__main__":
    try:
        train(parse_arguments())
    except ParaplanError as error:
        if "WORLD_SIZE" in os.environ:
            raise  # the launcher shows it, once for all ranks
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
