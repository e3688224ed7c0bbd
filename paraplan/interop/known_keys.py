"""The keys of each tool: what a reader takes from them, and what is said of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from paraplan.interop.fields import Fields, is_off
from paraplan.records import Record
from paraplan.resources import profiles_folder

_WITHOUT_PLACE = "without a place beside the other keys, and not priced"


class KeyTable(Record):
    """The keys of one tool's files, those of a section after a dot."""

    title: str
    """The tool, as it calls itself."""
    source: str
    """Where its keys are defined, and at what release."""
    based_on: tuple[str, ...] = ()
    """Tables whose keys the tool has too."""
    read: tuple[str, ...] = ()
    """Keys from which a plan or a training follows."""
    without_effect: Mapping[str, tuple[str, ...]] = {}
    """Keys without effect on the memory and the time of a step, by what they are about. A section
    stands for all that is in it."""
    not_priced: Mapping[str, tuple[str, ...]] = {}
    """Keys with an effect that is not priced, by what is said of them."""
    only_beside: Mapping[str, tuple[str, ...]] = {}
    """Keys that the tool looks at only where another one is on, by that one."""
    neutral: Mapping[str, tuple[str | int | float | bool, ...]] = {}
    """Values that are as if the key were absent, beside false, 0, none and nothing."""
    defaults: Mapping[str, str | int | float | bool] = {}
    """Defaults of the tool for keys that say how its software runs."""
    signs: tuple[str, ...] = ()
    """Keys of which one at least tells that a file is this tool's."""
    trains_nothing: Mapping[str, tuple[str, ...]] = {}
    """Keys of files that train nothing, by what such a file does."""

    @property
    def known(self) -> frozenset[str]:
        """All keys, at the top of a file and in sections."""
        groups = (*self.without_effect.values(), *self.not_priced.values(), *self.trains_nothing.values())
        return frozenset([*self.read, *(key for keys in groups for key in keys)])

    @property
    def not_priced_keys(self) -> tuple[str, ...]:
        """Keys with an effect that is not priced."""
        return tuple(key for keys in self.not_priced.values() for key in keys)

    def notes(self, fields: Fields) -> list[str]:
        """Return what is to be said of the keys that no reader has asked for, one line for all of a kind."""
        silent = {key for keys in self.without_effect.values() for key in keys}
        said = {key: words for words, keys in self.not_priced.items() for key in keys}
        lines: dict[str, list[str]] = {}
        for key, value in fields.unread():
            names = [key[:place] for place in _dots(key)] + [key]
            if not silent.isdisjoint(names) or self._is_unused(names, fields) or key.startswith("_"):
                continue
            words = next((said[name] for name in names if name in said), None)
            if words is None and key not in self.read:
                words = f"not known as keys of {self.title}, and not priced"
            elif self._is_neutral(key, value):
                continue
            lines.setdefault(words or _WITHOUT_PLACE, []).append(key)
        return [f"{', '.join(fields.path + fields.shown(key) for key in keys)}: {said}" for said, keys in lines.items()]

    def _is_unused(self, names: list[str], fields: Fields) -> bool:
        switches = [switch for switch, keys in self.only_beside.items() if not set(names).isdisjoint(keys)]
        return bool(switches) and all(is_off(fields.values.get(switch)) for switch in switches)

    def _is_neutral(self, key: str, value: object) -> bool:
        if is_off(value) or value == "auto" or value in self.neutral.get(key, ()):
            return True
        return not isinstance(value, bool) and value in (1, "1") and key.endswith(("_size", "_degree"))


def _dots(key: str) -> list[int]:
    return [place for place, sign in enumerate(key) if sign == "."]


@cache
def key_table(tool: str) -> KeyTable:
    """Return the keys of a tool, with those of the tables that it is based on."""
    path = profiles_folder() / "imports" / f"{tool}.json"
    table = KeyTable.model_validate(json.loads(path.read_text(encoding="utf-8")))
    for name in table.based_on:
        table = _joined(key_table(name), table)
    return table


def _joined(base: KeyTable, table: KeyTable) -> KeyTable:
    """Return a table with the keys of the one that it is based on; what it says itself comes first."""
    own = table.known
    groups: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in ("without_effect", "not_priced", "only_beside"):
        first: Mapping[str, tuple[str, ...]] = getattr(base, name)
        second: Mapping[str, tuple[str, ...]] = getattr(table, name)
        kept = {
            words: tuple(key for key in keys if name == "only_beside" or key not in own)
            for words, keys in first.items()
        }
        groups[name] = {
            words: (*kept.get(words, ()), *second.get(words, ())) for words in dict.fromkeys([*kept, *second])
        }
    read = (*(key for key in base.read if key not in own), *table.read)
    return table.replace(read=read, neutral={**base.neutral, **table.neutral}, **groups)
