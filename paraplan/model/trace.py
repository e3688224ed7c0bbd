"""Any `nn.Module` as a `ModelSpec`: built and run once without values, its matmuls and saved tensors written down.

The module stands on torch's meta device, where every operation computes shapes and autograd records what it would
keep. Only the modules of this package that are called `trace...` import torch.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.errors import ModelError
from paraplan.model.factory import call_user_code, check_method_names, load_factory, with_user_errors
from paraplan.model.measured import Measured, loops_over_tokens, products_of, saved_of, with_reasons
from paraplan.model.spec import Attention, BlockRun, BlockSpec, Layer, Matmul, ModelSpec, Parameter, SavedTensor
from paraplan.model.tp_plan import style_of
from paraplan.model.trace_on_gpu import AsOnGpu, AsUnderAutocast
from paraplan.model.trace_recorder import EMBEDDING, HEAD, Recorder, is_linear, mark_of
from paraplan.model.trace_repeats import skipped_repeats
from paraplan.model.trace_shapes import MetaShapes
from paraplan.model.trace_torch_private import all_taken_for_nonzero

DEFAULT_SEQ_LENGTH = 1024


def trace_factory(reference: str, *, seq_length: int | None = None, micro_batch_size: int = 1) -> ModelSpec:
    """Return the model of the factory that `reference` names, `file.py:factory` or `package.module:factory`.

    The factory takes no arguments and returns an `nn.Module`; it is called under `torch.device("meta")`.
    Raises ModelError with the factory's own error and the line of the user's file.
    """
    return trace_module(
        load_factory(reference), seq_length=seq_length, micro_batch_size=micro_batch_size, source=reference
    )


def trace_given(given: Callable[..., Any], *, seq_length: int | None = None, micro_batch_size: int = 1) -> ModelSpec:
    """Return the model of a module, which stays as it is, or of a class or function that makes one; see `trace_module`.

    Raises ModelError where the class or function needs arguments or fails.
    """
    factory, name = given, getattr(given, "__name__", type(given).__name__)
    if isinstance(given, nn.Module):
        values = [*given.parameters(), *given.buffers()]
        shapes = {id(one): one.to("meta") for one in values if not isinstance(one, nn.Parameter)}
        shapes |= {
            id(one): nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)
            for one in values
            if isinstance(one, nn.Parameter)
        }
        factory = partial(copy.deepcopy, given, shapes)
    return trace_module(factory, seq_length=seq_length, micro_batch_size=micro_batch_size, source=name)


def trace_module(
    factory: Callable[[], Any],
    *,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    source: str = "factory",
    tells_reasons: bool = True,
) -> ModelSpec:
    """Return the model that `factory` builds, measured for `micro_batch_size` sequences of `seq_length` tokens.

    Inputs are those of the module's own `example_inputs(micro_batch_size, seq_length)` (a tensor, a tuple of positional
    or a dict of keyword arguments), else token ids [batch, sequence]. Parameters and activations have `dtype`. What
    grows with the sequence's square is told apart by a second run at half its length. `is_traced` marks the blocks.
    `requires_grad` says which parameters train; the others are stored in the type that the module has them in. Where
    the two are of different types, as peft makes them, both keep theirs, and products are computed as under autocast.
    Where all train, another run without gradients of weights tells what is kept for those alone, unless `tells_reasons`
    is False: it takes half of the time, and what freezing saves is then not known.
    """
    seq_length = seq_length or DEFAULT_SEQ_LENGTH
    with torch.device("meta"), _without_warnings():
        module = call_user_code(source, "the model was built", factory)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{source} returned {type(module).__name__}, expected an nn.Module",
            hint="return the model itself",
        )
    check_method_names(source, module, nn.Module)
    traced = partial(_traced, module, source, seq_length=seq_length, micro_batch_size=micro_batch_size)
    with _without_warnings():
        spec: ModelSpec = with_user_errors(
            source, "the model was traced", partial(traced, dtype=dtype, tells_reasons=tells_reasons)
        )
    return spec


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out warnings of code that runs without values: they say nothing about a training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _traced(
    module: nn.Module,
    source: str,
    *,
    seq_length: int,
    micro_batch_size: int,
    dtype: torch.dtype,
    tells_reasons: bool,
) -> ModelSpec:
    """Return a module on the meta device as a `ModelSpec`; see `trace_module`."""
    sizes = {name: parameter.element_size() for name, parameter in module.named_parameters()}
    kept_types = {parameter.requires_grad: parameter.dtype for parameter in module.parameters()}
    is_mixed = len(set(kept_types.values())) > 1
    module = call_user_code(
        source, "the model was cast", lambda: module.to(device="meta", dtype=None if is_mixed else dtype)
    ).train()
    blocks = find_blocks(module)
    measured = partial(
        _explained if tells_reasons else _measure, module, blocks, source, micro_batch_size=micro_batch_size
    )
    whole = measured(seq_length=seq_length)
    half = measured(seq_length=seq_length // 2) if seq_length >= 2 else None
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


def _explained(
    module: nn.Module, blocks: Mapping[str, nn.Module], source: str, *, micro_batch_size: int, seq_length: int
) -> Measured:
    measure = partial(_measure, module, blocks, source, micro_batch_size=micro_batch_size, seq_length=seq_length)
    whole = measure()
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return whole
    module.requires_grad_(False)
    try:
        return with_reasons(whole, measure(grows=True))
    finally:
        module.requires_grad_(True)


def _measure(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    source: str,
    *,
    micro_batch_size: int,
    seq_length: int,
    grows: bool = False,
) -> Measured:
    def run() -> Any:
        args, kwargs = _example_inputs(module, micro_batch_size=micro_batch_size, seq_length=seq_length)
        return module(*args, **kwargs)

    def measured(*, skips: bool) -> Measured:
        recorder = Recorder(module, _tp_plan(module))
        is_mixed = len({parameter.dtype for parameter in module.parameters()}) > 1
        autocast = AsUnderAutocast(torch.bfloat16) if is_mixed else nullcontext()
        repeats = skipped_repeats(module, blocks, recorder) if skips else nullcontext()
        with (
            torch.device("meta"),
            MetaShapes(),
            all_taken_for_nonzero(),
            recorder.watching(module, blocks, grows=grows),
            repeats,
            autocast,
            AsOnGpu(),
            recorder,
        ):
            output = call_user_code(source, "the model was run without values", run)
        del output  # what it keeps for a backward pass has been counted
        return recorder.measured

    try:
        return measured(skips=True)
    except ModelError:  # code that looks at what a block leaves in itself finds nothing in one that did not run
        return measured(skips=False)


def _tp_plan(module: nn.Module) -> Mapping[str, str]:
    """Return the styles that a model or its config names for its layers, by patterns of names, as transformers does."""
    own = getattr(module, "tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return own if isinstance(own, Mapping) else {}


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
            scope if scope in (EMBEDDING, HEAD) else type(blocks[scope]).__name__,
            scopes[scope],
            products_of(scope, whole, half, micro_batch_size=micro_batch_size, seq_length=seq_length),
            saved_of(scope, whole, half, micro_batch_size=micro_batch_size, seq_length=seq_length),
            loops_over_tokens=half is not None and loops_over_tokens(scope, whole, half),
        )
        for scope in (EMBEDDING, *blocks, HEAD)
    }
    if any(specs[name].tp_limit != 1 for name in blocks):  # what the model's plan does not name stays whole
        specs = {scope: one if one.tp_limit != 1 else one.replace(tp_limit=None) for scope, one in specs.items()}
    for scope in specs:  # up to the first that trains there is no backward pass
        if any(parameter.trains for parameter in scopes[scope]):
            break
        specs[scope] = specs[scope].replace(has_backward=False)
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    tables = {id(part.weight): part.num_embeddings for part in embeddings}
    projections = [part for part in module.modules() if isinstance(part, nn.Linear)]
    runs = [(block, len(list(group))) for block, group in groupby(specs[name] for name in blocks)]
    return ModelSpec(
        name=type(module).__name__,
        model_type=type(module).__name__,
        source=source,
        hidden_size=whole.hidden_size or 1,
        vocab_size=max(tables.values(), default=None),
        tied_embeddings=any(id(part.weight) in tables for part in projections),
        embedding=specs[EMBEDDING],
        runs=tuple(BlockRun(block=block, count=count) for block, count in runs),
        head=specs[HEAD],
    )


def _parameters_by_scope(
    module: nn.Module, blocks: Mapping[str, nn.Module], measured: Measured, sizes: Mapping[str, int]
) -> dict[str, list[Parameter]]:
    """Give a parameter to its block, else to the scope in which its module ran first, to the head if it never ran.

    `sizes` are the bytes of an element of each as the module has it.
    """
    scopes: dict[str, list[Parameter]] = defaultdict(list)
    plan = _tp_plan(module)
    for name, parameter in module.named_parameters():
        block = next((block for block in blocks if not block or name.startswith(f"{block}.")), None)
        owner = name.rpartition(".")[0]
        scope = block if block is not None else measured.module_scopes.get(owner, HEAD)
        if scope in blocks and block is None:  # shared by blocks, owned by none
            scope = EMBEDDING
        short = name[len(block) + 1 :] if block else name
        frozen = None if parameter.requires_grad else float(parameter.numel() * sizes[name])
        layer = layer_of(module.get_submodule(owner))
        scopes[scope].append(
            Parameter(
                name=short,
                shape=tuple(parameter.shape),
                layer=layer,
                tp_dim=_tp_dim(plan, name, parameter),
                is_expert=layer == "experts",
                frozen_bytes=frozen,
            )
        )
    return scopes


def _tp_dim(plan: Mapping[str, str], name: str, parameter: Tensor) -> int | None:
    mark = mark_of(plan, name, parameter.dim())
    if mark is None:
        return 0 if (style_of(plan, name.removesuffix(".weight")) or "").startswith("embedding") else None
    return parameter.dim() - 1 if mark == "row" or parameter.dim() == 1 else parameter.dim() - 2


def layer_of(owner: nn.Module) -> Layer:
    """Return the kind of a module that holds parameters."""
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if is_linear(owner):
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
    of_tokens = next((one for one in attentions if one.num_keys is None), None)
    return BlockSpec(
        kind=kind,
        parameters=tuple(parameters),
        matmuls=tuple(matmuls),
        attention=of_tokens,
        cross_attention=next((one for one in attentions if one is not of_tokens), None),
        saved=tuple(saved),
        saved_fused=tuple(saved),
        tp_limit=_tp_limit(parameters, matmuls, attentions),
        is_traced=True,
        loops_over_tokens=loops_over_tokens,
    )


def _tp_limit(parameters: list[Parameter], matmuls: list[Matmul], attentions: list[Attention]) -> int | None:
    """Return what tensor parallelism has to divide of a block: 1 where no plan says how, None where all stays whole."""
    divided = {one.shape[one.tp_dim] for one in parameters if one.tp_dim is not None}
    if not divided:
        return 1
    by_heads = any(one.split != "none" for one in matmuls) and len(attentions) > 0
    return gcd(*divided, *(count for one in attentions if by_heads for count in (one.num_heads, one.num_kv_heads)))
