"""Commands about a real job while it runs: who runs, logs, where ranks wait, profiles; what is left of a killed one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from forked_launcher import ForkedLauncher
from host_nodes import StartNode
from launching import StartForked, WriteScript, launcher_environment, names_in, wait_until_dead
from nodes import Hosts
from rank_harness import RankHarness
from typer.testing import CliRunner, Result
from waiting import PATIENCE_S, wait_until

from paraplan.api.live_runs import Run, live_runs
from paraplan.cli.main import app
from paraplan.launch.ranks.stacks import find_py_spy

pytestmark = pytest.mark.ranks

TRAIN = """
    import time
    import torch, torch.distributed as dist
    from torch import nn

    def load_data():
        time.sleep(0.05)

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(100_000):
        load_data()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print("step", step, flush=True)
"""


def paraplan(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paraplan", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def ask(*words: object) -> Result:
    """Run a command in this process: what it does is no different, and no interpreter has to start."""
    return CliRunner().invoke(app, [*map(str, words)])


def wait_for(folder: Path, is_ready: Callable[[Run], bool]) -> Run:
    """Return the run in `folder`, or with this launcher, once it is ready."""

    def ready() -> list[Run]:
        of_folder = [run for run in live_runs() if run.folder is not None and run.folder.is_relative_to(folder)]
        return [run for run in of_folder if is_ready(run)]

    return wait_until(ready, told=lambda: [run.id for run in live_runs()])[0]


def has_ranks(run: Run) -> bool:
    return len(run.ranks) == 2


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, ranks: RankHarness) -> Iterator[Run]:
    """A job of two ranks that trains for as long as the tests of this module."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "train.py").write_text(dedent(TRAIN))
    (folder / "tmp").mkdir()
    words = ["--nproc-per-node", "2", "--hang-timeout", "600", "train.py"]
    environment = launcher_environment(folder / "tmp")
    with ForkedLauncher(ranks, words, folder=folder, environment=environment, output=folder / "output") as job:
        try:
            yield wait_for(folder, lambda run: (run.step or 0) > 1)
        finally:
            job.terminate()


def test_ps_lists_a_run_with_its_step_and_a_shell_completes_its_id(training: Run) -> None:
    (found,) = (run for run in json.loads(paraplan("ps", "--json").stdout)["runs"] if run["id"] == training.id)
    assert (found["state"], found["world_size"], found["num_nodes"], found["live"]) == ("running", 2, 1, True)
    assert found["step"] >= 2
    (line,) = (line for line in paraplan("ps").stdout.splitlines() if line.startswith(training.id))
    assert re.match(rf"{training.id} +running +train.py +.* 2 +[\d,]+ ", line), line
    words = {"_PARAPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "paraplan stacks 2", "COMP_CWORD": "2"}
    code = "from paraplan.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True, check=False
    )
    assert training.id in done.stdout.split()


def test_a_profile_from_outside_is_a_trace_of_each_rank_that_compare_opens(training: Run, tmp_path: Path) -> None:
    assert training.folder is not None
    done = paraplan("profile", training.folder, "--ranks", "0-1", "--seconds", "0.3", "--json")
    assert done.returncode == 0, done.stderr
    traces = json.loads(done.stdout)["traces"]
    assert sorted(traces) == ["0", "1"]
    for rank, path in traces.items():
        assert Path(path).is_relative_to(training.folder)
        trace = json.loads(Path(path).read_text())
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"ProfilerStep#0", "gloo:all_reduce", "aten::addmm"} <= names
        assert trace["distributedInfo"]["rank"] == int(rank)
    predicted = tmp_path / "predicted.json"
    model = (
        "gpt2",
        "--profile",
        "cpu",
        "--gpus-per-node",
        2,
        "--global-batch",
        8,
        "--seq-len",
        64,
        "--precision",
        "fp32",
    )
    assert ask("estimate", *model, "--dp", 2, "--trace", predicted).exit_code == 0
    compared = ask("compare", predicted, traces["1"], "--json")
    assert compared.exit_code == 0, compared.stderr
    measured = json.loads(compared.stdout)["measured"]
    assert measured["rank"] == 1
    assert measured["step_s"] > 0.05  # the script sleeps for so long
    step = wait_for(training.folder, lambda run: run.step is not None).step or 0
    wait_for(training.folder, lambda run: (run.step or 0) > step)  # it goes on


