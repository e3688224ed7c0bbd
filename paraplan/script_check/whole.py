"""Parameters by common names and with whole values, whatever holds them: DDP, FSDP, DTensors, compiled modules."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.script_check.deepspeed_engine import EngineParameters, zero_engine
from paraplan.script_check.torch_private import FlatParameters, flat_parameters_of, is_batch_norm

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", "_forward_module")
_LARGEST_BUFFER = 1 << 20
"""Numbers of a buffer that is compared: statistics are small, and tables of positions or masks stay as they are."""
_UNNAMED = "parameter "
_REPLICA_AXES = ("dp", "fsdp", "data", "replica", "shard", "batch")


@dataclass(frozen=True)
class Values:
    """Values of parameters, by name, or gradients where they have some."""

    of: dict[str, torch.Tensor]
    split: tuple[str, ...]


class Names:
    """The names of the parameters of a script's models, in the order of the models."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._flat: dict[str, FlatParameters | EngineParameters] = {}
        self._plain: dict[int, tuple[str, nn.Parameter]] = {}
        self.of_modules: dict[int, str] = {}
        """Names of the modules inside of the models, by their ids."""
        self._unnamed: set[int] = set()
        self._with_buffers: list[nn.Module] = []

    def meet_buffers(self, module: nn.Module) -> None:
        """Note a module that has buffers and no parameters, as a loss with a memory."""
        if any(True for _ in module.buffers()) and not any(module is one for one in self._with_buffers):
            self._with_buffers.append(module)

    def meet(self, model: nn.Module) -> EngineParameters | None:
        """Name the parameters of another model, before its first call: later it may hold gathered ones for a while.

        Return what holds them where that is an engine with partitions of its own.
        """
        prefix = f"{type(_inner(model)).__name__}{len(self.models)}." if self.models else ""
        self.models.append(model)
        for name, module in model.named_modules():
            if common_name(name):
                self.of_modules.setdefault(id(module), prefix + common_name(name))
        engine = zero_engine(model)
        if engine is not None:
            self._flat[prefix.rstrip(".")] = engine
        for name, one in flat_parameters_of(model):
            self._flat[prefix + common_name(name)] = one
        is_flat = {id(parameter) for one in self._flat.values() for parameter in one.parameters()}
        for name, parameter in model.named_parameters():
            key = id(parameter)
            if (key not in self._plain or key in self._unnamed) and key not in is_flat:
                self._plain[key] = (prefix + common_name(name), parameter)
                self._unnamed.discard(key)
        return engine

    def add(self, parameters: Iterator[torch.Tensor]) -> None:
        """Name parameters of an optimizer that are in no model."""
        is_flat = {id(parameter) for one in self._flat.values() for parameter in one.parameters()}
        unknown = [one for one in parameters if id(one) not in self._plain and id(one) not in is_flat]
        names = _names_elsewhere(unknown) if unknown else {}
        for parameter in unknown:
            if id(parameter) in names:
                self._plain[id(parameter)] = (names[id(parameter)], parameter)  # type: ignore[assignment]
            else:
                self._plain[id(parameter)] = (f"{_UNNAMED}{len(self._plain)}", parameter)  # type: ignore[assignment]
                self._unnamed.add(id(parameter))

    def values(self, *, gradients: bool, of: set[int] | None = None, trained: bool = False) -> Values:
        """Return whole values, or gradients. Collective: all ranks call it alike.

        `of` has ids of an optimizer's parameters; with `trained` those that are frozen are left out.
        """
        found: dict[str, torch.Tensor] = {}
        split: list[str] = []
        for prefix, flat in self._flat.items():
            if of is not None and not any(id(parameter) in of for parameter in flat.parameters()):
                continue
            for below, part in flat.whole(gradients=gradients):
                whole_name = f"{prefix}.{common_name(below)}" if prefix else common_name(below)
                found[whole_name] = part
                split.append(whole_name)
        for key, (name, parameter) in self._plain.items():
            value: torch.Tensor | None = parameter.grad if gradients else parameter.detach()
            if value is None or (of is not None and key not in of) or (trained and not parameter.requires_grad):
                continue
            if _is_freed(value):  # a whole parameter of FSDP2 that an optimizer holds: what it shards is another
                continue
            if isinstance(value, DTensor):
                split.append(name)
                value = value.full_tensor()
            found[name] = value.detach().to_dense().clone() if value.layout != torch.strided else value.detach().clone()
        return Values(found, tuple(split))

    def sizes_of_gradients(self) -> dict[int, float]:
        """Return the norms of the gradients that this rank itself has, by the ids of parameters."""
        parameters = (one for model in self.models for one in model.parameters())
        with torch.no_grad():
            return {id(one): float(_local(one.grad).double().norm()) for one in parameters if one.grad is not None}

    def clipped_to(self, before: dict[int, float]) -> float | None:
        """Return by what gradients were multiplied since they had the sizes `before`, None where by unlike numbers."""
        after = self.sizes_of_gradients() if before else {}
        ratios = [after[key] / size for key, size in before.items() if size > 0 and key in after]
        return max(ratios) if ratios and max(ratios) - min(ratios) <= 1e-4 * max(ratios) else None

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of models' buffers and frozen parameters; statistics of batch norms stand still."""
        found = {}
        prefixes = [
            f"{type(_inner(model)).__name__}{place}." if place else "" for place, model in enumerate(self.models)
        ]
        prefixes += [f"{type(module).__name__}." for module in self._with_buffers]
        for prefix, model in zip(prefixes, [*self.models, *self._with_buffers], strict=True):
            for module_name, module in model.named_modules():
                held = [] if is_batch_norm(module) else list(module.named_buffers(recurse=False))
                held += [(name, one) for name, one in module.named_parameters(recurse=False) if not one.requires_grad]
                for name, value in held:
                    if _is_small_and_plain(value):
                        found[prefix + common_name(f"{module_name}.{name}".lstrip("."))] = value.detach().clone()
        return found

    def held_by(self, parameters: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the names of parameters of an optimizer."""
        ids: dict[int, tuple[str, ...]] = {key: (name,) for key, (name, _) in self._plain.items()}
        for prefix, flat in self._flat.items():
            for key, below in flat.names_by_id().items():
                ids[key] = tuple(f"{prefix}.{common_name(one)}" if prefix else common_name(one) for one in below)
        return tuple(name for parameter in parameters for name in ids.get(id(parameter), ()))

    def load(self, values: dict[str, torch.Tensor]) -> list[str]:
        """Set plain parameters to `values`; return the names of those whose shape is another."""
        unlike = []
        for name, parameter in self._plain.values():
            value = values.get(name)
            if value is None:
                continue
            target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if target.shape != value.shape:
                unlike.append(name)
                continue
            with torch.no_grad():
                target.copy_(value)
        for prefix, flat in self._flat.items():
            flat.load(prefix, values)
        return unlike

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the named axes of the meshes that hold parameters."""
        found: dict[str, int] = {}
        for _, parameter in self._plain.values():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                names = mesh.mesh_dim_names or tuple(f"axis {dim}" for dim in range(mesh.ndim))
                found |= {name: mesh.size(dim) for dim, name in enumerate(names)}
        return found

    @property
    def num_replicas(self) -> int | None:
        """Among how many ranks the data is divided, as far as wrappers and names of axes say it."""
        for model in self.models:
            for module in model.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    return int(module.process_group.size())
        if self._flat:
            return next(iter(self._flat.values())).num_ranks
        axes = self.axes
        if not axes:
            return None
        sizes = [size for name, size in axes.items() if any(part in name.lower() for part in _REPLICA_AXES)]
        if not sizes:
            return None
        count = 1
        for size in sizes:
            count *= size
        return count


def _names_elsewhere(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """Return the names of parameters in models that are never called, as adapters whose layers others call."""
    wanted = {id(one) for one in parameters}
    found: dict[int, tuple[int, str]] = {}
    for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:  # not by what proxies say
        named = [(name, id(one)) for name, one in module.named_parameters()]
        for name, key in named:
            if key in wanted and len(named) > found.get(key, (0, ""))[0]:
                found[key] = (len(named), f"{type(module).__name__}.{common_name(name)}")
    return {key: name for key, (_, name) in found.items()}


def _is_freed(value: torch.Tensor) -> bool:
    """Whether the memory of a tensor was given back, so that reading it would crash."""
    is_plain = not isinstance(value, DTensor) and value.layout == torch.strided and not value.is_meta
    return is_plain and value.numel() > 0 and value.untyped_storage().nbytes() == 0


def rates_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an optimizer's group; those of a tuple, as Adam's betas, with their places."""
    found: dict[str, float] = {}
    for name, value in group.items():
        if name in ("params", "initial_lr", "max_lr", "min_lr"):
            continue
        for place, one in enumerate(value) if isinstance(value, tuple) else (("", value),):
            is_number = isinstance(one, torch.Tensor) and one.numel() == 1
            if is_number or (isinstance(one, int | float) and not isinstance(one, bool)):
                found[f"{name} {place}".strip()] = float(one)
    return found


def _is_small_and_plain(value: torch.Tensor) -> bool:
    is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta
    is_small = is_plain and value.is_floating_point() and value.numel() <= _LARGEST_BUFFER
    return is_small and not _is_freed(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here if here.layout == torch.strided else here.to_dense()


def is_unnamed(name: str) -> bool:
    """Whether a name is one of a tensor that an optimizer holds, and no model."""
    return name.startswith(_UNNAMED)


def common_name(name: str) -> str:
    """Return the name of a parameter without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _inner(model: nn.Module) -> nn.Module:
    inner = dict(model.named_children())
    (name, *others) = inner or ("",)
    return _inner(inner[name]) if not others and name in _WRAPPERS else model
