"""Bundled models by the names that tables of measurements give them: `Qwen3_30B_a3B`, `deepseekv2-4L`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paraplan.model.model_names import plain_name
from paraplan.model.reader import bundled_models

Fields = dict[str, Any]


def known_configs() -> dict[str, Fields]:
    """Return the fields of each bundled model's configuration, by its name without punctuation.

    Of models of the same layers it is the first: Llama 3 for Llama 3.1.
    """
    known: dict[str, Fields] = {}
    for name, path in bundled_models().items():
        if (plain := plain_name(name)) not in known:
            known[plain] = json.loads(path.read_text(encoding="utf-8"))
    return known


def named_config(known: Mapping[str, Fields], name: str, *, num_layers: int | None) -> Fields | None:
    """Return the fields of the model that `name` means, None where nobody knows it.

    With fewer layers than the model has, one of its dense first layers stays (as SimuMax's scripts on GitHub cut
    DeepSeek's models, run_pretrain_deepseekv2.sh).
    """
    fields = known.get(plain_name(name))
    if fields is None:
        return None
    key = "n_layer" if "n_layer" in fields else "num_hidden_layers"
    if num_layers is None or num_layers >= fields[key]:
        return fields
    fewer = {key: num_layers}
    if fields.get("first_k_dense_replace"):
        fewer["first_k_dense_replace"] = 1
    return fields | fewer
