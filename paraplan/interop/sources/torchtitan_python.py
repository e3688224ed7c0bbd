"""The Python configurations of torchtitan since v0.3.0 as keys and values: their syntax is read, no code is run."""

from __future__ import annotations

import ast
from collections.abc import Callable

from paraplan.errors import PlanError

CLASS = "()"
"""The key under which a section has the name of what makes it: `SelectiveAC` of `SelectiveAC.Config()`."""
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: lambda left, right: left * right,
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.FloorDiv: lambda left, right: left // right,
}
_MOST_DEPTH = 20
_TRACED = "to_graph_trainer_config"
"""Function that turns a configuration into one of torchtitan's experiment graph_trainer, without its `compile`."""
_LARGEST = 1 << 62


def python_values(
    text: str, *, source: str, name: str | None, read_file: Callable[[str], str] | None
) -> tuple[dict[str, object], list[str]]:
    """Return the keys and values of the configuration that the function `name` returns, and notes.

    Arguments and attributes of `Trainer.Config` are keys, those of sections in mappings; what only a running program
    knows stays as the words of the file. Raises `PlanError` for broken syntax, and where `name` is not the one
    function, or none.
    """
    tree = _parsed(text, source)
    functions = _functions(tree)
    names = [key for key, node in functions.items() if _returns_config(node)]
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        what = f"has no configuration {name}" if name else f"has {len(names)} configurations, and one is read"
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        hint = f"name one: paraplan import {source}:{names[0]} ({shown})" if names else "name a config_registry.py"
        raise PlanError(f"{source} {what}", hint=hint)
    reader = _Reader(tree, read_file)
    value = reader.result(functions[name], {}, 0)
    if not isinstance(value, dict) or CLASS in value:
        raise PlanError(f"{source}: {name} returns no Trainer.Config(...) that can be read", hint="give another one")
    return value, list(dict.fromkeys(reader.notes))


def _parsed(text: str, source: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlanError(f"{source} is not Python: {error}", hint="give torchtitan's config_registry.py") from None


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the modules of configurations from which names come."""
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    registries = [node for node in found if str(node.module).endswith(".config_registry")]
    return {name.asname or name.name: str(node.module) for node in registries for name in node.names}


def _returns_config(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).endswith("Trainer.Config")


class _Reader:
    """Reads the functions of one file, of which one may begin with what another returns, of another file too."""

    def __init__(self, tree: ast.Module, read_file: Callable[[str], str] | None) -> None:
        self._functions, self._imported, self._read_file = _functions(tree), _imported(tree), read_file
        self.notes: list[str] = []

    def result(self, function: ast.FunctionDef, arguments: dict[str, object], depth: int) -> object:
        """Return what a function returns; a configuration that is its argument has the default of every key."""
        names: dict[str, object] = {}
        every = [*function.args.args, *function.args.kwonlyargs]
        defaults = [None] * (len(function.args.args) - len(function.args.defaults)) + [*function.args.defaults]
        for argument, default in zip(every, [*defaults, *function.args.kw_defaults], strict=True):
            is_config = argument.annotation is not None and ast.unparse(argument.annotation).endswith("Config")
            names[argument.arg] = {} if is_config else self._value(default, {}, depth) if default else argument.arg
        return self._run(function.body, names | arguments, depth)

    def _run(self, body: list[ast.stmt], names: dict[str, object], depth: int) -> object:
        for node in body:
            if isinstance(node, ast.Return) and node.value is not None:
                return self._value(node.value, names, depth)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = self._value(node.value, names, depth) if node.value is not None else None
                for target in targets:
                    self._set(target, value, names)
            elif isinstance(node, ast.If) and "hasattr(" in ast.unparse(node.test):
                self._run(node.body, names, depth)  # the words of the release that has that attribute
            elif not self._is_plain(node):
                self.notes.append(f"line {node.lineno}, {ast.unparse(node).splitlines()[0]}: not read, and not priced")
        return None

    @staticmethod
    def _is_plain(node: ast.stmt) -> bool:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_text or isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.Pass)

    def _set(self, target: ast.expr, value: object, names: dict[str, object]) -> None:
        path = ast.unparse(target).split(".")
        if isinstance(target, ast.Name):
            names[target.id] = value
            return
        place = names.get(path[0])
        if not isinstance(target, ast.Attribute) or not isinstance(place, dict):
            self.notes.append(f"line {target.lineno}, {ast.unparse(target)}: not read, and not priced")
            return
        for key in path[1:-1]:
            inner = place.get(key)
            if not isinstance(inner, dict):
                inner = {}
                place[key] = inner
            place = inner
        place[path[-1]] = value

    def _value(self, node: ast.expr, names: dict[str, object], depth: int) -> object:
        """Return a plain value, a mapping for a call, and the words of the file for anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(item, names, depth) for item in node.elts]
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, names, depth)
            return -value if isinstance(value, int | float) else ast.unparse(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = (self._value(side, names, depth) for side in (node.left, node.right))
            if isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) < _LARGEST and right:
                return _OPERATIONS[type(node.op)](left, right)
        if isinstance(node, ast.Call) and depth < _MOST_DEPTH:
            return self._call(node, names, depth)
        return ast.unparse(node)

    def _call(self, node: ast.Call, names: dict[str, object], depth: int) -> object:
        called = ast.unparse(node.func)
        if any(word.arg is None for word in node.keywords) and "Tokenizer" not in called:
            self.notes.append(f"line {node.lineno}, {called}(**...): its arguments are not read, and not priced")
        keys = {word.arg: self._value(word.value, names, depth) for word in node.keywords if word.arg is not None}
        function = self._functions.get(called)
        if function is not None and _returns_config(function):
            places = zip(function.args.args, node.args, strict=False)
            given = {argument.arg: self._value(value, names, depth) for argument, value in places}
            return self.result(function, given | keys, depth + 1)
        if called in self._imported:
            return self._of_other_file(called, depth)
        if called == _TRACED and node.args:
            traced = self._value(node.args[0], names, depth)
            self.notes.append("graph_trainer's passes over traced graphs are priced as torch.compile's")
            return {key: value for key, value in traced.items() if key != "compile"} if isinstance(traced, dict) else {}
        made = called.removesuffix(".Config")
        if made.endswith(("Trainer", "TrainerConfig")):  # the class, or a subclass of its configuration
            return keys
        words = [self._value(item, names, depth) for item in node.args]
        return {CLASS: made, **({"arguments": words} if words else {}), **keys}

    def _of_other_file(self, name: str, depth: int) -> object:
        """Return the configuration that a function of another registry makes, which stands beside or above."""
        path = self._imported[name].replace(".", "/") + ".py"
        if self._read_file is None:
            raise PlanError(f"{name} is of {path}, which is not read here", hint="give that file")
        tree = _parsed(self._read_file(path), path)
        if name not in _functions(tree):
            raise PlanError(f"{path} has no configuration {name}", hint="give the file of the same release")
        other = _Reader(tree, self._read_file)
        found = other.result(_functions(tree)[name], {}, depth + 1)
        self.notes += other.notes
        return found
