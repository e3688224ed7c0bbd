"""What a launcher answers and to whom: this user alone, of all nodes of the job, and no word that it does not know."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from waiting import PATIENCE_S

from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.live.channel import VERSION, answer, ask, launchers, read_log, receive
from paraplan.launch.live.server import LiveServer, listen
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.store import NodeStore
from paraplan.launch.ranks.live import LiveRank, catches
from paraplan.launch.ranks.step_marks import MARKS_FILE, StepMarks
from paraplan.launch.run_folder import RunFolder
from paraplan.launch.stragglers.steps import ask_for_profile, read_profile
from paraplan.live.logs import LogFollower
from paraplan.live.runs import RunError, ask_run, find_run, live_runs, question
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Act as another user for a while."""
    if os.geteuid() != 0:
        pytest.skip("to act as another user needs root")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def job(folder: Path, *, store: NodeStore | None = None, run: str = "train-1", rank: int = 0) -> JobRecord:
    """Return a job whose one rank is this process, with its log in a folder of the run."""
    (folder / run).mkdir()
    logs = tuple(str(folder / run / f"{name}-{rank}.log") for name in ("stdout", "stderr"))
    for path in logs:
        Path(path).write_text("")
    return JobRecord(
        script="train.py",
        folder=RunFolder(folder / run),
        max_nodes=1 if store is None else store.num_nodes,
        ranks={rank: LiveRank(rank, 0, os.getpid(), None, logs)},
        world_size=2,
        plan=PlanFile(plan=ParallelPlan(dp=2)),
        store=store,
        attempts=1,
    )


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []

    def begin(answered: JobRecord, **options: float) -> LiveServer:
        servers.append(LiveServer(answered, **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def own_names() -> list[str]:
    return [name for name in launchers() if name.startswith(f"paraplan-launch-{os.getpid()}-")]


def test_a_run_is_found_by_its_id_its_folder_and_its_process_and_is_gone_with_its_server(
    serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    server = serve(job(tmp_path, run="train-of-this-test"))
    for name in ("train-of-this-test", str(tmp_path / "train-of-this-test"), str(os.getpid())):
        found = find_run(name)
        assert (found.id, found.plan, found.world_size, found.num_nodes) == (
            *("train-of-this-test", ParallelPlan(dp=2).describe()),
            *(2, 1),
        )
        assert [(rank.rank, rank.state) for rank in found.ranks] == [(0, "running")]
    server.close()
    assert own_names() == []
    with pytest.raises(RunError, match="has ended"):
        ask_run(found, question("status"))


def test_another_user_gets_no_answer_and_is_given_none(tmp_path: Path) -> None:
    with closing(listen()) as listener:
        (name,) = own_names()
        with as_nobody():
            assert ask(name, question("status"), timeout_s=PATIENCE_S) is None
            assert [run for run in live_runs() if run.pid == os.getpid()] == []
        connection, _ = listener.accept()
        with closing(connection):
            assert receive(connection) is None
            answer(connection, {})


def test_a_run_of_another_user_is_named_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "run.json").write_text("{}")
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    with as_nobody(), pytest.raises(RunError, match="another user's"):
        find_run(str(folder))


@pytest.mark.parametrize(
    "line", [b"", b"[1]\n", b"{", b"\xff\n", b'{"ask": "status"}\n', b'{"version": 1, "ask": "x"}\n']
)
def test_a_question_that_is_none_gets_no_answer_or_an_error(
    serve: Callable[..., LiveServer], tmp_path: Path, line: bytes
) -> None:
    serve(job(tmp_path))
    (name,) = own_names()
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.connect(f"\0{name}")
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        text = connection.makefile().read()
    assert text == "" or "its launcher is of another version" in text
    assert find_run("train-1").state == "running"


def test_words_of_a_question_that_make_no_sense_are_an_error_in_a_sentence(
    serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    serve(job(tmp_path))
    found = find_run("train-1")
    for asked in ({"ask": "logs"}, {"ask": "profile", "ranks": 7}, {"ask": "stacks", "ranks": 1}):
        with pytest.raises(RunError, match="not understood"):
            ask_run(found, {"version": VERSION} | asked)


def test_one_node_answers_for_all_and_names_those_that_are_silent(
    serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    shared = HashStore()
    stores = [NodeStore(shared, node=node, num_nodes=2, seal=Seal(b"token")) for node in range(2)]
    serve(job(tmp_path, store=stores[0], run="first", rank=0))
    second = serve(job(tmp_path, store=stores[1], run="second", rank=1))
    (tmp_path / "second" / "stdout-1.log").write_text("one\ntwo\nthr")
    found = find_run("first")
    answers = ask_run(found, question("status"))
    assert [list(node["ranks"]) for node in answers.nodes] == [["0"], ["1"]]
    assert answers.silent == ()
    follower = LogFollower(found, num_lines=1).follow()
    assert next(follower) == (1, "two")
    second.close()
    serve(job(tmp_path, store=stores[0], run="without", rank=0), elsewhere_s=0.1)
    assert ask_run(find_run("without"), question("status")).silent == ("of node 1",)


def test_a_question_that_was_never_written_holds_up_no_other_one() -> None:
    shared = HashStore()
    first, second = (NodeStore(shared, node=node, num_nodes=2, seal=Seal(b"token")) for node in range(2))
    shared.add("paraplan/questions", 1)  # of a launcher that was killed then
    assert second.new_questions() == []
    number = first.ask({"ask": "status"})
    assert second.new_questions() == [(number, {"ask": "status"})]
    second.answer(number, {"host": "b"})
    assert first.answers(number, timeout_s=PATIENCE_S) == {1: {"host": "b"}}
    assert second.new_questions() == first.new_questions() == []


def test_a_log_is_read_from_its_end_and_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_log(str(log), -5) == (0, "")
    log.write_bytes(b"0123456789\xff")
    assert read_log(str(log), -3) == (11, "89\xff")
    assert read_log(str(log), 11) == (11, "")
    assert read_log(str(log), 99) == (11, "")  # it was cut


def test_lines_of_progress_bars_and_colors_are_plain_lines(serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    serve(job(tmp_path))
    log = tmp_path / "train-1" / "stdout-0.log"
    follower = LogFollower(find_run("train-1"), num_lines=10).follow()
    log.write_bytes(b"\x1b[31mred\x1b[0m\r\n10%\r20%\r")
    assert [next(follower).text for _ in range(2)] == ["red", "10%"]
    with log.open("ab") as file:
        file.write(b"\nend\n")
    assert [next(follower).text for _ in range(2)] == ["20%", "end"]


def test_signals_that_a_process_does_not_catch_are_known() -> None:
    assert catches(os.getpid(), 2)  # SIGINT, by Python
    assert not catches(os.getpid(), 10)
    assert not catches(2**22 + 1, 2)


class FakeProfile:
    """A profile of so many steps, which fails at its end if it is to."""

    def __init__(self, num_steps: int, failure: str = "") -> None:
        self.left, self.failure = num_steps, failure

    def start_profile(self, path: str, *, seconds: float) -> FakeProfile:
        return self

    def end_step(self) -> bool:
        self.left -= 1
        if not self.left and self.failure:
            raise OSError(self.failure)
        return not self.left


def step(marks: StepMarks) -> None:
    marks.optimizer_ends(marks.optimizer_begins())
    marks.backward_ends(marks.backward_begins())


@pytest.mark.parametrize(("failure", "end"), [("", ("done", "")), ("disk\nfull", ("failed", "OSError: disk full"))])
def test_a_rank_begins_and_ends_a_profile_between_steps_and_says_so(
    tmp_path: Path, failure: str, end: tuple[str, str]
) -> None:
    marks = StepMarks(str(tmp_path / MARKS_FILE), load_profiling=lambda: FakeProfile(2, failure))
    step(marks)
    assert read_profile(tmp_path, number=5) == ("", "")
    assert ask_for_profile(tmp_path, number=5, seconds=1.0, begin_by_s=time.time() + PATIENCE_S)
    said = []
    for _ in range(4):
        step(marks)
        said.append(read_profile(tmp_path, number=5))
    assert said == [("began", ""), ("began", ""), end, end]
    assert read_profile(tmp_path, number=6) == ("", "")


def test_a_step_that_comes_too_late_begins_no_profile(tmp_path: Path) -> None:
    marks = StepMarks(str(tmp_path / MARKS_FILE), load_profiling=lambda: FakeProfile(1))
    assert ask_for_profile(tmp_path, number=5, seconds=1.0, begin_by_s=time.time() - 1.0)
    step(marks)
    assert read_profile(tmp_path, number=5) == ("late", "")


def test_a_file_that_is_no_ring_of_steps_is_left_alone(tmp_path: Path) -> None:
    assert not ask_for_profile(tmp_path, number=5, seconds=1.0, begin_by_s=0.0)
    (tmp_path / MARKS_FILE).write_bytes(b"x" * 100)
    assert not ask_for_profile(tmp_path, number=5, seconds=1.0, begin_by_s=0.0)
    assert read_profile(tmp_path, number=5) == ("", "")
    assert (tmp_path / MARKS_FILE).read_bytes() == b"x" * 100
