"""Train a byte-level language model on text: one script for python, torchrun, and paraplan launch with any plan.

    python scripts/train_lm.py
    torchrun --nproc-per-node 2 scripts/train_lm.py
    paraplan launch --nproc-per-node 2 --plan plan.json scripts/train_lm.py

By default the text is the sources of Python's own standard library, which every machine has.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError, UsageError
from paraplan.runtime.step.reports import StepReport

VOCABULARY = 256
MAX_SEQ_LENGTH = 1024
DEFAULT_LAYERS, DEFAULT_HIDDEN, DEFAULT_HEADS = 4, 128, 4
DEFAULT_BATCH, DEFAULT_SEQ_LENGTH = 16, 128
TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".tex", ".html", ".json", ".csv", ".c", ".h", ".rs", ".js"}
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", ".git", ".venv"}
"""Folders of packages and tests, which differ from machine to machine."""
MAX_TEXT_BYTES = 8 * 2**20
VALIDATION_EVERY = 20
"""Of so many files one is kept for validation."""
MANY_EPOCHS = 10**6


class Block(nn.Module):
    """A transformer layer: causal self-attention and an MLP, each after a norm and beside a residual."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_out = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp_up = nn.Linear(hidden_size, 4 * hidden_size)
        self.mlp_down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, `[batch, tokens, hidden_size]` as the one given."""
        batch, tokens, width = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        result: torch.Tensor = hidden + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(hidden))))
        return result


class ByteModel(nn.Module):
    """A decoder-only transformer over bytes: `[batch, tokens]` in, logits `[batch, tokens, 256]` out."""

    def __init__(self, *, num_layers: int, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, hidden_size)
        self.position_embedding = nn.Embedding(MAX_SEQ_LENGTH, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model(
    num_layers: int = DEFAULT_LAYERS, hidden_size: int = DEFAULT_HIDDEN, num_heads: int = DEFAULT_HEADS
) -> ByteModel:
    """Return an untrained model; without arguments the one that this script trains by default."""
    return ByteModel(num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows:
    """Consecutive windows of `seq_length` tokens, each with the tokens that follow as its targets."""

    def __init__(self, tokens: torch.Tensor, seq_length: int) -> None:
        self._tokens = tokens
        self._seq_length = seq_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_length

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._seq_length
        window = self._tokens[start : start + self._seq_length + 1].long()
        return window[:-1], window[1:]


def bytes_of(text: bytes) -> torch.Tensor:
    """Return one token for each byte."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_text(folder: Path) -> tuple[bytes, bytes]:
    """Return the training and validation text of the files under `folder`: whole files, in order.

    Every file goes to one of the two by its place in the sorted list. Raises `UsageError` where there is no text.
    """
    if not folder.is_dir():
        raise UsageError(f"--data {folder} is no folder", hint="name a folder of text files")
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in TEXT_SUFFIXES and path.is_file() and not SKIPPED & set(path.relative_to(folder).parts)
    )
    size_bytes = 0
    for number, path in enumerate(files, start=1):
        texts[number % VALIDATION_EVERY == 0].append(path.read_bytes())
        size_bytes += path.stat().st_size
        if size_bytes >= MAX_TEXT_BYTES:
            break
    if not texts[1]:
        raise UsageError(
            f"--data {folder} holds {len(files)} text files, and {VALIDATION_EVERY} are needed to keep one for "
            "validation",
            hint=f"give a folder with more files ending in {', '.join(sorted(TEXT_SUFFIXES))}",
        )
    return b"\n".join(texts[0]), b"\n".join(texts[1])


