"""Linear layers that multiply in 8 bits: torchao's `Float8Linear`, which scripts put in, or a plan asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.structure.blocks import BlockStack
from paraplan.runtime.structure.forwards import trial_forward_of

_MULTIPLE = 16
"""Products in 8 bits take sizes that it divides (`torch._scaled_mm`)."""
_FIRST_CAPABILITY = (8, 9)
"""Compute capability from which on a GPU has products in 8 bits."""


def is_float8(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer of torchao that multiplies in float8."""
    layer = _float8_linear()
    return layer is not None and isinstance(module, layer)


def float8_product(module: Any) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return what a float8 layer computes of its input, a part of its weight and a bias. The part is scaled alone."""

    def product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        part = SimpleNamespace(weight=weight, bias=bias, config=module.config, linear_mm_config=module.linear_mm_config)
        outputs: torch.Tensor = type(module).forward(part, given)
        return outputs

    return product


def convert_products(
    model: nn.Module, stack: BlockStack | None, training: TrainingSpec | None, device: torch.device
) -> None:
    """Turn the linear layers of the blocks of `model` into torchao's, where the plan was made for products in float8.

    Layers of sizes that 16 does not divide stay as they are, those that choose experts, and a model that has float8
    layers already. Where
    `device` has no products in 8 bits their operands are rounded alone. Raises `UsageError` without torchao, and
    `UnsupportedPlanError` for layers whose weights are gathered in 8 bits.
    """
    ready = [name for name, one in model.named_modules() if is_float8(one)]
    for name in ready:
        config: Any = getattr(model.get_submodule(name), "config", None)
        if config.enable_fsdp_float8_all_gather:
            raise UnsupportedPlanError(
                f"the weight of {name} is to be gathered in 8 bits (enable_fsdp_float8_all_gather)",
                hint="leave that out of Float8LinearConfig: weights are gathered as they are stored",
            )
    if training is None or training.linear_precision != "fp8" or ready:
        return
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UsageError(
            "the plan was made for linear layers in fp8, and torchao is not installed", hint="pip install torchao"
        ) from None
    has_products = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    recipe: Any = Float8LinearConfig.from_recipe_name(training.fp8_recipe or "tensorwise")
    for block in (model,) if stack is None else stack.modules(model):
        convert_to_float8_training(
            block,
            config=replace(recipe, emulate=not has_products),
            module_filter_fn=_can_be_rounded,
        )


@contextmanager
def products_unrounded() -> Iterator[None]:
    """Have float8 layers multiply in the type of their operands, in this context.

    Runs that scale other parts of a batch or of a weight differ by what 8 bits round, which hides what else differs.
    """
    layer = _float8_linear()
    with nullcontext() if layer is None else trial_forward_of(layer, nn.Linear.forward):
        yield


def _can_be_rounded(layer: nn.Module, name: str) -> bool:
    """Whether a linear layer multiplies in 8 bits: those that choose experts do not."""
    chooses = name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate")
    return not chooses and all(size % _MULTIPLE == 0 for size in cast("nn.Linear", layer).weight.shape)


def _float8_linear() -> Any:
    """Return torchao's class where a script has imported it."""
    return getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", None)
