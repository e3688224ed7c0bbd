"""1F1B in closed form: the longest path through its operations, over the paths that can be longest.

A path follows operations that wait for each other. In the steady phase stage i (of p, from 0) takes micro-batch
q + p - i forward after micro-batch q backward. With `u = q - (p - i - 1)` for forward operations and `u = q` for
backward ones, u never falls along a path; it grows by one from a stage's backward operation to its next forward one,
and by one from a stage's forward operation to the next stage's. All paths have to bring u from 0 to m - p + i at the
stage i where they end the steady phase. So the longest path

- fills: forward through stages 0..j, with the p - j - 1 waits on the slowest of them;
- turns n times around stage k, or around the stages a..k, where sends make a detour longer than its share of stages
  (`sum t + 2 (k - a) s` for k - a + 1 steps of u; one stage alone takes t for each);
- drains: backward through stages i..0, with the p - i - 1 waits on the slowest of them.

The form takes the largest over few j, k, a and i: ends of runs of equal stages. `T = sum t + (m - 1) max t` (Alpa,
Zheng et al. 2022, eq. 2) is the case without sends in which the slowest stage is slowest in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.schedule_runs import StageRuns
from paraplan.cost.table import Floats, Ints

_ROWS_AT_A_TIME = 2048


def one_forward_one_backward_s(stages: StageRuns, num_microbatches: Ints) -> Floats:
    """Return the seconds of each pipeline of one chunk a rank under 1F1B, for two ranks and more.

    Never longer than the simulation. Within 1 % of it while a send takes no more than half of a forward pass; with
    slower sends and a handful of micro-batches it may be 5 % short.
    """
    starts = range(0, len(num_microbatches), _ROWS_AT_A_TIME)
    blocks = [np.arange(first, min(first + _ROWS_AT_A_TIME, len(num_microbatches))) for first in starts]
    return np.concatenate([np.zeros(0), *(_longest(stages.select(rows), num_microbatches[rows]) for rows in blocks)])


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the first stages of each column, read at any stage."""

    stages: StageRuns
    offsets: Ints
    forward: Floats
    backward: Floats
    slowest_forward: Floats
    slowest_backward: Floats

    @classmethod
    def of(cls, stages: StageRuns) -> _Sums:
        zeros = np.zeros((1, stages.counts.shape[1]))
        offsets = np.cumsum(np.concatenate([zeros.astype(np.int64), stages.counts]), axis=0)[:-1]
        is_there = stages.counts > 0
        return cls(
            stages=stages,
            offsets=offsets,
            forward=np.cumsum(np.concatenate([zeros, stages.counts * stages.forward_s]), axis=0),
            backward=np.cumsum(np.concatenate([zeros, stages.counts * stages.backward_s]), axis=0),
            slowest_forward=np.maximum.accumulate(np.where(is_there, stages.forward_s, 0.0), axis=0),
            slowest_backward=np.maximum.accumulate(np.where(is_there, stages.backward_s, 0.0), axis=0),
        )

    def run_of(self, stage: Ints) -> Ints:
        """Return the run that holds each of `stage`, `[C, N]`: the last one that starts at or before it."""
        ends = self.offsets + self.stages.counts
        return np.asarray((stage[:, None, :] >= ends[None, :, :]).sum(axis=1))

    def at(self, stage: Ints) -> _Points:
        """Return what the form needs to know at `stage`, `[C, N]`."""
        run = np.minimum(self.run_of(stage), len(self.offsets) - 1)

        def read(values: Floats) -> Floats:
            return np.take_along_axis(values, run, axis=0)

        inside = stage - np.take_along_axis(self.offsets, run, axis=0)
        forward_s, backward_s = read(self.stages.forward_s), read(self.stages.backward_s)
        return _Points(
            stage=stage,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_before_s=read(self.forward[:-1]) + inside * forward_s,
            backward_before_s=read(self.backward[:-1]) + inside * backward_s,
            slowest_forward_s=read(self.slowest_forward),
            slowest_backward_s=read(self.slowest_backward),
        )


@dataclass(frozen=True, eq=False)
class _Points:
    """Some stages of each column: own seconds, the sum of those before, and the slowest up to here."""

    stage: Ints
    forward_s: Floats
    backward_s: Floats
    forward_before_s: Floats
    backward_before_s: Floats
    slowest_forward_s: Floats
    slowest_backward_s: Floats

    @property
    def before_s(self) -> Floats:
        """Forward and backward of one micro-batch on all stages before."""
        return self.forward_before_s + self.backward_before_s

    @property
    def through_s(self) -> Floats:
        """Forward and backward of one micro-batch on all stages up to this one."""
        return self.before_s + self.forward_s + self.backward_s

    def along(self, axis: int) -> _Points:
        """Return the points with axis 0 moved among three, `[J, K, I, N]`."""
        shape = [1, 1, 1, self.stage.shape[1]]
        shape[axis] = self.stage.shape[0]
        return _Points(*(getattr(self, name).reshape(shape) for name in self.__dataclass_fields__))


