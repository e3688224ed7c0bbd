#!/usr/bin/env python3
"""Compare what paraplan reads of model configurations with transformers' own classes, for every file of a folder.

    python scripts/check_models.py FOLDER [--only parameters|saved] [--alike]

Each configuration is built by transformers on the meta device (no weights, no code that it names). Parameters must be
equal by part: embedding, blocks, head; forward FLOPs equal, and the bytes kept for the backward pass within 2 %, under
each attention kernel that the class has. Where the folder has an `expected.json`, totals are compared with it too, and
alone where transformers is not installed. Ends with status 1 if one differs, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paraplan.errors import ParaplanError
from paraplan.model.config_file import load_config
from paraplan.model.factory import call_user_code
from paraplan.model.reader import read_config, read_model
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import BlockSpec, Matmul, ModelSpec, ParameterCount
from paraplan.model.transformers_model import library_factory

Kernel = Literal["sdpa", "eager"]
EMBEDDING_NAMES = re.compile(r"(?<!un)embed|wte|wpe|shared\.weight|project_in|altup_proj|(^|model\.)per_layer_")
TOWER_NAMES = re.compile(r"(^|\.)(visual|(vision|audio)_\w+|embed_(vision|audio)|multi_modal_projector|connector)\.")
TOLERANCE = 0.02
KERNELS: tuple[Kernel, ...] = ("sdpa", "eager")
BATCH, LENGTH = 2, 256


def configurations(folder: Path) -> dict[str, Path]:
    """Return the configurations in `folder` by name: NAME.json and NAME/config.json."""
    files = {path.stem: path for path in folder.glob("*.json") if path.name != "expected.json"}
    return dict(sorted((files | {path.parent.name: path for path in folder.glob("*/config.json")}).items()))


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


def same_parameters(name: str, path: Path, *, with_transformers: bool, expected: int | None) -> bool:
    """Print the parameters by part, and return whether all counts agree."""
    try:
        ours = read_model(str(path)).parameters
        theirs = count_with_transformers(path) if with_transformers else None
    except ParaplanError as error:
        print(f"{name:<24} not compared: {error}")
        return False
    agrees = (theirs is None or ours == theirs) and (expected is None or ours.total == expected)
    rows = {name: ours} if agrees or theirs is None else {name: ours, "  transformers": theirs}
    for title, each in rows.items():
        print(f"{title:<24}{each.embedding:>15,}{each.blocks:>18,}{each.head:>15,}{each.total:>18,}")
    if not agrees:
        print(f"{name} DIFFERS{'' if expected is None else f', expected.json has {expected:,}'}")
    return agrees


def as_traced(block: BlockSpec, model_type: str) -> BlockSpec:
    """Return a block as transformers' own code runs it.

    Attention computes every score and masks those outside a window; experts that a kernel would group are dense. Linear
    attention is the code under every attention kernel: a trace counts its convolution, over padded tokens too, and no
    systems of equations.
    """
    attention = block.attention and block.attention.replace(window=None)
    matmuls = [one.replace(rows_per_token=one.dense_rows_per_token or one.rows_per_token) for one in block.matmuls]
    saved = list(block.saved)
    if any(one.name.startswith("delta rule") for one in matmuls):
        # Kimi's code sums scores feature by feature.
        is_kimi = any("forget_gate" in one.name for one in block.parameters)
        uncounted = "delta rule scores" if is_kimi else "delta rule system"
        shape = next(one.shape for one in block.parameters if one.name.endswith("conv1d.weight"))
        rows = shape[0] * (LENGTH + shape[-1] - 1) / LENGTH
        convolution = Matmul(name="convolution", k=shape[-1], n=1, rows_per_token=rows)
        matmuls = [*(one for one in matmuls if not one.name.startswith(uncounted)), convolution]
        saved = [one.replace(kernels=None) for one in saved if one.kernels is None or "eager" in one.kernels]
    if model_type == "deepseek_v4":  # all weights are cast in a trace, and its sinks are not
        saved = [one for one in saved if one.role != "probabilities_copy"]
        saved = [one.replace(element_type="activation") if one.role == "probabilities" else one for one in saved]
    return block.replace(attention=attention, matmuls=tuple(matmuls), saved=tuple(saved))


def build(path: Path, kernel: Kernel) -> Any:
    """Return the module of the class that the config names, with inputs where a trace of tokens would not run it."""
    import torch

    content = load_config(path)
    # Said in the configuration, so that a class without this kernel refuses it and takes no other.
    module = library_factory(replace(content, fields={**content.fields, "attn_implementation": kernel}))()
    config = module.config

    def inputs(micro_batch_size: int, seq_length: int) -> dict[str, Any]:
        ids = torch.zeros(micro_batch_size, seq_length, dtype=torch.long)
        if config.model_type != "vit":
            return {"input_ids": ids} | ({} if "Encoder" in type(module).__name__ else {"decoder_input_ids": ids})
        height, width = config.image_size if isinstance(config.image_size, list) else [config.image_size] * 2
        shape = (micro_batch_size, config.num_channels, height, width)
        return {"pixel_values": torch.zeros(shape, dtype=torch.bfloat16)}

    if config.model_type in ("vit", "t5"):
        module.example_inputs = inputs
    return module


def shares_of_trace(path: Path, kernel: Kernel) -> tuple[float, float]:
    """Return our forward FLOPs and saved bytes of the whole model, each divided by what was traced."""
    from paraplan.model.trace import trace_module

    read = read_config(path, seq_length=LENGTH)
    runs = tuple(run.replace(block=as_traced(run.block, read.model_type)) for run in read.runs)
    ours = read.replace(runs=runs)
    factory = partial(build, path, kernel)
    traced = trace_module(factory, source=path.stem, micro_batch_size=BATCH, seq_length=LENGTH, tells_reasons=False)
    length = ours.max_seq_length if ours.model_type == "vit" else LENGTH
    assert length is not None  # a ViT knows its patches

    def bytes_of(model: ModelSpec, seq_length: int) -> float:
        sizes = {"seq_length": seq_length, "micro_batch_size": BATCH}
        return sum(
            saved_bytes(block.saved, **sizes, kernel=kernel) for block in (model.embedding, *model.blocks, model.head)
        )

    flops = ours.flops_per_token(length) * length / (traced.flops_per_token(LENGTH) * LENGTH)
    return flops, bytes_of(ours, length) / bytes_of(traced, LENGTH)


def same_saved(name: str, path: Path, *, all_kernels: bool) -> bool | None:
    """Print FLOPs and saved bytes by attention kernel, and return whether all agree, None where none could be compared.

    Without `all_kernels` it is the first that the class has.
    """
    results: list[bool] = []
    for kernel in KERNELS if all_kernels else KERNELS[:1]:
        try:
            flops, saved = shares_of_trace(path, kernel)
        except ParaplanError as error:
            if "does not support an attention implementation" in error.message:
                continue
            print(f"{name:<24}{kernel:<8}{error}")
            results.append(False)
            continue
        results.append(abs(flops - 1) < 1e-9 and abs(saved - 1) <= TOLERANCE)
        print(f"{name:<24}{kernel:<8}{flops:>12.6f}{saved:>12.4f}{'' if results[-1] else '  DIFFERS'}")
    return all(results) if results else None


def kept_by_kernels(path: Path) -> frozenset[object]:
    """Return what blocks keep under some attention kernels alone, but for its size."""
    blocks = read_config(path, seq_length=LENGTH).blocks
    kept = [one for block in blocks for one in block.saved if one.kernels is not None]
    return frozenset(one.replace(elements_per_token=0.0, elements_per_token_pair=0.0) for one in kept)


def check_parameters(paths: dict[str, Path], totals: dict[str, int], *, with_transformers: bool) -> list[bool | None]:
    """Print the parameters of every model, and return which agree."""
    print(f"{'parameters':<24}{'embedding':>15}{'blocks':>18}{'head':>15}{'total':>18}")
    options = {"with_transformers": with_transformers}
    return [same_parameters(name, path, **options, expected=totals.get(name)) for name, path in paths.items()]


def check_saved(paths: dict[str, Path], *, alike: bool) -> list[bool | None]:
    """Print the FLOPs and saved bytes of every model, and return which agree."""
    print(f"{'FLOPs, saved bytes':<24}{'kernel':<8}{'FLOPs':>12}{'saved':>12}  ours / traced, {BATCH} x {LENGTH}")
    seen: set[frozenset[object]] = set()
    results = []
    for name, path in paths.items():
        kept = kept_by_kernels(path) if alike else frozenset()
        results.append(same_saved(name, path, all_kernels=not alike or kept not in seen))
        seen.add(kept)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Compare every configuration of the folder that the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with NAME.json files or NAME/config.json folders")
    parser.add_argument("--only", choices=["parameters", "saved"], help="compare nothing else")
    parser.add_argument("--alike", action="store_true", help="other kernels once for models that keep alike by them")
    options = parser.parse_args(arguments)
    paths = configurations(options.folder)
    if not paths:
        print(f"{options.folder} holds no configurations", file=sys.stderr)
        return 2
    file = options.folder / "expected.json"
    models = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() else {}
    totals = {name: int(values["parameters"]) for name, values in models.items()}
    with_transformers = importlib.util.find_spec("transformers") is not None
    if not with_transformers and not totals:
        print("transformers is not installed, and there is no expected.json: nothing to compare", file=sys.stderr)
        return 2
    results: list[bool | None] = []
    if options.only != "saved":
        results += check_parameters(paths, totals, with_transformers=with_transformers)
    if options.only != "parameters" and with_transformers:
        results += check_saved(paths, alike=options.alike)
    compared = [result for result in results if result is not None]
    print(f"{sum(compared)} of {len(compared)} comparisons agree")
    return 0 if compared and all(compared) else 1


if __name__ == "__main__":
    sys.exit(main())
