"""Changes that a script makes by hand to weights, gradients and the optimizer: seen where ranks would go apart by it.

Parameters that it freezes and unfreezes between steps are followed too.
"""

from __future__ import annotations

import logging
import math
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.checks.trials import anywhere
from paraplan.runtime.data_parallel.script_shards import ScriptShards
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.several import optimizers_in
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.structure.weights import local_shard
from paraplan.runtime.torch_private import step_hooks, version_of

_LOGGER = logging.getLogger(__name__)
_EVERY = 100
"""Steps between comparisons of the weights that ranks hold alike."""
_ALIKE = 1e-4  # factors of ranks that are the same, in fp32


class Hands:
    """Watches one engine between its calls. All ranks call every method together.

    Under `tp` and `pp` a rank holds parts of the model: a norm that code takes over what it sees is another on each
    rank, and so is what it does by that.
    """

    def __init__(
        self, part: RankPart, optimizer: torch.optim.Optimizer, mesh: Mesh, *, has_values: bool = True
    ) -> None:
        self._part = part
        self._optimizers = optimizers_in(optimizer)
        self._mesh = mesh
        self._has_parts = has_values and mesh.plan.tp * mesh.plan.pp * mesh.plan.ep > 1
        self._is_parallel = has_values and mesh.world.size > 1
        self._shards = ScriptShards(part.module, part.parameters)
        self._is_sharded = any(isinstance(one, DTensor) for one in part.parameters.values())
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changes = ExitStack()
        self._is_inside = False
        self._count = self._num_optimized()
        self._versions: dict[str, int] = {}
        self._has_whole_writes = False
        self._gradients: dict[str, tuple[int, int, float]] = {}
        self._told: set[str] = set()
        if self._is_parallel:
            refuse = weakref.WeakMethod(self._refuse_outside)  # no circle holds the groups of a job that has ended
            for one in self._optimizers:
                one.register_step_pre_hook(lambda *_: call() if (call := refuse()) is not None else None)
        self._own_hooks = [set(step_hooks(one)[0]) for one in self._optimizers]
        self.note_weights()

    def _num_optimized(self) -> int:
        return sum(len(group["params"]) for one in self._optimizers for group in one.param_groups)

    def _refuse_outside(self) -> None:
        if not self._is_inside:
            raise UsageError(
                "the optimizer of an engine was stepped by hand: the gradients of other ranks are not in it",
                hint="call engine.step, or engine.backward and engine.update",
            )

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the optimizer step in this context, once it is seen that it has the parameters of `job.prepare`.

        What its own hooks do to gradients before the step is looked at like what a script does.
        """
        if self._is_parallel and self._num_optimized() != self._count:
            raise UsageError(
                f"the optimizer had {self._count} parameters in job.prepare, and has {self._num_optimized()} now: the "
                "ranks do not sum the gradients of new ones",
                hint="give the optimizer all of them in job.prepare, frozen until they are to train",
            )
        handles = []
        for one, own in zip(self._optimizers, self._own_hooks, strict=True):
            if self._is_parallel and set(step_hooks(one)[0]) - own:
                self.note_gradients()
                handles.append(one.register_step_pre_hook(lambda *_: self.check_gradients()))
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
            for handle in handles:
                handle.remove()

    def begin_call(self) -> None:
        """Take over from a script. Raises `UsageError` where it has replaced a shard of ZeRO."""
        self._changes.close()
        self._shards.are_in_hand = False
        self._shards.free_gathered()
        self._shards.check()

    def end_call(self) -> None:
        """Hand over to a script, which computes with shards of ZeRO and plain tensors, which are whole, in one call."""
        self.note_weights()
        self._shards.free_gathered()
        self._shards.are_in_hand = True
        self._changes.close()
        if self._is_sharded:
            self._changes.enter_context(implicit_replication())

    @contextmanager
    def given(self) -> Iterator[None]:
        """Have weights be the script's in this context of a call: its callbacks run in it."""
        self.end_call()
        yield
        self.begin_call()

    def finish(self) -> None:
        """Have plain tensors not meet shards again."""
        self._shards.are_in_hand = False
        self._changes.close()

    def note_weights(self) -> None:
        """Take note of the weights as the engine leaves them."""
        self._has_whole_writes = False
        if self._has_parts:
            self._versions = self._written()

    def has_writes(self) -> bool:
        """Whether a script has written weights of this rank since the engine left them."""
        if not self._has_parts:
            return False
        return self._has_whole_writes or self._written() != self._versions

    def _written(self) -> dict[str, int]:
        """Return how often each weight was written in place."""
        return {name: version_of(weight) for name, weight in self._part.parameters.items()}

    @contextmanager
    def writing_whole(self, name: str) -> Iterator[None]:
        """Take what is written in this context for what all ranks have of the whole parameter, or of its gradient."""
        weight = self._part.parameters[name]
        before = version_of(weight)
        yield
        if self._has_parts:
            self._has_whole_writes |= version_of(weight) != before
            self._versions[name] += version_of(weight) - before
            if weight.grad is not None and name in self._gradients:
                held, version, _ = self._gradients[name]
                if held == id(weight.grad) and version != version_of(weight.grad):
                    self._gradients[name] = (held, version_of(weight.grad), _square(weight.grad))

    def check_weights(self) -> None:
        """Raise `UsageError` where a script has written weights that ranks hold alike otherwise on each.

        Where it has written parts of weights, which may be right, that is said once. Ranks have agreed that one has.
        """
        self._compare("weights that a script has written")
        if not self._has_whole_writes or self._written() != self._versions:
            self._tell_parts("written weights between steps")

    def _tell_parts(self, what: str) -> None:
        """Say once for `what` that a script has done that it saw some of what one process sees."""
        if what not in self._told and self._mesh.world.rank == 0:
            _LOGGER.warning(
                "a script has %s: under tp and pp it sees those of this rank, and parts of them, so that what goes by "
                "a norm, a mean or a shape differs from one process; engine.whole(name, tensor) has them whole, and "
                "engine.set_whole takes them so",
                what,
            )
        self._told.add(what)

    def note_gradients(self) -> None:
        """Take note of the gradients as the engine leaves them."""
        held = [one.grad for one in self._part.parameters.values() if one.grad is not None]
        self._views = [(one, one.detach()) for one in held if type(one) is torch.Tensor and self._is_parallel]
        if self._has_parts:
            self._gradients = {
                name: (id(one.grad), version_of(one.grad), _square(one.grad))
                for name, one in self._part.parameters.items()
                if one.grad is not None
            }

    def check_gradients(self) -> None:
        """Raise `UsageError` where gradients were multiplied since, by another factor on each rank."""
        for gradient, view in self._views:  # of a bucket of DDP, which `gradient.data = values` would take it out of
            if not gradient.is_set_to(view):
                view.copy_(gradient)
                gradient.data = view
        self._views.clear()
        if not self._has_parts:
            return
        held = {name: one.grad for name, one in self._part.parameters.items() if one.grad is not None}
        noted = self._gradients
        changed = {
            name: one for name, one in held.items() if name in noted and noted[name][:2] != (id(one), version_of(one))
        }
        if not anywhere(bool(changed), self._mesh):
            return
        factors = [
            math.sqrt(_square(held[name]) / square) for name, (_, _, square) in noted.items() if name in held and square
        ]
        low, high = min(factors, default=1.0), max(factors, default=1.0)
        is_factor = high - low <= _ALIKE * high
        rows = gathered_numbers([float(is_factor), high], self._mesh.world)
        found = [factor for _, factor in rows]
        other = max(range(len(found)), key=lambda rank: abs(found[rank] - found[0]))
        if all(row[0] for row in rows) and abs(found[other] - found[0]) > _ALIKE * max(found):
            raise UsageError(
                f"gradients were multiplied by {found[0]:.4g} on rank 0 and by {found[other]:.4g} on rank {other} "
                "before the update: a norm over the gradients of a rank is that of its part of the model",
                hint="job.prepare(max_grad_norm=...) clips by the norm of the whole model",
            )
        self._compare("gradients that were changed by hand", held)
        if not all(row[0] for row in rows):
            self._tell_parts("changed gradients before the update")

    def end_step(self, number: int) -> None:
        """Compare, every hundred steps, the weights that ranks hold alike."""
        if self._is_parallel and number % _EVERY == 0:
            self._compare("weights")

    def _compare(self, what: str, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raise `UsageError` where ranks that hold the same of `tensors`, by default the weights, have others."""
        held: Mapping[str, torch.Tensor] = self._part.parameters if tensors is None else tensors
        names = self._part.shardings.names
        whole = {name: one for name, one in held.items() if name not in names}
        place = self._mesh.grid.coordinates
        numbers = [float(_digest(held)), float(_digest(whole)), float(_shard(held))]
        rows = gathered_numbers(numbers, self._mesh.world)
        first: dict[tuple[float, ...], int] = {}
        for rank, row in enumerate(rows):
            at, shard = place(rank), row[2]
            # Replicas of a rank hold all that it holds, ranks of tp and ep what is not split.
            for column, key in (
                (0, (0, at["pp"], at["tp"], self._mesh.expert_place(rank), shard)),
                (1, (1, at["pp"], shard)),
            ):
                other = first.setdefault(key, rank)
                if rows[other][column] != row[column]:
                    raise UsageError(
                        f"ranks {other} and {rank} hold the same part of the model, and other {what}",
                        hint="change them alike on all ranks: by engine.whole, or by what all ranks have agreed on",
                    )


def _square(tensor: torch.Tensor) -> float:
    local = local_shard(tensor)
    return float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2 if local.numel() else 0.0


def _digest(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a number for values: the same for the same to the bit."""
    sums = [
        torch.stack([one.double().sum(), one.double().square().sum()]) for one in map(local_shard, tensors.values())
    ]
    if not sums:
        return 0
    numbers = torch.stack([one.detach().cpu() for one in sums]).nan_to_num(nan=1.5)
    return zlib.crc32(numbers.numpy().tobytes(), zlib.crc32(" ".join(tensors).encode()))


def _shard(tensors: Mapping[str, nn.Parameter | torch.Tensor]) -> int:
    """Return which shard this rank has of those that FSDP divides, 0 without any; of experts there are fewer."""

    def place_of(shard: DTensor) -> int:
        places = zip(shard.device_mesh.get_coordinate() or (), shard.placements, strict=False)
        parts: list[int] = [place * 4096**dim for dim, (place, how) in enumerate(places) if how.is_shard()]
        return 1 + sum(parts)

    return max((place_of(one) for one in tensors.values() if isinstance(one, DTensor)), default=0)


class Freezing:
    """Follows `requires_grad` of `parameters` between steps, without what a plan has built around them.

    DDP, FSDP and pipelines take note at the start of what trains. So a parameter that is frozen later still gets its
    gradient, which is dropped before anything reads it. What was frozen at the start has no gradients to sum: training
    it later is refused where there are other ranks (`is_parallel`).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, is_parallel: bool) -> None:
        self._parameters = parameters
        self._trained = {name: one.requires_grad for name, one in parameters.items()} if is_parallel else {}
        self._frozen: list[nn.Parameter] = []

    @contextmanager
    def as_prepared(self) -> Iterator[None]:
        """Have all that trained at the start train in this context: passes of the model run in it.

        Raises `UnsupportedPlanError` where a parameter trains that did not at the start.
        """
        changed = [name for name, trained in self._trained.items() if self._parameters[name].requires_grad != trained]
        begun = next((name for name in changed if not self._trained[name]), None)
        if begun is not None:
            raise UnsupportedPlanError(
                f"{begun} was frozen in job.prepare and now trains, and the ranks do not sum its gradient",
                hint="let it require a gradient in job.prepare, and freeze it behind that until it is to train",
            )
        self._frozen = frozen = [self._parameters[name] for name in changed]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def drop_gradients(self) -> None:
        """Drop the gradients of what is frozen for now: nothing clips by them, and the optimizer leaves it out."""
        for parameter in self._frozen:
            parameter.grad = None
