"""A real Chromium without a window, driven over its DevTools pipe: what it logs, fetches and shows."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WAIT_S = 120.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *("--remote-debugging-pipe", "--hide-scrollbars"),
)


def chromium_path() -> str | None:
    """Return where Chromium is, None where it is not installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """One tab of a browser. Events that arrive while an answer is awaited are kept in `events`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._buffer, self._number = commands, answers, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command; raise RuntimeError for its failure."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _WAIT_S
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, *, width: int, is_dark: bool = False) -> None:
        """Open a file in a window of `width` and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + _WAIT_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read(until))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))

    def named(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of some kinds."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium does not answer within {_WAIT_S:g} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browsing(path: str) -> Iterator[Browser]:
    """Run the Chromium at `path`; it is ended with all that it started, and its files are removed."""
    # Its sockets need a short path, shorter than those that pytest makes.
    with tempfile.TemporaryDirectory(prefix="pp-", ignore_cleanup_errors=True) as folder:
        ours_in, its_out = os.pipe()
        its_in, ours_out = os.pipe()
        process = _start(path, Path(folder), its_in, its_out)
        os.close(its_in)
        os.close(its_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(ours_in)
            os.close(ours_out)


def _start(path: str, folder: Path, reads: int, writes: int) -> int:
    """Start Chromium as a process group of its own with a pipe to read from and one to write to."""
    # Chromium reads descriptor 3 and writes 4: both ends are moved out of their way first.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (reads, writes)]
    with Path(os.devnull).open("r+b") as nothing:
        process = os.posix_spawn(
            path,
            [path, *_FLAGS, f"--user-data-dir={folder / 'data'}", "about:blank"],
            os.environ | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, nothing.fileno(), each) for each in (0, 1, 2)),
                *((os.POSIX_SPAWN_DUP2, each, number) for each, number in zip(moved, (3, 4), strict=True)),
            ],
            setpgroup=0,
        )
    for each in moved:
        os.close(each)
    return process
