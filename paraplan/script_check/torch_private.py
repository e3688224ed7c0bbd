"""Names of torch that a check of scripts replaces, and reads of it that is not public."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as meshes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils.data import DataLoader

Made = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function that is called in place of one of torch's, which it is given."""


def around_models(make: Made) -> None:
    """Call what `make` makes where a module is called."""
    _replace(nn.Module, "__call__", make)


def around_backward(make: Made) -> None:
    """Call what `make` makes where a backward pass is made."""
    _replace(torch.autograd, "backward", make)


def is_transformed() -> bool:
    """Whether a call is inside of `torch.func.vmap`, `grad` or another of its kind, where tensors have no values."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func.vmap` or another of its kind was given for `tensor`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def follow_again(mode: TorchFunctionMode) -> None:
    """Let `mode` see what is computed again on the way back, where autograd runs without modes."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def run(*given: Any, **named: Any) -> Any:
                if torch._C._len_torch_function_stack():
                    return function(*given, **named)
                with mode:
                    return function(*given, **named)

            return plain(run, *args, **kwargs)

        return checkpoint

    _replace(checkpoints, "checkpoint", make)


def around_clipping(make: Made) -> None:
    """Call what `make` makes where gradients are clipped by norm or value."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(torch.nn.utils, name, _replace(torch.nn.utils.clip_grad, name, make))
    _replace(torch.nn.utils, "clip_grads_with_norm_", make)
    _replace(FullyShardedDataParallel, "clip_grad_norm_", make)


def around_arrays(make: Made) -> None:
    """Call what `make` makes where an array of NumPy is taken as a tensor, which modes do not see."""
    _replace(torch, "from_numpy", make)


def around_exchanges(names: Iterable[str], make: Made) -> None:
    """Call what `make` makes where ranks exchange tensors by functions of these names."""
    for name in names:
        _replace(dist, name, make)


def around_loaders(make: Made) -> None:
    """Call what `make` makes where a loop over a data loader begins."""
    _replace(DataLoader, "__iter__", make)


def use_gloo() -> None:
    """Let a script that asks for NCCL, and for a GPU with it, have gloo."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            return plain("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

        return init_process_group

    _replace(dist, "init_process_group", make)


def around_groups(note: Callable[[str, tuple[int, ...]], None]) -> None:
    """Tell `note` the ranks of each axis of a mesh, and of each group, that this process is one of."""

    def make_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init_device_mesh(*args: Any, **kwargs: Any) -> Any:
            mesh = plain(*args, **kwargs)
            place = mesh.get_coordinate()
            for dim, name in enumerate(mesh.mesh_dim_names or ()) if place is not None else ():
                line = tuple(slice(None) if other == dim else at for other, at in enumerate(place))
                note(name, tuple(mesh.mesh[line].tolist()))
            return mesh

        return init_device_mesh

    def make_group(plain: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            if ranks is not None and dist.get_rank() in ranks:
                note("", tuple(sorted(ranks)))
            return plain(ranks, *args, **kwargs)

        return new_group

    made: Any = _replace(meshes, "init_device_mesh", make_mesh)
    dist.init_device_mesh = made  # type: ignore[attr-defined]
    _replace(dist, "new_group", make_group)


def be_one_process() -> None:
    """Let a script that writes the sizes of its meshes and groups down run in one process."""

    def make_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init_device_mesh(device_type: str, mesh_shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
            return plain(device_type, (1,) * len(mesh_shape), *args, **kwargs)

        return init_device_mesh

    def make_group(plain: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            return plain(None if ranks is None else [0], *args, **kwargs)

        return new_group

    made: Any = _replace(meshes, "init_device_mesh", make_mesh)
    dist.init_device_mesh = made  # type: ignore[attr-defined]
    _replace(dist, "new_group", make_group)


def _replace(owner: Any, name: str, make: Made) -> Callable[..., Any]:
    plain = getattr(owner, name)
    made = functools.wraps(plain)(make(plain))
    setattr(owner, name, made)
    return made


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module takes statistics of the rows that its rank has."""
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def is_dropout(module: nn.Module) -> bool:
    """Whether a module draws which values it drops by `p`."""
    return isinstance(module, _DropoutNd)


class FlatParameters:
    """The parameters of one FSDP module, which lie in one vector of which every rank has a part."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.vector = handle.flat_param

    @property
    def num_ranks(self) -> int:
        """Number of ranks among which the vector is divided."""
        return int(self.handle.process_group.size())

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield what an optimizer may hold of it: the vector, or its parameters."""
        yield self.vector
        yield from self.vector._params or ()

    def names_by_id(self) -> dict[int, tuple[str, ...]]:
        """Return the names below the module of what an optimizer may hold, by its id."""
        names = tuple(self.vector._fqns)
        each = {id(one): (name,) for one, name in zip(self.vector._params or (), names, strict=False)}
        return {id(self.vector): names} | each

    def whole(self, *, gradients: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names below the module with whole values. Collective."""
        shard = self.handle.sharded_grad if gradients else self.vector.data
        if shard is None:
            return
        whole = shard.detach().flatten()
        if self.handle.uses_sharded_strategy:
            parts = [torch.empty_like(whole) for _ in range(self.num_ranks)]
            dist.all_gather(parts, whole.contiguous(), group=self.handle.process_group)
            whole = torch.cat(parts)
        for name, start, shape in self.places():
            yield name, whole[start : start + shape.numel()].view(shape).clone()

    def load(self, prefix: str, values: dict[str, torch.Tensor]) -> None:
        """Set its parameters to `values`; one rank holds the whole vector."""
        with torch.no_grad():
            for name, start, shape in self.places():
                value = values.get(f"{prefix}.{name}" if prefix else name)
                if value is not None:
                    self.vector.data[start : start + shape.numel()].copy_(value.flatten())

    def places(self) -> Iterator[tuple[str, int, torch.Size]]:
        """Yield the names of its parameters with where they begin in the vector, and their shapes."""
        flat, start = self.vector, 0
        own = iter(zip(flat._fqns, flat._shapes, strict=True))
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                name, shape = next(own)
                yield name, start, torch.Size(shape)
            start += numel


def flat_parameters_of(model: nn.Module) -> Iterator[tuple[str, FlatParameters]]:
    """Yield the flat parameters of a model with the names of their modules."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield name, FlatParameters(module._handle)
