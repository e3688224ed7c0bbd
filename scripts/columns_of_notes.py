"""Fill in columns of a table of runs from what its notes say in words, for tables that were collected without them.

    python scripts/columns_of_notes.py RUNS.csv > WITH_COLUMNS.csv

`paraplan validate` reads columns alone. Cells that are filled in already stay.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from pathlib import Path

COLUMNS = (
    "dropout",
    "deterministic",
    "compiled_loss",
    "head",
    "context_bytes",
    "grad_dtype",
    "memory_rank",
    "network",
    "cpu",
    "release",
    "overlaps_gradients",
    "overlaps_products",
)
UNITS = {"MB": 10**6, "MiB": 2**20}


def found_in_words(notes: str, metric: str, framework: str = "") -> dict[str, object]:
    """Return the values of columns that notes and the description of a memory reading hold.

    NeMo's recipes for benchmarks switch the overlap of tensor parallelism on (nemo/collections/llm/recipes,
    `MegatronCommOverlapCallback`).
    """
    found: dict[str, object] = {}
    if dropout := re.search(r"dropout attention [\d.]+ hidden ([\d.]+\d)", notes):
        found["dropout"] = dropout[1]
    if "deterministic" in notes:
        found["deterministic"] = 1
    if "cross-entropy-loss-fusion" in notes:
        found["compiled_loss"] = 1
    if "no lm head" in notes.lower():
        found["head"] = "classifier"
    if "fp32 grads" in notes.lower():
        found["grad_dtype"] = "fp32"
    if context := re.search(r"includes (?:the )?(\d+) (MB|MiB) CUDA context", metric):
        found["context_bytes"] = int(context[1]) * UNITS[context[2]]
    if "playbook sweep" in notes:
        found |= {"network": "aws-efa-3200-playbook", "cpu": "AMD EPYC 7R13"}
    if release := re.match(r"([\d.]+\d)(?:-\w+)? NeMo Container", notes):
        found["release"] = release[1]
    if "last rank" in metric.lower():
        found["memory_rank"] = "last"
    elif re.search(r"\b(max|all|every)\b", metric):
        found["memory_rank"] = "all"
    is_recipe = "recipe defaults" in notes and framework.startswith("NeMo")
    if is_recipe or re.search(r"tp[- ]comm[- ]overlap|async TP", notes, re.IGNORECASE):
        found["overlaps_products"] = 1
    return found | overlap_in_words(notes)


def overlap_in_words(notes: str) -> dict[str, object]:
    """Return whether gradients are sent beside compute, where notes tell.

    Megatron-Core does so where a flag says it.
    """
    if re.search(r"non-overlapped [\w/]*DP communication", notes):
        return {"overlaps_gradients": 0}
    flags = re.search(r"\bflags: (.*)", notes)
    return {"overlaps_gradients": int("overlap-grad-reduce" in flags[1])} if flags else {}


def framework_in_words(framework: str, notes: str) -> str:
    """Return the framework with its release where notes say it: papers on sequence parallelism measure that code."""
    return "Megatron-LM v3.0" if framework == "Megatron-LM" and "sequence parallel" in notes.lower() else framework


def with_columns(text: str) -> str:
    """Return the text of a CSV table with the columns filled in."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = list(reader.fieldnames or ())
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, [*names, *(name for name in COLUMNS if name not in names)], lineterminator="\n")
    writer.writeheader()
    for row in reader:
        notes, metric = row.get("notes") or "", row.get("memory_metric") or ""
        found = found_in_words(notes, metric, row.get("framework") or "")
        row |= {name: value for name, value in found.items() if not row.get(name)}
        if "framework" in row:
            row["framework"] = framework_in_words(row["framework"] or "", notes)
        writer.writerow(row)
    return written.getvalue()


def main() -> None:
    """Print the table with its columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="RUNS.csv")
    print(with_columns(parser.parse_args().file.read_text()), end="")


if __name__ == "__main__":
    main()