def _longest(stages: StageRuns, count: Ints) -> Floats:
    sums = _Sums.of(stages)
    depth = stages.counts.sum(axis=0)
    starts = np.minimum(sums.offsets, depth - 1)
    lasts = np.clip(sums.offsets + stages.counts - 1, 0, depth - 1)
    few = np.clip(depth - count, 0, None)  # the first stage that holds all micro-batches at once
    ends = np.stack([np.zeros_like(depth), depth - 1, few])
    inner = np.stack([np.maximum(depth - 2, 0), *lasts[1:-1]])
    turns = np.concatenate([starts[1:], lasts, few[None]])
    seconds = _longest_of(sums, count, ends=np.concatenate([ends, inner]), turns=turns)
    detours = [_longest_of(sums, count, ends=ends[:2], turns=lasts, first=first) for first in (0, 1)]
    return np.max([seconds, *detours], axis=0) if stages.send_s.any() else seconds


def _longest_of(sums: _Sums, count: Ints, *, ends: Ints, turns: Ints, first: int | None = None) -> Floats:
    """Return the longest of the paths that fill and drain at `ends` and turn at `turns`, `[C, N]` each.

    They turn around one stage alone, or around those from `first` on.
    """
    stages, depth = sums.stages, sums.stages.counts.sum(axis=0)
    fill, drain, turn = sums.at(ends).along(0), sums.at(ends).along(2), sums.at(turns).along(1)
    send, number = stages.send_s, count
    held_fill, held_drain = (np.minimum(depth - point.stage, number) for point in (fill, drain))
    goes_on, comes_back = fill.stage <= turn.stage, drain.stage <= turn.stage
    filled = fill.forward_before_s + fill.forward_s + fill.stage * send + (held_fill - 1) * fill.slowest_forward_s
    onward = (
        turn.forward_before_s
        + turn.forward_s
        - fill.forward_before_s
        - fill.forward_s
        + (turn.stage - fill.stage) * send
        + turn.backward_s
    )
    back = fill.backward_before_s + fill.backward_s - turn.backward_before_s + (fill.stage - turn.stage) * send
    until = filled + np.where(goes_on, onward, back)
    drained = drain.backward_before_s + drain.stage * send + (held_drain - 1) * drain.slowest_backward_s
    homeward = turn.backward_before_s - drain.backward_before_s + (turn.stage - drain.stage) * send
    away = (
        drain.forward_before_s
        + drain.forward_s
        - turn.forward_before_s
        + (drain.stage - turn.stage) * send
        + drain.backward_s
    )
    after = drained + np.where(comes_back, homeward, away)
    steps = (
        np.maximum(number - depth + drain.stage, 0)
        - np.where(goes_on, turn.stage - fill.stage, 0)
        - np.where(comes_back, 0, 1 + drain.stage - turn.stage)
    )
    alone = steps * (turn.forward_s + turn.backward_s)
    turning = alone if first is None else _detours(sums, first, turn, steps, send)
    paths = np.where(steps >= 0, until + after + turning, 0.0)
    return np.asarray(paths.max(axis=(0, 1, 2)))


def _detours(sums: _Sums, first: int, turn: _Points, steps: Ints, send: Floats) -> Floats:
    """Return the seconds of `steps` steps of u around the stages first..k, and around some of them for the rest."""
    length = turn.stage - first + 1
    is_one = (length > 1) & (send > 0)
    length = np.where(is_one, length, 1)
    start = np.minimum(np.full_like(turn.stage, first), turn.stage)
    at_start = sums.at(start[0, :, 0, :]).along(1)
    turns, rest = np.divmod(np.maximum(steps, 0), length)
    around = turn.through_s - at_start.before_s + 2 * (length - 1) * send
    at_the_end, at_the_start = _rest_s(sums, turn, start, rest, send)
    # A path that never turns does not come by the first of the stages.
    rest_s = np.where(turns > 0, np.maximum(at_the_end, at_the_start), at_the_end)
    return np.where(is_one, turns * around + np.where(rest > 0, rest_s, 0.0), 0.0)


def _rest_s(sums: _Sums, turn: _Points, start: Ints, rest: Ints, send: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of `rest` steps around the last stages of a detour, and the longest around its first ones."""
    shape = np.broadcast_shapes(rest.shape, start.shape)
    flat = (-1, shape[-1])
    low = np.clip(np.broadcast_to(turn.stage + 1 - rest, shape), 0, None).reshape(flat)
    high = np.broadcast_to(start + np.maximum(rest, 1) - 1, shape).reshape(flat)
    at_low, at_high = sums.at(low), sums.at(high)
    sends = 2 * np.maximum(rest - 1, 0) * send
    first = sums.at(start[0, :, 0, :]).along(1)
    to_the_end = turn.through_s - at_low.before_s.reshape(shape) + sends
    from_the_start = at_high.through_s.reshape(shape) - first.before_s + sends
    return to_the_end, np.maximum(from_the_start, rest * (first.through_s - first.before_s))
