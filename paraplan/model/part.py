"""`Part`: a piece of a block (parameters, matmuls, saved tensors), and the small pieces that all others are sums of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import (
    ActivationSplit,
    AttentionKernel,
    BlockModule,
    ElementType,
    Layer,
    Matmul,
    Parameter,
    SavedTensor,
)

Split = Literal["column", "row", "none"]
KeptBy = Literal["both", "modules", "fused"]


@dataclass(frozen=True)
class Part:
    """A piece of a block; pieces add up. `saved` and `saved_fused` are those of `BlockSpec`."""

    parameters: tuple[Parameter, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    saved_fused: tuple[SavedTensor, ...] = ()

    def __add__(self, other: Part) -> Part:
        return Part(
            self.parameters + other.parameters,
            self.matmuls + other.matmuls,
            self.saved + other.saved,
            self.saved_fused + other.saved_fused,
        )

    def inside(self, module: BlockModule) -> Part:
        """Return the part with all that it keeps as a module of a block."""
        saved, fused = (tuple(one.replace(module=module) for one in each) for each in (self.saved, self.saved_fused))
        return replace(self, saved=saved, saved_fused=fused)

    def read_by(self, role: SavedRole, layers: tuple[str, ...]) -> Part:
        """Return the part with layers that a kept tensor is kept for too."""
        saved, fused = (
            tuple(
                one.replace(weights_of=(*(one.weights_of or ()), *layers)) if one.role == role else one for one in each
            )
            for each in (self.saved, self.saved_fused)
        )
        return replace(self, saved=saved, saved_fused=fused)


def kept(
    role: SavedRole,
    elements: float = 0.0,
    *,
    pairs: float = 0.0,
    element_type: ElementType = "activation",
    split: ActivationSplit = "none",
    kernels: tuple[AttentionKernel, ...] | None = None,
    in_attention_core: bool = False,
    absent_in_fp32: bool = False,
    is_shared_by_batch: bool = False,
    is_powered: bool = False,
    num_readers: int | None = None,
    is_turned: bool = False,
    weights_of: tuple[str, ...] | None = None,
    by: KeptBy = "both",
) -> Part:
    """Return a part that keeps one tensor: `elements` per token and `pairs` per pair of query and key token."""
    tensor = SavedTensor(
        role=role,
        elements_per_token=elements,
        elements_per_token_pair=pairs,
        element_type=element_type,
        split=split,
        kernels=kernels,
        in_attention_core=in_attention_core,
        absent_in_fp32=absent_in_fp32,
        is_shared_by_batch=is_shared_by_batch,
        is_powered=is_powered,
        num_readers=num_readers,
        is_turned=is_turned,
        weights_of=weights_of,
    )
    return Part(saved=(tensor,) if by != "fused" else (), saved_fused=(tensor,) if by != "modules" else ())


def weight(name: str, *shape: int, tp_dim: int | None = None, layer: Layer = "other") -> Part:
    """Return a part that is one parameter."""
    return Part(parameters=(Parameter(name=name, shape=shape, tp_dim=tp_dim, layer=layer),))


def linear(
    name: str,
    k: int,
    n: int,
    *,
    bias: bool,
    split: Split = "none",
    input_first: bool = False,
    layer: Layer = "linear",
    weighs: bool = False,
) -> Part:
    """Return a linear layer from `k` to `n` features; its input is kept by whoever makes it.

    The weight is [n, k] as in torch's Linear, [k, n] with `input_first` (transformers' Conv1D). A row-parallel bias
    stays whole on each rank: it is added once, after the sum over ranks (Shoeybi et al. 2019, section 3). `layer` is
    "other" where the model's code multiplies by a parameter of its own; `weighs` is that of `Matmul`.
    """
    dims = {"column": 1, "row": 0, "none": None} if input_first else {"column": 0, "row": 1, "none": None}
    part = weight(f"{name}.weight", *((k, n) if input_first else (n, k)), tp_dim=dims[split], layer=layer)
    if bias:
        part += weight(f"{name}.bias", n, tp_dim=0 if split == "column" else None, layer=layer)
    return part + Part(matmuls=(Matmul(name=name, k=k, n=n, split=split, weighs=weighs),))


def dropout(role: SavedRole, rate: float, elements: float, *, split: ActivationSplit = "sequence") -> Part:
    """Return the mask of a dropout, one byte an element, nothing where the rate is 0."""
    return kept(role, elements, element_type="mask", split=split) if rate > 0 else Part()
