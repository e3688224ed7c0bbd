from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.launch.nodes.hosts import (
    END_WITH_STDIN,
    Host,
    host_command,
    host_variables,
    launch_on_hosts,
    read_host_file,
)
from paraplan.launch.spec import ArgumentError

WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8), max_size=4)


def test_host_files_of_open_mpi_deepspeed_and_mpich_are_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "# all\ngpu-a slots=8\n\nme@gpu-b slots = 4 max_slots=8  # half\ngpu-c:2\n10.0.0.9\n"
    )
    expected = [Host("gpu-a", 8), Host("me@gpu-b", 4), Host("gpu-c", 2), Host("10.0.0.9")]
    assert read_host_file(tmp_path / "hosts") == expected


@pytest.mark.parametrize("text", ["", "# none\n", "gpu a\n", "-oProxyCommand=touch\n", "gpu-a slots=many\n", "a;b\n"])
def test_a_host_file_without_hosts_or_with_another_line_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_host_file(tmp_path / "hosts")
    assert caught.value.hint


def test_a_first_host_that_the_others_cannot_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost\ngpu-b\n")
    with pytest.raises(ArgumentError, match="cannot reach localhost"):
        launch_on_hosts(tmp_path / "hosts", words=[], port=None, environment={})


HOSTS = [Host("gpu-a", 8), Host("gpu-b", 8)]


def command(words: list[str], environment: dict[str, str]) -> list[str]:
    return host_command(HOSTS[1], words=words, environment=environment)


@given(words=WORDS, value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8))
def test_every_word_and_variable_reaches_the_shell_of_the_other_host_as_it_is(words: list[str], value: str) -> None:
    remote = command(words, {"PYTHONPATH": value})[-1]
    folder, _, rest = remote.partition(" && exec ")
    assert shlex.split(folder) == ["cd", str(Path.cwd())]
    got = shlex.split(rest)
    assert got[len(got) - len(words) :] == words
    assert f"PYTHONPATH={value}" in got


def test_a_shell_hands_the_words_on_unchanged() -> None:
    words = ["$HOME", "`id`", "a 'b' \"c\"", "; exit 3", "*", "\n", "-x"]
    remote = command(words, {})[-1].partition("paraplan launch ")[2]
    done = subprocess.run(["/bin/sh", "-c", f"printf '%s|' {remote}"], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"{word}|" for word in words)


def test_a_host_learns_its_place_and_gets_what_libraries_read_and_nothing_private() -> None:
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secret", "AWS_SECRET": "x", "PATH": "/bin", "PYTHONPATH": "/p"}
    variables = host_variables(HOSTS[1], node_rank=1, hosts=HOSTS, port=2345, environment=environment)
    assert variables == {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "hf_secret",
        "PYTHONPATH": "/p",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "gpu-a",
        "PET_MASTER_PORT": "2345",
        "PET_NPROC_PER_NODE": "8",
    }


@given(
    st.dictionaries(
        st.sampled_from(["HF_TOKEN", "HF_HOME", "NCCL_DEBUG", "PARAPLAN_JOB_TOKEN", "TORCH_X", "PET_ROLE", "CUDA_X"]),
        st.from_regex(r"s3cret[a-z]{6}", fullmatch=True),
    )
)
def test_no_value_of_a_variable_stands_in_a_command_line(environment: dict[str, str]) -> None:
    text = " ".join(command(["train.py"], environment))
    assert not [value for value in environment.values() if value in text]
    assert f"{END_WITH_STDIN}=1" in text
