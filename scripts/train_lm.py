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
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError, UsageError

VOCABULARY = 256
MAX_SEQ_LENGTH = 1024
DEFAULT_LAYERS, DEFAULT_HIDDEN, DEFAULT_HEADS = 4, 128, 4
DEFAULT_BATCH, DEFAULT_SEQ_LENGTH = 16, 128
TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".tex", ".html", ".json", ".csv", ".c", ".h", ".rs", ".js"}
MAX_TEXT_BYTES = 8 * 2**20
VALIDATION_SHARE = 0.05


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
    """Consecutive windows of `seq_length` bytes, each with the bytes that follow as its targets."""

    def __init__(self, text: bytes, seq_length: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seq_length = seq_length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._seq_length

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._seq_length
        window = self._text[start : start + self._seq_length + 1].long()
        return window[:-1], window[1:]


def read_text(folder: Path) -> tuple[bytes, bytes]:
    """Return the training and validation text of the files under `folder`: whole files, in order.

    Every file goes to one of the two by its place in the sorted list. Raises `UsageError` where there is no text.
    """
    if not folder.is_dir():
        raise UsageError(f"--data {folder} is no folder", hint="name a folder of text files")
    training: list[bytes] = []
    validation: list[bytes] = []
    size_bytes = 0
    every = round(1 / VALIDATION_SHARE)
    files = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and _is_source(path, folder))
    for number, path in enumerate(files):
        text = path.read_bytes()
        (validation if number % every == every - 1 else training).append(text)
        size_bytes += len(text)
        if size_bytes >= MAX_TEXT_BYTES:
            break
    if not validation:
        raise UsageError(
            f"--data {folder} holds {len(files)} text files, and {every} are needed to keep one for validation",
            hint=f"give a folder with more files ending in {', '.join(sorted(TEXT_SUFFIXES))}",
        )
    return b"\n".join(training), b"\n".join(validation)


def _is_source(path: Path, folder: Path) -> bool:
    """Whether `path` belongs to the text: installed packages and the tests of Python differ from machine to machine."""
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", ".git", ".venv"}
    return path.is_file() and not skipped & set(path.relative_to(folder).parts)


class Progress:
    """What rank 0 prints of the steps: a line every `every` of them. On a terminal the engine draws a bar instead."""

    def __init__(self, num_steps: int, every: int, *, done: int = 0, is_shown: bool) -> None:
        self._num_steps = num_steps
        self._every = every
        self._done = done
        self._is_shown = is_shown and not sys.stderr.isatty()
        self._start_s = time.monotonic()

    def wants(self, step: int) -> bool:
        """Whether to read the loss of `step`, which waits for the step to end."""
        return self._is_shown and (step % self._every == 0 or step in (self._done + 1, self._num_steps))

    def show(self, step: int, loss: float) -> None:
        """Show the loss of `step`, counted from 1."""
        speed = (step - self._done) / (time.monotonic() - self._start_s)
        print(f"step {step}/{self._num_steps}  loss {loss:.3f}  {speed:.1f} steps/s", flush=True)


def train(arguments: argparse.Namespace) -> None:
    """Train under the plan of the launcher, and print the validation loss before and after."""
    job = runtime.init(strategy=arguments.strategy)
    planned = job.file.training if job.file is not None else None
    seq_length = arguments.seq_len or (planned.seq_length if planned is not None else DEFAULT_SEQ_LENGTH)
    if not 0 < seq_length <= MAX_SEQ_LENGTH:
        raise UsageError(f"a sequence of {seq_length} bytes is outside 1..{MAX_SEQ_LENGTH}")
    batch_size = arguments.batch or (job.plan.global_batch_size if job.file is not None else DEFAULT_BATCH)

    torch.manual_seed(arguments.seed)
    model = build_model(arguments.layers, arguments.hidden, arguments.heads)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=arguments.lr, fused=torch.cuda.is_available()),
        max_grad_norm=1.0,
    )
    training, validation = read_text(arguments.data)
    if arguments.checkpoint is not None:
        engine.resume(arguments.checkpoint)
    batches = job.shard(
        Windows(training, seq_length),
        batch_size=batch_size,
        seed=arguments.seed,
        epochs=10**6,
        skip=engine.num_steps,
    )
    held_out = job.shard(Windows(validation, seq_length), batch_size=batch_size, shuffle=False)

    def validate() -> float:
        losses = [engine.eval_step(inputs, targets) for inputs, targets in islice(held_out, arguments.eval_batches)]
        return torch.stack(losses).mean().item()

    if job.is_main:
        # A plan made on the spot leaves the batch to the script.
        plan = job.plan if job.file is not None else job.plan.replace(micro_batch_size=batch_size // job.plan.dp)
        print(f"{num_parameters:,} parameters, {len(training):,} bytes of text, plan: {plan.describe()}")
    before = validate()
    if job.is_main:
        print(f"validation loss {before:.3f} nats per byte after {engine.num_steps} steps", flush=True)
    progress = Progress(arguments.steps, arguments.log_every, done=engine.num_steps, is_shown=job.is_main)
    engine.expect(arguments.steps)
    steps: Iterator[tuple[torch.Tensor, torch.Tensor]] = islice(batches, max(0, arguments.steps - engine.num_steps))
    for step, (inputs, targets) in enumerate(steps, start=engine.num_steps + 1):
        loss = engine.step(inputs, targets)
        if progress.wants(step):
            progress.show(step, loss.item())
        if arguments.checkpoint is not None and step % arguments.save_every == 0:
            engine.save(arguments.checkpoint, wait=False)
    engine.finish()  # the bar, and how the steps compare with the plan
    after = validate()
    if job.is_main:
        print(f"validation loss {after:.3f} nats per byte after {engine.num_steps} steps", flush=True)
    if arguments.checkpoint is not None:
        engine.save(arguments.checkpoint)
    job.close()


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model on text.")
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a folder of text files")
    parser.add_argument("--strategy", choices=["ddp", "dp"], default="ddp", help="dp: one process over all its GPUs")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, those before a checkpoint too")
    parser.add_argument("--batch", type=int, help="global batch in sequences (default: the plan's, or 16)")
    parser.add_argument("--seq-len", type=int, help="bytes in a sequence (default: the plan's, or 128)")
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS)
    parser.add_argument("--hidden", type=int, default=DEFAULT_HIDDEN)
    parser.add_argument("--heads", type=int, default=DEFAULT_HEADS)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines where there is no terminal")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from, if it exists, and to write")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--eval-batches", type=int, default=8, help="batches of each validation")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        train(parse_arguments())
    except ParaplanError as error:
        if "WORLD_SIZE" in os.environ:
            raise  # the launcher shows it, once for all ranks
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
