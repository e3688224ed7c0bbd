"""A plan checked in numbers: loss, every gradient and every buffer of some sequences, as one process has them.

The model as it was before it was cut, split and sharded runs beside what was made of it on the same sequences, by the
same loss; see `paraplan.runtime.checks.references`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checks.batch_parts import Part
from paraplan.runtime.checks.comparison import Comparison, Difference
from paraplan.runtime.checks.forward_state import weight_sums, written_weights
from paraplan.runtime.checks.references import Reference, RunningReference, Whole
from paraplan.runtime.checks.trial_runs import TrialRuns
from paraplan.runtime.checks.trials import first_rank, not_compiled
from paraplan.runtime.data.batches import MicroBatch
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import compute_context
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.step.loss import LossFunction
from paraplan.runtime.structure.ends import ParameterReads
from paraplan.runtime.structure.snapshots import modes, nothing_changed


class Verification:
    """Checks of a rank's part against `reference`, the model. Every rank calls them together with the others."""

    def __init__(self, reference: Reference, runs: TrialRuns, whole: Whole) -> None:
        self._runs = runs
        self._mesh = runs.mesh
        self._whole = whole
        self._reference = RunningReference(reference, runs.part, runs.mesh, whole)

    def check(self, parts: Sequence[Part], *, trains: bool) -> tuple[float | None, Difference | None]:
        """Run both on some of each of `parts`; return how long it took, in seconds, and how they differ.

        They run in training, without `trains` in evaluation. None where the model itself gives no number for them, or
        does not run on them. Raises `UnsupportedPlanError` on every rank where it writes its weights under ZeRO.
        Gradients and buffers are left as they were.
        """
        started_s = time.perf_counter()
        module, model, plan = self._runs.part.module, self._reference.model, self._runs.plan
        rows = [parts[index % len(parts)] for index in range(plan.pp if plan.pp > 1 else 2)]
        rows = [one.rows(range(min(2, len(one)))) for one in rows]  # which show what is split as well as all of them do
        mode = modes(module, model, training=None if trains else False, batch_norm_training=False)
        try:
            with mode, not_compiled(), nothing_changed(module, functions=[self._runs.loss.loss_fn, model]):
                found = self._compared(rows)
        finally:
            self._runs.part.forget_gradients()
            self._reference.release()
        if found is None:
            return None, None
        return time.perf_counter() - started_s, found.worst(self._runs.most, self._mesh)

    def _compared(self, rows: Sequence[Part]) -> Comparison | None:
        model, loss, before = self._reference.model, self._runs.loss, dict[str, tuple[float, float]]()
        watches = bool(self._runs.plan.zero_stage) and not self._reference.is_streamed
        with nothing_changed(self._runs.part.module, functions=[loss.loss_fn]):  # both begin as things are
            micro_batches, total = self._micro_batches(rows)
            with loss.replaced(self._reading_the_reference(loss.loss_fn), total=total, is_alone=True):
                loss.start()
                seed_generators(0)
                has_run = self._reference.run(
                    lambda model: self._terms(model, micro_batches),
                    begin=lambda: before.update(weight_sums(model) if watches else {}),
                )
                copies = self._mesh.size("dp")
                expected = _mean(float(loss.tally.loss) * copies, float(loss.tally.count) * copies, total)
            after = weight_sums(model) if before and has_run else before
            written = next((name for name, sums in before.items() if after[name] != sums), None)
            if written is not None:  # under ZeRO the model writes copies, which are let go
                raise written_weights(written)
            buffers = {name: held.detach().clone() for name, held in model.named_buffers()}
        if not has_run or not math.isfinite(expected):
            return None
        seed_generators(0)
        tally = self._runs.tally(*self._micro_batches(rows), trains=True)
        copies = self._mesh.size("tp") * self._mesh.size("cp")
        rows_of_ranks = gathered_numbers([float(tally.loss), float(tally.count)], self._mesh.world)
        own, count = (sum(row[place] for row in rows_of_ranks) / copies for place in (0, 1))
        found = Comparison(_mean(own, count, total), expected)

        def compare(name: str, of_a_copy: torch.Tensor | None) -> None:
            wanted = None if of_a_copy is None else of_a_copy * self._mesh.size("dp")
            held = self._runs.part.parameters.get(name)
            if held is None or not held.requires_grad:
                found.measure(wanted)
                return
            gradient = torch.zeros_like(held) if held.grad is None else held.grad
            found.add(name, self._whole(name, gradient.detach()), wanted)

        if not self._reference.compare(compare):
            return None
        normalized = tuple(f"{name}." for name in batch_norms(model))
        for name, buffer in self._runs.part.buffers.items():
            if name in buffers and not name.startswith(normalized):
                found.add_buffer(name, buffer, buffers[name].to(buffer.device))
        return found

    def _reading_the_reference(self, loss_fn: LossFunction) -> LossFunction:
        """Return `loss_fn`, which finds what a pass has kept on the modules where the reference was run."""

        def loss(outputs: Any, targets: Any) -> Any:
            self._reference.lend_attributes()
            return loss_fn(outputs, targets)

        return loss

    def _terms(self, model: nn.Module, micro_batches: Sequence[MicroBatch]) -> Iterator[torch.Tensor]:
        for one in micro_batches:
            with compute_context(self._runs.precision, self._mesh.world.device), torch.enable_grad():
                term = self._runs.loss.run(model, one.inputs, one)
            yield term

    def _micro_batches(self, rows: Sequence[Part]) -> tuple[list[MicroBatch], float]:
        """Return `rows` as micro-batches of a batch that all ranks of `dp` bring each, and the targets of all of it.

        Both sides run them by the same weights: a backward pass may clip what it is given.
        """
        total, weights = self._runs.weights(rows)
        device = self._mesh.world.device
        return [row.micro_batch(weight, device) for row, weight in zip(rows, weights, strict=True)], total


