"""What a framework does with packed samples beside attention, where it goes from one sample to the next."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from paraplan.records import Record, Source


class PackingProfile(Record):
    """Loops of the host over the samples of a packed sequence, in a forward and in a backward pass."""

    fuses_rotations: bool = True
    """Queries and keys are turned by one kernel, which knows where samples begin."""
    fused_models: tuple[str, ...] = ()
    """Types of models (`ModelSpec.model_type`) that are turned so all the same."""
    rotation_starts: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Kernels that start for each sample of a layer where they are not, once the lengths of samples are read."""
    exchange_starts: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Kernels, and reads that the host waits for, with which an exchange of heads (context parallelism without a ring)
    finds its order, for each sample and each rank of it."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""

    def turns_one_by_one(self, model_type: str) -> bool:
        """Return whether rotations of a type of model go from sample to sample."""
        return not self.fuses_rotations and model_type not in self.fused_models
