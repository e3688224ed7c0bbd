"""The rendezvous of nodes: stores behind gates, whose waits Ctrl-C ends, and messages that name missing nodes."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked

from paraplan.errors import ParaplanError
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.clocks import LARGE_SKEW_S, describe_skew
from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.endpoint import (
    Endpoint,
    await_answer,
    describe_silence,
    find_listener,
    host_of,
    is_own_address,
    meaning_of,
)
from paraplan.launch.nodes.handshake import NoLauncherError, RefusedError
from paraplan.launch.nodes.interfaces import addresses_of, is_loopback
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.moved_job import find_moved_job
from paraplan.launch.nodes.native_calls import run_interruptibly
from paraplan.launch.spec import DEFAULT_MASTER_PORT, LaunchSpec, NodeRange
from paraplan.launch.torch_private.texts import CLOSED_RENDEZVOUS, LATE_RENDEZVOUS, NOBODY_THERE, PORT_TAKEN

_POLL_S = 0.05
_OWN_STORE = timedelta(seconds=60)  # for the store of this very node, which a busy machine may delay
_ENTER_S = 60.0  # for the first node's launcher to let the others in
_ASK_AGAIN_S = 0.5
_SILENCE_S = 5.0  # for the other side of a connection to say what it is
_NNODES_KEY, _CONTRADICTION_KEY = "paraplan/nnodes", "paraplan/contradiction"
_HINT = "start the same command on every node, and let the port through their firewalls"


SAY_AFTER_S = 5.0
"""How long nodes are waited for before it is said which are missing."""


class NoRendezvousError(ParaplanError):
    """Nodes that do not find each other, or a port that is taken."""

    exit_status = 1


def open_store(
    host: str, port: int, *, is_master: bool, timeout: timedelta, doors: Doors, silence_s: float | None = None, **_: Any
) -> TCPStore:
    """Return the store at an endpoint, which `is_master` hosts itself; torch's arguments.

    Others wait until something answers there, for as long as torch does: twice `timeout`. Ctrl-C ends the wait at
    once, which in torch's own code it does not. With `silence_s` the store is the one of the node that the job has
    moved to, where it has, and calls raise once that machine has said nothing for so long. Raises torch's errors where
    it cannot be hosted, and `NoRendezvousError` where nothing answers, or something that is no launcher of this job.
    """
    endpoint, timeout_s = Endpoint(host, port), 2 * timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    if silence_s is not None and doors.elsewhere:
        moved = _join_elsewhere(
            endpoint, doors, waits=not is_master, timeout=timeout, deadline=deadline, silence_s=silence_s
        )
        if moved is not None:
            return moved
    if is_master:
        doors.standing.door = doors.standing.leader = str(endpoint)
        return run_interruptibly(lambda: doors.host_store(host, port, timeout=timeout))
    named = _named(endpoint)
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        silence = await_answer(endpoint, timeout_s=left_s, on_wait=lambda reason: say(f"waiting for {named}: {reason}"))
        if silence is not None:
            raise _nobody_error(endpoint, silence, timeout_s, is_movable=silence_s is not None)
        _enter(endpoint, doors, timeout_s=max(1.0, deadline - time.monotonic()), again=silence_s is not None)
        job = doors.job_at(endpoint) if silence_s is not None else None
        try:
            if job is not None and job.leader != job.door:
                store = join_store(Endpoint.parse(job.leader), doors, timeout=timeout, silence_s=silence_s)
                say(f"the job of {endpoint} is at {job.leader} now")
                doors.standing.move(job.term, job.leader)
                return store
            store = _client(endpoint, doors, timeout=timeout, timeout_s=timeout_s, silence_s=silence_s)
        except NoRendezvousError:  # the job has moved on since, or will soon
            if silence_s is None or time.monotonic() > deadline:
                raise
            time.sleep(_ASK_AGAIN_S)
        else:
            doors.standing.move(0 if job is None else job.term, str(endpoint) if job is None else job.leader)
            return store


def _join_elsewhere(
    endpoint: Endpoint, doors: Doors, *, waits: bool, timeout: timedelta, deadline: float, silence_s: float
) -> TCPStore | None:
    """Return the store of a job that has moved from its endpoint, None where the endpoint's host answers itself.

    Without `waits` also None where none of the other places knows of such a job. Raises `NoRendezvousError` where
    there is neither.
    """
    started = time.monotonic()
    is_said = False
    silence: OSError | None = None
    while True:
        job = find_moved_job(doors)
        if job is not None:
            try:
                store = join_store(Endpoint.parse(job.leader), doors, timeout=timeout, silence_s=silence_s)
            except NoRendezvousError:  # it has moved on since, or will soon
                silence = silence or ConnectionAbortedError(f"the job went to {job.leader}, which does not answer")
            else:
                say(f"the job of {endpoint} is at {job.leader} now")
                doors.standing.move(job.term, job.leader)
                return store
        elif not waits:
            return None
        else:
            silence = await_answer(endpoint, timeout_s=_ASK_AGAIN_S)
            if silence is None:
                return None
        if time.monotonic() > deadline:
            raise _nobody_error(endpoint, silence, round(deadline - started, 1), others=doors.elsewhere)
        if time.monotonic() > started + SAY_AFTER_S and not is_said:
            is_said = True
            others = f", and no other host of --rdzv-endpoint knows where the job is: {', '.join(doors.elsewhere)}"
            say(f"waiting for {_named(endpoint)}: {describe_silence(silence)}{others}")
        time.sleep(_POLL_S)


def join_store(endpoint: Endpoint, doors: Doors, *, timeout: timedelta, silence_s: float | None) -> TCPStore:
    """Return the store at the door of a node that runs. Raises `NoRendezvousError` where there is no such one."""
    doors.clock_offset_s = None
    _enter(endpoint, doors, timeout_s=_SILENCE_S, again=True)
    return _client(endpoint, doors, timeout=timeout, timeout_s=_SILENCE_S, silence_s=silence_s)


def _client(
    endpoint: Endpoint, doors: Doors, *, timeout: timedelta, timeout_s: float, silence_s: float | None
) -> TCPStore:
    host, port = endpoint.host, endpoint.port
    try:
        store = run_interruptibly(
            lambda: TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False), timeout_s=timeout_s
        )
    except (RuntimeError, TimeoutError) as error:  # torch's DistError is a RuntimeError
        raise _stranger_error(endpoint, str(error)) from error
    if silence_s is not None:
        doors.hold_line(endpoint, silence_s=silence_s)
    return store


def _enter(endpoint: Endpoint, doors: Doors, *, timeout_s: float, again: bool = False) -> None:
    """Be let in at the gate of an endpoint. Raises `NoRendezvousError` where that is none of this job."""
    deadline = time.monotonic() + timeout_s
    is_first = doors.clock_offset_s is None
    is_said = False
    while True:
        left_s = deadline - time.monotonic()
        try:
            run_interruptibly(partial(doors.enter, endpoint, timeout_s=min(_SILENCE_S, max(left_s, 0.1)), again=again))
        except NoLauncherError as error:
            raise _stranger_error(endpoint, error.message) from error
        except RefusedError as error:
            raise NoRendezvousError(f"the launcher at {_named(endpoint)}: {error.message}", hint=error.hint) from error
        except TimeoutError as error:
            if left_s < _SILENCE_S:
                raise _stranger_error(endpoint, "it accepts connections and says nothing") from error
            if not is_said:
                say(f"waiting for {_named(endpoint)}: it accepts connections and says nothing")
            is_said = True
        except OSError as error:
            if left_s < _POLL_S or not isinstance(error, ConnectionRefusedError):
                raise _stranger_error(endpoint, str(error)) from error
            time.sleep(_POLL_S)
        else:
            break
    offset_s = doors.clock_offset_s or 0.0
    if is_first and abs(offset_s) > LARGE_SKEW_S:
        say(f"the clock of this node is {describe_skew(-offset_s)} that of the node at {endpoint}")


def enter_store_of_ranks(environment: Mapping[str, str], doors: Doors) -> None:
    """Be let in at the store that ranks with this environment look for, where another node's launcher hosts it."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not port.isdigit():
        return  # rank 0 hosts it itself
    if not doors.hosts(address, int(port)):
        _enter(Endpoint(address, int(port)), doors, timeout_s=_ENTER_S)


