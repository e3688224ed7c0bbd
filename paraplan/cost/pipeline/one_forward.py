"""1F1B in closed form: the longest path through its operations, over the paths that can be longest.

A path follows operations that wait for each other. In the steady phase stage i (of p, from 0) takes micro-batch
q + p - i forward after micro-batch q backward. With `u = q - (p - i - 1)` for forward operations and `u = q` for
backward ones, u never falls along a path; it grows by one from a stage's backward operation to its next forward one,
and by one from a stage's forward operation to the next stage's. All paths have to bring u from 0 to m - p + i at the
stage i where they end the steady phase. So the longest path

- fills: forward through stages 0..j, with the p - j - 1 waits on the slowest of them;
- turns n times around stage k;
- drains: backward through stages i..0, with the p - i - 1 waits on the slowest of them.

The form takes the largest over few j, k and i: ends of runs of equal stages. `T = sum t + (m - 1) max t` (Alpa,
Zheng et al. 2022, eq. 2) is the case in which the slowest stage is slowest in both directions. Sends are no part of it:
with them, turns around several stages can be longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.pipeline.runs import StageRuns
from paraplan.cost.plan_table import Floats, Ints

_ROWS_AT_A_TIME = 2048


def one_forward_one_backward_s(stages: StageRuns, num_microbatches: Ints) -> Floats:
    """Return the seconds of each pipeline of one chunk a rank under 1F1B, for two ranks and more, without sends."""
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
    return _longest_of(sums, count, ends=np.concatenate([ends, inner]), turns=turns)


def _longest_of(sums: _Sums, count: Ints, *, ends: Ints, turns: Ints) -> Floats:
    """Return the longest of the paths that fill and drain at `ends` and turn at `turns`, `[C, N]` each."""
    depth = sums.stages.counts.sum(axis=0)
    fill, drain, turn = sums.at(ends).along(0), sums.at(ends).along(2), sums.at(turns).along(1)
    held_fill, held_drain = (np.minimum(depth - point.stage, count) for point in (fill, drain))
    goes_on, comes_back = fill.stage <= turn.stage, drain.stage <= turn.stage
    filled = fill.forward_before_s + fill.forward_s + (held_fill - 1) * fill.slowest_forward_s
    onward = turn.forward_before_s + turn.forward_s - fill.forward_before_s - fill.forward_s + turn.backward_s
    back = fill.backward_before_s + fill.backward_s - turn.backward_before_s
    until = filled + np.where(goes_on, onward, back)
    drained = drain.backward_before_s + (held_drain - 1) * drain.slowest_backward_s
    homeward = turn.backward_before_s - drain.backward_before_s
    away = drain.forward_before_s + drain.forward_s - turn.forward_before_s + drain.backward_s
    after = drained + np.where(comes_back, homeward, away)
    steps = (
        np.maximum(count - depth + drain.stage, 0)
        - np.where(goes_on, turn.stage - fill.stage, 0)
        - np.where(comes_back, 0, 1 + drain.stage - turn.stage)
    )
    turning = steps * (turn.forward_s + turn.backward_s)
    paths = np.where(steps >= 0, until + after + turning, 0.0)
    return np.asarray(paths.max(axis=(0, 1, 2)))
