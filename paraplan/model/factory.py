"""A user's model factory: found by `file.py:factory` or `package.module:factory`, called, its failures explained."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from paraplan.errors import ModelError, ParaplanError, near_names


def load_factory(reference: str) -> Callable[[], Any]:
    """Return the callable that `reference` names.

    The file is imported as any module is, so its training must stand behind `if __name__ == "__main__"`.
    Raises ModelError for a file, module or name that is not there, an import that fails, and a callable that
    needs arguments.
    """
    where, _, name = reference.rpartition(":")
    module = _import(where, name)
    factory = getattr(module, name, None)
    if factory is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ModelError(f"{where} defines no {name!r}", hint=near_names(name, public) if public else None)
    if not callable(factory):
        raise ModelError(f"{reference} is no function", hint="name a function that returns the nn.Module")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ModelError(
            f"{reference} cannot be called without arguments: {error}",
            hint="give it defaults, or write a function without arguments that calls it",
        ) from error
    except ValueError:  # a builtin without signature: the call itself will tell
        pass
    return factory  # type: ignore[no-any-return]


def call_user_code(reference: str, what: str, call: Callable[[], Any]) -> Any:
    """Return `call()`; a failure becomes a ModelError with its own message and the line of the user's file."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise explain(reference, what, error) from error


def check_method_names(reference: str, module: Any, base: Any) -> None:
    """Raise ModelError where a part of a model hides a method of `base`, torch's `nn.Module`, by an attribute.

    A submodule or parameter so called is not reached by its name; any other value stands in the way of those methods
    that a trace calls.
    """
    for path, part in _parts(module, base):
        registered = {name for name, _ in base.named_children(part)}
        registered |= {name for name, _ in base.named_parameters(part, recurse=False)}
        registered |= {name for name, _ in base.named_buffers(part, recurse=False)}
        values = {name for name, value in vars(part).items() if name in CALLED_BY_TRACES and not callable(value)}
        hidden = sorted(name for name in registered | values if callable(getattr(base, name, None)))
        if hidden:
            name = f"self.{hidden[0]}" + (f" in its part {path}" if path else "")
            raise ModelError(
                f"{reference}: {_where_defined(type(part))} sets {name}, which is a method of nn.Module",
                hint=f"call it otherwise, such as self.{hidden[0]}_layer",
            )


CALLED_BY_TRACES = frozenset(
    {
        *("train", "to", "apply", "requires_grad_", "forward", "register_forward_hook", "register_forward_pre_hook"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules"),
        *("children", "named_children", "get_submodule"),
    }
)
"""Methods of `nn.Module` that a trace calls, by itself or through torch."""


def _parts(module: Any, base: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module and all inside of it with their paths, by the methods of `base` whatever they hide."""
    yield path, module
    for name, child in base.named_children(module):
        yield from _parts(child, base, f"{path}.{name}" if path else name)


def _where_defined(kind: type) -> str:
    """Return a class with its file and line, without these where it has no file."""
    try:
        return f"{kind.__name__} ({inspect.getsourcefile(kind)}, line {inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # defined in an interpreter
        return kind.__name__


def with_user_errors(reference: str, what: str, call: Callable[[], Any]) -> Any:
    """Return `call()`; an error that code of the user raises within becomes a ModelError, others stay as they are."""
    try:
        return call()
    except ParaplanError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any(_is_users(Path(frame.filename)) for frame in frames[-_DEEPEST:]):
            raise
        raise explain(reference, what, error) from error


_DEEPEST = 3
"""Frames at the end of a traceback among which the user's own is looked for: torch's may stand below it."""


def _is_users(path: Path) -> bool:
    inside = {"site-packages", "paraplan", "torch"} & set(path.parts)
    return not inside and path.is_file() and not path.is_relative_to(Path(traceback.__file__).parent)


def explain(reference: str, what: str, error: BaseException) -> ModelError:
    """Return the ModelError for `error`, raised by a user's code while `what` was done."""
    location = _user_line(reference, error)
    lines = [f"{reference} failed while {what}: {type(error).__name__}: {error}"]
    if location is not None:
        lines.append(f"  {location.filename}, line {location.lineno}: {location.line}")
    return ModelError("\n".join(lines), hint=_hint(error))


def _hint(error: BaseException) -> str:
    text = str(error).lower()
    if isinstance(error, SystemExit):
        return "guard the script's own run with if __name__ == '__main__'"
    if "cuda" in text or "nvidia" in text or "copy out of meta" in text:
        return "the factory must not move the model to a GPU: it is called on torch's meta device, without values"
    if "meta" in text:
        return (
            "the model runs on torch's meta device, without values: its forward must not read any (.item(), .tolist())"
        )
    return "the factory must need nothing else, and the model run on token ids [batch, sequence] or its example_inputs"


def _user_line(reference: str, error: BaseException) -> traceback.FrameSummary | None:
    where = reference.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if where.endswith(".py") and Path(frame.filename) == Path(where).resolve()]
    foreign = [frame for frame in frames if "paraplan" not in Path(frame.filename).parts]
    chosen = own or foreign
    return chosen[-1] if chosen else None


def _import(where: str, name: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):  # one that it imports
                raise explain(f"{where}:", "it was imported", error) from error
            file = Path(*where.split(".")).with_suffix(".py")
            hint = f"give {file}:{name}" if file.is_file() else "give file.py:factory, or a module that Python finds"
            raise ModelError(f"there is no module {where}", hint=hint) from None
        except (Exception, SystemExit) as error:
            raise explain(f"{where}:", "it was imported", error) from error
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"there is no file {where}", hint="give file.py:factory with the path of an existing file")
    spec = importlib.util.spec_from_file_location(f"paraplan_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{where} cannot be imported", hint="give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look a class's module up here
    sys.path.insert(0, str(path.parent))  # a script imports its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise explain(f"{path}:", "it was imported", error) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
