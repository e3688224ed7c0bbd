"""Options that a script's factory of optimizers gives each parameter, under the plan and for the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.errors import ParaplanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.optimizers.several import OptimizerFactory, RankParameters, as_one_optimizer, optimizers_in
from paraplan.runtime.structure.snapshots import nothing_changed

OptionsByName = dict[str, dict[str, Any]]
"""For each parameter that an optimizer has: the kind of the optimizer, and its options that are numbers."""


@dataclass(frozen=True)
class WholeOptions:
    """The `options` that a factory gives the parameters of a whole model, of these `names`."""

    names: frozenset[str]
    options: OptionsByName


_KIND = "optimizer"


def options_of(made: Any, parameters: Mapping[str, nn.Parameter]) -> OptionsByName:
    """Return the options of `parameters` in the optimizers `made`; those that are in none have no entry."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: OptionsByName = {}
    for one in optimizers_in(made):
        for group in one.param_groups:
            options = {_KIND: type(one).__name__} | {
                key: number for key in group if key != "params" and (number := _number(group[key])) is not None
            }
            found |= {names[id(held)]: options for held in group["params"] if id(held) in names}
    return found


def whole_options(factory: OptimizerFactory, model: nn.Module) -> WholeOptions | None:
    """Return the options that `factory` gives the parameters of a whole model; None where it does not run on it.

    What it has changed beside the optimizer is put back.
    """
    parameters = dict(model.named_parameters())
    try:
        with nothing_changed(functions=[factory]):
            made = as_one_optimizer(factory(RankParameters(parameters)))
            return WholeOptions(frozenset(parameters), options_of(made, parameters))
    except ParaplanError:
        raise
    except Exception:  # the script's code, which may need values or a GPU that the model has only under the plan
        return None


def check_same_options(
    made: torch.optim.Optimizer, held: Mapping[str, nn.Parameter], whole: WholeOptions, plan: ParallelPlan
) -> None:
    """Raise `UsageError` where a parameter has other options in `made` than in the `whole` model.

    Such a factory goes by what a plan changes: shapes, places in the list, or which object a parameter is.
    """
    found = options_of(made, held)
    for name in sorted(held.keys() & whole.names):
        ours, theirs = found.get(name, {}), whole.options.get(name, {})
        key = next((key for key in [_KIND, *ours, *theirs] if ours.get(key) != theirs.get(key)), None)
        if key is not None:
            raise UsageError(
                f"optimizer= gives {name} {_said(key, ours)} under '{plan.describe()}', and {_said(key, theirs)} in "
                "one process",
                hint="choose parameters by params.named(), whose names are those of the whole model: a plan changes "
                "their shapes, their places in the list and which objects they are",
            )


def _said(key: str, options: Mapping[str, Any]) -> str:
    return f"{key}={options[key]}" if key in options else f"no {key}"


def _number(value: Any) -> Any:
    """Return a number or several as such, None for other options."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    several = value if isinstance(value, (tuple, list)) else [value]
    return value if all(isinstance(one, (bool, int, float)) for one in several) else None
