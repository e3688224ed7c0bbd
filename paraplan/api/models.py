"""Models: read from a configuration, or traced from a module."""

from __future__ import annotations

from paraplan.api.workloads import usual_length
from paraplan.model.reader import bundled_models as bundled_models
from paraplan.model.reader import read_model
from paraplan.model.spec import ModelSpec
from paraplan.progress import doing


def load_model(
    reference: str, *, seq_length: int | None = None, micro_batch_size: int = 1, finds_length: bool = False
) -> ModelSpec:
    """Return the model of a reference as it is trained on sequences of `seq_length` tokens, by default `usual_length`.

    `reference` is a Hugging Face config.json or a folder that holds one, a bundled name (`llama-3-8b`), a hub id
    (`owner/name`), or `file.py:factory` for a function that returns an `nn.Module`, which is traced with
    `micro_batch_size` sequences. What layers with a sliding window keep depends on the length, so that a default is
    read as if it were given; where the length is searched for (`finds_length`), they keep the masks of sequences
    longer than the window. Raises `ModelError` for what cannot be read.
    """
    with doing(f"reading {reference}"):
        model = read_model(reference, seq_length=seq_length, micro_batch_size=micro_batch_size)
    longest = usual_length(model)
    has_windows = any(run.block.attention is not None and run.block.attention.window for run in model.runs)
    is_final = (seq_length is not None and not finds_length) or longest is None or longest <= (seq_length or 0)
    if is_final or not has_windows:
        return model
    return read_model(reference, seq_length=longest, micro_batch_size=micro_batch_size)
