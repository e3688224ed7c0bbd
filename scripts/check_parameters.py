#!/usr/bin/env python3
"""Compare paraplan's parameter counts with those of transformers, for every model configuration in a folder.

Each configuration is built by transformers on the meta device (no weights, no code that the config names) and compared
in total and by part: embedding, blocks, head. Where transformers is not installed, the totals of the folder's
`expected.json` are compared alone. Ends with status 1 if a count differs, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

from paraplan.errors import ParaplanError
from paraplan.model.config_file import load_config
from paraplan.model.factory import call_user_code
from paraplan.model.reader import read_model
from paraplan.model.spec import ParameterCount
from paraplan.model.transformers_model import library_factory

EMBEDDING_NAMES = re.compile(r"(?<!un)embed|wte|wpe|shared\.weight|project_in|altup_proj|(^|model\.)per_layer_")
TOWER_NAMES = re.compile(r"(^|\.)(visual|(vision|audio)_\w+|embed_(vision|audio)|multi_modal_projector|connector)\.")


def configurations(folder: Path) -> dict[str, Path]:
    """Return the configurations in `folder` by name: NAME.json and NAME/config.json."""
    found = {path.stem: path for path in folder.glob("*.json") if path.name != "expected.json"}
    return dict(sorted((found | {path.parent.name: path for path in folder.glob("*/config.json")}).items()))


def expected_totals(folder: Path) -> dict[str, int]:
    """Return the totals in `expected.json`, empty where the folder has none."""
    path = folder / "expected.json"
    if not path.is_file():
        return {}
    models = json.loads(path.read_text(encoding="utf-8"))["models"]
    return {name: int(values["parameters"]) for name, values in models.items()}


def count_with_transformers(path: Path) -> ParameterCount:
    """Return the parameters of the class that the config names, or of its family's first, built on the meta device."""
    import torch

    from paraplan.model.trace import find_blocks

    build = library_factory(load_config(path))
    with torch.device("meta"):
        module = call_user_code(str(path), "transformers built it", build)
    blocks = tuple(f"{name}." for name in find_blocks(module))
    counts = {"embedding": 0, "blocks": 0, "head": 0}
    for name, parameter in module.named_parameters():
        is_end = TOWER_NAMES.search(name) or not name.startswith(blocks)
        is_first = TOWER_NAMES.search(name) or EMBEDDING_NAMES.search(name)
        part = "blocks" if not is_end else "embedding" if is_first else "head"
        counts[part] += parameter.numel()
    return ParameterCount(**counts)


def check(name: str, path: Path, *, with_transformers: bool, expected: int | None) -> bool:
    """Print one row of the table and return whether all counts agree."""
    try:
        ours = read_model(str(path)).parameters
        theirs = count_with_transformers(path) if with_transformers else None
    except ParaplanError as error:
        print(f"{name:<24} not compared: {error}")
        return False
    agrees = (theirs is None or ours == theirs) and (expected is None or ours.total == expected)
    print(f"{name:<24}{ours.embedding:>15,}{ours.blocks:>18,}{ours.head:>15,}{ours.total:>18,}  ", end="")
    print("same" if agrees else "DIFFERS")
    if theirs is not None and ours != theirs:
        print(f"{'  transformers':<24}{theirs.embedding:>15,}{theirs.blocks:>18,}{theirs.head:>15,}{theirs.total:>18,}")
    if expected is not None and ours.total != expected:
        print(f"{'  expected.json':<24}{'':>48}{expected:>18,}")
    return agrees


def main(arguments: list[str] | None = None) -> int:
    """Compare every configuration of the folder that the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with NAME.json files or NAME/config.json folders")
    folder: Path = parser.parse_args(arguments).folder
    paths = configurations(folder) if folder.is_dir() else {}
    if not paths:
        print(f"{folder} holds no configurations", file=sys.stderr)
        return 2
    totals = expected_totals(folder)
    with_transformers = importlib.util.find_spec("transformers") is not None
    if not with_transformers and not totals:
        print(f"transformers is not installed and {folder} holds no expected.json: nothing to compare", file=sys.stderr)
        return 2
    print(f"{'model':<24}{'embedding':>15}{'blocks':>18}{'head':>15}{'total':>18}  against", end=" ")
    print(" and ".join(["transformers"] * with_transformers + ["expected.json"] * bool(totals)))
    same = [
        check(name, path, with_transformers=with_transformers, expected=totals.get(name))
        for name, path in paths.items()
    ]
    print(f"{sum(same)} of {len(same)} configurations agree")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
