"""Typed access to the keys of a file, which remembers those that nobody has asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paraplan.errors import PlanError

_TRUTHS = {"true": True, "t": True, "yes": True, "y": True, "1": True}
_TRUTHS |= {"false": False, "f": False, "no": False, "n": False, "0": False}
"""Words for truth values, those of transformers' HfArgumentParser."""


class Fields:
    """The keys and values of a file, or of a section in it; errors name the file, the key and the value.

    "auto", which the Trainer of transformers fills in, counts as absent. A key that is asked for counts as read, unless
    it is looked up in `values`.
    """

    def __init__(self, values: Mapping[str, object], *, source: str, path: str = "", prefix: str = "") -> None:
        self.source, self.path = source, path
        self.values, self._prefix = values, prefix
        self._asked: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.values if isinstance(key, str))

    def value(self, key: str) -> object:
        """Return the value of a key as the file has it, None where it is absent."""
        self._asked.add(key)
        return self.values.get(key)

    def section(self, key: str) -> Fields:
        """Return the fields below `key`; none where it is absent."""
        if key not in self._sections:
            value = self.value(key)
            if value is None:
                value = {}
            if not isinstance(value, Mapping):
                raise self.error(key, "an object with keys")
            self._sections[key] = Fields(value, source=self.source, path=f"{self.path}{key}.", prefix=self._prefix)
        return self._sections[key]

    def taken(self, key: str) -> Mapping[str, object]:
        """Return all of a section's keys and values, for a reader that accounts for them itself."""
        value = self.value(key)
        self._sections.pop(key, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, "an object with keys")
        return {name: item for name, item in value.items() if isinstance(name, str)}

    def unread(self) -> list[tuple[str, object]]:
        """Return the keys that have a value and that nobody has asked for, those of sections after a dot."""
        rest: list[tuple[str, object]] = []
        for key, value in self.values.items():
            if key in self._sections:
                rest += [(f"{key}.{name}", item) for name, item in self._sections[key].unread()]
            elif key not in self._asked and value is not None:
                rest += _leaves(str(key), value)
        return rest

    def shown(self, key: str) -> str:
        """Return a key as the file writes it: an option of a command line with its dashes."""
        return f"{self._prefix}{key.replace('_', '-')}" if self._prefix else key

    def count(self, key: str) -> int | None:
        """Return a whole number above 0, None where it is absent."""
        value = self.number(key)
        if value is not None and value < 1:
            raise self.error(key, "a whole number above 0")
        return value

    def share(self, key: str) -> float | None:
        """Return a number from 0 to 1, None where it is absent."""
        value = self._unless_auto(key)
        try:
            share = None if value is None else float(str(value))
        except ValueError:
            raise self.error(key, "a number from 0 to 1") from None
        if share is not None and not 0 <= share <= 1:
            raise self.error(key, "a number from 0 to 1")
        return share

    def mostly_offloads(self, key: str, notes: list[str]) -> bool:
        """Return whether at least half of an optimizer lies on the host, all of it where no key says how much.

        Of a share a note says how it is priced: as the nearer of all and nothing.
        """
        share = self.share(key)
        if share is None or share in (0, 1):
            return share != 0
        priced, takes = ("none", "less") if share < 0.5 else ("all", "more")
        notes.append(
            f"{self.path}{self.shown(key)} {share:g}: priced as {priced} of the optimizer on the host, and takes "
            f"{takes} of the GPU's memory than is predicted"
        )
        return share >= 0.5

    def choice(self, key: str, choices: tuple[int, ...], default: int) -> int:
        """Return one of `choices`, `default` where it is absent."""
        value = self.number(key)
        if value is not None and value not in choices:
            raise self.error(key, " or ".join(map(str, choices)))
        return default if value is None else value

    def flag(self, key: str) -> bool | None:
        """Return a truth value, also one written as a word, None where it is absent."""
        value = self._unless_auto(key)
        if str(value).lower() in _TRUTHS:
            return _TRUTHS[str(value).lower()]
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def is_on(self, key: str) -> bool:
        """Return whether a switch is set: to true, or to anything that is not a word for false."""
        value = self.value(key)
        return not is_off(value)

    def text(self, key: str) -> str | None:
        """Return a string, None where it is absent."""
        value = self._unless_auto(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def error(self, key: str, expected: str) -> PlanError:
        """Return the error of a value that is not what was expected."""
        value = self.value(key)
        found = repr(value)
        shown = found if len(found) <= 60 else found[:57] + "..."
        hint = "fix that key"
        if isinstance(value, str) and "$" in value:
            hint = "the shell's variables are not filled in: give the script's arguments ($1) after its name, or the "
            hint += "line that runs (bash -x prints it)"
        return PlanError(f"{self.source}: {self.path}{self.shown(key)}: expected {expected}, found {shown}", hint=hint)

    def number(self, key: str) -> int | None:
        """Return a whole number, None where it is absent."""
        value = self._unless_auto(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str) and value.strip().isascii() and value.strip().lstrip("-").isdigit():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error(key, "a whole number")
        return value

    def _unless_auto(self, key: str) -> object:
        value = self.value(key)
        return None if value == "auto" else value


def is_off(value: object) -> bool:
    """Return whether a value says that what its key is for is not done."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "false", "no", "none", "null", "off", "0")
    return value is None or value is False or value == 0 or (isinstance(value, list | dict) and not value)


def _leaves(key: str, value: object) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        return [(key, value)]
    return [leaf for name, item in value.items() if item is not None for leaf in _leaves(f"{key}.{name}", item)]
