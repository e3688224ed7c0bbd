"""What is found out and checked with the first batch, before anything is trained."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.saving import Reader
from paraplan.runtime.checks.attributes import Attributes
from paraplan.runtime.checks.forward_state import (
    BatchStatistics,
    Buffers,
    ForwardState,
    WeightSums,
    check_weights_stay,
    kept_between_passes,
    other_weights,
    weight_sums,
)
from paraplan.runtime.checks.gradient_rule import GradientRule
from paraplan.runtime.checks.loss_rule import LossProbe, Tried
from paraplan.runtime.checks.references import changes_the_model
from paraplan.runtime.checks.trials import (
    LARGEST_STATE,
    Piece,
    check_same_batch,
    check_same_numbers,
    gathered_numbers,
    global_sequences,
    joined,
    modes,
    two_sequences,
)
from paraplan.runtime.checks.verification import Verification
from paraplan.runtime.checks.weight_reads import WeightReads
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import python_numbers
from paraplan.runtime.step.loss import LossRule, Returned
from paraplan.runtime.torch_private import watching_functions

_WORTH_SAYING_S = 0.5
_MOST_TRIES = 2
_ROUNDING = 1e-6


class FirstStep:
    """The checks of one engine. `verification` is done once, where there is one; the loss where a batch is divided."""

    def __init__(
        self,
        part: RankPart,
        probe: LossProbe,
        *,
        plan: ParallelPlan,
        mesh: Mesh,
        statistics: BatchStatistics,
        verification: Verification | None,
        gathers: bool = False,
        gradients: GradientRule | None = None,
        has_values: bool = True,
    ) -> None:
        self.rule: LossRule | None = None
        self._module = part.module
        self._probe = probe
        self._plan = plan
        self._mesh = mesh
        self._statistics = statistics
        self._verification = verification
        self._gathers = gathers
        self._gradients = gradients
        self._has_own_backward = False
        self._state = ForwardState(part.module, mesh)
        self._is_steady: bool | None = None
        self._tries = 0
        self._has_begun = False
        self._sums: WeightSums | None = None
        self._loss = part.execution.loss
        self._reads: WeightReads | None = None
        self._numbers: int | None = None
        self._has_trained = mesh.world.size == 1
        self._orders = part.orders
        if has_values and verification is None and changes_the_model(plan) and plan.devices_per_process == 1:
            self._loss.watch = self._reads = WeightReads(part.module)

    def is_due(self, *, is_divided: bool, trains: bool) -> bool:
        """Whether `check` has something to find out, the same on every rank."""
        return not self._has_begun or (is_divided and self.rule is None) or (trains and self._verification is not None)

    def check(self, inputs: Any, targets: Any, sizes: Sequence[int], *, is_divided: bool, trains: bool) -> LossRule:
        """Return the rule of the loss for a batch; `trains` says that it is trained on.

        Raises `UnsupportedPlanError` on every rank where the plan does not train the model as one process does.
        """
        if not self._has_begun:
            self._has_begun = True
            check_same_batch((inputs, targets), self._mesh)
        needs_rule = is_divided and self.rule is None
        verification = self._verification if trains else None
        rule = self._found(inputs, targets, sizes, needs_rule=needs_rule, verification=verification)
        if trains and not self._has_trained:
            self._has_trained = True
            for order in self._orders:
                order.restart()
            self._sums = None if self._is_steady is None else weight_sums(self._module)
            self._numbers = python_numbers() if self._plan.tp * self._plan.cp > 1 else None
        return rule if is_divided else LossRule(kind="whole")

    def _found(
        self, inputs: Any, targets: Any, sizes: Sequence[int], *, needs_rule: bool, verification: Verification | None
    ) -> LossRule:
        if needs_rule or verification is not None:
            pieces = two_sequences(inputs, targets, sizes, self._mesh)
            known = pieces if pieces is not None else self._one_sequence(inputs, targets, sizes)
            if known is not None:
                self._look(known, needs_rule and pieces is not None, verification, global_sequences(sizes, self._mesh))
        return self.rule or LossRule(kind="gathered" if self._gathers else "sequences")

    def reload(self, reader: Reader) -> None:
        """Take note that the state that `reader` has was loaded."""
        if self._verification is not None:
            self._verification.reload(reader)

    def share_state(self) -> None:
        """Keep what the forward pass of a divided batch has written the same on all replicas."""
        if self._statistics == "local":
            self._state.share()

    def check_weights(self) -> None:
        """Raise `UnsupportedPlanError` where the passes of the first step have written weights that trials had not.

        Also where `loss_fn` has read some and nothing has verified the plan, and where ranks that hold parts of one
        copy of the model have drawn other numbers.
        """
        if self._numbers is not None:
            numbers, self._numbers = self._numbers, None
            check_same_numbers(numbers, self._mesh, has_drawn=python_numbers() != numbers)
        if self._reads is not None:
            reads, self._reads, self._loss.watch = self._reads, None, nullcontext
            reads.check(self._mesh, self._plan.describe())
        if self._sums is not None:
            before, self._sums = self._sums, None
            check_weights_stay([before, before, weight_sums(self._module)], self._mesh)

    def _end_verification(self, verification: Verification) -> None:
        verification.release()
        self._verification = None

    def _look(
        self, pieces: Sequence[Piece], needs_rule: bool, verification: Verification | None, num_sequences: int
    ) -> None:
        is_steady, tried = self._try(pieces, needs_rule=needs_rule)
        if needs_rule:
            with modes(self._module, training=None if is_steady else False, batch_norm_training=False):
                both = pieces[0], pieces[1]
                self.rule = self._rule_of(both, num_sequences, tried if is_steady else None)
                if self._gradients is not None and self._is_strict and self._compares_gradients(self.rule):
                    self._gradients.check(both, self.rule)
        if verification is None:
            return
        if not verification.is_current():
            self._end_verification(verification)
            return
        if self._gathers and len(pieces) > 1:
            pieces = [joined(pieces[0], pieces[1])]
        rule = self.rule if self.rule is not None and self.rule.kind == "counted" else LossRule(kind="sum")
        taken_s = verification.check(pieces, rule, trains=is_steady)
        if taken_s is None and verification.can_run_again and self._tries < _MOST_TRIES:
            self._tries += 1
            return
        self._end_verification(verification)
        if self._mesh.world.rank == 0 and (taken_s is None or taken_s > _WORTH_SAYING_S):
            said = "the plan is not checked against one process, which gives no number on two sequences"
            if taken_s is not None:
                said = f"the plan trains like one process, checked in {taken_s:.1f} s"
            sys.stderr.write(f"paraplan: {said}\n")

    def _rule_of(self, pieces: tuple[Piece, Piece], num_sequences: int, tried: Tried | None) -> LossRule:
        if self._gathers:
            return self._probe.check_gathered(pieces)
        return self._probe.find(pieces, num_sequences=num_sequences, is_strict=self._is_strict, tried=tried)

    @property
    def _is_strict(self) -> bool:
        return self._statistics == "global" or not self._state.is_written

    def _compares_gradients(self, rule: LossRule) -> bool:
        """Whether gradients may be others where the loss is the same: its code is not followed, or a backward pass."""
        if rule.kind == "gathered":
            return False
        return any(row[0] for row in gathered_numbers([float(self._has_own_backward)], self._mesh)) or not (
            rule.is_followed
        )

    def _watch_function(self, kind: type[Any], *_: Any) -> None:
        self._has_own_backward |= not kind.__module__.startswith(("torch.", "paraplan."))

    def _try(self, pieces: Sequence[Piece], *, needs_rule: bool) -> tuple[bool, Tried | None]:
        """Return whether nothing in the model is random, and what two pieces give in training where a rule is needed.

        The same passes show which buffers they write. Raises `UnsupportedPlanError` where a plan divides such a batch.
        """
        if self._is_steady is not None and not needs_rule:
            return self._is_steady, None
        tried: list[Returned | None] = []
        after: list[Buffers] = []
        before, sums = self._state.buffers(), [weight_sums(self._module)]
        attributes, written = Attributes(self._module, largest=LARGEST_STATE), set[str]()

        def see() -> None:
            after.append(self._state.buffers())
            written.update(attributes.written())

        with modes(self._module, training=None, batch_norm_training=False), watching_functions(self._watch_function):
            for piece in pieces if needs_rule else pieces[:1]:
                value = self._probe.value(piece, seed=0, seen=see)
                tried.append(value)
                sums.append(weight_sums(self._module))
            if needs_rule and self._state.is_anywhere():
                with other_weights(self._module):
                    self._probe.value(pieces[0], seed=0, seen=see)
            if self._is_steady is None:
                self._is_steady = self._is_same(tried[0], self._probe.value(pieces[0], seed=1))
                sums.append(weight_sums(self._module))
                check_weights_stay(sums, self._mesh)
        if not needs_rule:
            return self._is_steady, None
        if self._statistics == "global":
            # Without random numbers: a first pass that makes modules draws some, and later ones go on from others.
            with modes(self._module, training=None if self._is_steady else False, batch_norm_training=False):
                self._check_history(pieces, min(written, default=None))
        self._state.find(before, after, self._plan, statistics=self._statistics)
        return self._is_steady, (tried[0], tried[1])

    def _check_history(self, pieces: Sequence[Piece], written: str | None) -> None:
        """Raise `UnsupportedPlanError` on every rank where a loss depends on passes before it that a plan divides.

        Modules keep such things in attributes, of which `written` is one that a pass writes on this rank.
        """
        if not any(row[0] for row in gathered_numbers([float(written is not None)], self._mesh)):
            return
        first, second = pieces
        returned = [self._probe.value(second, seed=0, earlier=one) for one in ((), (), (first,), (second,))]
        alone, again, other, same = (math.nan if one is None else float(one.value) for one in returned)
        expected = alone if self._plan.num_microbatches > 1 else same  # what counts calls alone is alike on all ranks
        differs = abs(other - expected) > 10 * abs(alone - again) + _ROUNDING * abs(expected)
        if any(row[0] for row in gathered_numbers([float(differs)], self._mesh)):
            raise kept_between_passes(written, self._plan)

    def _is_same(self, one: Returned | None, other: Returned | None) -> bool:
        """Return whether no rank has two losses of one piece."""
        values = [None if returned is None else float(returned.value) for returned in (one, other)]
        differs = float(values[0] != values[1] and values[0] == values[0])
        return not any(row[0] for row in gathered_numbers([differs], self._mesh))

    def _one_sequence(self, inputs: Any, targets: Any, sizes: Sequence[int]) -> tuple[Piece] | None:
        return ((inputs, targets),) if min(sizes) == max(sizes) == 1 and self._mesh.size("dp") == 1 else None
