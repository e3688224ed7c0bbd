"""Names of torch that tracing uses and torch does not promise to keep, and why there is no public way.

All was seen in torch 2.11 and 2.13. `tests/test_torch_contract.py` asks each new torch for it. The runtime, which needs
some of it too, takes it from here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

RE_EXPORTED = {
    "TorchDispatchMode": "the only way to see every operator below autograd; torch documents it under this path",
    "pytree": "tensors in nested containers; torch has no public module for it",
}
"""Names that are handed on as they are, and why."""

pytree = _pytree

GROUPED_MM: Any = torch.ops.aten._grouped_mm
"""The grouped product of expert layers. `functional.grouped_mm` is public, but modes are shown this operator."""

FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention
"""The kernel that GPUs take without a mask. `scaled_dot_product_attention` takes another one on meta and on the CPU."""

EFFICIENT_ATTENTION: Any = torch.ops.aten._scaled_dot_product_efficient_attention
"""The kernel that GPUs take with a mask or in fp32; see `FLASH_ATTENTION`."""


def storage_key(held: torch.Tensor | torch.UntypedStorage) -> int:
    """Return what tells the storage of a tensor from all others that are alive.

    `data_ptr()` is 0 for all storages without values, and one storage has several objects in Python.
    """
    storage = held.untyped_storage() if isinstance(held, torch.Tensor) else held
    return int(storage._cdata)


def schema_of(operator: Any) -> Any:
    """Return what an operator takes and returns, None for calls that take functions. Only its name is public."""
    return getattr(operator, "_schema", None)


def all_taken_for_nonzero() -> AbstractContextManager[Any]:
    """Have `nonzero` and indexing by a mask return as much as they can, of tensors without values, in this context."""
    patch: AbstractContextManager[Any] = symbolic_shapes.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    return patch
