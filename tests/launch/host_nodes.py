"""Launchers on the hosts of a test."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from forked_launcher import ForkedLauncher
from launching import launcher_command
from nodes import Hosts
from rank_harness import RankHarness
from waiting import PATIENCE_S, wait_until

MEETING_S = 3 * PATIENCE_S
"""Nodes start, meet, plan and train for some steps within this time, however busy the machine."""


class Node:
    """A launcher on one host, whose output is read while it runs."""

    def __init__(
        self,
        ranks: RankHarness,
        made: Hosts,
        index: int,
        *words: object,
        folder: Path,
        environment: dict[str, str],
        is_forked: bool,
    ) -> None:
        self.output = folder / f"output-{index}-{time.monotonic_ns()}"
        self.process: ForkedLauncher | subprocess.Popen[bytes]
        if is_forked:
            self.output.touch()
            words, place = tuple(map(str, words)), made.place(index)
            self.process = ForkedLauncher(
                ranks, words, folder=folder, environment=environment, output=self.output, place=place
            )
        else:
            command = made.command(index, *launcher_command(*words))
            with self.output.open("wb") as file:
                self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)

    def stop(self) -> None:
        """End a launcher that still runs, and with it its ranks."""
        self.process.kill()
        self.process.wait()

    def end(self, timeout_s: float = MEETING_S) -> tuple[int, str]:
        """Return the exit status and all that was written."""
        try:
            status = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it goes on, and has written:\n{self.output.read_text()}") from error
        return status, self.output.read_text()

    def wait_for(self, word: str) -> None:
        """Return once it has written the word; it must not end before."""
        self.wait_for_pattern(re.escape(word))

    def wait_for_pattern(self, pattern: str) -> None:
        """Return once it has written what matches; it must not end before."""
        wait_until(
            lambda: re.search(pattern, self.output.read_text()) or self.process.poll() is not None,
            told=self.output.read_text,
            timeout_s=MEETING_S,
        )
        text = self.output.read_text()
        assert re.search(pattern, text), text


StartNode = Callable[..., Node]
