"""Bytes that a framework stores for each parameter, and the libraries that store frozen ones in fewer bits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paraplan.model.quantizers import DEFAULT_QUANTIZER
from paraplan.plan.allocators import ExpandableSegments
from paraplan.records import Record, Source


class StorageProfile(Record):
    """Storage of each parameter, in bytes.

    The first three hold under mixed precision; training in fp32 stores 4, 4 and 0.
    """

    weight_bytes: float
    """Weights that forward and backward passes read."""
    gradient_bytes: float
    """Gradients between micro-batches and until the optimizer step."""
    bf16_gradient_bytes: float | None = None
    """Bytes of a gradient where training is in bf16; None: as in fp16."""
    sharded_gradient_bytes: float | None = None
    """Bytes of a gradient where ranks keep shards of them (ZeRO-2 and ZeRO-3); None: as where they do not."""
    master_bytes: float
    """fp32 master weights beside 16-bit weights."""
    is_autocast: bool = False
    """16-bit training runs under autocast over fp32 parameters, which ZeRO gathers in 16 bits, and which keeps a 16-bit
    copy of the weights of matmuls from forward to backward where nothing is sharded."""
    autocasts_shards: bool = True
    """Autocast runs beside the casts of FSDP2 too, where `is_autocast`."""
    frees_gradients: bool = False
    """Gradients are allocated anew in every step; else they stand in persistent buffers."""
    accumulates_separately: bool = False
    """fp32 gradients are accumulated in a buffer beside those that backward passes make."""
    optimizer_step: Literal["foreach", "for_loop", "fused"] = "fused"
    """How the optimizer visits parameters: foreach copies all of them, for_loop one at a time, fused none."""
    quantizer: str = DEFAULT_QUANTIZER
    """The library that stores frozen weights in fewer bits where a training names nothing else
    (`profiles/quantizers.json`)."""
    expandable_segments: ExpandableSegments = "no"
    """Whether torch's allocator grows its segments: what is freed then serves larger requests too."""
    context_bytes: int | None = None
    """The CUDA context where the software has another than `CostConstants` names."""
    sources: tuple[Source, ...] = Field(min_length=1)
    """Where the values come from; the first that names a value counts."""

    @property
    def optimizer_state_bytes(self) -> float:
        """One element of the optimizer's state: torch's optimizers keep it in the type of the parameters."""
        return self.master_bytes or self.weight_bytes
