"""Step time, CPU time and peak memory of the engine against the same parallelism written by hand in plain torch.

    python scripts/bench_runtime.py                            every case on 2 ranks, then on 4
    python scripts/bench_runtime.py --only ddp --ranks 2 --pairs 20
    python scripts/bench_runtime.py --rival accelerate deepspeed --no-memory
    python scripts/bench_runtime.py --ranks 1                  one process, on the GPU where there is one
    python scripts/bench_runtime.py --json result.json

All sides train the same weights on the same sequences with clipped gradients (`bench_runtime_sides.py`); the losses of
the first steps are compared, and a side that trains otherwise ends the comparison. Where accelerate and DeepSpeed are
installed they are compared too.

Time: both sides run in the same ranks, in turns, a few steps of one, a few of the other, and so on. A ratio is the
median over these pairs, with its quartiles. The wall time of a pair is that of the slowest rank. CPU time is user and
system time of all ranks with all their threads, which other programs on the machine disturb far less. A rank that
waits in a collective of gloo sleeps and costs none; one that spins (NCCL's do) would count its waiting as work.

"tensors" is the largest sum of live tensors during a step, followed operator by operator, and "sent" counts the
collectives of a step: both are the same in every run. "memory" is the most that torch allocates on a GPU. All three are
measured in processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_runtime_plain import plain_step
from bench_runtime_sides import (
    CPU_SIZE,
    GPU_SIZE,
    LARGER_CPU_SIZE,
    Case,
    Size,
    Step,
    accelerate_step,
    build,
    deepspeed_step,
    device,
    engine_step,
    transformers_step,
)

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.fake.collective_count import CollectiveCount
from paraplan.runtime.fake.storage_tracking import StorageTracker
from paraplan.runtime.mesh import build_mesh
from paraplan.runtime.step.reports import SpeedBaseline, peak_flops_per_s
from paraplan.runtime.world import read_world, silence_known_noise

SIDES: dict[str, Callable[[Case], Step]] = {
    "engine": engine_step,
    "plain": plain_step,
    "accelerate": accelerate_step,
    "deepspeed": deepspeed_step,
    "transformers": transformers_step,
}
SIZES = {"tiny": Size(layers=4, hidden=32, heads=4, tokens=16, micro_batch=2), "larger": LARGER_CPU_SIZE}
LOSS_TOLERANCE = 1e-3  # relative, after two steps; bf16 and other orders of sums stay well inside


@dataclass(frozen=True)
class Ratio:
    """What the engine takes as a share of what its rival takes: the median over pairs, and its quartiles."""

    engine: float
    rival: float
    median: float
    low: float
    high: float

    @classmethod
    def of_pairs(cls, engine: Sequence[float], rival: Sequence[float]) -> Ratio:
        """Return the ratio of values measured in pairs."""
        ratios = sorted(ours / theirs for ours, theirs in zip(engine, rival, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        return cls(statistics.median(engine), statistics.median(rival), statistics.median(ratios), low, high)


@dataclass(frozen=True)
class Work:
    """What one side does in a step on one rank: most bytes of live tensors, operators, collectives and their bytes."""

    tensor_bytes: int
    operators: int
    collectives: int
    collective_bytes: int


@dataclass(frozen=True)
class Result:
    """The engine against its rival: times, and the two `Work`s and peaks of memory where these were measured."""

    case: str
    rival: str
    ranks: int
    wall_s: Ratio
    cpu_s: Ratio
    work: tuple[Work, Work] | None = None
    memory_bytes: tuple[float, float] | None = None
    mfu: tuple[float | None, float | None] | None = None


def cases(ranks: int, size: Size | None = None) -> list[Case]:
    """Return what is compared on `ranks` ranks."""
    if ranks == 1:
        return _cases_of_one_process(size or (GPU_SIZE if device().type == "cuda" else CPU_SIZE))
    size = size or CPU_SIZE
    data: dict[str, Any] = {"dp": ranks, "micro_batch_size": 2 * size.micro_batch, "num_microbatches": 2}
    batch = {"micro_batch_size": size.micro_batch}
    ddp, zero = ParallelPlan(**data), [ParallelPlan(zero_stage=stage, **data) for stage in (1, 2, 3)]
    pipeline = ParallelPlan(pp=ranks, pipeline_schedule="1f1b", num_microbatches=2 * ranks, **batch)
    long = replace(size, tokens=8 * size.tokens, micro_batch=1)
    experts = ParallelPlan(dp=ranks, ep=ranks, micro_batch_size=2 * size.micro_batch, num_microbatches=1)
    found = [
        Case("ddp", ddp, "plain", size),
        Case("zero 2", zero[1], "plain", size),
        Case("zero 3", zero[2], "plain", size),
        Case("pipeline", pipeline, "plain", size),
        Case("tensor", ParallelPlan(tp=ranks, num_microbatches=4, **batch), "plain", size),
        Case("context", ParallelPlan(cp=ranks, num_microbatches=2), "plain", long),
        Case("experts", experts, "transformers", replace(size, experts=8)),
        Case("ddp", ddp, "accelerate", size),
        *(Case(f"zero {plan.zero_stage}", plan, "deepspeed", size) for plan in zero),
    ]
    return [case for case in found if case.rival == "plain" or find_spec(case.rival)]


def _cases_of_one_process(size: Size) -> list[Case]:
    plan = ParallelPlan(micro_batch_size=size.micro_batch, num_microbatches=2)
    plain = Case("one process", plan, "plain", size, precision="bf16" if device().type == "cuda" else "fp32")
    return [plain, replace(plain, name="compiled", compile_backend="inductor")]


def time_in_turns(case: Case, pairs: int, steps: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return seconds a step of the engine and of its rival, pair by pair: on the clock, and of this rank's CPU.

    Raises RuntimeError where the two do not train alike.
    """
    sides = (engine_step(case), SIDES[case.rival](case))
    _take_one_thread()  # accelerate has chosen another number
    losses = [[float(step()) for _ in range(3)] for step in sides]
    if not all(math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE) for ours, theirs in zip(*losses, strict=True)):
        raise RuntimeError(f"{case.name} against {case.rival}: the losses of three steps differ: {losses}")

    def seconds(step: Step) -> tuple[float, float]:
        if dist.is_initialized():
            dist.barrier()
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        float(loss)  # waits for a GPU
        return (time.perf_counter() - started) / steps, (time.process_time() - busy) / steps

    times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[side].append(seconds(sides[side]))
    return times


