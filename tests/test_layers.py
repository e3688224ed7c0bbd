"""The house rules, read from the source: imports point one way, modules stay small, names are described."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from source_trees import nodes_of, tree_of

PACKAGE = Path(__file__).parent.parent / "paraplan"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "errors": 0,
    "python_words": 0,
    "arguments": 0,
    "units": 0,
    "records": 0,
    "progress": 0,
    "resources": 0,
    "shared_memory": 0,
    "hardware": 1,
    "model": 1,
    "plan": 2,
    "cost": 3,
    "accuracy": 4,
    "search": 4,
    "runtime": 4,
    "launch": 4,
    "interop": 4,
    "live": 5,
    "measure": 5,
    "submit": 5,
    "script_check": 5,
    "report": 5,
    "api": 6,
    "cli": 7,
}
MAY_IMPORT = {
    "arguments": {0},
    "errors": {0},
    "resources": {0},
    "records": {0},
    "runtime": {0, 1, 2},
    "launch": {0, 1, 2},
    "interop": {0, 1, 2},
    "search": {0, 1, 2, 3},
    "accuracy": {0, 1, 2, 3},
}
EXTERNAL = {
    "torch": ("runtime/", "launch/", "measure/", "model/trace", "script_check/"),
    "pynvml": ("hardware/probe/nvml.py",),
    "typer": ("cli/",),
    "rich": ("cli/", "launch/"),
}
ONE_WAY_INSIDE = (
    "accuracy",
    "api",
    "cli",
    "cost",
    "hardware",
    "interop",
    "launch",
    "live",
    "measure",
    "model",
    "plan",
    "report",
    "runtime",
    "script_check",
    "search",
    "submit",
)
"""Packages whose folders, and modules beside them, import one way among themselves."""
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node
            if node.module == "paraplan":
                yield from ((f"paraplan.{alias.name}", node) for alias in node.names)


def package_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "paraplan" and len(parts) > 1 and parts[1] in FLOORS else None


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports_upwards(path: Path) -> Iterator[str]:
    own = relative(path).split("/")[0].removesuffix(".py")
    if own not in FLOORS:
        return
    allowed = MAY_IMPORT.get(own, set(range(FLOORS[own])))
    for name, node in imports(path):
        other = package_of(name)
        if other is None or other == own:
            continue
        if FLOORS[other] not in allowed or (own == "report" and other in ("runtime", "launch")):
            yield f"{path}:{node.lineno}: {own} must not import {other}"


CLIENT_OF = {"api", "report", "errors", "progress", "units", "records", "cli"}
"""What the command line knows at run time: the public API, renderings, and text. `launch` hands over its process."""


def imports_below_the_api(path: Path) -> Iterator[str]:
    """Yield what a command imports below the API. Types in annotations are no dependency."""
    if not relative(path).startswith("cli/") or relative(path) in ("cli/start.py", "cli/launch.py", "cli/doctor.py"):
        return
    for_types = {
        inner
        for node in nodes_of(path)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for name, node in imports(path):
        other = package_of(name)
        if node not in for_types and other is not None and other not in CLIENT_OF:
            yield f"{path}:{node.lineno}: a command takes {name} from the API"


def imports_out_of_place(path: Path) -> Iterator[str]:
    for name, node in imports(path):
        places = EXTERNAL.get(name.split(".")[0])
        if places is not None and not relative(path).startswith(places):
            yield f"{path}:{node.lineno}: {name} belongs to {places}"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of names that reach each other along `arrows`."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in arrows.get(waiting.pop(), ()):
                if name not in found:
                    found.add(name)
                    waiting.append(name)
        return found

    from_each = {name: reached(name) for name in arrows}
    inside = sorted(name for name in arrows if name in from_each[name])
    groups = {
        tuple(sorted(other for other in inside if name in from_each[other] and other in from_each[name]))
        for name in inside
    }
    return [list(group) for group in sorted(groups)]


def circles_inside(package: str) -> list[list[str]]:
    """Return the folders of `package`, and the modules beside them, that import each other."""
    root = PACKAGE / package

    def place(path: Path) -> str:
        return path.relative_to(root).parts[0].removesuffix(".py")

    arrows: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        own = arrows.setdefault(place(path), set())
        for name, node in imports(path):
            dotted = name.split(".")
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if dotted[:2] != ["paraplan", package]:
                continue
            if len(dotted) > 2:
                own.add(dotted[2])
            else:
                own |= {one for one in names if (root / one).is_dir() or (root / f"{one}.py").exists()}
        own.discard(place(path))
    return circles(arrows)


def long_or_vague_parts(path: Path) -> Iterator[str]:
    if path.stem in FORBIDDEN_NAMES:
        yield f"{path}: a module is named for what it holds"
    if len(path.read_text().splitlines()) > MAX_MODULE_LINES:
        yield f"{path} has more than {MAX_MODULE_LINES} lines"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            # The signature of a command is its list of options, so only its body counts.
            body = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            length = body if relative(path).startswith("cli/") else lines
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"


def undescribed_names(path: Path) -> Iterator[str]:
    tree = tree_of(path)
    if not ast.get_docstring(tree):
        yield f"{path} has no docstring"
    private = {
        item
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and node.name.startswith("_")
        for item in node.body
    }
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            described = [node, *(item for item in node.body if isinstance(item, ast.FunctionDef))]
        elif isinstance(node, ast.Module):
            described = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        else:
            continue
        for item in described:
            is_overload = any(isinstance(one, ast.Name) and one.id == "overload" for one in item.decorator_list)
            is_public = not item.name.startswith("_") and item not in private and not is_overload
            if is_public and not ast.get_docstring(item):
                yield f"{path}:{item.lineno}: {item.name} has no docstring"


NEEDS_ITS_NEIGHBOUR = re.compile(r"(The same|Those|What|Of|As|Its|It)\b")


def texts_that_need_a_neighbour(path: Path) -> Iterator[str]:
    """Yield docstrings, of fields too, that begin without a subject: a tooltip shows one alone."""
    for node in nodes_of(path):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and NEEDS_ITS_NEIGHBOUR.match(text):
            yield f"{path}:{node.lineno}: a docstring begins with its subject, not with {text[:30]!r}"


def test_docstrings_stand_alone() -> None:
    assert_in_all_modules(texts_that_need_a_neighbour)


def assert_in_all_modules(rule: Callable[[Path], Iterator[str]]) -> None:
    """Assert that a rule finds nothing; show all that it finds."""
    found = [fault for path in MODULES for fault in rule(path)]
    assert not found, "\n".join(found)


def test_imports_point_down_the_floors() -> None:
    assert_in_all_modules(imports_upwards)


def test_every_command_is_a_client_of_the_api() -> None:
    assert_in_all_modules(imports_below_the_api)


def test_heavy_libraries_are_imported_only_where_they_belong() -> None:
    assert_in_all_modules(imports_out_of_place)


def test_folders_inside_a_package_import_one_way() -> None:
    found = [f"{package}: {', '.join(circle)}" for package in ONE_WAY_INSIDE for circle in circles_inside(package)]
    assert not found, "\n".join(found)


def test_a_circle_of_folders_is_found() -> None:
    arrows = {"step": {"data", "checks"}, "checks": {"engine"}, "engine": {"step", "data"}, "data": set()}
    assert circles(arrows) == [["checks", "engine", "step"]]


def test_modules_and_functions_stay_small_and_named_for_what_they_hold() -> None:
    assert_in_all_modules(long_or_vague_parts)


def test_public_names_are_described() -> None:
    assert_in_all_modules(undescribed_names)


def test_one_module_of_the_runtime_puts_forwards_on_modules() -> None:
    places = {
        path.relative_to(PACKAGE).as_posix()
        for path in (PACKAGE / "runtime").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "forward"
    }
    assert places == {"runtime/structure/forwards.py"}


def test_the_floors_name_every_package_and_module() -> None:
    found = {relative(path).split("/")[0].removesuffix(".py") for path in MODULES}
    assert found - {"__init__", "__main__"} == set(FLOORS)


def test_modules_of_tests_have_names_of_their_own() -> None:
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names)), "pytest imports test modules of several folders by their bare names"