def batch_and_seq_length(job: runtime.Job, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the global batch and the tokens of a sequence: those of the command line, else the plan's, else usual."""
    planned = job.file.training if job.file is not None else None
    batch_size = arguments.batch or (job.plan.global_batch_size if job.file is not None else DEFAULT_BATCH)
    return batch_size, arguments.seq_len or (planned.seq_length if planned is not None else DEFAULT_SEQ_LENGTH)


def show_validation(
    job: runtime.Job, engine: runtime.Engine, held_out: Iterable[Any], num_batches: int, *, unit: str = "byte"
) -> None:
    """Print the mean loss over some batches that are not trained, in nats per `unit`."""
    losses = [engine.eval_step(inputs, targets) for inputs, targets in islice(held_out, num_batches)]
    loss = torch.stack(losses).mean().item()
    if job.is_main:
        print(f"validation loss {loss:.4f} nats per {unit} after {engine.num_steps} steps", flush=True)


def show_steps(engine: runtime.Engine, num_steps: int, *, every: int) -> None:
    """Print a line every so many steps. On a terminal the engine draws a bar instead."""
    engine.expect(num_steps)
    if sys.stderr.isatty():
        return

    def show(step: StepReport) -> None:
        speed = 1 / step.step_time_s
        print(f"step {step.step}/{num_steps}  loss {step.loss:.3f}  {speed:.1f} steps/s", flush=True)

    engine.on_step(show, every=every)


def train(arguments: argparse.Namespace) -> None:
    """Train under the plan of the launcher, and print the validation loss before and after."""
    job = runtime.init(strategy=arguments.strategy)
    batch_size, seq_length = batch_and_seq_length(job, arguments)
    if not 0 < seq_length <= MAX_SEQ_LENGTH:
        raise UsageError(f"a sequence of {seq_length} bytes is outside 1..{MAX_SEQ_LENGTH}")
    torch.manual_seed(arguments.seed)
    model = build_model(arguments.layers, arguments.hidden, arguments.heads)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=arguments.lr, fused=torch.cuda.is_available()),
        max_grad_norm=1.0,
    )
    if arguments.checkpoint is not None:
        engine.resume(arguments.checkpoint)
    training, validation = (Windows(bytes_of(text), seq_length) for text in read_text(arguments.data))
    batches = job.shard(training, batch_size=batch_size, seed=arguments.seed, epochs=MANY_EPOCHS, skip=engine.num_steps)
    held_out = job.shard(validation, batch_size=batch_size, shuffle=False)

    if job.is_main:
        # A plan made on the spot leaves the batch to the script.
        plan = job.plan if job.file is not None else job.plan.replace(micro_batch_size=batch_size // job.plan.dp)
        print(f"{num_parameters:,} parameters, {len(training):,} sequences of text, plan: {plan.describe()}")
    show_validation(job, engine, held_out, arguments.eval_batches)
    show_steps(engine, arguments.steps, every=arguments.log_every)
    for inputs, targets in islice(batches, max(0, arguments.steps - engine.num_steps)):
        engine.step(inputs, targets)
        if arguments.checkpoint is not None and engine.num_steps % arguments.save_every == 0:
            engine.save(arguments.checkpoint, wait=False)
    engine.finish()  # the bar, and how the steps compare with the plan
    show_validation(job, engine, held_out, arguments.eval_batches)
    if arguments.checkpoint is not None:
        engine.save(arguments.checkpoint)
    job.close()


def options_of_training(description: str, *, steps: int, lr: float, log_every: int) -> argparse.ArgumentParser:
    """Return a parser of what every training is asked, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a folder of text files")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps, those before a checkpoint too")
    parser.add_argument("--batch", type=int, help=f"global batch in sequences; None: the plan's, or {DEFAULT_BATCH}")
    parser.add_argument("--seq-len", type=int, help=f"tokens in a sequence; None: the plan's, or {DEFAULT_SEQ_LENGTH}")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of new weights and of the order of the data")
    parser.add_argument("--log-every", type=int, default=log_every, help="steps between lines without a terminal")
    return parser


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = options_of_training("Train a byte-level language model on text.", steps=200, lr=2e-3, log_every=20)
    parser.add_argument("--strategy", choices=["ddp", "dp"], default="ddp", help="dp: one process over all its GPUs")
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS, help="blocks")
    parser.add_argument("--hidden", type=int, default=DEFAULT_HIDDEN, help="width of the blocks")
    parser.add_argument("--heads", type=int, default=DEFAULT_HEADS, help="of attention")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from, if it exists, and to write")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--eval-batches", type=int, default=8, help="batches of each validation")
    return parser.parse_args()


def main(train: Callable[[argparse.Namespace], None], parse: Callable[[], argparse.Namespace]) -> None:
    """Train as the command line says; without a launcher an error of the user is one line."""
    try:
        train(parse())
    except ParaplanError as error:
        if "WORLD_SIZE" in os.environ:
            raise  # the launcher shows it, once for all ranks
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main(train, parse_arguments)
