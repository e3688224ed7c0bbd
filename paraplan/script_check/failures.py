"""Why a script could not be checked, in a sentence: what was missing, and what can be given."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from paraplan.script_check.plans import CheckRunError

_FAILED = re.compile(r"^paraplan: ((?:each of )?ranks? [\d, -]+) failed(?: first)?: (.*)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_HANGS = "paraplan: the job hangs: "
_NOT_DONE = re.compile(r"^not done after (\d+) s$", re.MULTILINE)
_OWN_END = "the script ended itself with exit code 2"

_HINTS = (
    (
        r"CUDA|NVIDIA|cuda|No GPU|hip|XPU|nccl",
        "ranks of a check have no GPU: give the script, after --, the option by which it runs on a CPU, or let it ask "
        "torch.cuda.is_available()",
    ),
    (
        r"huggingface|ConnectError|ConnectionError|URLError|Name or service|resolve|couldn't connect|Max retries|HTTP",
        "it downloads: give it a local folder after --, or fill the cache (HF_HOME) before; HF_HUB_OFFLINE=1 "
        "spares it the attempts",
    ),
    (r"EOF when reading|stdin", "it reads from a terminal: give what it asks for as arguments after --"),
    (
        r"Mesh should not be bigger|world.?size|[Nn]um.*ranks|\branks\b|nproc|not divisible|WORLD_SIZE",
        "start as many ranks as it wants by --ranks, or give it smaller sizes after --",
    ),
    (r"No module named", "install what it imports into the environment of paraplan"),
    (r"No such file|not found|does not exist", "it runs in this folder: give it paths that are here, after --"),
    (r"out of memory|MemoryError|SIGKILL", "give it a smaller model or batch after --, or fewer --ranks"),
)
ALONE_WHERE = "as one process"
_ALONE_HINT = (
    "on ranks it ran, where each has a part of the rows: sizes of batches that it writes down, and batches that one "
    "rank reads and sends, do not fit one process that is given all of them"
)
_ANY = "arguments of the script come after --; run it by paraplan launch --nproc-per-node N first, to see it train"


def run_error(script: str, where: str, status: int, said: str) -> CheckRunError:
    """Return why processes of a check failed, by what their launcher said; at most two sentences, and a hint."""
    if _HANGS in said:
        what = said.split(_HANGS, 1)[1].strip()
        if "file_baton" in what:
            cache = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
            return CheckRunError(
                f"{script} waits {where} for a build of an extension that another process has begun, or was killed in",
                hint=f"if none is being built, remove the files named lock below {cache}",
            )
        return CheckRunError(
            f"{script} stands still {where}: {'; '.join(line.strip() for line in what.splitlines()[:4])}",
            hint="a rank waits for another, or for something outside: a server, a lock, a rank that left the loop",
        )
    late = _NOT_DONE.search(said)
    if late is not None:
        return CheckRunError(
            f"{script} was not done {where} after {late[1]} s",
            hint="give it a smaller model and fewer rows before its first steps, after --, or a longer --timeout",
        )
    found = _FAILED.search(said)
    if found is None:
        return CheckRunError(f"{script} failed {where}, status {status}: {_last(said.splitlines())}", hint=_ANY)
    what = found[2]
    if what.startswith(_OWN_END):
        errors = re.findall(r"^\S+: error: (.*)$", said, re.MULTILINE)
        return CheckRunError(
            f"{script} refuses its arguments {where}: {_last(errors) or 'exit code 2'}",
            hint="arguments of the script come after --",
        )
    frames = [(path, line) for path, line in _FRAME.findall(said) if "site-packages" not in path and path[0] != "<"]
    here = next(((path, line) for path, line in reversed(frames) if path.endswith(script)), None)
    at = f" (line {here[1]})" if here is not None else ""
    hint = next((text for words, text in _HINTS if re.search(words, what)), _ANY)
    if where == ALONE_WHERE:
        hint = _ALONE_HINT
    return CheckRunError(f"{script} failed {where}, {found[1]}: {what}{at}", hint=hint)


def _last(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def no_step_error(script: str, where: str) -> CheckRunError:
    """Return that a script ended without a step."""
    return CheckRunError(
        f"{script} ended {where} without a step of a torch optimizer",
        hint="give it arguments after -- with which it trains; parameters that it changes by itself, without "
        "optimizer.step(), are not compared",
    )
