"""`paraplan mcp`: the commands that plan and look as tools for agents, over stdin and stdout.

A tool is a command: its description is the command's help, its arguments are the command's options, and a call runs the
command in a process of its own, whose output is the result. Nothing is said twice, and an agent gets a person's answer.
Files that an agent gives as text, and those that a command writes for it, lie in a folder that ends with the server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paraplan import __version__
from paraplan.cli.mcp_files import AgentFiles
from paraplan.errors import UsageError

if TYPE_CHECKING:
    from mcp.server import Server

app = typer.Typer(add_completion=False)

TOOLS = (
    *("recommend", "estimate", "import", "export", "check", "verify", "explain", "doctor", "topo"),
    *("profiles_list", "profiles_show", "validate", "compare"),
)
"""Commands that change nothing on the machine: `check` and `doctor` compute, and files are written for the agent."""

_WRITTEN = ("output", "trace", "svg")
"""Options whose file is written into the agent's folder, and shown."""
_LEFT_OUT = (
    *("html", "metrics", "junit", "github", "save", "report"),  # write files, or for a service
    *("keep", "measured"),  # keep runs as the user's own
    *("script", "module", "measure", "watch", "wait", "nnodes", "rdzv_endpoint", "node_rank"),  # start programs
    *("install_completion", "show_completion", "help"),
)
_COLUMNS = "100"
_PATIENCE_S = 900.0
_OPTION = re.compile(r"--([a-z][\w-]*)(?:[ =]([^\s,:;()]+))?")
_NEAR = re.compile(r"did you mean ([^\s,?]+)")
_INSTRUCTIONS = (
    "paraplan plans training on several GPUs: does a model fit, which parallelism, memory, step time, cost. Ask "
    "recommend with model and profile ('8xh100', '1xrtx-4090'), for LoRA with train='lora' or 'qlora'; estimate prices "
    "one plan; import prices another tool's configuration, export writes one; profiles_list names machines and models; "
    "explain has the documentation, by word too. files={'ds.json': TEXT} gives files that other arguments name, "
    "output='plan.json' keeps a plan for export, verify and check. Results are text; json=true gives all fields. A "
    "refusal names the next call."
)


