"""The `paraplan` command: its subcommands, each imported when it is called, and the one place that prints errors."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paraplan import __version__
from paraplan.cli.progress import shown_progress
from paraplan.cli.terminal import drawn_output, in_lines, plain_streams
from paraplan.errors import ParaplanError, UsageError, near_names

COMMANDS = (
    "topo",
    "estimate",
    "recommend",
    "verify",
    "check",
    "launch",
    "demo",
    "submit",
    "jobs",
    "status",
    "logs",
    "cancel",
    "ps",
    "attach",
    "stacks",
    "profile",
    "doctor",
    "compare",
    "import",
    "export",
    "validate",
    "calibrate",
    "profiles",
    "explain",
    "config",
    "mcp",
)
"""Subcommands in the order of the help text; `paraplan.cli.<name>.app` holds each."""
_MODULES = {"import": "import_config"}  # no module can have a keyword's name


_PLANNING = ("estimate", "recommend", "verify")  # `import` reads other tools' own options
_ALIASES = {
    "--global-batch-size": "--global-batch",
    "--batch-size": "--global-batch",
    "--sequence-length": "--seq-len",
    "--seq-length": "--seq-len",
    "--max-length": "--seq-len",
    "--max-seq-length": "--seq-len",
    "--micro-batch-size": "--micro-batch",
    "--per-device-train-batch-size": "--micro-batch",
    "--optim": "--optimizer",
    "--ngpus": "--num-gpus",
    "--gpus": "--num-gpus",
    "--num-nodes": "--nodes",
    "--nnodes": "--nodes",
    "--tensor-parallel-size": "--tp",
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--pipeline-model-parallel-size": "--pp",
    "--context-parallel-size": "--cp",
    "--expert-parallel-size": "--ep",
    "--expert-model-parallel-size": "--ep",
    "--zero-stage": "--zero",
    "--torch-compile": "--compile",
    "--activation-offloading": "--offload-activations",
    "--gradient-checkpointing": "--recompute=full",
    "--bf16": "--precision=bf16",
    "--fp16": "--precision=fp16",
    "--load-in-4bit": "--base-weights=nf4",
    "--load-in-8bit": "--base-weights=int8",
    "--use-peft": "--train=lora",
}
"""Options as transformers, Megatron-LM, DeepSpeed and torchrun call them; with _ in place of - too."""
_DERIVED = {
    "--gradient-accumulation-steps": "say --global-batch: dp x micro-batch x accumulation steps",
    "--grad-accum": "say --global-batch: dp x micro-batch x accumulation steps",
}
"""Options of other tools that follow from ours."""
_FLAGS = {ours for ours in _ALIASES.values() if "=" in ours}
_ANSWERS = dict.fromkeys(("true", "yes", "1"), True) | dict.fromkeys(("false", "no", "0"), False)


def _as_we_say(words: list[str]) -> list[str]:
    """Return options by their names here, with what stands behind their `=`; `--bf16 True` is `--bf16`, as in HF's."""
    found = list[str]()
    for word in words:
        name, equals, value = word.partition("=")
        plain = name.replace("_", "-")
        if plain in _DERIVED:
            raise typer.BadParameter(f"{name} follows from the batch: {_DERIVED[plain]}")
        ours = _ALIASES.get(plain, name) if name.startswith("--") else name
        is_answer = word.lower() in _ANSWERS and bool(found) and found[-1] in _FLAGS
        if is_answer and not _ANSWERS[word.lower()]:
            found.pop()
        elif ours in _FLAGS:
            if equals and value.lower() not in _ANSWERS:
                raise typer.BadParameter(f"{name} is on or off, and not {value!r}: say {name}=True, or leave it out")
            found += [ours] * _ANSWERS.get(value.lower(), True)
        elif not is_answer:
            found.append(f"{ours}{equals}{value}")
    return found


