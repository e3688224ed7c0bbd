"""Whether the gradients of micro-batches make up those of a batch: tried on two sequences before the first step.

A small term beside the loss that compares the tokens of a batch (the balance of experts) changes the loss by less than
rounding, and the gradients of what it trains by percents. So does a gradient that code adds in a backward pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks.trials import Piece, gathered_numbers, joined, not_compiled, nothing_changed
from paraplan.runtime.data.batches import MicroBatch, TargetCount, counted_targets
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.step.loss import LossRule

_NUM_SUMS = 8
_LEAST = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_MOST = {torch.float32: 2e-3, torch.bfloat16: 0.3, torch.float16: 0.3}
_OF_ROUNDING = 8.0
_LARGEST_SCALE = 1e-3  # a gradient below this share of the largest one is measured by that
_SLACK = 2.5  # two sequences take twice the memory of one, and some more

Sums = dict[str, tuple[float, torch.Tensor]]
"""The norm of each gradient, and sums of its entries by signs drawn at random: they stand for it in less memory."""


class GradientRule:
    """Compares the gradients of two sequences together with those of each, as `rule` adds them up."""

    def __init__(
        self, part: RankPart, *, mesh: Mesh, plan: ParallelPlan, count_targets: TargetCount | None, dtype: torch.dtype
    ) -> None:
        self._part = part
        self._mesh = mesh
        self._plan = plan
        self._count_targets = count_targets or counted_targets
        self._dtype = dtype

    def check(self, pieces: tuple[Piece, Piece], rule: LossRule) -> None:
        """Raise `UnsupportedPlanError` on every rank where the gradients differ by more than rounding.

        Gradients are dropped. Nothing is said where the memory of a GPU would not do.
        """
        first, second = pieces
        base = self._allocated()
        apart = self._sums((first, second), rule, num_together=1)
        if not self._has_room(base):
            return
        errors = _errors(self._sums((first, second), rule, num_together=2), apart)
        if not self._is_off(errors, dict.fromkeys(errors, _LEAST[self._dtype])):
            return
        noise = _errors(*(self._sums((first, first), rule, num_together=number) for number in (2, 1)))
        least, most = _LEAST[self._dtype], _MOST[self._dtype]
        allowed = {name: min(max(least, _OF_ROUNDING * noise.get(name, 0.0)), most) for name in errors}
        if self._is_off(errors, allowed):
            worst = max(errors, key=lambda name: errors[name] / allowed[name], default="")
            is_own = bool(worst) and errors[worst] > allowed[worst]
            where = f"the gradient of {worst} is {errors[worst]:.1e} off" if is_own else "gradients differ"
            raise UnsupportedPlanError(
                f"the gradients of two sequences together are not made up of those of each ({where}): it compares "
                f"the tokens of a batch, which dp={self._plan.dp} x num_microbatches={self._plan.num_microbatches} "
                "divides",
                hint="leave such terms out (transformers: output_router_logits=False), or use a plan of one rank of dp "
                "and one micro-batch",
            )

    def _is_off(self, errors: Mapping[str, float], allowed: Mapping[str, float]) -> bool:
        mine = any(not error <= allowed[name] for name, error in errors.items())
        return any(row[0] for row in gathered_numbers([float(mine)], self._mesh))

    def _sums(self, pieces: tuple[Piece, Piece], rule: LossRule, *, num_together: int) -> Sums:
        """Return what stands for the gradients of `pieces`, in one micro-batch or two."""
        loss, module = self._part.execution.loss, self._part.module
        times = self._plan.pp  # as many micro-batches as there are stages, at least
        counts = [self._count(piece, rule) for piece in pieces]
        if num_together == 2:
            rows = [(joined(*pieces), sum(counts))] * times
        else:
            rows = [*zip(pieces, counts, strict=True)] * times
        whole = times * (1.0 if rule.kind == "sum" else max(sum(counts), 1.0))
        micro_batches = [
            MicroBatch(
                *piece,
                num_sequences=num_together,
                weight=None if rule.kind == "counted" else (1.0 if rule.kind == "sum" else count) / whole,
            )
            for piece, count in rows
        ]
        self._forget()
        with nothing_changed(module), not_compiled(), loss.under(rule), torch.enable_grad():
            loss.gradient_factor = 1.0
            self._part.execution.train(micro_batches)
        sums = {name: _summed(one.grad) for name, one in self._part.parameters.items() if one.grad is not None}
        self._forget()
        return sums

    def _count(self, piece: Piece, rule: LossRule) -> float:
        return float(self._count_targets(piece[1])) if rule.kind == "targets" else 1.0

    def _forget(self) -> None:
        for parameter in self._part.parameters.values():
            parameter.grad = None

    def _allocated(self) -> int:
        device = self._mesh.world.device
        if device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def _has_room(self, base_bytes: int) -> bool:
        """Whether two sequences at once fit on every rank; where micro-batches have as many they do."""
        device = self._mesh.world.device
        has_room = True
        if device.type == "cuda" and self._plan.micro_batch_size < 2:
            taken = torch.cuda.max_memory_allocated(device) - base_bytes
            free = torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            has_room = _SLACK * taken < free
        return all(row[0] for row in gathered_numbers([float(has_room)], self._mesh))


def _summed(gradient: torch.Tensor) -> tuple[float, torch.Tensor]:
    flat = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().reshape(-1).float()
    generator = torch.Generator(flat.device).manual_seed(0)
    total = flat.sum()
    signs = torch.empty_like(flat)
    sums = [2.0 * flat.dot(signs.bernoulli_(0.5, generator=generator)) - total for _ in range(_NUM_SUMS)]
    return float(torch.linalg.vector_norm(flat)), torch.stack(sums).double().cpu()


def _errors(together: Sums, apart: Sums) -> dict[str, float]:
    """Return how far each gradient is off, relative to its norm. Sums of a difference by random signs have its norm."""
    largest = max((norm for norm, _ in apart.values()), default=0.0)
    errors = {}
    for name in {**together, **apart}:
        norm, sums = together.get(name, (0.0, torch.zeros(_NUM_SUMS, dtype=torch.float64)))
        other_norm, others = apart.get(name, (0.0, torch.zeros(_NUM_SUMS, dtype=torch.float64)))
        off = float((sums - others).square().mean().sqrt())
        error = off / max(norm, other_norm, _LARGEST_SCALE * largest, 1e-30)
        errors[name] = 0.0 if math.isnan(error) else error
    return errors
