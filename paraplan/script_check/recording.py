"""The notes of a process of a check while its script trains, and how it ends the script."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paraplan.script_check.batches import print_of, tensors_in
from paraplan.script_check.copies import Copies
from paraplan.script_check.deepspeed_engine import EngineParameters
from paraplan.script_check.module_values import ModuleValues
from paraplan.script_check.readings import Given
from paraplan.script_check.records import ProcessRecord, ScriptRequest, StepRecord
from paraplan.script_check.sources import FollowSources, Sources, is_sample, marks_of, place_of_caller
from paraplan.script_check.stillness import NO_DROPOUT, held_still
from paraplan.script_check.torch_private import (
    around_backward,
    around_clipping,
    around_models,
    follow_again,
    is_transformed,
)
from paraplan.script_check.whole import Names, rates_of

_PATIENCE_S = 10.0


class Recorder:
    """Follows the models, losses and optimizers of the script of this process."""

    def __init__(self, request: ScriptRequest, given: Given | None) -> None:
        self.request = request
        self.sources = Sources(replay=given.replay if given is not None else None)
        self.mode = FollowSources(self.sources)
        self._given = given
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: Names | None = None
        self._split: set[str] = set()
        self._order: dict[str, None] = {}
        self._steps: list[StepRecord] = []
        self._notes: dict[str, None] = {}
        self._made_smaller: dict[str, None] = {}
        self._losses: list[float] = []
        self._norm: float | None = None
        self._sizes: dict[int, float] = {}
        self._rates: tuple[dict[str, float], ...] = ()
        self._has_gradients = False
        self._num_nested = 0
        self._is_noted = False
        self._rounding = 0.0
        self._groups: dict[tuple[str, tuple[int, ...]], None] = {}
        self._num_skipped = 0
        self._is_unsettled = False
        self._given_prints: list[str] = []
        self._copies = Copies()
        self._values = ModuleValues(self.sources, is_whole=request.notes_outputs)
        self._began = time.monotonic()

    def follow(self) -> None:
        """Start to follow: calls of models, backward passes, clipping, steps of optimizers."""
        around_models(self._follow_models)
        around_backward(self._follow_backward)
        around_clipping(self._follow_clipping)
        follow_again(self.mode)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def _follow_models(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        sources = self.sources

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_transformed():
                sources.use_transformed((args, kwargs))
                with sources.inside():
                    return plain(module, *args, **kwargs)
            self._note_rounding(args)
            if self._is_unsettled and sources.is_of_script:
                self._settle()
            is_model = sources.is_of_script and any(True for _ in module.parameters())
            if not is_model:
                if sources.is_watching and self._names is not None:
                    self._names.meet_buffers(module)
                name = None if self._steps or self._names is None else self._names.of_modules.get(id(module))
                if name is not None:
                    self._values.given(name, args)
                result = plain(module, *args, **kwargs)
                if name is not None:
                    self._values.gives(name, result)
                return result
            marks = marks_of(tensor for _, tensor in tensors_in((args, kwargs)))
            if not torch.is_grad_enabled():
                with sources.inside():
                    result = plain(module, *args, **kwargs)
                self._copies.called(module, result, len(self._steps) + 1, marks)
                return result
            self._meet(module)
            args, kwargs = sources.use((args, kwargs), f"{place_of_caller()} {type(module).__name__}")
            with sources.inside():
                self._given_prints.append(print_of([one for one in tensors_in((args, kwargs)) if is_sample(one[1])]))
            if self._names is not None and not self._losses:
                held = f"held/{len(self._steps) + 1}/"
                self._tensors |= {held + name: value for name, value in self._names.buffers().items()}
            with sources.inside_model():
                result = plain(module, *args, **kwargs)
            if not any(tensor.requires_grad for _, tensor in tensors_in(result)):
                self._copies.called(module, result, len(self._steps) + 1, marks)
            return result

        return call

    def _note_rounding(self, values: Iterable[Any]) -> None:
        """Note how coarse the types are in which models compute: of what modules are given, and of autocast."""
        types = [value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        if torch.is_autocast_enabled("cpu"):
            types.append(torch.get_autocast_dtype("cpu"))
        self._rounding = max([self._rounding, *(torch.finfo(kind).eps for kind in types)])

    def _follow_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if self.request.loss_scale != 1:
                with self.sources.inside():
                    tensors = roots = [root * self.request.loss_scale for root in roots]
            if self._is_noted:  # a closure that is evaluated again, as by a line search
                with self.sources.inside():
                    plain(tensors, *args, **kwargs)
                return
            value = sum(float(root.detach()) for root in roots if root.numel() == 1)
            if self._has_gradients:  # clipped, and not stepped by
                self._num_skipped += 1
                self._losses, self._norm, self._has_gradients, self._sizes = [], None, False, {}
            with self.sources.inside_model():
                plain(tensors, *args, **kwargs)
            self._losses.append(value)
            if self.request.notes_passes and not self._steps and self._names is not None:
                with self.sources.inside(), torch.no_grad():
                    values = self._names.values(gradients=True)
                self._tensors |= {f"pass/1/{len(self._losses)}/{name}": one for name, one in values.of.items()}

        return backward

    def _follow_clipping(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            self._take_gradients()
            self._sizes = self._sizes or (self._names.sizes_of_gradients() if self._names is not None else {})
            with self.sources.inside():
                norm = plain(*args, **kwargs)
            if plain.__name__ == "_clip_grads_with_norm_":  # which is told the norm
                norm = kwargs.get("total_norm", args[2] if len(args) > 2 else None)
            if norm is not None:
                self._norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            return norm

        return clip

    def _meet(self, model: nn.Module) -> None:
        """Note a model when it is first called in training: what it starts with."""
        if any(model is one for one in self._models):
            return
        self._models.append(model)
        self._names = self._names or Names()
        engine = self._names.meet(model)
        if engine is not None:
            engine.follow(self._before_step, self._after_engine)
        for text in held_still(model):
            self.note(text)
        with self.sources.inside(), torch.no_grad():
            if self._given is not None:
                self._names.load({name: value for name, value in self._given.start.items() if name not in self._order})
            values = self._names.values(gradients=False)
            self._tensors |= {f"buffer/0/{name}": value for name, value in self._names.buffers().items()}
        self._tensors |= {f"start/{name}": value for name, value in values.of.items() if name not in self._order}
        self._order |= dict.fromkeys(values.of)
        self._split |= set(values.split)

    def note(self, text: str) -> None:
        """Note what the answer is to say beside its verdict."""
        self._notes.setdefault(text)

    def note_smaller(self, text: str) -> None:
        """Note a model that was made smaller."""
        self._made_smaller.setdefault(text)

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Note a step before it is made; where it is given a closure, once that has made the gradients."""
        self._num_nested += 1
        if self._num_nested > 1:
            return None
        if self._is_unsettled:
            self._settle()
        if not any(optimizer is one for one in self._optimizers):
            self._optimizers.append(optimizer)
        self._is_noted = False
        given = [*arguments[1:2], keywords.get("closure")]
        closure = next((one for one in given if callable(one)), None)
        self._rates = tuple(rates_of(group) for group in optimizer.param_groups)
        if closure is None:
            self._note_step(optimizer)
            self.sources._depth += 1
            return None
        self._set_rates(optimizer)  # of a closure's step, too: LBFGS reads its own before it evaluates
        followed = self._followed(closure, optimizer, self.sources._depth)
        self.sources._depth += 1
        if arguments[1:2] == (closure,):
            return (arguments[0], followed, *arguments[2:]), keywords
        return arguments, keywords | {"closure": followed}

    def _followed(self, closure: Callable[[], Any], optimizer: Any, depth: int) -> Callable[[], Any]:
        """Return a closure after whose first evaluation the step is noted: later ones are made of other weights."""

        def evaluate() -> Any:
            within, self.sources._depth = self.sources._depth, depth
            loss = closure()
            self.sources._depth = within
            if not self._is_noted:
                self._note_step(optimizer)
            return loss if self.request.loss_scale == 1 or loss is None else loss * self.request.loss_scale

        return evaluate

    def _note_step(self, optimizer: Any) -> None:
        """Note gradients, losses and rates of a step, and let one process step with the rates of ranks."""
        self._is_noted = True
        self._take_gradients(optimizer)
        self._set_rates(optimizer)
        buffers = self._names.buffers() if self._names is not None else {}
        self._tensors |= {f"buffer/{len(self._steps) + 1}/{name}": value for name, value in buffers.items()}
        self._steps.append(
            StepRecord(
                optimizer=next(number for number, one in enumerate(self._optimizers) if one is optimizer),
                losses=tuple(self._losses),
                norm=self._norm,
                clipped_to=self._names.clipped_to(self._sizes) if self._names is not None else None,
                rates=self._rates,
                num_skipped=self._num_skipped,
                members=self._members(optimizer),
            )
        )

    def _members(self, optimizer: Any) -> tuple[tuple[str, ...], ...]:
        names = self._names or Names()
        return tuple(names.held_by(group["params"]) for group in optimizer.param_groups)

    def _set_rates(self, optimizer: Any) -> None:
        """Let one process step with the rates of the ranks: schedules count batches, of which it has others."""
        if self._given is None or len(self._steps) >= len(self._given.rates):
            return
        by_name = self._given.rates[len(self._steps)]
        for group, names in zip(optimizer.param_groups, self._members(optimizer), strict=True):
            rates = next((by_name[name] for name in names if name in by_name), {})
            for name, value in rates_of(group).items():
                theirs = rates.get(name, value)
                if theirs == value:
                    continue
                self.note(
                    f"the optimizer's {name} is {theirs:g} on ranks, and {value:g} in one process, which took theirs"
                )
                key, _, place = name.partition(" ")
                if place:
                    group[key] = tuple(theirs if str(number) == place else one for number, one in enumerate(group[key]))
                elif isinstance(group[key], torch.Tensor):
                    group[key].fill_(theirs)
                else:
                    group[key] = type(group[key])(theirs)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._num_nested -= 1
        if self._num_nested:
            return
        if not self._is_noted:
            self._note_step(optimizer)
        self._is_noted = False
        self.sources._depth -= 1
        self._losses, self._norm, self._has_gradients, self._num_skipped, self._sizes = [], None, False, 0, {}
        self.sources.end_step()
        self._is_unsettled = True

    def _after_engine(self, engine: EngineParameters) -> None:
        """Note the norm by which an engine clips as it steps, and that it has stepped."""
        if self._num_nested == 1 and self._steps:
            self._steps[-1] = self._steps[-1].replace(norm=engine.norm)
        self._after_step(engine)

    def _settle(self) -> None:
        """Note the parameters that the last step and what came after it have made, and end after the last one."""
        assert self._names is not None
        self._is_unsettled = False
        with self.sources.inside(), torch.no_grad():
            values = self._names.values(gradients=False, trained=True)
        self._tensors |= {f"parameter/{len(self._steps)}/{name}": value for name, value in values.of.items()}
        if len(self._steps) >= self._num_wanted:
            self.end()

    @property
    def _num_wanted(self) -> int:
        return self.request.num_steps * max(1, len(self._optimizers))

    def _take_gradients(self, optimizer: Any = None) -> None:
        """Note gradients after the last reduction and before they are clipped; once a step."""
        if self._has_gradients:
            return
        self._has_gradients = True
        with self.sources.inside(), torch.no_grad():
            if self._names is None:
                self._names = Names()
            ids = None
            if optimizer is not None:
                self._names.add(parameter for group in optimizer.param_groups for parameter in group["params"])
                ids = _ids_of(optimizer)
            values = self._names.values(gradients=True, of=ids)
        self._order |= dict.fromkeys(values.of)
        self._split |= set(values.split)
        self._tensors |= {f"gradient/{len(self._steps) + 1}/{name}": value for name, value in values.of.items()}

    def note_group(self, name: str, ranks: tuple[int, ...]) -> None:
        """Note an axis of a mesh, or a group without a name, that the script makes."""
        self._groups.setdefault((name, ranks))

    def stop(self) -> None:
        """Follow no more, and write what was noted: the script has ended, or failed."""
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._is_unsettled and (sys.exc_info()[0] is None or not self._split):
            self._settle()
        self.write(is_whole=False)

    def end(self) -> NoReturn:
        """Write what was noted, and end this process once all ranks have done so.

        A rank that makes fewer steps than others waits for them in vain, and they for it: not for long.
        """
        self.write(is_whole=True)
        sys.stdout.flush()
        sys.stderr.flush()
        folder, num_ranks = Path(self.request.folder), int(os.environ.get("WORLD_SIZE", "1"))
        patience_s = _PATIENCE_S + time.monotonic() - self._began
        began = time.monotonic()
        while len(list(folder.glob("[0-9]*.json"))) < num_ranks and time.monotonic() - began < patience_s:
            time.sleep(0.01)
        for child in multiprocessing.active_children():  # workers of data loaders
            child.kill()
        os._exit(0)

    def write(self, *, is_whole: bool) -> None:
        """Write the record of this process."""
        rank = int(os.environ.get("RANK", "0"))
        if self.sources.has_dropout:
            self.note(NO_DROPOUT)
        with self.sources.inside():
            sources, read = self.sources.records()
            tensors = self._tensors | read | {f"noted/{key}": value for key, value in self._values.tensors.items()}
            record = ProcessRecord(
                rank=rank,
                num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
                names=tuple(self._order),
                split=tuple(sorted(self._split)),
                num_replicas=self._names.num_replicas if self._names is not None else None,
                axes=self._names.axes if self._names is not None else {},
                groups=tuple(self._groups),
                steps=tuple(self._steps),
                sources=sources,
                notes=tuple(self._notes),
                made_smaller=tuple(self._made_smaller),
                given=tuple(self._given_prints),
                outputs=self._values.sums,
                noted=tuple(self._values.tensors),
                copies=self._copies.records(),
                rounding=self._rounding,
                taken=tuple(self.sources.taken),
                gathers_rows=self.sources.gathers_rows,
                is_whole=is_whole,
            )
            path = Path(self.request.folder) / f"{rank}"
            # not save_file: in ranks that are forked its temporary files may have one name
            path.with_suffix(".safetensors").write_bytes(
                save({key: value.cpu().contiguous() for key, value in tensors.items()})
            )
            path.with_suffix(".json").write_text(record.to_json(), encoding="utf-8")


def _ids_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
