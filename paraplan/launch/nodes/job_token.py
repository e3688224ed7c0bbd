"""The job token: a secret that the nodes of one job share, and what is signed with it.

It comes from the environment, or from a file that its owner alone can read. It is in no command line, run folder or
message, and ranks do not get it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paraplan.errors import ParaplanError
from paraplan.launch.spec import ArgumentError, LaunchSpec, NodeRange

TOKEN_VARIABLE = "PARAPLAN_JOB_TOKEN"  # noqa: S105 (a variable's name)
"""Environment variable of the secret, for nodes that share no home folder."""

PROTOCOL = 1
"""The version of what nodes say to each other. Fields may be added under one version; readers ignore those unknown."""

_MIN_LETTERS = 16
_BYTES = 32
_HINT = f"export the same {TOKEN_VARIABLE} on every node, such as the output of: openssl rand -hex 32"


class ForgedTextError(ParaplanError):
    """A text between nodes that was not written with the job's token, or under another version of the protocol."""

    exit_status = 1


def secret_file(environment: Mapping[str, str]) -> Path:
    """Return the file of this user's secret, which the nodes of a cluster with one home folder share."""
    folder = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or Path.home()) / ".config"
    return Path(folder) / "paraplan" / "secret"


def read_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of `PARAPLAN_JOB_TOKEN`, or of this user's file, which is made where there is none.

    Raises `ArgumentError` for a secret that is short, or that others can read.
    """
    given = environment.get(TOKEN_VARIABLE)
    if given is not None:
        if len(given) < _MIN_LETTERS:
            raise ArgumentError(f"{TOKEN_VARIABLE} has fewer than {_MIN_LETTERS} characters", hint=_HINT)
        return given.encode()
    path = secret_file(environment)
    try:
        if not path.exists():
            _make_secret(path)
        status = path.stat()
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise ArgumentError(f"others can read or write {path}", hint=f"chmod 600 it, or {_HINT}")
        secret = path.read_bytes().strip()
        if len(secret) < _MIN_LETTERS:
            raise ArgumentError(f"{path} has fewer than {_MIN_LETTERS} characters", hint=f"delete it, or {_HINT}")
        return secret
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ArgumentError(f"the nodes have no common secret: {path}: {reason}", hint=_HINT) from None


def _make_secret(path: Path) -> None:
    """Write a new secret; of two nodes that do so at once, both keep the first one's."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"secret-{secrets.token_hex(8)}")
    partial.touch(mode=0o600, exist_ok=False)
    try:
        partial.write_text(secrets.token_hex(_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()


def random_token() -> bytes:
    """Return a token for a job of one node."""
    return secrets.token_bytes(_BYTES)


def job_token(environment: Mapping[str, str], *, job: str) -> bytes:
    """Return the token of the job that all its nodes call `job`. Raises `ArgumentError` as `read_secret` does."""
    return sign(read_secret(environment), b"job", job.encode())


def job_seal(spec: LaunchSpec, nodes: NodeRange, environment: Mapping[str, str]) -> Seal:
    """Return what signs the texts between the nodes of a job. Raises `ArgumentError` where they share no secret.

    A job of one node has a token of its own.
    """
    return Seal(random_token() if nodes.max == 1 else job_token(environment, job=spec.rdzv_id))


def job_port(environment: Mapping[str, str], *, job: str, first: int, count: int) -> int:
    """Return a port of `count` from `first` on, the same on all nodes, that nobody can tell without the secret."""
    number = int.from_bytes(sign(read_secret(environment), b"port", job.encode())[:8], "big")
    return first + number % count


def sign(token: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of `parts`; no two lists of parts are signed alike."""
    text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(token, text, hashlib.sha256).digest()


class Seal:
    """Writes values as JSON that is signed with the job's token, and reads such JSON alone."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def close(self, name: str, value: object) -> str:
        """Return `value` as text to be stored under `name`."""
        body = json.dumps(value)
        return json.dumps({"protocol": PROTOCOL, "signature": self._signature(name, body), "body": body})

    def open(self, name: str, text: bytes | str) -> Any:
        """Return the value that `close` was given. Raises `ForgedTextError` for any other text."""
        try:
            outer = json.loads(text)
            version, signature, body = outer["protocol"], str(outer["signature"]), str(outer["body"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ForgedTextError(
                f"what the rendezvous holds as {name} is not a text of paraplan launch",
                hint="start every node with the same version of paraplan launch, not with torchrun",
            ) from None
        if version != PROTOCOL:
            raise ForgedTextError(
                f"another node speaks version {version!r} of paraplan's protocol, this one version {PROTOCOL}",
                hint="install the same version of paraplan on every node",
            )
        given, expected = (each.encode("utf-8", "surrogatepass") for each in (signature, self._signature(name, body)))
        if not hmac.compare_digest(given, expected):
            raise ForgedTextError(
                f"what the rendezvous holds as {name} was not written with this job's token",
                hint=f"another job uses this endpoint, or the secrets differ: {_HINT}",
            )
        return json.loads(body)

    def _signature(self, name: str, body: str) -> str:
        return sign(self._token, b"seal", name.encode(), body.encode("utf-8", "surrogatepass")).hex()
