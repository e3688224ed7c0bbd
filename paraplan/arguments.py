"""Arguments and fields checked against their annotations: what does not suit is an error of one sentence."""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from paraplan.errors import WrongArgumentError, near_names

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = {
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a text", str),
    bool: ("True or False", bool),
    type(None): ("None", type(None)),
}
_MAKERS = {
    "Workload": "paraplan.load_workload(model, profile) makes one",
    "ParallelPlan": "paraplan.ParallelPlan(dp=4) is one",
    "PlanFile": "paraplan.load_plan(path) reads one",
    "Constraints": "paraplan.Constraints(tp=2) is one",
}
_FUNCTIONS = {
    "optimizer": "give a function of the parameters: lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
    "scheduler": "give a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)",
    "loss_fn": "give a function of outputs and targets: lambda outputs, targets: F.cross_entropy(outputs, targets)",
}
"""Arguments that are functions in whose place objects are often given."""
_MOST_SHOWN = 80


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` so that it raises `WrongArgumentError` for arguments that do not suit its annotations."""
    signature, is_method = inspect.signature(function), "." in function.__qualname__
    home = "paraplan.runtime" if function.__module__.startswith("paraplan.runtime.") else "paraplan"
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    named = [*signature.parameters][is_method:]
    hints = cache(lambda: _hints(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        name = function.__name__
        if is_method:  # of the class that the user has, which may inherit it
            owner = args[0] if isinstance(args[0], type) else type(args[0])
            name = f"{owner.__name__}.{name}"
        if not takes_any and (unknown := [each for each in kwargs if each not in named]):
            raise WrongArgumentError(f"{name} has no argument {unknown[0]!r}", hint=near_names(unknown[0], named))
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise WrongArgumentError(f"{name}: {error}", hint=f"help({home}.{name}) says what it takes") from None
        for each, value in bound.items():
            is_keywords = signature.parameters[each].kind is inspect.Parameter.VAR_KEYWORD
            for one, given in value.items() if is_keywords else [(each, value)]:
                refuse_unsuited(given, hints().get(each, Any), name=one, of=name, home=home)
        return function(*args, **kwargs)

    return call


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of parameters; what a function returns may be a name for type checkers alone."""
    written = {name: each for name, each in function.__annotations__.items() if name != "return"}
    return get_type_hints(types.SimpleNamespace(__annotations__=written), globalns=function.__globals__)


def refuse_unsuited(value: object, annotation: Any, *, name: str, of: str, home: str = "paraplan") -> None:
    """Raise `WrongArgumentError` where the value of an argument `name` of a function `of` is not as annotated.

    `home` is the public module of the function.
    """
    if suits(value, annotation):
        return
    makers = [_MAKERS[kind] for one in _one_of(annotation) if (kind := getattr(one, "__name__", "")) in _MAKERS]
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 3]}..."
    raise WrongArgumentError(
        f"{name}={shown} of {of}: it should be {_in_words(annotation)}",
        hint=_FUNCTIONS.get(name) or next(iter(makers), f"help({home}.{of}) says what it takes"),
    )


def suits(value: object, annotation: Any) -> bool:
    """Return whether a value is of an annotated type; what this does not know suits."""
    if annotation is Any:
        return True
    if annotation in _PLAIN:
        is_bool = isinstance(value, bool)
        return isinstance(value, _PLAIN[annotation][1]) and (not is_bool or annotation is bool)
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(suits(value, each) for each in inside)
    if origin is Literal:
        return any(value == each and isinstance(value, type(each)) for each in inside)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is not None:
        is_text = isinstance(value, str | bytes) and origin not in (str, bytes)
        if not isinstance(value, origin) or is_text:
            return False
        is_list = isinstance(value, collections.abc.Collection) and not isinstance(value, collections.abc.Mapping)
        return not is_list or not inside or all(suits(each, inside[0]) for each in value)
    is_class = isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False)
    return not is_class or isinstance(value, annotation)


def _one_of(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _in_words(annotation: Any) -> str:
    """Return what values an annotation allows: `a text, a path or None`."""
    words = list[str]()
    for each in _one_of(annotation):
        origin, inside = get_origin(each), get_args(each)
        if origin is Literal:
            words += [repr(value) for value in inside]
        elif origin is collections.abc.Callable:
            words.append("a function")
        elif origin is not None:
            members = getattr(inside[0], "__name__", "Any") if inside else "Any"
            words.append("a list" if members == "Any" else f"a list of {members}")
        elif each in _PLAIN:
            words.append(_PLAIN[each][0])
        else:
            words.append({"Path": "a path"}.get(each.__name__, f"a {each.__name__}"))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
