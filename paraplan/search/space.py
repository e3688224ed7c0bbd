"""The space of plans for a world: every product of axes and every choice inside it, with what rules it out counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from paraplan.cost.pipeline.simulation import round_size
from paraplan.cost.plan_table import OFFLOADS, RECOMPUTES, SCHEDULES, Ints, PlanTable, first_rows
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.model.weight_formats import is_stored_below_16_bits
from paraplan.plan.compatibility import (
    why_degrees_incompatible,
    why_ep,
    why_not_sharded,
    why_pp,
    why_tp,
    why_untrainable,
)
from paraplan.plan.executor import OWN_RUNTIME, Executor
from paraplan.plan.incompatibility import Incompatibility
from paraplan.plan.parallel import AXES, Degree, ParallelPlan
from paraplan.plan.support import rule_of
from paraplan.search.constraints import FREE, Constraints, check_axes, check_micro_batch, nothing_has_all
from paraplan.search.degrees import Degrees, all_degrees, divisors
from paraplan.search.micro_batch_limit import largest_fitting
from paraplan.search.rank_orders import RankOrders
from paraplan.search.stage_splits import BalancedSplits

CHUNK_ROWS = 96_000
"""Plans that are priced at a time: what a chunk needs stays in the caches."""
MANY_PLANS = 200_000
"""From so many on, sizes of micro-batches that fit no way are looked for first."""
MICRO_BATCH_TOO_LARGE = "micro-batches that need more memory than a GPU has"

_GPIPE, _ONE_FORWARD, _INTERLEAVED, _ZERO_BUBBLE = (
    SCHEDULES.index(name) for name in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Plans of the space that may run, and the row of `PlanSpace.degrees` of each; orders of ranks are not chosen."""

    table: PlanTable
    degrees: Ints


class _Rows(NamedTuple):
    """Plans of one product of axes: its number, choices inside it by row, and the micro-batch of each."""

    degrees: Degrees
    number: int
    choices: Ints
    micro: Ints


