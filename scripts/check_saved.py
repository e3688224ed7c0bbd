#!/usr/bin/env python3
"""Compare FLOPs and saved activations of config readers with those of transformers' modules, traced without values.

Every configuration of a folder is read by paraplan and built by transformers on the meta device; forward FLOPs must be
equal, and the bytes kept for the backward pass agree within 2 %, under each attention kernel that the class has.
Ends with status 1 if one differs, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paraplan.errors import ParaplanError
from paraplan.model.reader import read_config
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import Matmul, ModelSpec, SavedTensor

TOLERANCE = 0.02
KERNELS: tuple[Literal["sdpa", "eager"], ...] = ("sdpa", "eager")
SIZES = {"micro_batch_size": 2, "seq_length": 256}


def build(path: Path, kernel: str) -> Any:
    """Return the module of the class that the config names, with the inputs that a trace gives it."""
    import torch
    import transformers

    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    model_class = getattr(transformers, fields["architectures"][0])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._attn_implementation = kernel
    module = model_class(config)

    def inputs(micro_batch_size: int, seq_length: int) -> dict[str, Any]:
        if config.model_type == "vit":
            height, width = config.image_size if isinstance(config.image_size, list) else [config.image_size] * 2
            shape = (micro_batch_size, config.num_channels, height, width)
            return {"pixel_values": torch.zeros(shape, dtype=torch.bfloat16)}
        ids = torch.zeros(micro_batch_size, seq_length, dtype=torch.long)
        if config.model_type == "t5":
            decoder = {} if "Encoder" in model_class.__name__ else {"decoder_input_ids": ids}
            return {"input_ids": ids, **decoder}
        return {"input_ids": ids} | ({} if config.model_type in ("bert", "roberta") else {"use_cache": False})

    module.example_inputs = inputs
    return module


def without_windows(model: ModelSpec) -> ModelSpec:
    """Return the model with whole attention: eager and sdpa compute every score and mask those outside a window."""
    runs = []
    for run in model.runs:
        attention = run.block.attention
        whole = attention.replace(window=None) if attention is not None else None
        runs.append(run.replace(block=run.block.replace(attention=whole)))
    return model.replace(runs=tuple(runs))


def written_out(model: ModelSpec) -> ModelSpec:
    """Return the model as transformers' own code runs linear attention, under every attention kernel, and experts.

    A trace counts the convolution, over padded tokens too, and no systems of equations.
    """
    length = SIZES["seq_length"]
    runs = []
    for run in model.runs:
        dense = (
            one.replace(rows_per_token=one.dense_rows_per_token or one.rows_per_token) for one in run.block.matmuls
        )
        block = run.block.replace(matmuls=tuple(dense))
        if any(one.name.startswith("delta rule") for one in block.matmuls):
            kept = (one for one in block.saved if one.kernels is None or "eager" in one.kernels)
            # Kimi's code sums scores feature by feature.
            is_kimi = any("forget_gate" in one.name for one in block.parameters)
            left_out = ("delta rule scores",) if is_kimi else ("delta rule system",)
            counted = tuple(one for one in block.matmuls if not one.name.startswith(left_out))
            shape = next(one.shape for one in block.parameters if one.name.endswith("conv1d.weight"))
            padded = shape[0] * (length + shape[-1] - 1) / length
            convolution = Matmul(name="convolution", k=shape[-1], n=1, rows_per_token=padded)
            saved = tuple(one.replace(kernels=None) for one in kept)
            block = block.replace(saved=saved, matmuls=(*counted, convolution))
        if model.model_type == "deepseek_v4":
            block = block.replace(saved=sinks_in_16_bits(block.saved))
        runs.append(run.replace(block=block))
    return model.replace(runs=tuple(runs))


def sinks_in_16_bits(saved: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
    """Return what a block keeps where all weights are cast, as a trace casts them, and those of DeepSeek-V4 are not."""
    tensors = (one for one in saved if one.role != "probabilities_copy")
    return tuple(one.replace(element_type="activation") if one.role == "probabilities" else one for one in tensors)


def compare(path: Path, kernel: Literal["sdpa", "eager"]) -> tuple[float, float]:
    """Return our forward FLOPs and saved bytes of the whole model, each divided by what was traced."""
    from paraplan.model.trace import trace_module

    batch, traced_length = SIZES["micro_batch_size"], SIZES["seq_length"]
    ours = written_out(read_config(path, seq_length=traced_length))
    factory: Callable[[], Any] = partial(build, path, kernel)
    traced = trace_module(
        factory, source=path.stem, micro_batch_size=batch, seq_length=traced_length, tells_reasons=False
    )
    length = ours.max_seq_length if ours.model_type == "vit" else traced_length
    assert length is not None  # a ViT knows its patches

    def flops(model: ModelSpec, seq_length: int) -> float:
        return model.flops_per_token(seq_length) * seq_length

    def saved(model: ModelSpec, seq_length: int) -> float:
        return sum(
            saved_bytes(block.saved, seq_length=seq_length, micro_batch_size=batch, kernel=kernel)
            for block in (model.embedding, *model.blocks, model.head)
        )

    return (
        flops(without_windows(ours), length) / flops(traced, traced_length),
        saved(ours, length) / saved(traced, traced_length),
    )


def kept_by_kernels(path: Path) -> frozenset[object]:
    """Return what blocks keep under some attention kernels alone, but for its size."""
    blocks = read_config(path, seq_length=SIZES["seq_length"]).blocks
    kept = [one for block in blocks for one in block.saved if one.kernels is not None]
    return frozenset(one.replace(elements_per_token=0.0, elements_per_token_pair=0.0) for one in kept)


def check(path: Path, *, all_kernels: bool = True) -> bool | None:
    """Print a row for each attention kernel and return whether all agree, None where none could be compared.

    Without `all_kernels` it is the first that the class has.
    """
    results: list[bool] = []
    for kernel in KERNELS:
        if results and not all_kernels:
            break
        try:
            flops, saved = compare(path, kernel)
        except ParaplanError as error:
            if "does not support an attention implementation" in error.message:
                continue
            print(f"{path.stem:<24}{kernel:<8}{error}")
            results.append(False)
            continue
        agrees = abs(flops - 1) < 1e-9 and abs(saved - 1) <= TOLERANCE
        print(f"{path.stem:<24}{kernel:<8}{flops:>12.6f}{saved:>12.4f}  {'agrees' if agrees else 'DIFFERS'}")
        results.append(agrees)
    return all(results) if results else None


def main(arguments: list[str] | None = None) -> int:
    """Compare every configuration of the folder that the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with NAME.json files")
    parser.add_argument("--alike", action="store_true", help="other kernels once for models that keep alike by them")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    paths = sorted(path for path in folder.glob("*.json") if path.name != "expected.json")
    if not paths:
        print(f"{folder} holds no configurations", file=sys.stderr)
        return 2
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: pip install transformers", file=sys.stderr)
        return 2
    print(f"{'model':<24}{'kernel':<8}{'FLOPs':>12}{'saved':>12}  ours / traced, {SIZES}")
    looked_at: set[frozenset[object]] = set()
    found = []
    for path in paths:
        kept = kept_by_kernels(path) if options.alike else frozenset()
        found.append(check(path, all_kernels=not options.alike or kept not in looked_at))
        looked_at.add(kept)
    results = [result for result in found if result is not None]
    print(f"{sum(results)} of {len(results)} models agree")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
