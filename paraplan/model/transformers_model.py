"""A configuration's model as the transformers library builds it: for families that no reader here describes.

Only classes of the library itself are built. Code that a configuration brings (`auto_map`) is never executed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from paraplan.errors import ModelError
from paraplan.model.config_file import OWN_CODE_HINT, ModelConfig

if TYPE_CHECKING:  # torch, which reading a known family does without
    from paraplan.model.spec import ModelSpec
    from paraplan.model.trace_inputs import Attempt

# Where a configuration names no class, the first of these tasks that its family has.
_TASKS = ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "IMAGE_CLASSIFICATION")


def can_build(model_type: str) -> bool:
    """Return whether torch and transformers are installed and the latter has models of this type; imports both."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def trace_config(config: ModelConfig, *, micro_batch_size: int = 1) -> ModelSpec:
    """Return the model of a configuration, built by transformers without values and traced.

    The sequence has the length of `config`, else of the configuration's own positions, else of the trace's default.
    Raises ModelError where transformers has no such class, or cannot build or run it.
    """
    from paraplan.model.trace import trace_module
    from paraplan.model.trace_inputs import ATTEMPTS

    longest = config.optional_count("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    failed: ModelError | None = None
    for attempt in ATTEMPTS:
        try:
            with _without_advice():
                spec = trace_module(
                    library_factory(config, attempt=attempt),
                    seq_length=config.seq_length or longest,
                    micro_batch_size=micro_batch_size,
                    source=config.source,
                )
            return spec.replace(name=config.name, model_type=config.model_type, max_seq_length=longest)
        except ModelError as error:
            failed = failed or error
    assert failed is not None
    missing = re.findall(r"`pip install ([\w-]+)`", str(failed.__cause__)) if _is_import(failed) else []
    if missing:
        text = "; or give its text_config as a file of its own" if config.has("text_config") else ""
        raise ModelError(
            f"no reader describes model_type={config.model_type!r}, and transformers builds it with "
            f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint=f"pip install {' '.join(missing)}{text}",
        ) from failed
    raise ModelError(
        f"no reader describes model_type={config.model_type!r}, and as transformers builds it paraplan cannot run it "
        f"without values: {failed.message.removeprefix(f'{config.source} failed while ')}",
        hint="if a field of the configuration is wrong, correct it; else write a factory whose module says its inputs "
        "with example_inputs(sequences, tokens), and give it as file.py:factory",
    ) from failed


def library_factory(
    config: ModelConfig,
    *,
    attention: Literal["sdpa", "eager"] = "sdpa",
    attempt: Attempt = "main",
) -> Callable[[], Any]:
    """Return what builds the class that a configuration names, else its family's language model or classifier.

    The module takes token ids; one that needs more, pixels or sound has the `example_inputs` that a trace asks for,
    of its main input or of all.
    Raises ModelError where transformers is not installed or has no such class.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{config.source} can only be built by transformers, which is not installed",
            hint="pip install transformers, or name a factory as file.py:factory",
        )
    import transformers

    from paraplan.model.trace_inputs import library_inputs  # torch

    model_class = _model_class(config)
    fields = {name: value for name, value in config.fields.items() if name not in ("model_type", "auto_map")}

    def build() -> Any:
        built = transformers.AutoConfig.for_model(config.model_type, **fields)
        if attention == "eager":  # else transformers takes sdpa wherever the model has it
            built._attn_implementation = attention
        text = built.get_text_config(decoder=True)
        if hasattr(text, "use_cache"):
            text.use_cache = False
        module = model_class(built)
        inputs = library_inputs(module, built, attempt)
        if inputs is not None:
            module.example_inputs = inputs
        return module

    return build


def _is_import(error: ModelError) -> bool:
    return isinstance(error.__cause__, ImportError)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Have transformers be silent about kernels that it lacks: nothing is computed."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _model_class(config: ModelConfig) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    names = [config.architecture] if config.architecture else []
    for task in [] if names else _TASKS:
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type)
        names += [found] if isinstance(found, str) else []
    found = getattr(transformers, names[0], None) if names else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    if not names:
        raise ModelError(
            f"{config.source}: the field 'architectures' is missing, and model_type={config.model_type!r} has no "
            "language model or classifier of its own",
            hint="name the class, such as ['LlamaForCausalLM']",
        )
    raise ModelError(
        f"{config.source}: architectures names {names[0]!r}, which transformers {transformers.__version__} lacks",
        hint=f"code that a configuration brings is never executed; {OWN_CODE_HINT}",
    )
