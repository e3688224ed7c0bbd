"""One model configuration: a JSON object whose fields are read with their types, each error naming file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraplan.errors import ModelError
from paraplan.model.weight_formats import WeightFormat

MAX_LAYERS = 10_000
MAX_COUNT = 10**9  # no width, vocabulary or number of positions is larger
RELEASE_FORMATS: tuple[WeightFormat, ...] = ("fp8", "mxfp4")
"""Formats that models are released in by those who trained them (DeepSeek-V3, gpt-oss); to train they are dequantized.

So do transformers' FineGrainedFP8Config and Mxfp4Config with dequantize=True.
"""
OWN_CODE_HINT = "write a factory that returns the nn.Module and give it as file.py:factory"


@dataclass(frozen=True)
class ModelConfig:
    """The fields of one `config.json`. `source` names the file in messages.

    Readers name a field as its family writes it; further names are older spellings of the same field.
    A field that is absent or null takes `default`; without a default it is required. `seq_length` is the length that
    the model is to be trained at, None where it is not known: sequences longer than a sliding window need masks.
    """

    source: str
    fields: Mapping[str, Any]
    name: str = ""
    seq_length: int | None = None

    @property
    def model_type(self) -> str:
        """The family's name, the field `model_type`."""
        return self.text("model_type")

    @property
    def released_in(self) -> WeightFormat | None:
        """The narrow format that `quantization_config` says the weights were published in, None for 16 bits or more."""
        storage = self.fields.get("quantization_config")
        method = storage.get("quant_method") if isinstance(storage, dict) else None
        return next((name for name in RELEASE_FORMATS if name == method), None)

    @property
    def architecture(self) -> str:
        """The class that the config was written for, "" where it names none."""
        names = self.names("architectures")
        return names[0] if names else ""

    def has(self, name: str) -> bool:
        """Return whether `name` is there and not null."""
        return self.fields.get(name) is not None

    def count(self, *names: str, default: int | None = None, most: int = MAX_COUNT, unit: str = "") -> int:
        """Return a whole number from 1 to `most`. Raises ModelError for anything else."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "a whole number above 0")
        if value > most:
            raise self._wrong(name, value, f"at most {most}{unit}")
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return a number of layers, which a slip in the config must not let grow beyond all memory."""
        return self.count(*names, default=default, most=MAX_LAYERS, unit=" layers")

    def optional_count(self, *names: str) -> int | None:
        """Return a whole number above 0, None where the field is absent or null."""
        return self.count(*names) if any(self.has(name) for name in names) else None

    def size(self, *names: str, default: int | None = None, most: int | None = None) -> int:
        """Return a whole number of at most `most`, 0 allowed. Raises ModelError for anything else."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "a whole number of at least 0")
        if most is not None and value > most:
            raise self._wrong(name, value, f"at most {most}")
        return value

    def fraction(self, *names: str, default: float = 0.0) -> float:
        """Return a number from 0 to 1, such as a dropout rate."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._wrong(name, value, "a number from 0 to 1")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        _, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Return a text."""
        name, value = self._find(names, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, empty where the field is absent or null."""
        _, value = self._find((name,), [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of texts")
        return tuple(value)

    def indices(self, name: str) -> frozenset[int]:
        """Return a list of whole numbers as a set, empty where the field is absent or null."""
        _, value = self._find((name,), [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return frozenset(value)

    def counts(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return a list of as many positive whole numbers as `default` has, which an absent or null field means."""
        _, value = self._find((name,), list(default))
        is_right = isinstance(value, list) and len(value) == len(default)
        if not is_right or not all(isinstance(item, int) and item > 0 for item in value):
            raise self._wrong(name, value, f"a list of {len(default)} positive whole numbers")
        return tuple(value)

    def switches(self, name: str) -> tuple[bool, ...]:
        """Return a list of true and false, or 1 and 0, empty where the field is absent or null."""
        _, value = self._find((name,), [])
        if not isinstance(value, list) or not all(item in (0, 1) for item in value):
            raise self._wrong(name, value, "a list of 0 and 1")
        return tuple(bool(item) for item in value)

    def section(self, name: str) -> ModelConfig:
        """Return the object in field `name` as a config of its own, empty where it is absent or null."""
        _, value = self._find((name,), {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return ModelConfig(f"{self.source}: {name}", value, self.name, self.seq_length)

    def divide(self, name: str, total: int, divisor_name: str, divisor: int) -> int:
        """Return `total` / `divisor` for two fields that must divide, such as heads into the hidden size."""
        if total % divisor:
            raise ModelError(
                f"{self.source}: {divisor_name}={divisor} does not divide {name}={total}",
                hint=f"{name} must be a multiple of {divisor_name}",
            )
        return total // divisor

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.has(name):
                return name, self.fields[name]
        if default is None:
            raise ModelError(
                f"{self.source}: the field {names[0]!r} is missing",
                hint=f"add {names[0]!r}; a config.json as transformers saves it holds every field",
            )
        return names[0], default

    def _wrong(self, name: str, value: Any, expected: str) -> ModelError:
        return ModelError(
            f"{self.source}: {name}={value!r}, expected {expected}", hint=f"correct {name!r} in the config"
        )


_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _number(read: dict[str, Any]) -> Any:
    """Return a number that JSON has no word for, as transformers writes it since 5.0; other objects as they are."""
    tag = read.get("__float__") if len(read) == 1 else None
    return _NUMBERS.get(tag, read) if isinstance(tag, str) else read


def load_config(path: Path, *, seq_length: int | None = None) -> ModelConfig:
    """Return the model configuration in `path`. Code that the config names (`auto_map`) is never executed.

    Raises ModelError for a file that is missing, is no JSON object, or describes a checkpoint that was quantized after
    its training.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", hint="give a config.json or its folder") from error
    except (ValueError, RecursionError) as error:  # brackets nested by the thousand, numbers of thousands of digits
        hint = "give a config.json as transformers saves it"
        if path.suffix == ".py":
            hint = f"write {path}:FACTORY with the name of a function that returns the model"
        raise ModelError(f"{path} is no JSON: {error}", hint=hint) from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} holds no JSON object", hint="give a config.json as transformers saves it")
    name = path.parent.name if path.name == "config.json" else path.stem
    config = ModelConfig(str(path), fields, name, seq_length)
    if config.has("quantization_config") and config.released_in is None:
        raise ModelError(
            f"{path}: quantization_config describes a quantized checkpoint, which cannot be trained as it is",
            hint="use the model that it was made from; for QLoRA add --train qlora",
        )
    return config
