"""Random numbers of code that ranks run on parts of tensors: who draws, and from which state of the generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.torch_private import FakeTensor, TorchDispatchMode, pytree


@contextmanager
def own_random_numbers(group: TensorGroup, device: torch.device, *, is_active: bool) -> Iterator[None]:
    """Draw this rank's own random numbers in this context, and leave the common sequence one draw further.

    The seed is drawn from the sequence that all ranks of the group share, so that a recomputed block, which starts from
    the same state, draws the same again.
    """
    if not is_active or group.handle is None:
        yield
        return
    drawn = torch.randint(2**48, ())
    if isinstance(drawn, FakeTensor):  # a run without values
        yield
        return
    seed = int(drawn)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(seed * group.size + group.index)
        yield


DROPOUTS = frozenset({"dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"})
DROPOUTS |= {"feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d"}
"""Functions that draw one number for each element, or each part, of the tensor that they are given."""
DRAW_BY_ARGUMENTS = DROPOUTS | {"scaled_dot_product_attention"}
"""Functions that draw by their arguments `p` and `training`, which may change from call to call."""
_DETERMINISTIC = frozenset({"linear", "matmul", "__matmul__", "bmm", "einsum", "layer_norm", "rms_norm", "softmax"})
_DETERMINISTIC |= {"transpose", "view", "reshape", "permute", "flatten", "unflatten", "__getitem__", "chunk", "split"}
_KEPT = 4096


class DrawsSeen(TorchDispatchMode):
    """Notes in `found` whether an operation in this context draws from a generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`."""
        self.found |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


class OtherDrawsNoted(TorchFunctionMode):
    """Notes in `group.draws` that code in this context draws numbers other than those of dropout.

    On parts without `SplitTensor` around them it would draw the same for the parts of every rank.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in DROPOUTS:  # parts that it is given are noted where they are met
            return func(*args, **(kwargs or {}))
        with DrawsSeen() as seen:
            result = func(*args, **(kwargs or {}))
        self._group.draws |= seen.found
        return result


def draws_in_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, otherwise: bool) -> bool:
    """Whether a call draws random numbers: its arguments say so, for functions without such arguments `otherwise`."""
    if name == "scaled_dot_product_attention":
        return bool((kwargs.get("dropout_p") or (args[4] if len(args) > 4 else 0.0)) > 0.0)
    if name not in DRAW_BY_ARGUMENTS:
        return otherwise
    if kwargs.get("p", args[1] if len(args) > 1 else 0.5) == 0.0:
        return False
    return bool(kwargs.get("training", args[2] if len(args) > 2 else True))


def is_seen_to_draw(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: TensorGroup
) -> bool:
    """Whether a function comes to operations that draw from a generator; tried on the meta device, and remembered."""
    if name in DRAW_BY_ARGUMENTS or name in _DETERMINISTIC:
        return False
    meta_args, meta_kwargs, key = without_values("draws", name, args, kwargs)
    if key not in group.shapes:
        make_room(group.shapes)
        seen = DrawsSeen()
        # A function that does not run there has shown what it draws before it fails, or fails with the parts too.
        with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError), seen:
            func(*meta_args, **(meta_kwargs | ({"generator": None} if "generator" in meta_kwargs else {})))
        group.shapes[key] = seen.found
    return bool(group.shapes[key])


def without_values(
    what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments of a call on the meta device, and a key by which to remember `what` of it."""

    def described(leaf: Any) -> Any:
        return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)

    def meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf

    leaves, structure = pytree.tree_flatten((args, kwargs))
    meta_args, meta_kwargs = pytree.tree_unflatten([meta(leaf) for leaf in leaves], structure)
    return meta_args, meta_kwargs, (what, name, *[described(leaf) for leaf in leaves], str(structure))


def make_room(remembered: dict[Any, Any]) -> None:
    """Forget all where much is remembered: sequences of ever other lengths."""
    if len(remembered) >= _KEPT:
        remembered.clear()
