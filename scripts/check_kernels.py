#!/usr/bin/env python3
"""Compare what the cost model predicts for kernels with what `measure_kernels.py` measured, without a GPU.

    python scripts/check_kernels.py                   all of profiles/measured/kernels-*.json
    python scripts/check_kernels.py kernels.json

Products of fewer than 25 microseconds are left out: there the host's own time shows. Experts are priced for uneven
rows, as routers make them. Of trainings the optimizer's kernels are left out, and the products of eager attention count
among the products. Constants of the cost model were fitted to the bundled files: their errors are in-sample figures.
Status 2: a file holds no such measurements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpu_trainings import bundled_config

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.saved_tensors import Shardings, sharding_columns
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, UsageError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_fields, read_model
from paraplan.model.spec import Attention, AttentionKernel, BlockSpec, Matmul
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision, TrainingSpec

MACHINES = {"NVIDIA H200": "dgx-h200", "NVIDIA H100 80GB HBM3": "dgx-h100"}
"""The bundled machine by the name that torch tells of its GPU."""
MEASURED = Path(__file__).parents[1] / "profiles" / "measured"
LEAST_PRODUCT_S = 25e-6
PRODUCTS, OPTIMIZERS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"), ("_foreach_", "_fused_adam")
KERNELS: dict[str, AttentionKernel] = {"flash": "flash", "cudnn": "sdpa"}
"""The attention of a training that takes a kernel: torch's own choice on these GPUs is cuDNN's."""
FIELDS = {
    "product": ("precision", "m", "n", "k", "pass", "seconds"),
    "attention": ("kernel", "batch", "length", "heads", "key_heads", "width", "causal", "pass", "seconds"),
    "experts": ("experts", "k", "n", "rows", "spread", "pass", "seconds"),
    "training": ("model", "changes", "batch", "length", "compiled", "attention", "operators"),
}
CAST_BYTES, ZEROING_BYTES = 12.0, 4.0
"""What a step moves for each parameter: autocast reads 4 and writes 2, and its backward pass the reverse; zeroing."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One measurement beside its prediction."""

    part: str
    """Products, attention or experts; of trainings their products, attention or rest."""
    group: str
    """What is averaged together; of trainings each is its own group."""
    size: int
    """Rows of a product or of each expert, or tokens of a sequence."""
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.predicted_s / self.measured_s - 1.0

    def __str__(self) -> str:
        return f"{self.measured_s * 1e3:7.1f}{self.predicted_s * 1e3:7.1f}{self.error:+6.0%}"


