"""Names from outside - of hosts, GPUs, NICs, models, files, captures - are text on every screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.cli.terminal import escape, make_console, plain_streams
from paraplan.units import printable

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
BRACKETS = ("gpu[/a]", "n[bold]", "[/]", "[red]x", "a[link=http://x]b", "[[x]]", "\\[bold]", "[@click=f]")
ESCAPES = ("\x1b]0;pwn\x07\x1b[2J", "\x9b2J", "a\rb", "\x1b[8mhidden\x1b[0m", "\u202edrowssap", "\x7f\x08\x08", "\x00")
NAMES = st.one_of(
    st.sampled_from(BRACKETS + ESCAPES),
    st.text(st.sampled_from("a[]/\\b=;\x1b\x07\x9b\r\u202e "), min_size=1, max_size=12),
)
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}


def run(*words: object) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    said = done.stdout + done.stderr
    assert not STEERING.search(said), said
    return said


@pytest.fixture(scope="module")
def topology() -> dict[str, object]:
    return dict(json.loads(CliRunner().invoke(app, ["topo", "--profile", "dgx-h100", "--json"]).stdout))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(host=NAMES, gpu=NAMES, nic=NAMES, source=NAMES)
def test_a_machine_of_any_names_is_shown_as_it_is_called(
    tmp_path: Path, topology: dict[str, object], host: str, gpu: str, nic: str, source: str
) -> None:
    report = json.loads(json.dumps(topology)) | {"hostname": host, "source": source}
    for one in report["gpus"]:
        one["name"] = gpu
    report["nics"][0]["name"] = nic
    report["warnings"] = [f"of {host}"]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(report))
    said = run("topo", "--from", path)
    if host.isprintable() and host.strip() == host and len(host) < 20:
        assert host in said
    for words in (["--tree"], ["--json"]):
        run("topo", "--from", path, *words)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.one_of(st.sampled_from(BRACKETS), NAMES).map(lambda name: name.replace("/", "|").replace("\0", "")))
def test_a_folder_of_any_name_holds_a_model_that_every_command_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"m{name}m"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    where = ("--profile", "dgx-h100", "--nodes", 1)
    said = run("estimate", folder, *where, "--global-batch", 64, "--dp", 8)
    if name.isprintable() and len(name) < 10:
        assert f"m{name}m" in re.sub(r"\n *", "", said)
    run("recommend", folder, *where, "--global-batch", 64)
    run("estimate", folder / "none", *where)
    run("topo", "--from", folder / "none")
    run("compare", folder / "none")
    run("validate", folder / "none")
    run("verify", folder / "none")
    run("profiles", "show", folder / "none")


def test_a_console_draws_brackets_and_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BRACKETS:
        make_console(width=80).print(name)
        make_console(width=80).print(f"[bold]{escape(name)}[/bold]", markup=True)
    assert capsys.readouterr().out.splitlines() == [name for name in BRACKETS for _ in range(2)]
    for name in ESCAPES:
        make_console(width=80).print(name)
    assert not STEERING.search(capsys.readouterr().out)


def test_a_style_of_a_whole_text_stays_and_one_inside_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_streams():
        print("\x1b[33m\x1b[1mwarning: a\x1b[2Jb\x1b[0m")  # noqa: T201 (what is tested)
    assert capsys.readouterr().out == "\x1b[33m\x1b[1mwarning: a?[2Jb\x1b[0m\n"


@given(st.text())
def test_printable_text_keeps_its_length_and_what_can_be_read(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not STEERING.search(shown)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable() or a in "\n\t")
    shown.encode()
