"""The check of a plan: before the first step and, ever more seldom, while it trains.

Two promises are looked at. Splits change nothing: the plan gives loss, gradients and buffers of the model itself on
the same micro-batches (`verification`). Cuts are told: where the loss of a batch is not made up of those of its parts,
the run says so, with both numbers (`batch_coupling`). Both are tried with the weights as they are, and shaken.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import Agreement, Call
from paraplan.runtime.checks.batch_coupling import COMPARES, BatchCoupling, Coupling
from paraplan.runtime.checks.batch_parts import BatchParts, Part
from paraplan.runtime.checks.comparison import ROUNDING, relative
from paraplan.runtime.checks.forward_state import ForwardState
from paraplan.runtime.checks.references import Reference, Whole, changes_the_model
from paraplan.runtime.checks.trial_runs import Record, TrialRuns
from paraplan.runtime.checks.trials import anywhere, check_same_batch, check_same_numbers
from paraplan.runtime.checks.verification import Verification, WeightReads, refusal
from paraplan.runtime.data.batches import MicroBatch, TargetCounter
from paraplan.runtime.seeds import python_numbers
from paraplan.runtime.structure.float8 import products_unrounded
from paraplan.runtime.structure.shaken_weights import shaken_weights
from paraplan.runtime.structure.snapshots import Snapshot, modes

_LOGGER = logging.getLogger(__name__)
_WORTH_SAYING_S = 0.5


@dataclass(frozen=True)
class Checking:
    """How batches are counted and checked: `reference` is the model itself, None where the plan is not checked by it.

    `agreement` brings all ranks out of a check together. `has_values` is False where tensors have none. `every` is
    after how many steps checks come again: 2, 10, 100 and so on without it.
    """

    precision: TrainingPrecision = "fp32"
    counter: TargetCounter = field(default_factory=TargetCounter)
    coupling: Coupling = "warn"
    reference: Reference | None = None
    agreement: Agreement | None = None
    has_values: bool = True
    is_off: bool = False
    every: int | None = None


class PlanCheck:
    """The checks of one engine, by `checking`, whose reference is let go once it is done with."""

    def __init__(self, runs: TrialRuns, checking: Checking, whole: Whole) -> None:
        reference, self._checking = checking.reference, replace(checking, reference=None)
        self._runs = runs
        self._mesh = runs.mesh
        self._plan = runs.plan
        self._module = runs.part.module
        self._batch = BatchParts(runs.mesh)
        self._state = ForwardState(self._module, self._mesh)
        self._coupling = BatchCoupling(runs)
        self._verification = None if reference is None else Verification(reference, runs, whole)
        self._called: set[Call] = set()
        self._num_steps = 0
        self._told: set[str] = set()
        self._numbers: int | None = None
        self._reads: WeightReads | None = None
        self._is_random = self._is_always_random = self._has_verified = False
        changes = changes_the_model(self._plan) and self._plan.devices_per_process == 1
        if checking.has_values and reference is None and changes:
            runs.loss.watch = self._reads = WeightReads(self._module, runs.loss.heads)

    def is_due(self, call: Call) -> bool:
        """Whether `run` is to look at a batch, the same on every rank."""
        if not self._checking.has_values:
            return False
        return call not in self._called or (call == "step" and not self._checking.is_off and self._is_due_again())

    def _is_due_again(self) -> bool:
        number = self._num_steps + 1
        if self._checking.every is not None:
            return self._checking.every > 0 and number % self._checking.every == 0
        return number == 2 or (number >= 10 and 10 ** round(math.log10(number)) == number)

    @products_unrounded()
    def run(self, call: Call, pieces: Sequence[MicroBatch]) -> None:
        """Check a batch before it is trained on, or evaluated. Every rank calls it.

        Raises `UnsupportedPlanError` on every rank where the plan does not train the model as one process does.
        """
        is_first = call not in self._called
        if not self._called:
            check_same_batch((pieces[0].inputs, pieces[0].targets), self._mesh)
        self._called.add(call)
        parts = self._batch.take(pieces, start=0 if is_first else self._num_steps, is_first=is_first)
        first = self._look_at_state(parts) if parts and is_first else None
        if not is_first:  # passes of the first check are alike on all ranks: blocks are compared in what follows it
            self._restart_orders()
        if parts and not self._checking.is_off:
            self._measure(call, pieces, parts, first, is_first=is_first)
        self._runs.part.execution.forget_runs()
        self._restart_orders()
        if call == "step" and is_first:
            self._state.watch_weights()
            self._numbers = python_numbers() if self._plan.tp * self._plan.cp > 1 else None

    def _restart_orders(self) -> None:
        for order in self._runs.part.orders:
            order.restart()

    def _measure(
        self, call: Call, pieces: Sequence[MicroBatch], parts: Sequence[Part], first: Record | None, *, is_first: bool
    ) -> None:
        """Look at a batch with the weights as they are, in the first check also with shaken ones."""
        is_divided = self._plan.dp * len(pieces) > 1
        verified = parts
        if self._verification is not None and self._plan.dp > 1 and not self._batch.are_alike(pieces[0]):
            verified = [Part.of(self._batch.fetched(pieces[0], 0))]
        if is_divided and self._checking.coupling == "gather":
            self._check_gathered(pieces)
        for is_shaken in (False, True)[: 1 + is_first]:
            with shaken_weights(self._module) if is_shaken else nullcontext():
                if is_divided and self._checking.coupling != "gather" and len(parts) > 1:
                    trains = call == "step" and (is_shaken or not is_first)
                    words = self._coupling.measure(
                        parts,
                        is_random=self._is_random,
                        is_shaken=is_shaken,
                        trains=trains,
                        run=None if is_shaken else first,
                    )
                    self._tell(words)
                if call == "step" and self._verification is not None:
                    self._verify(self._verification, verified)

    def _check_gathered(self, pieces: Sequence[MicroBatch]) -> None:
        """Raise `UnsupportedPlanError` where the loss from gathered outputs is not that of the whole batch."""
        copies, place = self._mesh.size("dp"), self._mesh.coordinate("dp")
        parts = self._batch.take(pieces, start=0, is_first=False)[:copies]
        if len(parts) != copies:
            return
        found = self._coupling.gathered(parts[place], parts)
        if found.worst(self._runs.most, self._mesh) is not None:
            raise UnsupportedPlanError(
                f"the loss of a batch is {found.expected:.8g}, and {found.loss:.8g} where its outputs are gathered "
                f"from dp={copies} ranks: loss_fn does not compute it from the outputs alone",
                hint="compute the loss in loss_fn, from what the model returns for each sequence",
            )

    def _verify(self, verification: Verification, parts: Sequence[Part]) -> None:
        if self._has_verified:
            self._restart_orders()
        taken_s, found = verification.check(parts, trains=not self._is_random)
        if found is not None and not self._is_always_random:  # where ranks may draw other numbers nothing follows
            error = refusal(found, self._plan)
            if not self._num_steps:
                raise error
            self._say(f"step {self._num_steps + 1}: {error.message}")  # what a script has changed may be the cause
        if self._has_verified or found is not None:
            return
        self._has_verified = True
        if self._mesh.world.rank == 0 and (taken_s is None or taken_s > _WORTH_SAYING_S):
            said = "the plan is not checked against one process, which gives no number on the first sequences"
            if taken_s is not None:
                said = f"the plan trains like one process, checked in {taken_s:.1f} s"
            sys.stderr.write(f"paraplan: {said}\n")

    def _tell(self, words: str | None) -> None:
        """Say how the batch is coupled, once for each kind of it, or refuse it."""
        if words is None:
            return
        if self._checking.coupling == "refuse":
            raise UnsupportedPlanError(words, hint="leave batch_coupling='refuse' out to train by parts")
        self._say(words)

    def _say(self, words: str) -> None:
        kind = words.split(":")[0]
        if not self._told & {kind, COMPARES} and self._mesh.world.rank == 0:
            _LOGGER.warning(words)
        self._told.add(kind)

    def _look_at_state(self, parts: Sequence[Part]) -> Record | None:
        """Find out what passes write: buffers, which replicas share, attributes, and weights, which none may.

        Return what `parts` came to in training, None where random numbers were drawn.
        """
        runs, state = self._runs, self._state
        if self._checking.is_off and not anywhere(bool(state.buffers()), self._mesh):
            return None
        state.watch_weights()
        before, written = state.buffers(), set[str]()
        attributes = Snapshot(self._module, functions=[runs.loss.loss_fn])

        def see() -> None:
            state.note(before)
            written.update(attributes.written())

        found = runs.run(parts if len(parts) > 1 else [*parts] * 2, seen=see)
        state.check_weights()
        if anywhere(bool(before), self._mesh):
            with shaken_weights(self._module):  # a moving average of weights starts as these
                runs.run(parts[:1], seen=see)
        runs.draws = anywhere(found.draws, self._mesh)
        runs.computes_in_halves |= anywhere(found.has_halves, self._mesh)  # a model may cast by itself
        self._is_random = runs.draws and self._differs_by_seed(parts[:1])
        if self._is_random:
            with modes(self._module, training=False):
                self._is_always_random = self._differs_by_seed(parts[:1])
        if self._plan.dp * self._plan.num_microbatches > 1 and len(parts) > 1 and not self._checking.is_off:
            self._tell_of_state(parts, written)
        return None if self._is_random else found

    def _differs_by_seed(self, parts: Sequence[Part]) -> bool:
        one, other = (self._runs.run(parts, seed=seed).loss for seed in (0, 1))
        return anywhere(relative(one, other) > 0.0, self._mesh)

    def _tell_of_state(self, parts: Sequence[Part], written: set[str]) -> None:
        name, counter = self._state.named(), self._state.named(counters=True)
        if name is not None and self._checking.coupling != "gather":
            self._tell(
                f"the model writes {name.removeprefix('model.')} from its batch: from each part of one, and replicas "
                "take what the first has written"
            )
        if name is None and counter is not None and self._plan.num_microbatches > 1:
            self._tell(
                f"the model counts its forward passes in {counter.removeprefix('model.')}: there are "
                f"{self._plan.num_microbatches} in a step, one for each micro-batch"
            )
        if anywhere(bool(written), self._mesh) and self._depends_on_passes(parts):
            what = min(written, default="something").removeprefix("model.")
            self._tell(
                f"the loss depends on the forward passes before it, for which the model keeps {what}: on those of the "
                "parts that a batch is cut into"
            )

    def _depends_on_passes(self, parts: Sequence[Part]) -> bool:
        """Whether the loss of a part is another one behind a pass of another part."""
        second = parts[1:2]
        other, alone = self._runs.run(second, earlier=parts[:1]), self._runs.run(second)
        expected = alone  # what counts calls alone is alike on all ranks
        if self._plan.num_microbatches == 1:
            expected = self._runs.run(second, earlier=second)
        gap = relative(other.loss, expected.loss)
        return anywhere(gap > ROUNDING[self._runs.computes_in_halves].loss, self._mesh)

    def after_step(self) -> None:
        """Keep what forward passes have written the same on all replicas, and look once at what the first step has.

        Raises `UnsupportedPlanError` where its passes have written weights that trials had not, where `loss_fn` has
        read some and nothing has verified the plan, and where ranks that hold parts of one copy of the model have drawn
        other numbers.
        """
        self._num_steps += 1
        if self._numbers is not None:
            numbers, self._numbers = self._numbers, None
            if anywhere(python_numbers() != numbers, self._mesh):
                check_same_numbers(numbers, self._mesh)
        if self._reads is not None:
            reads, self._reads, self._runs.loss.watch = self._reads, None, nullcontext
            reads.check(self._mesh, self._plan.describe())
        self._state.check_weights()
        self._state.share()
