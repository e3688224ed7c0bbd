"""What takes long says so on a terminal alone, and Ctrl-C gives the best so far."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

from paraplan.progress import doing, is_stopped, say, stoppable

LONG = (
    "recommend deepseek-v3 --profile hgx-h800 --nodes 256 --seq-len 4096 --global-batch 15360 --framework megatron-core"
)


def started(stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paraplan", *LONG.split()],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"COLUMNS": "200", "TERM": "xterm"},
    )


def test_ctrl_c_gives_the_best_of_what_was_priced_and_the_line_is_erased() -> None:
    ours, theirs = pty.openpty()
    with started(theirs) as running:
        os.close(theirs)
        written = b""
        while b"so far" not in written:
            written += os.read(ours, 1000)
        running.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 1000):
                written += more
        except OSError:  # the other side is closed
            pass
        answer = running.stdout.read() if running.stdout else ""
    os.close(ours)
    assert running.returncode == 0
    assert "stopped early: the best of the plans priced until then" in " ".join(answer.split())
    assert b"counting plans" in written
    assert written.endswith(b"\r\x1b[K")


def test_nobody_has_to_listen() -> None:
    with doing("something"), stoppable():
        say("it")
        assert not is_stopped()
