"""Any `nn.Module` as a `ModelSpec`: built and run once without values, its matmuls and saved tensors written down.

The module stands on torch's meta device, where every operation computes shapes and autograd records what it would
keep. Only the modules of this package that are called `trace...` import torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from paraplan.errors import ModelError
from paraplan.model.factory import call_user_code, load_factory
from paraplan.model.measured import Measured, Product, loops_over_tokens, products_of, saved_of
from paraplan.model.spec import Attention, BlockRun, BlockSpec, Layer, Matmul, ModelSpec, Parameter, SavedTensor
from paraplan.model.trace_on_gpu import AsOnGpu, AsUnderAutocast
from paraplan.model.trace_repeats import skipped_repeats
from paraplan.model.trace_torch_private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    GROUPED_MM,
    TorchDispatchMode,
    storage_key,
)

DEFAULT_SEQ_LENGTH = 1024
_EMBEDDING, _HEAD = "embedding", "head"


def trace_factory(reference: str, *, seq_length: int | None = None, micro_batch_size: int = 1) -> ModelSpec:
    """Return the model of the factory that `reference` names, `file.py:factory` or `package.module:factory`.

    The factory takes no arguments and returns an `nn.Module`; it is called under `torch.device("meta")`.
    Raises ModelError with the factory's own error and the line of the user's file.
    """
    return trace_module(
        load_factory(reference), seq_length=seq_length, micro_batch_size=micro_batch_size, source=reference
    )


def trace_module(
    factory: Callable[[], Any],
    *,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    source: str = "factory",
) -> ModelSpec:
    """Return the model that `factory` builds, measured for `micro_batch_size` sequences of `seq_length` tokens.

    Inputs are those of the module's own `example_inputs(micro_batch_size, seq_length)` (a tensor, a tuple of positional
    or a dict of keyword arguments), else token ids [batch, sequence]. Parameters and activations have `dtype`. What
    grows with the sequence's square is told apart by a second run at half its length. `is_traced` marks the blocks.
    `requires_grad` says which parameters train; the others are stored in the type that the module has them in. Where
    the two are of different types, as peft makes them, both keep theirs, and products are computed as under autocast.
    """
    seq_length = seq_length or DEFAULT_SEQ_LENGTH
    with torch.device("meta"):
        module = call_user_code(source, "the model was built", factory)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{source} returned {type(module).__name__}, expected an nn.Module",
            hint="return the model itself",
        )
    sizes = {name: parameter.element_size() for name, parameter in module.named_parameters()}
    kept_types = {parameter.requires_grad: parameter.dtype for parameter in module.parameters()}
    is_mixed = len(set(kept_types.values())) > 1
    module = call_user_code(
        source, "the model was cast", lambda: module.to(device="meta", dtype=None if is_mixed else dtype)
    ).train()
    blocks = find_blocks(module)
    whole = _measure(module, blocks, source, micro_batch_size=micro_batch_size, seq_length=seq_length)
    half = None
    if seq_length >= 2:
        half = _measure(module, blocks, source, micro_batch_size=micro_batch_size, seq_length=seq_length // 2)
    scopes = _parameters_by_scope(module, blocks, whole, sizes)
    return _assemble(
        module, blocks, scopes, whole, half, source, micro_batch_size=micro_batch_size, seq_length=seq_length
    )


def stack_names(container: nn.Module) -> list[str]:
    """Return the names of the children of `container` that are repeated blocks, in order; none where it is no stack.

    A stack is an `nn.ModuleDict` of modules of one class; in an `nn.Sequential` the longest run of such that have
    parameters; and an `nn.ModuleList`, lists inside it opened, from the first to the last module of a repeated class.
    """
    children = list(_opened(container))
    counts = Counter(type(child) for _, child in children if any(True for _ in child.parameters()))
    if isinstance(container, nn.ModuleList):
        places = [place for place, (_, child) in enumerate(children) if counts[type(child)] > 1]
        return [name for name, _ in children[places[0] : places[-1] + 1]] if places else []
    if isinstance(container, nn.ModuleDict):
        return [name for name, _ in children] if [*counts.values()] == [len(children)] != [1] else []
    if isinstance(container, nn.Sequential):
        runs = [list(run) for _, run in groupby(children, key=lambda child: type(child[1]))]
        runs = [run for run in runs if len(run) > 1 and any(True for _ in run[0][1].parameters())]
        return [name for name, _ in max(runs, key=len)] if runs else []
    return []


def _opened(container: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in container.named_children():
        if isinstance(container, nn.ModuleList) and isinstance(child, nn.ModuleList):
            yield from _opened(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of `module` by name, in order.

    They are those of the largest stack, and of further stacks at least a tenth as large (an encoder beside a decoder).
    A list of one block counts where there is no stack; a model without any is one block.
    """
    stacks = _stacks(module, stack_names) or _stacks(module, _only_child)
    largest = max((size for size, _ in stacks), default=0)
    if largest == 0:
        return {"": module}
    return {name: block for size, children in stacks if 10 * size >= largest for name, block in children.items()}


