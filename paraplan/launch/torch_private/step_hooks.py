"""Marks of a training step in torch, for scripts as they are: collectives, backward passes, optimizers, data loaders.

Only the hooks of optimizers are public. It runs in ranks, without this package where their interpreters have none.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FUNCTIONAL = "torch.distributed._functional_collectives"


def mark_steps(marks: Any) -> None:
    """Have torch call `marks` (a `StepMarks`); now, or once the script has imported it."""
    if "torch" in sys.modules:
        _hook(marks)
    else:
        sys.meta_path.insert(0, _AfterImport("torch", lambda: _hook(marks)))


class _AfterImport:
    """Finds one module as the others do, and calls `then` once it is imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of the module that is waited for, None for others."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        plain = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            self.then()

        loader.exec_module = exec_module
        return spec


def _hook(marks: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if not dist.is_available():
        return
    work: Any = dist.Work
    work.wait = _waiting(marks, work.wait)
    whole: Any = dist
    whole._broadcast_coalesced = _waiting(marks, whole._broadcast_coalesced)  # how DDP shares buffers
    loader: Any = _BaseDataLoaderIter
    loader.__next__ = _loading(marks, loader.__next__)
    torch.autograd.backward = _backward(marks, torch.autograd.backward)
    began: list[tuple[float, float]] = []
    register_optimizer_step_pre_hook(lambda *_: began.append(marks.optimizer_begins()))
    register_optimizer_step_post_hook(lambda *_: marks.optimizer_ends(began.pop()) if began else None)


def _waiting(marks: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wait(*arguments: Any, **options: Any) -> Any:
        if not marks.is_here():
            return plain(*arguments, **options)
        began = marks.wait_begins()
        try:
            return plain(*arguments, **options)
        finally:
            marks.wait_ends(began)

    return wait


def _loading(marks: Any, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(plain)
    def load(iterator: Any) -> Any:
        if not marks.is_here():
            return plain(iterator)
        began = marks.load_begins()
        try:
            return plain(iterator)
        finally:
            marks.load_ends(began)

    return load


def _backward(marks: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd.backward` with marks: where the graph is done, DDP and FSDP wait for their collectives."""
    state = {"is_inside": False, "is_functional_hooked": False}

    @functools.wraps(plain)
    def backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
        if state["is_inside"] or not marks.is_here():  # a pass inside of another one is of that one's time
            return plain(tensors, *arguments, **options)
        if not state["is_functional_hooked"] and _FUNCTIONAL in sys.modules:  # which not every script imports
            state["is_functional_hooked"] = True
            _hook_functional(marks)
        state["is_inside"] = True
        gap: list[tuple[float, float, float]] = []
        handle = _when_graph_is_done(tensors, lambda: gap.append(marks.gap_begins()))
        began = marks.backward_begins()
        try:
            return plain(tensors, *arguments, **options)
        finally:
            if gap:
                marks.gap_ends(gap[0])
            marks.backward_ends(began)
            if handle is not None:
                handle.remove()
            state["is_inside"] = False

    return backward


def _when_graph_is_done(tensors: Any, then: Callable[[], None]) -> Any:
    """Have a backward pass from `tensors` call `then` before what DDP and FSDP have put behind it; return a handle.

    None where the pass is compiled, or has no graph.
    """
    import torch

    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        return None
    first = tensors if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) else tensors[0]
    node = getattr(first, "grad_fn", None) or getattr(first, "node", None)
    if node is None:
        return None
    engine: Any = torch.autograd.Variable._execution_engine
    return node.register_prehook(lambda _: engine.queue_callback(then))


def _hook_functional(marks: Any) -> None:
    """Mark waits for functional collectives, which DTensors are made of."""
    import torch

    functional: Any = sys.modules[_FUNCTIONAL]
    plain = functional.wait_tensor
    marked = _waiting(marks, plain)

    @functools.wraps(plain)
    def wait_tensor(tensor: Any) -> Any:
        return plain(tensor) if torch.compiler.is_compiling() else marked(tensor)

    functional.wait_tensor = wait_tensor
