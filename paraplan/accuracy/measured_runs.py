"""Measured training runs: one row of a RUNS.csv, as `paraplan validate` reads it."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from paraplan.errors import PlanError
from paraplan.plan.parallel import ScheduleName
from paraplan.plan.stack import ContextExchange, Dispatcher, Graphs
from paraplan.plan.training import Fp8Recipe
from paraplan.records import Record

SHAPES = ("layers", "hidden", "heads")
REQUIRED_COLUMNS = ("gpu", "num_gpus", *SHAPES, "seq_len")
"""Without these columns a table is none of runs; in a row the shapes and what others imply may be blank."""

UNKNOWN = ("-", "--", "?", "n/a", "na", "nan", "none", "null", "unknown")
"""Words that stand for a blank in columns of numbers."""

WORDS = {
    "precision": {
        **dict.fromkeys(("bfloat16", "bf16-mixed", "amp_bf16"), "bf16"),
        **dict.fromkeys(("float16", "half", "fp16-mixed", "16-mixed", "amp_fp16"), "fp16"),
        **dict.fromkeys(("float32", "tf32"), "fp32"),
        **dict.fromkeys(("mixed", "amp"), ""),
    },
    "activation": dict.fromkeys(("silu", "swish"), "swiglu") | {"relu2": "squared_relu"},
    "flash_attention": dict.fromkeys(("flash", "fa2", "fa3"), "1") | {"eager": "0"},
    "recompute": {"true": "full", "yes": "full", "1": "full", "false": "none", "no": "none", "0": "none"},
    "dispatcher": {"a2a": "alltoall", "all-to-all": "alltoall"},
    "schedule": {"1f1b-interleaved": "interleaved_1f1b", "zb": "zero_bubble", "zbh1": "zero_bubble"},
    "cp_exchange": {"p2p": "ring", "a2a": "heads", "ulysses": "heads"},
    "cuda_graphs": {"no": "none", "0": "none", "false": "none", "full_iteration": "full"},
    "memory_rank": dict.fromkeys(("max", "every"), "all"),
    "zero_stage": {"fsdp": "3", "full": "3", "ddp": "0", "none": "0"},
}
"""Other spellings of cells, by column."""

ZERO_ALLOWED = ("zero_stage", "dropout", "lora_dropout", "mtp_layers")
MICROBATCHES_PER_STAGE = 4


class MeasuredRun(Record):
    """One measured run. A blank cell is None; what a row leaves out is decided by whoever predicts it.

    Shapes are those of the whole model, or blank where `model_name` says what it is; `micro_batch` and `global_batch`
    count sequences; `inter_node_gbps_per_gpu` is in Gb/s, `measured_peak_mem_gib` in GiB, `params_b` in billions.
    A batch that `read_runs` assumed makes the quality C.
    """

    id: str
    source: str = ""
    gpu: str
    gpus_per_node: int | None = None
    num_gpus: int
    intra_node_link: str = ""
    inter_node_gbps_per_gpu: float | None = None
    power_limit_w: float | None = None
    """Watts to which somebody limited the GPUs. Blank: they have what their profile says."""
    network: str = ""
    """A network of `profiles/networks` by name, where the source says more of it than a rate."""
    model_name: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    seq_len: int
    sample_length: int | None = None
    """Mean tokens of a sample that was padded to the sequence, or packed. Blank: samples filled it."""
    packed: bool | None = None
    """Whether samples of that length were packed into sequences."""
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
    etp: int | None = None
    """Ranks that split one expert: Megatron-Core's --expert-tensor-parallel-size. Blank: the framework's own."""
    vpp: int | None = None
    schedule: ScheduleName | Literal[""] = ""
    """The order of micro-batches in a pipeline. Blank: 1F1B, interleaved where `vpp` is above 1."""
    sequence_parallel: bool | None = None
    zero_stage: int | None = None
    zero_shards: int | None = None
    """Ranks over which ZeRO shards, where not all of dp do (hybrid sharding)."""
    recompute: str = ""
    flash_attention: bool | None = None
    torch_compile: bool | None = None
    micro_batch: int | None = None
    global_batch: int
    num_microbatches: int | None = None
    measured_step_time_s: float | None = None
    measured_tokens_per_s_per_gpu: float | None = None
    measured_peak_mem_gib: float | None = None
    memory_metric: str = ""
    """The reading of memory: max_allocated, max_reserved or nvidia-smi."""
    memory_rank: str = ""
    """Whose memory was read: "last" is the last rank, "all" the largest of all. Blank: of nvidia-smi the largest on the
    first machine, else the largest of all."""
    context_bytes: int | None = None
    """The CUDA context, where nvidia-smi counted it and somebody looked."""
    fit_status: str = ""
    quality: str = ""
    nonstandard_features: str = ""
    grad_dtype: str = ""
    """In what gradients are accumulated: fp32, bf16 or fp16."""
    dropout: float | None = None
    """Dropout rate of the hidden states."""
    deterministic: bool | None = None
    """Matmuls had to repeat bit by bit (CUBLAS_WORKSPACE_CONFIG=:4096:8)."""
    fp8_recipe: Fp8Recipe | Literal[""] = ""
    """How operands in fp8 were scaled: tensorwise, rowwise, rowwise_with_gw_hp, blockwise, delayed."""
    compiled_loss: bool | None = None
    """The loss was compiled (Megatron-LM's --cross-entropy-loss-fusion; torchtitan under compile, from April 2025)."""
    head: str = ""
    """"classifier" for a model without an LM head."""
    method: str = ""
    """How it was fine-tuned: full, lora, qlora, dora, ia3. Blank: all parameters train, as they do in pretraining."""
    lora_rank: int | None = None
    lora_targets: str = ""
    """Layers with adapters: "q v", "all linear", "q k v o + MLP"."""
    lora_dropout: float | None = None
    """Dropout rate of adapters' inputs."""
    base_weight_dtype: str = ""
    """How frozen weights are stored: bf16, nf4, nf4 double quant, int8, fp32."""
    kernels: str = ""
    """Fused kernels: unsloth, FOAK, Liger, chunked or cut cross-entropy."""
    flash_generation: int | None = None
    """Generation of the FlashAttention kernels. Blank: that of the framework."""
    overlaps_gradients: bool | None = None
    """Gradients and updated weights are sent beside compute. Blank: as the framework does."""
    fuses_accumulation: bool | None = None
    """Products of gradients add to those of earlier micro-batches themselves. Blank: as the framework does."""
    overlaps_products: bool | None = None
    """Collectives of tensor parallelism go chunk by chunk beside products. Blank: as the framework does."""
    offload: str = ""
    """The tensors that lie in the host's memory."""
    fp8_attention: bool | None = None
    """Attention multiplied in 8 bits."""
    mtp_layers: int | None = None
    """Layers for multi-token prediction that trained too."""
    release: str = ""
    """The framework's release or container: 26.04."""
    dispatcher: Dispatcher | Literal[""] = ""
    """How tokens reach experts: alltoall, deepep, hybridep."""
    capacity_factor: float | None = None
    """Rows over this times the mean were dropped, and fewer padded to it. Blank: none was."""
    routing: Literal["even", "natural", "trained", ""] = ""
    """Whether an even load of experts was forced, as in most benchmarks, or routers chose. Blank: even, of our own
    runtime natural."""
    cp_exchange: ContextExchange | Literal[""] = ""
    """The exchange of context parallelism: keys and values around a ring, or tokens for heads. Blank: as the
    framework."""
    fuses_rotations: bool | None = None
    """Queries and keys of packed samples were turned at once, not one by one. Blank: as the framework does."""
    overlaps_experts: bool | None = None
    """Exchanges of experts run beside compute of another micro-batch."""
    cuda_graphs: Graphs | Literal[""] = ""
    """The part of a step that CUDA graphs hold: none, layers, full."""
    notes: str = ""
    """For people; nothing is read from them."""


class UnusableRow(Record):
    """A row that describes no run, and why."""

    id: str
    reason: str


def read_runs(text: str, *, source: str) -> list[MeasuredRun | UnusableRow]:
    """Read the text of a RUNS.csv, one entry a row in its order.

    Blank cells that others imply are filled in: `num_gpus` from the degrees, the step time from the tokens per second
    and the other way round, `global_batch` from either. A batch that nothing implies is assumed to be one micro-batch
    for each of dp, or four for each stage of a pipeline.
    Raises `PlanError` for a table without the columns that every run needs, and for text that is no table.
    """
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        missing = [name for name in REQUIRED_COLUMNS if name not in reader.fieldnames]
        if missing:
            raise PlanError(
                f"{source} has no column {', '.join(missing)}",
                hint="the first line names the columns, with commas between them: "
                + ", ".join(MeasuredRun.model_fields),
            )
        return [_row(row, number) for number, row in enumerate(reader, start=2)]
    except csv.Error as error:
        raise PlanError(f"{source} is no table, line {reader.line_num or 1}: {error}", hint="give a CSV file") from None


_FOR_PEOPLE = ("source_locator", "source_url", "derived_fields", "flops_definition")
"""Columns that tables have beside those that are read."""


def unread_columns(text: str) -> dict[str, str]:
    """Return the columns of a table from which nothing is read, each with the one that may be meant, or nothing."""
    names = next(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")), [])
    known, found = [*MeasuredRun.model_fields], dict[str, str]()
    for name in (name.strip().lower() for name in names):
        if name and name not in known and name not in _FOR_PEOPLE:
            found[name] = next(iter(get_close_matches(name, known, 1, 0.8)), "")
    return found


def _row(row: Mapping[str, str | None], number: int) -> MeasuredRun | UnusableRow:
    cells = {name: (row.get(name) or "").strip() for name in MeasuredRun.model_fields}
    identity = cells["id"] or f"line {number}"
    values: dict[str, Any] = {"id": identity}
    for name, text in cells.items():
        kind = str(MeasuredRun.model_fields[name].annotation)
        known = WORDS.get(name, {}).get(text.lower(), text)
        is_word = "str" in kind or f"'{known.lower()}'" in kind
        if not known or name == "id" or (known.lower() in UNKNOWN and not is_word):
            continue
        try:
            value = _value(known.lower() if name in WORDS else known, kind)
        except ValueError:
            return UnusableRow(id=identity, reason=f"{name}={text!r} is no {_noun(kind)}")
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ZERO_ALLOWED:
            if value < 0:
                return UnusableRow(id=identity, reason=f"{name}={text} is negative")
            if value == 0:
                continue
        values[name] = value
    made = _batch_of_parts(values)
    if made is not None and values.get("global_batch", made) != made:
        said = f"dp x micro_batch x num_microbatches = {made}, and global_batch={values['global_batch']}"
        return UnusableRow(id=identity, reason=said)
    values |= _implied(values)
    blank = [
        name for name in REQUIRED_COLUMNS if name not in values and not (name in SHAPES and "model_name" in values)
    ]
    if blank:
        return UnusableRow(id=identity, reason=f"{', '.join(blank)} not given")
    return MeasuredRun.model_validate(values)


def _batch_of_parts(values: Mapping[str, Any]) -> int | None:
    """Return the sequences of a step by its parts, None where a row does not state all of them."""
    parts: list[int | None] = [values.get(name) for name in ("dp", "micro_batch", "num_microbatches")]
    stated = [part for part in parts if part is not None]
    return math.prod(stated) if len(stated) == len(parts) else None


def _implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what cells say about blank ones, see `read_runs`."""
    found: dict[str, Any] = {}
    degrees = math.prod(values.get(axis, 1) for axis in ("tp", "pp", "cp"))
    if "num_gpus" not in values and "dp" in values:
        found["num_gpus"] = values["dp"] * degrees
    num_gpus = values.get("num_gpus", found.get("num_gpus"))
    seq_len, batch = values.get("seq_len"), values.get("global_batch")
    if num_gpus is None or seq_len is None:
        return found
    rate, step_s = values.get("measured_tokens_per_s_per_gpu"), values.get("measured_step_time_s")
    dp = values.get("dp", max(1, num_gpus // degrees))
    micro_batch, stages = values.get("micro_batch", 1), values.get("pp", 1)
    if batch is None and "num_microbatches" in values:
        batch = micro_batch * values["num_microbatches"] * dp
    elif batch is None and rate is not None and step_s is not None:
        batch = max(1, round(rate * num_gpus * step_s / seq_len))
    elif batch is None:
        # What was measured is of another batch than this.
        batch = micro_batch * dp * (MICROBATCHES_PER_STAGE * stages if stages > 1 else 1)
        return found | {"global_batch": batch, "measured_step_time_s": None, "quality": "C"}
    if step_s is None and rate is not None:
        found["measured_step_time_s"] = batch * seq_len / (rate * num_gpus)
    return found | {"global_batch": batch}


def _noun(kind: str) -> str:
    if "Literal" in kind:
        return "known " + ", ".join(re.findall(r"'(\w+)'", kind))
    return "yes or no" if "bool" in kind else "whole number" if "int" in kind else "number"


def _value(text: str, kind: str) -> object:
    if "Literal" in kind:
        if f"'{text.lower()}'" not in kind:
            raise ValueError(text)
        return text.lower()
    if "str" in kind:
        return text
    if "bool" in kind:
        if text.lower() not in ("0", "1", "true", "false", "yes", "no", "0.0", "1.0"):
            raise ValueError(text)
        return text.lower() in ("1", "true", "yes", "1.0")
    number = float(text.lower().removeprefix("zero").lstrip("- ") if "zero" in text.lower() else text.replace(",", ""))
    if not math.isfinite(number) or ("int" in kind and number != int(number)):
        raise ValueError(text)
    return int(number) if "int" in kind else number
