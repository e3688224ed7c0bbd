"""Submitting, asking and ending, with clients that are shell scripts: what they are given is what counts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner, Result

from paraplan.cli.main import app
from paraplan.errors import UsageError
from paraplan.interop.export import TARGETS
from paraplan.submit.handle import Handle, handles
from paraplan.submit.package import find_package
from paraplan.submit.scheduler import SchedulerError, find_scheduler
from paraplan.submit.slurm import Slurm

CLIENT = """#!/bin/sh
here=$(dirname "$0")
printf '%s\\n' "$(basename "$0") $*" >>"$here/calls"
case "$(basename "$0") $*" in
"scontrol show config") echo "ClusterName             = $(cat "$here/cluster")" ;;
"scontrol show job"*) echo "JobState=$(cat "$here/state") Reason=None Restarts=1 ExitCode=0:0 NodeList=n[1-2]" ;;
sbatch*) . "$here/answer" ;;
esac
"""
SIZE = ("--nodes", "2", "--gpus-per-node", "4")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of clients of a cluster, in a project of git; its jobs are kept beside it."""
    folder, project = tmp_path / "bin", tmp_path / "project"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        (folder / name).write_text(CLIENT)
        (folder / name).chmod(0o755)
    for name, text in {"cluster": "one", "state": "RUNNING", "answer": "echo 7\n"}.items():
        (folder / name).write_text(text)
    (project / "sub").mkdir(parents=True)
    (project / "train.py").write_text("print('committed')\n")
    (project / ".gitignore").write_text("data/\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    (project / "train.py").write_text("print('changed')\n")
    (project / "new.py").touch()
    (project / "data").mkdir()
    (project / "data" / "big.bin").write_bytes(bytes(1000))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(project)
    return folder


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def submitted(*words: str) -> Handle:
    result = run("submit", "--to", "slurm", *SIZE, *words)
    assert result.exit_code == 0, result.stderr
    return handles()[-1]


def test_a_job_is_packed_submitted_followed_and_ended(clients: Path) -> None:
    hostile = "$(touch x); '"
    job = submitted("--option", "partition=gpu", "--option", "time=3", "train.py", "--steps", "5", hostile)
    package = job.folder / "package"
    assert (package / "train.py").read_text() == "print('changed')\n"
    assert (package / "new.py").exists()
    assert not (package / "data").exists()
    (call,) = [line for line in (clients / "calls").read_text().splitlines() if line.startswith("sbatch")]
    assert f"--partition=gpu --time=3 --chdir={package} --output={job.log}" in call
    assert "--signal=USR1@60" in call  # two minutes before the end Slurm may say so at the start
    last = Path(job.document).read_text().splitlines()[-1]
    assert last.endswith("train.py --steps 5 '$(touch x); '\"'\"''")
    assert subprocess.run(["/bin/bash", "-n", job.document], check=False).returncode == 0
    assert (job.name, "running") == tuple(run("jobs").stdout.splitlines()[1].split()[:2])
    told = json.loads(run("status", "7", "--json").stdout)
    assert (told["state"], told["words"]) == ("running", "RUNNING, on n[1-2], queued again 1 time")
    job.log.write_text("one\ntwo")
    assert run("logs", job.name).stdout == "one\ntwo\n"
    assert run("cancel", job.name).exit_code == 0
    (clients / "state").write_text("COMPLETED")
    assert run("logs", "-f", job.name).exit_code == 0
    assert "has ended before: done" in run("cancel", job.name).stdout
    assert (clients / "calls").read_text().count("scancel 7") == 1


@pytest.mark.parametrize(
    ("answer", "said", "taken_back"),
    [
        ("echo 'invalid partition specified: x' >&2; exit 1", "sbatch says: invalid partition specified: x", False),
        ("kill -KILL $$", "status -9, and no word", True),
        ("exit 0", "sbatch does not say which job it is", True),
    ],
)
def test_what_fails_leaves_nothing(clients: Path, tmp_path: Path, answer: str, said: str, taken_back: bool) -> None:
    (clients / "answer").write_text(answer)
    result = run("submit", "--to", "slurm", *SIZE, "train.py")
    assert (result.exit_code, said in result.stderr) == (1, True), result.stderr
    assert list((tmp_path / "state" / "paraplan" / "jobs").iterdir()) == []
    assert ("scancel --me --name=train-" in (clients / "calls").read_text()) is taken_back


def test_hosts_that_a_run_or_a_report_names_are_left_out_of_the_next_job(clients: Path, tmp_path: Path) -> None:
    job = submitted("--exclude", "n9,n8", "--option", "exclude=n1", "train.py")
    assert "--exclude=n1,n9,n8 " in (clients / "calls").read_text().splitlines()[-1]
    late = {"kind": "rank", "host": "slow-1", "part": "compute", "over_at_step": None}
    cases = [late, late | {"host": "its-loader", "part": "loader"}, late | {"host": "as-before", "over_at_step": 9}]
    run_folder = job.work_folder / "paraplan-runs" / "a"
    run_folder.mkdir(parents=True)
    (run_folder / "run.json").write_text(json.dumps({"late": [*cases, late | {"kind": "link", "host": None}]}))
    (tmp_path / "doctor.json").write_text(json.dumps({"findings": [{"hosts": ["bad-1"], "text": "slow"}]}))
    slurm = ("submit", "--to", "slurm", *SIZE, "--dry-run")
    said = run(*slurm, "--exclude", job.name, "--exclude", "../doctor.json", "train.py")
    assert "left out: slow-1, bad-1" in said.stderr
    assert "--exclude=slow-1,bad-1 " in said.stderr
    assert "no report of a run" in run(*slurm, "--exclude", "train.py", "train.py").stderr
    kubernetes = ("submit", "--to", "k8s", "--image", "i", *SIZE)
    assert "kubectl cordon NODE" in run(*kubernetes, "--exclude", "n1", "train.py").stderr


def test_a_job_that_may_have_been_submitted_keeps_its_handle(clients: Path) -> None:
    (clients / "answer").write_text("kill -KILL $$")
    (clients / "scancel").write_text("#!/bin/sh\nexit 1\n")
    result = run("submit", "--to", "slurm", *SIZE, "train.py")
    (job,) = handles()
    assert f"whether {job.name} was submitted is not known" in result.stderr
    (clients / "scancel").write_text(CLIENT)
    assert run("cancel", job.name).exit_code == 0
    assert handles() == []


def test_a_job_of_another_cluster_is_not_asked_of(clients: Path) -> None:
    job = submitted("train.py")
    (clients / "cluster").write_text("two")
    for command in ("status", "logs", "cancel"):
        result = run(command, job.name)
        assert "was submitted to Slurm 'one', and this machine talks to 'two'" in result.stderr
        assert result.exit_code == 2
    assert "unknown (" in run("jobs").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "slrum", *SIZE, "train.py"), "there is no scheduler 'slrum'; did you mean slurm?"),
        (("--to", "sky", *SIZE, "train.py"), "sky, the client of SkyPilot, is not in PATH here"),
        (("--to", "slurm", "train.py"), "a job needs a plan or a size"),
        (("--to", "slurm", "--nodes", "0", "--gpus-per-node", "1", "train.py"), "--nodes 0"),
        (("--to", "slurm", *SIZE, "none.py"), "there is no script none.py"),
        (("--to", "slurm", *SIZE, "/etc/passwd"), "is outside of"),
        (("--to", "slurm", *SIZE, "data/big.bin"), "is left out by .gitignore"),
        (("--to", "ray", "--in-place", *SIZE, "train.py"), "nodes of Ray do not see this folder"),
        (("--to", "k8s", *SIZE, "train.py"), "a pod needs a container image"),
        (("--to", "slurm", "--option", "a b;=c", *SIZE, "train.py"), "is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_submitted_is_said_in_a_sentence(clients: Path, words: tuple[str, ...], said: str) -> None:
    result = run("submit", *words)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.replace("\nhint:", ";").replace("known:", "").split()), result.stderr
    assert handles() == []


