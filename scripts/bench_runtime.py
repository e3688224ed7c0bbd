"""Step time and peak memory of the engine against the same parallelism written by hand in plain torch.

    python scripts/bench_runtime.py                  every case on 2 ranks, then on 4
    python scripts/bench_runtime.py --only ddp --ranks 2 --pairs 20
    python scripts/bench_runtime.py --json result.json

Both sides run in the same ranks, in turns: a few steps of one, a few of the other, and so on. What is reported is the
median over these pairs of the ratio of their times, so that a machine that is busy for a while slows both alike. Memory
is compared in processes of their own: the largest resident size less what it was before the model was built. Where
accelerate is installed, and DeepSpeed with a backend that runs here, they are compared too; what is skipped is said.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_lm import ByteModel

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.noise import silence_known_noise

LAYERS, HIDDEN, HEADS, TOKENS = 6, 384, 6, 128
MICRO_BATCH, MICRO_BATCHES = 2, 4
LEARNING_RATE = 1e-3

Step = Callable[[], Any]
Side = Callable[["Case", nn.Module], Step]


@dataclass(frozen=True)
class Case:
    """A plan, and the function that does the same by hand. `rival` names what that is."""

    name: str
    plan: ParallelPlan
    rival: str

    @property
    def share(self) -> int:
        """Sequences of a step on one rank."""
        return self.plan.micro_batch_size * self.plan.num_microbatches


@dataclass(frozen=True)
class Result:
    """Ratios of the engine to its rival, of steps in turns and of peaks; above 1 the engine is slower or larger."""

    case: str
    rival: str
    ranks: int
    engine_ms: float
    rival_ms: float
    time_ratio: float
    time_ratio_low: float
    time_ratio_high: float
    cpu_ratio: float
    memory_ratio: float | None
    engine_mib: float | None
    rival_mib: float | None


def cases(ranks: int) -> list[Case]:
    """Return what is compared on `ranks` ranks."""
    batch = {"micro_batch_size": MICRO_BATCH, "num_microbatches": MICRO_BATCHES}
    data: dict[str, Any] = {"dp": ranks, "micro_batch_size": 2 * MICRO_BATCH, "num_microbatches": 2}
    pipeline = ParallelPlan(pp=ranks, pipeline_schedule="1f1b", **{**batch, "num_microbatches": 2 * ranks})
    found = [
        Case("one process", ParallelPlan(**batch), "plain") if ranks == 1 else None,
        Case("ddp", ParallelPlan(**data), "plain"),
        Case("zero 2", ParallelPlan(zero_stage=2, **data), "plain"),
        Case("zero 3", ParallelPlan(zero_stage=3, **data), "plain"),
        Case("pipeline", pipeline, "plain"),
        Case("tensor", ParallelPlan(tp=ranks, **batch), "plain"),
    ]
    chosen = [case for case in found if case is not None] if ranks > 1 else [found[0]]
    known = [case for case in chosen if case is not None]
    if ranks > 1 and importlib.util.find_spec("accelerate") is not None:
        known += [
            Case("ddp", ParallelPlan(**data), "accelerate"),
            Case("zero 3", ParallelPlan(zero_stage=3, **data), "accelerate"),
        ]
    return known


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def build() -> nn.Module:
    """Return the model of both sides, with the same weights."""
    torch.manual_seed(0)
    return ByteModel(num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS)


def batch_of(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of one rank; ranks of one copy of the model have the same."""
    copy_number = rank if case.plan.dp > 1 else 0
    generator = torch.Generator().manual_seed(copy_number)
    ids = torch.randint(256, (case.share, TOKENS + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def engine_step(case: Case, model: nn.Module) -> Step:
    """Return a step of the engine."""
    job = runtime.init(case.plan, shows_progress=False)
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=adamw)
    inputs, targets = batch_of(case, job.world.rank)
    return lambda: engine.step(inputs, targets).item()


def plain_step(case: Case, model: nn.Module) -> Step:
    """Return a step of the same parallelism by hand."""
    plan = case.plan
    if plan.pp > 1:
        return _plain_pipeline(case, model)
    if plan.tp > 1:
        _split_by_hand(model, plan.tp)
    elif plan.zero_stage:
        _shard_by_hand(model, frees=plan.zero_stage == 3)
    elif plan.dp > 1:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped: Any = model
    optimizer = adamw(model.parameters())
    inputs, targets = batch_of(case, dist.get_rank() if dist.is_initialized() else 0)
    loss_of = loss_fn if plan.tp == 1 else _loss_of_classes
    pieces = list(zip(inputs.chunk(plan.num_microbatches), targets.chunk(plan.num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for index, (piece, target) in enumerate(pieces):
            is_last = index == len(pieces) - 1
            with ExitStack() as stack:
                if plan.zero_stage:
                    wrapped.set_is_last_backward(is_last)
                    if plan.zero_stage < 3:
                        wrapped.set_reshard_after_backward(is_last)
                elif plan.dp > 1 and not is_last:
                    stack.enter_context(wrapped.no_sync())
                loss = loss_of(wrapped(piece), target) / len(pieces)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        if plan.dp > 1:
            dist.all_reduce(total)
        return float(total)

    return step


def _shard_by_hand(model: Any, *, frees: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


class _Copy(torch.autograd.Function):
    """The input of a column layer: gradients of the ranks are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """The output of a row layer: what the ranks have computed is summed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Column(nn.Module):
    def __init__(self, linear: nn.Linear, rows: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[rows].clone())
        self.bias = nn.Parameter(linear.bias.detach()[rows].clone())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return F.linear(_Copy.apply(given), self.weight, self.bias)  # type: ignore[no-untyped-call]


class _Row(nn.Module):
    def __init__(self, linear: nn.Linear, columns: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[:, columns].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _Sum.apply(F.linear(given, self.weight))  # type: ignore[no-untyped-call]
        return summed + self.bias


class _Rows(nn.Module):
    """An embedding of which this rank has the rows of some tokens."""

    def __init__(self, embedding: nn.Embedding, size: int) -> None:
        super().__init__()
        rows = embedding.weight.shape[0] // size
        self.first = rows * dist.get_rank()
        self.weight = nn.Parameter(embedding.weight.detach()[self.first : self.first + rows].clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.first
        is_here = (local >= 0) & (local < len(self.weight))
        found = F.embedding(local * is_here, self.weight) * is_here[..., None]
        summed: torch.Tensor = _Sum.apply(found)  # type: ignore[no-untyped-call]
        return summed


class _Classes(nn.Module):
    """A head of which this rank has some classes, without a bias."""

    def __init__(self, linear: nn.Linear, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size)[dist.get_rank()].clone())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return F.linear(_Copy.apply(given), self.weight)  # type: ignore[no-untyped-call]


class _LossOfClasses(torch.autograd.Function):
    """The mean cross-entropy of logits of which this rank has some classes."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = logits.shape[1] * dist.get_rank()
        largest = logits.max(dim=1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        local = targets - first
        is_here = (local >= 0) & (local < logits.shape[1])
        local = local * is_here
        exponents = shifted.exp()
        both = torch.stack([exponents.sum(dim=1), shifted.gather(1, local[:, None])[:, 0] * is_here])
        dist.all_reduce(both)
        ctx.save_for_backward(exponents.div_(both[0][:, None]), local, is_here)
        return (both[0].log() - both[1]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, local, is_here = ctx.saved_tensors
        shares[torch.arange(len(local)), local] -= is_here.to(shares.dtype)
        return shares.mul_(gradient / len(local)), None


def _loss_of_classes(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _LossOfClasses.apply(logits.flatten(0, 1), targets.flatten())  # type: ignore[no-untyped-call]
    return loss


def _split_by_hand(model: Any, size: int) -> None:
    """Split attention by heads, the MLP by its inner units, and the ends by vocabulary, as Megatron-LM does."""
    rank = dist.get_rank()
    model.byte_embedding, model.head = _Rows(model.byte_embedding, size), _Classes(model.head, size)
    for block in model.blocks:
        heads = torch.arange(HIDDEN).chunk(size)[rank]
        inner = torch.arange(4 * HIDDEN).chunk(size)[rank]
        block.qkv = _Column(block.qkv, torch.cat([heads + part * HIDDEN for part in range(3)]))
        block.attention_out = _Row(block.attention_out, heads)
        block.mlp_up, block.mlp_down = _Column(block.mlp_up, inner), _Row(block.mlp_down, inner)
        block.num_heads //= size
        block.forward = _split_forward(block)


def _split_forward(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    b: Any = block

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        heads = b.qkv(b.attention_norm(hidden)).view(batch, tokens, 3, b.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + b.attention_out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        result: torch.Tensor = hidden + b.mlp_down(F.gelu(b.mlp_up(b.mlp_norm(hidden))))
        return result

    return forward


class _Stage(nn.Module):
    """Some consecutive blocks, with the embeddings before the first and the head after the last."""

    def __init__(self, model: Any, start: int, end: int) -> None:
        super().__init__()
        self.byte_embedding = model.byte_embedding if start == 0 else None
        self.position_embedding = model.position_embedding if start == 0 else None
        self.blocks = model.blocks[start:end]
        is_last = end == LAYERS
        self.norm: Any = model.norm if is_last else None
        self.head: Any = model.head if is_last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.byte_embedding is not None and self.position_embedding is not None:
            positions = torch.arange(hidden.shape[1])
            hidden = self.byte_embedding(hidden) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def _plain_pipeline(case: Case, model: nn.Module) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size, count = dist.get_rank(), dist.get_world_size(), case.plan.num_microbatches
    bounds = [round(LAYERS * stage / size) for stage in range(size + 1)]
    part = _Stage(model, bounds[rank], bounds[rank + 1])
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=loss_fn, scale_grads=True)
    optimizer = adamw(part.parameters())
    inputs, targets = batch_of(case, rank)
    is_last = rank == size - 1

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        last: dict[str, Any] = {"target": targets, "losses": losses} if is_last else {}
        schedule.step(*arguments, return_outputs=False, **last)
        optimizer.step()
        total = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.all_reduce(total)
        return float(total)

    return step


def accelerate_step(case: Case, model: nn.Module) -> Step:
    """Return a step through accelerate, with gradient accumulation as its users write it."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    count = case.plan.num_microbatches
    plugin = None
    if case.plan.zero_stage:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=case.plan.zero_stage == 3,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count, fsdp_plugin=plugin)
    wrapped, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    inputs, targets = batch_of(case, dist.get_rank())
    pieces = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))

    def step() -> float:
        total = torch.zeros(())
        for piece, target in pieces:
            with accelerator.accumulate(wrapped):
                loss = loss_fn(wrapped(piece), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / count
        dist.all_reduce(total)
        return float(total)

    return step


RIVALS: dict[str, Side] = {"plain": plain_step, "accelerate": accelerate_step}


def time_in_turns(case: Case, pairs: int, steps: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return seconds a step of the engine and of its rival, pair by pair: on the clock, and of this CPU."""
    engine, rival = engine_step(case, build()), RIVALS[case.rival](case, build())
    for step in (engine, rival):
        step()
        step()

    def seconds(step: Step) -> tuple[float, float]:
        if dist.is_initialized():
            dist.barrier()
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) / steps, (time.process_time() - busy) / steps

    times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for pair in range(pairs):
        order = ((0, engine), (1, rival)) if pair % 2 == 0 else ((1, rival), (0, engine))
        for side, step in order:
            times[side].append(seconds(step))
    return times


def peak_bytes(case: Case, side: str) -> int:
    """Return by how much three steps of one side raise the resident size of this rank."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = engine_step(case, build()) if side == "engine" else RIVALS[case.rival](case, build())
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)


def _rank_main(
    pipe: Any, rank: int, size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")
    silence_known_noise()
    torch.set_num_threads(1)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if size > 1:
        os.environ.update({name: str(value) for name, value in own.items()})
        runtime.init(shows_progress=False)
    try:
        answer: tuple[str, Any] = ("returned", work(*arguments))
    except Exception:
        answer = ("raised", traceback.format_exc())
    pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `work` returns on each of `size` new processes; raise RuntimeError with the text of a failed one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paraplan.runtime", "torch.distributed.pipelining", "train_lm"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(theirs, rank, size, port, work, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = []
    for pipe in pipes:
        try:
            answers.append(pipe.recv())
        except EOFError:
            answers.append(("raised", "a rank ended without an answer"))
    for process in processes:
        process.join(30)
    failed = [text for kind, text in answers if kind == "raised"]
    if failed:
        raise RuntimeError(failed[0])
    return [value for _, value in answers]


def compare(case: Case, ranks: int, *, pairs: int, steps: int, with_memory: bool) -> Result:
    """Return how the engine compares with the rival of `case`.

    Time is that of the slowest rank in each pair; CPU time, which other programs disturb less, is that of all ranks.
    """
    by_rank = on_ranks(ranks, time_in_turns, case, pairs, steps)
    turns = [list(zip(*(answer[side] for answer in by_rank), strict=True)) for side in (0, 1)]
    engine, rival = ([max(wall for wall, _ in rank_times) for rank_times in side] for side in turns)
    busy, rival_busy = (statistics.median(sum(cpu for _, cpu in rank_times) for rank_times in side) for side in turns)
    ratios = sorted(ours / theirs for ours, theirs in zip(engine, rival, strict=True))
    peaks: list[float | None] = [None, None]
    if with_memory:
        rounds = [[max(on_ranks(ranks, peak_bytes, case, side)) for side in ("engine", "rival")] for _ in range(3)]
        peaks = [statistics.median(sizes) / 2**20 for sizes in zip(*rounds, strict=True)]
    return Result(
        case=case.name,
        rival=case.rival,
        ranks=ranks,
        engine_ms=1000 * statistics.median(engine),
        rival_ms=1000 * statistics.median(rival),
        time_ratio=statistics.median(ratios),
        time_ratio_low=ratios[len(ratios) // 4],
        time_ratio_high=ratios[-1 - len(ratios) // 4],
        cpu_ratio=busy / rival_busy,
        memory_ratio=None if peaks[0] is None or not peaks[1] else peaks[0] / peaks[1],
        engine_mib=peaks[0],
        rival_mib=peaks[1],
    )


def main() -> None:
    """Run the cases that the command line asks for and print a table."""
    parser = argparse.ArgumentParser(description="The engine against plain torch, in turns.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--rival", nargs="+", help="plain, accelerate")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side of a pair")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    count = sum(parameter.numel() for parameter in build().parameters())
    print(
        f"{count / 1e6:.1f} M parameters, {TOKENS} tokens, fp32 on the CPU, load {os.getloadavg()[0]:.1f}; "
        f"{arguments.pairs} pairs of {arguments.steps} steps"
    )
    for name in ("accelerate", "deepspeed"):
        if importlib.util.find_spec(name) is None:
            print(f"skipped: {name} is not installed")
        elif name == "deepspeed":
            print("skipped: deepspeed, whose ZeRO needs an accelerator or a CPU backend that it builds itself")
    print(f"{'case':<12} {'against':<10} ranks  engine ms  rival ms   time ratio (quartiles)  CPU ratio  memory MiB")
    results = []
    for ranks in arguments.ranks:
        for case in cases(ranks):
            if (arguments.only and case.name not in arguments.only) or (
                arguments.rival and case.rival not in arguments.rival
            ):
                continue
            result = compare(
                case, ranks, pairs=arguments.pairs, steps=arguments.steps, with_memory=not arguments.no_memory
            )
            results.append(asdict(result))
            memory = ""
            if result.memory_ratio is not None:
                memory = f"{result.engine_mib:.0f} / {result.rival_mib:.0f}, {result.memory_ratio:.3f}"
            print(
                f"{result.case:<12} {result.rival:<10} {ranks:>5}  {result.engine_ms:>9.1f} {result.rival_ms:>9.1f}   "
                f"{result.time_ratio:.3f} ({result.time_ratio_low:.3f}-{result.time_ratio_high:.3f})      "
                f"{result.cpu_ratio:.3f}       {memory}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
