"""Settings of the software in torchtitan's keys, and how products of linear layers are scaled.

Keys as in config/job_config.py at v0.2.2, and in config/configs.py and components/quantization of August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from paraplan.interop.fields import Fields
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.narrow_products import torchao_recipe
from paraplan.interop.sources.torchtitan_python import CLASS
from paraplan.plan.stack import Dispatcher, OptimizerStep, StackSettings
from paraplan.plan.training import Fp8Recipe, LinearPrecision

_DISPATCHERS: dict[str, Dispatcher] = {"deepep": "deepep", "hybridep": "hybridep"}
_STEPS: dict[str, OptimizerStep] = {"foreach": "foreach", "for-loop": "for_loop"}
_PYTHON_RECIPE = "rowwise"
"""The default of Python's Float8LinearConverter; TOML's is a scale for each tensor."""


def torchtitan_stack(fields: Fields, *, etp: int | None, has_graphs: bool, notes: list[str]) -> StackSettings:
    """Return the settings that a configuration names; what is absent is as the framework's profile has it.

    `etp`: ranks of tp that divide each expert. `has_graphs`: the release has CUDA graphs around forward and backward
    passes unless told otherwise.
    """
    compiling, sizes, optimizer = (fields.section(name) for name in ("compile", "parallelism", "optimizer"))
    is_compiled = bool(compiling.flag("enable"))
    components = compiling.value("components")
    named = [
        section.value(key)
        for section, key in (
            (sizes, "expert_parallel_comm_backend"),
            (sizes, "expert_parallel_a2a_impl"),
            (registry(fields), "moe_comm_backend"),
        )
    ]
    sends = next((str(name) for name in named if name is not None), "standard")
    if sends not in ("standard", "default", *_DISPATCHERS):
        notes.append(f"experts' tokens by {sends}: priced as by NCCL's all-to-all")
    asynchronous = [
        is_compiled and bool(section.flag("enable_async_tensor_parallel")) for section in (compiling, sizes)
    ]
    asynchronous.append(registry(fields).value("tp_gemm_backend") == "dist_gemm")
    no_graphs = fields.section("training").flag("disable_cuda_graphs")
    return StackSettings(
        dispatcher=_DISPATCHERS.get(sends),
        etp=etp,
        cuda_graphs="full" if has_graphs and not no_graphs else None,
        compiled_loss=(is_compiled and (components is None or "loss" in str(components))) or None,
        overlaps_products=any(asynchronous) or None,
        optimizer_step=_STEPS.get(str(optimizer.value("implementation"))),
        steps_in_backward=bool(optimizer.flag("early_step_in_backward")),
        deterministic=True in [fields.section(name).flag("deterministic") for name in ("debug", "training")],
    )


def registry(fields: Fields) -> Fields:
    """Return the arguments of Python's `model_registry`; none where the model comes from elsewhere."""
    is_call = isinstance(fields.value("model_spec"), dict)
    return fields.section("model_spec") if is_call else Fields({}, source=fields.source)


_KNOWN = ("float8", "mx", "nvfp4", "lora")
"""Words of the names of converters that are read."""
_RANK = 8
_LAYERS = {
    "wqkv": ("q_proj", "k_proj", "v_proj"),
    "wkv": ("k_proj", "v_proj"),
    **{f"w{letter}": (f"{letter}_proj",) for letter in "qkvo"},
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
}


class NarrowProducts(NamedTuple):
    """Precision in which linear layers multiply."""

    precision: LinearPrecision | None = None
    recipe: Fp8Recipe | None = None
    gathers: bool | None = None
    """FSDP gathers weights in 8 bits."""


def narrow_products(fields: Fields, notes: list[str]) -> NarrowProducts:
    """Return what linear layers multiply in; add notes of what is priced otherwise."""
    converters = list(_converters(fields))
    names = " ".join(name for name, _ in converters)
    if "group" in names:
        notes.append("grouped products of experts in fewer bits: not priced")
    if any(converter.get("fqns") for _, converter in converters):
        notes.append("converters with fqns, which name some layers: priced as all linear layers")
    linear = fields.section("quantize").section("linear") if "quantize" in fields else Fields({}, source=fields.source)
    others = [name for name, _ in converters if not any(word in name for word in _KNOWN)]
    if others:
        notes.append(f"converters {', '.join(others)}: not known, and not priced")
    if any(converter.get("emulate") is True for _, converter in converters):
        notes.append("emulate: products in fewer bits are priced as those of the GPU, not as emulated ones")
    for name, converter in converters:
        if "group" in name:
            continue
        if "nvfp4" in name:
            return NarrowProducts("nvfp4")
        if "mx" in name:
            linear.section("mx").value("recipe_name")
            return NarrowProducts("mxfp8")
        if "float8" in name:
            section = linear.section("float8") if "quantize" in fields else Fields(fields.taken("float8"), source=name)
            default = _PYTHON_RECIPE if CLASS in converter else "tensorwise"
            words = converter.get("recipe_name")
            recipe = torchao_recipe(section, "recipe_name", str(words) if words else None, default=default)
            gathers = section.flag("enable_fsdp_float8_all_gather")
            return NarrowProducts("fp8", recipe, bool(gathers) or None)
    return NarrowProducts()


def trained_adapters(fields: Fields, notes: list[str]) -> str | None:
    """Return the adapters of a `LoRAConverter`, None where all trains (torchtitan/components/lora.py)."""
    for name, converter in _converters(fields):
        if "lora" in name:
            arguments = Fields(converter, source=fields.source, path="LoRAConverter.")
            targets = arguments.value("target_modules")
            train, found = trainable_of(
                arguments, rank=arguments.count("rank") or _RANK, targets=_named(targets) or "all-linear"
            )
            notes += found
            return train
    return None


def _named(targets: object) -> list[str]:
    """Return the layers that torchtitan's names stand for; `wkv` and `wqkv` are several in one product."""
    names = [str(target) for target in targets] if isinstance(targets, list) else []
    return [known for name in names for known in _LAYERS.get(name, (name,))]


def _converters(fields: Fields) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the converters of a model by name, with the arguments that Python gives them."""
    values = fields.section("model").value("converters") if "model" in fields else None
    values = values or registry(fields).value("converters") or []
    for value in values if isinstance(values, list) else re.split(r"(?<=\)),", str(values)):
        if isinstance(value, dict):
            yield str(value.get(CLASS)).lower(), value
        else:
            yield str(value).lower(), {}
