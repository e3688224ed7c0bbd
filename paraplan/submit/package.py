"""The files of a job: those that git knows or does not ignore, as they are now, within a limit."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paraplan.errors import UsageError
from paraplan.units import format_bytes

LIMIT_BYTES = 100 << 20
"""The largest size of a package; data and checkpoints belong elsewhere."""
_IGNORED = (".git", "__pycache__", ".venv")


@dataclass(frozen=True)
class Package:
    """Files under `root`, by their paths below it. `commit` is that of git, None outside of a repository."""

    root: Path
    files: tuple[Path, ...]
    size_bytes: int
    commit: str | None
    has_changes: bool

    def describe(self) -> str:
        """Return it in words."""
        of = ""
        if self.commit is not None:
            of = f" of {self.commit[:10]}" + (" with local changes" if self.has_changes else "")
        return f"{len(self.files)} files, {format_bytes(self.size_bytes)}{of}, from {self.root}"

    def copy_to(self, folder: Path) -> None:
        """Copy the files; links stay links where they lead to files of the package."""
        for file in self.files:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / file, target)


def find_package(folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> Package:
    """Return the package of the repository around `folder`, or of `folder` itself outside of one.

    Files that .gitignore names are left out; changes and new files that are in no commit are in it. Raises `UsageError`
    above the limit, with the largest files.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        root, commit, has_changes = folder, None, False
        found = (path for path in folder.rglob("*") if not set(path.relative_to(folder).parts) & {*_IGNORED})
        names = [path.relative_to(folder) for path in found]
    else:
        root = Path(top.strip())
        commit = (_git(root, "rev-parse", "HEAD") or "").strip() or None
        has_changes = bool(_git(root, "status", "--porcelain"))
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        names = [Path(name) for name in listed.split("\0") if name]
    files = sorted({name for name in names if (root / name).is_file()})
    sizes = {name: (root / name).stat().st_size for name in files}
    size_bytes = sum(sizes.values())
    if size_bytes > limit_bytes:
        largest = sorted(files, key=lambda name: -sizes[name])[:3]
        named = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
        raise UsageError(
            f"the files in {root} have {format_bytes(size_bytes)}, and a package at most {format_bytes(limit_bytes)}: "
            f"{named}",
            hint="have .gitignore name data and checkpoints, or run in this folder itself: --in-place",
        )
    return Package(root, tuple(files), size_bytes, commit, has_changes)


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints, None where there is no git or no repository."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        ended = subprocess.run(
            [git, "-C", str(folder), *words], capture_output=True, text=True, errors="surrogateescape", check=False
        )
    except OSError:
        return None
    return None if ended.returncode else ended.stdout
