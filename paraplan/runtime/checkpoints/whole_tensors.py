"""The whole of a tensor whose parts lie on several ranks."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.split.cut import Cut
from paraplan.runtime.split.group import TensorGroup


def whole_tensor(tensor: torch.Tensor, cut: Cut | None, mesh: Mesh) -> torch.Tensor:
    """Return the whole of `tensor`: gathered over `dp` where it is sharded, and over `tp` by `cut`."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if cut is None:
        return whole
    group = TensorGroup(size=mesh.size("tp"), index=mesh.coordinate("tp"), handle=mesh.group("tp"))
    return group.gather(whole, cut)
