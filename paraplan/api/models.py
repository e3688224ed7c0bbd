"""Models: read from a configuration, or traced from a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paraplan.errors import WrongArgumentError
from paraplan.model.reader import bundled_models as bundled_models
from paraplan.model.reader import read_model, tuned_sibling
from paraplan.model.spec import ModelSpec as ModelSpec
from paraplan.progress import doing

USUAL_LENGTH = 4096
"""Tokens; see `usual_length`."""


def load_model(
    reference: str | Path | Callable[[], Any],
    *,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    finds_length: bool = False,
) -> ModelSpec:
    """Return the model of a reference as it is trained on sequences of `seq_length` tokens, by default `usual_length`.

    `reference` is a Hugging Face config.json or a folder that holds one, a bundled name (`llama-3-8b`), a hub id
    (`owner/name`), or an `nn.Module`, which is traced with `micro_batch_size` sequences and stays as it is: the module
    itself, a class or function that makes it without arguments, or `file.py:factory` for such a function. What layers
    with a sliding window keep depends on the length, so that a default is read as if it were given; where the length is
    searched for (`finds_length`), they keep the masks of sequences longer than the window. Raises `ModelError` for what
    cannot be read.
    """
    for name, number in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
        if number is not None and number < 1:
            raise WrongArgumentError(f"{name}={number} of load_model", hint="use 1 or more")
    if callable(reference):
        from paraplan.model.trace import trace_given  # torch, which a configuration does without

        return trace_given(reference, seq_length=seq_length, micro_batch_size=micro_batch_size)
    reference = str(reference)
    with doing(f"reading {reference}"):
        model = read_model(reference, seq_length=seq_length, micro_batch_size=micro_batch_size)
    longest = usual_length(model)
    is_final = (seq_length is not None and not finds_length) or longest is None or longest <= (seq_length or 0)
    if is_final or not model.has_windows:
        return model
    return read_model(reference, seq_length=longest, micro_batch_size=micro_batch_size)


def usual_length(model: ModelSpec) -> int | None:
    """Return the tokens of a sequence where nobody says how many: the model's longest, but no more than 4,096.

    Models are trained on such sequences, and stretched to their longest at the end, if at all. None where the model
    does not say what its longest is.
    """
    return None if model.max_seq_length is None else min(model.max_seq_length, USUAL_LENGTH)


def stands_for(reference: str | Path) -> str | None:
    """Return the bundled name whose configuration stands for that of a hub id, None where the reference has its own."""
    words = str(reference)
    owner, slash, name = words.partition("/")
    if not (slash and owner and name) or "/" in name or Path(words).exists():
        return None
    bundled = tuned_sibling(words)
    return None if bundled is None else bundled.stem
