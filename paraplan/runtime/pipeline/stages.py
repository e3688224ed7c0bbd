"""A pipeline stage: cut from the model, and called with what the stage before has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.data.batches import MicroBatch
from paraplan.runtime.precision import compute_context
from paraplan.runtime.rank_part import ParallelContext
from paraplan.runtime.step.loss import called_with_batch
from paraplan.runtime.structure.chain import HINT
from paraplan.runtime.structure.dataflow import Registered, named_tensors
from paraplan.runtime.structure.model_structure import BlockChain, HiddenShape
from paraplan.runtime.torch_private import is_view, pytree


class StageEndError(Exception):
    """Ends a forward pass after the last block of a stage, with its hidden state; it never leaves the stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("end of the stage")
        self.hidden = hidden


class _StandIn(nn.Module):
    """Stands for a module of another stage; attributes that it lacks are those of `meta_model`, that module on meta."""

    def __init__(self, meta_model: nn.Module) -> None:
        super().__init__()
        # Not through nn.Module's own setter: the meta model is no part of the stage.
        self.__dict__["meta_model"] = meta_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["meta_model"], name)


class IdentityBlock(_StandIn):
    """A block of another stage: returns its hidden state as it came, in the form of a block's output."""

    def __init__(self, meta_model: nn.Module, chain: BlockChain) -> None:
        super().__init__(meta_model)
        self.__dict__["hidden_argument"] = chain.hidden_argument
        self.__dict__["num_outputs"] = chain.num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state."""
        return self.output(self.hidden_of(args, kwargs))

    def hidden_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden state among the arguments of a block."""
        where = self.__dict__["hidden_argument"]
        return args[where] if isinstance(where, int) else kwargs[where]

    def output(self, hidden: Any) -> Any:
        """Return `hidden` as a block would."""
        num_outputs = self.__dict__["num_outputs"]
        return hidden if num_outputs is None else (hidden, *[None] * (num_outputs - 1))