class _Operators(CollectiveCount):  # type: ignore[no-untyped-call]  # torch leaves its base untyped
    """Counts operators beside collectives."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.operators += result is not NotImplemented  # a DTensor comes back with its local tensors
        return result


COMPARED_STEPS = 3
"""Steps more in which the engine compares the blocks that ranks enter, two passes each."""


def work_of(case: Case, side: str) -> Work:
    """Return what a step of one side does on this rank, once all is allocated. Nothing of it depends on time."""
    tracker = StorageTracker(dict)
    with tracker, tracker.following_resizes():
        step = SIDES[side](case)
        tracker.enter("forward")
        step()
        gc.collect()
        tracker.forget_peak()
        step()
        tracker.settle()
    for _ in range(COMPARED_STEPS):
        step()
    with _Operators(build_mesh(case.plan, read_world(os.environ))) as counted:
        step()
    sent = counted.counted()
    return Work(
        tensor_bytes=tracker.peak.total_bytes,
        operators=counted.operators,
        collectives=sum(row.count for row in sent),
        collective_bytes=sum(row.total_bytes for row in sent),
    )


def memory_bytes(case: Case, side: str) -> int:
    """Return what three steps of one side allocate at most on the GPU."""
    step = SIDES[side](case)
    for _ in range(3):
        step()
    return int(torch.cuda.max_memory_allocated())


def _take_one_thread() -> None:
    """Compute with one thread a rank, as torchrun has it, where ranks share the cores of a machine."""
    if device().type == "cpu":
        torch.set_num_threads(1)


def _on_rank(rank: int, size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")
    silence_known_noise()
    _take_one_thread()
    if size > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        runtime.init(shows_progress=False)
    try:
        return work(*arguments)
    finally:  # the others end too where one has failed
        if dist.is_initialized():
            dist.destroy_process_group()


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `work` returns on each of `size` new processes, or raise what it raises on one of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paraplan.runtime.job_start", "torch.distributed.pipelining", "train_lm"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        ranks = [pool.submit(_on_rank, rank, size, port, work, arguments) for rank in range(size)]
        for ended in as_completed(ranks):
            ended.result()  # the first that fails says why; the others lose their connections to it
        return [rank.result() for rank in ranks]


def compare(case: Case, ranks: int, *, pairs: int, steps: int, with_memory: bool) -> Result:
    """Return how the engine compares with the rival of `case`."""
    by_rank = on_ranks(ranks, time_in_turns, case, pairs, steps)
    turns = [list(zip(*(answer[side] for answer in by_rank), strict=True)) for side in (0, 1)]
    wall = [[max(wall for wall, _ in rank_times) for rank_times in side] for side in turns]
    busy = [[sum(cpu for _, cpu in rank_times) for rank_times in side] for side in turns]
    result = Result(case.name, case.rival, ranks, Ratio.of_pairs(*wall), Ratio.of_pairs(*busy))
    if device().type == "cuda":
        result = replace(result, mfu=(_mfu(case, result.wall_s.engine), _mfu(case, result.wall_s.rival)))
    if not with_memory:
        return result
    sides = ("engine", case.rival)
    if case.compile_backend is None:  # what is compiled shows no operators
        works = [on_ranks(ranks, work_of, case, side) for side in sides]
        ours, theirs = (max(by_rank, key=lambda work: work.tensor_bytes) for by_rank in works)
        result = replace(result, work=(ours, theirs))
    if device().type == "cuda":
        peaks = [on_ranks(ranks, memory_bytes, case, side) for side in sides]
        result = replace(result, memory_bytes=(max(peaks[0]), max(peaks[1])))
    return result


def _mfu(case: Case, step_time_s: float) -> float | None:
    """Return the share of the GPU's peak that the model's FLOPs make up, None without a GPU that a profile knows."""
    count = sum(parameter.numel() for parameter in build(case.size).parameters())
    peak = peak_flops_per_s(device(), case.precision)
    baseline = SpeedBaseline(num_ranks=1, peak_flops_per_s=peak, num_parameters=count)
    return baseline.mfu(step_time_s=step_time_s, tokens=case.share * case.size.tokens)


def line_of(result: Result) -> str:
    """Return one line of the table."""

    def words(ratio: Ratio) -> str:
        times = f"{1000 * ratio.engine:.0f}/{1000 * ratio.rival:.0f}"
        return f"{times:>11} {ratio.median:.3f} ({ratio.low:.2f}-{ratio.high:.2f})"

    work, memory = result.work, result.memory_bytes
    tensors = "" if work is None else f"{work[0].tensor_bytes / work[1].tensor_bytes:.3f}"
    sent = "" if work is None else f"{work[0].collectives}/{work[1].collectives}"
    resident = "" if memory is None else f"{memory[0] / memory[1]:.3f}"
    line = f"{result.case:<11} {result.rival:<10} {result.ranks:>5} {words(result.cpu_s)} {words(result.wall_s)}"
    line += f" {tensors:>7} {resident:>6} {sent:>9}"
    if result.mfu is not None:
        shares = ["unknown, as no profile has this GPU" if share is None else f"{share:.1%}" for share in result.mfu]
        line += f"\n  MFU {shares[0]}; by hand {shares[1]}"
    return line.rstrip()


def main() -> None:
    """Run the cases that the command line asks for and print a table."""
    parser = argparse.ArgumentParser(description="The engine against plain torch, accelerate and DeepSpeed, in turns.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="1: one process, on a GPU if there is one")
    parser.add_argument("--only", nargs="+", help="names of cases, as the table has them")
    parser.add_argument("--rival", nargs="+", choices=[side for side in SIDES if side != "engine"])
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side of a pair")
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    sizes = "tiny: some kilobytes, to see that all runs; larger: 26 M parameters"
    parser.add_argument("--size", choices=SIZES, help=f"another model; {sizes}")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    chosen = [(ranks, case) for ranks in arguments.ranks for case in cases(ranks, SIZES.get(arguments.size))]
    names = {case.name for _, case in chosen}
    if unknown := set(arguments.only or ()) - names:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    say_what_is_compared(arguments, chosen[0][1].size)
    results = []
    for ranks, case in chosen:
        if case.name in (arguments.only or names) and case.rival in (arguments.rival or SIDES):
            options = {"pairs": arguments.pairs, "steps": arguments.steps, "with_memory": not arguments.no_memory}
            results.append(compare(case, ranks, **options))
            print(line_of(results[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def say_what_is_compared(arguments: argparse.Namespace, size: Size) -> None:
    """Print what the table below is of, and what is left out."""
    count = sum(parameter.numel() for parameter in build(size).parameters())
    on_gpu = arguments.ranks == [1] and device().type == "cuda"
    where = f"bf16 on {torch.cuda.get_device_name()}" if on_gpu else f"fp32 on {os.cpu_count()} CPU cores"
    print(
        f"{count / 1e6:.1f} M parameters, {size.tokens} tokens, {where}, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}; {arguments.pairs} pairs of {arguments.steps} steps"
    )
    if 1 in arguments.ranks and not on_gpu:
        print("no GPU here, so one process runs on the CPU, in fp32 and without MFU")
    for name in {"accelerate", "deepspeed"} & set(arguments.rival or SIDES) if arguments.ranks != [1] else ():
        if not find_spec(name):
            print(f"left out: {name} is not installed")
        elif name == "accelerate":
            print("left out: FSDP2 of accelerate, which trains with DDP in its place on ranks without a GPU")
    head = f"{'CPU ms':>11} {'ratio (quartiles)':<17} {'wall ms':>11} {'ratio (quartiles)':<17}"
    print(f"{'case':<11} {'against':<10} ranks {head} tensors memory      sent")


if __name__ == "__main__":
    main()
