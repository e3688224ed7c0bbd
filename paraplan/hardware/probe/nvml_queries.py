"""Questions to NVML: an answer, or None and a note of why there is none."""

from __future__ import annotations

from typing import Any

NOT_SUPPORTED = 3
GPU_IS_LOST = 15

# Return codes of NVML (nvml.h, nvmlReturn_t), in words.
_REASONS = {
    1: "NVML is not initialised",
    2: "the driver does not know the question",
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "the driver is not loaded",
    10: "the driver did not answer in time",
    13: "this driver is too old for it",
    15: "the GPU is lost (it fell off the bus; see dmesg)",
    16: "the GPU needs a reset",
    17: "the operating system refused",
    20: "the driver ran out of memory",
    25: "driver and library disagree about the form of the answer",
    999: "unknown error of the driver",
}


class Questions:
    """Calls functions of an NVML library by name and keeps account of the questions that had no answer."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._failures: dict[tuple[str, str], list[int]] = {}
        self._notes: list[str] = []

    @property
    def library(self) -> Any:
        """The library, for the structures that some questions take."""
        return self._library

    def machine(self, what: str, function: str, *arguments: Any) -> Any:
        """Return the answer to a question about the whole machine, None where there is none."""
        answer, code = self._call(function, *arguments)
        if code is not None:
            self._failures.setdefault((what, reason(code)), [])
        return answer

    def gpu(self, index: int, what: str, function: str, *arguments: Any, absent_is_normal: bool = False) -> Any:
        """Return the answer to a question about a GPU, None where there is none.

        `absent_is_normal` keeps "not supported" and functions that old drivers lack out of the warnings: that is how
        NVML says that a GPU has no such thing.
        """
        answer, code = self._call(function, *arguments)
        if code is not None and not (absent_is_normal and code in (NOT_SUPPORTED, 13)):
            self._failures.setdefault((what, reason(code)), []).append(index)
        return answer

    def code_of(self, function: str, *arguments: Any) -> tuple[Any, int | None]:
        """Return an answer and None, or None and NVML's code, without a note."""
        return self._call(function, *arguments)

    def note(self, text: str) -> None:
        """Add a warning."""
        self._notes.append(text)

    def note_failure(self, index: int, what: str, code: int) -> None:
        """Add a warning that a question about a GPU had no answer."""
        self._failures.setdefault((what, reason(code)), []).append(index)

    def warnings(self) -> list[str]:
        """Return the notes, those about several GPUs put together."""
        texts = []
        for (what, why), gpus in self._failures.items():
            members = ", ".join(str(gpu) for gpu in sorted(set(gpus)))
            texts.append(f"{what} unknown{f' for GPU {members}' if gpus else ''}: {why}")
        return list(dict.fromkeys(texts + self._notes))

    @staticmethod
    def text(value: str | bytes | None) -> str | None:
        """Return an answer as text; older libraries answer in bytes."""
        return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value

    def _call(self, function: str, *arguments: Any) -> tuple[Any, int | None]:
        call = getattr(self._library, function, None)
        if call is None:
            return None, 13
        try:
            return call(*arguments), None
        except self._library.NVMLError as error:
            return None, int(getattr(error, "value", 999))
        except UnicodeDecodeError:
            return None, 999


def reason(code: int) -> str:
    """Return a return code of NVML in words."""
    return _REASONS.get(code, f"NVML error {code}")
