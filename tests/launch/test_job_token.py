"""What the nodes of a job sign, whose clock counts, and at which address their store listens."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from waiting import PATIENCE_S

from paraplan.launch.nodes.endpoint import host_store
from paraplan.launch.nodes.job_token import (
    PROTOCOL,
    TOKEN_VARIABLE,
    ForgedTextError,
    Seal,
    job_port,
    job_seal,
    job_token,
    read_secret,
    secret_file,
)
from paraplan.launch.nodes.rendezvous import NoRendezvousError, find_contradiction
from paraplan.launch.nodes.rendezvous_backend import SealedBackend
from paraplan.launch.nodes.sealed_values import SealedValues
from paraplan.launch.spec import ArgumentError, LaunchSpec, NodeRange
from paraplan.launch.torch_private.rendezvous_state import StateTranslator

LONG = timedelta(seconds=PATIENCE_S)
PAUSE = timedelta(seconds=1)
"""So much time passes between two looks, which tells what goes on with the time from what does not."""
TOKEN = b"of this job"


def test_a_store_listens_at_one_address_alone_and_a_taken_port_is_told() -> None:
    store = host_store("127.0.0.1", 0, timeout=LONG)
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=LONG, wait_for_workers=False)
    client.set("key", "v" * 3_000_000)
    assert len(store.get("key")) == 3_000_000
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    ends = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [end for end in ends if end.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]
    with pytest.raises(DistNetworkError, match=f"EADDRINUSE, port: {store.port}"):
        host_store("127.0.0.1", store.port, timeout=LONG)


def test_the_secret_is_a_file_of_its_owner_alone_or_a_variable(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    secret = read_secret(environment)
    path = secret_file(environment)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(secret) >= 32
    assert read_secret(environment) == secret
    assert [one.name for one in path.parent.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ArgumentError, match="others can read or write") as caught:
        read_secret(environment)
    assert secret.decode() not in str(caught.value)
    assert read_secret({TOKEN_VARIABLE: "x" * 16}) == b"x" * 16
    with pytest.raises(ArgumentError, match="fewer than 16 characters"):
        read_secret({TOKEN_VARIABLE: "short"})


def test_a_home_folder_that_takes_no_files_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="the nodes have no common secret") as caught:
        read_secret({"XDG_CONFIG_HOME": str(tmp_path / "file")})
    assert TOKEN_VARIABLE in str(caught.value.hint)


def test_jobs_have_tokens_and_ports_of_their_own_that_follow_from_the_secret() -> None:
    mine, other = {TOKEN_VARIABLE: "a" * 32}, {TOKEN_VARIABLE: "b" * 32}
    assert job_token(mine, job="7") == job_token(mine, job="7")
    assert len({job_token(mine, job="7"), job_token(mine, job="8"), job_token(other, job="7")}) == 3
    ports = [job_port(environment, job="slurm-7.0", first=20_000, count=12_000) for environment in (mine, mine, other)]
    assert ports[0] == ports[1] != ports[2]
    assert all(20_000 <= port < 32_000 for port in ports)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"body": '{"round": 7}'}, "was not written with this job's token"),
        ({"signature": "0" * 64}, "was not written with this job's token"),
        ({"protocol": PROTOCOL + 1}, f"speaks version {PROTOCOL + 1} of paraplan's protocol"),
        ({"a field of tomorrow": 1}, None),
    ],
)
def test_a_signed_text_is_read_as_it_was_written_or_refused_in_words(
    change: dict[str, object], words: str | None
) -> None:
    seal = Seal(TOKEN)
    text = json.dumps(json.loads(seal.close("state", {"round": 3})) | change)
    if words is None:
        assert seal.open("state", text) == {"round": 3}
        return
    with pytest.raises(ForgedTextError, match=words):
        seal.open("state", text)


def test_a_text_of_another_name_or_job_or_none_of_ours_is_refused() -> None:
    text = Seal(TOKEN).close("state", 1)
    for seal, name in ((Seal(TOKEN), "facts"), (Seal(b"another"), "state")):
        with pytest.raises(ForgedTextError):
            seal.open(name, text)
    for other in (b"\x80\x04", b"[]", b"{}", b"[" * 200_000, b"1" * 5000):
        with pytest.raises(ForgedTextError, match="is not a text of paraplan launch"):
            Seal(TOKEN).open("state", other)


class Ran:
    """What an attacker would have pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["PWNED"],)


