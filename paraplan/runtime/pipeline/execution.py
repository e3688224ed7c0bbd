"""Running the micro-batches of a step through a pipeline of stages, by torch's own schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from paraplan.errors import UsageError
from paraplan.runtime.checks.changed_attributes import ChangedAttributes
from paraplan.runtime.data.batches import MicroBatch
from paraplan.runtime.data_parallel.gradient_sums import GradientSum
from paraplan.runtime.data_parallel.wrapping import reductions_of
from paraplan.runtime.experts.layers import RankExperts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.pipeline.schedules import (
    MULTI,
    ReplicatedStage,
    Schedule,
    build_schedule,
)
from paraplan.runtime.pipeline.stages import StageModule
from paraplan.runtime.precision import half_type
from paraplan.runtime.rank_part import ParallelContext
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.structure.model_structure import BlockChain, HiddenShape
from paraplan.runtime.structure.snapshots import modes
from paraplan.runtime.structure.weights import lasting_buffers
from paraplan.runtime.torch_private import pytree
from paraplan.runtime.world import made_once

_KEPT_SHAPES = 4
_Value = TypeVar("_Value")
_Passed = tuple[HiddenShape, ...]
_Ends = tuple[_Passed, _Passed]  # what a stage receives and sends; nothing at the model's ends


@dataclass
class LocalStage:
    """A stage that this rank holds: number `index` of the whole pipeline.

    `names` maps the names of its parameters in the whole model to those in the stage, and `buffer_names` those of the
    buffers that it uses. `called` is what the schedule calls in the place of `module`: the same, sharded, or DDP around
    it. `averaged` are the parameters whose gradients no wrapper averages over `dp`, and that no other stage holds.
    """

    index: int
    module: StageModule
    blocks: list[nn.Module]
    names: Mapping[str, str]
    buffer_names: Mapping[str, str]
    shardings: Shardings
    experts: RankExperts
    partial: AbstractSet[str]
    called: nn.Module = field(init=False)
    averaged: tuple[nn.Parameter, ...] = ()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the whole model; others once the stage is sharded."""
        held = dict(self.module.model.named_parameters())
        return {name: held[own] for name, own in self.names.items()}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the model's state that this stage uses, by their names in the whole model.

        Others have not the values of one process: the stage may compute them from zeros.
        """
        held = lasting_buffers(self.module.model)
        return {name: held[own] for name, own in self.buffer_names.items() if own in held}


class PipelineExecution:
    """Micro-batches through the stages of a pipeline, one or more of them on each rank.

    Sizes of the hidden states follow from the shapes of a micro-batch, and a schedule is kept for each: buffers of
    another size would end the process inside gloo. `sums` are those of gradients that no wrapper sums, the first of
    which stages start, and `ties` those over ranks whose stages share parameters. Ranks of `cp` pass on the hidden
    states of their tokens.
    """

    def __init__(
        self,
        stages: Sequence[LocalStage],
        *,
        chain: BlockChain,
        bounds: Sequence[tuple[int, int]],
        parallel: ParallelContext,
        sums: Sequence[GradientSum],
        ties: Sequence[GradientSum],
    ) -> None:
        self._stages = stages
        self._chain = chain
        self._bounds = bounds
        self.loss = parallel.loss
        self._parallel = parallel
        self._mesh = parallel.mesh
        self._sums = [*sums, *ties]
        self._tied = frozenset(parameter for tie in ties for parameter in tie.parameters)
        self._attributes = ChangedAttributes(stages[0].module.model)
        self._reductions = reductions_of(*(stage.called for stage in stages))
        self._runs: OrderedDict[Any, tuple[Schedule, list[_Ends]]] = OrderedDict()
        self._hidden: OrderedDict[Any, list[_Passed]] = OrderedDict()

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward and backward passes, and leave the gradients of the weighted loss in place."""
        for reduction in self._reductions:
            reduction.begin()
        self._run(micro_batches, trains=True)
        for reduction in self._reductions:  # before parameters of several stages are summed over these
            reduction.complete()
            reduction.leave_out(self._tied)
        for stage in self._stages:
            _lay_out_gradients(stage.module)
        for one in self._sums:
            one.sum()

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward passes without gradients."""
        with torch.no_grad():
            self._run(micro_batches, trains=False)

    def forget_runs(self) -> None:
        """Let go the runs of batches so far, with the buffers that they receive in; what travels stays known."""
        self._runs.clear()

    def _run(self, micro_batches: Sequence[MicroBatch], *, trains: bool) -> None:
        self.loss.start()
        for stage in self._stages[1:]:  # what a script sets on the model is for all that are made of it
            self._attributes.bring(stage.module.model)
        schedule, ends = self._schedule_for(micro_batches, trains=trains)
        for stage, (received, sent) in zip(self._stages, ends, strict=True):
            stage.module.micro_batches, stage.module.received, stage.module.sent = micro_batches, received, sent
        numbers = torch.arange(len(micro_batches))
        arguments = (numbers,) if self._stages[0].index == 0 else ()
        has_end = self._stages[-1].index == len(self._bounds) - 1
        last: dict[str, Any] = {"target": numbers} if has_end else {}
        run = schedule.step if trains else schedule.eval
        try:
            run(*arguments, number=numbers, return_outputs=False, **last)
        except RuntimeError as error:
            # torch wraps what a stage raises, which is shown as it is.
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
        finally:
            for stage in self._stages:
                stage.module.micro_batches = ()

    def _schedule_for(self, micro_batches: Sequence[MicroBatch], *, trains: bool) -> tuple[Schedule, list[_Ends]]:
        inputs = micro_batches[0].inputs
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in pytree.tree_leaves(inputs)
        )
        key = (trains, len(micro_batches), shapes)
        hidden = _kept(self._hidden, shapes, lambda: self._hidden_shapes(inputs))  # takes a run of the whole model
        return _kept(self._runs, key, lambda: self._build(hidden, num_microbatches=len(micro_batches), trains=trains))

    def _build(self, hidden: list[_Passed], *, num_microbatches: int, trains: bool) -> tuple[Schedule, list[_Ends]]:
        name = self._parallel.plan.pipeline_schedule
        assert name is not None
        stages: list[PipelineStage] = []
        ends: list[_Ends] = []
        for local in self._stages:
            start, end = self._bounds[local.index]
            received = hidden[start] if local.index else ()
            sent = hidden[end] if end < len(hidden) else ()
            stage = (ReplicatedStage if name in MULTI else PipelineStage)(
                local.called,
                local.index,
                len(self._bounds),
                self._mesh.world.device,
                # The first stage is given numbers of micro-batches, the last one gives losses.
                input_args=_examples(received, trains) or (torch.zeros(1, dtype=torch.long),),
                output_args=_examples(sent, trains) or (torch.zeros(1, requires_grad=trains),),
                group=self._mesh.group("pp"),
            )
            if isinstance(stage, ReplicatedStage):
                stage.replicas, stage.averaged = self._sums[0], local.averaged
            stages.append(stage)
            ends.append((received, sent))
        return build_schedule(name, stages, num_microbatches=num_microbatches, trains=trains), ends

    def _hidden_shapes(self, inputs: Any) -> list[_Passed]:
        """Return what each block receives on this rank, as it travels."""
        # Under mixed precision hidden states travel in 16 bits, whatever the model's residual stream is kept in.
        half = half_type(self._parallel.precision)
        try:
            shapes = self._chain.hidden_shapes(inputs)
        except UsageError:  # a single sequence has no statistics: trials of it have batch norms in evaluation
            with modes(self._chain.meta_model, training=False):
                shapes = self._chain.hidden_shapes(inputs)
        cp = self._parallel.plan.cp
        return [
            tuple(
                replace(one, shape=(*one.shape[:-2], one.shape[-2] // cp, one.shape[-1]), dtype=half or one.dtype)
                if cp > 1
                else replace(one, dtype=half or one.dtype)
                for one in passed
            )
            for passed in shapes
        ]


def _kept(values: OrderedDict[Any, _Value], key: Any, make: Callable[[], _Value]) -> _Value:
    """Return the value of `key`, made where it is missing; only those that were used last are kept."""
    if key not in values:
        values[key] = make()
        if len(values) > _KEPT_SHAPES:
            values.popitem(last=False)
    values.move_to_end(key)
    return values[key]


def _lay_out_gradients(module: nn.Module) -> None:
    """Give gradients the strides of their parameters, as autograd's own accumulation does.

    The second half of a backward pass (zero bubble) leaves those of a product, and fused optimizers go by memory alone.
    """
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is not None and not isinstance(gradient, DTensor) and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient).detach()


def _examples(passed: _Passed, trains: bool) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(one.shape, dtype=one.dtype, device="meta", requires_grad=trains) for one in passed)


@dataclass(frozen=True)
class Tie:
    """A parameter of the whole model with the ranks of a pipeline whose stages use it, two or more."""

    name: str
    ranks: tuple[int, ...]


def find_ties(chain: BlockChain, bounds: Sequence[tuple[int, int]], *, num_ranks: int) -> list[Tie]:
    """Return the parameters that more than one rank of a pipeline uses, in order of their names.

    Of the stages with these `bounds`, rank i of `num_ranks` holds i, i + num_ranks and so on.
    """
    users: dict[str, set[int]] = {}
    for stage, (start, end) in enumerate(bounds):
        for name in chain.uses.parameters.of(start, end):
            users.setdefault(name, set()).add(stage % num_ranks)
    return [Tie(name=name, ranks=tuple(sorted(ranks))) for name, ranks in sorted(users.items()) if len(ranks) > 1]


def tied_gradients(ties: Sequence[Tie], parameters: dict[str, nn.Parameter], mesh: Mesh) -> list[GradientSum]:
    """Return what sums the gradients of tied parameters over the ranks that hold them, so that copies stay equal.

    `parameters` are this rank's, by the name of the tie. Every rank makes the groups of every tie, in one order.
    """
    groups = {ranks: _rank_group(ranks, mesh) for ranks in sorted({tie.ranks for tie in ties})}
    return [
        GradientSum(group, parameters=[parameters[tie.name] for tie in ties if tie.ranks == ranks])
        for ranks, group in groups.items()
        if group is not None
    ]


def _rank_group(places: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of the ranks at these places of this rank's own pipeline; None if it is none of them."""
    mine = None
    for pipeline in mesh.grid.groups("pp"):
        ranks = [pipeline[place] for place in places]
        group = made_once(("ties", *ranks), partial(dist.new_group, ranks))
        if mesh.world.rank in ranks:
            mine = group
    return mine
