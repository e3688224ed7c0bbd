"""torchrun's parser from the source of the torch that is installed, without the seconds that its import takes.

`get_args_parser` of torch/distributed/run.py needs argparse and a few small classes of torch; these definitions are
taken out of their files. Where another torch needs more for it, torch is imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_FUNCTION = "get_args_parser"


def torchs_parser() -> argparse.ArgumentParser:
    """Return torchrun's own parser. Raises ImportError where there is no torch."""
    if "torch.distributed.run" not in sys.modules:
        try:
            parser: argparse.ArgumentParser = _definition("torch.distributed.run", _FUNCTION)()
        except (AttributeError, ImportError, LookupError, NameError, OSError, SyntaxError, TypeError, ValueError):
            pass  # a definition that needs more than this: torch itself knows it
        else:
            return parser
    return importlib.import_module("torch.distributed.run").get_args_parser()  # type: ignore[no-any-return]


def _definition(module: str, name: str) -> Any:
    """Return the class or function `name` of a module of torch, or what a module of the standard library has so."""
    top, _, rest = module.partition(".")
    if top in sys.stdlib_module_names:
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.find_spec(top)
    if top != "torch" or spec is None or spec.origin is None:
        raise LookupError(module)
    path = Path(spec.origin).parent / f"{rest.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = next(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
    used = {node.id for node in ast.walk(wanted) if isinstance(node, ast.Name)}
    namespace: dict[str, Any] = {"__name__": module}
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            local = alias.asname or alias.name.partition(".")[0]
            if local in used and isinstance(node, ast.ImportFrom):
                namespace[local] = _definition(node.module or "", alias.name)
            elif local in used:
                namespace[local] = importlib.import_module(alias.name if alias.asname else local)
    code = compile(ast.Module([wanted], type_ignores=[]), str(path), "exec")
    exec(code, namespace)  # noqa: S102 (torch's own definition, as an import would run it)
    return namespace[name]
