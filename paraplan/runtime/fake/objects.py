"""Objects that ranks send each other, in a world of one rank that exists: the others have what it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paraplan.errors import UsageError
from paraplan.runtime.fake.torch_private import replaced


@contextmanager
def objects_of_one_rank() -> Iterator[None]:
    """Answer what torch sends by pickling, in this context, as if every rank sent what this one does."""
    names = {
        "all_gather_object": _all_gather,
        "gather_object": _gather,
        "broadcast_object_list": _keep,
        "scatter_object_list": _scatter,
        "send_object_list": _keep,
        "recv_object_list": _receive,
        "monitored_barrier": _keep,
    }
    with replaced(*((owner, name, value) for owner in (dist, distributed_c10d) for name, value in names.items())):
        yield


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_: Any, **__: Any
) -> None:
    scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]


def _keep(*_: Any, **__: Any) -> None:
    """Leave objects as they are."""


def _receive(*_: Any, **__: Any) -> None:
    raise UsageError(
        "this rank waits for objects of another one, which does not exist: a pipeline's stage asks the one before it "
        "for shapes",
        hint="give torch's PipelineStage input_args and output_args, or look at the rank of the first stage",
    )
