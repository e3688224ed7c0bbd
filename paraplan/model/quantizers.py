"""Which weights of a model a storage format reaches, by the tool that loads them (`profiles/quantizers.json`)."""

from __future__ import annotations

import json
from functools import cache

from pydantic import Field

from paraplan.errors import PlanError, near_names
from paraplan.model.spec import Layer, Parameter
from paraplan.model.weight_formats import WeightFormat, is_stored_below_16_bits
from paraplan.records import Record, Source
from paraplan.resources import profiles_folder

DEFAULT_QUANTIZER = "transformers"


class Quantizer(Record):
    """A tool that stores frozen weights in fewer bits, and the weights that it finds."""

    name: str
    """How `--quantizer` names it."""
    title: str
    """The tool in print, with its version where that matters."""
    formats: dict[WeightFormat, tuple[Layer, ...]]
    """The layers that it stores so, by format; it lacks the formats that are left out."""
    fused_families: tuple[str, ...] = ()
    """Types of models whose experts are no linear layers for it, where those of others are."""
    lacking_families: tuple[str, ...] = ()
    """Types of models that came after it, and that it does not load."""
    requires: str | None = None
    """The release to install, as pip takes it, where the tool is not the one that is usual today."""
    untrainable: tuple[WeightFormat, ...] = ()
    """Formats over which it refuses to train adapters."""
    keeps_copies: bool = False
    """The copy in 16 bits that experts are multiplied by stays for the backward pass."""
    names_layers: bool = False
    """Whether the layers that get adapters are to be named one by one."""
    way: str | None = None
    """The way to have experts stored so, None where it is no way out for users of another tool."""
    sources: tuple[Source, ...] = Field(min_length=1)
    """Where the values come from."""

    def reached(self, weights: WeightFormat, model_type: str) -> frozenset[Layer]:
        """Return the layers of a model that it stores in a format below 16 bits.

        Raises `PlanError` for a format or a type of model that it lacks.
        """
        if model_type in self.lacking_families:
            raise PlanError(f"{self.title} has no models of the type {model_type}", hint="leave out --quantizer")
        if weights not in self.formats:
            raise PlanError(
                f"{self.title} stores no weights in {weights}",
                hint=f"use --base-weights {', '.join(self.formats)}",
            )
        left_out = {"experts"} if model_type in self.fused_families and "linear" in self.formats[weights] else set()
        return frozenset(self.formats[weights]) - left_out

    def stores_experts(self, weights: WeightFormat, model_type: str) -> bool:
        """Return whether it stores the routed experts of such a model in a format, and has such models at all."""
        is_lacking = model_type in self.lacking_families or weights not in self.formats
        return not is_lacking and "experts" in self.reached(weights, model_type)


@cache
def quantizers() -> dict[str, Quantizer]:
    """Return the tools that are known, by name."""
    entries = json.loads((profiles_folder() / "quantizers.json").read_text(encoding="utf-8"))["quantizers"]
    return {entry["name"]: Quantizer.model_validate(entry) for entry in entries}


def quantizer_of(name: str) -> Quantizer:
    """Return a tool by name. Raises `PlanError` for an unknown one, with near names."""
    known = quantizers()
    if name not in known:
        raise PlanError(f"there is no quantizer {name!r}", hint=near_names(name, known.keys(), listed=sorted(known)))
    return known[name]


def reached_weights(weights: WeightFormat, quantizer: str, model_type: str) -> frozenset[Layer] | None:
    """Return the layers that are stored in a format, None for all of a block's: those of 16 bits or more.

    Raises `PlanError` as `Quantizer.reached` does.
    """
    return quantizer_of(quantizer).reached(weights, model_type) if is_stored_below_16_bits(weights) else None


def is_reached(parameter: Parameter, layers: frozenset[Layer]) -> bool:
    """Return whether a parameter is a weight of such layers: a matrix, or experts' matrices; biases never are."""
    return parameter.layer in layers and len(parameter.shape) > (2 if parameter.layer == "experts" else 1)
