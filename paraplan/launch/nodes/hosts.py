"""A job on the hosts of a host file: one launcher on each, started through ssh, ended with this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paraplan.launch.faults.report import say
from paraplan.launch.nodes.batch_systems import FIRST_PORT, NUM_PORTS
from paraplan.launch.nodes.job_token import TOKEN_VARIABLE, random_token
from paraplan.launch.spec import END_WITH_STDIN, ArgumentError

# starts of the names of variables that the launchers on other hosts get from this one
_PASSED_ON = (
    *("CUDA_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "OMP_", "PARAPLAN_", "PET_"),
    *("PYTHON", "PYTORCH_", "TORCH"),
)
# start of the names of variables that Python reads before it runs anything: these stand in the command line
_FOR_THE_INTERPRETER = "PYTHON"
_GRACE_S = 45.0  # more than a launcher gives to its own ranks
_PORT_TRIES = 20
_SSH_FAILED = 255  # man ssh, EXIT STATUS


@dataclass(frozen=True)
class Host:
    """A line of a host file; `slots` is the number of ranks there, None where it does not say."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The address by which other hosts reach it: its name without the user's."""
        return self.name.rpartition("@")[2].strip("[]")


def read_host_file(path: Path) -> list[Host]:
    """Return the hosts of a file: a name a line, with `slots=8` (Open MPI, DeepSpeed) or `:8` (MPICH) after it.

    Raises `ArgumentError` for a file that cannot be read, and for a line that is not a host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentError(f"the host file {path} cannot be read: {reason}", hint="one host name a line") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(
            r"(\w[\w.@-]*|\[[\da-fA-F:.]+\])(?::(\d+)|\s+slots\s*=\s*(\d+))?(\s+max[_-]slots=\d+)?", text
        )
        if match is None:
            raise ArgumentError(f"{path}:{number}: {text!r} is not a host", hint="write gpu-a, or gpu-a slots=8")
        slots = match[2] or match[3]
        hosts.append(Host(match[1], int(slots) if slots else None))
    if not hosts:
        raise ArgumentError(f"the host file {path} names no hosts", hint="one host name a line")
    return hosts


def host_variables(
    host: Host, *, node_rank: int, hosts: Sequence[Host], port: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that the launcher on `host` gets through its standard input."""
    variables = {name: environment[name] for name in carried_variables(environment)} | {
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(node_rank),
        "PET_MASTER_ADDR": hosts[0].address,
        "PET_MASTER_PORT": str(port),
    }
    if host.slots is not None:
        variables.setdefault("PET_NPROC_PER_NODE", str(host.slots))
    return variables


def carried_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that the launchers on other hosts get from this one."""
    return sorted(name for name in environment if name.startswith(_PASSED_ON))


def host_command(host: Host, *, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command that runs `paraplan launch WORDS` on `host` as a node that gets its variables by stdin.

    ssh hands one text to a shell of the other host: every word is quoted for it.
    """
    shown = {name: value for name, value in environment.items() if name.startswith(_FOR_THE_INTERPRETER)}
    shown[END_WITH_STDIN] = "1"
    command = ["env", *(f"{name}={value}" for name, value in sorted(shown.items()))]
    command += [sys.executable, "-m", "paraplan", "launch", *words]
    if _is_this_host(host.name):
        return command
    return ["ssh", "-o", "BatchMode=yes", host.name, f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(command)}"]


def _is_this_host(name: str) -> bool:
    return name in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def launch_on_hosts(path: Path, *, words: Sequence[str], port: int | None, environment: Mapping[str, str]) -> int:
    """Run `paraplan launch WORDS` on all hosts of the file at `path`; return the status of the one that failed first.

    All have ended when this returns. Raises `ArgumentError` for a host file that cannot be used.
    """
    hosts = read_host_file(path)
    if len(hosts) > 1 and hosts[0].name in ("localhost", "127.0.0.1", "[::1]"):
        raise ArgumentError(f"{path}: other hosts cannot reach {hosts[0].name}", hint="give its name in the network")
    token = {TOKEN_VARIABLE: environment.get(TOKEN_VARIABLE) or random_token().hex()}
    return _HostJob(hosts).run(port=port or _free_port(hosts[0]), words=words, environment={**environment, **token})


def _free_port(host: Host) -> int:
    """Return a port by chance; where the first host is this one, a port that is free here."""
    for _ in range(_PORT_TRIES):
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        if not _is_this_host(host.name):
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            break
    return port


def take_variables(environment: MutableMapping[str, str]) -> None:
    """Take the first line on standard input of a launcher that another one has started as variables.

    Raises `ArgumentError` where it is something else.
    """
    line = io.FileIO(0, closefd=False).readline()  # unbuffered: what follows it is not this function's to take
    try:
        environment.update({str(name): str(value) for name, value in json.loads(line).items()})
    except (ValueError, AttributeError, RecursionError):
        raise ArgumentError(
            f"{END_WITH_STDIN} is set, and standard input does not begin with variables",
            hint="unset it: paraplan launch --hostfile sets it for the launchers that it starts",
        ) from None


class _HostJob:
    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stop_signal: int | None = None
        self._status = 0

    def run(self, *, port: int, words: Sequence[str], environment: Mapping[str, str]) -> int:
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self._stop) for number in handled}
        try:
            for rank, host in enumerate(self._hosts):
                command = host_command(host, words=words, environment=environment)
                # a session of its own: a Ctrl-C of the terminal is this process's to act on
                process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
                self._processes.append(process)
                variables = host_variables(host, node_rank=rank, hosts=self._hosts, port=port, environment=environment)
                with contextlib.suppress(BrokenPipeError):  # it has ended already, and `_wait` sees how
                    assert process.stdin is not None
                    process.stdin.write(json.dumps(variables).encode() + b"\n")
                    process.stdin.flush()
            self._wait()
        except FileNotFoundError:
            raise ArgumentError("there is no ssh to reach the hosts with", hint="install an ssh client") from None
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 128 + self._stop_signal if self._stop_signal is not None else self._status

    def _stop(self, number: int, frame: object) -> None:
        if self._stop_signal is not None:
            for process in self._processes:
                process.kill()
        self._stop_signal = number
        self._close_inputs()

    def _wait(self) -> None:
        """Wait for all hosts; after a first failure the others get a while to say how they fared."""
        deadline: float | None = None
        ended: set[int] = set()
        while len(ended) < len(self._processes):
            for index, process in enumerate(self._processes):
                if index not in ended and process.poll() is not None:
                    ended.add(index)
                    self._note(self._hosts[index], process.returncode)
            if deadline is None and (self._status or self._stop_signal is not None):
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def _note(self, host: Host, code: int) -> None:
        if code == _SSH_FAILED and not _is_this_host(host.name):
            say(f"ssh to {host.name} failed, or lost its connection")
        if code and not self._status:
            self._status = code if code > 0 else 128 - code
            if self._stop_signal is None and code == _SSH_FAILED:
                self._close_inputs()  # the others would wait for this node until their rendezvous times out

    def _close_inputs(self) -> None:
        """End the launchers on all hosts: their standard input ends."""
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):  # what it did not read before it ended
                    process.stdin.close()

    def _end_all(self) -> None:
        self._close_inputs()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end_with_stdin() -> None:
    """Have this process get SIGTERM when its standard input ends, in a thread that waits for it."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="end with stdin").start()
