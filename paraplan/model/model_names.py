"""Names of models, and which of them mean the same layers."""

from __future__ import annotations

import re
from collections.abc import Iterable


def plain_name(name: str) -> str:
    """Return the letters and digits of a name, by which models of the same shape are equal.

    Left out: an owner (`meta-llama/`), what stands in brackets, a number of layers at its end, words of fine-tunes
    (`-instruct`), and that Llama is of 3.1 or 3.3. DeepSeek-R1 is a DeepSeek-V3.
    """
    plain = re.sub(r"\(.*?\)|-\d+l$|[-_](hf|instruct|chat|base|it)\b", "", name.lower()).rpartition("/")[2]
    plain = re.sub(r"(llama[-_ ]?3)\.[13]", r"\1", plain)
    return spelled(re.sub(r"^deepseek[-_ ]?r1(-zero|-0528)?$", "deepseek-v3", plain))


def spelled(name: str) -> str:
    """Return the letters and digits of a name, by which `llama3 8B` and `gpt-oss:20b` are those that are bundled."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def same_layers(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that means a model with the layers of `name`, None where there is none."""
    plain = plain_name(name)
    return next((one for one in known if plain_name(one) == plain), None)
