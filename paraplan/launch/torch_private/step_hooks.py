"""Marks of a training step in torch, for scripts as they are: collectives, backward passes, optimizers, data loaders.

Only the hooks of optimizers are public. It runs in ranks, without this package where their interpreters have none.
A training never fails by a hook. Each asks first whether torch.compile traces it, and then only makes the plain call:
a graph has no break for it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

_FUNCTIONAL = "torch.distributed._functional_collectives"


def after_import(name: str, then: Callable[[], object]) -> None:
    """Call `then` once a module is imported; now where it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport:
    """Finds one module as the others do, and calls `then` once it is imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name, self.then = name, then
        self.is_asking = False

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of the module that is waited for, None for others."""
        if fullname != self.name or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_asking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        plain = loader.exec_module

        def exec_module(module: ModuleType) -> None:  # that a spec was asked for does not mean that it is imported
            loader.exec_module = plain
            plain(module)
            with suppress(ValueError):
                sys.meta_path.remove(self)
            self.then()

        loader.exec_module = exec_module
        return spec


def mark_steps(marks: Any) -> None:
    """Have torch, which is imported, call `marks` (a `StepMarks`). Raises what another torch raises."""
    import torch
    import torch.distributed as dist
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if not dist.is_available():
        return
    for held in (vars(type(marks)), globals()):
        _leave_untraced(found.__code__ for found in held.values() if isinstance(found, FunctionType))
    work: Any = dist.Work
    work.wait = _waiting(marks, work.wait)
    whole: Any = dist
    whole._broadcast_coalesced = _waiting(marks, whole._broadcast_coalesced)  # how DDP shares buffers
    loader: Any = _BaseDataLoaderIter
    loader.__next__ = _loading(marks, loader.__next__)
    torch.autograd.backward = _backward(marks, torch.autograd.backward)
    _hook_optimizers(marks)


def _hook_optimizers(marks: Any) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    began: list[tuple[float, float]] = []
    is_compiling = torch.compiler.is_compiling

    def begins(*_: Any) -> None:
        if not is_compiling():
            began.append(marks.optimizer_begins())

    def ends(*_: Any) -> None:
        if not is_compiling() and began:
            marks.optimizer_ends(began.pop())

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ends)


def _leave_untraced(codes: Iterable[CodeType]) -> None:
    """Have torch.compile run `codes`, and what is defined in them, as they are where they stand between two graphs.

    That is `torch._dynamo.eval_frame.skip_code`, without the second that an import of torch._dynamo takes.
    """
    import torch

    native: Any = torch._C._dynamo.eval_frame
    skip = native._FrameExecStrategy(native._FrameAction.SKIP, native._FrameAction.DEFAULT)
    for code in codes:
        native.set_code_exec_strategy(code, skip)
        _leave_untraced(inner for inner in code.co_consts if isinstance(inner, CodeType))


def _waiting(marks: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that waits for a collective, with marks. A step may make hundreds: it is written to be short."""
    import torch

    is_compiling, clock, thread_id = torch.compiler.is_compiling, time.perf_counter, threading.get_ident

    @functools.wraps(plain)
    def wait(*arguments: Any, **options: Any) -> Any:
        if is_compiling() or not marks.is_noting or marks.depth or thread_id() != marks.thread:
            return plain(*arguments, **options)
        if marks.reads_often:
            began = marks.wait_begins()
            try:
                return plain(*arguments, **options)
            finally:
                marks.wait_ends(began)
        marks.depth = 1
        began_s = clock()
        try:
            return plain(*arguments, **options)
        finally:
            marks.wait_s += clock() - began_s
            marks.num_waits += 1
            marks.depth = 0

    return wait


def _loading(marks: Any, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(plain)
    def load(iterator: Any) -> Any:
        if is_compiling() or not marks.is_here():
            return plain(iterator)
        began = marks.load_begins()
        try:
            return plain(iterator)
        finally:
            marks.load_ends(began)

    return load


def _backward(marks: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd.backward` with marks: where the graph is done, DDP and FSDP wait for their collectives."""
    import torch

    is_inside = is_functional_hooked = False
    is_compiling, thread_id = torch.compiler.is_compiling, threading.get_ident
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    modules = sys.modules

    @functools.wraps(plain)
    def backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal is_inside, is_functional_hooked
        # a pass inside of another one is of that one's time
        if is_compiling() or is_inside or marks.depth or not marks.is_on or thread_id() != marks.thread:
            return plain(tensors, *arguments, **options)
        if not is_functional_hooked and _FUNCTIONAL in modules:  # which not every script imports
            is_functional_hooked = True
            _hook_functional(marks)
        is_inside = True
        began = marks.backward_begins()
        if not marks.is_noting:
            try:
                return plain(tensors, *arguments, **options)
            finally:
                is_inside = False
        gaps: list[tuple[float, float, float]] = []
        handle = None
        try:
            node = _first_node(tensors)
            if node is not None:  # it is told before what DDP and FSDP have put behind the pass
                handle = node.register_prehook(lambda _: queue_callback(lambda: gaps.append(marks.gap_begins())))
        except Exception:  # noqa: S110  # what torch refuses, it refuses in its own words
            pass
        try:
            return plain(tensors, *arguments, **options)
        finally:
            for gap in reversed(gaps):
                marks.gap_ends(gap)
            marks.backward_ends(began)
            if handle is not None:
                handle.remove()
            is_inside = False

    return backward


def _first_node(tensors: Any) -> Any:
    """Return the node of the graph that a backward pass from `tensors` begins with.

    None where the pass is compiled, or has no graph.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        return None
    first = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
    return getattr(first, "grad_fn", None) or getattr(first, "node", None)


def _hook_functional(marks: Any) -> None:
    """Mark waits for functional collectives, which DTensors are made of."""
    functional: Any = sys.modules[_FUNCTIONAL]
    functional.wait_tensor = _waiting(marks, functional.wait_tensor)
