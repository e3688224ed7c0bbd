"""How a model is split over ranks: `ParallelPlan`."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from paraplan.errors import PlanError
from paraplan.records import Spec

Recompute = Literal["none", "selective", "selective_ops", "full"]
Offload = Literal["none", "optimizer", "parameters"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Axis = Literal["pp", "dp", "cp", "tp"]

Degree = Literal["dp", "tp", "pp", "cp", "ep"]


class AxisInfo(NamedTuple):
    """One way to spread a training over ranks: a field of `ParallelPlan` that holds its degree."""

    name: Degree
    """The field, which is also the option of the command line and the word in descriptions."""
    title: str
    """Kind of parallelism, in the field's word: `tensor`."""
    ranks: str
    """Ranks that the degree counts, as help says it."""
    multiplies_ranks: bool = True
    """False where the ranks are those of other axes."""


AXES = (
    AxisInfo("dp", "data", "Data-parallel ranks."),
    AxisInfo("tp", "tensor", "Tensor-parallel ranks."),
    AxisInfo("pp", "pipeline", "Pipeline stages."),
    AxisInfo("cp", "context", "Context-parallel ranks."),
    AxisInfo(
        "ep",
        "expert",
        "Ranks of dp x cp that share out a mixture's experts (expert parallelism), with those of tp where the "
        "framework's own option counts them.",
        multiplies_ranks=False,
    ),
)
"""The axes in the order of descriptions. Degrees in constraints, options and tables are these."""

MEGATRON_RANK_ORDER: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


