"""Predictions and generation under every plan: what the model returns, for the sequences that each rank gave."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paraplan.errors import UsageError
from paraplan.runtime.data.batches import (
    MicroBatch,
    batch_size,
    is_of_batch,
    split_batch,
    to_device,
    with_rows_repeated,
)
from paraplan.runtime.exchange import gather_json
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.micro_batching import MicroBatching
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.split.context_parallel import Context
from paraplan.runtime.split.logits import gathered_classes
from paraplan.runtime.step.chunked_loss import ChunkedLogits
from paraplan.runtime.structure.outputs import described_outputs, map_outputs, numbered_outputs, outputs_of
from paraplan.runtime.structure.snapshots import modes
from paraplan.runtime.torch_private import pytree

Options = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of `generate` behind its inputs, and those by name."""


class Predictor:
    """Predictions of the model of one engine, without a graph and without dropout, on every rank as in one process."""

    def __init__(self, part: RankPart, mesh: Mesh, batches: MicroBatching) -> None:
        self._part = part
        self._mesh = mesh
        self._batches = batches

    def predict(self, inputs: Any) -> Any:
        """Return what the model returns for `inputs`, the share of this rank, on every rank of a pipeline.

        Tensors have the batch first where there are several micro-batches. Objects that are not tensors, numbers, texts
        or nests of them (caches) are None. Raises `UsageError` for tensors that cannot be joined.
        """
        device, execution = self._mesh.world.device, self._part.execution
        inputs = with_rows_repeated(inputs, None)
        division = self._batches.divider.divide_any(self._batches.meet("predict", batch_size(inputs, None)))
        pieces = split_batch(to_device(inputs, device), None, division)
        found: dict[int, Any] = {}

        def keep(outputs: Any, number: int) -> torch.Tensor:
            context = execution.loss.context
            found[number] = map_outputs(lambda _, tensor: whole_output(tensor, context), _plain_outputs(outputs))
            return torch.zeros((), device=device)

        pieces = [replace(piece, targets=number) for number, piece in enumerate(pieces)]
        with modes(self._part.module, training=False), execution.loss.replaced(keep):
            execution.evaluate(pieces)
        joined = _join([found[number] for number in sorted(found)], pieces) if found else None
        return joined if self._mesh.group("pp") is None else _from_the_last_stage(joined, self._mesh)

    def generate(self, inputs: Any, options: Options) -> Any:
        """Return what the model's own `generate` returns for `inputs`, with `predict` for each call of the model.

        Sequences are filled up on the right to what the plan divides, which a causal model does not see. Ranks of one
        copy of the model draw the same random numbers. Raises `UsageError` where there is no `generate`.
        """
        model, plan, mesh = self._part.model or self._part.module, self._mesh.plan, self._mesh
        method = getattr(type(model), "generate", None)
        if method is None:
            raise UsageError(
                f"{type(model).__name__} has no generate",
                hint="give it a method that calls the model for the next token, or call engine.predict in a loop",
            )
        arguments, given = options[0], dict(options[1])
        if "synced_gpus" in inspect.signature(method).parameters:  # GenerationMixin of transformers
            if given.get("use_cache"):
                raise UsageError(
                    "use_cache=True, but caches do not pass through a plan",
                    hint="leave use_cache out of engine.generate",
                )
            given |= {"use_cache": False, "synced_gpus": mesh.size("dp") > 1}
        stand_in = _stand_in(model, _filled_up(self.predict, plan.cp * (plan.tp if plan.sequence_parallel else 1)))
        inputs = to_device(inputs, mesh.world.device)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            seed = torch.randint(2**31, (1,)).to(mesh.world.device)
            if mesh.world.is_distributed:
                dist.broadcast(seed, src=0)
            seed_generators(int(seed) + mesh.coordinate("dp"))
            if isinstance(inputs, dict):
                return method(stand_in, *arguments, **inputs, **given)
            return method(stand_in, *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)), *arguments, **given)


