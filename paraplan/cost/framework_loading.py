"""How a framework's ranks come to their weights: who reads them, and where they are whole before they are sharded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paraplan.records import Record, Source

LoadWay = Literal["each_rank_gpu", "each_rank_host", "first_rank_host", "shards"]
"""each_rank_gpu: all weights are on every GPU before ranks keep their shares. each_rank_host: every rank of a node
reads all of them into the host's memory. first_rank_host: one rank of a node does, and sends the others their shares.
shards: a rank reads its own."""


class LoadingProfile(Record):
    """How weights are loaded, None where nobody looked."""

    replicated: LoadWay | None = None
    """Where ranks keep all weights: DDP and ZeRO to stage 2."""
    sharded: LoadWay | None = None
    """Where they keep shards: FSDP and ZeRO-3."""
    option: str | None = None
    """The value of the tool's configuration for `sharded`, and for `replicated` where that is the same way; None where
    it is the only way."""
    without: LoadWay | None = None
    """How weights are loaded without that."""
    quantized: LoadWay | None = None
    """Where the weights that do not train are below 16 bits, whatever is sharded."""
    quantized_shards: dict[str, LoadWay] = Field(default_factory=dict)
    """How those are loaded where ranks keep shards, by the tool that stores them (`--quantizer`); as all of them where
    it is left out."""
    quantized_option: str | None = None
    """The release from which on they are loaded so (`quantized_shards`), None where all releases of the tool do."""
    quantized_without: LoadWay | None = None
    """How they are loaded where ranks keep shards by releases before `quantized_option`."""
    dequantized: LoadWay | None = None
    """Where they are released below 16 bits (`released_quantized`) and trained in 16, whatever is sharded."""
    released_quantized: tuple[str, ...] = ()
    """Types of models that are released so."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""
