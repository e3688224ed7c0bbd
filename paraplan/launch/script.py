"""Facts in the text of a training script that tell how its ranks are best started."""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# starts of the names of environment variables that torch, NumPy and their libraries read while they are imported
_READ_AT_IMPORT = ("ATEN_", "GOMP_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH")
# modules of the standard library that import others by name, or start programs that do
_IMPORTERS = frozenset({"imp", "importlib", "multiprocessing", "pickle", "pkgutil", "runpy", "subprocess", "zipimport"})
_HARMLESS = (sys.stdlib_module_names | {"__main__"}) - _IMPORTERS


# variables by which tools get into each program that starts: Nsight Systems and Compute, CUPTI's and NVTX's, ld.so
_PROFILERS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_AUDIT")
# libraries that are preloaded for speed: they work in a process that was forked
_ALLOCATORS = re.compile(r"lib(jemalloc|tcmalloc|mimalloc|iomp5|gomp|hugetlbfs)[^/]*")
# modules that an interpreter imports before its script, whatever lies beside that; and this package
_AT_START = frozenset(
    {
        *("__future__", "__main__", "_collections_abc", "_sitebuiltins", "abc", "builtins", "codecs", "encodings"),
        *("genericpath", "io", "os", "paraplan", "posixpath", "site", "sitecustomize", "stat", "sys", "usercustomize"),
    }
)
_SUFFIXES = tuple(importlib.machinery.all_suffixes())

_MAX_FILES, _MAX_BYTES = 200, 1 << 20  # of the modules beside a script that are read


@dataclass(frozen=True)
class ScriptTraits:
    """`uses_runtime`: it probably imports paraplan. `early_variables`: what it sets for libraries to read at import.

    A script that sets such variables, or a module beside it that it imports, must import torch itself, after it has set
    them. One that `is_self_contained` imports the standard library alone: it is forked from a process without torch,
    which is smaller. `folder` is where its imports are looked for first.
    """

    uses_runtime: bool = False
    is_self_contained: bool = False
    early_variables: tuple[str, ...] = ()
    folder: Path | None = None


def script_file(name: str, *, is_module: bool) -> Path:
    """Return the file of a script, or of a module that lies in the current folder."""
    if not is_module:
        return Path(name)
    path = Path.cwd().joinpath(*name.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


def read_traits(path: Path, *, folder: Path | None = None) -> ScriptTraits:
    """Return the traits of the script at `path`; none for a file that is not Python, or cannot be read.

    `folder` is where its imports are looked for first: its own for a script. The modules there that it imports are read
    for the variables that they set, and those that these import; not installed ones.
    """
    folder = folder or path.resolve().parent
    tree = _parsed(path)
    if tree is None:
        return ScriptTraits()
    trees = [tree, *_imported_trees(tree, folder)]
    names = {name for one in trees for node in ast.walk(one) for name in _variables_set(node)}
    return ScriptTraits(
        uses_runtime=b"paraplan" in path.read_bytes(),
        is_self_contained=not any(_imports_more(node) for node in ast.walk(tree)),
        early_variables=tuple(sorted(name for name in names if name.startswith(_READ_AT_IMPORT))),
        folder=folder,
    )


def imported_names(path: Path, *, folder: Path | None = None) -> tuple[str, ...]:
    """Return the modules that the script at `path` imports at its top, without those that lie beside it, in `folder`.

    Of `from a import b`, where b may be a module, `a.b` is one too.
    """
    tree, folder = _parsed(path), folder or path.resolve().parent
    names: list[str] = []
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")]
    beside = {entry.name.partition(".")[0] for entry in folder.iterdir()} if folder.is_dir() else set()
    return tuple(name for name in dict.fromkeys(names) if name.partition(".")[0] not in beside)


def own_interpreters_reason(traits: ScriptTraits, environment: Mapping[str, str]) -> str | None:
    """Return why ranks must not be forked with torch imported, None where they may be."""
    if traits.early_variables:
        return f"the script sets {', '.join(traits.early_variables)}, which libraries read while they are imported"
    tools = [name for name in _PROFILERS if environment.get(name)]
    libraries = re.split(r"[ :]+", environment.get("LD_PRELOAD", "").strip())
    if any(word and not _ALLOCATORS.fullmatch(Path(word).name) for word in libraries):
        tools.append("LD_PRELOAD")
    return f"{', '.join(tools)} is set, by a tool that enters programs as they start" if tools else None


def shadowed_modules(folder: Path | None, modules: Mapping[str, object]) -> list[str]:
    """Return the modules in `folder` that a script there would import, were others of their names not in `modules`."""
    imported = {name.partition(".")[0] for name in modules} - _AT_START - set(sys.builtin_module_names)
    entries: list[Path] = []
    with suppress(OSError):
        entries = [] if folder is None else list(folder.iterdir())
    found = []
    for entry in entries:
        name = entry.name.partition(".")[0]
        is_package = entry.name == name and (entry / "__init__.py").exists()
        if name in imported and (is_package or entry.name.endswith(_SUFFIXES)):
            source = getattr(modules.get(name), "__file__", None)
            here = entry / "__init__.py" if is_package else entry
            if source is None or Path(source).resolve() != here.resolve():
                found.append(entry.name)
    return sorted(found)


def _parsed(path: Path) -> ast.Module | None:
    with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.parse(path.read_bytes()) if path.is_file() else None  # a pipe, as /dev/stdin, is the rank's to read
    return None


def _imported_trees(tree: ast.Module, folder: Path) -> Iterator[ast.Module]:
    """Yield the modules in `folder` that a script imports, and those that these import."""
    seen: set[Path] = set()
    waiting = [(tree, folder)]
    while waiting:
        one, package = waiting.pop()
        for file in _imported_files(one, package, folder):
            is_new = file not in seen and len(seen) < _MAX_FILES and file.is_file()
            parsed = _parsed(file) if is_new and file.stat().st_size < _MAX_BYTES else None
            if parsed is not None:
                seen.add(file)
                yield parsed
                waiting.append((parsed, file.parent))


def _imported_files(tree: ast.Module, package: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that the imports of a module in `package` may mean."""
    names: list[tuple[str, Path]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, folder) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.joinpath(*[".."] * (node.level - 1)) if node.level else folder
            prefix = f"{node.module}." if node.module else ""
            names += [(f"{prefix}{alias.name}", base) for alias in node.names if alias.name != "*" or prefix]
    for name, base in dict.fromkeys(names):
        path = base
        for part in name.removesuffix(".*").split("."):
            path = path / part
            yield path.with_name(f"{part}.py")
            yield path / "__init__.py"
            if not path.is_dir():
                break


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
    return "environ" in (getattr(node, "attr", None), getattr(node, "id", None))  # of an attribute, or a name


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
