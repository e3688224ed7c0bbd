"""Framework profiles on disk: the bundled ones by name or alias, and files of the user's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paraplan.cost.framework import FrameworkProfile
from paraplan.errors import ProfileError, near_names
from paraplan.hardware.profile_json import read_object, validated
from paraplan.plan.allocators import tool_allocator
from paraplan.resources import profiles_folder

GROUPS = (
    *("storage", "kernels", "data_parallel", "pipeline", "tensor_parallel", "loss", "experts"),
    *("loading", "levers", "fixed"),
)
"""The fields of a profile that it takes from the one that it is `based_on`, value by value."""

FALLBACK_FRAMEWORK = "plain-pytorch"
"""The profile that stands for a framework which a table of runs names and nobody described (assumed)."""
FALLBACK_OF_SPLIT_LAYERS = "megatron-core"
"""The profile for an unknown framework whose runs split layers or stages: what does so took its kernels and its order
of work from Megatron-LM (assumed; OneFlow, LiBai and Meta's stack, as if unknown, are 16, 6 and 23 % off so, as plain
PyTorch 59, 55 and 45)."""

_MAX_BASES = 8


class FrameworkCatalog:
    """The bundled framework profiles; a file is read once, when it is asked for."""

    def __init__(self) -> None:
        self._folder = profiles_folder() / "frameworks"
        self._measured = self._folder / "measured"
        self._loaded: dict[str, FrameworkProfile] = {}
        self._aliases: dict[str, str] = {}
        self._table_aliases: dict[str, str] = {}
        self._named: dict[str, str | None] = {}  # texts of tables, which name the same few again and again

    def names(self) -> list[str]:
        """Return the names of the bundled profiles that plans can be made for."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def measured_names(self) -> list[str]:
        """Return the names of those that tables of runs name beside these, and that nothing is planned for."""
        return sorted(path.stem for path in self._measured.glob("*.json"))

    def load(self, name_or_path: str) -> FrameworkProfile:
        """Return a profile by name or alias, or by the path of a .json file.

        Raises `ProfileError` for an unknown name, with near ones, and for a file at fault, with the field.
        """
        if name_or_path.endswith(".json"):
            return self._read(Path(name_or_path).expanduser())
        name = self._known_names(name_or_path).get(name_or_path.strip().lower())
        if name is None:
            raise ProfileError(
                f"there is no framework {name_or_path!r}",
                hint=near_names(name_or_path, {*self.names(), *self._known_aliases()}, listed=self.names()),
            )
        asked = name_or_path.strip().lower()
        profile = _with_tool_allocator(self.bundled(name), asked).of_tool(asked)
        return profile.replace(export_target=asked) if asked in profile.alias_targets else profile

    def find(self, text: str) -> FrameworkProfile | None:
        """Return the profile that a text such as `Megatron-LM + TE 2.11` names, None for an unknown one."""
        words = text.strip().lower()
        if words not in self._named:
            self._named[words] = self._name_in(words)
        name = self._named[words]
        return None if name is None else self.bundled(name)

    def _name_in(self, words: str) -> str | None:
        if not self._table_aliases:
            self._table_aliases.update(self._known_aliases() | self._aliases_of(self.measured_names()))
        aliases = self._table_aliases
        found = [alias for alias in aliases if all(_has_word(words, word) for word in alias.split())]
        return aliases[max(found, key=len)] if found else None

    def bundled(self, name: str) -> FrameworkProfile:
        """Return the profile of one of `names` or of `measured_names`."""
        if name not in self._loaded:
            self._loaded[name] = self._read(self._path(name))
        return self._loaded[name]

    def _path(self, name: str) -> Path:
        path = self._folder / f"{name}.json"
        return path if path.is_file() else self._measured / f"{name}.json"

    def _known_names(self, text: str) -> Mapping[str, str]:
        """Return names and aliases; of one name without reading the other files."""
        name = text.strip().lower()
        return {name: name} if (self._folder / f"{name}.json").is_file() else self._known_aliases()

    def _known_aliases(self) -> dict[str, str]:
        if not self._aliases:
            self._aliases.update(self._aliases_of(self.names()))
        return self._aliases

    def _aliases_of(self, names: Sequence[str]) -> dict[str, str]:
        # Aliases come after names: in tables of runs "transformers" is the Trainer before it sharded by itself.
        found = {name: name for name in names}
        for name in names:
            found.update(dict.fromkeys(read_object(self._path(name)).get("aliases", ()), name))
        return found

    def _read(self, path: Path) -> FrameworkProfile:
        return validated(FrameworkProfile, self._object(path, depth=0), where=str(path))

    def _object(self, path: Path, *, depth: int) -> dict[str, Any]:
        """Return the JSON object of a file, its groups filled in from the profile that it is `based_on`."""
        own = read_object(path)
        base = own.pop("based_on", None)
        if base is None:
            return own
        near = path.with_name(f"{base}.json")
        base_path = near if near.is_file() else self._path(base)
        if depth == _MAX_BASES or not base_path.is_file():
            reason = "profiles are based on each other" if depth == _MAX_BASES else f"there is no framework {base!r}"
            raise ProfileError(f"{path}: based_on: {reason}", hint=near_names(str(base), self.names()))
        inherited = self._object(base_path, depth=depth + 1)
        for group in GROUPS:
            values = own.get(group, {})
            if isinstance(values, dict) and isinstance(inherited.get(group), dict):
                below = inherited[group]
                sources = [*values.get("sources", ()), *below.get("sources", ())]
                own[group] = below | values | {"sources": sources}
        return own


def load_framework(name_or_path: str) -> FrameworkProfile:
    """Return a framework profile by name, alias or path. Raises `ProfileError` as `FrameworkCatalog.load` does."""
    return FrameworkCatalog().load(name_or_path)


def _with_tool_allocator(profile: FrameworkProfile, text: str) -> FrameworkProfile:
    grows = tool_allocator(text)
    return profile if grows is None else profile.changed(storage={"expandable_segments": grows})


def framework_of_target(target: str) -> str | None:
    """Return the framework whose plans a target of `paraplan export` can say, None where none names it."""
    catalog = FrameworkCatalog()
    profiles = [catalog.load(name) for name in catalog.names()]
    named = next((profile.name for profile in profiles if profile.export_target == target), None)
    return named or (target if any(target in profile.alias_targets for profile in profiles) else None)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9_])", text) is not None