@pytest.mark.parametrize(
    ("to", "target", "size"),
    [
        ("slurm", "slurm", "--nodes=2"),
        ("k8s", "jobset", "parallelism: 2"),
        ("sky", "skypilot", "num_nodes: 2"),
        ("ray", "ray", "num_workers=8"),
    ],
)
def test_a_dry_run_prints_the_document_and_writes_nothing(
    clients: Path, tmp_path: Path, to: str, target: str, size: str
) -> None:
    assert target in TARGETS
    result = run("submit", "--to", to, *SIZE, "--image", "a/b:1", "--dry-run", "train.py", "--steps", "5")
    assert result.exit_code == 0, result.stderr
    assert size in result.stdout
    assert "would run: " + find_scheduler(to).client in result.stderr
    assert not (tmp_path / "state").exists()
    assert not (clients / "calls").exists()
    on_cpu = run("submit", "--to", to, *SIZE, "--image", "a/b:1", "--dry-run", "--on-cpu", "train.py").stdout
    assert not [
        word for word in ("gpus-per-node=", "nvidia.com/gpu:", "accelerators:", "use_gpu=True") if word in on_cpu
    ]


def test_a_package_above_the_limit_names_its_largest_files(clients: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at most 10 B: train\.py"):
        find_package(tmp_path / "project", limit_bytes=10)
    outside = tmp_path / "outside"
    (outside / ".git").mkdir(parents=True)
    (outside / "a.py").touch()
    assert find_package(outside).files == (Path("a.py"),)


STATES = {
    "ray": ("12:00:01 \x1b[32mJob 'x' succeeded\x1b[39m", "done"),
    "ray ": ("Status for job 'x': RUNNING\nStatus message: 'y' failed", "running"),
    "sky": ("ID  NAME  STATUS\n3  x  SUCCEEDED", "done"),
    "k8s": (json.dumps({"status": {"conditions": [{"type": "Failed", "status": "True", "message": "m"}]}}), "failed"),
}


@pytest.mark.parametrize("to", STATES)
def test_states_are_read_from_the_words_of_clients(clients: Path, to: str) -> None:
    scheduler, (said, state) = find_scheduler(to.strip()), STATES[to]
    client = clients / scheduler.client
    client.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    client.chmod(0o755)
    job = submitted("train.py").replace(name="x", scheduler=to.strip(), cluster="c", options={}, job_id="x")
    assert scheduler.state(job).name == state
    assert list(scheduler.logs(job, follow=True)) == said.splitlines()
    scheduler.cancel(job)
    client.write_text("#!/bin/sh\necho 'connection refused' >&2; exit 1\n")
    with pytest.raises(SchedulerError, match=f"{scheduler.client} says: connection refused"):
        scheduler.state(job)


def test_another_package_may_bring_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[paraplan.schedulers]\npbs = their_pbs:SCHEDULER\n")
    (tmp_path / "their_pbs.py").write_text("class Pbs:\n    title = 'PBS'\nSCHEDULER = Pbs()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_scheduler("pbs").title == "PBS"


@pytest.mark.parametrize(
    ("limit", "warning_s"),
    [("3:30", 75), ("1", 1), ("0-0:4", 90), ("00:04:59", 119), ("5", None), ("1-0", None), ("UNLIMITED", None)],
)
def test_a_short_job_is_not_told_to_save_at_its_start(limit: str, warning_s: int | None) -> None:
    job = cast("Handle", SimpleNamespace(options={"time": limit}, work_folder="", log="", name="", document=""))
    told = [word for word in Slurm().submission(job) if word.startswith("--signal")]
    assert told == ([] if warning_s is None else [f"--signal=USR1@{warning_s}"])
