#!/usr/bin/env python3
"""Measure what a block of a model costs the host that starts its kernels, on a GPU that waits for work all the time.

    python scripts/measure_host.py --output host.json

Models of transformers, narrow and with few tokens, so that kernels end before the next ones are started, are trained at
two depths: what one depth takes more than the other is the blocks' own. Sides are the plain loop (autocast over fp32,
bf16 weights, fp32), FSDP2 and DDP on one rank, and the runtime's engine with each recompute. The time of a step is that
until its calls have returned. Kernels and operators of a block are counted by torch.profiler. Status 3: no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_trainings import Step, bundled_config, engine_step, machine_facts
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paraplan.model.config_file import ModelConfig
from paraplan.model.transformers_model import library_factory
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.support import RUNNABLE_RECOMPUTE
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.step.loss import token_loss

MODELS = ("gpt2", "llama-3.2-1b", "qwen3-0.6b")
DEPTHS = (4, 12)
TOKENS, VOCABULARY = 128, 512
STEPS, WARM = 15, 5
MANY = 200
NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW |= {"head_dim": 64, "n_embd": 256, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
Side = Callable[[ModelConfig], AbstractContextManager[tuple[Step, ...]]]


def narrow_config(name: str, depth: int) -> ModelConfig:
    """Return the configuration of a narrow model of this kind."""
    sizes = NARROW | dict.fromkeys(("num_hidden_layers", "n_layer", "max_window_layers"), depth)
    there = bundled_config(name, {}).fields
    return bundled_config(name, {key: value for key, value in sizes.items() if key in there})


@contextmanager
def plain(config: ModelConfig, precision: str) -> Iterator[tuple[Step, ...]]:
    """Yield the three parts of a step by hand; "ddp" and "fsdp2" are wrapped, by these on one rank."""
    with torch.device("cuda"):
        model: nn.Module = library_factory(config)()
    if precision == "bf16":
        model = model.bfloat16()
    elif precision == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif precision == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        for module in (*blocks, model):
            fully_shard(module, mp_policy=policy)
    ids = torch.randint(VOCABULARY, (1, TOKENS), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision in ("autocast", "ddp")):
            loss[:] = [token_loss(model(ids), ids)]

    def backward() -> None:
        loss[0].backward()  # type: ignore[no-untyped-call]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    yield forward, backward, step


@contextmanager
def by_engine(config: ModelConfig, precision: TrainingPrecision, recompute: Recompute) -> Iterator[tuple[Step, ...]]:
    """Yield a step of the runtime's engine, in one part."""
    options: dict[str, Any] = {"seq_length": TOKENS, "precision": precision, "optimizer": "adamw_foreach"}
    with engine_step(config, ParallelPlan(micro_batch_size=1, recompute=recompute), **options) as step:
        yield (step,)


def seconds_of(parts: tuple[Step, ...]) -> list[float]:
    """Return the seconds until the calls of each part have returned, the median over steps."""
    rows = []
    for number in range(WARM + STEPS):
        torch.cuda.synchronize()
        times = [time.perf_counter()]
        for part in parts:
            part()
            times.append(time.perf_counter())
        if number >= WARM:
            rows.append([after - before for before, after in pairwise(times)])
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def counts_of(parts: tuple[Step, ...]) -> dict[str, int]:
    """Return how many kernels a step starts and how many operators it calls."""
    with torch.profiler.profile() as profile:
        for part in parts:
            part()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    return {
        "launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names),
        "operators": sum(name.startswith("aten::") for name in names),
    }


def measure(words: dict[str, Any], side: Side) -> dict[str, Any]:
    """Return a row: seconds of each part and counts at each depth and, by their difference, of one block."""
    row: dict[str, Any] = dict(words)
    try:
        for depth in DEPTHS:
            with side(narrow_config(words["model"], depth)) as parts:
                row[f"seconds_{depth}"], row[f"counts_{depth}"] = seconds_of(parts), counts_of(parts)
            torch.cuda.empty_cache()
        (few_s, many_s), (few, many) = ([row[f"{kind}_{depth}"] for depth in DEPTHS] for kind in ("seconds", "counts"))
        blocks = DEPTHS[1] - DEPTHS[0]
        row["block_ms"] = [1e3 * (b - a) / blocks for a, b in zip(few_s, many_s, strict=True)]
        row["block_counts"] = {name: (many[name] - count) / blocks for name, count in few.items()}
        print(words, [round(one, 3) for one in row["block_ms"]], row["block_counts"], flush=True)
    except Exception as error:  # the other rows are wanted all the same
        row["error"] = f"{type(error).__name__}: {error}"
        print(words, row["error"], flush=True)
    return row


def bare() -> dict[str, float]:
    """Return microseconds of one small operator, of its backward pass as well, and of a loop of Python."""
    one, weight = torch.ones(16, device="cuda"), torch.ones(16, device="cuda", requires_grad=True)
    timed: dict[str, Step] = {
        "add_": lambda: one.add_(1),
        "mul with a backward pass": lambda: (weight * 2).sum().backward(),  # type: ignore[no-untyped-call]
        "python": lambda: sum(range(1000)),
    }
    return {name: seconds_of((partial(_many, work),))[0] / MANY * 1e6 for name, work in timed.items()}


def _many(work: Step) -> None:
    for _ in range(MANY):
        work()


def sides(models: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], Side]]:
    """Yield what is measured: the words of its row, and what makes it."""
    for name in models:
        for precision in ("autocast", "bf16", "fp32"):
            yield {"model": name, "side": "plain", "precision": precision}, partial(plain, precision=precision)
        for recompute in RUNNABLE_RECOMPUTE:
            words = {"model": name, "side": "engine", "precision": "bf16", "recompute": recompute}
            yield words, partial(by_engine, precision="bf16", recompute=recompute)  # type: ignore[arg-type]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    for kind in ("ddp", "fsdp2"):
        yield {"model": MODELS[1], "side": kind}, partial(plain, precision=kind)
    dist.destroy_process_group()


def main() -> int:
    """Measure all rows, write them, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("host.json"))
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; may be repeated")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here", file=sys.stderr)
        return 3
    machine = machine_facts() | {"microseconds": bare()}
    print(machine, flush=True)
    rows = [measure(words, side) for words, side in sides(tuple(options.model or MODELS))]
    options.output.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