def test_attach_follows_all_ranks_and_ctrl_c_leaves_the_job_alone(training: Run) -> None:
    command = [sys.executable, "-u", "-m", "paraplan", "attach", training.id, "-n", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stdout is not None
        assert attached.stderr is not None
        seen: set[str] = set()
        while len(seen) < 4:
            line = attached.stdout.readline()
            found = re.fullmatch(r"(\[rank [01]\]) (step \d+)\n", line)
            if found is not None:
                seen |= {found[1], f"{found[1]} goes on"} if found[1] in seen else {found[1]}
        attached.send_signal(signal.SIGINT)
        _, said = attached.communicate(timeout=PATIENCE_S)
    assert attached.returncode == 0
    assert "detached" in said
    assert "Traceback" not in said
    assert training.id in [run.id for run in live_runs()]


def stacks_once_rank_0_waits(training: Run) -> Any:
    found = json.loads(ask("stacks", training.id, "--json").stdout)
    is_seen = found["stopped"] and found["waiting"]  # a signal is there once the rank was to run again
    return found if is_seen and "train.py:14" in place_of_rank_0(found) else None


def place_of_rank_0(stacks: Any) -> str:
    # Where py-spy is, it reads the stopped rank as well, which may stand at the same place.
    (place,) = (place["place"] for place in stacks["places"] if 0 in place["ranks"])
    return str(place)


def test_stacks_name_the_rank_that_others_wait_for_and_those_that_do_not_answer(training: Run) -> None:
    stopped = training.ranks[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        found = wait_until(lambda: stacks_once_rank_0_waits(training))
        assert found["stopped"] == [1]
        assert re.match(r"rank 0 in all_reduce number \d+ of ranks 0-1", found["waiting"][0])
        assert "called from <module> (train.py:14)" in place_of_rank_0(found)
        done = paraplan("stacks", training.id, "-v")
        assert "rank 1 is stopped, by SIGSTOP or a debugger" in done.stdout.splitlines()
        assert re.search(r"(?m)train\.py:14 in <module>$", done.stdout)
        refused = ask("profile", training.id, "--ranks", 1, "--seconds", 1)
        if find_py_spy() is None:
            assert refused.exit_code == 1
            assert "no profile of rank 1: its process is stopped" in refused.stderr
    finally:
        os.kill(stopped.pid, signal.SIGCONT)


def test_what_cannot_be_asked_is_said_in_a_sentence(training: Run) -> None:
    for words, said in (
        (("stacks", training.id[:-1] + "x"), f"there is no run {training.id[:-1]}x"),
        (("profile", training.id, "--ranks", "5"), f"the run {training.id} has no rank 5"),
        (("profile", training.id, "--ranks", "one"), "--ranks one is not a list of ranks"),
        (("profile", training.id, "--seconds", "-1"), "--seconds -1 is outside 0 to 600"),
    ):
        done = ask(*words)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {said}"), done.stderr
        assert "Traceback" not in done.stderr


OTHER = """
    import os, sys, time
    if os.environ["RANK"] == "1":  # becomes a program that has no handler for signals
        os.execvp("sleep", ["sleep", "600"])
    print("here", flush=True)
    while not os.path.exists("end"):
        time.sleep(0.05)
    print("last words")
    sys.exit(7)
"""


def test_attach_ends_with_the_run_and_its_status_and_no_question_ends_a_rank(
    start_forked: StartForked, script: WriteScript, tmp_path: Path
) -> None:
    job = start_forked("--nproc-per-node", 2, script(OTHER))
    run = wait_for(tmp_path, lambda run: has_ranks(run) and run.ranks[1].state == "running")
    wait_until(lambda: Path(f"/proc/{run.ranks[1].pid}/comm").read_text() == "sleep\n")
    # "ranks 0-1 do not answer" where a busy machine keeps rank 0 from it for once
    wait_until(lambda: "rank 1 does not answer" in ask("stacks", run.id).stdout)
    assert has_ranks(wait_for(tmp_path, has_ranks))  # the signal would have ended it
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "paraplan", "attach", run.id],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as attached:
        assert attached.stdout is not None
        assert attached.stdout.readline() == "[rank 0] here\n"
        (tmp_path / "end").touch()
        rest, said = attached.communicate(timeout=PATIENCE_S)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == attached.returncode == 7
    assert rest == "[rank 0] last words\n"
    assert f"{run.id} has ended with status 7" in said
    refused = subprocess.run(
        [sys.executable, "-m", "paraplan", "attach", run.id], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: the run {run.id} has ended with status 7 after ")


def test_nothing_is_left_of_a_launcher_that_was_killed(
    start_forked: StartForked, script: WriteScript, tmp_path: Path, scratch: Path
) -> None:
    job = start_forked("--nproc-per-node", 2, script("import time; time.sleep(600)"))
    run = wait_for(tmp_path, has_ranks)
    job.send_signal(signal.SIGSTOP)
    silent = ask("stacks", job.pid)
    assert silent.stderr.startswith(f"error: the launcher of process {job.pid} does not answer\n")
    job.kill()
    job.communicate(timeout=PATIENCE_S)
    wait_until_dead(*(rank.pid for rank in run.ranks))
    assert job.pid not in [other.pid for other in live_runs()]
    assert names_in(scratch) == []
    assert [path for path in tmp_path.rglob("*") if path.is_socket() or path.is_fifo()] == []
    gone = subprocess.run(
        [sys.executable, "-m", "paraplan", "ps", "--all", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    (found,) = (one for one in json.loads(gone.stdout)["runs"] if one["id"] == run.id)
    assert (found["state"], found["live"]) == ("gone", False)


@pytest.mark.with_all  # test_live_answers has two nodes too, without hosts of their own
def test_a_command_on_one_host_asks_the_ranks_of_all(
    three_hosts: Hosts, start_node: StartNode, script: WriteScript, tmp_path: Path
) -> None:
    words = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--start-method", "exec"]
    words += ["--rdzv-endpoint", f"{three_hosts.addresses[0]}:29500", "--hang-timeout", 600, script(TRAIN)]
    nodes = [start_node(index, *words) for index in range(2)]

    def ask(*question: object) -> str:
        command = three_hosts.command(1, sys.executable, "-m", "paraplan", *map(str, question))
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return done.stdout

    nodes[1].wait_for("step 0")
    (run,) = json.loads(ask("ps", "--json"))["runs"]
    assert (run["host"], run["num_nodes"], [rank["rank"] for rank in run["ranks"]]) == ("node1", 2, [1])
    found = json.loads(ask("stacks", "--json"))
    assert (found["hosts"], found["silent_hosts"]) == ({"0": "node0", "1": "node1"}, [])
    assert sorted(rank for place in found["places"] for rank in place["ranks"]) == [0, 1]
    made = json.loads(ask("profile", "--ranks", "all", "--seconds", "0.2", "--json"))
    assert (sorted(made["traces"]), made["failed"]) == (["0", "1"], {})
    assert all(Path(path).exists() for path in made["traces"].values())
    for node in nodes:
        node.process.terminate()
