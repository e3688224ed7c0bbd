"""Ranks that stay in their processes when another one is lost, and spares: what a script finds when it runs again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from case_selection import with_all
from launching import ForkedLaunch, Launch, StartForked, WriteScript, names_in, read_until, wait_until_dead
from recovery_script import SCRIPT, descendants, losses
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.ranks

STAYS = ("--restart-in-process", "--spare-ranks", 0, "--max-restarts", 3, "--no-logs")

TRAIN = """
    import os, signal, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"attempt {attempt} of rank {rank} in {os.getpid()}", flush=True)
    for step in range(6):
        dist.all_reduce(torch.ones(10))
        if attempt == 0 and step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} is done", flush=True)
"""


def processes(stdout: str) -> dict[tuple[int, int], int]:
    """Return the process of each rank of each attempt."""
    found = re.findall(r"attempt (\d+) of rank (\d+) in (\d+)", stdout)
    return {(int(attempt), int(rank)): int(pid) for attempt, rank, pid in found}


def test_healthy_ranks_stay_and_the_lost_one_begins_anew(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    ended = launch_forked(*STAYS, "--nproc-per-node", 3, script(TRAIN))
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 failed first: killed by SIGKILL" in ended.stderr
    assert "ranks 0, 2 stay in their processes; rank 1 begins in a new one" in ended.stderr
    pids = processes(ended.stdout)
    assert [pids[0, rank] == pids[1, rank] for rank in range(3)] == [True, False, True]
    assert ended.stdout.count("is done") == 3


def test_a_spare_takes_the_place_of_a_lost_rank_where_ranks_have_interpreters_of_their_own(
    launch: Launch, script: WriteScript
) -> None:
    words = ("--restart-in-process", "--max-restarts", 1, "--no-logs", "--start-method", "exec")
    ended = launch(*words, "--nproc-per-node", 2, script(TRAIN))
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 stays in its process; rank 1 takes a spare process" in ended.stderr
    assert len(set(processes(ended.stdout).values())) == 3


def test_spares_alone_take_places_when_all_ranks_begin_anew(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    words = ("--spare-ranks", 1, "--max-restarts", 1, "--no-logs", "--nproc-per-node", 2)
    ended = launch_forked(*words, script(TRAIN))
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 takes a spare process; rank 1 begins in a new one" in ended.stderr
    assert len(set(processes(ended.stdout).values())) == 4


def test_no_signal_is_blocked_in_ranks_that_stay_and_in_spares(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    looks = """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    sys.stdout.write(f"blocked: {blocked}\\n")
    """
    words = ("--restart-in-process", "--max-restarts", 1, "--no-logs", "--nproc-per-node", 2)
    ended = launch_forked(*words, script(TRAIN.replace("for step in", f"{looks.strip()}\n    for step in")))
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 stays in its process; rank 1 takes a spare process" in ended.stderr
    assert re.findall(r"blocked: (.*)", ended.stdout) == ["set()"] * 4


@pytest.mark.parametrize("deaths", [1, 2])
def test_ranks_meet_again_where_one_was_lost_before_its_first_group(
    deaths: int, launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    path = script(
        f"""
        import os, signal, time
        from pathlib import Path
        import torch.distributed as dist

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        Path(f"{{attempt}}-{{os.environ['RANK']}}").touch()
        if os.environ["RANK"] == "1" and attempt < {deaths}:
            while len([*Path.cwd().glob(f"{{attempt}}-*")]) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.init_process_group("gloo")
        dist.barrier()
        dist.barrier(dist.new_group([0, 1, 2]))
        print("met", flush=True)
        """
    )
    ended = launch_forked(*STAYS, "--nproc-per-node", 3, path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("ranks 0, 2 stay in their processes; rank 1 begins in a new one") == deaths
    assert ended.stdout.count("met") == 3


def test_a_script_that_runs_again_finds_what_it_finds_in_a_new_process(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("state = []\n")
    path = script(
        f"""
        import atexit, builtins, gc, logging, multiprocessing, os, random, signal, sys, threading, warnings
        import torch
        import torch.distributed as dist
        import beside

        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        found = {{
            "beside": beside.state, "globals": "left" in globals(), "folder": os.getcwd(), "argv": sys.argv,
            "path": len(sys.path), "mine": os.environ.get("MINE"), "usr2": signal.getsignal(signal.SIGUSR2),
            "dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled(), "gc": gc.get_threshold(),
            "handlers": logging.getLogger().handlers, "builtin": hasattr(builtins, "mine"),
            "own": logging.getLogger("own").handlers, "groups": dist.is_initialized(),
            "hook": sys.excepthook is sys.__excepthook__, "timer": signal.getitimer(signal.ITIMER_REAL)[0],
            "umask": os.umask(0o22), "recursion": sys.getrecursionlimit(), "stdout": sys.stdout is sys.__stdout__,
            "threads": torch.get_num_threads(), "excepthook": threading.excepthook.__module__,
            "start": multiprocessing.get_start_method(allow_none=True),
        }}
        print(rank, attempt, sorted(found.items(), key=str), flush=True)
        beside.state.append(1)
        left = builtins.mine = torch.ones(1000)
        os.chdir("/")
        sys.argv.append("more")
        sys.path.insert(0, "/nowhere")
        os.environ["MINE"] = "set"
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 1000)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(7)
        gc.set_threshold(100, 1, 1)
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger("own").addHandler(logging.StreamHandler())
        sys.excepthook = lambda *_: None
        os.umask(0o77)
        sys.setrecursionlimit(5000)
        multiprocessing.set_start_method("spawn", force=True)
        sys.stdout = open(os.devnull, "w")
        atexit.register(lambda: open({str(tmp_path)!r} + f"/left-{{rank}}", "a").write("x"))
        dist.init_process_group("gloo")
        dist.barrier()
        if attempt < 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        dist.destroy_process_group()
        """
    )
    ended = launch_forked(*STAYS, "--nproc-per-node", 2, path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("rank 0 stays in its process") == 2
    states = [line.split(" ", 2) for line in ended.stdout.splitlines()]
    of_first = [state for rank, _, state in states if rank == "0"]
    assert len(of_first) == 3
    assert of_first[0] == of_first[1] == of_first[2]
    assert (tmp_path / "left-0").read_text() == "xxx"  # once at the end of each run


def test_losses_go_on_digit_by_digit_from_the_copy_in_memory(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path, size = script(SCRIPT), (with_all([4]) or [2])[0]
    words = ("--nproc-per-node", size, path, f"folder={tmp_path / 'none'}", "steps=11", "plans=zero3")
    ended = launch_forked(*STAYS, "--memory-checkpoint", 4, *words, f"faults={size - 1}@7,{size - 1}@10")
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"begins after (\d+) steps", ended.stdout) == ["0", "4", "8"]
    assert ended.stderr.count("in their process" if size > 2 else "stays in its process") == 2
    assert losses(ended.stdout) == losses(launch_forked("--no-logs", *words).stdout)


def test_workers_of_data_loaders_end_with_the_run_and_begin_with_the_next(launch: Launch, script: WriteScript) -> None:
    path = script(
        """
        import os, signal
        import torch, torch.distributed as dist
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            batches = DataLoader([torch.ones(1)] * 40, batch_size=2, num_workers=2)
            for step, batch in enumerate(batches):
                dist.all_reduce(batch)
                if attempt == 0 and step == 5 and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
            print(f"{rank} done {len(children) <= 2}\\n", end="", flush=True)
            dist.destroy_process_group()
        """
    )
    ended = launch(*STAYS, "--nproc-per-node", 2, path)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 stays in its process" in ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 done True", "1 done True"]


@pytest.mark.parametrize(
    ("stuck", "said"),
    [
        ("is_stuck.touch(); ctypes.PyDLL(None).sleep(600)", "it has not left its script within 5 s, and is killed"),
        ("swallow()", "it has not left its script within 5 s, and is killed"),
        (
            "threading.Thread(target=spin, name='feeder', daemon=True).start(); is_stuck.touch(); time.sleep(600)",
            "feeder, does not end",
        ),
        ("import jax; is_stuck.touch(); time.sleep(600)", "jax keeps state of a run"),
    ],
    ids=["native code", "swallows", "thread", "library"],
)
def test_a_rank_that_cannot_stay_begins_anew_and_it_is_said_why(
    stuck: str, said: str, launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path = script(
        f"""
        import ctypes, os, signal, sys, threading, time, types
        from pathlib import Path
        import torch.distributed as dist

        def spin():
            while True:
                time.sleep(0.01)

        def swallow():
            while True:
                try:
                    is_stuck.touch()
                    time.sleep(600)
                except BaseException:
                    pass

        dist.init_process_group("gloo")
        rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.modules["jax" if "jax" in {stuck!r} else "none"] = types.ModuleType("jax")
        is_stuck = Path({str(tmp_path / "stuck")!r})
        dist.barrier()
        if attempt == 0 and rank == 1:
            while not is_stuck.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        elif attempt == 0 and rank == 0:
            {stuck}
        dist.barrier()
        print("met", flush=True)
        """
    )
    ended = launch_forked(*STAYS, "--nproc-per-node", 3, path)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 does not stay: " in ended.stderr
    assert said in ended.stderr
    assert ended.stdout.count("met") == 3


def test_a_rank_with_an_error_of_its_own_begins_anew_and_ends_the_job_as_ever_once_no_restart_is_left(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    path = script(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("a mistake")
        dist.barrier()
        """
    )
    ended = launch_forked("--restart-in-process", "--max-restarts", 1, "--no-logs", "--nproc-per-node", 3, path)
    assert ended.returncode == 1
    assert "ranks 0, 2 stay in their processes; rank 1 takes a spare process" in ended.stderr
    assert "rank 1 failed first: ValueError: a mistake" in ended.stderr
    assert "because a connection was lost" in ended.stderr or "because the launcher stopped" in ended.stderr