def require_same_nnodes(store: Store, nodes: NodeRange, *, endpoint: str, seal: Seal) -> None:
    """Raise `NoRendezvousError` where another node of the rendezvous was given another --nnodes."""
    mine = seal.close(_NNODES_KEY, str(nodes))
    stored = run_interruptibly(lambda: store.compare_set(_NNODES_KEY, "", mine))
    agreed = str(seal.open(_NNODES_KEY, stored))
    if agreed != str(nodes):
        theirs = str(NodeRange.parse(agreed))
        error = NoRendezvousError(
            f"--nnodes is {_shortest(theirs)} on the first node that came to {endpoint}, and {_shortest(str(nodes))} "
            f"here, on {socket.gethostname()}",
            hint="give all nodes the same number",
        )
        notice = f"{socket.gethostname()} came with --nnodes {_shortest(str(nodes))}, and not {_shortest(theirs)}"
        run_interruptibly(lambda: store.set(_CONTRADICTION_KEY, seal.close(_CONTRADICTION_KEY, notice)))
        raise error


def find_contradiction(store: Store, *, seal: Seal) -> str | None:
    """Return what a node that was sent away contradicted, None where there was no such node."""
    if not run_interruptibly(lambda: store.check([_CONTRADICTION_KEY])):
        return None
    return str(seal.open(_CONTRADICTION_KEY, run_interruptibly(lambda: store.get(_CONTRADICTION_KEY))))


