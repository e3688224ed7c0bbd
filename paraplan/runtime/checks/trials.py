"""Trials that ranks compare before they train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.plan.parallel import Axis
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.torch_private import is_compiler_loaded, pytree


def check_same_batch(batch: Any, mesh: Mesh) -> None:
    """Raise `UsageError` on every rank where ranks that hold parts of one copy of the model have different batches."""
    if mesh.size("tp") * mesh.size("pp") * mesh.size("cp") == 1:
        return
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_complex()]
    sums = [float((one := leaf.detach().double().flatten()).sum() + one[::7].sum()) for leaf in leaves]
    found = _ranks_apart([math.fsum(sums), float(len(leaves))], mesh, "dp")
    if found is not None:
        raise UsageError(
            f"ranks {found[0]} and {found[1]} hold parts of one copy of the model, and bring different batches",
            hint="take the batches from job.shard, or draw them by a seed that all ranks share",
        )


def check_same_numbers(state: int, mesh: Mesh) -> None:
    """Raise `UnsupportedPlanError` on every rank where ranks of tp or cp have drawn other numbers of Python's own.

    `state` is what the generators of this rank were in before some rank has drawn.
    """
    found = _ranks_apart([float(state)], mesh, "dp", "pp")
    if found is not None:
        raise UnsupportedPlanError(
            f"the model or loss_fn draws random numbers by Python's random or NumPy, and ranks {found[0]} and "
            f"{found[1]}, which hold parts of one copy of the model, draw different ones",
            hint="draw them by torch, or seed both alike on all ranks: random.seed(0), numpy.random.seed(0)",
        )


def _ranks_apart(numbers: Sequence[float], mesh: Mesh, *axes: Axis) -> tuple[int, int] | None:
    """Return two ranks at one place on `axes` that give other numbers, the same on all; None without any."""
    found: dict[tuple[int, ...], tuple[int, list[float]]] = {}
    for rank, row in enumerate(gathered_numbers(numbers, mesh.world)):
        place = mesh.grid.coordinates(rank)
        first, expected = found.setdefault(tuple(place[axis] for axis in axes), (rank, row))
        if row != expected and not any(map(math.isnan, row)):
            return first, rank
    return None


def global_sequences(sizes: Sequence[int], mesh: Mesh) -> int:
    """Return the sequences of the global batch of which the ranks have shares of these sizes."""
    return sum({mesh.grid.coordinates(rank)["dp"]: size for rank, size in enumerate(sizes)}.values())


def not_compiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled blocks run as they are: shapes of a trial are not worth compiling."""
    if not is_compiler_loaded():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def first_rank(mine: bool, mesh: Mesh) -> int | None:
    """Return the first rank that says so, None where none does."""
    return next((rank for rank, row in enumerate(gathered_numbers([float(mine)], mesh.world)) if row[0]), None)


def anywhere(mine: bool, mesh: Mesh) -> bool:
    """Whether any rank says so."""
    return first_rank(mine, mesh) is not None
