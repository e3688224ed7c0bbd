from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from paraplan import __version__
from paraplan.cli.main import COMMANDS, app
from paraplan.cli.options import length


def test_help_lists_every_command_with_a_sentence() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    for name in COMMANDS:
        line = next(line for line in result.stdout.splitlines() if line.strip(" │").startswith(f"{name} "))
        assert len(line.split(name, 1)[1].strip(" │")) > 20


# The launcher takes the place of the process that calls it: its help is in test_launch_command.py.
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "launch"])
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--" in result.stdout


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "paraplan", "recommend", "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--global-batch" in finished.stdout


def test_an_unknown_command_is_a_usage_error_that_names_near_ones() -> None:
    result = CliRunner().invoke(app, ["recomend"])
    assert result.exit_code == 2
    assert "there is no command 'recomend'" in result.stderr
    assert "did you mean recommend" in result.stderr


def test_help_and_version_are_words_too() -> None:
    run = CliRunner().invoke
    assert run(app, ["help"]).stdout == run(app, ["--help"]).stdout == run(app, []).stdout
    assert run(app, []).exit_code == 0
    assert run(app, ["help", "verify"]).stdout == run(app, ["verify", "--help"]).stdout
    assert run(app, ["version"]).stdout == run(app, ["--version"]).stdout


def test_flags_of_transformers_are_options_with_true_and_false() -> None:
    machine = ["--profile", "dgx-h100", "--dp", "8", "--json"]
    theirs = "--fp16 True --gradient_checkpointing --per_device_train_batch_size=2 --max_seq_length 512 --bf16 False"
    theirs += " --use_peft --load_in_4bit True"
    ours = "--precision fp16 --recompute full --micro-batch 2 --seq-len 512 --train lora --base-weights nf4"
    said = [CliRunner().invoke(app, ["estimate", "gpt2", *machine, *words.split()]) for words in (theirs, ours)]
    assert [each.exit_code for each in said] == [0, 0]
    assert said[0].stdout == said[1].stdout
    odd = CliRunner().invoke(app, ["estimate", "gpt2", *machine, "--gradient_checkpointing=maybe"])
    assert odd.exit_code == 2
    said = " ".join(odd.stderr.replace("│", " ").split())  # in a frame, whose lines end where the terminal does
    assert "--gradient_checkpointing is on or off, and not 'maybe'" in said
    off = CliRunner().invoke(app, ["estimate", "gpt2", *machine, *ours.split()[2:], "--fp16", "--bf16=no"])
    assert '"precision":"fp16"' in off.stdout.replace(" ", "")


def test_what_follows_from_the_batch_is_said_to() -> None:
    refused = CliRunner().invoke(app, ["recommend", "gpt2", "--gradient_accumulation_steps", "4"])
    assert refused.exit_code == 2
    assert "--global-batch" in refused.stderr


def test_lengths_are_told_in_thousands_and_millions_of_tokens() -> None:
    assert [length(words) for words in ("4096", "8k", "1M")] == [4096, 8192, 2**20]


def test_numbers_have_their_limits_in_errors_and_not_in_help() -> None:
    shown = CliRunner().invoke(app, ["recommend", "--help"], env={"COLUMNS": "120"}).stdout
    assert "1000000" not in shown
    for value in ("0", "many", "1000001", "1.5"):
        result = CliRunner().invoke(app, ["recommend", "gpt2", "--tp", value], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        wrong = {"0": "is below the least, 1", "1000001": "is above the most, 1,000,000"}
        assert f"'{value}' {wrong.get(value, 'is not a whole number from 1 to 1,000,000')}" in result.stderr
    for value, wrong in (
        ("-5", "is below the least, 0.01"),
        ("1e30", "is above the most"),
        ("many", "is not a number"),
    ):
        result = CliRunner().invoke(app, ["recommend", "gpt2", f"--budget={value}"], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert f"'{value}' {wrong}" in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"paraplan {__version__}\n"


def test_options_go_by_the_names_of_other_tools_too() -> None:
    ours = ["estimate", "gpt2", "--profile", "dgx-h100", "--global-batch", "8", "--seq-len", "512", "--tp", "2"]
    theirs = ["estimate", "gpt2", "--profile=dgx-h100", "--global_batch_size=8", "--max-length", "512"]
    theirs += ["--tensor-model-parallel-size", "2"]
    results = [CliRunner().invoke(app, [*words, "--json"]) for words in (ours, theirs)]
    assert [result.exit_code for result in results] == [0, 0], results[1].stderr
    assert results[0].stdout == results[1].stdout


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ([], "dgx-a100"),
        (["--profile", "dgx-h100"], "dgx-h100"),
        (["--gpu", "rtx-3090", "--num-gpus", "2"], "rtx-3090-x2"),
    ],
)
def test_a_profile_of_the_environment_is_the_last_that_is_asked(
    words: list[str], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAPLAN_PROFILE", "dgx-a100")
    answer = CliRunner().invoke(app, ["estimate", "gpt2", "--dp", "2", "--json", *words])
    assert answer.exit_code == 0, answer.stderr
    assert f'"name": "{machine}"' in answer.stdout
