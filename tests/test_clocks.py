"""No test asserts how long something takes, or waits for a while and takes it for an event: busy machines are slower.

Nor does one compare numbers of cores, or lengths of texts with paths in them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"now", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
READS_A_CLOCK = re.compile(rf"\.\s*({'|'.join(CLOCKS)})\s*\(")
AT_MOST = (ast.Lt, ast.LtE)
HINT = "wait for the event with waiting.wait_until, or give a limit that only a fault would reach, as NEVER_S"

SLEEPS = ("time.sleep", "sleep")
WITHOUT_END_S = 60
CORES = {"cpu_count", "process_cpu_count", "sched_getaffinity"}
SLEEPERS = {
    "fuzz/fuzz_ranks.py": "stacks of ranks that hang, as far as they come",
    "launch/recovery_script.py": "the time that a step takes",
    "launch/test_job_token.py": "time has to pass: what is looked at goes on with it or does not",
    "launch/test_hang_watch.py": "the kernel counts how often a process sleeps",
    "launch/test_live_jobs.py": "the time that a step takes",
    "launch/test_preemption.py": "time has to pass: a rank would wait as long for its launcher",
    "launch/test_several_nodes.py": "the time that a step takes",
    "launch/test_step_marks.py": "the time that a step takes",
    "launch/test_stragglers.py": "the time that a step takes",
    "launch/test_uneven_ends.py": "a rank that is late",
    "runtime/test_job_context.py": "a rank that is late: the test holds for every order",
    "runtime/test_streams.py": "as above",
    "test_clocks.py": "examples of it",
    "waiting.py": "what waits for events",
}
"""Where tests sleep, and why: not for an event, which `waiting.wait_until` is for."""


def naps(source: str) -> list[int]:
    """Return the lines on which the code of a test sleeps, or that of a script in its texts.

    A script may look for an event in a loop, and a sleep of a minute in it stands for work without an end.
    """
    if "sleep" not in source:
        return []
    tree = ast.parse(source)
    found = [call.lineno for call in naps_of_code(tree)]
    for text, line in texts_of(tree):
        script = parsed(text) if "sleep(" in text else ast.Module([], [])
        found += [line] * (1 if script is None else sum(not is_without_end(call) for call in naps_of_script(script)))
    return sorted(found)


def naps_of_code(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in SLEEPS]


def naps_of_script(script: ast.AST) -> list[ast.Call]:
    """Return where a script sleeps outside loops with a condition."""
    loops = [node for node in ast.walk(script) if isinstance(node, ast.While)]
    looking = {id(call) for loop in loops for call in naps_of_code(loop)}
    return [call for call in naps_of_code(script) if id(call) not in looking]


def is_without_end(call: ast.Call) -> bool:
    longest = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
    return any(isinstance(value, int) and value >= WITHOUT_END_S for value in longest)


def texts_of(tree: ast.AST) -> list[tuple[str, int]]:
    """Return the texts in code, with a name for each value that is put into them."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = [
        (node.value, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = [str(part.value) if isinstance(part, ast.Constant) else "value" for part in node.values]
            found.append(("".join(words), node.lineno))
    return found


def parsed(text: str) -> ast.AST | None:
    """Return the code of a text, None where it is none."""
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None


def asserts_about_the_machine(source: str) -> list[int]:
    """Return the lines of asserts that compare a number of cores, or the length of a path."""
    if not any(word in source for word in (*CORES, "len(str(")):
        return []
    asserts = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    compared = [node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Compare)]
    calls = [call for node in compared for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [call.lineno for call in calls if is_count_of_cores(call) or is_length_of_path(call)]


def is_count_of_cores(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in CORES


def is_length_of_path(call: ast.Call) -> bool:
    return (
        ast.unparse(call.func) == "len" and ast.unparse(call.args[0]).startswith("str(") and "path" in ast.unparse(call)
    )


def bounds_on_time(source: str) -> list[int]:
    """Return the lines of asserts that some seconds since then are less than some number."""
    if not READS_A_CLOCK.search(source):
        return []
    asserts = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    compared = [node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Compare)]
    return [node.lineno for node in compared if isinstance(node.ops[0], AT_MOST) and is_time_since(node.left)]


def is_time_since(node: ast.expr) -> bool:
    """Whether this is a difference from the time of a clock, perhaps without its sign or in seconds."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "abs":
        return is_time_since(node.args[0])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "total_seconds":
        return is_time_since(node.func.value)
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    return is_difference and any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CLOCKS
        for call in ast.walk(node)
    )


@cache
def sources() -> dict[str, str]:
    files = [path for path in TESTS.rglob("*.py") if "gpu" not in path.relative_to(TESTS).parts]
    return {path.relative_to(TESTS).as_posix(): path.read_text() for path in files}


def test_no_test_says_how_long_something_may_take() -> None:
    found = {name: bounds_on_time(source) for name, source in sources().items()}
    assert {name: lines for name, lines in found.items() if lines} == {}, HINT


def test_no_test_sleeps_in_place_of_waiting_for_an_event() -> None:
    sleepers = {name: lines for name, source in sources().items() if (lines := naps(source))}
    assert sleepers.keys() == SLEEPERS.keys(), {name: sleepers[name] for name in sleepers.keys() - SLEEPERS.keys()}


def test_no_test_compares_what_is_of_the_machine() -> None:
    found = {name: lines for name, source in sources().items() if (lines := asserts_about_the_machine(source))}
    assert found == {}


def test_naps_and_what_is_of_the_machine_are_seen() -> None:
    assert naps("def test():\n    begin()\n    time.sleep(0.5)\n    assert is_ready()") == [3]
    assert naps("SCRIPT = 'time.sleep(0.5)'") == [1]
    assert naps("SCRIPT = f'for _ in range({count}): time.sleep(0.5)'") == [1]
    assert naps("SCRIPT = f'while not exists({path}): time.sleep(0.01)'") == []
    assert naps("SCRIPT = 'import time; time.sleep(600)'") == []
    for claim in ("os.cpu_count() == 2", "len(os.sched_getaffinity(0)) > 1", "len(str(tmp_path)) < 80"):
        assert asserts_about_the_machine(f"assert {claim}") == [1]


@pytest.mark.parametrize("clock", sorted(CLOCKS))
def test_bounds_on_time_are_seen(clock: str) -> None:
    assert bounds_on_time(f"assert time.{clock}() - began < 5") == [1]
    assert bounds_on_time(f"assert abs((time.{clock}() - began).total_seconds()) < 5") == [1]
    assert bounds_on_time(f"assert time.{clock}() < deadline") == []  # the wait for an event that is bound to come
    assert bounds_on_time(f"assert time.{clock}() - began > 1.5") == []  # which a busy machine only helps
