"""Jobs over several nodes: network namespaces with addresses of their own stand for hosts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from host_nodes import MEETING_S, StartNode
from launching import (
    StartForked,
    WriteScript,
    free_port,
    is_alive,
    launcher_command,
    launcher_environment,
    names_in,
    read_until,
    wait_until_dead,
)
from nodes import IP, Hosts
from rank_harness import RankHarness
from waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]  # rendezvous of nodes, each of them patient


def test_nodes_find_each_other_by_slurms_variables_and_name_the_rank_that_failed_first(
    scratch: Path, script: WriteScript, start_node: StartNode
) -> None:
    train = script(
        """
        import os, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"rank {dist.get_rank()} saw {int(total)} by {os.environ.get('GLOO_SOCKET_IFNAME')}\\n".encode())
        dist.barrier()  # all have written before one fails
        if dist.get_rank() == 3:
            raise ValueError("the real bug")
        if dist.get_rank() == 0:
            time.sleep(600)  # notices nothing: its launcher is told by the other node
        dist.all_reduce(total)
        """
    )
    slurm = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "10.231.7.[1-2]"}
    nodes = [
        start_node(index, "--nproc-per-node", 2, train, SLURM_NODEID=str(index), SLURM_JOB_ID="7", **slurm)
        for index in range(2)
    ]
    alone = start_node(0, "--nproc-per-node", 1, train)  # on a host of unknown name
    other_status, second = nodes[1].end()
    status, first = nodes[0].end()
    assert (status, other_status) == (1, 1), first + second
    alone.wait_for("rank 0 saw 1 by None")
    said = first + second
    assert all(f"rank {rank} saw 4 by eth0" in said for rank in range(4)), said
    assert "paraplan: rank 3 failed first, on host node1: ValueError: the real bug" in first
    assert "rank 0 because the launcher stopped it" in first
    assert first.splitlines()[-1].strip() == "ValueError: the real bug", first
    assert "paraplan: rank 3 failed first: ValueError: the real bug" in second
    assert names_in(scratch) == []


SSH = """#!/bin/sh
# as ssh: the words after the host are joined by spaces and read by a shell of that host
echo "$*" >> argv
shift 2
index=$((${1##*.} - 1))
shift
exec ip netns exec "$NAMESPACES$index" sh -c "$*"
"""


def test_a_host_file_starts_every_host_with_the_same_words_and_ends_them_all(
    tmp_path: Path, scratch: Path, script: WriteScript, three_hosts: Hosts
) -> None:
    train = script(
        """
        import os, sys, time
        with open(f"new{os.environ['RANK']}", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"new{os.environ['RANK']}", f"pid{os.environ['RANK']}")
        assert os.environ["HF_TOKEN"] == "hf_s3cret" and "PARAPLAN_JOB_TOKEN" not in os.environ
        os.write(1, f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}|".encode())
        time.sleep(600)
        """
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("".join(f"{address} slots=1\n" for address in three_hosts.addresses[:2]))
    words = ["a 'b'; touch broken", "$HOME", "*"]
    process = subprocess.Popen(
        launcher_command("--hostfile", "hosts", train, *words),
        cwd=tmp_path,
        env=launcher_environment(scratch, NAMESPACES=f"{three_hosts.name}h")
        | {"HF_TOKEN": "hf_s3cret"}
        | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = read_until(process.stdout, lambda text: text.count("|") == 2)
    shown = (tmp_path / "argv").read_text()
    assert shown.count("PARAPLAN_END_WITH_STDIN=1") == 2
    assert "hf_s3cret" not in shown
    assert sorted(said.strip("|").split("|")) == [f"{rank} of 2 {words}" for rank in (0, 1)]
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 143
    process.stdout.close()
    wait_until_dead(*pids)
    assert not (tmp_path / "broken").exists()
    kept = [path for path in (tmp_path / "paraplan-runs").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if b"hf_s3cret" in path.read_bytes()]


ELASTIC = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.inward, self.outward = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, hidden):
        parts = self.inward(self.first(hidden)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.outward(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places, self.norm = nn.Embedding(32, 16), nn.Embedding(8, 16), nn.LayerNorm(16)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.embed.weight)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Pairs:
    def __len__(self):
        return 80000

    def __getitem__(self, index):
        return torch.full((8,), index % 32), torch.full((8,), (index + 1) % 32)


def is_told(folder):
    told = torch.tensor(float((folder / "stop").exists()))
    if torch.distributed.is_initialized():  # the file may come between the looks of two ranks
        torch.distributed.all_reduce(told)
    return bool(told)


def main(folder, num_steps=None):
    from paraplan import runtime

    job = runtime.init()
    torch.manual_seed(0)
    engine = job.prepare(Net(), loss_fn=loss_fn, optimizer=lambda part: torch.optim.SGD(part, lr=0.1))
    if (folder / "checkpoint").exists():
        engine.load(folder / "checkpoint")
    for inputs, targets in job.shard(Pairs(), batch_size=8, skip=engine.num_steps):
        loss = float(engine.step(inputs, targets))
        if job.is_main:
            sys.stdout.write(f"step {engine.num_steps} of {job.world.size} ranks: {loss:.4f}\\n")  # in one piece
            sys.stdout.flush()
        if is_told(folder) or engine.num_steps == num_steps:
            break
        if num_steps is None:  # not of the one to compare with, which nothing interrupts
            time.sleep(0.5)
            engine.save(folder / "checkpoint")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
"""


CONFIG = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 32}


def run_script(*words: str) -> str:
    """Run a script in this process, and return what it prints."""
    sys.argv = [*words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()


def test_a_job_goes_on_under_a_new_plan_when_a_node_is_lost_and_when_it_comes_back(
    tmp_path: Path,
    scratch: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
    ranks: RankHarness,
) -> None:
    train = script(ELASTIC)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{free_port()}"]
    patience = ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=2", "--max-restarts", 3]
    # A configuration of the same model: test_fake_launch plans for a factory, which imports torch each time.
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = ["--model", tmp_path / "config.json", "--global-batch", 8, "--seq-len", 8, "--precision", "fp32"]
    words = ["--nnodes", "1:2", *rendezvous, *patience, "--plan", "auto", *model, train, tmp_path]
    stays, leaves = start_node(0, *words), start_node(1, *words)
    stays.wait_for("of 2 ranks")
    three_hosts.set_link(1, "down")
    stays.wait_for("of 1 ranks")
    leaves.stop()
    three_hosts.set_link(1, "up")
    position = len(stays.output.read_text())
    comes_back = start_node(1, *words)
    wait_until(
        lambda: "of 2 ranks" in stays.output.read_text()[position:],
        told=lambda: stays.output.read_text() + comes_back.output.read_text(),
        timeout_s=MEETING_S,
    )
    (tmp_path / "stop").touch()
    (status, said), (other_status, _) = stays.end(), comes_back.end()
    assert (status, other_status) == (0, 0), said
    losses = read_losses(said)
    assert list(losses) == list(range(1, len(losses) + 1))
    assert "a node is lost: restarting the other nodes without it" in said
    assert "a node joined: restarting all ranks" in said
    assert said.count("its launcher is gone") <= 1, "it has come back"
    assert "made anew for 1 rank\n" in said
    assert "made anew for 2 ranks\n" in said
    (tmp_path / "alone").mkdir()
    alone = ranks.run_alone(run_script, str(train), str(tmp_path / "alone"), str(len(losses)))
    assert losses == pytest.approx(read_losses(alone), abs=2e-4)  # printed with four digits
    assert [name for name in names_in(scratch) if name.startswith("paraplan")] == []


def read_losses(text: str) -> dict[int, float]:
    steps = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[5]) for words in steps}


RESTARTED = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = dist.get_rank()
rounds = os.path.join(sys.argv[1], f"round-{rank}-")
this_round = next(number for number in range(9) if not os.path.exists(f"{rounds}{number}"))
open(f"{rounds}{this_round}", "w").close()
if this_round == 1 - rank:
    os._exit(3)
if this_round == 2:
    print(f"rank {rank} saw {int(total)}", flush=True)
    if rank == 0 or sys.argv[2] == "succeeds":
        sys.exit(time.sleep(600) if sys.argv[2] == "fails" else 0)
    os._exit(5)
time.sleep(600)  # in no collective: only the launchers tell that a rank of the other node is gone
"""


# What fails at last has gone on before.
@pytest.mark.parametrize("end", [pytest.param("succeeds", marks=pytest.mark.with_all), "fails"])
def test_ranks_of_a_static_rendezvous_start_again_on_every_node_until_one_has_no_restart_left(
    end: str, tmp_path: Path, script: WriteScript, start_forked: StartForked
) -> None:
    words = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    options = [*words, "--max-restarts", 1, "--no-logs"]
    train = script(RESTARTED)
    nodes = [start_forked(*options, "--node-rank", rank, train, tmp_path, end) for rank in (0, 1)]
    (out, said), (other_out, other_said) = (node.communicate(timeout=MEETING_S) for node in nodes)
    assert re.search("host .*: rank 1 failed: exit code 3: restarting all ranks", said), said
    assert re.search("host .*: rank 0 failed: exit code 3: restarting all ranks", other_said), other_said
    assert (out, other_out) == ("rank 0 saw 2\n", "rank 1 saw 2\n")
    assert [node.returncode for node in nodes] == ([0, 0] if end == "succeeds" else [5, 5]), said + other_said
    assert re.search("failed.*SIGTERM", said) is None, said  # a busy machine's launcher may say that it waits for ranks


@pytest.mark.parametrize(
    "meeting",
    [
        "--rdzv-backend c10d --rdzv-endpoint [fd00::1]:29400",
        pytest.param("--master-addr fd00::1 --master-port 29400", marks=pytest.mark.with_all),  # the same endpoint
    ],
    ids=["c10d", "static"],
)
def test_nodes_that_only_ipv6_joins_find_each_other(
    meeting: str, three_hosts: Hosts, script: WriteScript, start_node: StartNode
) -> None:
    for index in (0, 1):
        host = ["-n", three_hosts.place(index).namespace]
        subprocess.run([IP, *host, "addr", "flush", "dev", "eth0"], check=True)
        subprocess.run([IP, *host, "addr", "add", f"fd00::{index + 1}/64", "dev", "eth0", "nodad"], check=True)
    train = script("import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print('met')")
    words = ["--nnodes", 2, "--nproc-per-node", 1, *meeting.split()]
    nodes = [start_node(index, *words, "--node-rank", index, train) for index in (0, 1)]
    for node in nodes:
        status, said = node.end()
        assert status == 0, said
        assert "met" in said