class ParallelPlan(Spec):
    """How a training is spread over ranks, and the choices that go with it.

    `dp * tp * pp * cp` is the number of ranks, `micro_batch_size * num_microbatches * dp` the global batch.
    """

    dp: int = Field(default=1, gt=0)
    """Data-parallel replicas."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks, which share out each matmul of a block."""
    pp: int = Field(default=1, gt=0)
    """Pipeline ranks."""
    cp: int = Field(default=1, gt=0)
    """Context-parallel ranks, which share out the tokens of a sequence."""
    ep: int = Field(default=1, gt=0)
    """Ranks, neighbors along `cp` and `dp` together, that share out the routed experts of every layer.

    Tokens go to them and back, all-to-all. It is no axis of its own: it divides `dp * cp` and leaves `dp * cp / ep`
    replicas of each expert. Each expert is divided over `tp` as the other layers are (as in Megatron-Core).
    """
    zero_stage: Literal[0, 1, 2, 3] = 0
    """0 is DDP; 1 shards the optimizer state, 2 gradients too, 3 parameters too. Beside a pipeline 0 or 1."""
    zero_shards: int | None = Field(default=None, gt=1)
    """Neighbors along `dp` that ZeRO shards over, with replicas of these groups between them (hybrid sharding).

    None for all ranks of `dp` and `cp`.
    """
    sequence_parallel: bool = False
    """Beside `tp`: norms and dropout are split over its ranks too, along the tokens."""
    micro_batch_size: int = Field(default=1, gt=0)
    """Sequences of one micro-batch."""
    num_microbatches: int = Field(default=1, gt=0)
    """Micro-batches of a replica in one step: gradient accumulation steps, or what fills a pipeline."""
    pipeline_schedule: ScheduleName | None = None
    """The order of forward and backward passes; None without a pipeline."""
    virtual_pipeline_size: int = Field(default=1, gt=0)
    """Stages that each pipeline rank holds (interleaved schedules)."""
    stage_blocks: tuple[int, ...] | None = None
    """Blocks of each pipeline stage; None for an even split. Stages without a block were run by others' frameworks, and
    are not planned for (`stages_reason`)."""
    recompute: Recompute = "none"
    """Activation checkpointing: nothing, the attention of each block (selective), operations that the framework chooses
    (selective_ops), or whole blocks."""
    offload: Offload = "none"
    """State that lives in host memory: the optimizer state, or parameters too."""
    rank_order: tuple[Axis, ...] = MEGATRON_RANK_ORDER
    """The axes from outermost to innermost: consecutive ranks differ in the last one first."""
    devices_per_process: int = Field(default=1, gt=0)
    """GPUs over which the one process of a plan divides its micro-batches, by torch.nn.DataParallel."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sorted(self.rank_order) != sorted(MEGATRON_RANK_ORDER):
            raise ValueError(f"rank_order={self.rank_order} must name each of pp, dp, cp and tp once")
        if self.pp > 1 and self.pipeline_schedule is None:
            raise ValueError(f"pp={self.pp} needs a pipeline_schedule, such as '1f1b'")
        if self.pp == 1 and self.pipeline_schedule is not None:
            raise ValueError(
                f"pipeline_schedule={self.pipeline_schedule!r} with pp=1: a schedule goes with pp > 1 alone"
            )
        if self.virtual_pipeline_size > 1 and self.pp == 1:
            raise ValueError(f"virtual_pipeline_size={self.virtual_pipeline_size} with pp=1: stages need a pipeline")
        num_stages = self.pp * self.virtual_pipeline_size
        if self.stage_blocks is not None and len(self.stage_blocks) != num_stages:
            raise ValueError(f"stage_blocks names {len(self.stage_blocks)} stages, but the plan has {num_stages}")
        if self.stage_blocks is not None and min(self.stage_blocks) < 0:
            raise ValueError(f"stage_blocks={self.stage_blocks}: no stage has fewer than 0 blocks")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=True needs tp > 1")
        if self.zero_stage >= 1 and self.dp * self.cp == 1 and not self.gathers_alone:
            raise ValueError(
                f"zero_stage={self.zero_stage} has nothing to shard over with dp=1; one process takes zero_stage=3 "
                "with offload=parameters"
            )
        if self.zero_shards is not None and (not self.zero_stage or self.dp % self.zero_shards):
            raise ValueError(
                f"zero_shards={self.zero_shards} with zero_stage={self.zero_stage}, dp={self.dp}: "
                "it goes with ZeRO alone, and must divide dp"
            )
        if self.devices_per_process > 1 and self.world_size > 1:
            raise ValueError(
                f"devices_per_process={self.devices_per_process} with {self.world_size} ranks: "
                "DataParallel is one process"
            )
        if self.pp > 1 and self.zero_stage >= 2:
            raise ValueError(f"zero_stage={self.zero_stage} with pp={self.pp}: beside a pipeline only stages 0 and 1")
        return self

    @model_validator(mode="after")
    def _experts_consistent(self) -> Self:
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp={self.dp} x cp={self.cp}, over whose ranks experts go")
        if self.ep > 1 and self.zero_shards is not None:
            raise ValueError(f"ep={self.ep} with zero_shards={self.zero_shards}: experts are sharded over all replicas")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(getattr(self, axis.name) for axis in AXES if axis.multiplies_ranks)

    @property
    def gathers_alone(self) -> bool:
        """Whether one process gathers its parameters block by block from the host, as ZeRO-3 does from other ranks."""
        return self.world_size == 1 and self.zero_stage == 3 and self.offload == "parameters"

    @property
    def degrees(self) -> dict[Degree, int]:
        """The degree of each axis by its name."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones counted."""
        return self.pp * self.virtual_pipeline_size

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.micro_batch_size * self.num_microbatches * self.dp

    def describe(self) -> str:
        """Return the plan in the words of the field: `dp4 x pp2, ZeRO-1, 1f1b, micro-batch 2 x 8, recompute full`."""
        axes = " x ".join(f"{axis}{degree}" for axis, degree in self.degrees.items() if degree > 1)
        parts = [axes or "one process"]
        if self.devices_per_process > 1:
            parts.append(f"DataParallel over {self.devices_per_process} GPUs")
        if self.zero_stage:
            parts.append(f"ZeRO-{self.zero_stage}" + (f" in groups of {self.zero_shards}" if self.zero_shards else ""))
        elif self.dp > 1:
            parts.append("DDP")
        if self.pipeline_schedule:
            virtual = f" v{self.virtual_pipeline_size}" if self.virtual_pipeline_size > 1 else ""
            uneven = " uneven stages" if self.stage_blocks else ""
            parts.append(self.pipeline_schedule + virtual + uneven)
        if self.sequence_parallel:
            parts.append("sequence parallel")
        parts.append(f"micro-batch {self.micro_batch_size} x {self.num_microbatches}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.offload != "none":
            parts.append(f"offload {self.offload}")
        return ", ".join(parts)


def micro_batches(global_batch_size: int, *, dp: int, micro_batch_size: int) -> int:
    """Return the number of micro-batches of one step; raise `PlanError` where the batch does not divide."""
    unit = dp * micro_batch_size
    share, rest = divmod(global_batch_size, unit)
    if rest or not share:
        raise PlanError(
            f"global_batch_size={global_batch_size} is not a multiple of dp={dp} x micro_batch_size={micro_batch_size}",
            hint=f"use a global batch of {max(1, share) * unit} or {(share + 1) * unit}",
        )
    return share
