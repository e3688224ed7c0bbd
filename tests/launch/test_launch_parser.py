from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
from launching import ForkedLaunch, WriteScript
from torch.distributed.run import get_args_parser

from paraplan.launch.parser import build_parser, parse_arguments
from paraplan.launch.spec import ArgumentError


def test_every_option_of_the_installed_torchrun_is_taken_with_all_its_spellings() -> None:
    torchs = {spelling for action in get_args_parser()._actions for spelling in action.option_strings}
    ours = {spelling for action in build_parser()._actions for spelling in action.option_strings}
    later = {"--shutdown-timeout", "--shutdown_timeout"}  # torch 2.11 has none; ours takes it with every torch
    assert torchs | build_parser().own_options | later == ours
    assert len(torchs) > 50


FIELDS = ["option_strings", "dest", "default", "choices", "nargs", "help", "required", "const"]


def test_the_parser_read_from_torchs_source_is_the_one_that_torch_makes_and_needs_no_torch() -> None:
    program = (
        "import json, sys; from paraplan.launch.torch_private.parser import torchs_parser; parser = torchs_parser(); "
        f"assert 'torch' not in sys.modules; fields = {FIELDS}; "
        "print(json.dumps([[*(repr(getattr(a, f)) for f in fields), type(a).__name__] for a in parser._actions]))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    expected = [
        [*(repr(getattr(action, field)) for field in FIELDS), type(action).__name__]
        for action in get_args_parser()._actions
    ]
    assert json.loads(made) == expected


@pytest.mark.parametrize("environment", [{}, {"PET_MAX_RESTARTS": "3", "PET_STANDALONE": "1", "PET_TEE": "3"}])
def test_defaults_and_pet_variables_are_torchruns(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # torchrun's own parser reads nothing else
    torchs = vars(get_args_parser().parse_args(["train.py"]))
    ours = vars(parse_arguments(["train.py"], environment).to_namespace())
    assert {name: ours[name] for name in torchs} == torchs | dict.fromkeys(("nnodes", "nproc_per_node", "master_port"))
    assert ours["preflight"] == "look"
    assert not any(ours[name] for name in ours.keys() - torchs.keys() - {"torch_options", "preflight"})


def test_a_pet_variable_counts_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert parse_arguments(["train.py"], {"PET_NPROC_PER_NODE": "4"}).nproc_per_node == "4"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--redirect=3"], "redirects", "3"),
        (["--nproc", "4"], "nproc_per_node", "4"),
        (["--max_restarts", "2"], "max_restarts", 2),
        (["--start-method", "exec"], "start_method", "exec"),
        (["--pl", "x.json"], "plan", "x.json"),
        (["-m"], "module", True),
    ],
)
def test_abbreviations_and_both_spellings_are_understood(words: list[str], name: str, value: object) -> None:
    assert getattr(parse_arguments([*words, "train.py"], {}), name) == value


def test_an_abbreviation_of_torchruns_never_turns_into_an_option_of_ours() -> None:
    parser = build_parser()
    parser.add_argument("--module-plan", dest="shadow")
    parser.add_argument("--rdzv-plan", dest="other_shadow")
    with pytest.raises(ArgumentError, match="ambiguous"):
        parser.parse_args(["--rdzv", "x", "train.py"])
    torchs_alone = get_args_parser()
    torchs_alone.exit_on_error = False
    short = [
        spelling[:length]
        for spelling in ("--module", "--role", "--tee", "--standalone", "--log-dir", "--no-python", "--master-port")
        for length in range(4, len(spelling) + 1)
    ]
    for abbreviation in short:
        expected = _accepts(torchs_alone, abbreviation)
        if expected is not None:
            assert _accepts(build_parser(), abbreviation) == expected


def _accepts(parser: argparse.ArgumentParser, spelling: str) -> str | None:
    """Return the dest that `spelling` sets, None where it is ambiguous."""
    matches = parser._option_string_actions.get(spelling)
    if matches is not None:
        return matches.dest
    found = {match[0].dest for match in parser._get_option_tuples(spelling)}
    return found.pop() if len(found) == 1 else None


def test_words_after_the_script_are_the_scripts() -> None:
    arguments = parse_arguments(["--tee", "3", "train.py", "--plan", "x", "--", "--tee", "-h"], {})
    assert arguments.training_script_args == ("--plan", "x", "--", "--tee", "-h")
    assert (arguments.plan, arguments.tee) == (None, "3")


@pytest.mark.parametrize(
    "words",
    [[], ["--bogus", "train.py"], ["--max-restarts", "many", "train.py"], ["--start-method", "x", "train.py"]],
)
def test_mistakes_are_one_sentence_with_something_to_do(words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_arguments(words, {})
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_options_of_previews_are_refused_where_real_ranks_would_leave_them_out(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    for words in (["--json"], ["--profile", "dgx-h100"], ["--fake-rank", "2"]):
        done = launch_forked(*words, script("raise SystemExit(3)"))
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {words[0]} ")
        assert "--fake" in done.stderr
