"""What torch functions do to the parts of a split tensor.

Most functions need no rule of their own: they run on the parts as they are, and comparing the shapes of their results
with those that the whole tensors would give tells which dimension of the result is split. Functions with sizes among
their arguments need other sizes, and functions along the split dimension need care; those are in `size_rules`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from paraplan.runtime.shards.group import TensorGroup, gather_from_region
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import (
    VOCABULARY,
    SplitError,
    SplitTensor,
    as_operand,
    split_operands,
)
from paraplan.runtime.split.head_rules import split_attention, split_convolution, split_einsum
from paraplan.runtime.split.replay import (
    RESHAPES,
    Call,
    Outcome,
    described,
)
from paraplan.runtime.split.size_rules import SIZE_RULES, Rule
from paraplan.runtime.split.vocabulary_loss import split_cross_entropy
from paraplan.runtime.torch_private import pytree

_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype})
_RULES: dict[str, Rule] = SIZE_RULES | {
    "cross_entropy": split_cross_entropy,
    "scaled_dot_product_attention": split_attention,
    "einsum": split_einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), split_convolution),
}
_KEPT_SHAPES = 4096
_LOGGER = logging.getLogger(__name__)


def run_on_parts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` returns, split tensors in and out. Raises `SplitError` where parts do not suffice.

    Logits split by vocabulary are then gathered: what a loss does with them is not known beforehand.
    """
    call = described(func, args, kwargs)
    if call is not None and (known := call.outcome) is not None:
        return _replayed(func, args, kwargs, call, known)
    try:
        return _run(func, args, kwargs, call)
    except SplitError as error:
        operands = split_operands(args, kwargs)
        if not operands[0].group.gathers or any(operand.source != VOCABULARY for operand in operands):
            raise
        _say_once(_name(func), operands[0].group, error.message)
        whole_args, whole_kwargs = _whole(args), _whole(kwargs)
    return func(*whole_args, **whole_kwargs)


def _say_once(name: str, group: TensorGroup, reason: str) -> None:
    if name in group.gathered:
        return
    group.gathered.add(name)
    if group.index == 0:
        _LOGGER.warning(
            "tp=%d: %s needs the logits of all ranks, and they are gathered for it (%s); "
            "torch.nn.functional.cross_entropy does without",
            *(group.size, name, reason),
        )


def _whole(tree: Any) -> Any:
    def whole(leaf: Any) -> Any:
        return gather_from_region(leaf.local, leaf.sharding, leaf.group) if isinstance(leaf, SplitTensor) else leaf

    return pytree.tree_map(whole, tree)


def _replayed(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, known: Outcome
) -> Any:
    """Return what a call comes to that was made before with operands of these sizes and cuts."""
    first = call.first
    if known.local_shape is not None:
        return known.wrap(first.local.reshape(known.local_shape), first)
    if call.has_plain:
        run_args = _local(args, first, aligned=known.aligned)
        run_kwargs = _local(kwargs, first, aligned=known.aligned)
    else:
        run_args = [leaf.local if type(leaf) is SplitTensor else _parts(leaf) for leaf in args]
        run_kwargs = _parts(kwargs) if kwargs else kwargs
    return known.wrap(func(*run_args, **run_kwargs), first)


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None) -> Any:
    name = _name(func)
    if name in OF_THE_WHOLE:
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in OF_THE_PART:
        return func(*_parts(args), **_parts(kwargs))
    operands = split_operands(args, kwargs)
    first = operands[0]
    _check_written(name, first, args, kwargs)
    rule = _RULES.get(name)
    if rule is not None:
        answer = rule(name, args, kwargs)
        if answer is not None:
            if call is not None and name in RESHAPES:
                call.remember(answer, reshapes=True)
            return answer
    _check_alike(name, operands)
    _check_dimension(name, first, args, kwargs)
    aligned = name in ELEMENTWISE or name in ("scaled_dot_product_attention", "baddbmm")
    run_args = _local(args, first, aligned=aligned)
    run_kwargs = _local(kwargs, first, aligned=aligned)
    try:
        result = func(*run_args, **run_kwargs)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:  # sizes of whole and split operands differ
        if _on_several_devices(run_args, run_kwargs):
            raise  # the model itself does not run in this way
        raise SplitError(
            f"{name} does not run on parts of the output of {first.source}: {str(error).splitlines()[0]}",
            source=first.source,
            is_mixed=True,
        ) from error
    keeps = name in ELEMENTWISE and isinstance(result, torch.Tensor) and result.shape == first.local.shape
    if keeps:
        found = first if result is first.local else SplitTensor(result, first.sharding, first.group, first.source)
    else:
        found = _wrap(name, result, _whole_shapes(name, func, args, kwargs, first.group), first)
    if call is not None:
        call.remember(found, keeps=keeps, aligned=aligned)
    return found


