#!/usr/bin/env python3
"""Measure on one GPU what the cost model prices: products, attention, experts, what memory moves, whole trainings.

    python scripts/measure_kernels.py --output kernels.json
    python scripts/measure_kernels.py --only products,attention
    python scripts/measure_kernels.py --try           small sizes, on the CPU too: tries the script, measures nothing

Each row is one operation with its sizes and its seconds, the median over rounds, timed by CUDA events over as many
calls as take some milliseconds. Operands are random, since products of zeros take less power. Of trainings a row holds
the seconds of kernels by operator, of one profiled step. Status 3: no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_trainings import bundled_config, engine_step, machine_facts
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from paraplan.plan.parallel import ParallelPlan

Row = dict[str, Any]
Work = Callable[[], Any]
ROUNDS, ROUND_S = 5, 0.012
BF16 = torch.bfloat16

TOKENS = (512, 2048, 8192, 32768)
COLUMNS = {
    768: (768, 2304, 3072, 50257, 50304),
    1600: (6400,),
    2048: (2048, 512, 8192),
    8192: (2048, 28672, 1024),
    4096: (4096, 1024, 14336, 3584, 128256),
    14336: (4096,),
    1792: (4096,),
}
"""Columns of weights by inner size: of GPT-2, Llama 1B, 8B, 8B on tp 4 and 8, 70B on one rank and on tp."""
WEIGHTS = tuple((k, n) for k, columns in COLUMNS.items() for n in columns)
WEIGHTS_IN_OTHER_PRECISIONS = ((768, 3072), (2048, 8192), (4096, 4096), (4096, 14336), (14336, 4096))
SEQUENCES = ((16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192), (1, 32768))
HEADS = ((12, 12, 64), (32, 32, 128), (32, 8, 128), (32, 8, 64))
EXPERTS = ((8, 4096, 14336), (8, 14336, 4096), (64, 2048, 1408), (128, 2048, 768), (128, 768, 2048), (32, 7168, 2048))
EXPERT_ROWS = (16, 64, 256, 1024, 4096)
ELEMENTS = (1 << 22, 1 << 25, 1 << 28)


class Bench:
    """Times calls on one device and keeps rows."""

    def __init__(self, device: str, *, tries: bool, path: Path, machine: Row) -> None:
        self.device, self.tries, self.path, self.machine = device, tries, path, machine
        self.rows: list[Row] = []

    def tensor(self, *sizes: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
        """Return a random tensor."""
        return torch.randn(sizes, device=self.device).to(dtype).requires_grad_(grad)

    def time(self, words: Row, work: Work) -> None:
        """Add a row with the seconds of one call, or with why it cannot be called."""
        try:
            self.rows.append(words | {"seconds": self.seconds(work)})
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            self.rows.append(words | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})

    def seconds(self, work: Work) -> float:
        """Return the seconds of one call, the median of rounds."""
        if self.device == "cpu":
            started_s = time.perf_counter()
            work()
            return time.perf_counter() - started_s
        for _ in range(3):
            work()
        once = self._round(work, 1)
        count = max(1, min(500, round(ROUND_S / max(once, 1e-6))))
        return statistics.median(self._round(work, count) for _ in range(ROUNDS)) / count

    def _round(self, work: Work, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        # The host gets ahead, so that its own time does not show.
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def write(self) -> None:
        """Write all rows so far, one a line."""
        lines = ",\n".join("  " + json.dumps(row) for row in self.rows)
        head = json.dumps(self.machine, indent=1)[:-2]
        self.path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def products(bench: Bench) -> None:
    """Time products as a linear layer has them: its output, and the gradients of its input and of its weight."""
    for k, n in WEIGHTS[:2] if bench.tries else WEIGHTS:
        weight = bench.tensor(n, k)
        for tokens in (64,) if bench.tries else TOKENS:
            if tokens * n > 1 << 31:
                continue
            words = {"what": "product", "precision": "bf16", "m": tokens, "n": n, "k": k}
            given, gradient = bench.tensor(tokens, k), bench.tensor(tokens, n)
            bench.time(words | {"pass": "output"}, partial(torch.matmul, given, weight.t()))
            bench.time(words | {"pass": "input"}, partial(torch.matmul, gradient, weight))
            bench.time(words | {"pass": "weight"}, partial(torch.matmul, gradient.t(), given))


def other_products(bench: Bench) -> None:
    """Time products in fp32, TF32 and FP8."""
    for k, n in WEIGHTS[:2] if bench.tries else WEIGHTS_IN_OTHER_PRECISIONS:
        for tokens in (64,) if bench.tries else (2048, 8192):
            given, weight = bench.tensor(tokens, k, dtype=torch.float32), bench.tensor(n, k, dtype=torch.float32)
            words = {"what": "product", "m": tokens, "n": n, "k": k, "pass": "output"}
            bench.time(words | {"precision": "fp32"}, partial(torch.matmul, given, weight.t()))
            torch.backends.cuda.matmul.allow_tf32 = True
            bench.time(words | {"precision": "tf32"}, partial(torch.matmul, given, weight.t()))
            torch.backends.cuda.matmul.allow_tf32 = False
            a, b = given.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
            one = torch.ones((), device=bench.device)
            rows, columns = (torch.ones(size, device=bench.device) for size in ((tokens, 1), (1, n)))
            for name, scales in {"fp8 tensorwise": (one, one), "fp8 rowwise": (rows, columns)}.items():
                for fast in (True, False):
                    multiply = partial(torch._scaled_mm, a, b.t(), *scales, out_dtype=BF16, use_fast_accum=fast)
                    bench.time(words | {"precision": name, "fast_accumulation": fast}, multiply)


def sustained(bench: Bench) -> None:
    """Multiply for seconds: what the GPU reaches at first and once its power limit holds it back."""
    size = 64 if bench.tries else 8192
    a, b = bench.tensor(size, size), bench.tensor(size, size)
    rates = []
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < (0.1 if bench.tries else 5.0):
        begun_s = time.perf_counter()
        for _ in range(40):
            a @ b
        if bench.device == "cuda":
            torch.cuda.synchronize()
        rates.append(40 * 2 * size**3 / (time.perf_counter() - begun_s) / 1e12)
    kept = [round(one, 1) for one in rates[:: max(1, len(rates) // 25)]]
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    asks = bench.device == "cuda"
    state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if asks else ""
    bench.rows.append({"what": "sustained", "size": size, "teraflops": kept, "clock, power, temperature": state})


def attention(bench: Bench) -> None:
    """Time attention kernels of torch, forward and backward."""
    attend = functional.scaled_dot_product_attention
    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    kinds |= {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    for heads, groups, width in HEADS[:1] if bench.tries else HEADS:
        for batch, length in ((1, 64),) if bench.tries else SEQUENCES:
            q = bench.tensor(batch, heads, length, width, grad=True)
            k, v = (bench.tensor(batch, groups, length, width, grad=True) for _ in range(2))
            for name, kind in kinds.items():
                for causal in (True, False) if (heads, groups) == (32, 32) else (True,):
                    words = {"what": "attention", "kernel": name, "batch": batch, "length": length}
                    words |= {"heads": heads, "key_heads": groups, "width": width, "causal": causal}
                    run = partial(attend, q, k, v, is_causal=causal, enable_gqa=heads != groups)
                    with sdpa_kernel(kind):
                        bench.time(words | {"pass": "forward"}, run)
                        try:
                            result = run()
                        except RuntimeError:
                            continue
                    given = (result, (q, k, v), torch.randn_like(result))
                    bench.time(words | {"pass": "backward"}, partial(torch.autograd.grad, *given, retain_graph=True))
                    del result, given


def experts(bench: Bench) -> None:
    """Time grouped products of experts, with as many rows for each and with uneven ones."""
    for count, k, n in EXPERTS[2:3] if bench.tries else EXPERTS:
        weight = bench.tensor(count, k, n)
        for each in (16,) if bench.tries else EXPERT_ROWS:
            rows = count * each
            if rows * max(n, k) > 1 << 30:
                continue
            given, gradient = bench.tensor(rows, k), bench.tensor(rows, n)
            for spread in (0.0, 0.3):
                draws = (1.0 + spread * torch.randn(count)).clamp(min=0.0)
                ends = (draws.cumsum(0) / draws.sum() * rows).round().to(torch.int32)
                ends[-1] = rows
                offsets = ends.to(bench.device)
                words = {"what": "experts", "experts": count, "k": k, "n": n, "rows": each, "spread": spread}
                multiply = partial(torch._grouped_mm, offs=offsets)
                bench.time(words | {"pass": "output"}, partial(multiply, given, weight))
                bench.time(words | {"pass": "input"}, partial(multiply, gradient, weight.transpose(1, 2)))
                bench.time(words | {"pass": "weight"}, partial(multiply, given.t(), gradient))


def moves(bench: Bench) -> None:
    """Time operations that move memory, beside the bytes that they read and write at least."""
    for count in (1 << 12,) if bench.tries else ELEMENTS:
        forward(bench, count, wide=1024)
        backward(bench, count, wide=1024)


def forward(bench: Bench, count: int, wide: int) -> None:
    """Time operations on `count` elements in rows of `wide`."""
    one, other = bench.tensor(count // wide, wide), bench.tensor(count // wide, wide)
    whole, weight = one.float(), bench.tensor(wide)
    forms: dict[str, tuple[int, Work]] = {
        "half columns": (2, lambda: one[:, : wide // 2].contiguous()),
        "sum rows": (2, lambda: one.sum(0)),
        "copy": (4, lambda: one.clone()),
        "transpose": (4, lambda: one.t().contiguous()),
        "gelu": (4, lambda: functional.gelu(one)),
        "gelu tanh": (4, lambda: functional.gelu(one, approximate="tanh")),
        "silu": (4, lambda: functional.silu(one)),
        "layer norm": (4, lambda: functional.layer_norm(one, (wide,), weight, weight)),
        "rms norm": (4, lambda: functional.rms_norm(one, (wide,), weight)),
        "mean": (4, lambda: whole.pow(2).mean(-1)),
        "softmax": (4, lambda: one.softmax(-1)),
        "dropout": (5, lambda: functional.dropout(one, 0.1)),
        "to bf16": (6, lambda: whole.to(BF16)),
        "to fp32": (6, lambda: one.float()),
        "add": (6, lambda: one + other),
        "multiply": (6, lambda: one * other),
        "copy fp32": (8, lambda: whole.clone()),
        "concatenate": (8, lambda: torch.cat((one, other), dim=-1)),
        "tanh fp32": (8, lambda: whole.tanh()),
        "power fp32": (8, lambda: whole.pow(3.0)),
        "softmax fp32": (8, lambda: whole.softmax(-1)),
    }
    for name, (each, work) in forms.items():
        bench.time({"what": "move", "name": name, "elements": count, "bytes": each * count}, work)


def backward(bench: Bench, count: int, wide: int) -> None:
    """Time the backward passes of operations that move memory."""
    weight = bench.tensor(wide, grad=True)
    given, other = (bench.tensor(count // wide, wide, grad=True) for _ in range(2))
    forms: dict[str, tuple[int, tuple[torch.Tensor, ...], torch.Tensor]] = {
        "gelu": (6, (given,), functional.gelu(given)),
        "silu and multiply": (10, (given, other), functional.silu(given) * other),
        "layer norm": (6, (given, weight), functional.layer_norm(given, (wide,), weight, weight)),
        "rms norm": (6, (given, weight), functional.rms_norm(given, (wide,), weight)),
        "dropout": (5, (given,), functional.dropout(given, 0.1)),
        "softmax": (6, (given,), given.softmax(-1)),
    }
    for name, (each, inputs, result) in forms.items():
        words = {"what": "move", "name": f"{name} backward", "elements": count, "bytes": each * count}
        bench.time(words, partial(torch.autograd.grad, result, inputs, torch.randn_like(result), retain_graph=True))


def losses(bench: Bench) -> None:
    """Time a loss on 16-bit logits, forward and backward, with and without trainers' upcast; and embeddings."""
    for vocab in (512,) if bench.tries else (32000, 50257, 128256):
        for tokens in (64,) if bench.tries else (2048, 8192):
            logits = bench.tensor(tokens, vocab, grad=True)
            labels = torch.randint(vocab, (tokens,), device=bench.device)
            words: Row = {"what": "loss", "vocab": vocab, "tokens": tokens}
            bench.time(words | {"form": "upcast"}, partial(loss_passes, logits, labels))
            bench.time(words | {"form": "16 bits"}, partial(loss_passes, logits, labels, upcast=False))
            if not bench.tries:
                compiled = torch.compile(loss_passes, dynamic=False)
                bench.time(words | {"form": "upcast, compiled"}, partial(compiled, logits, labels))
            width = 1024
            table = bench.tensor(vocab, width, grad=True)
            words = {"what": "embedding", "vocab": vocab, "tokens": tokens, "width": width}
            bench.time(words, partial(embedding_passes, labels, table))


