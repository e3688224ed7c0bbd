"""Engines of DeepSpeed under ZeRO: the parameters and gradients behind their flat partitions, and their steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class EngineParameters:
    """The parameters of an engine whose optimizer holds flat partitions of them: ZeRO 1, 2 and 3.

    To a recorder it is the optimizer of the engine, whose groups hold parameters of the model.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer

    @property
    def num_ranks(self) -> int:
        """Number of ranks among which the partitions are divided."""
        return int(self.engine.dp_world_size)

    @property
    def param_groups(self) -> list[_Group]:
        """The groups of the engine's optimizer, with parameters of the model in place of partitions."""
        zero = self.optimizer
        inner = zero.optimizer.param_groups
        groups = next(groups for name in ("bit16_groups", "fp16_groups", "bf16_groups") if (groups := _at(zero, name)))
        of_group = _at(zero, "sub_group_to_group_id") or {number: number for number in range(len(groups))}
        members: list[list[torch.Tensor]] = [[] for _ in inner]
        for number, parameters in enumerate(groups):
            members[of_group[number]] += parameters
        return [_Group(group, parameters) for group, parameters in zip(inner, members, strict=True)]

    @property
    def norm(self) -> float | None:
        """The norm by which the last step clipped, None where it did not."""
        norm = _at(self.optimizer, "_global_grad_norm")
        return float(norm) if norm is not None and self.engine.gradient_clipping() > 0 else None

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of the model."""
        yield from self.engine.module.parameters()

    def names_by_id(self) -> dict[int, tuple[str, ...]]:
        """Return the names of the parameters by their ids."""
        return {id(parameter): (name,) for name, parameter in self.engine.module.named_parameters()}

    def whole(self, *, gradients: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names of those that are trained with whole values in fp32, or gradients. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        for name, parameter in self.engine.module.named_parameters():
            if parameter.requires_grad:
                value = (safe_get_full_grad if gradients else safe_get_full_fp32_param)(parameter)
                if value is not None:
                    yield name, value.detach().clone()

    def load(self, prefix: str, values: dict[str, torch.Tensor]) -> None:
        """Set its parameters, and the copies in fp32 that are stepped, to `values`; one rank holds all partitions."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in self.engine.module.named_parameters():
            value = values.get(f"{prefix}.{name}" if prefix else name)
            if value is None:
                continue
            is_partitioned = hasattr(parameter, "ds_id")
            with GatheredParameters(parameter, modifier_rank=0, enabled=is_partitioned), torch.no_grad():
                parameter.copy_(value)
            safe_set_full_fp32_param(parameter, value.float())

    def follow(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call `before` and `after` with this at each step of the engine's optimizer."""
        plain = self.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            before(self, (self, *args), kwargs)
            made = plain(*args, **kwargs)
            after(self)
            return made

        self.optimizer.step = step


class _Group(dict[str, Any]):
    """A group of an optimizer with other parameters; what is set here is set there."""

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        super().__init__(group, params=parameters)
        self._group = group

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._group[key] = value


def zero_engine(model: nn.Module) -> EngineParameters | None:
    """Return the engine of DeepSpeed that a model is, None where it is none, or holds no partitions."""
    loaded = sys.modules.get("deepspeed.runtime.engine")
    if loaded is None or not isinstance(model, loaded.DeepSpeedEngine):
        return None
    zero = sys.modules["deepspeed.runtime.base_optimizer"].ZeROOptimizer
    return EngineParameters(model) if isinstance(_at(model, "optimizer"), zero) else None


def _at(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)
