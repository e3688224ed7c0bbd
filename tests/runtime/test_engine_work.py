"""What a step of the engine holds and sends beside the same plan written by hand: counts, which no load changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from case_selection import with_all
from rank_harness import RankHarness

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_runtime import Ratio, Result, Work, cases, line_of, work_of
from bench_runtime_sides import Size

SMALL = Size(layers=2, hidden=32, heads=2, tokens=32, micro_batch=2)
OWN_COLLECTIVES = 2  # ranks meet before a step, and count the targets of the whole batch
OWN_BYTES = 1024


def _works() -> dict[str, tuple[Work, Work]]:
    # Replicas, and split layers, which are ours; shards and stages are torch's own.
    chosen = with_all(["ddp", "tensor", "zero 2", "zero 3", "pipeline"]) or ["ddp", "tensor"]
    plain = [case for case in cases(2, SMALL) if case.rival == "plain" and case.name in chosen]
    return {case.name: (work_of(case, "engine"), work_of(case, "plain")) for case in plain}


@pytest.mark.ranks
def test_the_engine_holds_and_sends_what_the_plan_by_hand_does(ranks: RankHarness) -> None:
    found = ranks.run(_works, size=2, timeout_s=280.0)
    assert {*found[0]} >= {"ddp", "tensor"}
    for by_case in found:
        for name, (engine, plain) in by_case.items():
            assert plain.tensor_bytes > 0, name
            assert plain.collectives > 0, name
            assert engine.tensor_bytes <= 1.03 * plain.tensor_bytes, name
            assert engine.collectives <= plain.collectives + OWN_COLLECTIVES, name
            assert engine.collective_bytes <= plain.collective_bytes + OWN_BYTES, name


def test_a_line_of_the_table_has_medians_and_quartiles_of_pairs() -> None:
    ratio = Ratio.of_pairs([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert (ratio.engine, ratio.rival, ratio.median, ratio.low, ratio.high) == (3.0, 1.0, 3.0, 2.0, 4.0)
    line = line_of(Result("zero 3", "plain", 2, wall_s=ratio, cpu_s=ratio, memory_bytes=(103.0, 100.0)))
    assert line.split()[:6] == ["zero", "3", "plain", "2", "3000/1000", "3.000"]
    assert line.endswith("1.030")
