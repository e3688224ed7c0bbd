"""What of torch each module of paraplan touches, read from its source: imports, attributes, names in texts, patches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from source_trees import nodes_of

PACKAGE = Path(__file__).parent.parent / "paraplan"
DOORS = (
    *(PACKAGE / "model/trace_torch_private.py", PACKAGE / "runtime/torch_private.py"),
    *(PACKAGE / "runtime/fake/torch_private.py", PACKAGE / "script_check/torch_private.py"),
    *sorted((PACKAGE / "launch/torch_private").glob("*.py")),
)
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in DOORS]
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_STANDARD = {"os", "sys", "threading", "atexit", "runpy", "argparse"}

ALLOWED = {
    ("runtime/fake/gpu.py", "_to_copy"): "the name of an operator in a table: one that is not there is never met",
    ("runtime/recompute/policy.py", "_grouped_mm"): "as above",
    ("runtime/split/context_attention.py", "_local_mapping"): "transformers'",
    ("runtime/split/context_attention.py", "_global_mapping"): "transformers'",
    ("launch/ranks/bootstrap.py", "_world"): "runs as a script without this package, see paraplan.launch.torch_private",
    ("launch/ranks/bootstrap.py", "_dump_fr_trace_json"): "as above",
    ("launch/ranks/bootstrap.py", "_dump_nccl_trace_json"): "as above",
    ("launch/ranks/bootstrap.py", "torch._C._distributed_c10d"): "as above",
    ("launch/ranks/bootstrap.py", "_shared_state"): "accelerate's",
    ("launch/parser.py", "_actions"): "argparse's",
    ("launch/parser.py", "_option_string_actions"): "argparse's",
    ("launch/parser.py", "_add_action"): "argparse's",
    ("launch/parser.py", "_get_option_tuples"): "argparse's",
    ("model/transformers_model.py", "_attn_implementation"): "transformers'",
    ("measure/kernels.py", "torch.backends.cuda.matmul.allow_tf32"): "a public setting",
}
"""What looks private of torch and is not, or has a reason to be where it is."""


@cache
def private_names_of_doors() -> set[str]:
    """Return the private names that the doors use: of modules, attributes, overridden methods, and in texts."""
    found: set[str] = set()
    for node in (node for door in DOORS for node in nodes_of(door)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PRIVATE.fullmatch(node.value):
            found.add(node.value)
        elif isinstance(node, ast.ClassDef):
            found |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return {name for name in found if _PRIVATE.fullmatch(name)} - {"_reducer"}  # an attribute of our own


def private_uses(path: Path) -> Iterator[str]:
    """Return what a module uses of torch past the doors, a line each.

    An attribute of an object is known by its name alone: one that the doors use, or that nothing in paraplan defines.
    Not seen: a private attribute with the name of one that the same file defines itself, names that are put together
    from parts, what torch writes in errors, methods without an underscore that torch documents nowhere, and private
    parts that are reached through another library.
    """
    relative = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
    for line, name, text in _found(path):
        if (relative, name) not in ALLOWED:
            yield f"{path}:{line}: {text}"


def _found(path: Path) -> Iterator[tuple[int, str, str]]:
    nodes, own = nodes_of(path), _defined_in(path)
    from_torch = _imported_from_torch(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if _PRIVATE.fullmatch(node.attr):
                yield from _of_attribute(node, own, from_torch)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and _names_torch(node.value, own):
                yield node.lineno, node.value, f"names {node.value!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for full in _imports_of(node):
                if full.split(".")[0] == "torch" and any(_PRIVATE.fullmatch(part) for part in full.split(".")):
                    yield node.lineno, full, f"imports {full}"
        elif isinstance(node, ast.Call | ast.stmt):
            for chain in filter(None, map(_chain, _replaced_by(node))):
                if chain[0] in from_torch:
                    yield node.lineno, ".".join(chain), f"replaces {'.'.join(chain)}, or a part of it"


def _names_torch(text: str, own: set[str]) -> bool:
    return (text in private_names_of_doors() and text not in own) or text.startswith(("torch._", "torch.distributed._"))


def _of_attribute(node: ast.Attribute, own: set[str], from_torch: set[str]) -> Iterator[tuple[int, str, str]]:
    chain = _chain(node) or [""]
    if chain[0] in from_torch:
        yield node.lineno, ".".join(chain), f"{'.'.join(chain)} is private to torch"
    elif chain[0] not in _STANDARD and _is_foreign(node.attr, own):
        yield node.lineno, node.attr, f"{ast.unparse(node)}: {node.attr} is defined nowhere in paraplan"


def _replaced_by(node: ast.AST) -> list[ast.expr]:
    """Return the attributes that a statement sets or deletes, and what a call of setattr or delattr changes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return node.args[:1]
    return [target for target in _targets(node) if isinstance(target, ast.Attribute)]


def _is_foreign(name: str, own: set[str]) -> bool:
    """Whether an attribute is not this file's: one that no class of paraplan has, or that the doors know of torch."""
    return name not in own and (name not in _defined_in_package() or name in private_names_of_doors())


@cache
def _defined_in_package() -> set[str]:
    return set().union(*(_defined_in(path) for path in MODULES)) | {"_replace", "_asdict"}  # of every named tuple


@cache
def _defined_in(path: Path) -> set[str]:
    """Return the private names that a file gives to functions, classes, fields and attributes of `self`."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in (part for whole in _targets(node) for part in _parts(whole)):
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                    found.add(target.attr)
    return {name for name in found if _PRIVATE.fullmatch(name)}


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _parts(target: ast.expr) -> Iterator[ast.AST]:
    return iter((target,)) if isinstance(target, ast.Name) else ast.walk(target)


def _imported_from_torch(nodes: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            named = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {alias.asname or "torch" for alias in named}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _imports_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _chain(node: ast.AST) -> list[str] | None:
    """Return `["torch", "_C", "name"]` of `torch._C.name`; None for what does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*reversed([*parts, node.id])] if isinstance(node, ast.Name) else None