def _shortest(nodes: str) -> str:
    low, _, high = nodes.partition(":")
    return low if low == high else nodes


def open_static_store(
    host: str,
    port: int,
    num_nodes: int,
    is_master: bool,
    timeout: timedelta,
    *,
    node_rank: int,
    doors: Doors,
    **_: Any,
) -> TCPStore:
    """Return the store of a static rendezvous once all nodes have joined; torch's arguments, and this node's rank.

    torch waits for the number of nodes alone. Raises `NoRendezvousError` with the nodes that are missing and those that
    are here, and for a rank that two nodes have.
    """
    endpoint = str(Endpoint(host, port))
    patience = max(timeout, _OWN_STORE) if is_master else timeout
    store = open_store(host, port, is_master=is_master, timeout=patience, doors=doors)
    require_same_nnodes(store, NodeRange(num_nodes, num_nodes), endpoint=endpoint, seal=doors.seal)
    mine = f"{socket.gethostname()} {time.time_ns()}"
    owner = store.compare_set(f"paraplan/here/{node_rank}", "", mine).decode()
    if owner != mine:
        raise NoRendezvousError(
            f"--node-rank {node_rank} is taken at {endpoint} by {owner.rpartition(' ')[0]}",
            hint="give each node a --node-rank of its own",
        )
    deadline = time.monotonic() + timeout.total_seconds()
    says_at = time.monotonic() + SAY_AFTER_S
    missing = set(range(num_nodes))
    while missing:
        missing = run_interruptibly(partial(_absent, store, missing))
        if missing and time.monotonic() > says_at:
            say(f"waiting at {endpoint} for {_nodes_in_words(sorted(missing))} of {num_nodes}")
            contradiction = find_contradiction(store, seal=doors.seal)
            if contradiction is not None:
                say(contradiction)
            says_at = deadline + SAY_AFTER_S  # once
        if missing and time.monotonic() > deadline:
            here = {
                rank: store.get(f"paraplan/here/{rank}").decode().rpartition(" ")[0]
                for rank in range(num_nodes)
                if rank not in missing
            }
            raise _missing_error(endpoint, sorted(missing), here, timeout.total_seconds())
        if missing:
            time.sleep(_POLL_S)
    return store


def _absent(store: TCPStore, ranks: Set[int]) -> set[int]:
    return {rank for rank in ranks if not store.check([f"paraplan/here/{rank}"])}


def _named(endpoint: Endpoint) -> str:
    """Return `gpu-a:29500 (10.0.0.1 on this node)`."""
    return f"{endpoint}{meaning_of(endpoint.host)}"


def _nobody_error(
    endpoint: Endpoint, silence: OSError, timeout_s: float, *, is_movable: bool = False, others: Sequence[str] = ()
) -> NoRendezvousError:
    addresses = addresses_of(endpoint.host)
    hint = "start the same command on the node that has this address, and let the port through the firewalls"
    if not addresses:
        hint = "give the first node's address"
    elif any(map(is_loopback, addresses)):
        hint = _loopback_hint(endpoint.host) or hint
    elif any(map(is_own_address, addresses)):
        hint = (
            "it is an address of this node: start the first node (--node-rank 0) here too, or have this one host the "
            "rendezvous with --rdzv-conf is_host=true"
        )
    elif is_movable:
        hint += f"; --rdzv-endpoint {endpoint},HOST,... has several hosts asked where the job is"
    elsewhere = f"; {', '.join(others)} know{'s' if len(others) == 1 else ''} of no job" if others else ""
    return NoRendezvousError(
        f"nothing answers at {_named(endpoint)}: {describe_silence(silence)}{elsewhere}; tried for {timeout_s:g} s",
        hint=hint,
    )


