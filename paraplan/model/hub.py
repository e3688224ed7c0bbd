"""Configurations from the Hugging Face hub: of its cache on this machine, else fetched by the standard library.

The environment is that of huggingface_hub: HF_HUB_CACHE, HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paraplan.errors import ModelError

_TIMEOUT_S = 10.0
_MOST_BYTES = 4 * 2**20
_REFUSED = {
    401: "it needs a token, or there is none of this name",
    403: "the token may not read it",
    404: "there is none of this name",
}


def hub_config(repository: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a repository's config.json: as huggingface_hub has kept it, else fetched and kept.

    Raises `ModelError` where it is not on this machine and cannot be fetched, with the reason.
    """
    cached = cached_config(repository, environment)
    if cached is not None:
        return cached
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _failed(repository, "HF_HUB_OFFLINE is set, and it is not in the cache")
    content, folder = _fetched(repository, environment), _folder(repository, environment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(content)
    except OSError as error:
        raise _failed(repository, f"{folder} cannot be written: {error.strerror}") from error
    return folder / "config.json"


def cached_config(repository: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of a repository's config.json as huggingface_hub has kept it, None where it has not."""
    folder = _folder(repository, environment)
    main = folder / "refs" / "main"
    newest = folder / "snapshots" / main.read_text(encoding="utf-8").strip() if main.is_file() else folder
    return newest / "config.json" if (newest / "config.json").is_file() else None


def _folder(repository: str, environment: Mapping[str, str]) -> Path:
    return _cache(environment) / f"models--{repository.replace('/', '--')}"


def _cache(environment: Mapping[str, str]) -> Path:
    home = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(environment.get("HF_HUB_CACHE") or str(Path(home) / "hub")).expanduser()


def _fetched(repository: str, environment: Mapping[str, str]) -> bytes:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    if not endpoint.startswith(("https://", "http://")):
        raise _failed(repository, f"HF_ENDPOINT={endpoint} is no address of the web")
    request = Request(f"{endpoint.rstrip('/')}/{repository}/resolve/main/config.json")  # noqa: S310  # checked above
    if environment.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {environment['HF_TOKEN']}")
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # checked above
            content: bytes = answer.read(_MOST_BYTES + 1)
    except HTTPError as error:
        raise _failed(repository, _REFUSED.get(error.code, f"the hub answers {error.code}")) from error
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise _failed(repository, f"{endpoint} is not reached: {reason}") from error
    if len(content) > _MOST_BYTES:
        raise _failed(repository, f"it is larger than {_MOST_BYTES} bytes")
    return content


def _failed(repository: str, reason: str) -> ModelError:
    return ModelError(
        f"there is no file or folder {repository!r}, and its config.json could not be downloaded from "
        f"the hub: {reason}",
        hint="check the name, the network and HF_TOKEN, or give the path of a config.json",
    )
