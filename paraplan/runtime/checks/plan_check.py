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

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import Call
from paraplan.runtime.checks.attributes import LARGEST_STATE, Attributes
from paraplan.runtime.checks.batch_coupling import COMPARES, BatchCoupling, Coupling, Losses
from paraplan.runtime.checks.forward_state import ForwardState, WeightSums, check_weights_stay, weight_sums
from paraplan.runtime.checks.references import Reference, Whole, changes_the_model
from paraplan.runtime.checks.trials import (
    Piece,
    check_same_batch,
    check_same_numbers,
    gathered_numbers,
    modes,
)
from paraplan.runtime.checks.verification import Verification
from paraplan.runtime.checks.weight_reads import WeightReads
from paraplan.runtime.data.batches import MicroBatch, TargetCounter
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import python_numbers
from paraplan.runtime.structure.shaken_weights import shaken_weights

_LOGGER = logging.getLogger(__name__)
_ROUNDING = 1e-6
_WORTH_SAYING_S = 0.5


class PlanCheck:
    """The checks of one engine. `every` is after how many steps they come again: 2, 10, 100 and so on without it."""

    def __init__(
        self,
        part: RankPart,
        *,
        plan: ParallelPlan,
        mesh: Mesh,
        precision: TrainingPrecision,
        counter: TargetCounter,
        coupling: Coupling,
        reference: Reference | None,
        whole: Whole,
        is_off: bool = False,
        every: int | None = None,
        has_values: bool = True,
    ) -> None:
        self._module = part.module
        self._execution = part.execution
        self._loss = part.execution.loss
        self._orders = part.orders
        self._plan = plan
        self._mesh = mesh
        self._policy = coupling
        self._is_off = is_off
        self._has_values = has_values
        self._every = every
        self._state = ForwardState(part.module, mesh)
        self._coupling = BatchCoupling(part, plan=plan, mesh=mesh, precision=precision, counter=counter)
        self._verification = (
            None
            if reference is None
            else Verification(reference, part, plan=plan, mesh=mesh, precision=precision, whole=whole, counter=counter)
        )
        self._called: set[Call] = set()
        self._num_steps = 0
        self._told: set[str] = set()
        self._sums: WeightSums | None = None
        self._numbers: int | None = None
        self._reads: WeightReads | None = None
        self._has_trained = False
        self._is_random = self._is_always_random = self._has_verified = False
        changes = changes_the_model(plan) and plan.devices_per_process == 1
        if has_values and reference is None and changes:
            self._loss.watch = self._reads = WeightReads(part.module)

    def is_due(self, call: Call) -> bool:
        """Whether `run` is to look at a batch, the same on every rank."""
        if not self._has_values:
            return False
        return call not in self._called or (call == "step" and not self._is_off and self._is_due_again())

    def _is_due_again(self) -> bool:
        number = self._num_steps + 1
        if self._every is not None:
            return self._every > 0 and number % self._every == 0
        return number == 2 or (number >= 10 and 10 ** round(math.log10(number)) == number)

    def run(self, call: Call, pieces: Sequence[MicroBatch], sizes: Sequence[int]) -> None:
        """Check a batch before it is trained on, or evaluated. Every rank calls it.

        Raises `UnsupportedPlanError` on every rank where the plan does not train the model as one process does.
        """
        is_first = call not in self._called
        if not self._called:
            check_same_batch((pieces[0].inputs, pieces[0].targets), self._mesh)
        self._called.add(call)
        coupling, count = self._coupling, len(pieces)
        most = coupling.batch.most(sizes[0] // count or 1, count, is_first=is_first)
        parts = coupling.batch.take(pieces, start=0 if is_first else self._num_steps, most=most)
        if parts and is_first:
            self._look_at_state(parts)
        if not is_first:  # passes of the first check are alike on all ranks: blocks are compared in what follows it
            self._restart_orders()
        if parts and not self._is_off:
            self._measure(call, pieces, parts, is_first=is_first)
        self._execution.forget_runs()
        self._restart_orders()
        if call == "step" and is_first:
            self._sums = weight_sums(self._module)
            self._numbers = python_numbers() if self._plan.tp * self._plan.cp > 1 else None

    def _restart_orders(self) -> None:
        for order in self._orders:
            order.restart()

    def _measure(self, call: Call, pieces: Sequence[MicroBatch], parts: Sequence[Piece], *, is_first: bool) -> None:
        is_divided = self._plan.dp * len(pieces) > 1
        is_common = self._plan.dp == 1 or self._coupling.batch.are_alike(pieces[0])
        verified = parts if is_common or self._verification is None else [self._coupling.batch.fetched(pieces[0], 0)]
        if is_divided and self._policy == "gather":
            self._coupling.check_gathered(pieces)
        for is_shaken in (False, True)[: 1 + is_first]:
            with shaken_weights(self._module) if is_shaken else nullcontext():
                if is_divided and self._policy != "gather":
                    gradients = call == "step" and (is_shaken or not is_first)
                    where = " with weights shaken a little" if is_shaken else ""
                    words = self._coupling.measure(parts, is_random=self._is_random, gradients=gradients, where=where)
                    self._tell(words)
                if call == "step" and self._verification is not None:
                    self._verify(self._verification, verified)

    def _verify(self, verification: Verification, parts: Sequence[Piece]) -> None:
        if self._has_verified:
            self._restart_orders()
        try:
            taken_s = verification.check(parts, trains=not self._is_random, may_differ=self._is_always_random)
        except UnsupportedPlanError as error:
            if not (self._has_trained and verification.differs):
                raise
            self._say(f"step {self._num_steps + 1}: {error.message}")  # what a script has changed may be the cause
            return
        if self._has_verified:
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
        if self._policy == "refuse":
            raise UnsupportedPlanError(words, hint="leave batch_coupling='refuse' out to train by parts")
        self._say(words)

    def _say(self, words: str) -> None:
        kind = words.split(":")[0]
        if not self._told & {kind, COMPARES} and self._mesh.world.rank == 0:
            _LOGGER.warning(words)
        self._told.add(kind)

    def _look_at_state(self, parts: Sequence[Piece]) -> None:
        """Find out what passes write: buffers, which replicas share, attributes, and weights, which none may."""
        if self._is_off and not self._anywhere(bool(self._state.buffers())):
            return
        sums, before, state = [weight_sums(self._module)], self._state.buffers(), self._state
        functions = [self._loss.loss_fn]
        attributes, written = Attributes(self._module, largest=LARGEST_STATE, functions=functions), set[str]()

        def see() -> None:
            state.note(before, state.buffers())
            written.update(attributes.written())

        found = []
        for seed in (0, 1):
            found.append(self._coupling.losses(parts[:1], seed=seed, seen=see))
            sums.append(weight_sums(self._module))
        check_weights_stay(sums, self._mesh)
        if self._anywhere(bool(before)):
            with shaken_weights(self._module):  # a moving average of weights starts as these
                self._coupling.losses(parts[:1], seen=see)
        self._is_random = self._anywhere(_apart(*found) > 0.0)
        if self._is_random:
            with modes(self._module, training=False):
                found = [self._coupling.losses(parts[:1], seed=seed) for seed in (0, 1)]
            self._is_always_random = self._anywhere(_apart(*found) > 0.0)
        if self._plan.dp * self._plan.num_microbatches == 1 or len(parts) < 2 or self._is_off:
            return
        name = state.named()
        if name is not None and self._policy != "gather":
            self._tell(
                f"the model writes {name.removeprefix('model.')} from its batch: from each part of one, and replicas "
                "take what the first has written"
            )
        counter = state.named(counters=True)
        if name is None and counter is not None and self._plan.num_microbatches > 1:
            self._tell(
                f"the model counts its forward passes in {counter.removeprefix('model.')}: there are "
                f"{self._plan.num_microbatches} in a step, one for each micro-batch"
            )
        self._tell(self._kept_between_passes(parts, min(written, default=None)))

    def _kept_between_passes(self, parts: Sequence[Piece], written: str | None) -> str | None:
        """Return what is to be said of a loss that depends on passes before it, by attributes that the model keeps."""
        if not self._anywhere(written is not None):
            return None
        alone, again, other, same = (
            self._coupling.losses([parts[1]], earlier=one) for one in ((), (), [parts[0]], [parts[1]])
        )
        expected = alone if self._plan.num_microbatches > 1 else same  # what counts calls alone is alike on all ranks
        if not self._anywhere(_apart(other, expected) > 10 * _apart(alone, again) + _ROUNDING):
            return None
        what = "something" if written is None else written.removeprefix("model.")
        return (
            f"the loss depends on the forward passes before it, for which the model keeps {what}: on those of the "
            "parts that a batch is cut into"
        )

    def _anywhere(self, mine: bool) -> bool:
        return any(row[0] for row in gathered_numbers([float(mine)], self._mesh))

    def after_step(self) -> None:
        """Keep what forward passes have written the same on all replicas, and look once at what the first step has.

        Raises `UnsupportedPlanError` where its passes have written weights that trials had not, where `loss_fn` has
        read some and nothing has verified the plan, and where ranks that hold parts of one copy of the model have drawn
        other numbers.
        """
        self._num_steps += 1
        self._has_trained = True
        if self._numbers is not None:
            numbers, self._numbers = self._numbers, None
            check_same_numbers(numbers, self._mesh, has_drawn=python_numbers() != numbers)
        if self._reads is not None:
            reads, self._reads, self._loss.watch = self._reads, None, nullcontext
            reads.check(self._mesh, self._plan.describe())
        if self._sums is not None:
            before, self._sums = self._sums, None
            check_weights_stay([before, before, weight_sums(self._module)], self._mesh)
        self._state.share()


def _apart(one: Losses | None, other: Losses | None) -> float:
    if one is None or other is None:
        return 0.0
    return abs(one.mean - other.mean) / max(abs(one.mean), 1e-3)