def _only_child(container: nn.Module) -> list[str]:
    names = [name for name, _ in container.named_children()]
    return names if isinstance(container, nn.ModuleList) and len(names) == 1 else []


def _stacks(module: nn.Module, names_in: Callable[[nn.Module], list[str]]) -> list[tuple[int, dict[str, nn.Module]]]:
    """Return the blocks of the outermost stacks by name, each stack with the number of its parameters."""
    stacks: list[tuple[int, dict[str, nn.Module]]] = []
    inside: tuple[str, ...] = ()
    for path, container in module.named_modules():
        names = [] if f"{path}.".startswith(inside) else names_in(container)
        if names:
            blocks = {f"{path}.{name}" if path else name: container.get_submodule(name) for name in names}
            inside += tuple(f"{name}." for name in blocks)
            size = sum(parameter.numel() for block in blocks.values() for parameter in block.parameters())
            stacks.append((size, blocks))
    return stacks


def _measure(
    module: nn.Module, blocks: Mapping[str, nn.Module], source: str, *, micro_batch_size: int, seq_length: int
) -> Measured:
    def run() -> None:
        args, kwargs = _example_inputs(module, micro_batch_size=micro_batch_size, seq_length=seq_length)
        module(*args, **kwargs)

    def measured(*, skips: bool) -> Measured:
        recorder = _Recorder(module)
        is_mixed = len({parameter.dtype for parameter in module.parameters()}) > 1
        autocast = AsUnderAutocast(torch.bfloat16) if is_mixed else nullcontext()
        repeats = skipped_repeats(module, blocks, recorder) if skips else nullcontext()
        with torch.device("meta"), recorder.watching(module, blocks), repeats, autocast, AsOnGpu(), recorder:
            call_user_code(source, "the model was run without values", run)
        return recorder.measured

    try:
        return measured(skips=True)
    except ModelError:  # code that looks at what a block leaves in itself finds nothing in one that did not run
        return measured(skips=False)


