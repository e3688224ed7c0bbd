"""Whether the loss of a batch is made up of those of the parts that a plan cuts it into: measured, and told.

It is not where sequences are compared with each other (batch statistics, contrastive losses, the balance of experts),
nor where the mean of `loss_fn` goes over other targets than were counted. Parts are then computed by themselves, as
DistributedDataParallel does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checks.batch_parts import FEWEST_SEQUENCES, Part, by_targets, halves, joined
from paraplan.runtime.checks.comparison import MOST, ROUNDING, Comparison, Difference, relative
from paraplan.runtime.checks.trial_runs import Record, TrialRuns, compared, mixture
from paraplan.runtime.checks.trials import anywhere
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.step.loss import metric_value
from paraplan.runtime.structure.snapshots import modes

Coupling = Literal["warn", "refuse", "gather"]

_SLACK = 1.5
_OF_ERROR = 0.02  # of how far gradients are apart: what they may be off as those of a mean over other targets
_OF_METRICS = 2e-4  # that a metric of parts may be off: an index among values that are alike may be another one
_COUNT = "return (loss_sum, count) from loss_fn, or give job.prepare(count_targets=...)"
COMPARES = "this model compares samples"
_SUMS = "loss_fn returns a sum, and is taken for a mean over its micro-batch"
_OTHER = "the mean of loss_fn goes over other targets than are counted"
_REMEDIES = {
    COMPARES: "parts are computed by themselves, as DDP does; batch_coupling='gather' compares those of the global "
    "batch, 'refuse' ends the training here",
    _SUMS: _COUNT,
    _OTHER: _COUNT,
}


class BatchCoupling:
    """Compares parts of real batches with the same sequences at once. Every rank calls it."""

    def __init__(self, runs: TrialRuns) -> None:
        self._runs = runs
        self._mesh = runs.mesh
        self._in_halves = False
        self._draws_alike: bool | None = None

    def measure(
        self, parts: Sequence[Part], *, is_random: bool, is_shaken: bool, trains: bool, run: Record | None = None
    ) -> str | None:
        """Return what is to be said of the loss of `parts` together, None where it is made up of theirs.

        With `trains` gradients are compared too, of some parts, in which small terms show, and what couples sequences
        in the backward pass alone. `is_random` says that passes draw random numbers. `run` is what the parts came to.
        """
        with ExitStack() as stack:
            if self._runs.loss.balance is not None and self._runs.plan.num_microbatches == 1:
                stack.enter_context(self._runs.loss.balance.left_out())  # ranks compute it together
                run = None
            self._in_halves = stack.enter_context(self._runs.exactly(parts[0]))
            if is_random and not self._can_fix_draws(parts[0]):
                stack.enter_context(modes(self._runs.part.module, training=False))
            fewest = max(2, -(-FEWEST_SEQUENCES // len(parts[0])))
            parts = parts[:fewest] if trains else parts
            apart = run if run is not None and not trains else self._apart(parts, trains=trains)
            if not self._has_room(parts):
                parts = halves(parts)
                apart = self._apart(parts, trains=trains)
            if len(parts) < 2:
                return None
            whole = joined(parts)
            together = self._runs.run([whole], trains=trains)
            found = self._difference(apart, together, parts, trains=trains)
            num_parts = self._runs.plan.dp * self._runs.plan.num_microbatches
            name = "the whole batch" if len(parts) >= num_parts else "them together"
            where = in_parts = f"in {len(parts)} parts" + (" with weights shaken a little" if is_shaken else "")
            if found is None and not is_shaken:
                parts = self._by_targets(whole)
                if parts:
                    found = self._difference(self._runs.run(parts), Record(together.loss), parts, trains=False)
                where = "in 2 parts of other sequences"
                if found is not None and self._cause(parts, whole) == COMPARES:  # of sequences that belong together
                    return None
            if found is None:
                return None if is_shaken else self._metric_apart(apart, together, where=in_parts)
            if found.name != "the loss":
                return f"{COMPARES}: {found} {where}, and the loss is alike; {_REMEDIES[COMPARES]}"
            cause = self._cause(parts, whole)
            return f"{cause}: loss {found.expected:.8g} of {name}, {found.loss:.8g} {where}; {_REMEDIES[cause]}"

    def gathered(self, own: Part, parts: Sequence[Part]) -> Comparison:
        """Compare the loss of `parts`, of which ranks bring their `own` and join outputs, with that of one process."""
        joins, whole = self._runs.run([own], gathers=True), self._runs.run([joined(parts)])
        return Comparison(joins.loss, whole.loss)

    def _can_fix_draws(self, part: Part) -> bool:
        """Whether the same numbers are drawn for a sequence each time, in training."""
        if self._draws_alike is None:
            first, second = self._runs.run([part]), self._runs.run([part])
            self._draws_alike = not anywhere(first.loss != second.loss, self._mesh)
        return self._draws_alike

    def _apart(self, parts: Sequence[Part], *, trains: bool) -> Record:
        if self._mesh.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._mesh.world.device)
        return self._runs.run(parts, trains=trains)

    def _difference(self, apart: Record, together: Record, parts: Sequence[Part], *, trains: bool) -> Difference | None:
        """Return by what two runs of the same sequences differ beyond rounding, None where it is within.

        Sequences beside others are computed by other kernels, and summed in another order. How far that goes shows in
        one part, several times, and in all of them in another order.
        """
        comparison, rounding = compared(apart, together), ROUNDING[self._in_halves]
        losses = Comparison(apart.loss, together.loss)
        if comparison.worst(rounding, self._mesh) is None:
            return None
        alone = self._runs.run([parts[0]], trains=trains)
        repeated = self._runs.run([joined([parts[0]] * len(parts))], trains=trains)
        reordered = self._runs.run([joined(parts[::-1])], trains=trains)
        noise = compared(repeated, alone), compared(reordered, together)
        return losses.worst(rounding, self._mesh, noise=noise) or comparison.worst(rounding, self._mesh, noise=noise)

    def _metric_apart(self, apart: Record, together: Record, *, where: str) -> str | None:
        """Return what is to be said of a metric that is another number in parts; the ranks with the end have some."""
        rows = []
        for key in apart.metrics.keys() & together.metrics.keys():
            one, other = (float(metric_value(key, run.metrics[key])) for run in (together, apart))
            rows.append((relative(one, other), one, other))
        gap, whole, parts = max(gathered_numbers(max(rows, default=(0.0, 0.0, 0.0)), self._mesh.world))
        if gap <= max(_OF_METRICS, MOST[self._in_halves].loss):
            return None
        return (
            f"a metric is no mean over its targets: {whole:.6g} of the whole batch, {parts:.6g} {where}; return "
            "(sum, count) beside the loss, or (value, 'sum'), 'max' or 'min'"
        )

    def _by_targets(self, whole: Part) -> list[Part]:
        """Return the sequences in two halves that have other sums of targets, nothing where all have one."""
        labels = self._runs.counter.labels(whole.inputs, whole.targets)
        found = by_targets(whole, (labels, whole.targets))
        return [] if anywhere(not found, self._mesh) else found

    def _cause(self, parts: Sequence[Part], whole: Part) -> str:
        """Return why the loss of parts is another one than that of `whole`.

        A mean over other targets is one of the losses of both with other weights, and so are its gradients.
        """
        if batch_norms(self._runs.part.module):  # one row has no statistics
            return COMPARES
        for pair in (self._by_targets(whole), [*parts[:2]]):
            count = self._runs.counter.count
            if len(pair) < 2 or anywhere(not all(float(count(one.inputs, one.targets)) for one in pair), self._mesh):
                continue
            few = [one.rows(range(min(len(one), FEWEST_SEQUENCES // 2))) for one in pair]
            first, second = (self._runs.run([one], trains=True) for one in few)
            both = self._runs.run([joined(few)], trains=True)
            losses = gathered_numbers([first.loss, second.loss, both.loss], self._mesh.world)
            one, other, together = max(losses, key=lambda row: abs(row[2]))
            share = (together - other) / (one - other) if one != other else math.nan
            as_counted = compared(self._runs.run(few, trains=True), both)
            if as_counted.worst(ROUNDING[self._in_halves], self._mesh) is None:
                continue
            for cause, weights in ((_OTHER, (share, 1.0 - share)), (_SUMS, (1.0, 1.0))):
                mixed = mixture([first, second], weights)
                if 0.0 <= weights[0] <= 1.0 and self._is_alike(mixed, both, as_counted):
                    return cause
        return COMPARES

    def _is_alike(self, mixed: Record, both: Record, as_counted: Comparison) -> bool:
        allowed = max(ROUNDING[self._in_halves].tensor, _OF_ERROR * max(as_counted.gaps().values()))
        return not anywhere(not max(compared(mixed, both).gaps().values()) <= allowed, self._mesh)

    def _has_room(self, parts: Sequence[Part]) -> bool:
        """Whether all parts at once fit into the memory of a GPU, on every rank, by what the last pass took."""
        device = self._mesh.world.device
        if device.type != "cuda":
            return True
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return not anywhere(_SLACK * len(parts) * taken > free, self._mesh)
