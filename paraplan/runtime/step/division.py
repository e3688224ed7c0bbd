"""How the batch of a step is cut into micro-batches, the same on every rank, also where it is not full."""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.runtime.step.batches import Division, divide_short


@dataclass(frozen=True)
class StepShape:
    """The batch of one step on one rank: `num_microbatches` of `micro_batch_size` sequences, None for any one size.

    A step that is not full has at least `min_microbatches`, and a multiple of `multiple`, as its schedule needs.
    """

    num_microbatches: int
    micro_batch_size: int | None
    min_microbatches: int = 1
    multiple: int = 1

    @classmethod
    def of_plan(cls, plan: ParallelPlan, *, is_fixed: bool) -> StepShape:
        """Return the batch of a step of `plan`; `is_fixed` says that its sizes are binding."""
        # 1F1B and the schedules of several stages a rank run a micro-batch in every stage at once.
        counts = plan.pp if plan.pipeline_schedule not in (None, "gpipe") else 1
        return cls(
            num_microbatches=plan.num_microbatches,
            micro_batch_size=plan.micro_batch_size if is_fixed else None,
            min_microbatches=counts,
            multiple=counts,
        )

    @property
    def share(self) -> int | None:
        """Sequences of one step on one rank, None where any number will do."""
        return None if self.micro_batch_size is None else self.micro_batch_size * self.num_microbatches


class StepDivider:
    """Cuts the steps of one engine. Every rank asks it with the sizes that all of them bring."""

    def __init__(self, shape: StepShape, grid: RankGrid) -> None:
        self._shape = shape
        self._grid = grid
        self._was_short = False

    def divide(self, sizes: list[int], *, is_step: bool) -> Division:
        """Return how shares of these sizes, by rank, are cut. `is_step` says that they are trained on.

        Raises `UsageError` on every rank for sizes that do not fit the plan or each other.
        """
        shape, planned = self._shape, self._shape.share
        self._check_copies(sizes)
        if not max(sizes):
            raise UsageError("this step has no sequence on any rank", hint="give engine.step a batch")
        if planned is None:
            is_even = len(set(sizes)) == 1
            return Division(count=shape.num_microbatches, size=None if is_even else max(sizes))
        if max(sizes) > planned:
            raise UsageError(
                f"this step has {max(sizes)} sequences on rank {sizes.index(max(sizes))}, but the plan takes "
                f"micro_batch_size={shape.micro_batch_size} x num_microbatches={shape.num_microbatches} = {planned}",
                hint="take the batches from job.shard, or make a plan for this batch",
            )
        is_short = min(sizes) < planned
        if is_short and self._was_short and is_step:
            raise UsageError(
                f"two steps in a row have fewer sequences than the plan's {planned} on a rank: {sizes}",
                hint="only the last batch of an epoch may be short; take the batches from job.shard, or make a plan "
                "for this batch",
            )
        if is_step:
            self._was_short = is_short
        if not is_short:
            return Division(count=shape.num_microbatches, size=shape.micro_batch_size)
        assert shape.micro_batch_size is not None
        return divide_short(
            sizes,
            micro_batch_size=shape.micro_batch_size,
            min_count=shape.min_microbatches,
            multiple=shape.multiple,
        )

    def divide_any(self, sizes: list[int]) -> Division:
        """Return how shares of any sizes are cut that nothing is trained on, in pieces no larger than the plan's."""
        shape = self._shape
        self._check_copies(sizes)
        if not max(sizes):
            raise UsageError("this call has no sequence on any rank", hint="give the engine a batch")
        return divide_short(
            sizes,
            micro_batch_size=shape.micro_batch_size or -(-max(sizes) // shape.num_microbatches),
            min_count=shape.min_microbatches,
            multiple=shape.multiple,
        )

    def _check_copies(self, sizes: list[int]) -> None:
        """Raise `UsageError` where ranks that hold parts of one copy of the model bring batches of different sizes."""
        by_copy: dict[int, int] = {}
        for rank, size in enumerate(sizes):
            copy = self._grid.coordinates(rank)["dp"]
            if by_copy.setdefault(copy, size) != size:
                raise UsageError(
                    f"rank {rank} has {size} sequences for this step, and another rank with parts of the same copy of "
                    f"the model has {by_copy[copy]}",
                    hint="ranks of one copy take the same batch; job.shard gives it to them",
                )