def _example_inputs(
    module: nn.Module, *, micro_batch_size: int, seq_length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = getattr(module, "example_inputs", None)
    if own is None:
        return (torch.zeros(micro_batch_size, seq_length, dtype=torch.long),), {}
    inputs = own(micro_batch_size, seq_length)
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Writes down, by scope, every product and every storage that autograd keeps beside parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.measured = Measured()
        self._scope = _EMBEDDING
        # Storages are told apart by address, so all that were seen stay alive until the end.
        self._seen = {storage_key(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._frozen = {storage_key(one) for one in module.parameters() if not one.requires_grad}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if func.overloadpacket is GROUPED_MM:  # rows go to one expert each: a plain product's FLOPs
            rows, k = args[0].shape
            n = args[1].shape[-1]
            self.measured.products[self._scope].append(Product(2 * rows * k * n, dims=(1, rows, k, n)))
        elif formula is not None:
            packet = func.overloadpacket
            is_attention = packet in _causal_arguments()
            flops = _attention_flops(*args[:3]) if is_attention else int(formula(*args, **(kwargs or {}), out_val=out))
            trains = not any(isinstance(one, Tensor) and storage_key(one) in self._frozen for one in args)
            self.measured.products[self._scope].append(replace(_product(packet, args, flops), trains=trains))
        return out

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd packs, each storage once, whole storages even for views."""
        if storage_key(tensor) not in self._seen:
            self._seen[storage_key(tensor)] = tensor
            size = tensor.element_size()
            self.measured.saved_elements[self._scope][size] += tensor.untyped_storage().nbytes() // size
        return tensor

    def same_as(self, scope: str, earlier: str) -> None:
        """Write down for one block what another one did."""
        measured = self.measured
        measured.products[scope] = list(measured.products[earlier])
        measured.saved_elements[scope] = measured.saved_elements[earlier].copy()

    @contextmanager
    def watching(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow `module` from scope to scope while its forward runs."""
        handles = []
        for name, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(self._note_scope(name)))
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_scope(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.measured.module_scopes.setdefault(name, self._scope)

        return note

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._scope = name
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if self.measured.hidden_size is None and tensors and tensors[0].dim():
                self.measured.hidden_size = tensors[0].shape[-1]

        return enter

    def _leave(self, *_: Any) -> None:
        self._scope = _HEAD


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


def _assemble(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    scopes: Mapping[str, list[Parameter]],
    whole: Measured,
    half: Measured | None,
    source: str,
    *,
    micro_batch_size: int,
    seq_length: int,
) -> ModelSpec:
    specs = {
        scope: _block(
            scope if scope in (_EMBEDDING, _HEAD) else type(blocks[scope]).__name__,
            scopes[scope],
            products_of(scope, whole, half, micro_batch_size=micro_batch_size, seq_length=seq_length),
            saved_of(scope, whole, half, micro_batch_size=micro_batch_size, seq_length=seq_length),
            loops_over_tokens=half is not None and loops_over_tokens(scope, whole, half),
        )
        for scope in (_EMBEDDING, *blocks, _HEAD)
    }
    for scope in specs:  # up to the first that trains there is no backward pass
        if any(parameter.trains for parameter in scopes[scope]):
            break
        specs[scope] = specs[scope].replace(has_backward=False)
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    tables = {id(part.weight): part.num_embeddings for part in embeddings}
    projections = [part for part in module.modules() if isinstance(part, nn.Linear)]
    runs = [(block, len(list(group))) for block, group in groupby(specs[name] for name in blocks)]
    return ModelSpec(
        name=source.rpartition(":")[2] or type(module).__name__,
        model_type=type(module).__name__,
        source=source,
        hidden_size=whole.hidden_size or 1,
        vocab_size=max(tables.values(), default=None),
        tied_embeddings=any(id(part.weight) in tables for part in projections),
        embedding=specs[_EMBEDDING],
        runs=tuple(BlockRun(block=block, count=count) for block, count in runs),
        head=specs[_HEAD],
    )


def _parameters_by_scope(
    module: nn.Module, blocks: Mapping[str, nn.Module], measured: Measured, sizes: Mapping[str, int]
) -> dict[str, list[Parameter]]:
    """Give a parameter to its block, else to the scope in which its module ran first, to the head if it never ran.

    `sizes` are the bytes of an element of each as the module has it.
    """
    scopes: dict[str, list[Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        block = next((block for block in blocks if not block or name.startswith(f"{block}.")), None)
        owner = name.rpartition(".")[0]
        scope = block if block is not None else measured.module_scopes.get(owner, _HEAD)
        if scope in blocks and block is None:  # shared by blocks, owned by none
            scope = _EMBEDDING
        short = name[len(block) + 1 :] if block else name
        frozen = None if parameter.requires_grad else float(parameter.numel() * sizes[name])
        layer = layer_of(module.get_submodule(owner))
        scopes[scope].append(Parameter(name=short, shape=tuple(parameter.shape), layer=layer, frozen_bytes=frozen))
    return scopes


def layer_of(owner: nn.Module) -> Layer:
    """Return the kind of a module that holds parameters."""
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D":  # transformers' own, its weight input first
        return "linear"
    if "Conv" in type(owner).__name__:
        return "other"
    return "experts" if any(one.dim() == 3 for one in owner.parameters(recurse=False)) else "other"


def _block(
    kind: str,
    parameters: list[Parameter],
    products: tuple[list[Matmul], list[Attention]],
    saved: list[SavedTensor],
    *,
    loops_over_tokens: bool,
) -> BlockSpec:
    matmuls, attentions = products
    return BlockSpec(
        kind=kind,
        parameters=tuple(parameters),
        matmuls=tuple(matmuls),
        attention=attentions[0] if attentions else None,
        cross_attention=attentions[1] if len(attentions) > 1 else None,
        saved=tuple(saved),
        saved_fused=tuple(saved),
        tp_limit=1,
        is_traced=True,
        loops_over_tokens=loops_over_tokens,
    )