def read_rows(path: Path) -> tuple[str, list[Row]]:
    """Return the machine of a file and its rows that were measured; raises UsageError for another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        gpu, rows = str(content["gpu"]), [row for row in content["rows"] if "error" not in row]
        for row in rows:
            missing = [name for name in FIELDS.get(row["what"], ()) if name not in row]
            if missing:
                raise ValueError(f"a row of kind {row['what']!r} has no {missing[0]!r}")
        if not any(row["what"] in FIELDS for row in rows):
            raise ValueError(f"no row of a kind that is compared: {', '.join(FIELDS)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        hint = "give a file that scripts/measure_kernels.py wrote"
        raise UsageError(f"{path} holds no measurements of kernels: {reason}", hint=hint) from error
    if gpu not in MACHINES:
        raise UsageError(f"{path} was measured on {gpu!r}; profiles exist for {', '.join(MACHINES)}")
    return MACHINES[gpu], rows


def priced(workload: Workload, *, batch: int, autocast: bool, compiled: bool = False) -> KernelTimes:
    """Return the kernel times of one micro-batch on one GPU."""
    columns = sharding_columns(PlanTable.of_plans([ParallelPlan(micro_batch_size=batch)]))
    training, is_fp32 = workload.kernel_training, autocast and workload.keeps_fp32_weights
    shardings = Shardings.of_columns(columns, training, autocast=autocast, fp32_weights=is_fp32)
    framework = workload.framework.compiled() if compiled else workload.framework
    shardings = replace(shardings, is_compiled=compiled)
    return KernelTimes(training, workload.cluster.gpu, shardings, workload.constants, framework)


@cache
def kernel_times(
    machine: str, *, batch: int, length: int, precision: TrainingPrecision = "bf16", kernel: AttentionKernel = "sdpa"
) -> KernelTimes:
    """Return the times of kernels by themselves, for `batch` sequences of `length` tokens; the model plays no part."""
    training = TrainingSpec(global_batch_size=batch, seq_length=length, precision=precision, attention=kernel)
    workload = Workload.of(read_model("gpt2"), training, cluster_from_profile(machine, gpus_per_node=1))
    return priced(workload, batch=batch, autocast=False)


def compare_products(machine: str, rows: Iterable[Row]) -> Iterator[Comparison]:
    """Compare the products of linear layers, each as the forward pass of a layer of its shape."""
    for row in rows:
        precision, m, n, k = row["precision"], row["m"], row["n"], row["k"]
        if precision not in ("bf16", "fp32") or row["seconds"] < LEAST_PRODUCT_S:
            continue
        tokens, columns, inner = {"output": (m, n, k), "input": (m, k, n), "weight": (k, n, m)}[row["pass"]]
        times = kernel_times(machine, batch=1, length=tokens, precision=precision)
        layer = BlockSpec(kind="linear", matmuls=(Matmul(name="linear", k=inner, n=columns),))
        predicted_s = float(times.matmuls_s(layer, backward=False)[0])
        yield Comparison("product", f"{precision} {row['pass']}", m, row["seconds"], predicted_s)


def compare_attention(machine: str, rows: Iterable[Row]) -> Iterator[Comparison]:
    """Compare the attention kernels that the model knows."""
    for row in (row for row in rows if row["kernel"] in KERNELS):
        times = kernel_times(machine, batch=row["batch"], length=row["length"], kernel=KERNELS[row["kernel"]])
        heads = {"num_heads": row["heads"], "num_kv_heads": row["key_heads"]}
        core = Attention(**heads, qk_head_dim=row["width"], v_head_dim=row["width"], is_causal=row["causal"])
        block, which = BlockSpec(kind="attention", attention=core), str(row["pass"])
        predicted_s = float(times.attention_s(block, backward=which == "backward")[0])
        group = f"{row['kernel']}, width {row['width']}, {which}"
        yield Comparison("attention", group, row["length"], row["seconds"], predicted_s)


def compare_experts(machine: str, rows: Iterable[Row]) -> Iterator[Comparison]:
    """Compare the forward and the backward pass of one linear layer of experts: one and two grouped products."""
    layers: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        layers[tuple(row[name] for name in FIELDS["experts"][:-2])][row["pass"]] = row["seconds"]
    for (experts, k, n, each, spread), measured in layers.items():
        times = kernel_times(machine, batch=1, length=experts * each)
        layer = BlockSpec(kind="experts", matmuls=(Matmul(name="experts", k=k, n=n, num_experts=experts),))
        for backward, passes in enumerate((("output",), ("input", "weight"))):
            if all(name in measured for name in passes):
                group = f"{each:>5,} rows, {'uneven' if spread else 'even'}, {('forward', 'backward')[backward]}"
                predicted_s = float(times.matmuls_s(layer, backward=bool(backward))[0])
                yield Comparison("experts", group, each, sum(measured[name] for name in passes), predicted_s)


def compare_training(machine: str, row: Row) -> Iterator[Comparison]:
    """Compare products, attention and the rest of one step."""
    workload = training_of(machine, row)
    autocast = workload.framework.storage.is_autocast
    blocks, ends = (
        priced(workload, batch=row["batch"], autocast=autocast, compiled=compiled)
        for compiled in (workload.training.compiled, False)
    )
    costs = block_costs(workload, PlanTable.of_plans([ParallelPlan(micro_batch_size=row["batch"])]))
    runs = [(blocks, run.block, run.count) for run in workload.model.runs] + [(ends, workload.model.head, 1)]
    seconds = [(times.parts_s(each, backward=back), count) for times, each, count in runs for back in (False, True)]
    products_s, attention_s = (float(sum(count * one[part][0] for one, count in seconds)) for part in (0, 1))
    whole_s = float((costs.of_all(costs.forward_s + costs.backward_s) + costs.embedding_s + costs.head_s)[0])
    precision = workload.training.precision
    moved = workload.model.num_trained * (ZEROING_BYTES + (CAST_BYTES if precision == "bf16" else 0.0))
    rest_s = whole_s - products_s - attention_s + moved / workload.memory_bandwidth_bytes_per_s
    predicted = {"product": products_s, "attention": attention_s, "rest": rest_s}
    measured = operator_seconds(row["operators"])
    if not measured["attention"]:
        predicted["product"] += predicted.pop("attention")
    group = f"{row['model']}, {precision}{', compiled' if row['compiled'] else ''}, {row['attention']}"
    for kind, predicted_s in predicted.items():
        yield Comparison(f"training: {kind}", group, row["length"], measured[kind], predicted_s)


def training_of(machine: str, row: Row) -> Workload:
    """Return the workload of a measured training: a bundled model with changes, mostly of its depth."""
    model = read_fields(replace(bundled_config(row["model"], row["changes"]), seq_length=row["length"]))
    kept = {name: row[name] for name in ("precision", "attention", "compiled") if name in row}  # bf16 if none is told
    training = TrainingSpec(global_batch_size=row["batch"], seq_length=row["length"], **kept)
    workload = Workload.of(model, training, cluster_from_profile(machine, gpus_per_node=1))
    # A profiler tells how long kernels run, not what passes between them.
    return replace(workload, constants=workload.constants.replace(kernel_start_s=0.0))


def operator_seconds(operators: dict[str, tuple[int, float]]) -> dict[str, float]:
    """Return the seconds of a step's products, attention kernels and other operators, the optimizer's left out."""
    seconds = {"product": 0.0, "attention": 0.0, "rest": 0.0}
    for full_name, (_, spent_s) in operators.items():
        name = full_name.removeprefix("aten::")
        if name in PRODUCTS:
            seconds["product"] += spent_s
        elif "attention" in name:
            seconds["attention"] += spent_s
        elif not name.startswith(OPTIMIZERS):
            seconds["rest"] += spent_s
    return seconds


def compare(path: Path) -> list[Comparison]:
    """Return all measurements of a file beside their predictions; raises UsageError for rows that mean nothing."""
    machine, rows = read_rows(path)
    of_kind = {kind: [row for row in rows if row["what"] == kind] for kind in FIELDS}
    try:
        found = [*compare_products(machine, of_kind["product"]), *compare_attention(machine, of_kind["attention"])]
        found += compare_experts(machine, of_kind["experts"])
        return found + [one for row in of_kind["training"] for one in compare_training(machine, row)]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = str(error).replace("\n", " ")
        raise UsageError(f"{path} has a row with a value that no measurement has: {reason[:200]}") from error


def print_comparisons(path: Path, found: list[Comparison]) -> None:
    """Print a line for each group of kernels and each training."""
    print(f"{path.name}\n{'':<44}{'rows':>5}{'mean error':>12}{'mean absolute error':>20}")
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in found:
        groups[one.part, "all"].append(one.error)
        if not one.part.startswith("training"):
            groups[one.part, one.group].append(one.error)
    for (part, group), errors in groups.items():
        mean, absolute = statistics.mean(errors), statistics.mean(map(abs, errors))
        print(f"{part + ', ' + group:<44}{len(errors):>5}{mean:>+12.1%}{absolute:>21.1%}")
    trainings: dict[str, dict[str, Comparison]] = defaultdict(dict)
    for one in (one for one in found if one.part.startswith("training")):
        trainings[one.group][one.part.removeprefix("training: ")] = one
    print(f"{'training: ms measured, predicted':<35}{'product':>20}{'attention':>20}{'rest':>20}" if trainings else "")
    for group, parts in trainings.items():
        print(f"{group:<35}" + "".join(f"{parts.get(kind, '-')!s:>20}" for kind in ("product", "attention", "rest")))
    print()


def main() -> int:
    """Compare the files and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what measure_kernels.py wrote")
    try:
        for path in parser.parse_args().files or sorted(MEASURED.glob("kernels-*.json")):
            print_comparisons(path, compare(path))
    except ParaplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
