from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paraplan.launch.nodes.batch_systems import (
    FIRST_PORT,
    NUM_PORTS,
    NodePlace,
    find_place,
    first_host,
    take_place,
)
from paraplan.launch.nodes.job_token import TOKEN_VARIABLE, job_port
from paraplan.launch.parser import parse_arguments
from paraplan.launch.spec import ONE_NODE, ArgumentError, NodeRange

SECRET = {TOKEN_VARIABLE: "s" * 32}
SRUN = {
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu1", "gpu1"),
        ("gpu[01-03,7],login", "gpu01"),
        ("login,gpu[01-03,7]", "login"),
        ("r[1-2]n[08-09]", "r1n08"),
        ("10.0.0.[1-2]", "10.0.0.1"),
        ("gpu[0-999999999999]", "gpu0"),
        ("", None),
    ],
)
def test_the_first_host_of_a_list_is_read_as_slurm_writes_it(text: str, expected: str | None) -> None:
    assert first_host(text) == expected


def test_srun_gives_nodes_rank_and_the_address_of_the_first_node() -> None:
    place = find_place(SRUN)
    assert place is not None
    assert (place.num_nodes, place.node_rank, place.address) == (4, 2, "gpu07")
    assert place.job == find_place(SRUN | {"SLURM_NODEID": "3"}).job  # type: ignore[union-attr]
    assert place.job != find_place(SRUN | {"SLURM_JOB_ID": "4712"}).job  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["gpu[", "gpu[1-", "gpu[a-b]", "gpu]1[", "\x1b[2J", "gpu 1", "[]", "gpu[1-2]]"])
def test_a_malformed_list_of_hosts_is_refused_in_words(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a list of hosts as SLURM writes it") as caught:
        find_place(SRUN | {"SLURM_STEP_NODELIST": text})
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("text", ["", "two", "-1", "1e3", "9" * 5000, "\u0662", "2(x3)"])
@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"])
def test_a_malformed_variable_of_a_batch_system_is_named(name: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}=.* is not a number"):
        find_place(SRUN | {name: text})


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA])
def test_two_jobs_of_mpirun_are_told_apart_by_the_batch_system(variables: dict[str, str]) -> None:
    places = [find_place(variables | {"PBS_JOBID": job, "MASTER_ADDR": "a"}) for job in ("1.pbs", "2.pbs")]
    assert len({place.job for place in places if place is not None}) == 2
    chosen = find_place(variables | {"MASTER_ADDR": "a", "MASTER_PORT": "29501"})
    assert chosen is not None
    assert chosen.port == 29501


def test_a_batch_script_without_srun_is_of_no_batch_system_and_a_job_of_one_node_has_one() -> None:
    assert find_place({"SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}) is None
    alone = find_place(SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"})
    assert alone is not None
    asked = parse_arguments(["train.py"], {})
    assert take_place(asked, alone, SECRET) == (replace(asked, nodes=ONE_NODE), None)
    assert find_place({}) is None


@pytest.mark.parametrize(("variables", "rank"), [(OPEN_MPI, 1), (HYDRA, 2)])
def test_mpiruns_give_nodes_and_rank_and_the_user_or_a_node_file_the_address(
    tmp_path: Path, variables: dict[str, str], rank: int
) -> None:
    place = find_place(variables | {"MASTER_ADDR": "10.0.0.1"})
    assert place is not None
    assert (place.num_nodes, place.node_rank, place.address) == (3, rank, "10.0.0.1")
    (tmp_path / "nodes").write_text("gpu-a\ngpu-b\n")
    place = find_place(variables | {"PBS_NODEFILE": str(tmp_path / "nodes")})
    assert place is not None
    assert place.address == "gpu-a"


def place(**changes: object) -> NodePlace:
    values: dict[str, object] = {
        "system": "srun",
        "num_nodes": 2,
        "node_rank": 1,
        "num_tasks": 2,
        "address": "gpu-a",
        "job": "j",
    }
    return NodePlace(**(values | changes))  # type: ignore[arg-type]


def test_the_place_becomes_a_static_rendezvous_and_for_a_range_of_nodes_an_elastic_one() -> None:
    spec, line = take_place(parse_arguments(["train.py"], {}), place(), SECRET)
    port = job_port(SECRET, job="j", first=FIRST_PORT, count=NUM_PORTS)
    assert line == f"srun: node 1 of 2, rendezvous at gpu-a:{port}"
    assert (spec.nodes, spec.node_rank, spec.master_addr) == (NodeRange(2, 2), 1, "gpu-a")
    assert spec.master_port == port
    spec, _ = take_place(parse_arguments(["--nnodes", "1:2", "train.py"], {}), place(), SECRET)
    assert (spec.rdzv_backend, spec.rdzv_endpoint) == ("c10d", f"gpu-a:{port}")
    assert (spec.nodes, spec.rdzv_id) == (NodeRange(1, 2), "j")


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone"],
        ["--rdzv-endpoint", "b:1"],
        ["--master-port", "1"],
        ["--master-addr", "b"],
        ["--nnodes", "1"],
        ["--rdzv-backend", "c10d"],
    ],
)
def test_what_the_user_says_about_the_rendezvous_is_kept(words: list[str]) -> None:
    spec = parse_arguments([*words, "train.py"], {})
    assert take_place(spec, place(), SECRET) == (spec, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_tasks": 16}, "16 launchers on 2 nodes"),
        ({"address": None}, "MASTER_ADDR"),
        ({"node_rank": 2}, "node 2, counted from 0, of 2 nodes"),
    ],
)
def test_a_place_that_cannot_be_used_is_an_error_with_something_to_do(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        take_place(parse_arguments(["train.py"], {}), place(**changes), SECRET)
    assert said in str(caught.value)
    assert caught.value.hint


def test_launchers_on_unlike_nodes_are_refused_and_do_not_train_alone() -> None:
    sizes = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    found = find_place(sizes | {"MASTER_ADDR": "a"})
    assert found is not None
    with pytest.raises(ArgumentError, match="mpirun started 4 launchers on 2 nodes"):
        take_place(parse_arguments(["train.py"], {}), found, SECRET)


def test_several_launchers_on_the_only_node_are_told_that_each_has_a_job_of_its_own() -> None:
    found = find_place(SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    assert found is not None
    asked = parse_arguments(["train.py"], {})
    spec, line = take_place(asked, found, SECRET)
    assert spec == replace(asked, nodes=ONE_NODE)
    assert line is not None
    assert line.startswith("srun started 4 launchers on this node, and each runs a job of its own")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PBS_NODEFILE": "/bin/sh"}, "PBS_NODEFILE=/bin/sh cannot be read: it is not a text"),
        ({"LSB_DJOB_HOSTFILE": "/" + "x" * 5000}, "cannot be read: File name too long"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
    ],
)
def test_what_a_batch_system_says_of_the_first_node_is_refused_in_words(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        find_place(HYDRA | variables)