def _stranger_error(endpoint: Endpoint, said: str) -> NoRendezvousError:
    """Return the error of something that accepts connections and is not torch's store."""
    is_here = any(map(is_own_address, addresses_of(endpoint.host)))
    listener = find_listener(endpoint.port) if is_here else None
    who = f"another program, {listener}," if listener else "another program"
    return NoRendezvousError(
        f"{who} listens at {_named(endpoint)}, or a launcher that has stopped: {said.splitlines()[0].rstrip('.')}",
        hint="give the address of the first node, and a port that no other program has",
    )


def _missing_error(endpoint: str, missing: Sequence[int], here: dict[int, str], timeout_s: float) -> NoRendezvousError:
    present = ", ".join(f"{rank} ({host})" for rank, host in here.items())
    return NoRendezvousError(
        f"{len(missing)} of {len(missing) + len(here)} nodes did not reach {endpoint} within {timeout_s:g} s: "
        f"missing {_nodes_in_words(missing)}; here {'is' if len(here) == 1 else 'are'} {present}",
        hint=_loopback_hint(host_of(endpoint)) or _HINT,
    )


def _nodes_in_words(ranks: Sequence[int]) -> str:
    return f"{'node' if len(ranks) == 1 else 'nodes'} {', '.join(map(str, ranks))}"


def rendezvous_warnings(spec: LaunchSpec, nodes: NodeRange) -> tuple[str, ...]:
    """Return what may make a rendezvous of several nodes fail."""
    host = host_of(_endpoint(spec))
    if nodes.max == 1 or spec.rdzv_backend not in ("static", "c10d") or not host:
        return ()
    addresses = addresses_of(host)
    if any(map(is_loopback, addresses)):
        named = host if host in addresses else f"{host} ({' or '.join(addresses)})"
        return (f"other machines cannot reach the rendezvous at {named}: give another address with --rdzv-endpoint",)
    if addresses:
        return ()
    return (f"this node knows no address of {host}, where the rendezvous is; asking again",)


def _endpoint(spec: LaunchSpec) -> str:
    return spec.rdzv_endpoint or str(Endpoint(spec.master_addr, spec.master_port or DEFAULT_MASTER_PORT))


def rendezvous_error(
    said: str, spec: LaunchSpec, nodes: NodeRange, *, came: Sequence[str] = (), has_begun: bool = False
) -> NoRendezvousError:
    """Return what torch `said` about a failed rendezvous as one sentence with something to do.

    `came` are the nodes that have joined an elastic rendezvous, where known; `has_begun` says that ranks have run.
    """
    port = re.search(r"\bport: (\d+)", said)
    if port is not None and PORT_TAKEN in said:
        listener = find_listener(int(port[1]))
        return NoRendezvousError(
            f"port {port[1]} of this host is taken" + (f" by {listener}" if listener else ""),
            hint="give another --master-port or --rdzv-endpoint; without them one node takes a free port by itself",
        )
    endpoint = _endpoint(spec)
    host = host_of(endpoint)
    addresses = addresses_of(host)
    if not addresses:
        return NoRendezvousError(f"this node knows no address of {host}", hint="give the first node's address")
    means = meaning_of(host)
    if CLOSED_RENDEZVOUS in said:
        return NoRendezvousError(
            f"the job at {endpoint} has ended: another node has closed the rendezvous", hint="see its own messages"
        )
    if any(words in said for words in NOBODY_THERE) and has_begun:
        return NoRendezvousError(
            f"the node that hosts the rendezvous is gone: nothing answers at {endpoint}{means} any more",
            hint="see its own messages; with --nnodes MIN:MAX and --max-restarts the others go on without it",
        )
    if any(words in said for words in NOBODY_THERE):
        return NoRendezvousError(f"nothing answers at {endpoint}{means}", hint=_loopback_hint(host) or _HINT)
    if came or LATE_RENDEZVOUS in said:
        seen = f"; here {'is' if len(came) == 1 else 'are'} {', '.join(came)}" if came else ""
        return NoRendezvousError(
            f"fewer than {nodes.min} nodes reached {endpoint}{means} in time{seen}",
            hint=_loopback_hint(host) or f"{_HINT}; --rdzv-conf join_timeout=SECONDS waits longer",
        )
    return NoRendezvousError(f"rendezvous at {endpoint}{means} failed: {said.splitlines()[0].rstrip('.')}", hint=_HINT)


def _loopback_hint(host: str) -> str | None:
    """Return what to do where other nodes are given an address that only this one reaches; None where they are not."""
    loopback = [address for address in addresses_of(host) if is_loopback(address)]
    if not loopback:
        return None
    means = f"{host} is an address that" if host == loopback[0] else f"{host} means {loopback[0]} here, which"
    return f"{means} no other node reaches: give the network address of the first node"
