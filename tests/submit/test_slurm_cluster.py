"""A real Slurm of two nodes on this machine: submit, follow, queue again, lose a node, cancel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo_slurm"
PATIENCE_S = 240
pytestmark = [
    pytest.mark.with_all,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not shutil.which("slurmctld", path="/usr/sbin:/usr/bin"), reason="Slurm is not installed (slurm-wlm, munge)"
    ),
]
TRAIN = "--steps 16 --layers 1 --hidden 32 --seq-len 32 --log-every 1 --eval-batches 1 --save-every 4"


class Cluster:
    """A shell beside the cluster; what it runs is over when its status comes."""

    def __init__(self, folder: Path) -> None:
        self._shell = subprocess.Popen(
            [str(DEMO), "bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.run(f"export PATH={Path(sys.executable).parent}:$PATH; cd {folder}")

    def run(self, text: str, *, status: int | None = 0) -> str:
        """Return what the commands of `text` print; with a status of None any will do."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{{ {text}\n}} </dev/null 2>&1; status=$?; echo; echo END $status\n")
        self._shell.stdin.flush()
        lines = [*iter(self._line, None)]
        last = lines.pop()
        assert status is None or last == f"END {status}", "\n".join(lines)
        return "\n".join(lines)

    def _line(self) -> str | None:
        assert self._shell.stdout is not None
        if getattr(self, "_is_over", False):
            self._is_over = False
            return None
        line = self._shell.stdout.readline()
        assert line, "the cluster is gone"
        self._is_over = line.startswith("END ")
        return line.rstrip("\n")

    def submit(self, words: str) -> tuple[str, str]:
        """Return the name and the number of a job that is submitted."""
        said = self.run(f"paraplan submit --to slurm {words}")
        found = re.search(r"^(\S+): job (\d+) of Slurm demo$", said, re.MULTILINE)
        assert found is not None
        return found[1], found[2]

    def wait_for(self, number: str, text: str, *, command: str = "squeue -h -j {} -o %T") -> None:
        """Wait until a command about a job says `text`."""
        asked = command.format(number)
        self.run(
            f"for i in $(seq {PATIENCE_S}); do {asked} | grep -q '{text}' && break; sleep 1; done; ((i < {PATIENCE_S}))"
        )

    def close(self) -> None:
        """End the shell, and all of the cluster with it."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.wait(PATIENCE_S)
        self._shell.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(DEMO.parent / "train_lm.py", folder / "train_lm.py")
    made = Cluster(folder)
    yield made
    made.close()


def losses(log: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+  loss ([\d.]+)", log, re.MULTILINE)}


def test_losses_over_a_requeue_are_those_of_a_job_that_was_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    size, train = "--nodes 2 --gpus-per-node 1", TRAIN.replace("16", "400")  # it runs on while the signal is sent
    whole, _ = cluster.submit(f"{size} train_lm.py {train} --checkpoint {tmp_path / 'whole'}")
    expected = losses(cluster.run(f"paraplan logs -f {whole}"))
    job, number = cluster.submit(f"{size} train_lm.py {train} --checkpoint {tmp_path / 'again'}")
    cluster.wait_for(job, "^step 4/", command="paraplan logs {}")
    cluster.run(f"scancel --signal=USR1 {number}")
    cluster.wait_for(number, "PENDING")
    cluster.run(f"scontrol update JobId={number} StartTime=now")
    log = cluster.run(f"paraplan logs -f {job}")
    assert "Traceback" not in log
    assert log.count("Exited with exit code 75") == 2
    saved = re.search(r"have saved after (\d+) steps", log)
    assert saved is not None
    del expected[int(saved[1])]  # it ended in the call that saved, and did not return to be printed
    assert losses(log) == expected
    assert len(expected) == 399
    assert "done with status 0 (COMPLETED, on n[1-2], queued again 1 time)" in cluster.run(f"paraplan status {job}")


def test_a_job_whose_node_is_lost_goes_on_when_it_is_back(cluster: Cluster, tmp_path: Path) -> None:
    words = f"--nodes 2 --gpus-per-node 1 train_lm.py {TRAIN.replace('16', '400')} --checkpoint {tmp_path / 'c'}"
    job, number = cluster.submit(words)
    cluster.wait_for(job, "^step 9/", command="paraplan logs {}")
    cluster.run("scontrol update NodeName=n2 State=DOWN Reason=test")
    cluster.wait_for(number, "PENDING")
    assert "queued" in cluster.run(f"paraplan status {job}")
    cluster.wait_for(job, "is queued again: Slurm itself has done so", command="paraplan logs {}")
    assert "was canceled" not in cluster.run(f"paraplan logs {job}")
    cluster.run(f"scontrol update NodeName=n2 State=RESUME; scontrol update JobId={number} StartTime=now")
    cluster.wait_for(job, "nats per byte after [1-9][0-9]* steps", command="paraplan logs {}")
    cluster.run(f"paraplan cancel {job}")
    log = cluster.run(f"paraplan logs -f {job}", status=None)
    assert "canceled (CANCELLED" in log
    assert "after SIGTERM (KillWait)" in log
    assert f"job {number} was canceled: it is not queued again" in log
    assert "have saved after" in log


def test_a_job_that_its_time_limit_ends_has_saved_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    words = f"--nodes 2 --gpus-per-node 1 train_lm.py {TRAIN.replace('16', '9000')} --checkpoint {tmp_path / 'c'}"
    job, number = cluster.submit(f"--option time=3 {words}")
    cluster.wait_for(number, "PENDING")
    cluster.run(f"scontrol update JobId={number} StartTime=now")
    cluster.wait_for(job, "nats per byte after [1-9][0-9]* steps", command="paraplan logs {}")
    cluster.run(f"paraplan cancel {job}")
    log = cluster.run(f"paraplan logs -f {job}", status=None)
    assert "SIGUSR1: the ranks end their step and save" in log
    assert f"job {number} is queued again" in log
    assert "Traceback" not in log


def test_a_node_that_is_drained_in_the_middle_ends_its_job_and_gets_no_other(cluster: Cluster, tmp_path: Path) -> None:
    size = "--nodes 2 --gpus-per-node 1"
    job, _ = cluster.submit(f"{size} train_lm.py {TRAIN.replace('16', '400')} --checkpoint {tmp_path / 'c'}")
    cluster.wait_for(job, "^step 4/", command="paraplan logs {}")
    cluster.run("scontrol update NodeName=n2 State=DRAIN Reason=test")
    later, later_number = cluster.submit(f"{size} train_lm.py {TRAIN}")
    log = cluster.run(f"paraplan logs -f {job}")
    assert max(losses(log)) == 400
    assert "done with status 0" in cluster.run(f"paraplan status {job}")
    assert re.search("queued .PENDING", cluster.run(f"paraplan status {later}"))
    alone, _ = cluster.submit(f"--exclude n2 --nodes 1 --gpus-per-node 1 train_lm.py {TRAIN}")
    cluster.run(f"paraplan logs -f {alone}")
    assert "COMPLETED, on n1)" in cluster.run(f"paraplan status {alone}")
    cluster.run("scontrol update NodeName=n2 State=RESUME")
    cluster.wait_for(later_number, "COMPLETED", command="scontrol show job {}")


def test_a_job_that_gets_fewer_nodes_than_its_plan_is_for_plans_again(cluster: Cluster) -> None:
    sizes = "--seq-len 32 --global-batch 16 --precision fp32"
    cluster.run(f"paraplan recommend gpt2 --profile cpu --nodes 2 --gpus-per-node 1 {sizes} -o plan.json")
    cluster.run("echo 'from paraplan import runtime; print(\"ran\", runtime.init().plan.describe())' > show.py")
    both, _ = cluster.submit("--plan plan.json show.py")
    log = cluster.run(f"paraplan logs -f {both}")
    assert "planning again" not in log
    assert log.count("ran dp2") == 2
    one, _ = cluster.submit("--plan plan.json --option nodes=1 show.py")
    log = cluster.run(f"paraplan logs -f {one}")
    assert "the plan is for 2 x 1 ranks, and here are 1 x 1 ranks: planning again" in log
    assert "ran one process" in log


def test_what_slurm_refuses_leaves_no_job(cluster: Cluster) -> None:
    size = "--nodes 2 --gpus-per-node 1"
    said = cluster.run(f"paraplan submit --to slurm {size} --option partition=none train_lm.py", status=1)
    assert "sbatch says: sbatch: error: invalid partition specified: none" in said
    assert cluster.run("squeue -h").strip() == ""


def test_a_job_has_all_cores_of_its_nodes(cluster: Cluster, tmp_path: Path) -> None:
    cores = int(cluster.run("nproc --all"))
    (tmp_path / "show.py").write_text("import os\nprint('cores', len(os.sched_getaffinity(0)), flush=True)\n")
    job, _ = cluster.submit(f"--in-place --nodes 1 --gpus-per-node 1 {tmp_path / 'show.py'}")
    assert f"cores {cores}" in cluster.run(f"paraplan logs -f {job}")
