"""What a framework does with packed samples beside attention, where it goes from one sample to the next."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from paraplan.records import Record, Source


class PackingProfile(Record):
    """Loops of the host over the samples of a packed sequence, in a forward and in a backward pass."""

    rotation_starts: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Kernels that start for each sample of a layer where they are not, once the lengths of samples are read."""
    exchange_starts: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Kernels, and reads that the host waits for, with which an exchange of heads (context parallelism without a ring)
    finds its order, for each sample and each rank of it."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""
