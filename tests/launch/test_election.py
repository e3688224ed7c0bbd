"""Who holds the store of an elastic job next: two groups of nodes never go on at once, and the first of one does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from waiting import PATIENCE_S, wait_until

from paraplan.launch.elastic.movable import MovableRendezvous
from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.election import Answer, Member, Standing, Survey, choose_leader, is_enough, survey
from paraplan.launch.nodes.endpoint import Endpoint
from paraplan.launch.nodes.gate import Launcher
from paraplan.launch.nodes.moved_job import find_moved_job

TOKEN = b"of this job"
LONG = timedelta(seconds=PATIENCE_S)


def members(count: int) -> list[Member]:
    return [Member(f"10.0.0.{node}:1", f"launcher{node}", f"gpu-{node}", (f"gpu-{node}", 7)) for node in range(count)]


def standing_of(member: Member, *, term: int = 0, leader: str = "") -> Standing:
    return Standing(member.launcher, member.door, term, leader)


def search(of: list[Member], me: int, *, lost: set[int], ended: set[int], term: int = 0) -> str:
    """Return where a member meets that hears from those who have `lost` the store; all but the `ended` are silent."""
    answers = {of[node].door: Answer(term, "", of[node].launcher, of[node].door) for node in lost - {me}}
    found = Survey(answers, frozenset(of[node].door for node in ended))
    return choose_leader(standing_of(of[me], term=term), of, found).leader


@given(data=st.data(), count=st.integers(1, 7))
def test_of_the_parts_of_a_network_one_at_most_goes_on(data: st.DataObject, count: int) -> None:
    of = members(count)
    parts = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))  # 3: they have ended
    ended = {node for node in range(count) if parts[node] == 3}
    holder = data.draw(st.integers(0, count - 1))
    going_on = []
    for part in range(3):
        inside = {node for node in range(count) if parts[node] == part}
        seen = {node for node in ended if data.draw(st.booleans())}  # others of them are silent: a machine that is off
        possible = count - len(seen)
        if holder in inside:
            going_on += [part] * is_enough(len(inside), possible=possible, is_same_term=True)
        else:
            chosen = {search(of, me, lost=inside, ended=seen) for me in inside}
            assert len(chosen) <= 1, "those who see the same choose the same"
            going_on += [part] * bool(chosen - {""})
            assert not chosen - {""} or chosen == {of[min(inside)].door}
            assert bool(chosen - {""}) == is_enough(len(inside), possible=possible, is_same_term=False)
    assert len(going_on) <= 1


def test_the_first_that_is_left_is_the_next_and_one_alone_goes_on_where_the_other_has_ended() -> None:
    four = members(4)
    assert search(four, 2, lost={1, 2, 3}, ended={0}) == four[1].door
    assert search(four, 3, lost={2, 3}, ended={0}) == four[2].door, "two of the three that may run"
    assert search(four, 3, lost={2, 3}, ended=set()) == "", "the other two may go on"
    assert search(members(2), 1, lost={1}, ended={0}) == members(2)[1].door
    assert search(members(2), 1, lost={1}, ended=set()) == ""


def test_a_node_that_has_lost_the_store_alone_goes_back_to_it_or_waits() -> None:
    three = members(3)
    here = Answer(0, three[0].door, three[0].launcher, three[0].door)
    there = Answer(0, three[0].door, three[1].launcher, three[1].door)
    me = standing_of(three[2])
    back = choose_leader(me, three, Survey({here.door: here, there.door: there}, frozenset()))
    assert (back.leader, back.term) == (three[0].door, 0)
    cut_off = choose_leader(me, three, Survey({there.door: there}, frozenset({three[0].door})))
    assert cut_off.leader == ""
    assert cut_off.reason == "gpu-1 still reaches the node with the rendezvous"


def test_another_launcher_at_a_door_means_that_the_one_before_has_ended() -> None:
    two = members(2)
    anew = Answer(0, two[0].door, "another", two[0].door)
    choice = choose_leader(standing_of(two[1]), two, Survey({two[0].door: anew}, frozenset()))
    assert (choice.leader, choice.term) == (two[1].door, 1)


def test_the_later_term_is_where_the_job_is() -> None:
    one, other = members(2)
    standing = standing_of(one, term=2, leader=one.door)
    standing.hear(Answer(1, other.door, other.launcher, other.door))
    standing.hear(Answer(3, "", other.launcher, other.door))
    assert standing.newer is None
    standing.hear(Answer(3, other.door, other.launcher, other.door))
    assert standing.newer is not None
    standing.move(3, other.door)
    assert standing.newer is None
    standing.hear(Answer(3, "10.0.0.9:1", other.launcher, other.door))
    assert standing.newer is not None, "my leader has another one in my term"


@pytest.fixture
def two_doors() -> Iterator[tuple[Doors, Doors, list[str]]]:
    said: list[str] = []
    host, guest = Doors(TOKEN, say=said.append), Doors(TOKEN)
    port = host.host_store_of_ranks("127.0.0.1", timeout=LONG)[1]
    host.standing.door = host.standing.leader = f"127.0.0.1:{port}"
    guest.enter(Endpoint("127.0.0.1", port))
    guest.open_own_door(Endpoint("127.0.0.1", port), timeout=LONG)
    yield host, guest, said
    host.close()
    guest.close()


def test_a_node_has_a_door_of_its_own_that_answers_those_who_know_the_token(
    two_doors: tuple[Doors, Doors, list[str]],
) -> None:
    host, guest, said = two_doors
    assert guest.standing.door.startswith("127.0.0.1:")
    assert guest.standing.door != host.standing.door
    assert guest.own_store is not None
    guest.standing.move(1, guest.standing.door)
    free = "127.0.0.1:1"
    found = survey([guest.standing.door, free], token=TOKEN, standing=host.standing)
    assert found.refused == {free}
    assert found.answers[guest.standing.door].term == 1
    assert host.standing.newer == found.answers[guest.standing.door], "who asks is told"
    assert not host.gone, "who only asks is no launcher that comes and goes"
    strangers = survey([host.standing.door], token=b"of another", standing=Standing())
    assert not strangers.answers
    assert not strangers.refused, "who does not know the token learns nothing"
    asked = survey([host.standing.door], token=TOKEN, standing=guest.standing)
    assert asked.answers[host.standing.door].launcher == host.standing.launcher
    assert said == ["refused a connection from 127.0.0.1: it does not know this job's token"]


def test_who_comes_to_an_endpoint_is_told_where_the_job_is(two_doors: tuple[Doors, Doors, list[str]]) -> None:
    host, guest, _ = two_doors
    endpoint = Endpoint.parse(host.standing.door)
    assert guest.job_at(endpoint) is None
    host.standing.move(1, guest.standing.door)
    guest.enter(endpoint, again=True)
    told = guest.job_at(endpoint)
    assert told is not None
    assert (told.term, told.leader) == (1, guest.standing.door)


def test_a_launcher_that_comes_again_is_not_gone(two_doors: tuple[Doors, Doors, list[str]]) -> None:
    host, guest, _ = two_doors
    for _ in range(20):
        guest.enter(Endpoint.parse(host.standing.door), again=True)
    own = Launcher(guest.facts["host"], "127.0.0.1", int(guest.facts["pid"]))
    assert own not in host.gone


def test_a_new_host_of_the_endpoint_sees_nodes_of_the_job_as_it_was(two_doors: tuple[Doors, Doors, list[str]]) -> None:
    host, guest, _ = two_doors
    endpoint = Endpoint.parse(host.standing.door)
    assert host.members_at() == []
    guest.standing.others = (guest.standing.door,)  # of a round
    guest.enter(endpoint, again=True)
    assert host.members_at() == [guest.facts["host"]]
    guest.close()
    wait_until(lambda: not host.members_at())


def test_a_job_that_has_moved_is_found_at_any_of_its_nodes(two_doors: tuple[Doors, Doors, list[str]]) -> None:
    _, guest, _ = two_doors
    new = Doors(TOKEN, elsewhere=("127.0.0.1:1", guest.standing.door))
    assert find_moved_job(new) is None, "it is at its endpoint"
    guest.standing.move(2, "10.0.0.9:1")
    found = find_moved_job(new)
    assert found is not None
    assert (found.term, found.leader) == (2, "10.0.0.9:1")
    assert find_moved_job(Doors(b"of another", elsewhere=(guest.standing.door,))) is None


def test_rounds_that_come_to_nothing_wait_longer_for_more_nodes_until_ranks_start() -> None:
    timeout, waited = RendezvousTimeout(last_call=timedelta(seconds=1)), list[float]()
    node = NamedTuple("Node", [("addr", str), ("pid", int)])("gpu-0", 7)
    handler = SimpleNamespace(
        get_run_id=lambda: "job",
        settings=SimpleNamespace(timeout=timeout),
        next_rendezvous=lambda: waited.append(timeout.last_call.total_seconds()),
        shutdown=lambda: True,
        _state_holder=SimpleNamespace(state=SimpleNamespace(participants={node: 0})),
    )
    movable = MovableRendezvous(
        handler,
        doors=Doors(TOKEN),
        endpoint=Endpoint("127.0.0.1", 1),
        make_backend=lambda store, run_id: None,
        store_timeout=LONG,
        silence_s=1.0,
    )
    movable.begin_round(())
    for _ in range(7):
        movable.next_rendezvous()
    movable.begin_round(())
    movable.next_rendezvous()
    assert waited == [1, 2, 4, 8, 16, 30, 30, 1]
    movable.shutdown()
