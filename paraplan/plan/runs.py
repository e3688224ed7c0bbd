"""Measured training runs: one row of a RUNS.csv, as `paraplan validate` reads it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from paraplan.errors import PlanError
from paraplan.records import Record

SHAPES = ("layers", "hidden", "heads")
REQUIRED_COLUMNS = ("id", "gpu", "num_gpus", *SHAPES, "seq_len", "global_batch")


class MeasuredRun(Record):
    """One measured run. A blank cell is None; what a row leaves out is decided by whoever predicts it.

    Shapes are those of the whole model, or blank where `model_name` says what it is; `micro_batch` and `global_batch`
    count sequences; `inter_node_gbps_per_gpu` is in Gb/s, `measured_peak_mem_gib` in GiB, `params_b` in billions.
    """

    id: str
    source: str = ""
    gpu: str
    gpus_per_node: int | None = None
    num_gpus: int
    intra_node_link: str = ""
    inter_node_gbps_per_gpu: float | None = None
    model_name: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    seq_len: int
    activation: str = ""
    tied_embeddings: bool | None = None
    precision: str = ""
    optimizer: str = ""
    framework: str = ""
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    sequence_parallel: bool | None = None
    zero_stage: int | None = None
    recompute: str = ""
    flash_attention: bool | None = None
    torch_compile: bool | None = None
    micro_batch: int | None = None
    global_batch: int
    num_microbatches: int | None = None
    measured_step_time_s: float | None = None
    measured_peak_mem_gib: float | None = None
    memory_metric: str = ""
    fit_status: str = ""
    quality: str = ""
    nonstandard_features: str = ""
    grad_dtype: str = ""
    notes: str = ""


class UnusableRow(Record):
    """A row that describes no run, and why."""

    id: str
    reason: str


def read_runs(text: str, *, source: str) -> list[MeasuredRun | UnusableRow]:
    """Read the text of a RUNS.csv, one entry a row in its order.

    Raises `PlanError` for a table without the columns that every run needs.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in REQUIRED_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise PlanError(
            f"{source} has no column {', '.join(missing)}",
            hint="the first line names the columns: " + ", ".join(MeasuredRun.model_fields),
        )
    return [_row(row, number) for number, row in enumerate(reader, start=2)]


def _row(row: Mapping[str, str | None], number: int) -> MeasuredRun | UnusableRow:
    cells = {name: (row.get(name) or "").strip() for name in MeasuredRun.model_fields}
    identity = cells["id"] or f"line {number}"
    values: dict[str, object] = {"id": identity}
    for name, text in cells.items():
        if not text or name == "id":
            continue
        kind = str(MeasuredRun.model_fields[name].annotation)
        try:
            values[name] = _value(text, kind)
        except ValueError:
            return UnusableRow(id=identity, reason=f"{name}={text!r} is no number")
    blank = [
        name for name in REQUIRED_COLUMNS if name not in values and not (name in SHAPES and "model_name" in values)
    ]
    if blank:
        return UnusableRow(id=identity, reason=f"{', '.join(blank)} not given")
    return MeasuredRun.model_validate(values)


def _value(text: str, kind: str) -> object:
    if "bool" in kind:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(text)
        return text.lower() in ("1", "true")
    if "int" in kind:
        number = float(text)
        if number != int(number):
            raise ValueError(text)
        return int(number)
    return float(text) if "float" in kind else text