def loss_passes(logits: torch.Tensor, labels: torch.Tensor, *, upcast: bool = True) -> Any:
    """Return the gradient of logits under cross-entropy."""
    loss = functional.cross_entropy(logits.float() if upcast else logits, labels)
    return torch.autograd.grad(loss, logits)


def embedding_passes(labels: torch.Tensor, table: torch.Tensor) -> Any:
    """Return the gradient of an embedding's table where all of its outputs have a gradient of 1."""
    ones = torch.ones((), device=table.device, dtype=BF16).expand(len(labels), table.shape[1])
    return torch.autograd.grad(functional.embedding(labels, table), table, ones)


def optimizers(bench: Bench) -> None:
    """Time steps of AdamW and SGD, and clipping, over weights as a model of 12 layers has them."""
    for width in (64,) if bench.tries else (768, 2048):
        sizes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,))
        weights = [nn.Parameter(bench.tensor(*each, dtype=torch.float32)) for _ in range(12) for each in sizes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        count = sum(weight.numel() for weight in weights)
        words = {"what": "optimizer", "parameters": count, "tensors": len(weights)}
        for name, optimizer in {
            "adamw by lists": torch.optim.AdamW(weights, foreach=True),
            "adamw fused": torch.optim.AdamW(weights, fused=bench.device == "cuda"),
            "sgd by lists": torch.optim.SGD(weights, foreach=True),
            "sgd with momentum by lists": torch.optim.SGD(weights, momentum=0.9, foreach=True),
        }.items():
            bench.time(words | {"name": name}, optimizer.step)
        bench.time(words | {"name": "clipping"}, partial(nn.utils.clip_grad_norm_, weights, 1.0, foreach=True))


MODELS: tuple[tuple[str, Row, int, int], ...] = (
    ("gpt2", {}, 8, 1024),
    ("gpt2-xl", {"n_layer": 12}, 4, 1024),
    ("llama-3.2-1b", {}, 4, 1024),
    ("llama-3-8b", {"num_hidden_layers": 4}, 2, 4096),
    ("qwen3-0.6b", {}, 4, 2048),
    ("mixtral-8x7b", {"num_hidden_layers": 2}, 2, 4096),
    ("qwen3-30b-a3b", {"num_hidden_layers": 3}, 2, 4096),
)
"""Model, what changes in its configuration, sequences of a micro-batch and their tokens."""
SMALL = ("gpt2", {"n_layer": 1, "vocab_size": 128, "n_embd": 48}, 1, 32)
"""The one that tries the script."""
USUAL_FORMS = (("bf16", False, "sdpa"), ("bf16", True, "sdpa"))
FORMS = (*USUAL_FORMS, ("bf16", False, "eager"), ("bf16-pure", False, "sdpa"), ("fp32", False, "sdpa"))
"""Precision, whether blocks are compiled, and the attention."""
WITH_ALL_FORMS = ("gpt2", "llama-3.2-1b")


def trainings(bench: Bench) -> None:
    """Profile one step of trainings by the engine, kernels by the operator that starts them."""
    for name, changes, batch, length in (SMALL,) if bench.tries else MODELS:
        for precision, compiled, attention_kind in FORMS if name in WITH_ALL_FORMS else USUAL_FORMS:
            if bench.tries and compiled:
                continue
            words = {"what": "training", "model": name, "changes": changes, "batch": batch, "length": length}
            words |= {"precision": precision, "compiled": compiled, "attention": attention_kind}
            try:
                found = train(words)
            except Exception as error:  # the other rows are wanted all the same
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            bench.rows.append(words | found)
            if bench.device == "cuda":
                torch.cuda.empty_cache()
            bench.write()
            told = found.get("error", found.get("busy_s"))
            print(name, precision, compiled, attention_kind, told, flush=True)


def train(words: Row) -> Row:
    """Return what `profiled` tells of the training that the words of its row describe."""
    options = {"precision": words["precision"], "attention": words["attention"], "is_compiled": words["compiled"]}
    options |= {"optimizer": "adamw_foreach"}
    config, plan = bundled_config(words["model"], words["changes"]), ParallelPlan(micro_batch_size=words["batch"])
    with engine_step(config, plan, seq_length=words["length"], **options) as step:
        return profiled(step)


def profiled(step: Work) -> Row:
    """Return the seconds of a step, those of its kernels, and of those by operator and by kernel."""
    for _ in range(4):
        loss = step()
    float(loss)
    started_s = time.perf_counter()
    for _ in range(5):
        loss = step()
    float(loss)
    seconds = (time.perf_counter() - started_s) / 5
    with torch.profiler.profile() as profile:  # of the CPU and, where there is one, the GPU
        float(step())
    operators: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    busy_s = 0.0
    for one in profile.key_averages():
        found = [one.count, round(one.self_device_time_total / 1e6, 7)]
        # Ranges around kernels that are counted by themselves, and waits of the host, are left out.
        if found[1] and not one.key.startswith(("Optimizer.step", "Command Buffer Full")):
            is_kernel = one.device_type.name == "CUDA"
            (kernels if is_kernel else operators)[one.key[: 90 if is_kernel else None]] = found
            busy_s += found[1] if is_kernel else 0.0
    ordered, largest = (sorted(each.items(), key=lambda item: -item[1][1]) for each in (operators, kernels))
    return {"step_s": seconds, "busy_s": busy_s, "operators": dict(ordered), "kernels": dict(largest[:40])}


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part
    for part in (experts, attention, products, other_products, moves, losses, optimizers, sustained, trainings)
}


def main() -> int:
    """Measure the parts, write them, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("kernels.json"))
    parser.add_argument("--only", metavar="PARTS", help=f"some of {', '.join(PARTS)}, with commas")
    parser.add_argument("--try", dest="tries", action="store_true", help="small sizes, to try the script")
    options = parser.parse_args()
    parts = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"argument --only: no part {unknown[0]!r} (choose from {', '.join(PARTS)})")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.tries:
        print("error: torch finds no GPU here; --try runs small sizes on the CPU", file=sys.stderr)
        return 3
    bench = Bench("cuda" if has_gpu else "cpu", tries=options.tries, path=options.output, machine=machine_facts())
    for name in parts:
        started_s = time.perf_counter()
        try:
            PARTS[name](bench)
        except RuntimeError as error:  # out of memory, most likely; the other parts are wanted all the same
            bench.rows.append({"what": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
        if has_gpu:
            torch.cuda.empty_cache()
        bench.rows.append({"what": "part", "name": name, "wall_s": round(time.perf_counter() - started_s, 1)})
        bench.write()
        print(name, bench.rows[-1]["wall_s"], "s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
