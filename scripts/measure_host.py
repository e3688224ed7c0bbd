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
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraplan import runtime
from paraplan.hardware.cpus import this_cpu
from paraplan.model.config_file import load_config
from paraplan.model.reader import find_config
from paraplan.model.transformers_model import library_factory
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.step.loss import token_loss

MODELS = ("gpt2", "llama-3.2-1b", "qwen3-0.6b")
DEPTHS = (4, 12)
TOKENS = 128
STEPS, WARM = 15, 5
NARROW = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "n_embd": 256,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
RECOMPUTES = ("none", "selective", "selective_ops", "full")
Step = Callable[[], Any]


def build(name: str, depth: int, folder: Path) -> nn.Module:
    """Return a narrow model of this kind on the GPU."""
    content = json.loads(Path(find_config(name)).read_text())
    depths = {"num_hidden_layers": depth, "n_layer": depth, "max_window_layers": depth}
    content |= {key: value for key, value in (NARROW | depths).items() if key in content}
    if "layer_types" in content:
        content["layer_types"] = content["layer_types"][:depth]
    path = folder / f"{name}-{depth}.json"
    path.write_text(json.dumps(content))
    with torch.device("cuda"):
        model: nn.Module = library_factory(load_config(path), attention="sdpa")()
    return model


def tokens() -> torch.Tensor:
    """Return one sequence."""
    return torch.randint(512, (1, TOKENS), device="cuda")


def plain(model: nn.Module, precision: str) -> tuple[Step, Step, Step]:
    """Return the three parts of a step by hand."""
    if precision == "bf16":
        model = model.bfloat16()
    ids = tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss: list[torch.Tensor] = []

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if precision == "autocast" else nullcontext()

    def forward() -> None:
        with context():
            loss[:] = [token_loss(model(ids), ids)]

    def backward() -> None:
        loss[0].backward()  # type: ignore[no-untyped-call]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return forward, backward, step


def engine_step(model: nn.Module, precision: Any, recompute: Any) -> Step:
    """Return a step of the runtime's engine."""
    job = runtime.init(ParallelPlan(micro_batch_size=1, recompute=recompute), precision=precision, shows_progress=False)
    engine = job.prepare(
        model, loss_fn=token_loss, optimizer=lambda held: torch.optim.AdamW(held, lr=1e-4), verify="off"
    )
    ids = tokens()
    return lambda: engine.step(ids, ids)


def seconds_of(*parts: Step) -> list[float]:
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


def counted(*parts: Step) -> dict[str, int]:
    """Return how many kernels a step starts and how many operators it calls."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for part in parts:
            part()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    return {
        "launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names),
        "operators": sum(name.startswith("aten::") for name in names),
    }


def measure(rows: list[dict[str, Any]], words: dict[str, Any], make: Callable[[int], tuple[Step, ...]]) -> None:
    """Add a row: seconds of each part at each depth and, by their difference, of one block."""
    row: dict[str, Any] = dict(words)
    try:
        for depth in DEPTHS:
            parts = make(depth)
            row[f"seconds_{depth}"] = seconds_of(*parts)
            row[f"counts_{depth}"] = counted(*parts)
            torch.cuda.empty_cache()
        few, many = (row[f"seconds_{depth}"] for depth in DEPTHS)
        row["block_ms"] = [1e3 * (b - a) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(few, many, strict=True)]
        row["block_counts"] = {
            name: (row[f"counts_{DEPTHS[1]}"][name] - count) / (DEPTHS[1] - DEPTHS[0])
            for name, count in row[f"counts_{DEPTHS[0]}"].items()
        }
        print(words, [round(one, 3) for one in row["block_ms"]], row["block_counts"], flush=True)
    except Exception as error:  # the other rows are wanted all the same
        row["error"] = f"{type(error).__name__}: {error}"
        print(words, row["error"], flush=True)
    rows.append(row)


def bare() -> dict[str, float]:
    """Return microseconds of one small operator, of its backward pass as well, and of a loop of Python."""
    one, held = torch.ones(16, device="cuda"), torch.ones(16, device="cuda", requires_grad=True)
    timed: dict[str, Step] = {
        "add_": lambda: one.add_(1),
        "mul with a backward pass": lambda: (held * 2).sum().backward(),  # type: ignore[no-untyped-call]
        "python": lambda: sum(range(1000)),
    }
    found = {}
    for name, work in timed.items():
        for _ in range(200):
            work()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(2000):
            work()
        found[name] = (time.perf_counter() - started_s) / 2000 * 1e6
        torch.cuda.synchronize()
    return found


def sharded(name: str, depth: int, folder: Path, kind: str) -> tuple[Step, ...]:
    """Return the parts of a step of FSDP2 or DDP on one rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(name, depth, folder)
    if kind == "ddp":
        return plain(nn.parallel.DistributedDataParallel(model), "autocast")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return plain(model, "as sharded")


def main() -> int:
    """Measure all rows, write them, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("host.json"))
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; may be repeated")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here", file=sys.stderr)
        return 3
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        machine = {
            "date": dt.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "cpu": this_cpu(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "microseconds": bare(),
        }
        print(machine, flush=True)
        for name in options.model or MODELS:
            for precision in ("autocast", "bf16", "fp32"):
                measure(
                    rows,
                    {"model": name, "side": "plain", "precision": precision},
                    lambda depth: plain(build(name, depth, folder), precision),  # noqa: B023 (called at once)
                )
            for recompute in RECOMPUTES:
                measure(
                    rows,
                    {"model": name, "side": "engine", "precision": "bf16", "recompute": recompute},
                    lambda depth: (engine_step(build(name, depth, folder), "bf16", recompute),),  # noqa: B023
                )
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        for kind in ("ddp", "fsdp2"):
            measure(rows, {"model": MODELS[1], "side": kind}, lambda depth: sharded(MODELS[1], depth, folder, kind))  # noqa: B023
        dist.destroy_process_group()
    options.output.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
