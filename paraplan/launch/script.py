"""What the text of a training script says about how its ranks are best started."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

_READ_AT_IMPORT = ("ATEN_", "GOMP_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH")
"""Starts of the names of environment variables that torch, NumPy and their libraries read while they are imported."""

_IMPORTERS = frozenset({"imp", "importlib", "multiprocessing", "pickle", "pkgutil", "runpy", "subprocess", "zipimport"})
"""Modules of the standard library that import others by name, or start programs that do."""

_HARMLESS = (sys.stdlib_module_names | {"__main__"}) - _IMPORTERS


@dataclass(frozen=True)
class ScriptTraits:
    """`uses_runtime`: it probably imports paraplan. `early_variables`: what it sets for libraries to read at import.

    A script that sets such variables must import torch itself, after it has set them. One that `is_self_contained`
    imports the standard library alone: it is forked from a process without torch, which is smaller.
    """

    uses_runtime: bool = False
    is_self_contained: bool = False
    early_variables: tuple[str, ...] = ()


def read_traits(path: Path) -> ScriptTraits:
    """Return the traits of the script at `path`; none for a file that is not Python, or cannot be read.

    Only this file is read, not the modules that it imports.
    """
    if not path.is_file():  # a pipe, as /dev/stdin, is the rank's to read
        return ScriptTraits()
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ScriptTraits()
    names = {name for node in ast.walk(tree) for name in _variables_set(node)}
    return ScriptTraits(
        uses_runtime=b"paraplan" in source,
        is_self_contained=not any(_imports_more(node) for node in ast.walk(tree)),
        early_variables=tuple(sorted(name for name in names if name.startswith(_READ_AT_IMPORT))),
    )


def _imports_more(node: ast.AST) -> bool:
    """Whether a node imports something beside the standard library, or may do so by a name that is made at run time."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] not in _HARMLESS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return bool(node.level) or (node.module or "").partition(".")[0] not in _HARMLESS
    return isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval")


def _variables_set(node: ast.AST) -> list[str]:
    """Return the variables that a statement sets: `os.environ[...] = ...`, `.setdefault`, `.update`, `putenv`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environment(node.value):
        return _texts([node.slice])
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    if node.func.attr == "putenv" or (node.func.attr == "setdefault" and _is_environment(node.func.value)):
        return _texts(node.args[:1])
    if node.func.attr == "update" and _is_environment(node.func.value):
        keys = [key for argument in node.args if isinstance(argument, ast.Dict) for key in argument.keys if key]
        return _texts(keys) + [keyword.arg for keyword in node.keywords if keyword.arg]
    return []


def _is_environment(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
