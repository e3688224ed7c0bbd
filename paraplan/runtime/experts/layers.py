"""The mixtures of experts of a model: modules that hold the weights of all experts, or lists of modules, one each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.sharding import Sharding

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer. `name` is that of the module with their stacked weights, or of the list of them."""

    name: str
    num_experts: int
    is_list: bool


@dataclass(eq=False)
class ExpertLoad:
    """The rows that a rank has sent to every expert in a step, by layer; those that run again count again."""

    num_experts: dict[str, int] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Take note of the rows that go to each expert in one call of a layer."""
        self.rows[name] = self.rows[name] + rows if name in self.rows else rows


@dataclass(frozen=True)
class RankExperts:
    """The experts that a rank holds: the `modules` with their parameters, and how these are cut, by their names.

    `absent` are the empty parameters that stand for those of others, `load` what the experts receive.
    """

    modules: tuple[nn.Module, ...] = ()
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    absent: frozenset[nn.Parameter] = frozenset()
    load: ExpertLoad = field(default_factory=ExpertLoad)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of these experts."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    @property
    def apart(self) -> frozenset[nn.Parameter]:
        """The parameters with another place than the rest of the model: these, and those that stand for others."""
        return self.absent.union(self.parameters)


NO_EXPERTS = RankExperts()


def load_metrics(loads: Sequence[ExpertLoad], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return what the busiest had in a step over the mean: `expert_load` of ranks, `expert_imbalance` of experts.

    Both are means over the layers, the same on every rank. Rows of the step are forgotten. Every rank calls it.
    """
    layers = [(load, name, count) for load in loads for name, count in load.num_experts.items()]
    ratios = torch.zeros(3, device=mesh.world.device)
    if layers:
        sent = [
            load.rows.get(name, torch.zeros(count, device=mesh.world.device)).float() for load, name, count in layers
        ]
        flat = torch.cat(sent)
        dist.all_reduce(flat, group=mesh.replica_group)
        for rows in torch.split(flat, [count for _, _, count in layers]):
            mean = rows.mean()
            by_rank = rows.view(mesh.ep, -1).mean(1)
            found = torch.stack([by_rank.max() / mean, rows.max() / mean, torch.ones_like(mean)])
            ratios += torch.where(mean > 0, found, 0.0)
    if mesh.group("pp") is not None:
        dist.all_reduce(ratios, group=mesh.group("pp"))
    forget_load(loads)
    load, imbalance, count = ratios.unbind()
    return {"expert_load": load / count, "expert_imbalance": imbalance / count}


def forget_load(loads: Sequence[ExpertLoad]) -> None:
    """Forget what was sent so far: in trials, and in evaluation."""
    for load in loads:
        load.rows.clear()


def find_experts(model: nn.Module) -> dict[str, ExpertLayer]:
    """Return the mixtures of `model` by the names of their modules.

    Stacked weights have three dimensions, experts first, and all parameters of the module have as many. A list is one
    of modules that are alike, and is named for experts.
    """
    found: dict[str, ExpertLayer] = {}
    for name, module in model.named_modules():
        count = _stacked(module)
        if name and count:
            found[name] = ExpertLayer(name, count, is_list=False)
        elif "expert" in name.rpartition(".")[2] and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            listed = listed_experts(module)
            found |= {name: ExpertLayer(name, len(listed), is_list=True)} if _are_alike([*listed.values()]) else {}
    return found


def listed_experts(container: nn.Module) -> dict[str, nn.Module]:
    """Return the experts of a list by their keys in it: what it holds without parameters (a dropout) is none."""
    return {key: one for key, one in container.named_children() if any(True for _ in one.parameters())}


def check_experts(model: nn.Module, *, ep: int, tp: int) -> dict[str, ExpertLayer]:
    """Return the mixtures of `model`; raise `UnsupportedPlanError` where `ep` ranks cannot share them out evenly."""
    found = find_experts(model)
    if not found:
        raise UnsupportedPlanError(
            f"ep={ep}: {type(model).__name__} has no experts that ranks can share out: no module of stacked weights "
            "[experts, inputs, outputs] alone, and no list of modules that is named for experts",
            hint="use ep=1",
        )
    holders: dict[int, str] = {}
    for layer in found.values():
        if layer.is_list and tp > 1:
            raise UnsupportedPlanError(
                f"ep={ep}, tp={tp}: {layer.name} is a list of experts, each of which one rank of ep has, with layers "
                "that tp would divide",
                hint="use ep=1 or tp=1, or hold the weights of experts stacked in one module",
            )
        if layer.num_experts % ep:
            raise UnsupportedPlanError(
                f"ep={ep} does not divide the {layer.num_experts} experts of {layer.name}",
                hint="use an ep that divides the number of experts",
            )
        for name, parameter in expert_parameters(model, layer):
            if not parameter.ndim:
                raise UnsupportedPlanError(
                    f"ep={ep}: {name} is a single number of one expert, which is not divided", hint="use ep=1"
                )
            if holders.setdefault(id(parameter), name) != name:
                raise UnsupportedPlanError(
                    f"ep={ep}: {holders[id(parameter)]} and {name} are one parameter", hint="use ep=1 for this model"
                )
    return found


def expert_parameters(model: nn.Module, layer: ExpertLayer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the experts of a layer with their names in `model`."""
    module = model.get_submodule(layer.name)
    for name, parameter in module.named_parameters(recurse=layer.is_list, remove_duplicate=False):
        yield f"{layer.name}.{name}", parameter


def _stacked(module: nn.Module) -> int:
    """Return the number of experts whose weights `module` holds stacked, 0 where it holds none."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter is not None]
    counts = {parameter.shape[0] if parameter.ndim else 0 for parameter in own}
    num_stacked = sum(parameter.ndim == 3 for parameter in own)
    if isinstance(module, _CONVOLUTIONS) or len(counts) != 1 or min(counts) < 2 or not num_stacked:
        return 0
    has_layers = any(True for child in module.children() for _ in child.parameters())
    is_named = "expert" in type(module).__name__.lower()
    return counts.pop() if not has_layers and (num_stacked > 1 or is_named) else 0


def _are_alike(modules: Sequence[nn.Module]) -> bool:
    shapes = [[(name, one.shape) for name, one in module.named_parameters()] for module in modules]
    return len(shapes) > 1 and all(one == shapes[0] for one in shapes)
