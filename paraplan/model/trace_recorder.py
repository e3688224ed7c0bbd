"""Writes down what the operators of a forward pass do: products, what autograd keeps, and which of it tp divides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from paraplan.model.measured import Kept, Measured, Product
from paraplan.model.spec import Attention
from paraplan.model.tp_plan import DividedBy, divided_by, gathers, style_of
from paraplan.model.trace_torch_private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    GROUPED_MM,
    TorchDispatchMode,
    storage_key,
)

EMBEDDING, HEAD = "embedding", "head"

Mark = Literal["column", "row", "gathered", "split"]
"""The dimension of a weight that tensor parallelism divides, and whether the output is gathered; "split": an activation
is divided."""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: torch's, or transformers' own with its weight input first."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class Packed:
    """A tensor that autograd keeps, for as long as it does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Writes down, by scope, every product and every storage that autograd keeps beside parameters and buffers.

    Which tensors tensor parallelism divides follows from the weights that `tp_plan` names: what a weight divided by
    its outputs makes, and all that is made of it, until a weight divided by its inputs has summed it.
    """

    def __init__(self, module: nn.Module, tp_plan: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.measured = Measured()
        self._scope = EMBEDDING
        self._layer = ""
        # Storages are told apart by address, so all that were seen stay alive until the end, without their graphs.
        self._seen = {storage_key(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._parameters = frozenset(self._seen)
        self._kept = set(self._seen)
        self._packed: list[tuple[ReferenceType[Packed], int, Kept, int]] = []
        self._frozen = {storage_key(one) for one in module.parameters() if not one.requires_grad}
        self._weights = {
            storage_key(one): (name.removesuffix(".weight"), one.shape[0] if one.dim() == 3 else 1)
            for name, one in module.named_parameters()
            if one.dim() in (2, 3) and not is_linear(module.get_submodule(name.rpartition(".")[0]))
        }
        self._marks: dict[int, Mark] = {}
        self._inputs: dict[str, dict[int, tuple[Tensor, list[str]]]] = defaultdict(dict)
        for name, parameter in module.named_parameters():
            mark = mark_of(tp_plan, name, parameter.dim())
            if mark is not None:
                self._marks[storage_key(parameter)] = mark

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        formula = flop_registry.get(packet)
        tensors = [one for one in args if isinstance(one, Tensor)]
        tensors += [one for each in args if isinstance(each, list | tuple) for one in each if isinstance(one, Tensor)]
        is_product = formula is not None or packet is GROUPED_MM
        mark = self._mark(tensors, is_product=is_product)
        self._set_mark(out, tensors, mark)
        if packet is GROUPED_MM:  # rows go to one expert each: a plain product's FLOPs
            rows, k = args[0].shape
            n = args[1].shape[-1]
            self._note(Product(2 * rows * k * n, dims=(1, rows, k, n)), tensors)
        elif formula is not None:
            is_attention = packet in _causal_arguments()
            flops = _attention_flops(*args[:3]) if is_attention else int(formula(*args, **(kwargs or {}), out_val=out))
            self._note(_product(packet, args, flops), tensors)
        return out

    def _note(self, product: Product, tensors: list[Tensor]) -> None:
        keys = [storage_key(one) for one in tensors]
        marks = {self._marks.get(key) for key in keys}
        divided: DividedBy | None = "row" if "row" in marks else "column" if marks - {None} else None
        layer, num_experts = next((self._weights[key] for key in keys if key in self._weights), (self._layer, 1))
        if layer != self._layer:
            self._note_input(layer, tensors[0])
        trains = not any(key in self._frozen for key in keys)
        product = replace(product, trains=trains, layer=layer, num_experts=num_experts, divided_by=divided)
        self.measured.products[self._scope].append(product)

    def _mark(self, tensors: list[Tensor], *, is_product: bool) -> Mark | None:
        marks = {self._marks.get(storage_key(one)) for one in tensors}
        if is_product:
            return None if marks & {"row", "gathered"} else "split" if marks & {"column", "split"} else None
        return "split" if "split" in marks else next((one for one in marks if one is not None), None)

    def _set_mark(self, out: Any, tensors: list[Tensor], mark: Mark | None) -> None:
        """Mark what an operator made; what it returns of its operands' storages stays as it is."""
        own = {storage_key(one) for one in tensors}
        for one in out if isinstance(out, list | tuple) else (out,):
            if isinstance(one, Tensor) and (key := storage_key(one)) not in own:
                if mark is None:
                    self._marks.pop(key, None)
                else:
                    self._marks[key] = mark

    def keep(self, tensor: Tensor) -> Packed:
        """Note a tensor that autograd packs."""
        packed, key = Packed(tensor.detach()), storage_key(tensor)  # an output that is kept would keep its graph
        self._seen.setdefault(key, packed.tensor)
        self._packed.append((ref(packed), key, self._kind(tensor), _elements(tensor)))
        return packed

    def _settle(self) -> None:
        """Count what autograd still keeps at the end of a scope, each storage once, whole storages even for views.

        What led to no output, as scores that only choose among tokens, is gone by then.
        """
        for packed, key, kind, elements in self._packed:
            if packed() is not None and key not in self._kept:
                self._kept.add(key)
                self.measured.saved_elements[self._scope][kind] += elements
        self._packed.clear()

    def _kind(self, tensor: Tensor, layers: tuple[str, ...] | None = None) -> Kept:
        is_split = self._marks.get(storage_key(tensor)) == "split"
        return Kept(tensor.element_size(), is_split, layers)

    def same_as(self, scope: str, earlier: str) -> None:
        """Write down for one block what another one did."""
        measured = self.measured

        def renamed(layer: str) -> str:
            return scope + layer[len(earlier) :] if layer.startswith(f"{earlier}.") else layer

        measured.products[scope] = [replace(one, layer=renamed(one.layer)) for one in measured.products[earlier]]
        measured.saved_elements[scope] = measured.saved_elements[earlier].copy()
        self._inputs[scope] = {
            key: (tensor, [renamed(layer) for layer in layers])
            for key, (tensor, layers) in self._inputs[earlier].items()
        }

    @contextmanager
    def watching(self, module: nn.Module, blocks: Mapping[str, nn.Module], *, grows: bool = False) -> Iterator[None]:
        """Follow `module` from scope to scope while its forward runs.

        With `grows` what enters a block has a gradient, as it has where adapters stand before it.
        """
        handles = []
        for name, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(self._note_scope(name)))
            if is_linear(part):
                handles.append(part.register_forward_pre_hook(self._enter_layer(name)))
                handles.append(part.register_forward_hook(self._leave_layer))
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(self._enter(name, grows=grows), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda packed: packed.tensor):
                yield
                self._settle()
        finally:
            for handle in handles:
                handle.remove()
        for scope, inputs in self._inputs.items():
            for key, (tensor, layers) in inputs.items():
                if key not in self._kept:
                    names = tuple(layer.removeprefix(f"{scope}.") for layer in layers)
                    self.measured.layer_inputs[scope][self._kind(tensor, names)] += _elements(tensor)
        for scope, products in self.measured.products.items():
            products[:] = [replace(one, layer=one.layer.removeprefix(f"{scope}.")) for one in products]

    def _note_scope(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.measured.module_scopes.setdefault(name, self._scope)

        return note

    def _enter_layer(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._layer = name
            if args and isinstance(args[0], Tensor):
                self._note_input(name, args[0])

        return enter

    def _note_input(self, layer: str, given: Tensor) -> None:
        if storage_key(given) not in self._parameters:
            self._inputs[self._scope].setdefault(storage_key(given), (given.detach(), []))[1].append(layer)

    def _leave_layer(self, *_: Any) -> None:
        self._layer = ""

    def _enter(self, name: str, *, grows: bool) -> Callable[..., Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._settle()
            self._scope = name
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if self.measured.hidden_size is None and tensors and tensors[0].dim():
                self.measured.hidden_size = tensors[0].shape[-1]
            if grows and tensors and tensors[0].is_floating_point() and not tensors[0].requires_grad:
                tensors[0].requires_grad_()

        return enter

    def _leave(self, *_: Any) -> None:
        self._settle()
        self._scope = HEAD


def mark_of(tp_plan: Mapping[str, str], parameter: str, dims: int) -> Mark | None:
    """Return how a plan divides a parameter, by its own name or that of its module."""
    owner, _, last = parameter.rpartition(".")
    style = style_of(tp_plan, parameter) or (style_of(tp_plan, owner) if last in ("weight", "bias") else None)
    divided = divided_by(style)
    if divided and dims == 3 and "packed_rowwise" in tp_plan.values():  # Llama 4's experts are stored input first
        divided = "column" if divided == "row" else "row"
    if divided == "row":
        return None if last == "bias" else "row"
    return "gathered" if divided and gathers(style) else divided


def _elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _causal_arguments() -> dict[Any, int]:
    """Return attention's kernels with the place of `is_causal` among their arguments."""
    return {FLASH_ATTENTION: 4, EFFICIENT_ATTENTION: 6}


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the FLOPs of both products of attention; torch 2.11 counts none where heads share keys."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[2] * (size + value.shape[3])


def _product(packet: Any, args: Any, flops: int) -> Product:
    aten = torch.ops.aten
    shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
    if packet in (aten.mm, aten.addmm, aten.bmm):
        left, right = shapes[-2:]
        batch = left[0] if len(left) == 3 else 1
        return Product(flops, dims=(batch, left[-2], left[-1], right[-1]))
    if packet is aten.convolution and not args[6]:  # as a product of patches and filters, a group of channels at a time
        groups, (channels, k) = int(args[8]), (shapes[1][0], prod(shapes[1][1:]))
        return Product(flops, dims=(groups, round(flops / (2 * channels * k)), k, channels // groups))
    causal_argument = _causal_arguments().get(packet)
    if causal_argument is not None:
        query, key, value = shapes[:3]
        heads = Attention(
            num_heads=query[1],
            num_kv_heads=key[1],
            qk_head_dim=query[3],
            v_head_dim=value[3],
            is_causal=len(args) > causal_argument and bool(args[causal_argument]),
        )
        return Product(flops, attention=heads, key_length=key[2])
    return Product(flops)
