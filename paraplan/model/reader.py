"""From what a user names to a `ModelSpec`: a config file, a bundled name, a hub id, or a factory of an `nn.Module`."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType

from paraplan.errors import ModelError, near_names
from paraplan.model.config_file import MAX_LAYERS, OWN_CODE_HINT, ModelConfig, load_config
from paraplan.model.family_table import READERS, is_read
from paraplan.model.hub import cached_config, hub_config
from paraplan.model.hybrid import is_hybrid, read_hybrid
from paraplan.model.model_names import same_layers, spelled, untuned
from paraplan.model.multi_token import with_prediction_layers
from paraplan.model.spec import ModelSpec
from paraplan.model.transformers_model import can_build, trace_config
from paraplan.resources import profiles_folder


def read_model(reference: str, *, seq_length: int | None = None, micro_batch_size: int = 1) -> ModelSpec:
    """Return the model that `reference` names, without importing torch where it is a configuration.

    `reference` is a `config.json` or a folder that holds one; a name in `profiles/models`; `file.py:factory` or
    `package.module:factory`; or a hub id (`owner/name`). Code that a config names
    is never executed; a configuration of a family that no reader knows is built by transformers, where it is installed,
    and traced. So is a factory's module, with `micro_batch_size` sequences of `seq_length` tokens.
    Raises ModelError for a reference that leads nowhere and for a config that cannot be read.
    """
    if is_factory(reference):
        if importlib.util.find_spec("torch") is None:
            raise ModelError(
                f"{reference} is a factory of an nn.Module, and torch is not installed",
                hint="pip install torch, or give a config.json",
            )
        from paraplan.model.trace import trace_factory  # torch is imported only for a factory

        return trace_factory(reference, seq_length=seq_length, micro_batch_size=micro_batch_size)
    path = find_config(reference)
    if path in bundled_models().values():
        return _read_bundled(path, reference, seq_length, micro_batch_size)
    return _read_file(path, reference, seq_length, micro_batch_size)


def _read_file(path: Path, reference: str, seq_length: int | None, micro_batch_size: int) -> ModelSpec:
    config = load_config(path, seq_length=seq_length)
    is_known = is_read(config) or is_hybrid(config)
    if not is_known and can_build(config.model_type):
        traced = trace_config(config, micro_batch_size=micro_batch_size)
        return traced.replace(source=reference, released_in=config.released_in)
    return read_fields(config).replace(source=reference)


_read_bundled = lru_cache(maxsize=256)(_read_file)
"""Reads a file of ours, which stays as it is: searches for the largest model read all of them again and again."""


def bundled_config(repository: str) -> Path | None:
    """Return the bundled configuration of a hub id, however its letters are written; None where it is not bundled."""
    return _by_hub_id().get(repository.lower())


def is_factory(reference: str) -> bool:
    """Return whether `reference` has the form `file.py:factory` or `package.module:factory`."""
    where, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier() or Path(reference).exists():
        return False
    return where.endswith(".py") or all(part.isidentifier() for part in where.split("."))


@cache
def bundled_models() -> Mapping[str, Path]:
    """Return the bundled configurations by name."""
    return MappingProxyType({path.stem: path for path in sorted((profiles_folder() / "models").glob("*.json"))})


@cache
def _by_hub_id() -> Mapping[str, Path]:
    """Return the bundled configurations by the ids of the hub that have them, in small letters."""
    found = dict[str, Path]()
    for path in bundled_models().values():
        config = json.loads(path.read_text(encoding="utf-8"))
        ids = [config.get("hub_id"), *config.get("same_as", ())]
        found |= {one.lower(): path for one in ids if one is not None}
    return MappingProxyType(found)


def tuned_sibling(repository: str) -> Path | None:
    """Return the bundled configuration of a hub id that differs from a bundled one in how it was tuned alone.

    `Qwen/Qwen2.5-32B-Instruct` has the layers of `Qwen/Qwen2.5-32B`, a mirror of it too. None where there is none, or
    where several are so called, and for a hub id that is bundled itself or kept on this machine.
    """
    if bundled_config(repository) is not None or cached_config(repository) is not None:
        return None
    owner, _, name = repository.lower().rpartition("/")
    alike = {one: path for one, path in _by_hub_id().items() if untuned(one.rpartition("/")[2]) == untuned(name)}
    of_owner = {path for one, path in alike.items() if one.rpartition("/")[0] == owner}
    paths = of_owner or set(alike.values())
    return paths.pop() if len(paths) == 1 else None


def _called(name: str) -> Path | None:
    """Return the one bundled configuration of a name without an owner: ours or the hub's, of a base or a tuned model.

    None where it is bundled under no such name, or under that of several.
    """
    if set(name) & _OF_PATHS:
        return None
    on_hub = [(repository.rpartition("/")[2], path) for repository, path in _by_hub_id().items()]
    for spell in (spelled, lambda one: spelled(untuned(one))):
        for names in (bundled_models().items(), on_hub):
            alike = {path for one, path in names if spell(one) == spell(name)}
            if len(alike) == 1:
                return alike.pop()
    return None


def find_config(reference: str) -> Path:
    """Return the path of the configuration that `reference` names: a file, a folder, a bundled name or a hub id."""
    if not reference.strip():
        raise ModelError("the name of a model is empty", hint=f"give the path of its config.json, or a name; {_SHOWS}")
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} holds no config.json", hint="give a folder saved by transformers")
        return path / "config.json"
    if path.is_file():
        return path
    bundled = bundled_models()
    if reference in bundled:
        return bundled[reference]
    called = _called(reference)
    if called is not None:
        return called
    if _looks_like_hub_id(reference):
        known = bundled_config(reference) or tuned_sibling(reference)
        return known or _download_config(reference)
    what = f"{reference!r} is neither a file, a folder nor a bundled model"
    if not _OWNERLESS_ID.fullmatch(reference):
        raise ModelError(what, hint=_near_models(reference, bundled))
    try:
        return _download_config(reference)
    except ModelError as error:
        reason = error.message.partition(", and ")[2] or error.message
        same = same_layers(reference, bundled)
        hint = f"did you mean {same}, with the same layers? {_SHOWS}" if same else _near_models(reference, bundled)
        raise ModelError(f"{what}, and {reason}", hint=hint) from error


_SHOWS = "paraplan profiles list --kind model shows the bundled ones"


def _near_models(reference: str, bundled: Collection[str]) -> str:
    hint = near_names(reference, bundled)
    return f"{hint} {_SHOWS}" if hint.endswith("?") else f"give the path of its config.json; {_SHOWS}"


def read_config(path: Path, *, source: str | None = None, seq_length: int | None = None) -> ModelSpec:
    """Return the model that the configuration in `path` describes. `source` is the reference kept in the result.

    With `seq_length`, layers whose sliding window is shorter keep the masks that torch's own attention makes for it.

    Raises ModelError for a family that no reader knows, and for fields that are missing or wrong.
    """
    config = load_config(path, seq_length=seq_length)
    return read_fields(config).replace(source=source or str(path))


def read_fields(config: ModelConfig) -> ModelSpec:
    """Return the model of a configuration that is already loaded.

    `mtp_num_layers`, Megatron-Core's name, adds layers for multi-token prediction: transformers' classes have none.
    """
    model_type = config.model_type
    reader = read_hybrid if is_hybrid(config) else READERS.get(model_type)
    if reader is not None:
        model = with_prediction_layers(reader(config), config.size("mtp_num_layers", default=0, most=MAX_LAYERS))
        return model.replace(released_in=config.released_in)
    ways = [] if config.has("auto_map") else [near_names(model_type, READERS).removesuffix("?")]
    if config.has("auto_map"):
        ways.append("the code that auto_map names is never executed")
    if importlib.util.find_spec("transformers") is None:
        ways.append("install transformers, which may know it")
    hint = "; ".join([*ways, OWN_CODE_HINT])
    raise ModelError(f"{config.source}: no reader knows model_type={model_type!r}", hint=hint)


_OF_PATHS = frozenset("/\\")
_OWNERLESS_ID = re.compile(r"[A-Za-z0-9][\w.-]*")
"""A hub id without an owner, as the first models have: bert-large-uncased, t5-11b."""


def _looks_like_hub_id(reference: str) -> bool:
    owner, slash, name = reference.partition("/")
    return bool(slash and owner and name) and "/" not in name and not reference.startswith((".", "~"))


def _download_config(repository: str) -> Path:
    try:
        return hub_config(repository)
    except ModelError as error:
        bundled = same_layers(repository, bundled_models())
        same = f"{bundled}, which is bundled, has the same layers; else " if bundled else ""
        raise ModelError(error.message, hint=f"{same}{error.hint}") from error
