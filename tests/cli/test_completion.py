"""What a shell completes: names of models, machines, GPUs, frameworks, targets, pages, and the launcher's options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def completed(line: str) -> list[str]:
    """Return what bash is offered for the last word of a line."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", "from paraplan.cli.main import main; main()"],
        env=os.environ | {"_PARAPLAN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


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
    ],
)
def test_names_are_completed(line: str, offered: str) -> None:
    assert offered in completed(line)
