"""What paraplan says of every kind of model that transformers knows: priced, traced, or refused and why.

    python scripts/model_census.py [--types NAME ...] [--seconds 20] [--markdown FILE]

For each model type the default configuration of transformers is written to a file, with the class that its models on
the hub usually have, and read as `paraplan estimate` reads it. "read": a reader here describes it. "traced":
transformers builds it without values and its operators are counted. "refused": a sentence says what is not known.
Ends with 1 where a model type gives a bare Python error or takes longer than --seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from marked import between

LENGTH = 512
TASKS = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "PRETRAINING",
    "IMAGE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
)
"""The class of the first of these tasks stands in the configuration, else that of the bare model."""


START, END = "<!-- census -->\n", "<!-- /census -->"


class Answer(NamedTuple):
    """What one model type gave."""

    model_type: str
    kind: str
    words: str
    seconds: float = 0.0


class TooSlowError(BaseException):
    """The time is up."""


def ask(model_type: str, limit_s: float) -> Answer:
    """Return what paraplan says of a model type."""
    from transformers import AutoConfig

    from paraplan.errors import ParaplanError
    from paraplan.model.family_table import READERS
    from paraplan.model.reader import read_model

    def stop(*_: Any) -> None:
        raise TooSlowError

    try:
        fields = AutoConfig.for_model(model_type).to_dict() | {"model_type": model_type}
        fields["architectures"] = [class_of(model_type)]
        text = json.dumps(fields, default=str)
    except Exception as error:  # the library's own, of a configuration that has no default
        return Answer(model_type, "no default", f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGPROF, stop)
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="paraplan-census-") as folder:
        (Path(folder) / "config.json").write_text(text)
        try:
            signal.setitimer(signal.ITIMER_PROF, limit_s, 1.0)
            spec = read_model(folder, seq_length=LENGTH)
            kind = "read" if model_type in READERS else "traced"
            words = f"{spec.parameters.total / 1e6:,.0f} M parameters"
        except ParaplanError as error:
            kind, words = (
                "refused",
                error.message.replace(f"{folder}/", "") + (f" ({error.hint})" if error.hint else ""),
            )
        except TooSlowError:
            kind, words = "too slow", f"over {limit_s:g} s"
        except Exception as error:  # what the census looks for
            kind, words = "error", f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return Answer(model_type, kind, words, time.process_time() - started)


def class_of(model_type: str) -> str:
    """Return the class that a configuration of this type usually names."""
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(model_type)
        if found:
            return found if isinstance(found, str) else found[0]
    found = modeling_auto.MODEL_MAPPING_NAMES[model_type]
    return found if isinstance(found, str) else found[0]


def ask_in_child(arguments: tuple[str, float]) -> Answer:
    """Return the answer of a process of its own, quietly."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    return ask(*arguments)


def main() -> int:
    """Ask about every model type, print them and write the lists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--types", nargs="+")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", type=Path, help="write the lists into this page, between its marks")
    options = parser.parse_args()
    import torch
    from transformers import logging
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    torch.set_num_threads(1)
    ask("biogpt", options.seconds)  # what every trace imports is imported once, before workers are forked
    logging.set_verbosity_error()
    types = options.types or sorted(CONFIG_MAPPING_NAMES)
    answers = []
    with multiprocessing.get_context("fork").Pool(options.workers, maxtasksperchild=1) as pool:
        for answer in pool.imap(ask_in_child, [(each, options.seconds) for each in types]):
            print(f"{answer.model_type:32} {answer.kind:12} {answer.seconds:5.1f} s  {answer.words[:300]}", flush=True)
            answers.append(answer)
    counts = Counter(answer.kind for answer in answers)
    print(f"\n{len(answers)} model types: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}")
    if options.markdown:
        options.markdown.write_text(between(options.markdown.read_text(), START, END, lists(answers)))
    return 1 if counts["error"] or counts["too slow"] else 0


def lists(answers: list[Answer]) -> str:
    """Return the model types of each kind as paragraphs in Markdown."""
    parts = []
    for kind in sorted({one.kind for one in answers}):
        names = ", ".join(one.model_type for one in answers if one.kind == kind)
        parts.append(f"**{kind}** ({sum(one.kind == kind for one in answers)}): {textwrap.fill(names, 120)}")
    return "\n" + "\n\n".join(parts) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
