"""Strike jobs with faults, and show what `paraplan launch` and torchrun say of each, and what they leave behind.

    python scripts/fault_table.py [--only WORDS ...] [--json FILE] [--write]

Needs root and Debian's iproute2: two hosts are network namespaces with names and addresses of their own. A job is two
nodes with two ranks each that all-reduce ten times a second; a fault strikes once all ranks have met. A launcher that
has not ended 40 s later counts as one that never ends. For each fault and launcher: seconds from the fault until a
node's launcher names the cause and until it ends, the exit statuses, and what is left a second later: processes and
temporary files. `--write` puts the table into the page of the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from fault_cases import CASES, Case
from marked import between

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "paraplan" / "docs" / "launch.md"
START, END = "<!-- faults -->\n", "<!-- /faults -->"
sys.path.insert(0, str(ROOT / "tests" / "launch"))
namespaces: Any = importlib.import_module("nodes")  # those of the tests

LAUNCHERS = {"paraplan": ["-m", "paraplan", "launch"], "torchrun": ["-m", "torch.distributed.run"]}
PATIENCE_S, SETTLE_S = 40.0, 1.0
MARK = "FAULT_TABLE_JOB"


@dataclass
class Outcome:
    """What a launcher made of a fault; a node's seconds are None where 40 s were not enough."""

    named_s: list[float | None]
    ended_s: list[float | None]
    statuses: list[int | None]
    verdict: str | None
    left: list[str]
    is_to_end: bool = True

    def __str__(self) -> str:
        parts = [self.verdict] if self.verdict else []
        if self.named_s:
            named = ", ".join("never" if one is None else f"{one:.1f} s" for one in self.named_s)
            parts.append("never says why" if not any(one is not None for one in self.named_s) else f"says why: {named}")
        if self.is_to_end:
            ends = ", ".join("never" if one is None else f"{one:.1f} s" for one in self.ended_s)
            statuses = ", ".join("-" if one is None else str(one) for one in self.statuses)
            parts.append(f"ends: {ends} (status {statuses})")
        return "; ".join([*parts, *([f"leaves {', '.join(self.left)}"] if self.left else [])])


