"""The options of a framework that save memory or time, as far as its configuration does not say so."""

from __future__ import annotations

from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import LossKernel, TrainingSpec
from paraplan.records import Record, Source


class LeverProfile(Record):
    """Losses and formats of frozen weights that a framework has."""

    losses: tuple[LossKernel, ...] = ("plain", "chunked", "liger", "cut")
    """Kernels of the loss, its own ones under the name of what they do."""
    frozen_weights: tuple[WeightFormat, ...] | None = None
    """Formats of frozen weights beside 16 and 32 bits; None: all that anybody has."""
    tiles_mlp: bool = False
    """Whether feed-forward layers may run over tiles of a sequence."""
    engine_settings: frozenset[str] = frozenset()
    """The settings of its software that it has, of those that not every framework has
    (`plan.stack.ENGINE_SETTINGS`)."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""

    def lacking(self, training: TrainingSpec) -> str | None:
        """Return what the framework lacks for a training, None where it has all."""
        if training.loss not in self.losses:
            others = [one for one in self.losses if one != "plain"]
            return f"--loss {training.loss}: it has {' and '.join(others) if others else 'no loss in chunks'}"
        if training.stack.mlp_tile is not None and not self.tiles_mlp:
            return f"--stack mlp_tile={training.stack.mlp_tile}: it runs feed-forward layers over whole sequences"
        for name, value in training.stack.of_engines.items():
            if name not in self.engine_settings:
                has = ", ".join(sorted(self.engine_settings))
                beside = f", of those that only some frameworks have it has {has}" if has else ""
                return f"--stack {name}={str(value).lower()}: it has no such setting{beside}"
        base, known = training.base_weights, self.frozen_weights
        if base in (None, "bf16", "fp32") or known is None or base in known:
            return None
        return f"--base-weights {base}: it stores frozen weights in {', '.join(('16 bits', *known))}"
