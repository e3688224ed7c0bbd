"""A measured run of a small model, for tests to change."""

from __future__ import annotations

from paraplan.accuracy.measured_runs import MeasuredRun


def run(**values: object) -> MeasuredRun:
    """Return a run of 12 layers on 8 GPUs with these values in its columns."""
    base: dict[str, object] = {
        "id": "a",
        "gpu": "H100-80GB",
        "num_gpus": 8,
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "seq_len": 1024,
        "global_batch": 64,
        "quality": "A",
        "precision": "bf16",
    }
    return MeasuredRun.model_validate(base | values)
