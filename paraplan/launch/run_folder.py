"""The folder of one run: its command, versions and plan, the logs of its ranks, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import paraplan
from paraplan.launch.spec import RUNS_FOLDER, ArgumentError, LaunchSpec, NodeRange

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch without a plan or a GPU need not pay
    from paraplan.hardware.topology import NodeTopology
    from paraplan.plan.files import PlanFile

_MODE = 0o700  # rights of the folders that are made: what ranks write, and their command line, is for their user alone


@dataclass(frozen=True)
class RunFolder:
    """A folder of this run alone. `is_temporary` ones are removed at its end."""

    path: Path
    is_temporary: bool = False

    def __str__(self) -> str:
        """Return the path as a user would type it here."""
        return os.path.relpath(self.path) if self.path.is_relative_to(Path.cwd()) else str(self.path)

    def note_start(
        self, words: list[str], *, environment: dict[str, str], plan: PlanFile | None, node: NodeTopology | None
    ) -> None:
        """Write the command, the versions and the environment that the launcher adds as run.json; plan and GPUs."""
        start = {
            "command": shlex.join(without_secrets(words, os.environ)),
            "folder": str(Path.cwd()),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": {"paraplan": paraplan.__version__, "torch": str(torch.__version__)}
            | {"python": platform.python_version(), "cuda": torch.version.cuda},
            "environment": environment,
        }
        self.note("run.json", json.dumps(start, indent=2))
        if plan is not None:
            self.note("plan.json", plan.to_json())
        if node is not None:
            self.note("topology.json", node.to_json())

    def note_end(self, end: dict[str, Any]) -> None:
        """Add to run.json how the run ended, where its time went, and what it measured."""
        with contextlib.suppress(OSError, ValueError):
            start = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            self.note("run.json", json.dumps(start | end, indent=2))

    def note(self, name: str, text: str) -> None:
        """Write a file into the folder. A full disk must not keep a job from running."""
        with contextlib.suppress(OSError):
            (self.path / name).write_text(text + "\n", encoding="utf-8")


_SECRET_OPTION = re.compile(r"--?(?:.*[-_])?(token|secret|password|passwd|api[-_]?key|credentials?)", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r".*(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)", re.IGNORECASE)
# letters from which on a variable's value is taken for a secret, and not for a word that stands everywhere
_MIN_SECRET = 8

HIDDEN = "<hidden>"


def without_secrets(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the words of a command without values of options such as --api-key, and of variables such as HF_TOKEN."""
    secrets = [
        value for name, value in environment.items() if _SECRET_VARIABLE.fullmatch(name) and len(value) >= _MIN_SECRET
    ]
    shown: list[str] = []
    is_value = False
    for word in words:
        option, equals, _ = word.partition("=")
        is_secret = bool(_SECRET_OPTION.fullmatch(option))
        text = f"{option}={HIDDEN}" if is_secret and equals else word
        text = HIDDEN if is_value and not word.startswith("-") else text
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        shown.append(text)
        is_value = is_secret and not equals
    return shown


def open_run_folder(spec: LaunchSpec, nodes: NodeRange, *, keeps_logs: bool, current_folder: Path) -> RunFolder:
    """Make the folder of a run: --log-dir, a new one in `paraplan-runs`, or a temporary one without `keeps_logs`.

    Where the current folder takes no files it is a temporary folder that stays. Raises `ArgumentError` for a --log-dir
    that cannot be made.
    """
    if spec.log_dir:
        path = Path(spec.log_dir)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=_MODE)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ArgumentError(f"--log-dir {path} cannot be made: {reason}", hint="name another folder") from None
        return RunFolder(path.absolute())  # scripts may change the folder
    if not keeps_logs:
        has_logs = spec.redirects != "0" or spec.tee != "0"
        return RunFolder(Path(tempfile.mkdtemp(prefix="paraplan_")).absolute(), is_temporary=not has_logs)
    runs = current_folder / RUNS_FOLDER
    stem = re.sub(r"[^\w.-]", "_", Path(spec.training_script).stem)[:40] or "run"
    host = f"-{socket.gethostname()}" if nodes.max > 1 else ""  # nodes may share the disk
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}{host}-{os.getpid()}"
    try:
        with contextlib.suppress(FileExistsError):  # by an earlier launch, or by one that starts with this one
            runs.mkdir(mode=_MODE)
            (runs / ".gitignore").write_text("*\n", encoding="utf-8")  # logs are no part of a project
        (runs / name).mkdir(mode=_MODE)
    except OSError:
        return RunFolder(Path(tempfile.mkdtemp(prefix="paraplan_")).absolute())
    return RunFolder(runs / name)
