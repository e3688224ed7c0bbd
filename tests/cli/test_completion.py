"""What a shell completes: names of models, machines, GPUs, frameworks, targets, pages, and the launcher's options."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import wait_until

from paraplan.cli.main import app

SCRIPTS = {shell: f"_PARAPLAN_COMPLETE=source_{shell} paraplan" for shell in ("bash", "zsh", "fish")}
ASKED = ("paraplan recommend gpt2 --profile dgx-h1", "dgx-h100")


def run_shell(*command: str, folder: Path) -> str:
    """Return what a shell prints that finds `paraplan` in a folder of its own."""
    program = folder / "paraplan"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paraplan "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=True).stdout


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def test_bash_completes_a_machine(tmp_path: Path) -> None:
    needs("bash")
    line, offered = ASKED
    script = f'eval "$({SCRIPTS["bash"]})"; COMP_WORDS=({line}); COMP_CWORD=4; _paraplan_completion paraplan; '
    assert run_shell("bash", "--norc", "-c", f'{script}echo "${{COMPREPLY[@]}}"', folder=tmp_path).split() == [offered]


def test_fish_completes_a_machine(tmp_path: Path) -> None:
    needs("fish")
    line, offered = ASKED
    script = f"{SCRIPTS['fish']} | source; complete -C '{line}'"
    assert run_shell("fish", "--no-config", "-c", script, folder=tmp_path).split() == [offered]


def test_zsh_completes_a_machine_on_a_terminal(tmp_path: Path) -> None:
    needs("zsh")
    line, offered = ASKED
    run_shell("true", folder=tmp_path)  # puts paraplan there
    setup = f'autoload -U compinit; compinit -D -u; eval "$({SCRIPTS["zsh"]})"; print RE""ADY\n'
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"}
    main, side = pty.openpty()
    shell = subprocess.Popen(
        [shutil.which("zsh") or "zsh", "-f", "-i"],
        stdin=side,
        stdout=side,
        stderr=side,
        env=env,
        start_new_session=True,
    )
    try:
        os.write(main, setup.encode())
        read_until(main, "READY")
        os.write(main, f"{line}\t".encode())
        assert offered in read_until(main, offered)
    finally:
        shell.kill()
        shell.wait()
        os.close(main)
        os.close(side)


def read_until(terminal: int, wanted: str) -> str:
    """Return what a terminal shows up to a text."""
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
        return wanted in shown

    wait_until(is_shown, told=lambda: shown)
    return shown


def completed(line: str) -> list[str]:
    """Return what bash is offered for the last word of a line, asked as its script asks, in this process."""
    words = {"_PARAPLAN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return CliRunner().invoke(app, [], prog_name="paraplan", env=words).stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("paraplan recommend llama-3-8", "llama-3-8b"),
        ("paraplan recommend gpt2 --profile dgx-h1", "dgx-h100"),
        ("paraplan recommend gpt2 --profile 4xrtx-30", "4xrtx-3090"),
        ("paraplan estimate gpt2 --gpu rtx-30", "rtx-3090"),
        ("paraplan recommend gpt2 --framework torcht", "torchtitan"),
        ("paraplan export plan.json --to acc", "accelerate"),
        ("paraplan explain mem", "memory"),
        ("paraplan launch --nproc", "--nproc-per-node"),
        ("paraplan rec", "recommend"),
        ("paraplan estimate gpt2 --optimizer adamw_8", "adamw_8bit"),
        ("paraplan estimate gpt2 --base-weights nf", "nf4:double"),
        ("paraplan estimate gpt2 --train lo", "lora:r=16"),
        ("paraplan launch --preflight m", "measure"),
        ("paraplan launch --rdzv-backend c", "c10d"),
        ("paraplan launch --start-method forks", "forkserver"),
    ],
)
def test_names_are_completed(line: str, offered: str) -> None:
    assert offered in completed(line)


PLAIN_INSTALLATION = """
import importlib.metadata, json, os, re, sys

def required(name, seen):
    if name not in seen:
        seen.add(name)
        for one in importlib.metadata.requires(name) or ():
            if "extra ==" not in one:
                try:
                    required(re.match(r"[A-Za-z0-9._-]+", one)[0].lower().replace("_", "-"), seen)
                except importlib.metadata.PackageNotFoundError:  # of another system or Python
                    pass
    return seen

needed = required("paraplan", set())
has = {
    module
    for module, packages in importlib.metadata.packages_distributions().items()
    if any(package.lower().replace("_", "-") in needed for package in packages)
}

class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in has | {"paraplan", "__main__"}:
            return None
        raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Missing())
for forbidden in ("torch", "click", "yaml", "transformers"):
    try:
        __import__(forbidden)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{forbidden} is here")

from typer.testing import CliRunner
from paraplan.cli.main import app

def complete(line):
    words = {"_PARAPLAN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = CliRunner().invoke(app, [], prog_name="paraplan", env=words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout.split()

offered, lines, options = {}, ["paraplan "], set()
while lines:
    line = lines.pop()
    offered[line] = complete(line)
    if line.count(" ") < 3:
        offered[line + "--"] = complete(line + "--")
        lines += [f"{line}{word} " for word in offered[line] if line == "paraplan "]
    if line.count(" ") == 2:  # an option of several commands is completed alike
        lines += [f"{line}{option} " for option in offered[line + "--"] if option not in options]
        options |= {*offered[line + "--"]}
print(json.dumps(offered))
"""


def test_every_command_and_option_is_completed_where_only_the_dependencies_are_installed() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN_INSTALLATION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    offered = json.loads(done.stdout)
    commands = offered["paraplan "]
    assert {"launch", "recommend", "explain", "topo"} <= set(commands)
    for command in commands:
        options = offered[f"paraplan {command} --"]
        assert "--help" in options or options == [], (command, options)
    assert {"--plan", "--hang-timeout"} <= set(offered["paraplan launch --"])
    assert offered["paraplan launch --preflight "] == ["look", "measure"]
    profiles = [names for line, names in offered.items() if line.endswith(" --profile ")]
    assert profiles
    assert all("dgx-h100" in names for names in profiles)
