"""Ctrl-C reaches what tests start, also where a script has started the suite in the background and ignores SIGINT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHOW = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_what_a_test_starts_ends_at_an_interrupt() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert shown.stdout == "True\n"


def test_so_it_does_in_a_suite_that_was_started_with_interrupts_ignored() -> None:
    test = f"{Path(__file__)}::{test_what_a_test_starts_ends_at_an_interrupt.__name__}"
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *suite], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
