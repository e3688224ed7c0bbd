"""A plan checked in numbers before it trains: loss, every gradient and every buffer of two sequences, as one process.

The model as it was before it was cut, split and sharded is kept until the first step, and run beside what was made of
it on the same sequences, by the same loss.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checkpoints.saving import load_whole_model
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import compute_context
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.step.batches import MicroBatch
from paraplan.runtime.step.clipping import scale_gradients
from paraplan.runtime.step.loss import LossRule, StepLoss
from paraplan.runtime.step.trials import Piece, gathered_numbers, modes, not_compiled, nothing_changed, num_sequences_of

Verify = Literal["auto", "full", "off"]

_SHARE_OF_MEMORY = 0.25
_COPIES = 3  # of the weights: the reference, its gradients, and those of the plan
_LARGEST_SCALE = 1e-3  # a gradient below this share of the largest one is measured by that


@dataclass(frozen=True)
class Tolerance:
    """How far a plan may be from one process: of the loss, and of a gradient relative to its own size."""

    loss: float
    gradient: float


# Sums in another order: 1e-6 in fp32. In 16 bits products are rounded by 2**-8, many of which meet in a gradient.
_TOLERANCES: dict[TrainingPrecision, Tolerance] = {"fp32": Tolerance(loss=2e-5, gradient=2e-4)}
_HALF = Tolerance(loss=2e-2, gradient=0.3)


def changes_the_model(plan: ParallelPlan, *, recomputes: bool = False) -> bool:
    """Whether a plan does more to a model than to copy it; `recomputes`: blocks are run again whatever it says."""
    return recomputes or plan.tp * plan.pp * plan.cp > 1 or plan.zero_stage > 0 or plan.recompute != "none"


def reference_of(
    model: nn.Module, plan: ParallelPlan, mesh: Mesh, verify: Verify, *, recomputes: bool = False
) -> nn.Module | None:
    """Return a copy of the whole `model` on this rank's device to check the plan by; None where none is to be kept.

    That is where the plan changes nothing, where values come from a file later, and, unless all is to be verified,
    where the copy with its gradients would take more than a quarter of the memory that is free. All ranks agree.
    """
    if (
        verify == "off"
        or plan.devices_per_process > 1
        or (verify == "auto" and not changes_the_model(plan, recomputes=recomputes))
    ):
        return None
    fits = not any(parameter.is_meta for parameter in model.parameters())
    if verify == "auto" and fits:
        size_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
        fits = size_bytes * _COPIES <= _SHARE_OF_MEMORY * _free_bytes(mesh)
    made = _copied(model, mesh) if fits else None
    if not all(row[0] for row in gathered_numbers([float(made is not None)], mesh)):
        return None
    return made


def _copied(model: nn.Module, mesh: Mesh) -> nn.Module | None:
    try:
        return copy.deepcopy(model).to(mesh.world.device)
    except Exception:  # the user's modules, of which some cannot be copied: nothing is checked then
        return None


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _free_bytes(mesh: Mesh) -> float:
    device = mesh.world.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free)
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return float(pages * os.sysconf("SC_PAGE_SIZE")) / mesh.world.size


class Verification:
    """One check of a rank's part against `reference`, the whole model. Every rank calls it together with the others."""

    def __init__(
        self,
        reference: nn.Module,
        part: RankPart,
        *,
        plan: ParallelPlan,
        mesh: Mesh,
        precision: TrainingPrecision,
        whole: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        self._reference = reference
        self._part = part
        self._plan = plan
        self._mesh = mesh
        self._precision = precision
        self._whole = whole
        self._versions = self._held_versions()

    def reload(self, folder: Path) -> None:
        """Bring the reference to the checkpoint in `folder`, which the part has been brought to."""
        load_whole_model(folder, self._reference)
        self._versions = self._held_versions()

    def _held_versions(self) -> list[tuple[int, int]]:
        """Return what writing counts up: of shards the tensor that code sees, and what this rank holds of it."""
        return [(one._version, local_part(one)._version) for one in self._part.parameters.values()]

    def is_current(self) -> bool:
        """Whether nobody has changed the weights since the reference was made, on any rank."""
        changed = float(self._versions != self._held_versions())
        return not any(row[0] for row in gathered_numbers([changed], self._mesh))

    def check(self, pieces: Sequence[Piece], rule: LossRule, *, trains: bool) -> float | None:
        """Return how long it took, in seconds, after both were run on `pieces`; `trains` says in which mode.

        None where the model itself gives no number for these pieces, or does not run on them. Raises
        `UnsupportedPlanError` on every rank where they differ. Gradients and buffers are left as they were.
        """
        started_s = time.perf_counter()
        module, reference, loss = self._part.module, self._reference, self._part.execution.loss
        count = self._plan.pp if self._plan.pp > 1 else 2
        rows = [pieces[index % len(pieces)] for index in range(count)]
        mode = modes(module, reference, training=None if trains else False, batch_norm_training=False)
        with mode, not_compiled(), nothing_changed(module, reference):
            expected_loss = self._train_reference(rows, loss, rule)
            if expected_loss is None:
                return None
            found_loss = self._train_part(rows, loss, rule)
            errors = self._errors(expected_loss, found_loss)
        self._forget_gradients()
        self._judge(errors)
        return time.perf_counter() - started_s

    def _train_reference(self, rows: Sequence[Piece], loss: StepLoss, rule: LossRule) -> float | None:
        self._reference.zero_grad()
        try:
            with loss.under(rule), torch.enable_grad():
                loss.gradient_factor = 1.0
                loss.start()
                for inputs, targets in rows:
                    piece = self._micro_batch((inputs, targets), len(rows), rule, copies=1)
                    with compute_context(self._precision, self._mesh.world.device):
                        term = loss.run(self._reference, inputs, piece)
                    term.backward()  # type: ignore[no-untyped-call]
                total = float(loss.tally.loss)
        except Exception:  # a loss for split outputs alone, or a model for other batches
            return None
        return total if math.isfinite(total) else None

    def _train_part(self, rows: Sequence[Piece], loss: StepLoss, rule: LossRule) -> float:
        self._forget_gradients()
        copies = self._mesh.size("dp")
        with loss.under(rule):
            loss.gradient_factor = 1.0
            self._part.execution.train([self._micro_batch(row, len(rows), rule, copies=copies) for row in rows])
            own = float(loss.tally.loss)
        total = sum(row[0] for row in gathered_numbers([own], self._mesh))
        total /= self._mesh.size("tp") * self._mesh.size("cp")
        if rule.kind != "counted":
            return total
        # Counted terms have no weight: every copy of the model has brought all of them.
        scale_gradients(self._gradients().values(), 1.0 / copies)
        return total / copies

    def _micro_batch(self, row: Piece, count: int, rule: LossRule, *, copies: int) -> MicroBatch:
        weight = None if rule.kind == "counted" else 1.0 / (count * copies)
        return MicroBatch(*row, num_sequences=num_sequences_of(row), weight=weight)

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: held.grad for name, held in self._part.parameters.items() if held.grad is not None}

    def _errors(self, expected_loss: float, found_loss: float) -> dict[str, float]:
        """Return how far the loss, each gradient and each buffer of this rank are off, by how much they may be."""
        tolerance = _TOLERANCES.get(self._precision, _HALF)
        errors = {"the loss": abs(found_loss - expected_loss) / max(abs(expected_loss), 1e-3) / tolerance.loss}
        expected = {name: one.grad for name, one in self._reference.named_parameters() if one.grad is not None}
        largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
        for name, parameter in self._part.parameters.items():
            if not parameter.requires_grad or not name:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found = self._whole(name, gradient.detach())
            reference = expected.get(name, torch.zeros_like(found))
            scale = max(float(reference.abs().max()) if reference.numel() else 0.0, _LARGEST_SCALE * largest, 1e-30)
            off = float((found.float() - reference.float()).abs().max()) / scale if found.numel() else 0.0
            errors[f"the gradient of {name}"] = off / tolerance.gradient
        return errors | self._buffer_errors(tolerance)

    def _buffer_errors(self, tolerance: Tolerance) -> dict[str, float]:
        normalized = tuple(f"{name}." for name in batch_norms(self._reference))
        expected = dict(self._reference.named_buffers())
        errors = {}
        for name, found in self._part.buffers.items():
            reference = expected.get(name)
            if reference is None or name.startswith(normalized) or not found.numel():
                continue
            if found.shape != reference.shape:
                errors[f"buffer {name}"] = math.inf
                continue
            scale = max(float(reference.abs().max()), 1e-3)
            off = (found.to(reference.device).double() - reference.double()).abs().max()
            errors[f"buffer {name}"] = float(off) / scale / tolerance.gradient
        return errors

    def _judge(self, errors: dict[str, float]) -> None:
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        bound = math.inf if math.isnan(errors[worst]) else errors[worst]
        rows = gathered_numbers([bound], self._mesh)
        ranks = [rank for rank, (error,) in enumerate(rows) if error > 1.0]
        if not ranks:
            return
        where = worst if bound > 1.0 else f"what rank {ranks[0]} holds"
        tolerance = _TOLERANCES.get(self._precision, _HALF)
        size = bound * (tolerance.loss if worst == "the loss" else tolerance.gradient)
        off = f" is {size:.1e} off" if bound > 1.0 else " differs"
        raise UnsupportedPlanError(
            f"this model does not train under '{self._plan.describe()}' as it does in one process: on two sequences "
            f"{where}{off}",
            hint="use another plan (DDP runs any model), or name the model in a report to paraplan",
        )

    def _forget_gradients(self) -> None:
        for parameter in self._part.parameters.values():
            parameter.grad = None