def _mean(loss: float, count: float, total: float) -> float:
    """Return a loss that was divided by `total`, over the targets that `loss_fn` has counted beside it, if it does."""
    return loss * total / count if count else loss


def refusal(found: Difference, plan: ParallelPlan) -> UnsupportedPlanError:
    """Return what is said of a plan under which the model trains otherwise."""
    of_tokens = (
        "where loss_fn shifts tokens (logits[:, :-1]) or takes some, of which a rank has a part, give it targets that "
        "are shifted before, -100 where none is; else "
    )
    return UnsupportedPlanError(
        f"this model does not train under '{plan.describe()}' as it does in one process: {found}",
        hint=f"{of_tokens if plan.cp > 1 else ''}use another plan (DDP runs any model), or name the model in a report "
        "to paraplan",
    )


class WeightReads:
    """Notes which parameters of `module` are computed with in the contexts that it is called for.

    Those of `heads` are not noted, of which the runtime itself makes logits there.
    """

    def __init__(self, module: nn.Module, heads: Sequence[nn.Module] = ()) -> None:
        self.found: set[str] = set()
        self._module = module
        self._heads = heads

    def __call__(self) -> ParameterReads:
        """Return a context that notes them: of parameters as they are now, gathered or not."""
        of_heads = {id(one) for head in self._heads for one in head.parameters()}
        held = [(name, one) for name, one in self._module.named_parameters() if id(one) not in of_heads]
        return ParameterReads(held, self.found)

    def check(self, mesh: Mesh, plan_words: str) -> None:
        """Raise `UnsupportedPlanError` on every rank where one has found some."""
        rank = first_rank(bool(self.found), mesh)
        if rank is not None:
            raise weights_in_loss(min(self.found, default=f"a weight of rank {rank}"), plan_words)


def weights_in_loss(name: str, plan_words: str) -> UnsupportedPlanError:
    """Return what is said of a loss that computes with the weight `name`."""
    return UnsupportedPlanError(
        f"loss_fn computes with {name}, of which a rank has a part, a copy or nothing under '{plan_words}', and "
        "nothing compares its gradient with that of one process",
        hint="compute it in the model's forward, use weight_decay of the optimizer in place of a penalty, or leave out "
        "verify='off'",
    )