def whole_output(tensor: torch.Tensor, context: Context | None = None) -> torch.Tensor:
    """Return the whole of an output of which the ranks of `tp` and `cp` hold parts; all of them call it."""
    with torch.DisableTorchFunction():  # the mode that meets logits of some classes
        tensor = gathered_classes(tensor)
    if context is not None and context.is_local and tensor.ndim > 1 and tensor.shape[1] == context.num_own:
        tensor = context.gather(tensor.detach(), 1)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain_outputs(outputs: Any) -> Any:
    def plain(leaf: Any) -> Any:
        if isinstance(leaf, ChunkedLogits):
            return leaf.whole()
        is_kept = isinstance(leaf, (torch.Tensor, bool, int, float, str)) or is_dataclass(leaf)
        return leaf if is_kept else None

    # Caches are leaves here, also those that transformers has taught torch to look into.
    return pytree.tree_map(plain, outputs, is_leaf=lambda node: not isinstance(node, (dict, list, tuple)))


def _join(outputs: Sequence[Any], pieces: Sequence[MicroBatch]) -> Any:
    """Return the outputs of all micro-batches as one; of those that no sequence is left for nothing."""
    if len(outputs) == 1 and pieces[0].num_sequences:
        return outputs[0]
    by_piece = [numbered_outputs(output) for output in outputs]

    def join(number: int, first: torch.Tensor) -> torch.Tensor:
        rows = next(leaf.shape[0] for leaf in pytree.tree_leaves(pieces[0].inputs) if is_of_batch(leaf))
        if not first.ndim or first.shape[0] != rows:
            raise UsageError(
                f"the model returns a tensor of shape {tuple(first.shape)} for {rows} sequences, and those of "
                f"{len(pieces)} micro-batches cannot be joined to one of all",
                hint="return tensors with the batch first, and no loss, or predict with one micro-batch",
            )
        parts = [tensors[number] for tensors, piece in zip(by_piece, pieces, strict=True) if piece.num_sequences]
        return torch.cat(parts) if parts else first[:0]

    return map_outputs(join, outputs[0])


def _from_the_last_stage(outputs: Any, mesh: Mesh) -> Any:
    """Return on every rank of a pipeline what its last rank has."""
    group = mesh.group("pp")
    assert group is not None
    source = dist.get_global_rank(group, mesh.size("pp") - 1)
    held: list[torch.Tensor] = []
    form = gather_json(described_outputs(outputs, held) if mesh.is_last_stage else None, group)[-1]
    values = iter(held)

    def receive(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        value = next(values, None)
        value = torch.empty(shape, dtype=dtype, device=mesh.world.device) if value is None else value.contiguous()
        dist.broadcast(value.view(-1).view(torch.uint8), src=source, group=group)  # backends lack some types
        return value

    return outputs_of(form, receive)


Forward = Callable[[Any], Any]


def _stand_in(model: nn.Module, forward: Forward) -> nn.Module:
    """Return an object of a model's class that shares what the model holds, and whose forward is another one."""
    made: nn.Module = object.__new__(type(model))
    # Hooks are for the module's own forward: those of FSDP gather its parameters.
    own = {name: OrderedDict() if name.endswith("_hooks") else held for name, held in vars(model).items()}
    made.__dict__ = own | {"training": False, "_compiled_call_impl": None}
    signature = inspect.signature(type(model).forward)

    @functools.wraps(type(model).forward)  # transformers reads which arguments there are
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return forward(args[0] if len(args) == 1 else args)
        named = signature.bind(made, *args, **kwargs).arguments
        return forward(dict(list(named.items())[1 : 1 + len(args)]) | kwargs)

    made.__dict__["forward"] = call
    return made


def _filled_up(forward: Forward, multiple: int) -> Forward:
    def call(inputs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
        tokens = leaves[0].shape[1] if leaves else 0
        missing = -tokens % multiple
        if isinstance(inputs, dict) and multiple > 1:
            inputs = {name: held for name, held in inputs.items() if name != "logits_to_keep"}  # counts from the end
        if not missing:
            return forward(inputs)

        def fill(leaf: Any) -> Any:
            is_of_tokens = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == tokens
            return functional.pad(leaf, [0, 0] * (leaf.ndim - 2) + [0, missing]) if is_of_tokens else leaf

        def trim(leaf: Any) -> Any:
            is_filled = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == tokens + missing
            return leaf[:, :tokens] if is_filled else leaf

        filled = pytree.tree_map(fill, inputs)
        return pytree.tree_map(trim, forward(filled))

    return call