@app.command()
def mcp() -> None:
    """Serve the planner to agents by the Model Context Protocol on stdin and stdout: tools that change nothing.

    Tools are recommend, estimate, import, export, check, verify, explain, doctor, topo, profiles list and show,
    validate and compare, with the options of these commands. Files of an agent lie in a folder that ends with the
    server.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("paraplan mcp needs the protocol's SDK, which is not installed", hint="pip install 'mcp>=2'")
    from mcp.server.stdio import stdio_server

    async def serve(folder: Path) -> None:
        agents = server(AgentFiles(folder))
        async with stdio_server() as (reading, writing):
            await agents.run(reading, writing, agents.create_initialization_options())

    with tempfile.TemporaryDirectory(prefix="paraplan-mcp-") as folder:
        asyncio.run(serve(Path(folder)))


def server(files: AgentFiles) -> Server[Any]:
    """Return the server with its tools, which a client in this process may use as well."""
    from mcp.server import Server
    from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
        annotations = ToolAnnotations(read_only_hint=True, destructive_hint=False)
        return ListToolsResult(
            tools=[
                Tool(name=name, description=_command(name).help, input_schema=schema(name), annotations=annotations)
                for name in TOOLS
            ]
        )

    async def call_tool(_context: Any, params: Any) -> CallToolResult:
        texts, is_error = await answered(params.name, params.arguments or {}, files)
        return CallToolResult(content=[TextContent(type="text", text=text) for text in texts], is_error=is_error)

    return Server(
        "paraplan",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


@cache
def _command(name: str) -> Any:
    from paraplan.cli.main import command_of

    group, _, inner = name.partition("_")
    command = command_of(group)
    return command.commands[inner] if inner else command


def _parameters(name: str) -> dict[str, Any]:
    """Return the parameters of a command by the names that agents use: `seq_len` for --seq-len, `model` for MODEL."""
    found = {}
    for each in _command(name).params:
        key = max(each.opts, key=len).lstrip("-").replace("-", "_")
        is_left_out = _is_option(each) and key in _LEFT_OUT
        if not key.startswith("as_") and not is_left_out and not getattr(each, "hidden", False):
            found[_OTHER_KEYS.get(key, key)] = each
    return found


def _is_option(parameter: Any) -> bool:
    return any(option.startswith("-") for option in parameter.opts)


_OTHER_KEYS = {"words": "model", "files": "runs"}
_FILES = {
    "type": "object",
    "additionalProperties": {"type": ["string", "object"]},
    "description": "Texts of files by their names, which other arguments name then, and so do later calls.",
}
_WITHOUT_FILES = ("explain", "doctor", "profiles_list")


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments, from the command's own options."""
    properties = {}
    for key, each in _parameters(name).items():
        is_flag = getattr(each, "is_flag", False)
        plain: dict[str, Any] = {"type": "boolean"} if is_flag else {"type": ["string", "number"]}
        if each.nargs != 1 or getattr(each, "multiple", False):
            plain = {"type": "array", "items": {"type": "string"}}
        properties[key] = plain | {"description": getattr(each, "help", None) or each.metavar or key}
    if name not in _WITHOUT_FILES:
        properties["files"] = _FILES
    required = [key for key, each in _parameters(name).items() if each.required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def words_of(name: str, arguments: Mapping[str, Any], files: AgentFiles) -> list[str]:
    """Return the words of a command. Raises `UsageError` for an argument that the tool does not have."""
    known, words, places = _parameters(name), name.split("_"), list[str]()
    for key, value in arguments.items():
        each = known.get(key)
        if each is None:
            raise UsageError(f"{name} has no argument {key!r}", hint=f"it has {', '.join(known)}")
        values = [files.named(str(one)) for one in (value if isinstance(value, list) else [value])]
        if key in _WRITTEN:
            values = [str(files.place(str(value)))]
        if not _is_option(each):
            places += values
        elif getattr(each, "is_flag", False):
            words += [(each.opts if value in (True, "true") else each.secondary_opts or [""])[-1]]
        else:
            words += [word for one in values for word in (max(each.opts, key=len), one)]
    return [word for word in words if word] + (["--", *places] if places else [])


async def answered(name: str, arguments: Mapping[str, Any], files: AgentFiles) -> tuple[list[str], bool]:
    """Return what a command prints, then the files that it has written, and whether it refused.

    A refusal ends with the next call.
    """
    if name not in TOOLS:
        return [f"there is no tool {name!r}; tools: {', '.join(TOOLS)}"], True
    given = {key: value for key, value in arguments.items() if key != "files" or name in _WITHOUT_FILES}
    try:
        files.keep(arguments.get("files", {}))
        words = words_of(name, given, files)
    except UsageError as error:
        return [f"error: {error.message}\nhint: {error.hint}\nnext call: {name}, as the hint says"], True
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paraplan", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": _COLUMNS, "NO_COLOR": "1"},
    )
    try:
        printed, said = await asyncio.wait_for(process.communicate(), _PATIENCE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return [f"no answer within {_PATIENCE_S:.0f} s: ask of fewer GPUs, or fix a degree\nnext call: explain"], True
    text, remarks = (files.told(one.decode(errors="replace")) for one in (printed, said))
    if not process.returncode or (process.returncode == 1 and text):
        written = files.shown(str(given[key]) for key in _WRITTEN if key in given)
        return [f"{text}\n{remarks}".strip(), *written], bool(process.returncode)
    return [f"{text}{remarks}".strip() + f"\nnext call: {next_call(name, given, remarks)}"], True


def next_call(name: str, arguments: Mapping[str, Any], refusal: str) -> str:
    """Return the call that a refusal's hint asks for: another value for a wrong one, or the first options of the hint.

    Without either that is `explain`, of a word of the refusal.
    """
    from paraplan.cli.explain import TOPICS

    message, _, hint = refusal.partition("hint:")
    changes: dict[str, Any] = {}
    near = _NEAR.search(hint)
    if near is not None:
        changes = {key: near[1] for key, value in arguments.items() if str(value) and f"{value!r}" in message}
    known = _parameters(name)
    for line in [] if changes else hint.splitlines():
        options = {key.replace("-", "_"): value for key, value in _OPTION.findall(line.partition(": ")[0])}
        options = options or {key.replace("-", "_"): value for key, value in _OPTION.findall(line)}
        flags = {key for key, each in known.items() if getattr(each, "is_flag", False)}
        changes = {key: value or True for key, value in options.items() if key in known and (value or key in flags)}
        if changes:
            break
    if changes:
        return f"{name} {dict(arguments) | changes}"
    words = re.findall(r"[a-z]{4,}", message.lower())
    topics = (topic for topic in TOPICS if any(topic.startswith(word) for word in words))
    return f"explain { ({'topic': next(topics, 'faq')}) }"
