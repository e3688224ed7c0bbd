"""Profiles as JSON: reading an object, and turning it into a record with errors that name file, field and unit."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from paraplan.errors import ProfileError, near_names
from paraplan.records import Record

MAX_FILE_BYTES = 16 * 2**20
PLAUSIBLE = {
    "memory_bytes": (2**28, 2**44),
    "host_memory_bytes": (2**28, 2**50),
    "memory_total_bytes": (2**26, 2**44),
    "memory_bandwidth_bytes_per_s": (1e8, 1e15),
    "nvlink_bandwidth_bytes_per_s": (1e9, 1e14),
    "pcie_bandwidth_bytes_per_s": (1e6, 1e13),
    "nic_bandwidth_bytes_per_s": (1e6, 1e14),
    "bandwidth_bytes_per_s": (1e6, 1e15),
    "rate_bytes_per_s": (1e6, 1e14),
    "bus_bandwidth_bytes_per_s": (1e4, 1e15),
    "payload_bytes_per_s": (1e6, 1e15),
    "peak_flops_per_s": (1e9, 1e18),
    "latency_s": (0.0, 1.0),
}
"""Limits of a field in its unit, far outside which a figure was written in another unit (GB, GB/s, TFLOP/s, us)."""

RecordT = TypeVar("RecordT", bound=Record)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; raise `ProfileError` for a file that cannot be read or holds none."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ProfileError(f"{path} is larger than any profile ({MAX_FILE_BYTES} bytes)")
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, parse_constant=_refuse_constant)
    except OSError as error:
        hint = "paraplan profiles list shows those that come with it"
        raise ProfileError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested by the thousand
        raise ProfileError(f"{path} is not JSON: {error}", hint="fix it there") from None
    if not isinstance(data, dict):
        hint = "paraplan profiles show NAME --json writes one to start from"
        raise ProfileError(f"{path} holds no JSON object, which a profile is", hint=hint)
    return data


@cache
def read_bundled(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that comes with paraplan: read once, and not to be changed."""
    return read_object(path)


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def validated(record_type: type[RecordT], data: Any, *, where: str, prefix: str = "") -> RecordT:
    """Return `data` as a record; raise `ProfileError` with the file, the field, what was found and what is expected."""
    if not isinstance(data, dict):
        raise ProfileError(f"{where}: {prefix.removesuffix('.')}: must be a JSON object, found {_shortened(data)}")
    _check_units(data, where=where, prefix=prefix)
    try:
        return record_type.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = prefix + ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            hint = near_names(str(first["loc"][0]), record_type.model_fields)
            raise ProfileError(f"{where}: {field}: no such field", hint=hint) from None
        if first["type"] == "missing":
            raise ProfileError(f"{where}: {field}: is missing", hint="fill it in") from None
        if first["input"] is None:
            raise ProfileError(f"{where}: {field}: is null", hint="fill it in") from None
        message = first["msg"].removeprefix("Value error, ")
        found = "" if isinstance(first["input"], dict) else f" (found {_shortened(first['input'])})"
        label = f"{field}: " if field.removesuffix(".") else ""
        raise ProfileError(f"{where}: {label}{message}{found}", hint="fix that field") from None


def _check_units(data: Any, *, where: str, prefix: str, field: str = "") -> None:
    """Raise `ProfileError` for the first figure that cannot be in the unit that its field's name states."""
    if isinstance(data, dict):
        for key, value in data.items():
            known = key in PLAUSIBLE
            _check_units(value, where=where, prefix=f"{prefix}{key}.", field=key if known else field)
    elif isinstance(data, list):
        for position, value in enumerate(data):
            _check_units(value, where=where, prefix=f"{prefix}{position}.", field=field)
    elif field in PLAUSIBLE and isinstance(data, int | float) and not isinstance(data, bool):
        low, high = PLAUSIBLE[field]
        if not (math.isfinite(data) and low <= data <= high):
            unit = "FLOP/s" if "flops" in field else "bytes/s" if field.endswith("per_s") else "seconds"
            unit = "bytes" if field.endswith("memory_bytes") or field == "memory_total_bytes" else unit
            raise ProfileError(
                f"{where}: {prefix.removesuffix('.')}: {data} {unit} is outside {low:g} to {high:g}",
                hint=f"give it in {unit}, not in a multiple such as GB, GB/s or TFLOP/s",
            )


def _shortened(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