class Job:
    """Launchers on the hosts, with what a case does to them."""

    root = ROOT

    def __init__(self, case: Case, launcher: str, hosts: Any, folder: Path) -> None:
        self.case, self.launcher, self.hosts, self.folder = case, launcher, hosts, folder
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        self.port = free_port()
        for name, text in {"train.py": case.script, **case.files}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        """Start the launcher of a node."""
        ours = ("PET_", "OMP_", "PARAPLAN_")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        variables |= {"TMPDIR": str(self.scratch), MARK: str(self.folder), "PYTHONPATH": str(ROOT)}
        variables |= {"FOLDER": str(self.folder)} | dict(self.case.environment(self, index))
        words = [sys.executable, *LAUNCHERS[self.launcher], *self.case.words(self, index), "train.py"]
        with (self.folder / f"output-{index}").open("ab") as file:
            self.processes[index] = subprocess.Popen(
                self.hosts.command(index, *words),
                cwd=self.folder,
                env=variables,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def said(self, index: int) -> str:
        """Return all that a node's launcher and ranks have written."""
        return (self.folder / f"output-{index}").read_text(errors="replace")

    def rank_pid(self, rank: int) -> int:
        """Return the process id of a rank that has met the others."""
        return int((self.folder / f"pid{rank}").read_text().split()[0])

    def signal_launcher(self, index: int, number: signal.Signals) -> None:
        """Send a signal to the launcher of a node."""
        self.processes[index].send_signal(number)

    def interrupt(self, index: int) -> None:
        """Send what Ctrl-C in a terminal sends: SIGINT to the launcher and all that are in its group."""
        os.killpg(self.processes[index].pid, signal.SIGINT)

    def start_beside(self, index: int, *words: object) -> None:
        """Start one of the job's files on a host, and wait until it listens; it ends with the job."""
        command = self.hosts.command(index, sys.executable, *map(str, words))
        subprocess.Popen(command, cwd=self.folder, env=os.environ | {MARK: str(self.folder)})
        while not self.listening(index):
            time.sleep(0.02)

    def listening(self, index: int) -> list[int]:
        """Return the ports on which anything listens on a host."""
        command = self.hosts.command(index, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        sockets = [line.split() for line in lines if ":" in line.split()[0]]
        return sorted({int(words[1].rpartition(":")[2], 16) for words in sockets if words[3] == "0A"})

    def wait_until_met(self) -> None:
        """Wait until all ranks have met. Raises TimeoutError where they do not, or all launchers have ended."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        while any(not (self.folder / f"pid{rank}").exists() for rank in range(2 * len(self.case.nodes))):
            has_ended = all(process.poll() is not None for process in self.processes.values())
            if has_ended or time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.02)

    def strike(self) -> float:
        """Start the job and let the fault come; return when it came, in monotonic seconds."""
        self.case.before(self)
        for index in self.case.nodes:
            self.start(index)
        if not self.case.meets:
            came = time.monotonic()
            self.case.strike(self)
            return came
        with contextlib.suppress(TimeoutError):  # the verdict says what became of it
            self.wait_until_met()
            time.sleep(SETTLE_S)
            came = time.monotonic()
            self.case.strike(self)
            return came
        return time.monotonic()

    def outcome(self) -> Outcome:
        """Let the fault come and follow what the launchers make of it."""
        came = self.strike()
        watched = self.case.watched if self.case.watched is not None else self.case.nodes
        named: dict[int, float | None] = dict.fromkeys(watched if self.case.cause else ())
        ended: dict[int, float | None] = dict.fromkeys(watched)
        while None in (ended if self.case.ends else named).values() and time.monotonic() < came + PATIENCE_S:
            for index in (index for index in watched if ended[index] is None):
                has_ended = self.processes[index].poll() is not None
                if index in named and named[index] is None and self.case.is_named(self, index):
                    named[index] = time.monotonic() - came
                if has_ended:
                    ended[index] = time.monotonic() - came
            time.sleep(0.02)
        statuses = [None if ended[index] is None else self.processes[index].returncode for index in watched]
        verdict = self.case.verdict(self) if self.case.verdict else None
        left = self.left() if self.case.ends and None not in ended.values() else []
        return Outcome(list(named.values()), list(ended.values()), statuses, verdict, left, self.case.ends)

    def left(self) -> list[str]:
        """Return what the job has left behind, in words."""
        time.sleep(SETTLE_S)
        processes = processes_of(self.folder)
        files = [path for path in self.scratch.iterdir() if path.name != "paraplan-runs"]
        found = [f"{len(processes)} processes"] if processes else []
        return [*found, f"{len(files)} temporary files"] if files else found

    def end(self) -> None:
        """Kill whatever still runs."""
        for pid in processes_of(self.folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.kill()
            process.wait()
        if os.path.ismount(self.folder / "logs"):
            subprocess.run([shutil.which("umount") or "umount", str(self.folder / "logs")], check=True)


def processes_of(folder: Path) -> list[int]:
    """Return the processes of a job: those that have its mark in their environment."""
    mark, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not is_zombie and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def named_hosts(count: int) -> Iterator[Any]:
    """Make hosts that know each other's names, as torchrun asks for."""
    with namespaces.hosts(count) as made:
        lines = [f"{address} node{index}" for index, address in enumerate(made.addresses)]
        folders = [Path("/etc/netns", f"{made.name}h{index}") for index in range(count)]
        try:
            for folder in folders:
                folder.mkdir(parents=True)
                (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            yield made
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def try_case(case: Case, launcher: str, hosts: Any, shown: bool) -> Outcome:
    """Run one case under one launcher."""
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))  # short: the kernel takes 107 characters for a socket
    job = Job(case, launcher, hosts, folder)
    try:
        outcome = job.outcome()
        if shown:
            for index in job.processes:
                print(f"--- {launcher}, node {index}", job.said(index)[-3000:], sep="\n")
        return outcome
    finally:
        job.end()
        shutil.rmtree(folder)


def table(rows: list[tuple[str, dict[str, Outcome]]]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = [f"| fault | {' | '.join(LAUNCHERS)} |", "| --- |" + " --- |" * len(LAUNCHERS)]
    lines += [f"| {name} | {' | '.join(str(outcomes[one]) for one in LAUNCHERS)} |" for name, outcomes in rows]
    where = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, Python {platform.python_version()}"
    return "\n".join([*lines, "", f"Measured on {date.today():%B %-d, %Y}: {where}."]) + "\n"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases whose names hold one of these words")
    parser.add_argument("--show", action="store_true", help="show what the launchers wrote")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if reason := namespaces.missing_for_hosts():
        sys.exit(f"error: no hosts can be made: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and jobs end with it, as with Ctrl-C
    rows = []
    with named_hosts(3) as hosts:
        for case in CASES:
            if arguments.only and not any(word in case.name for word in arguments.only):
                continue
            outcomes = {name: try_case(case, name, hosts, arguments.show) for name in LAUNCHERS}
            rows.append((case.name, outcomes))
            print(case.name, *(f"  {name}: {outcome}" for name, outcome in outcomes.items()), sep="\n", flush=True)
    if arguments.json:
        found = {name: {one: asdict(outcome) for one, outcome in outcomes.items()} for name, outcomes in rows}
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.write:
        PAGE.write_text(between(PAGE.read_text(), START, END, f"\n{table(rows)}\n"))


if __name__ == "__main__":
    main()
