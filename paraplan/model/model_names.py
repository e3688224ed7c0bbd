"""Names of models, and which of them mean the same layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


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


def untuned(name: str) -> str:
    """Return a name without the words that say whether a release was tuned: `-instruct`, `-chat-hf`.

    They stand at its end, or before a version or a date (`Mistral-7B-Instruct-v0.3`).
    """
    return re.sub(r"([-_ ](instruct|chat|base|it|pt|hf))+(?=$|[-_](v\d|\d{4}))", "", name.lower())


_RELEASES = re.compile(
    r"[-_](hf|instruct|chat|base|it|pt|thinking|reasoning|plus|exp|terminus|unsloth|bnb|4bit|8bit|awq|gptq|int[48]|fp8"
    r"|gguf|mlx|bf16|dynamic|\d{4}|v0\.\d|a\d+b|\d+e)(?=[-_]|$)"
)
"""Words of names that tell releases of the same layers apart: how they were tuned, stored and dated."""
_MADE_FROM = (
    (r"^.*r1[-_]distill[-_]qwen(?=[-_](?:7|14|32)b)", "qwen2.5"),  # the smallest has an output head of its own
    (r"^.*r1[-_]distill[-_]llama", "llama-3"),
    (r"^deepseek[-_]r1(?:[-_]zero|[-_]0528)?[-_]qwen3", "qwen3"),
    (r"^deepseek[-_ ]?r1(?:[-_]zero|[-_]0528)?$", "deepseek-v3"),
    (r"^qwq[-_]", "qwen2.5-"),
    (r"^qwen([23](?:\.5)?)[-_](?:coder|math)[-_]", r"qwen\1-"),
    (r"^llama[-_]guard[-_]3", "llama-3"),
    *(
        (rf"^.*llama[-_ ]?3{version}(?:[-_]nemotron)?(?=[-_ ]?(?:8|70|405)b)", made_from)
        for version, made_from in (
            (r"[._][13]", "llama-3.1"),
            (r"[._][13]", "llama-3.3"),
            (r"(?:[._][13])?", "llama-3"),
        )
    ),
    (r"^meta[-_]llama", "llama"),
    (r"^medgemma", "gemma-3"),
    (r"^qwen3[-_]coder[-_]next$", "qwen3-next-80b"),
    (r"^mistral[-_]small[-_]3$", "mistral-small-24b"),
    (r"^granite[-_]3\.\d", "granite-3.0"),
    (r"^(llama-4-(?:scout|maverick))[-_]17b", r"\1"),
    (r"^(nemotron-3-nano)[-_]30b", r"\1"),
    (r"^(nemotron-3-super)[-_]120b", r"\1"),
)
"""Models by what they were made from: patterns of names without words of releases, and the names in their place."""


def same_layers(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that means a model with the layers of `name`, None where there is none.

    Releases, fine-tunes and distilled models have the layers of what they were made from: DeepSeek-R1 those of V3, its
    distilled Llama those of Llama 3, Qwen3-Coder-30B-A3B those of Qwen3-30B-A3B.
    """
    spellings = (spelled, plain_name, lambda one: spelled(_without_release(one)))
    by_layers = [{spell(one): one for one in reversed(list(known))} for spell in spellings]
    near = (names.get(wanted) for wanted in _names_of_layers(name) for names in by_layers)
    return next((one for one in near if one is not None), None)


def _names_of_layers(name: str) -> Iterator[str]:
    """Yield spelled names that a model of the layers of `name` may have, the nearest first."""
    yield spelled(name)
    words = _without_release(name)
    yield spelled(words)
    for pattern, replacement in _MADE_FROM:
        made_from, count = re.subn(pattern, replacement, words)
        if count:
            yield spelled(made_from)
    yield plain_name(name)


def _without_release(name: str) -> str:
    return _RELEASES.sub("", name.lower().rpartition("/")[2])
