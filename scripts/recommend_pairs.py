"""What is recommended for twelve pairs of model and machine, beside what published practice uses there.

Pairs and their sources are in `profiles/published_plans.json`. `scripts/pages.py` renews the table in
`paraplan/docs/recommendations.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marked import TextOf, between

from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.reader import read_model
from paraplan.plan.training import TrainingSpec
from paraplan.search.search import search
from paraplan.units import format_bytes, format_count, format_seconds

ROOT = Path(__file__).parent.parent
PAIRS = ROOT / "profiles" / "published_plans.json"
PAGE = ROOT / "paraplan" / "docs" / "recommendations.md"
START, END = "<!-- pairs -->", "<!-- /pairs -->"
HEAD = (
    "| model, machine, batch | recommended | step | tokens/s per GPU | memory | published practice | measured there |\n"
    "| --- | --- | --: | --: | --: | --- | --: |"
)


def row(pair: dict[str, Any], number: int) -> str:
    """Return one row of the table: the search's answer for a pair, and what is published."""
    training = TrainingSpec(global_batch_size=pair["global_batch"], seq_length=pair["seq_len"])
    cluster = cluster_from_profile(pair["machine"], num_nodes=pair["nodes"])
    workload = Workload.of(read_model(pair["model"]), training, cluster, load_link_speeds())
    result = search(workload, num_candidates=3)
    best = result.best
    words = best.plan.describe()
    if result.remark is not None:
        words += f"; {result.remark}"
    machine = f"{pair['nodes']} x {pair['machine']}" if pair["nodes"] > 1 else pair["machine"]
    measured = pair["tokens_per_s_per_gpu"]
    cells = (
        f"{pair['model']}, {machine} ({cluster.num_gpus} GPUs), {pair['global_batch']} x {pair['seq_len']}",
        words,
        format_seconds(best.step.step_time_s),
        format_count(round(best.step.tokens_per_s_per_gpu)),
        format_bytes(best.peak_memory_bytes),
        f"{pair['published']} [{number}]",
        "" if measured is None else format_count(measured),
    )
    return "| " + " | ".join(cells) + " |"


def pages(text_of: TextOf) -> dict[Path, str]:
    """Return the page with the table of today."""
    pairs = json.loads(PAIRS.read_text())
    rows = [row(pair, number) for number, pair in enumerate(pairs, start=1)]
    sources = [f"[{number}] {pair['source']}" for number, pair in enumerate(pairs, start=1)]
    table = "\n".join([HEAD, *rows, "", *(f"{source}  " for source in sources)])
    return {PAGE: between(text_of(PAGE), START, END, f"\n\n{table}\n\n")}
