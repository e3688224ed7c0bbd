"""Measuring kernels: which are timed on each rank, and the profile of the machine that follows from the times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Literal

from pydantic import Field

from paraplan.errors import ProfileError
from paraplan.hardware.measurement.least_squares import non_negative_least_squares
from paraplan.hardware.profiles import KernelCalibration, KernelFit, Precision
from paraplan.records import Record
from paraplan.units import MIB

KernelKind = Literal["matmul", "attention_forward", "attention_backward", "moved", "copy", "optimizer", "overlap"]
"""moved: norm, GELU and sum, forward and backward; copy: one tensor to another; optimizer: clipping and AdamW;
overlap: a matmul and an all-reduce, one after the other and both at once."""

ROUNDS = 2
"""Times that ranks go through all cases."""

_BACKWARD_PER_FORWARD = 2.5  # FLOPs of fused attention, the scores made again (Dao 2023, section 4.1)
_CAUSAL = 0.5
# Inputs and outputs of linear layers: square ones, those that widen, those that narrow.
_CPU_WIDTHS = ((128, 128), (128, 512), (512, 128), (512, 512), (1024, 1024))
_GPU_WIDTHS = ((1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (8192, 8192))


class KernelCase(Record):
    """One thing to time.

    `sizes` are [m, n, k] of a matmul, of which `layout` says which operands are transposed in memory; [sequences,
    heads, tokens, head size] of attention; [elements] of what is moved, copied or optimised. What `is_required` is
    timed even when the time is over: without it there is no profile.
    """

    kind: KernelKind
    precision: Precision
    sizes: tuple[int, ...]
    layout: Literal["forward", "input_gradient", "weight_gradient"] = "forward"
    is_required: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of a matmul or attention as the cost model counts them, 0 of anything else."""
        if self.kind == "matmul":
            m, n, k = self.sizes
            return 2.0 * m * n * k
        if self.kind in ("attention_forward", "attention_backward"):
            sequences, heads, tokens, head_size = self.sizes
            backward = _BACKWARD_PER_FORWARD if self.kind == "attention_backward" else 1.0
            return 4.0 * sequences * heads * tokens**2 * head_size * _CAUSAL * backward
        return 0.0


class KernelRequest(Record):
    """Cases that every rank is to time, all of them at the same time, and the seconds for all of it.

    `num_threads` is that of a CPU process, None to leave it as it is.
    """

    device: Literal["cuda", "cpu"]
    cases: tuple[KernelCase, ...]
    max_seconds: float = Field(gt=0)
    num_threads: int | None = None

    @property
    def num_timings(self) -> int:
        """Number of timings if none is left out: each case comes round so often."""
        return ROUNDS * len(self.cases)


class KernelEvent(Record):
    """Report of the ranks on a case: seconds on the slowest rank, and the bytes that it moved, or why it was skipped.

    Each round reports the best times of all rounds so far.
    Of the overlap case `times_s` are those of compute alone, communication alone, and both at once.
    """

    case: int
    times_s: tuple[float, ...] = ()
    num_bytes: int | None = None
    skipped: str | None = None


