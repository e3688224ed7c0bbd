"""The space of plans for a world: every product of axes and every choice inside it, with what rules it out counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from paraplan.cost.table import OFFLOADS, RECOMPUTES, SCHEDULES, Ints, Mask, PlanTable, distinct_rows
from paraplan.model.spec import ModelSpec
from paraplan.plan.support import rule_of, unsupported_reason
from paraplan.plan.training import TrainingSpec

CHUNK_ROWS = 200_000
"""Plans that are priced at a time: what a chunk needs stays in the caches, and memory does not grow with the space."""

_INTERLEAVED = SCHEDULES.index("interleaved_1f1b")


@dataclass(frozen=True)
class Degrees:
    """One product of axes."""

    dp: int
    tp: int
    pp: int
    cp: int


@dataclass
class PlanSpace:
    """All plans for `num_gpus` ranks, in chunks. `considered` and `rejected` are complete once all chunks are read.

    `rejected` counts plans by the reason in words that rules them out before they are priced.
    """

    model: ModelSpec
    training: TrainingSpec
    num_gpus: int
    gpus_per_node: int
    considered: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def chunks(self) -> Iterator[PlanTable]:
        """Yield the plans that divide the batch and the model and that the runtime executes, a chunk at a time."""
        waiting: list[PlanTable] = []
        for degrees in all_degrees(self.num_gpus):
            table = self._inside(degrees)
            self.considered += len(table)
            reason = self._ruled_out(degrees)
            if reason is not None:
                self.rejected[reason] += len(table)
                continue
            waiting.append(table.select(self._executable(table)))
            if sum(map(len, waiting)) >= CHUNK_ROWS:
                yield PlanTable.concatenate(waiting)
                waiting = []
        if any(map(len, waiting)):
            yield PlanTable.concatenate(waiting)

    def _ruled_out(self, degrees: Degrees) -> str | None:
        if degrees.tp > self.gpus_per_node:
            return "tensor parallelism across nodes"
        limits = [run.block.tp_limit for run in self.model.runs if run.block.tp_limit is not None]
        if any(limit % degrees.tp for limit in limits):
            return "tp does not divide the model's attention heads"
        if degrees.pp > self.model.num_blocks:
            return f"more pipeline stages than the model's {self.model.num_blocks} blocks"
        if self.training.global_batch_size % degrees.dp:
            return f"dp does not divide the global batch of {self.training.global_batch_size}"
        if self.training.seq_length % degrees.cp:
            return f"cp does not divide the sequence length of {self.training.seq_length}"
        return None

    def _inside(self, degrees: Degrees) -> PlanTable:
        """Return all plans of one product of axes. A batch that dp does not divide counts with micro-batches of one."""
        share = max(1, self.training.global_batch_size // degrees.dp)
        choices = np.array(list(self._choices(degrees)), dtype=np.int64)
        sizes = np.array(divisors(share), dtype=np.int64)
        zero, parallel, schedule, virtual, recompute, offload = np.repeat(choices, len(sizes), axis=0).T
        micro = np.tile(sizes, len(choices))

        def constant(value: int) -> Ints:
            return np.full(len(micro), value, dtype=np.int64)

        return PlanTable(
            dp=constant(degrees.dp),
            tp=constant(degrees.tp),
            pp=constant(degrees.pp),
            cp=constant(degrees.cp),
            zero_stage=zero,
            sequence_parallel=parallel,
            micro_batch_size=micro,
            num_microbatches=share // micro,
            schedule=schedule,
            virtual=virtual,
            recompute=recompute,
            offload=offload,
            split=np.zeros_like(offload),
        )

    def _choices(self, degrees: Degrees) -> Iterator[tuple[int, ...]]:
        """Yield ZeRO stage, sequence parallelism, schedule, virtual stages, recompute and offload that go together."""
        sharded = degrees.dp * degrees.cp > 1
        stages = range(1 if not sharded else 2 if degrees.pp > 1 else 4)
        virtual_sizes = divisors(max(1, self.model.num_blocks // degrees.pp))[1:]
        schedules = [(index, 1) for index, name in enumerate(SCHEDULES) if name and index != _INTERLEAVED]
        schedules += [(_INTERLEAVED, size) for size in virtual_sizes]
        choices = product(
            stages,
            range(1 if degrees.tp == 1 else 2),
            schedules if degrees.pp > 1 else [(0, 1)],
            range(len(RECOMPUTES)),
            range(len(OFFLOADS)),
        )
        for zero, parallel, (schedule, virtual), recompute, offload in choices:
            yield zero, parallel, schedule, virtual, recompute, offload

    def _executable(self, table: PlanTable) -> Mask:
        """Return which rows the runtime executes, and count the reasons of the others.

        The runtime looks at whether a degree exceeds one and whether the micro-batches fill the pipeline, not at how
        large they are: one plan of each such kind is asked about, and stands for all.
        """
        depth = np.minimum(table.pp, 2)
        count, rounds = table.num_microbatches, np.maximum(table.num_microbatches // table.pp, 1)
        # Fewer than the stages; a multiple of them; of the rounds of a schedule; of neither. One example of each, pp=2.
        fills = np.select([count < table.pp, count % table.pp == 0, count % rounds == 0], [1, 2, 3], default=5)
        kinds, kind = distinct_rows(
            np.minimum(table.dp, 2),
            np.minimum(table.tp, 2),
            depth,
            np.minimum(table.cp, 2),
            table.zero_stage,
            table.sequence_parallel,
            np.minimum(table.micro_batch_size, 1),
            fills,
            table.schedule,
            np.minimum(table.virtual, 2),
            table.recompute,
            table.offload,
            np.zeros_like(table.split),
        )
        examples = PlanTable.of_columns(kinds)
        reasons = [
            unsupported_reason(examples.plan(row), precision=self.training.precision) for row in range(len(examples))
        ]
        counts = np.bincount(kind, minlength=len(reasons))
        for reason, count in zip(reasons, counts, strict=True):
            if reason is not None:
                self.rejected[rule_of(reason)] += int(count)
        return np.array([reason is None for reason in reasons], dtype=bool)[kind]


def all_degrees(num_gpus: int) -> Iterator[Degrees]:
    """Yield every product of dp, tp, pp and cp that equals `num_gpus`."""
    for tp in divisors(num_gpus):
        for pp in divisors(num_gpus // tp):
            for cp in divisors(num_gpus // tp // pp):
                yield Degrees(dp=num_gpus // tp // pp // cp, tp=tp, pp=pp, cp=cp)


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, from 1 up."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