_ONE_BLAS_THREAD = ("OPENBLAS_NUM_THREADS", "1")
"""The planner multiplies no matrices, and the threads cost it a fifth of its CPU time. Read when NumPy is loaded."""
_NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "__all__")
"""To look for plugins pydantic reads the metadata of every installed package. Read when the first record is made."""
_WORDS = "paraplan.words"


class LazyGroup(TyperGroup):
    """A group that imports a subcommand's module when that subcommand is asked for, and renders `ParaplanError`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `paraplan help COMMAND` and `paraplan version` as the options of these names."""
        args = args or ["--help"]
        words = {"help": [*args[1:2], "--help"], "version": ["--version"]}
        if args[0] in _PLANNING:
            end = args.index("--") if "--" in args else len(args)  # behind it stand another tool's words
            args = [*_as_we_say(args[:end]), *args[end:]]
        ctx.meta[_WORDS] = args
        return super().parse_args(ctx, words.get(args[0], args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that the words start with; name near ones where there is none."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UsageError(f"there is no command {args[0]!r}", hint=near_names(args[0], COMMANDS))
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the subcommands in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the click command of a subcommand, None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command = command_of(cmd_name)
        _draw_help(command)
        _take_defaults(command)
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand; print a user's error on stderr and end with its exit status."""
        with plain_streams():
            try:
                words = ctx.meta[_WORDS]
                starts_none = bool(words) and words[0] in _PLANNING  # processes, which would have no plugins either
                if starts_none:
                    from paraplan.cli.defaults import defaults_of  # and json, which help does without

                    ctx.default_map = defaults_of(words)
                with shown_progress(), _set(*_NO_PLUGINS) if starts_none else nullcontext():
                    return super().invoke(ctx)
            except ParaplanError as error:
                print_error(error)
                raise typer.Exit(error.exit_status) from None


def command_of(name: str) -> Any:
    """Return the click command of a subcommand."""
    with _set(*_ONE_BLAS_THREAD):
        module = import_module(f"paraplan.cli.{_MODULES.get(name, name)}")
    command = typer.main.get_command(module.app)
    command.name = name
    return command


def _draw_help(command: Any) -> None:
    """Let a command, and those in it, draw their help as it is: typer styles it, and nothing in it is from outside."""
    format_help = command.format_help

    def drawn(*words: Any) -> None:
        with drawn_output():
            format_help(*words)

    command.format_help = drawn
    for inner in getattr(command, "commands", {}).values():
        _draw_help(inner)


def _take_defaults(command: Any) -> None:
    """Let options that nobody gave be their default: typer would make a validator of pydantic's for each of them."""
    for option in command.params:
        if not option.multiple and option.nargs == 1 and option.callback is None and not option.required:
            option.process_value = functools.partial(_given_or_default, option, option.process_value)
    for inner in getattr(command, "commands", {}).values():
        _take_defaults(inner)


def _given_or_default(option: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    source = ctx.get_parameter_source(option.name)
    return value if source is not None and source.name == "DEFAULT" else process(ctx, value)


@contextmanager
def _set(variable: str, value: str) -> Iterator[None]:
    """Set an environment variable in this block, unless it is set, and take it back for processes started later."""
    is_free = variable not in os.environ
    os.environ.setdefault(variable, value)
    try:
        yield
    finally:
        if is_free:
            del os.environ[variable]


def print_error(error: ParaplanError) -> None:
    """Print what was wrong and what to do, on stderr: on a terminal in its lines, else each on one line."""
    for word, color, text in (("error: ", "red", error.message), ("hint: ", "cyan", error.hint)):
        if text:
            typer.secho(word, fg=color, bold=True, nl=False, err=True)
            typer.echo(in_lines(text, sys.stderr, indent=len(word)), err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paraplan {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def paraplan(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train a model on several GPUs: see the machine, choose a plan, know its cost, run it.

    Every command takes --json for programs, and --profile NAME in place of real GPUs.
    """


def main() -> None:
    """Run the command line; the entry point of the console script and of `python -m paraplan`."""
    try:
        app(prog_name="paraplan")
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    finally:
        gc.freeze()  # what is left ends with the process; a last collection took a tenth of a command's time