def kernel_cases(precisions: Sequence[Precision], *, on_gpus: bool, num_ranks: int) -> tuple[KernelCase, ...]:
    """Return what is worth timing: memory first, then attention and matmuls of one precision after the other."""
    rows, widths = ((2048, 8192), _GPU_WIDTHS) if on_gpus else ((256, 2048), _CPU_WIDTHS)
    tokens = (1024, 4096) if on_gpus else (128, 512)
    elements = [size * MIB // 4 for size in ((4, 32, 128) if on_gpus else (1, 4, 16))]
    activations = elements if on_gpus else [MIB // 16, MIB // 4, MIB]
    first = precisions[0]
    cases = [KernelCase(kind="moved", precision=first, sizes=(size,)) for size in activations]
    cases += [
        KernelCase(kind="copy", precision=first, sizes=(size,), is_required=size == elements[0]) for size in elements
    ]
    # Of few parameters a GPU's step is what its calls take, and fits into its caches.
    parameters = 2 * elements[2] if on_gpus else elements[1]
    cases += [KernelCase(kind="optimizer", precision="fp32", sizes=(parameters,))]
    cases += [KernelCase(kind="overlap", precision=first, sizes=(elements[1],))] * (num_ranks > 1)
    for precision in precisions:
        for length in tokens:
            sizes = (4, 8, length, 64)
            cases.append(KernelCase(kind="attention_forward", precision=precision, sizes=sizes))
            cases.append(KernelCase(kind="attention_backward", precision=precision, sizes=sizes))
        for m, (k, n) in product(rows, widths):
            cases += _linear_layer(precision, m, k, n, is_required=(m, k, n) == (rows[0], *widths[0]))
    return tuple(cases)


def _linear_layer(precision: Precision, m: int, k: int, n: int, *, is_required: bool) -> list[KernelCase]:
    """Return the three products of a layer from k to n features: forward, and the gradients of input and weight."""
    shapes: tuple[tuple[Literal["forward", "input_gradient", "weight_gradient"], tuple[int, int, int]], ...] = (
        ("forward", (m, n, k)),
        ("input_gradient", (m, k, n)),
        ("weight_gradient", (n, k, m)),
    )
    return [
        KernelCase(kind="matmul", precision=precision, sizes=sizes, layout=layout, is_required=is_required)
        for layout, sizes in shapes
    ]


def fit_kernels(cases: Sequence[KernelCase], events: Sequence[KernelEvent], *, source: str) -> KernelCalibration:
    """Return what the times say of each precision and of memory. Raises `ProfileError` where no matmul was timed."""
    timed = [(cases[event.case], event) for event in events if event.times_s]
    precisions = dict.fromkeys(case.precision for case, _ in timed if case.kind == "matmul")
    if not precisions:
        raise ProfileError("no matmul was timed", hint="allow more time with --seconds")
    moved = [(event.num_bytes, event.times_s[0]) for case, event in timed if case.kind == "moved" and event.num_bytes]
    steps = [event.times_s[0] / case.sizes[0] for case, event in timed if case.kind == "optimizer"]
    both = [_slowdown(event.times_s) for case, event in timed if case.kind == "overlap"]
    return KernelCalibration(
        kernels=tuple(_fit(precision, timed) for precision in precisions),
        moved_bytes_per_s=_bandwidth(moved) if moved else None,
        optimizer_s_per_parameter=steps[0] if steps else None,
        overlap_slowdown=both[0] if both else None,
        source=source,
    )


def _bandwidth(moved: Sequence[tuple[int, float]]) -> float:
    """Return the bytes a second of `seconds = calls + bytes / bandwidth`, by least squares of the relative errors.

    What a call costs at any size is no bandwidth: of tensors of 256 KiB it is half of the time on a CPU.
    """
    rows = [[num_bytes / time_s, 1.0 / time_s] for num_bytes, time_s in moved]
    per_byte = non_negative_least_squares(rows, [1.0] * len(rows))[0]
    return 1.0 / per_byte if per_byte else median(num_bytes / time_s for num_bytes, time_s in moved)


def copy_bytes_per_s(cases: Sequence[KernelCase], events: Sequence[KernelEvent]) -> float | None:
    """Return the bandwidth of the largest copy that was timed, what is read and what is written counted."""
    copies = [
        (event.num_bytes, event.num_bytes / event.times_s[0])
        for event in events
        if cases[event.case].kind == "copy" and event.times_s and event.num_bytes
    ]
    return max(copies)[1] if copies else None


def best_matmul_flops_per_s(
    cases: Sequence[KernelCase], events: Sequence[KernelEvent], precision: Precision
) -> float | None:
    """Return what the fastest matmul of a precision reached."""
    reached = [
        cases[event.case].flops / event.times_s[0]
        for event in events
        if event.times_s and (cases[event.case].kind, cases[event.case].precision) == ("matmul", precision)
    ]
    return max(reached, default=None)


def _fit(precision: Precision, timed: Sequence[tuple[KernelCase, KernelEvent]]) -> KernelFit:
    """Return the fit of one precision by least squares of the relative errors, no term below 0."""
    matmuls = [
        (case, event.times_s[0]) for case, event in timed if (case.kind, case.precision) == ("matmul", precision)
    ]
    columns = []
    for case, _ in matmuls:
        m, n, k = case.sizes
        columns.append([case.flops, case.flops / m, case.flops / n, case.flops / k, 1.0])
    least = min(time_s / case.flops for case, time_s in matmuls) / 2  # no fit promises twice what was seen
    weighted = [[value / time_s for value in row] for row, (_, time_s) in zip(columns, matmuls, strict=True)]
    rest = [1.0 - least * case.flops / time_s for case, time_s in matmuls]
    more, per_m, per_n, per_k, launch_s = non_negative_least_squares(weighted, rest)
    per_flop = least + more
    terms = (per_flop, per_m, per_n, per_k, launch_s)
    errors = [abs(sum(a * x for a, x in zip(row, terms, strict=True)) - 1.0) for row in weighted]
    attention = {}
    for kind in ("attention_forward", "attention_backward"):
        rates = [
            case.flops / event.times_s[0] for case, event in timed if (case.kind, case.precision) == (kind, precision)
        ]
        attention[kind] = max(rates, default=None)
    return KernelFit(
        precision=precision,
        matmul_flops_per_s=1.0 / per_flop,
        half_m=per_m / per_flop,
        half_n=per_n / per_flop,
        half_k=per_k / per_flop,
        matmul_launch_s=launch_s,
        attention_forward_flops_per_s=attention["attention_forward"],
        attention_backward_flops_per_s=attention["attention_backward"],
        num_timings=len(matmuls),
        error=median(errors),
    )


def _slowdown(times_s: Sequence[float]) -> float:
    """Return the slowdown s for which both at once take `(s - 1) min + max` (Galvatron, section 3.4).

    At least 1, and at most 2: both at once take no longer than one after the other, or other load was measured.
    """
    compute_s, transfer_s, both_s = times_s
    return min(2.0, max(1.0, 1.0 + (both_s - max(compute_s, transfer_s)) / min(compute_s, transfer_s)))