def _on_several_devices(*values: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return len({tensor.device for tensor in tensors}) > 1


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # a property: shape, dtype and the like
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _parts(tree: Any) -> Any:
    if type(tree) in _LEAVES:
        return tree
    return _mapped(lambda leaf: leaf.local if isinstance(leaf, SplitTensor) else leaf, tree)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a nest with its leaves changed: `pytree.tree_map`, which takes longer, for nests that arguments are."""
    kind = type(tree)
    if kind is tuple:
        return tuple([_mapped(change, entry) for entry in tree])
    if kind is list:
        return [_mapped(change, entry) for entry in tree]
    if kind is dict:
        return {name: _mapped(change, entry) for name, entry in tree.items()}
    return change(tree) if kind in _LEAVES or isinstance(tree, torch.Tensor) else pytree.tree_map(change, tree)


def _local(tree: Any, first: SplitTensor, *, aligned: bool) -> Any:
    def local(leaf: Any) -> Any:
        if isinstance(leaf, SplitTensor):
            return leaf.local
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = as_operand(leaf, first)
        return _narrowed(leaf, first) if aligned else leaf

    return _mapped(local, tree)


def _narrowed(plain: torch.Tensor, split: SplitTensor) -> torch.Tensor:
    """Return the part of a whole operand that broadcasts against this rank's part of `split`."""
    dim = split.sharding.dim - split.ndim + plain.ndim
    if dim < 0 or plain.shape[dim] == 1:
        return plain
    if plain.shape[dim] != split.sharding.length:
        return plain
    return split.sharding.at(dim).part(plain, split.group.index)


def _check_written(name: str, split: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where a function writes what is split into a whole tensor, which would differ between the ranks then."""
    is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    targets = [kwargs.get("out"), args[0] if is_in_place and args else None]
    if any(isinstance(target, torch.Tensor) and not isinstance(target, SplitTensor) for target in targets):
        raise SplitError(
            f"{name} writes the output of {split.source} into a whole tensor", source=split.source, is_mixed=True
        )


def _check_alike(name: str, operands: list[SplitTensor]) -> None:
    """Raise where operands are split along different dimensions, or the same one in other segments."""
    first = operands[0]
    for other in operands[1:]:
        same_place = (
            other.sharding.dim - other.ndim == first.sharding.dim - first.ndim
            or other.sharding.dim == first.sharding.dim
        )
        same_length = other.sharding.length == first.sharding.length
        if not same_place or (
            same_length
            and (other.sharding.segments, other.sharding.repeats) != (first.sharding.segments, first.sharding.repeats)
        ):
            raise SplitError(
                f"{name} meets the output of {first.source} (shape {tuple(first.shape)}, split along dimension "
                f"{first.sharding.dim}) and that of {other.source} (shape {tuple(other.shape)}, split along dimension "
                f"{other.sharding.dim})",
                source=other.source,
            )


def _check_dimension(name: str, split: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where a function that keeps shapes works along the split dimension: shapes would not tell."""
    along: range | tuple[int, ...] = ()
    if name in LAST_DIMENSIONS:
        normalized = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        along = range(split.ndim - len(normalized), split.ndim)
    elif name in ALONG:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        along = (dim % split.ndim,) if isinstance(dim, int) else ()
    if split.sharding.dim in along:
        raise SplitError(
            f"{name} works along the output of {split.source}, which would be split",
            source=split.source,
            is_mixed=True,
        )


def _whole_shapes(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: TensorGroup
) -> list[tuple[int, ...] | None]:
    """Return the shapes of the results for whole tensors, found on the meta device and remembered."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    key = (name, *[_described(leaf) for leaf in leaves], str(structure))
    if key not in group.shapes:
        if len(group.shapes) >= _KEPT_SHAPES:  # sequences of ever other lengths
            group.shapes.clear()
        meta_args, meta_kwargs = pytree.tree_unflatten([_meta(leaf) for leaf in leaves], structure)
        with torch.no_grad():
            results = pytree.tree_leaves(func(*meta_args, **meta_kwargs))
        group.shapes[key] = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in results]
    shapes: list[tuple[int, ...] | None] = group.shapes[key]
    return shapes


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _wrap(name: str, result: Any, whole_shapes: list[tuple[int, ...] | None], first: SplitTensor) -> Any:
    leaves, structure = pytree.tree_flatten(result)
    wrapped = [
        _wrap_one(name, leaf, shape, first) if isinstance(leaf, torch.Tensor) and shape is not None else leaf
        for leaf, shape in zip(leaves, whole_shapes, strict=True)
    ]
    return pytree.tree_unflatten(wrapped, structure)


def _wrap_one(name: str, local: torch.Tensor, whole: tuple[int, ...], first: SplitTensor) -> SplitTensor:
    differing = [dim for dim, (part, all_) in enumerate(zip(local.shape, whole, strict=True)) if part != all_]
    dim = differing[0] if differing else 0
    if not differing:
        fits = False
    elif not first.sharding.divides:
        fits = (whole[dim], local.shape[dim]) == (first.sharding.length, first.local.shape[first.sharding.dim])
    else:
        fits = whole[dim] == local.shape[dim] * first.sharding.size
    if len(differing) > 1 or not fits:
        raise SplitError(
            f"{name} mixes what the ranks hold of the output of {first.source}",
            source=first.source,
            is_mixed=True,
        )
    sharding = first.sharding.at(dim)
    if whole[dim] != first.sharding.length:
        # Grouped queries: more heads than the first operand has; both are cut in the plainest way.
        if len(first.sharding.segments) > 1 or first.sharding.repeats > 1:
            raise SplitError(f"{name} changes the length of the split dimension", source=first.source)
        sharding = Sharding(dim=dim, segments=(whole[dim],), size=first.sharding.size)
    return SplitTensor(local, sharding, first.group, first.source)


SplitTensor.run_on_parts = staticmethod(run_on_parts)


ELEMENTWISE = frozenset(
    {
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub", "radd", "rmul", "neg"),
        *("true_divide", "divide", "multiply", "subtract", "pow", "square", "sqrt", "rsqrt", "exp", "log", "abs"),
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
        *("__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__rpow__", "__neg__", "sin", "cos", "erf"),
        *("tanh", "sigmoid", "relu", "relu_", "silu", "gelu", "mish", "softplus", "elu", "leaky_relu", "hardtanh"),
        *("relu6", "logsigmoid", "threshold", "maximum", "minimum", "lerp", "where", "masked_fill", "masked_fill_"),
        *("copy_", "addcmul", "addcdiv", "clamp", "clamp_min", "clamp_max", "nan_to_num"),
        *("dropout", "alpha_dropout", "feature_alpha_dropout", "to", "float", "half", "double", "bfloat16", "type"),
        *("type_as", "contiguous", "clone", "detach", "logical_not", "logical_and", "logical_or", "eq", "ne", "lt"),
        *("le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__"),
    }
)
"""The result has the shape and the split of the (only) split operand, and other operands broadcast against it."""

LAST_DIMENSIONS = frozenset({"layer_norm", "rms_norm"})
"""They work along the last dimensions, whose sizes they name."""

ALONG = frozenset({"softmax", "log_softmax", "cumsum", "cumprod", "normalize", "sort", "argsort", "flip", "softmin"})
"""They keep shapes, and work along a dimension."""

IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
"""They write into their first operand, beside those whose names end in `_`."""

OF_THE_WHOLE = frozenset(
    {
        *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "dtype", "device", "layout"),
        *("is_floating_point", "is_complex", "is_cuda", "is_meta", "is_cpu", "is_sparse", "is_nested", "is_quantized"),
        *("is_mps", "is_xpu", "element_size", "itemsize", "get_device", "names"),
    }
)
"""They answer for the whole tensor."""

OF_THE_PART = frozenset(
    {
        *("requires_grad", "grad_fn", "is_leaf", "retains_grad", "stride", "is_contiguous", "storage_offset"),
        *("register_hook", "new_zeros", "new_ones", "new_full", "new_tensor", "_version", "is_inference"),
    }
)
"""They answer for the part, or make tensors that are whole."""
