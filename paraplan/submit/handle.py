"""Handles: what is kept of each submitted job, in the user's state folder, so that it can be found again."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from paraplan.errors import UsageError, near_names
from paraplan.records import Record

_FILE = "handle.json"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,48}")


class Handle(Record):
    """One submitted job. Its folder holds the document, the package and, where this machine sees it, the log."""

    name: str
    """By which the user names it; the name of the job for the scheduler too."""
    scheduler: str
    """A word of `paraplan submit --to`."""
    cluster: str
    """The scheduler's name of the cluster that it was submitted to."""
    folder: Path
    """Folder of the submission."""
    work_folder: Path
    """Where the script starts: the folder of the submission, in the package or itself."""
    document: str
    """The file that was submitted."""
    script: str
    """The training script and its arguments."""
    plan: str
    """The plan in words."""
    options: dict[str, str] = Field(default_factory=dict)
    """Options of the scheduler's client."""
    job_id: str | None = None
    """The scheduler's name for it, None until it has answered."""
    submitted_s: float
    """When, in seconds since 1970."""

    @property
    def log(self) -> Path:
        """The log, for schedulers that write one where this machine sees it."""
        return self.folder / "log"

    def write(self) -> None:
        """Keep it."""
        partial = self.folder / f"{_FILE}.partial"
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(self.folder / _FILE)

    def forget(self) -> None:
        """Remove it with its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def jobs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all handles of this user."""
    folder = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(folder).expanduser() / "paraplan" / "jobs"


def new_name(script: str) -> str:
    """Return a name for a job that no other has, and that all schedulers take: `train-3fa2`."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:30].strip("-")
    stem = stem if stem[:1].isalpha() else f"job-{stem}".rstrip("-")
    while (jobs_folder() / (name := f"{stem}-{secrets.token_hex(2)}")).exists():
        pass
    return name


def handles() -> list[Handle]:
    """Return the handles of this user, the oldest first; folders that hold none are left out."""
    found = []
    for path in jobs_folder().glob(f"*/{_FILE}"):
        try:
            found.append(Handle.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return sorted(found, key=lambda handle: handle.submitted_s)


def find_handle(name: str) -> Handle:
    """Return the handle of this name, or of a scheduler's own id that one job alone has. Raises `UsageError`."""
    known = handles()
    found = [handle for handle in known if handle.name == name] or [one for one in known if one.job_id == name]
    if len(found) > 1:
        names = " and ".join(handle.name for handle in found)
        raise UsageError(f"{name} is the id of several jobs", hint=f"say which: {names}")
    if not found:
        hint = near_names(name, [handle.name for handle in known]) if known else "paraplan submit submits one"
        raise UsageError(f"there is no job {name[:60]!r} in {jobs_folder()}", hint=f"{hint}; paraplan jobs lists them")
    return found[0]
