"""Checks in continuous integration: exit status, plain lines, annotations, JUnit XML, the action and the hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paraplan.cli.ci import annotation, junit_xml
from paraplan.cli.main import app
from paraplan.plan.files import PlanFile
from paraplan.search.verification import Finding

ROOT = Path(__file__).parent.parent.parent
GPT2 = ["gpt2", "--profile", "dgx-h100", "--seq-len", "1024"]
RECOMMEND = ["recommend", *GPT2, "--global-batch", "64"]


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert run(*RECOMMEND, "-o", str(path))[0] == 0
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def parsed(xml: str) -> ET.Element:
    return ET.fromstring(xml)  # noqa: S314 (what these tests have written)


def changed(best: Path, folder: Path, **fields: object) -> Path:
    file = PlanFile.from_json(best.read_text(), source="best")
    path = folder / "changed.json"
    path.write_text(file.replace(plan=file.plan.replace(**fields)).to_json())
    return path


@pytest.fixture
def slow(best: Path, tmp_path: Path) -> Path:
    slow_plan = {"dp": 8, "tp": 1, "pp": 1, "zero_stage": 3, "micro_batch_size": 1, "num_microbatches": 8}
    return changed(best, tmp_path, **slow_plan, pipeline_schedule=None, sequence_parallel=False, recompute="full")


def test_the_recommended_plan_passes_its_own_check(best: Path) -> None:
    status, stdout, stderr = run("verify", str(best), "--tolerance", "0")
    assert (status, stderr) == (0, "")
    assert [line.split()[:2] for line in stdout.splitlines()[1:]] == [
        ["pass", "suits"],
        ["pass", "fits"],
        ["pass", "supported"],
        ["pass", "speed"],
    ]
    assert "\x1b" not in stdout


def test_options_name_another_model_training_or_machine_than_the_plan_file(best: Path, tmp_path: Path) -> None:
    whole = run("verify", str(best), "--model", "gpt2", "--seq-len", "1024", "--global-batch", "64")
    assert whole == run("verify", str(best))
    status, stdout, _ = run("verify", str(best), "--profile", "dgx-h100", "--gpus-per-node", "4")
    assert (status, "8 ranks" in stdout) == (1, True)
    assert "global batch is" in run("verify", str(best), "--global-batch", "128")[1]
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps({"plan": json.loads(best.read_text())["plan"]}))
    assert "does not name its model" in run("verify", str(alone))[2]
    assert "does not say what it trains" in run("verify", str(alone), "--model", "gpt2", "--profile", "dgx-h100")[2]
    said = ["--model", *GPT2, "--global-batch", "64"]
    assert run("verify", str(alone), *said)[0] == 0


def test_the_old_spelling_answers_and_says_how_it_is_spelled_now(best: Path) -> None:
    status, stdout, stderr = run(*RECOMMEND, "--check", str(best), "--tolerance", "0")
    assert (status, stdout) == run("verify", str(best), "--tolerance", "0")[:2]
    assert stderr == f"note: recommend --check is now: paraplan verify {best}\n"


def test_a_plan_that_is_slower_than_the_tolerance_ends_with_1(slow: Path) -> None:
    status, stdout, stderr = run("verify", str(slow))
    assert status == 1
    assert "FAIL  speed" in stdout
    assert "1 of 4 checks" in stderr
    assert run("verify", str(slow), "--tolerance", "100000%")[0] == 0


def test_a_plan_that_no_longer_fits_ends_with_1(best: Path, tmp_path: Path) -> None:
    path = changed(best, tmp_path, dp=8, tp=1, pp=1, zero_stage=0, micro_batch_size=2048, num_microbatches=1)
    status, stdout, _ = run("verify", str(path), "--global-batch", str(2048 * 8))
    assert status == 1
    assert "FAIL  fits" in stdout


def test_a_plan_that_is_not_supported_ends_with_1(best: Path, tmp_path: Path) -> None:
    # 1F1B needs a micro-batch for each stage.
    few = {"dp": 1, "tp": 1, "pp": 8, "zero_stage": 0, "micro_batch_size": 16, "num_microbatches": 4}
    path = changed(best, tmp_path, **few, pipeline_schedule="1f1b", sequence_parallel=False)
    status, stdout, _ = run("verify", str(path), "--tolerance", "100000")
    assert status == 1
    assert "FAIL  supported" in stdout


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 4, "num_microbatches": 16, "micro_batch_size": 1}, "4 ranks, and the machines 8 GPUs"),
        ({"num_microbatches": 64}, "global batch is"),
    ],
)
def test_a_plan_for_other_machines_or_batches_does_not_suit(
    fields: dict[str, object], message: str, best: Path, tmp_path: Path
) -> None:
    plain = {"dp": 8, "tp": 1, "pp": 1, "zero_stage": 0, "micro_batch_size": 1, "num_microbatches": 8}
    status, stdout, _ = run("verify", str(changed(best, tmp_path, **(plain | fields))))
    assert status == 1
    assert message in stdout


def test_github_gets_an_annotation_for_each_failed_check(slow: Path) -> None:
    _, stdout, _ = run("verify", str(slow), "--github")
    (line,) = [line for line in stdout.splitlines() if line.startswith("::")]
    assert line.startswith(f"::error file={slow},title=paraplan%3A speed::")
    assert "%25 slower" in line


def test_an_annotation_is_one_line_whatever_is_in_it() -> None:
    finding = Finding(name="a,b:c", passed=False, message="100%\r\n::warning::x")
    expected = "::error file=x%2Cy%0A,title=paraplan%3A a%2Cb%3Ac::100%25%0D%0A::warning::x"
    assert annotation(finding, file=Path("x,y\n")) == expected


def test_junit_counts_and_names_the_failures(slow: Path, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    assert run("verify", str(slow), "--junit", str(report))[0] == 1
    suites = parsed(report.read_text())
    (suite,) = suites
    assert suite.attrib["tests"] == suites.attrib["tests"] == "4"
    assert suite.attrib["failures"] == "1"
    assert [case.attrib["name"] for case in suite if case.find("failure") is not None] == ["speed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed.json", "junit.xml"]


def test_junit_of_hostile_words_is_xml() -> None:
    finding = Finding(name="fits", passed=False, message='a < b & "c" \x00\x1b')
    case = parsed(junit_xml([finding], subject="]]>\x07", file=None)).find(".//failure")
    assert case is not None
    assert case.attrib["message"].startswith('a < b & "c"')


def test_json_says_what_passed_and_keeps_stdout_to_itself(slow: Path) -> None:
    status, stdout, _ = run("verify", str(slow), "--json", "--github")
    answer = json.loads(stdout)
    assert status == 1
    assert answer["passed"] is False
    assert [check["name"] for check in answer["checks"]] == ["suits", "fits", "supported", "speed"]
    assert answer["step_time_s"] > answer["best_step_time_s"]


def test_estimate_holds_memory_and_rate_against_limits() -> None:
    estimate = ["estimate", *GPT2, "--dp", "8"]
    status, stdout, stderr = run(*estimate, "--max-memory", "70GiB", "--min-tokens-per-s", "1")
    assert (status, stderr) == (0, "")
    assert "pass  max-memory" in stdout
    status, stdout, stderr = run(*estimate, "--max-memory", "1GiB", "--min-tokens-per-s", "1e12", "--github")
    assert status == 1
    assert "max-memory and min-tokens-per-s" in stderr
    assert sum(line.startswith("::error ") for line in stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "{plan}", "--tolerance", "many"], "--tolerance many is not a percentage"),
        (["verify", "{plan}", "--tolerance", "-1"], "not a percentage"),
        ([*RECOMMEND, "--github"], "use paraplan verify PLAN"),
        ([*RECOMMEND, "--tolerance", "3"], "--tolerance reports checks, and there are none"),
        (["verify", "{plan}", "--junit", "/no/such/folder/junit.xml"], "cannot write"),
        (["verify", "/no/such/plan.json"], "/no/such/plan.json"),
        ([*RECOMMEND, "--check", "{plan}", "-o", "plan.json"], "leave out -o"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], message: str, best: Path) -> None:
    status, _, stderr = run(*(word.format(plan=best) for word in arguments))
    assert status == 2
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_limit_that_is_no_amount_of_memory_is_told() -> None:
    status, stdout, stderr = run("estimate", *GPT2, "--max-memory", "lots")
    assert (status, stdout) == (2, "")
    assert "--max-memory" in stderr


def action() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return loaded


def run_action(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a checking step of the action as GitHub does: inputs filled in, bash with -e and pipefail."""
    step = action()["runs"]["steps"][2 if "script" in inputs else 1]
    defaults = {name: spec.get("default", "") for name, spec in action()["inputs"].items()}
    values = defaults | {name.replace("_", "-"): value for name, value in inputs.items()}
    variables = {
        variable: values[expression.removeprefix("${{ inputs.").removesuffix(" }}")]
        for variable, expression in step["env"].items()
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    environment = os.environ | variables | {"PATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_the_action_checks_a_plan_and_annotates(best: Path, slow: Path, tmp_path: Path) -> None:
    given = {"model": "gpt2", "profile": "dgx-h100", "global_batch": "64", "seq_len": "1024"}
    good = run_action(tmp_path, **given, plan=str(best), max_memory="70GiB", junit="junit.xml")
    assert good.returncode == 0, good.stderr
    assert "pass  speed" in good.stdout
    assert "pass  max-memory" in good.stdout
    assert parsed((tmp_path / "junit.xml").read_text()).attrib["failures"] == "0"
    bad = run_action(tmp_path, **given, plan=str(slow), arguments="--precision bf16 --tolerance 1")
    assert bad.returncode == 1
    assert "::error file=" in bad.stdout


@pytest.mark.with_all
def test_the_action_checks_a_script_and_annotates(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")  # how scripts are checked is tried elsewhere
    ended = run_action(tmp_path, script="train.py --lr $(touch run-me)", arguments="--steps 1")
    assert ended.returncode == 1
    assert "without a step of a torch optimizer" in ended.stderr
    assert "::error file=train.py::" in ended.stdout
    assert not (tmp_path / "run-me").exists()


def test_no_text_of_an_input_is_run(tmp_path: Path) -> None:
    hostile = "$(touch run-me); touch run-me #"
    finished = run_action(
        tmp_path, model=hostile, plan=hostile, profile=hostile, global_batch="8", arguments="", max_memory=hostile
    )
    assert finished.returncode != 0
    assert list(tmp_path.iterdir()) == []
    assert all("inputs." not in step["run"] for step in action()["runs"]["steps"])


def test_the_hook_runs_a_command_that_checks(best: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["language"] == "python"
    program, *words = hook["entry"].split()
    assert program == "paraplan"
    assert hook["pass_filenames"] is False
    assert run(*words, str(best))[0] == 0