def test_all_ranks_begin_anew_after_an_error_of_one_that_had_stayed(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    path = script(
        """
        import os, signal, textwrap
        import torch.distributed as dist
        assert not hasattr(textwrap, "seen"), "this script cannot run twice in a process"
        textwrap.seen = True
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        """
    )
    ended = launch_forked(*STAYS, "--nproc-per-node", 2, path)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 failed in a process that had stayed: all ranks begin in new ones" in ended.stderr
    assert "ranks 0-1 begin in new ones" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_ranks_that_stayed_and_of_spares(
    number: signal.Signals, start_forked: StartForked, script: WriteScript, scratch: Path
) -> None:
    path = script(TRAIN.replace("range(6)", "range(6 if attempt == 0 else 10**9)"))
    process = start_forked(*STAYS, "--spare-ranks", 2, "--nproc-per-node", 2, path)
    assert process.stdout is not None
    read_until(process.stdout, lambda text: text.count("attempt 1 of rank") == 2 and text.endswith("\n"))
    # launcher, spawner, two ranks, two spares, one of which has just begun
    wait_until(lambda: len([*descendants(process.pid)]) >= 5)
    family = [process.pid, *descendants(process.pid)]
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.wait() == (130 if number == signal.SIGINT else -9)
    wait_until_dead(*family)
    assert names_in(scratch) == []


def test_an_interruption_waits_for_imports_that_cannot_be_begun_again(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    package = tmp_path / "site-packages" / "half_imported"
    package.mkdir(parents=True)
    begun = tmp_path / "begun"
    (package / "__init__.py").write_text(f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(1.5)\nwhole = True\n")
    path = script(
        f"""
        import os, signal, sys, time
        import torch.distributed as dist
        sys.path.append({str(package.parent)!r})
        dist.init_process_group("gloo")
        rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.barrier()
        if attempt == 0 and rank == 1:
            while not os.path.exists({str(begun)!r}):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1:
            sys.stdout.write("whole " if "half_imported" in sys.modules else "new ")
        import half_imported
        dist.barrier()
        """
    )
    ended = launch_forked(*STAYS, "--nproc-per-node", 2, path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["new", "whole"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--restart-in-process"], "--restart-in-process without --max-restarts: ranks never start again"),
        (["--spare-ranks", 2], "--spare-ranks 2 without --max-restarts: ranks never start again"),
        (["--spare-ranks", -1, "--max-restarts", 1], "--spare-ranks -1 is below the least, 0"),
        (
            ["--restart-in-process", "--max-restarts", 1, "--no-python"],
            "--restart-in-process and --no-python: a script runs again",
        ),
    ],
)
def test_options_that_cannot_be_held_are_refused(
    words: list[object], said: str, launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    path = script("pass")
    path.chmod(0o755)
    ended = launch_forked(*words, path)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