@dataclass
class PlanSpace:
    """All plans for the GPUs of a workload, in chunks. `considered` and `rejected` are complete once all are read.

    `rejected` counts plans by the reason in words that rules them out before they are priced.
    Plans are those that the executor executes. Plans that differ in nothing but the order of ranks count each. What is
    `fixed` is not counted otherwise. Raises `PlanError` for what cannot be had, with the values that would do.
    """

    workload: Workload
    executor: Executor = OWN_RUNTIME
    fixed: Constraints = FREE
    considered: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    degrees: list[Degrees] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)
    variants: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_gpus, batch = self.workload.cluster.num_gpus, self.workload.training.global_batch_size
        untrainable = why_untrainable(self.workload.model, self.workload.training, self.workload.cluster.gpu)
        if untrainable is not None:
            raise untrainable.error()
        self._known_rules: dict[tuple[int, ...], Incompatibility | None] = {}
        experts = self.workload.model.num_experts
        self._is_whole = experts > 1 and self.workload.framework.experts.over_tensor_ranks
        every = list(all_degrees(num_gpus, num_experts=experts, whole_experts=self._is_whole))
        check_axes(self.fixed, every, self._reason_of, num_gpus=num_gpus, model_limit=self._model_limit)
        self._offloads = range(len(OFFLOADS) if self.workload.cluster.gpu.vendor != "cpu" else 1)
        if all(not self.fixed.allows(offload=OFFLOADS[offload]) for offload in self._offloads):
            raise PlanError(
                f"--offload {self.fixed.offload}: CPU processes have all on the host already",
                hint="leave --offload out, or take a profile with GPUs",
            )
        self._degrees = [each for each in every if self.fixed.allows(**each.options)]
        possible = (each for each in self._degrees if self._reason_of(each) is None)
        shares = (max(1, batch // each.dp) for each in possible)
        check_micro_batch(self.fixed, shares, training=self.workload.training)
        self._splits = BalancedSplits(self.workload)
        self._orders = RankOrders(self.workload, self.executor.rank_orders)
        self._known_sizes: dict[int, Ints] = {}
        self._asked: dict[tuple[Degrees, int, tuple[int, ...]], str | None] = {}
        self._known_reasons: dict[tuple[int, Degrees, int], dict[str, Ints]] = {}
        self._known_kinds: dict[int, tuple[list[tuple[int, ...]], Ints]] = {}
        self._known_cells: dict[tuple[int, Degrees, bool, bytes], tuple[Ints, Ints, Counter[str]]] = {}
        self._known_choices: dict[tuple[bool, bool, int, int, bool], Ints] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Yield the plans that divide the batch and the model and that can be executed, a chunk at a time."""
        possible = [each for each in self._degrees if self._is_possible(each)]
        waiting, num_waiting = list[_Rows](), 0
        for degrees, largest in zip(possible, self._largest_sizes(possible), strict=True):
            variants = self._orders.count(degrees.sizes)
            self.variants.append(variants)
            self.orders.append(self._orders.worth_pricing(degrees.sizes, degrees.ep))
            self.degrees.append(degrees)
            choices, sizes = self._choices(degrees), self._micro_batch_sizes(degrees)
            too_large = len(choices) * int((sizes > largest).sum())
            if too_large:
                self.rejected[MICRO_BATCH_TOO_LARGE] += too_large * variants
            sizes = sizes[sizes <= largest]
            choice, size = self._executable(degrees, choices, sizes)
            if len(choice):
                waiting.append(_Rows(degrees, len(self.degrees) - 1, choices[choice], sizes[size]))
                num_waiting += len(choice)
            if num_waiting >= CHUNK_ROWS:
                yield self._chunk(waiting)
                waiting, num_waiting = [], 0
        if waiting:
            yield self._chunk(waiting)
        if not self.considered:
            raise nothing_has_all(self.fixed)

    def _is_possible(self, degrees: Degrees) -> bool:
        """Count the plans of a product of axes, and return whether there are any that can be executed."""
        count = len(self._choices(degrees)) * len(self._micro_batch_sizes(degrees)) * self._orders.count(degrees.sizes)
        self.considered += count
        reason = self._reason_of(degrees)
        if reason is not None:
            self.rejected[reason] += count
        return reason is None and count > 0

    def _largest_sizes(self, products: Sequence[Degrees]) -> list[int]:
        """Return the largest micro-batch of each product of axes that may fit some way."""
        sizes = [self._micro_batch_sizes(each) for each in products]
        chosen = [self._choices(each) for each in products]
        count = sum(len(choices) * len(each) for choices, each in zip(chosen, sizes, strict=True))
        if count < MANY_PLANS:
            return [int(each[-1]) if len(each) else 0 for each in sizes]
        probes = []
        for each, choices in zip(products, chosen, strict=True):
            smallest = choices[(choices[:, 5] == choices[:, 5].max()) & (choices[:, 1] == choices[:, 1].max())]
            smallest = smallest[(smallest[:, 3] == smallest[:, 3].min()) & (smallest[:, 7] == 0)]
            usual = smallest[smallest[:, 2] == _ONE_FORWARD]
            smallest = usual if len(usual) else smallest
            probes.append(self._table([_Rows(each, 0, smallest, np.ones(len(smallest), dtype=np.int64))]))
        splits = self._splits.rows
        return largest_fitting(self.workload, [each.with_splits(splits) for each in probes], sizes)

    def why_left_out(self, plan: ParallelPlan) -> str | None:
        """Return why a plan that suits the workload is not in this space, None for one that is."""
        degrees = Degrees(**plan.degrees, tensor_experts=plan.tp if self._is_whole else 1)
        chosen = degrees.options | {
            "zero_stage": plan.zero_stage,
            "micro_batch_size": plan.micro_batch_size,
            "recompute": plan.recompute,
            "schedule": plan.pipeline_schedule,
            "sequence_parallel": plan.sequence_parallel,
            "offload": plan.offload,
        }
        return self._reason(plan) if self.fixed.allows(**chosen) else "something else is fixed"

    def _chunk(self, rows: Sequence[_Rows]) -> Chunk:
        numbers = np.repeat([each.number for each in rows], [len(each.micro) for each in rows])
        # The divisions that later plans brought are in the rows of all.
        return Chunk(self._table(rows).with_splits(self._splits.rows), numbers)

    def _reason_of(self, degrees: Degrees) -> str | None:
        return self._ruled_out(degrees) or self._unsupported_axes(degrees)

    def _model_limit(self, axis: Degree, degree: int) -> str | None:
        """Return why a degree does not suit the model, on however many GPUs."""
        model, rules = self.workload.model, {"ep": why_ep, "pp": why_pp}
        found = rules[axis](model, degree) if axis in rules else None
        if axis == "tp":
            found = why_tp(model, degree, shares_key_heads=self.workload.framework.split_rules.shares_key_heads)
        return None if found is None else found.message.removeprefix(f"{axis}={degree}: ")

    def _ruled_out(self, degrees: Degrees) -> str | None:
        if degrees.tp > self.workload.cluster.gpus_per_node:
            return f"tensor parallelism across nodes of {self.workload.cluster.gpus_per_node} GPUs"
        axes = tuple(degrees.sizes.values())
        if axes not in self._known_rules:
            self._known_rules[axes] = why_degrees_incompatible(
                self.workload.model,
                self.workload.training,
                degrees.named | {"ep": 1},  # all degrees of ep divide the experts
                self.workload.framework.split_rules,
            )
        found = self._known_rules[axes]
        return None if found is None else found.reason

    def _unsupported_axes(self, degrees: Degrees) -> str | None:
        """Return the reason why no plan of these degrees can be executed, whatever else it chooses."""
        spreads = self.executor.spreads_experts
        if spreads is None:
            spreads = self.executor.is_own or self.workload.framework.data_parallel.has_expert_parallel
        if degrees.ep == 1 or spreads:
            return None
        others = "transformers, torchtitan, DeepSpeed, axolotl, Megatron-Core and paraplan's own runtime do"
        return f"{self.workload.framework.title} does not spread experts over ep; {others}"

    def _micro_batch_sizes(self, degrees: Degrees) -> Ints:
        """Return the sizes of a micro-batch that divide a rank's share of the batch."""
        if degrees.dp not in self._known_sizes:
            share = max(1, self.workload.training.global_batch_size // degrees.dp)
            group = self.workload.training.learns_from.group
            sizes = [size for size in divisors(share) if self.fixed.allows(micro_batch_size=size) and not size % group]
            self._known_sizes[degrees.dp] = np.array(sizes, dtype=np.int64)
        return self._known_sizes[degrees.dp]

    def _choices(self, degrees: Degrees) -> Ints:
        """Return ZeRO stage, sequence parallelism, schedule, virtual stages, recompute, offload, cut, shards by row."""
        alone = degrees.dp if degrees.dp == self.workload.cluster.num_gpus else 1
        key = (degrees.dp * degrees.cp > 1, degrees.tp > 1, degrees.pp, alone, degrees.ep > 1)
        if key not in self._known_choices:
            self._known_choices[key] = self._new_choices(*key)
        return self._known_choices[key]

    def _new_choices(self, is_sharded: bool, is_split: bool, pp: int, dp_alone: int, has_experts: bool) -> Ints:
        training, most = self.workload.training, 1 if not is_sharded else 2 if pp > 1 else 4
        # One process gathers from its host what is stored in 16 bits or more.
        is_alone = not (is_sharded or is_split or pp > 1 or is_stored_below_16_bits(training.frozen_weights))
        stages = [
            zero for zero in ((0, 3) if is_alone else range(most)) if not why_not_sharded(training, zero_stage=zero)
        ]
        cuts = [
            (schedule, virtual, recompute, split)
            for schedule, virtual in self._schedules(pp)
            for recompute, name in enumerate(RECOMPUTES)
            if (name in self.workload.recomputes or name == self.fixed.recompute)
            and self.fixed.allows(schedule=SCHEDULES[schedule], recompute=name)
            for split in sorted({0, self._split(pp * virtual, name)})
        ]
        # Where a framework has sequence parallelism, tokens go to experts beside tp under it alone.
        has_parallel = self.workload.framework.tensor_parallel.has_sequence_parallel
        parallel = range(int(is_split and has_experts and has_parallel), 2 if is_split and has_parallel else 1)
        # Hybrid sharding over dp alone, as the runtime executes it: in groups of any size that divides the ranks.
        groups = [0] if has_experts else [0, *divisors(dp_alone)[1:-1]]
        rows = [
            (zero, sequence, schedule, virtual, recompute, offload, split, shards)
            for zero, sequence, (schedule, virtual, recompute, split), offload, shards in product(
                stages, parallel, cuts, self._offloads, groups
            )
            if (zero or not shards)
            and (is_sharded or not zero or OFFLOADS[offload] == "parameters")  # which one process gathers alone
            and self.fixed.allows(zero_stage=zero, sequence_parallel=bool(sequence), offload=OFFLOADS[offload])
        ]
        return np.array(rows, dtype=np.int64).reshape(len(rows), 8)

    def _split(self, num_stages: int, recompute: str) -> int:
        if num_stages > self.workload.model.num_blocks:
            return 0
        return self._splits.number(num_stages, "full" if recompute == "full" else "none")

    def _schedules(self, pp: int) -> list[tuple[int, int]]:
        if pp == 1:
            return [(0, 1)]
        virtual = divisors(max(1, self.workload.model.num_blocks // pp))[1:]
        return [(_GPIPE, 1), (_ONE_FORWARD, 1), (_ZERO_BUBBLE, 1), *((_INTERLEAVED, size) for size in virtual)]

    def _table(self, rows: Sequence[_Rows], *, share: int | None = None) -> PlanTable:
        """Return the plans of some products of axes; `share` are the sequences of a rank."""
        counts = [len(each.micro) for each in rows]
        batch = self.workload.training.global_batch_size
        shares = np.repeat([share or max(1, batch // each.degrees.dp) for each in rows], counts)
        micro = np.concatenate([each.micro for each in rows])
        choices = np.concatenate([each.choices for each in rows]).T.copy()
        zero, parallel, schedule, virtual, recompute, offload, split, shards = choices
        degrees = np.array([[getattr(each.degrees, axis.name) for each in rows] for axis in AXES], dtype=np.int64)
        return PlanTable(
            **dict(zip((axis.name for axis in AXES), np.repeat(degrees, counts, axis=1), strict=True)),
            zero_stage=zero,
            sequence_parallel=parallel,
            micro_batch_size=micro,
            num_microbatches=shares // micro,
            schedule=schedule,
            virtual=virtual,
            recompute=recompute,
            offload=offload,
            split=split,
            order=np.zeros_like(micro),
            shards=shards,
            devices=np.ones_like(micro),
        )

    def _executable(self, degrees: Degrees, choices: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Return which choices can be executed with which sizes of a micro-batch, row beside row; count the others.

        The runtime looks at whether a degree exceeds one and whether the micro-batches fill the pipeline, not at how
        large they are, and shards over dp and cp alike; other frameworks look at these two one by one. One plan of each
        such kind is asked about, and stands for all.
        """
        fills, small = self._fills(degrees, sizes), self._small(degrees)
        divides_tokens = not (self.workload.training.seq_length // degrees.cp) % degrees.tp
        key = (id(choices), small, divides_tokens, fills.tobytes())
        if key not in self._known_cells:
            self._known_cells[key] = self._cells(small, choices, fills, divides_tokens=divides_tokens)
        choice, size, rejected = self._known_cells[key]
        for reason, count in rejected.items():
            self.rejected[reason] += count * self._orders.count(degrees.sizes)
        return choice, size

    def _cells(
        self, small: Degrees, choices: Ints, fills: Ints, *, divides_tokens: bool
    ) -> tuple[Ints, Ints, Counter[str]]:
        """Return the pairs of a choice and a size that can be executed, and how many others there are by the reason."""
        possible = np.ones((len(choices), len(fills)), dtype=bool)
        rejected = Counter[str]()
        parallel = choices[:, 1] == 1
        if not divides_tokens and parallel.any():
            possible[parallel] = False
            reason = "tp does not divide the tokens of a rank, as sequence parallelism needs it"
            rejected[reason] += int(parallel.sum()) * len(fills)
        for fill in np.flatnonzero(np.bincount(fills)):  # np.unique would import masked arrays
            alike = np.flatnonzero(fills == fill)
            for reason, rows in self._reasons_of(small, choices, int(fill)).items():
                cells = np.ix_(rows, alike)
                rejected[reason] += int(possible[cells].sum())
                possible[cells] = False
        choice, size = np.nonzero(possible)
        return choice, size, rejected

    def _small(self, degrees: Degrees) -> Degrees:
        """Return an example of the degrees of which the executor says the same."""
        joined = {"dp": degrees.dp * degrees.cp, "cp": 1, "ep": 1} if self.executor.is_own else {}
        return Degrees(**{axis: min(degree, 2) for axis, degree in (degrees.named | joined).items()})

    def _fills(self, degrees: Degrees, sizes: Ints) -> Ints:
        """Return an example of how many micro-batches each size leaves, for a pipeline of two stages.

        They are fewer than the stages; a multiple of them; of the rounds of a schedule; or neither. Without a pipeline
        there is nothing to fill.
        """
        count = max(1, self.workload.training.global_batch_size // degrees.dp) // sizes
        rounds = np.maximum(count // degrees.pp, 1)
        conditions = [count < degrees.pp, count % degrees.pp == 0, count % rounds == 0]
        return np.select(conditions, [1, 2, 3], default=5) if degrees.pp > 1 else np.full_like(sizes, 5)

    def _reasons_of(self, small: Degrees, choices: Ints, fill: int) -> dict[str, Ints]:
        """Return the rows of choices that cannot be executed with the micro-batches of `_fills`, by the reason."""
        key = (id(choices), small, fill)
        if key not in self._known_reasons:
            columns_of, kind = self._kinds(choices)
            examples = list[ParallelPlan]()
            rows_of: dict[str, list[Ints]] = {}
            for number, columns in enumerate(columns_of):
                asked = (small, fill, columns)
                if asked not in self._asked:
                    if not examples:
                        ones = np.ones(len(columns_of), dtype=np.int64)
                        examples = self._table([_Rows(small, 0, np.array(columns_of), ones)], share=fill).plans()
                    self._asked[asked] = self._reason(examples[number])
                reason = self._asked[asked]
                if reason is not None:
                    rows_of.setdefault(rule_of(reason), []).append(np.flatnonzero(kind == number))
            self._known_reasons[key] = {reason: np.concatenate(rows) for reason, rows in rows_of.items()}
        return self._known_reasons[key]

    def _kinds(self, choices: Ints) -> tuple[list[tuple[int, ...]], Ints]:
        """Return the kinds of choices that the executor may tell apart, an example of each, and the kind of each."""
        if id(choices) not in self._known_kinds:
            virtual, split, shards = 3, 6, 7  # columns of `_choices`
            few = choices.copy()
            few[:, virtual], few[:, split] = np.minimum(few[:, virtual], 2), 0
            few[:, shards] = np.minimum(few[:, shards], 2)
            firsts, kind = first_rows(*few.T)
            self._known_kinds[id(choices)] = [tuple(row) for row in few[firsts].tolist()], kind
        return self._known_kinds[id(choices)]

    def _reason(self, plan: ParallelPlan) -> str | None:
        found = self.executor.reason_of(plan, self.workload.training, self.workload.model.num_blocks)
        if found is not None or self.executor.is_own:
            return found
        framework, schedule = self.workload.framework, plan.pipeline_schedule
        if plan.zero_stage not in framework.data_parallel.zero_stages:
            return f"{framework.title} has no ZeRO-{plan.zero_stage}"
        if plan.ep > 1 and plan.zero_stage not in framework.experts.zero_stages:
            stages = " and ".join(map(str, framework.experts.zero_stages))
            return f"{framework.title} spreads experts beside ZeRO-{stages}"
        if plan.pp > 1 and schedule not in framework.pipeline.schedules:
            return f"{framework.title} has no {schedule} schedule"
        if schedule == "interleaved_1f1b" and plan.num_microbatches % round_size(plan.num_microbatches, plan.pp):
            return "interleaved stages need micro-batches in equal rounds, such as a multiple of pp"
        if plan.offload == "parameters" and plan.zero_stage < 3:
            return "parameter offload requires ZeRO-3"
        return None
