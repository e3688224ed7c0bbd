"""Bundled models by the names that tables of measurements give them: `Qwen3_30B_a3B`, `deepseekv2-4L`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paraplan.model.reader import bundled_models

Fields = dict[str, Any]


def known_configs() -> dict[str, Fields]:
    """Return the fields of each bundled model's configuration, by its name without punctuation."""
    return {plain_name(name): json.loads(path.read_text(encoding="utf-8")) for name, path in bundled_models().items()}


def plain_name(name: str) -> str:
    """Return the letters and digits of a name, by which models of the same shape are equal.

    Left out: an owner (`meta-llama/`), what stands in brackets, a number of layers at its end, words of fine-tunes
    (`-instruct`), and that Llama is of 3.1 or 3.3.
    """
    plain = re.sub(r"\(.*?\)|-\d+l$|[-_](hf|instruct|chat|base|it)\b", "", name.lower()).rpartition("/")[2]
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(llama[-_ ]?3)\.[13]", r"\1", plain))


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
