"""Compare the tables of keys in profiles/imports with a tool's own source: what it has that a table lacks.

    python scripts/import_keys.py axolotl CHECKOUT

CHECKOUT is the tool's repository at the release that the table names as its source. Classes of arguments are read by
their syntax, no code of the tool runs. Status 1: the source has keys that the table does not know.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from paraplan.interop.known_keys import key_table

SOURCES = {
    "axolotl": ("src/axolotl/utils/schemas/**/*.py", "src/axolotl/integrations/*/args.py"),
    "llama-factory": ("src/llamafactory/hparams/*.py",),
    "llama-factory-v1": ("src/llamafactory/v1/config/*_args.py",),
    "trl": ("trl/trainer/*_config.py", "trl/scripts/utils.py"),
    "ms-swift": ("swift/arguments/*.py", "swift/arguments/base_args/*.py"),
    "megatron-swift": ("swift/megatron/arguments/*.py",),
    "accelerate": ("src/accelerate/commands/config/config_args.py",),
    "megatron-lm": ("megatron/training/arguments.py",),
    "torchtitan": ("torchtitan/config/configs.py",),
}
"""Files that define the arguments of each tool, by their places in its repository."""
SECTIONS = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}
"""Sections of torchtitan whose keys are listed one by one, by their classes."""
ROOT = "AxolotlInputConfig"
"""The class of axolotl whose ancestors have its keys; those of sections are other classes."""
NESTED = ("CompressionArgs",)
"""Classes of axolotl's plugins with the keys of a section."""
TRAINS_NOTHING = ("app_args.py", "eval_args.py", "webui_args.py")
"""Files of ms-swift with the arguments of commands that train nothing."""
_OPTION = re.compile(r"""['"]--([A-Za-z][\w-]*)['"]""")


def keys_of(tool: str, checkout: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys that a tool's source defines, each with its file."""
    paths = [path for pattern in SOURCES[tool] for path in sorted(checkout.glob(pattern))]
    classes: list[tuple[ast.ClassDef, str]] = []
    for path in paths:
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(checkout))
        if tool == "megatron-lm":
            yield from ((name.replace("-", "_"), place) for name in _OPTION.findall(text))
        elif path.name not in TRAINS_NOTHING:
            classes += [(node, place) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node, _ in classes}
    for node, place in classes:
        is_top = node.name in _ancestors(ROOT, bases) or (node.name.endswith("Args") and node.name not in NESTED)
        if is_top or tool != "axolotl":
            yield from ((key, place) for key in _fields(node, tool))


def _ancestors(name: str, bases: dict[str, set[str]]) -> set[str]:
    return {name}.union(*(_ancestors(base, bases) for base in bases.get(name, ())))


def _fields(node: ast.ClassDef, tool: str) -> Iterator[str]:
    section = SECTIONS.get(node.name)
    if tool == "torchtitan" and section is None:
        return
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            yield f"{section}.{item.target.id}" if section else item.target.id


def main(tool: str, checkout: Path) -> int:
    """Print the keys that the table of a tool does not know, by file."""
    known = {part for key in key_table(tool).known for part in (key, *key.split("."))}
    found = dict(keys_of(tool, checkout))
    missing = {key: place for key, place in found.items() if key not in known}
    for key, place in sorted(missing.items(), key=lambda pair: (pair[1], pair[0])):
        print(f"{place}: {key}")
    print(f"{tool}: {len(found)} keys in {checkout}, {len(missing)} of them are not in profiles/imports/{tool}.json")
    return int(bool(missing) or not found)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SOURCES:
        sys.exit(f"usage: python scripts/import_keys.py {'|'.join(SOURCES)} CHECKOUT")
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