class ReceiveBlock(IdentityBlock):
    """The block before a stage: returns what the stage received, `carried` beside the hidden state."""

    def __init__(self, meta_model: nn.Module, chain: BlockChain, carried: tuple[int, ...]) -> None:
        super().__init__(meta_model, chain)
        self.__dict__["copies"], self.__dict__["carried"] = chain.writes_hidden, carried

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was received, whatever comes in; a copy of the hidden state where blocks write into it."""
        hidden, *others = self.__dict__["received"]
        output = self.output(hidden.clone() if self.__dict__["copies"] else hidden)
        if not others:
            return output
        found = dict(zip(self.__dict__["carried"], others, strict=True))
        return tuple(found.get(number, one) for number, one in enumerate(output))

    def hold(self, received: tuple[torch.Tensor, ...]) -> None:
        """Keep `received` for the next forward pass; nothing lets it go."""
        self.__dict__["received"] = received


class SendBlock(IdentityBlock):
    """The block after a stage: ends the forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageEndError` with the hidden state."""
        raise StageEndError(self.hidden_of(args, kwargs))


class ZerosStub(_StandIn):
    """A module around the blocks whose output nothing in this stage depends on: returns zeros of the right shape.

    So do its methods, its parts and their parameters.
    """

    def __init__(self, meta_model: nn.Module, chain: BlockChain, device: torch.device) -> None:
        super().__init__(meta_model)
        self.__dict__["chain"] = chain
        self.__dict__["zeros_device"] = device

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, nn.Module):
            return ZerosStub(value, self.__dict__["chain"], self.__dict__["zeros_device"])
        if isinstance(value, torch.Tensor):
            return self._zeros(value)
        if isinstance(value, MethodType) and value.__self__ is self.__dict__["meta_model"]:
            return lambda *args, **kwargs: self._shapes_of(value, args, kwargs)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros that take no memory, in the shape of the module's output."""
        return self._shapes_of(self.__dict__["meta_model"], args, kwargs)

    def _shapes_of(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().to("meta"), (args, kwargs))
        with torch.no_grad():
            output = function(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._zeros, output)

    def _zeros(self, leaf: torch.Tensor) -> torch.Tensor:
        dtype = self.__dict__["chain"].own_dtype(leaf.dtype)
        return torch.zeros((), dtype=dtype, device=self.__dict__["zeros_device"]).expand(leaf.shape)


@dataclass(frozen=True)
class CutStage:
    """The result of `cut_stage`: where the received hidden state goes in (None for the first stage), and the tensors.

    `names` maps the name of a parameter in the whole model to its name in the stage, and `buffers` that of a buffer
    that the stage uses; they differ where one of several tied modules stayed.
    """

    inject: ReceiveBlock | None
    names: dict[str, str]
    buffers: dict[str, str]


def check_stages(chain: BlockChain, bounds: Sequence[tuple[int, int]], *, num_ranks: int) -> None:
    """Raise `UnsupportedPlanError` where any of the stages with these `bounds` would not compute what the model does.

    Every rank asks about all stages, so that all of them end with the same error. Of the stages rank i of `num_ranks`
    holds i, i + num_ranks and so on.
    """
    problem = chain.uses.problem
    if problem is not None:
        raise UnsupportedPlanError(problem, hint=HINT)
    for start, end in bounds:
        _check_stage(chain, start=start, end=end)
    holders = Counter(
        (name, stage % num_ranks)
        for stage, (start, end) in enumerate(bounds)
        for name in chain.uses.of(start, end) & chain.uses.written_before
    )
    twice = sorted(name for (name, _), count in holders.items() if count > 1)
    if twice:
        raise UnsupportedPlanError(
            f"the forward pass writes {twice[0]}, which several stages of one rank use",
            hint="use a schedule with one stage for each rank (1f1b)",
        )


def _check_stage(chain: BlockChain, *, start: int, end: int) -> None:
    """Raise `UnsupportedPlanError` where a stage uses a tensor that lies in blocks of other stages alone."""
    elsewhere = tuple(f"{name}." for at, name in enumerate(chain.stack.names) if not start <= at < end)
    paths = _paths(chain.meta_model)
    for name in sorted(chain.uses.of(start, end)):
        if all(path.startswith(elsewhere) for path in paths[name]):
            raise UnsupportedPlanError(
                f"blocks {start} to {end - 1} use {name}, which lies in a block of another stage", hint=HINT
            )


def _paths(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of every tensor of `model`, by the first of them."""
    registered = Registered.of(model)
    first = {id(tensor): name for name, tensor in [*registered.tensors.items(), *registered.parameters.items()]}
    found: dict[str, list[str]] = {}
    for path, tensor in [*model.named_parameters(remove_duplicate=False), *named_tensors(model)]:
        found.setdefault(first[id(tensor)], []).append(path)
    return found


def cut_stage(model: nn.Module, chain: BlockChain, *, start: int, end: int, device: torch.device) -> CutStage:
    """Leave in `model` what a stage with blocks `start`..`end` - 1 uses.

    Raises `UnsupportedPlanError` where the stage uses a parameter that lies inside a block of another stage.
    """
    _check_stage(chain, start=start, end=end)
    whole = Registered.of(model)
    needed = {id(whole.parameters[name]): name for name in sorted(chain.uses.parameters.of(start, end))}
    tensors = {id(whole.tensors[name]): name for name in sorted(chain.uses.tensors.of(start, end))}
    written = {id(whole.parameters[name]) for name in chain.uses.written_before & whole.parameters.keys()}
    inject = _replace_blocks(model, chain, start=start, end=end)
    _replace_surroundings(model, chain, {*needed, *tensors}, device)
    _drop_leftovers(model, set(needed), written, device)
    return CutStage(
        inject=inject,
        names={needed[id(parameter)]: name for name, parameter in model.named_parameters()},
        buffers={tensors[id(buffer)]: name for name, buffer in model.named_buffers() if id(buffer) in tensors},
    )


def _replace_blocks(model: nn.Module, chain: BlockChain, *, start: int, end: int) -> ReceiveBlock | None:
    inject = None
    for index, name in enumerate(chain.stack.names):
        if start <= index < end:
            continue
        meta_model = chain.meta_model.get_submodule(name)
        stand_in = IdentityBlock(meta_model, chain)
        if index == start - 1:
            stand_in = inject = ReceiveBlock(meta_model, chain, chain.carried[index] if chain.carried else ())
        elif index == end:
            stand_in = SendBlock(meta_model, chain)
        model.set_submodule(name, stand_in)
    return inject


def _replace_surroundings(model: nn.Module, chain: BlockChain, needed: set[int], device: torch.device) -> None:
    """Replace the modules outside the blocks that hold parameters, and nothing that the stage needs."""
    blocks = tuple(f"{name}." for name in chain.stack.names)
    replaced: tuple[str, ...] = ()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        holds_blocks = any(block.startswith(f"{name}.") or not name for block in blocks)
        if holds_blocks or f"{name}.".startswith(blocks + replaced):
            continue
        has_own = any(True for _ in module.parameters(recurse=False))
        held = [*module.parameters(), *(tensor for _, tensor in named_tensors(module))]
        if has_own and not any(id(tensor) in needed for tensor in held):
            model.set_submodule(name, ZerosStub(chain.meta_model.get_submodule(name), chain, device))
            replaced += (f"{name}.",)


def _drop_leftovers(model: nn.Module, needed: set[int], written: set[int], device: torch.device) -> None:
    """Put zeros without memory in place of parameters that stand beside needed ones, and that the stage does not need.

    They are plain attributes, so that no optimizer and no replica sees them; what is computed from them goes nowhere.
    Those that the forward pass writes have memory of their own.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in needed:
                zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                delattr(module, name)
                setattr(module, name, zeros.clone() if id(parameter) in written else zeros)


class StageList(nn.ModuleList):
    """The stages that one rank holds, several of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `UsageError`: the schedule calls them one by one."""
        raise called_with_batch("some stages of a pipeline")


class StageModule(nn.Module):
    """A stage as torch's schedules call it: a hidden state in and out, on the last stage the loss out.

    What blocks return for the next beside the hidden state is passed on with it: `carried` of the last one's output.

    The micro-batches of a step are handed over beforehand, whole, and the schedule passes their numbers: every stage
    makes its own masks and positions from the inputs.
    """

    def __init__(
        self, model: nn.Module, inject: ReceiveBlock | None, parallel: ParallelContext, carried: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self._carried = carried
        self._output: tuple[Any, ...] = ()
        self._inject = inject if inject is None else [inject]  # in a list: it is no second child of this module
        self._parallel = parallel
        self.micro_batches: Sequence[MicroBatch] = ()
        self.received: tuple[HiddenShape, ...] = ()
        self.sent: tuple[HiddenShape, ...] = ()

    def keep_output(self, _: nn.Module, __: Any, output: Any) -> None:
        """Keep what the last block of the stage returns, as its forward hook, until it is sent."""
        self._output = output

    def forward(self, *received: torch.Tensor, number: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Return the hidden state after this stage, or the loss, of micro-batch `number`.

        `received` is what the stage before has returned; the first stage is given the number in its place.
        """
        if number is None or len(received) != max(len(self.received), 1) or kwargs:
            raise called_with_batch("one stage of a pipeline")
        micro_batch = self.micro_batches[int(number)]
        if self._inject is not None:
            self._inject[0].hold(_ContiguousGradients.apply(*received))  # type: ignore[no-untyped-call]
        try:
            with compute_context(self._parallel.precision, self._parallel.mesh.world.device):
                return self._parallel.loss.run(self.model, micro_batch.inputs, micro_batch).reshape(1)
        except StageEndError as end:
            given = (end.hidden, *(self._output[number] for number in self._carried))
            sent = [_sendable(one, expected) for one, expected in zip(given, self.sent, strict=True)]
            return tuple(sent) if self._carried else sent[0]
        finally:
            self._output = ()
            if self._inject is not None:
                self._inject[0].hold(())


def _sendable(passed: torch.Tensor, expected: HiddenShape) -> torch.Tensor:
    """Return what passes on as the next stage expects it: a buffer of another size would end the process in gloo."""
    if passed.shape != expected.shape:
        raise UsageError(
            f"this stage's hidden state has shape {tuple(passed.shape)}, and {expected.shape} was found for these "
            "inputs without values",
            hint="use pp=1 for this model",
        )
    sendable = passed.to(expected.dtype).contiguous()
    if torch.is_grad_enabled() and not sendable.requires_grad:  # a gradient comes back for all that was sent
        return sendable.detach().clone().requires_grad_()
    # A backward pass in halves (zero bubble) detaches it in place, which a view does not allow.
    return sendable.clone() if is_view(sendable) else sendable


class _ContiguousGradients(torch.autograd.Function):
    """Returns tensors as they are, and for each of them a gradient in the layout in which it can be sent."""

    @staticmethod
    def forward(_: Any, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.view_as(one) for one in received)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.contiguous() for one in gradients)