def test_a_pickle_in_the_place_of_the_state_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWNED", str(tmp_path / "pwned"))
    store = HashStore()
    backend = SealedBackend(store, "job", seal=Seal(TOKEN), nodes=NodeRange(1, 1), endpoint="here")
    for attack in (pickle.dumps(Ran()), base64.b64encode(pickle.dumps(Ran()))):
        store.set(backend.key, attack)
        with pytest.raises(ForgedTextError):
            backend.get_state()
    assert not (tmp_path / "pwned").exists()


def test_nodes_with_other_numbers_of_nodes_are_told_on_both_sides() -> None:
    store, seal = HashStore(), Seal(TOKEN)
    SealedBackend(store, "job", seal=seal, nodes=NodeRange(2, 2), endpoint="gpu-a:29500")
    with pytest.raises(NoRendezvousError, match="--nnodes is 2 on the first node that came to gpu-a:29500, and 3 here"):
        SealedBackend(store, "job", seal=seal, nodes=NodeRange(3, 3), endpoint="gpu-a:29500")
    assert find_contradiction(SealedValues(store, seal)) == f"{socket.gethostname()} came with --nnodes 3, and not 2"


NODE, OTHER = _NodeDesc("gpu-a", 7, 0), _NodeDesc("gpu-b", 9, 0)


def state_of(**values: object) -> _RendezvousState:
    """Return a state of torch's rendezvous."""
    state = _RendezvousState()
    vars(state).update(values)
    return state


def put(state: _RendezvousState, translator: StateTranslator) -> dict[str, Any]:
    """Return what the store holds of a state."""
    values: dict[str, Any] = json.loads(json.dumps(translator.to_values(pickle.dumps(state))))
    return values


def got(values: dict[str, Any], translator: StateTranslator) -> Any:
    """Return the state that torch is given."""
    return pickle.loads(translator.to_state(values))  # noqa: S301 (of this process)


def test_a_state_goes_through_the_store_and_torchs_pickle_as_it_is() -> None:
    now = datetime.now(UTC)
    state = state_of(
        round=3,
        complete=True,
        participants={NODE: 0, OTHER: 1},
        wait_list={_NodeDesc("gpu-c", 1, 0)},
        redundancy_list={_NodeDesc("gpu-d", 1, 2)},
        last_heartbeats={NODE: now, OTHER: now},
    )
    read = got(put(state, StateTranslator(4)) | {"a field of tomorrow": [1]}, StateTranslator(4))
    assert set(read.last_heartbeats) == {NODE, OTHER}
    read.last_heartbeats = state.last_heartbeats
    assert vars(read) == vars(state)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_node_lives_by_its_count_whatever_its_clock_says(hours: int) -> None:
    theirs, ours = StateTranslator(2), StateTranslator(2)
    wrong = datetime.now(UTC) + timedelta(hours=hours)
    values = put(state_of(participants={OTHER: 0}, last_heartbeats={OTHER: wrong}), theirs)
    before = datetime.now(UTC)
    first = got(values, ours).last_heartbeats[OTHER]
    after = datetime.now(UTC)
    assert before <= first <= after
    time.sleep(PAUSE.total_seconds())
    assert got(values, ours).last_heartbeats[OTHER] - after < PAUSE / 2  # nothing new: it grows old
    got(values, theirs)
    beat = put(state_of(participants={OTHER: 0}, last_heartbeats={OTHER: wrong + timedelta(seconds=5)}), theirs)
    before = datetime.now(UTC)
    assert before <= got(beat, ours).last_heartbeats[OTHER] <= datetime.now(UTC)


def test_a_deadline_is_counted_from_when_a_node_has_first_seen_it() -> None:
    theirs, ours = StateTranslator(2), StateTranslator(2)
    began = datetime.now(UTC)
    deadline = began + timedelta(seconds=30)
    values = put(state_of(deadline=deadline), theirs)
    first = got(values, ours)
    assert abs(first.deadline - deadline) <= datetime.now(UTC) - began
    assert put(first, ours)["deadline"] == values["deadline"]  # passed on as it was
    time.sleep(PAUSE.total_seconds())
    assert abs(got(values, ours).deadline - first.deadline) < PAUSE / 2


@pytest.mark.parametrize("backend", ["static", "c10d", "etcd", "etcd-v2"])
def test_nodes_of_a_job_sign_alike_under_every_rendezvous(backend: str) -> None:
    spec = LaunchSpec(training_script="train.py", rdzv_backend=backend, rdzv_id="a")
    text, other = (job_seal(spec, NodeRange(1, 2), {TOKEN_VARIABLE: "x" * 16}) for _ in range(2))
    assert other.open("name", text.close("name", 1)) == 1
