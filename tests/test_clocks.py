"""No test asserts how long something takes: on a busy machine, or a slow one, it takes longer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
AT_MOST = (ast.Lt, ast.LtE)
HINT = "wait for the event with launching.PATIENCE_S, or give a limit that only a fault would reach, as NEVER_S"


def bounds_on_time(source: str) -> list[int]:
    """Return the lines of asserts that some seconds since then are less than some number."""
    asserts = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    compared = [node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Compare)]
    return [node.lineno for node in compared if isinstance(node.ops[0], AT_MOST) and is_time_since(node.left)]


def is_time_since(node: ast.expr) -> bool:
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    return is_difference and any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CLOCKS
        for call in ast.walk(node)
    )


def test_no_test_says_how_long_something_may_take() -> None:
    files = [path for path in TESTS.rglob("*.py") if "gpu" not in path.relative_to(TESTS).parts]
    found = {path.relative_to(TESTS).as_posix(): bounds_on_time(path.read_text()) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}, HINT


@pytest.mark.parametrize("clock", sorted(CLOCKS))
def test_bounds_on_time_are_seen(clock: str) -> None:
    assert bounds_on_time(f"assert time.{clock}() - began < 5") == [1]
    assert bounds_on_time(f"assert time.{clock}() < deadline") == []  # the wait for an event that is bound to come
    assert bounds_on_time(f"assert time.{clock}() - began > 1.5") == []  # which a busy machine only helps
