"""Ranks that measure kernels: matmuls, attention, what moves memory, an optimizer's step, and overlap.

All ranks time the same kernel at the same time, as they do in training: CPU processes share a memory bus, GPUs a power
supply. The slowest rank counts. Run as a program it is ranks that measure (`rank`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.hardware.measurement.kernels import KernelCase, KernelEvent, KernelRequest
from paraplan.measure.rank import run_ranks

_RUNS = 8  # of so many timings a fast one is reported
_MOST_REPEATS = 200
_TIMED_SHARE = 0.5  # the rest goes into making tensors and into first calls
_HIDDEN = 512  # features over which the timed norm goes
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Work = Callable[[], object]
Clock = Callable[[], float]


def measure(request: KernelRequest, report: Callable[[KernelEvent], None]) -> None:
    """Time every case of `request` as one rank of the default process group; the first rank reports.

    The cases come round several times, and the best times count: a machine may be slower for seconds.
    """
    if request.num_threads is not None:
        torch.set_num_threads(request.num_threads)
    device = torch.device("cuda", torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")
    _meet()
    deadline = time.monotonic() + request.max_seconds
    best: dict[int, tuple[float, ...]] = {}
    for number in range(request.num_timings):
        place = number % len(request.cases)
        case, before = request.cases[place], best.get(place)
        left_s = _agree(deadline - time.monotonic(), smallest=True)
        share_s = max(0.0, left_s) / (request.num_timings - number)
        if left_s <= 0 and (before is not None or not case.is_required):
            event = KernelEvent(case=place, times_s=before or (), skipped=None if before else "no time left")
        else:
            try:
                times_s = _times(case, device, share_s)
                best[place] = min(times_s, before or times_s, key=sum)
                event = KernelEvent(case=place, times_s=best[place])
            except torch.cuda.OutOfMemoryError:
                event = KernelEvent(case=place, skipped="too little free memory")
        if event.times_s:
            event = event.replace(num_bytes=_moved_bytes(case))
        if dist.get_rank() == 0:
            report(event)


def _times(case: KernelCase, device: torch.device, share_s: float) -> tuple[float, ...]:
    """Return the seconds of the case; of the overlap case those of compute, of communication, and of both."""
    with _settings(case):
        works = _works(case, device, share_s)
        return tuple(_time(work, device, _clock(case, device), _TIMED_SHARE * share_s / len(works)) for work in works)


@contextlib.contextmanager
def _settings(case: KernelCase) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _works(case: KernelCase, device: torch.device, share_s: float) -> tuple[Work, ...]:
    if case.kind == "matmul":
        return (_matmul(case, device),)
    if case.kind == "attention_forward":
        return (_attention(case, device, backward=False),)
    if case.kind == "attention_backward":
        return (_attention(case, device, backward=True),)
    if case.kind == "moved":
        return (_moved(case, device),)
    if case.kind == "copy":
        source, target = (torch.ones(case.sizes[0], dtype=_DTYPES[case.precision], device=device) for _ in range(2))
        return (lambda: target.copy_(source),)
    if case.kind == "optimizer":
        return (_optimizer_step(case, device),)
    return _overlap(case, device, share_s)


def _matmul(case: KernelCase, device: torch.device) -> Work:
    """Return the product of a linear layer: weights are [out, in], and no operand is copied to be transposed."""
    m, n, k = case.sizes
    dtype = _DTYPES[case.precision]
    left_shape, right_shape = {
        "forward": ((m, k), (n, k)),
        "input_gradient": ((m, k), (k, n)),
        "weight_gradient": ((k, m), (k, n)),
    }[case.layout]
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in (left_shape, right_shape))
    left = left.t() if case.layout == "weight_gradient" else left
    right = right.t() if case.layout == "forward" else right
    return lambda: left @ right


def _attention(case: KernelCase, device: torch.device, *, backward: bool) -> Work:
    shape = case.sizes
    query, key, value = (
        torch.randn(shape, device=device).to(_DTYPES[case.precision]).requires_grad_(backward) for _ in range(3)
    )
    if not backward:
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)


def _moved(case: KernelCase, device: torch.device) -> Work:
    """Return a norm, a GELU and a sum, forward and backward, of tensors that start in memory."""
    rows = max(1, case.sizes[0] // _HIDDEN)
    dtype = _DTYPES[case.precision]
    value, other = (torch.randn(rows, _HIDDEN, device=device).to(dtype).requires_grad_() for _ in range(2))
    weight, bias = (torch.ones(_HIDDEN, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    gradient = torch.ones_like(value)

    def work() -> None:
        output = F.gelu(F.layer_norm(value, (_HIDDEN,), weight, bias)) + other
        torch.autograd.grad(output, (value, other, weight, bias), gradient)

    return work


def _moved_bytes(case: KernelCase) -> int | None:
    """Return the bytes that a case reads and writes where nothing stays in caches, None where FLOPs count.

    Forward: norm and GELU read and write one tensor each, the sum reads two and writes one. Backward: GELU and norm
    read two and write one each; the sum's gradient is passed on.
    """
    size = torch.empty((), dtype=_DTYPES[case.precision]).element_size()
    tensors = {"moved": 2 + 2 + 3 + 3 + 3, "copy": 2}.get(case.kind)
    return None if tensors is None else tensors * case.sizes[0] * size


def _optimizer_step(case: KernelCase, device: torch.device) -> Work:
    """Return clipping and AdamW's step over as many parameters, in matrices of a model's size."""
    edge = 512
    count = max(1, case.sizes[0] // edge**2)
    parameters = [torch.nn.Parameter(torch.zeros(edge, edge, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def work() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return work


def _overlap(case: KernelCase, device: torch.device, share_s: float) -> tuple[Work, Work, Work]:
    """Return compute, an all-reduce over all ranks that takes about as long, and both at once."""
    edge = 4096 if device.type == "cuda" else 512
    left, right = (torch.randn(edge, edge, device=device).to(_DTYPES[case.precision]) for _ in range(2))
    message = torch.zeros(case.sizes[0], device=device)
    product_s = _time(lambda: left @ right, device, time.perf_counter, share_s / 4)
    reduce_s = _time(lambda: dist.all_reduce(message), device, time.perf_counter, share_s / 4)
    products = max(1, round(reduce_s / product_s))

    def compute() -> None:
        for _ in range(products):
            left @ right

    def both() -> None:
        handle = dist.all_reduce(message, async_op=True)
        compute()
        assert handle is not None
        handle.wait()

    return compute, lambda: dist.all_reduce(message), both


def _time(work: Work, device: torch.device, clock: Clock, share_s: float) -> float:
    """Return the seconds of one call: the lower quartile of several runs on the slowest rank, as time allows.

    A fast run, because other load on the machine only makes runs longer; not the fastest, which luck may decide.
    """
    _run(work, device, clock, 1)  # fills caches, chooses kernels
    first_s = _run(work, device, clock, 1)
    wanted = min(_MOST_REPEATS, max(1.0, share_s / (_RUNS * max(first_s, 1e-7))))
    repeats = int(_agree(wanted, smallest=True))
    runs = int(_agree(float(_RUNS if first_s * _RUNS <= max(share_s, 1e-3) else 1), smallest=True))
    times = sorted(_run(work, device, clock, repeats) for _ in range(runs))
    return _agree(times[runs // 4], smallest=False)


def _run(work: Work, device: torch.device, clock: Clock, repeats: int) -> float:
    _meet()
    started = clock()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - started) / repeats


def _clock(case: KernelCase, device: torch.device) -> Clock:
    """Return the clock for a case: that of the process where one thread does all the work.

    Other load on a machine makes a CPU process wait, which says nothing of the machine. Of several threads, of GPUs and
    of communication only the wall clock tells how long they take.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and case.kind != "overlap"
    return time.process_time if alone else time.perf_counter


def _meet() -> None:
    """Wait for all ranks, on the CPU."""
    dist.all_reduce(torch.zeros(1))


def _agree(value: float, *, smallest: bool) -> float:
    """Return the smallest (or largest) of the values that the ranks have."""
    agreed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN if smallest else dist.ReduceOp.MAX)
    return float(agreed.item())


def main() -> None:
    """Run ranks that measure kernels."""
    run_ranks(KernelRequest, measure)


if __name__ == "__main__":
    main()
