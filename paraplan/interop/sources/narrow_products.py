"""Products in 8 bits, as accelerate and what is built on it switch them on."""

from __future__ import annotations

from paraplan.interop.fields import Fields
from paraplan.interop.setup import Setup
from paraplan.plan.training import TORCHAO_RECIPES, Fp8Recipe


def torchao_recipe(section: Fields, key: str, words: str | None = None, *, default: str = "tensorwise") -> Fp8Recipe:
    """Return the recipe of torchao that `words` name, those of `key` where there are none. Raises `PlanError`."""
    named = words or section.text(key) or default
    recipe = next((one for one in TORCHAO_RECIPES if one == named), None)
    if recipe is None:
        raise section.error(key, " or ".join(TORCHAO_RECIPES))
    return recipe


def with_fp8(setup: Setup, recipe: Fp8Recipe, *, gathers: bool = False) -> Setup:
    """Return a setup whose linear layers multiply in fp8; FSDP alone sends their weights so."""
    gather = gathers and setup.framework == "fsdp"
    return setup.replace(linear_precision="fp8", fp8_recipe=recipe, fp8_gather=gather or None)


def accelerates_fp8(setup: Setup, fields: Fields) -> Setup:
    """Return a setup with what `fp8_config` says, which stands for accelerate's recipe arguments.

    Without a backend torchao comes first, with scales of whole tensors, and FSDP gathers 8-bit weights unless told
    otherwise; Transformer Engine scales by earlier steps, or by blocks of Blackwell (accelerate 1.15, accelerator.py,
    utils/dataclasses.py, utils/transformer_engine.py).
    """
    config = fields.section("fp8_config")
    backend = (config.text("backend") or "AO").upper()
    gathers = config.flag("enable_fsdp_float8_all_gather") is not False
    if backend == "AO":
        return with_fp8(setup, "tensorwise", gathers=gathers)
    if backend == "TE":
        if config.flag("use_mxfp8_block_scaling"):
            return setup.replace(linear_precision="mxfp8")
        return with_fp8(setup, "delayed")
    return setup.replace(notes=(*setup.notes, f"fp8_config.backend {backend}: priced as bf16"))


def axolotls_fp8(setup: Setup, fields: Fields) -> Setup:
    """Return a setup with axolotl's `fp8`: torchao, scales of whole tensors or as `fp8_config` says (core/fp8.py)."""
    gathers = fields.flag("fp8_enable_fsdp_float8_all_gather")
    recipe = torchao_recipe(fields.section("fp8_config"), "recipe")
    return with_fp8(setup, recipe, gathers=bool(gathers)) if fields.flag("fp8") else setup


def llama_factorys_fp8(setup: Setup, fields: Fields) -> Setup:
    """Return a setup with LLaMA-Factory's `fp8`: torchao's scales of rows, or Transformer Engine's of earlier steps.

    Its key for 8-bit gathers is told in a log and changes nothing (train/fp8_utils.py).
    """
    backend = fields.text("fp8_backend") or "torchao"
    recipes: dict[str, Fp8Recipe] = {"te": "delayed", "torchao": "rowwise"}
    return with_fp8(setup, recipes.get(backend, "tensorwise")) if fields.flag("fp8") else setup
