"""The model of a check: built from a configuration or a factory, with fewer layers, narrower, and without dropout."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paraplan.errors import ModelError, UsageError
from paraplan.model.factory import call_user_code, load_factory
from paraplan.model.reader import find_config, is_factory
from paraplan.model.shrink import SECTIONS, SIZES, Smaller, shrink_fields
from paraplan.runtime.structure.blocks import find_blocks

_MOST_PARAMETERS = 200_000_000  # what several ranks train on a CPU in a minute
_OF_THE_FILE = ("model_type", "architectures", "torch_dtype", "dtype", "use_cache", "transformers_version")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def build_small(reference: str, to: Smaller) -> nn.Module:
    """Return a small model of the structure of `reference`, in fp32 on the CPU; torch's seed decides its weights.

    A factory is called with smaller numbers for what it names layers, heads and sizes; one that names none keeps its
    width, and only the first blocks of its stack. Raises `ModelError` where the smaller model cannot be built.
    """
    model = _from_factory(reference, to) if is_factory(reference) else _from_config(reference, to)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise ModelError(
            f"the smaller {reference} still has {count:,} parameters, and a check on CPU ranks takes "
            f"{_MOST_PARAMETERS:,}",
            hint="give the factory arguments with defaults such as num_layers, hidden_size and num_heads",
        )
    _turn_off_dropout(model)
    return model.train()


def _from_config(reference: str, to: Smaller) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"a check builds the model of {reference}, and transformers is not installed to do so",
            hint="pip install transformers, or name a factory as file.py:factory",
        )
    import transformers

    path = find_config(reference)
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    architecture = (fields.get("architectures") or [None])[0]
    model_class = getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ModelError(
            f"{path}: architectures names {architecture!r}, which transformers {transformers.__version__} lacks",
            hint="code that a configuration brings is never executed; give a factory as file.py:factory",
        )
    given = {name: value for name, value in fields.items() if name not in _OF_THE_FILE}

    def build() -> nn.Module:
        whole = transformers.AutoConfig.for_model(fields["model_type"], **given)
        config = transformers.AutoConfig.for_model(
            fields["model_type"], **shrink_fields(_with_defaults(given, whole), to)
        )
        for part in (config, config.get_text_config(decoder=True)):
            if hasattr(part, "use_cache"):
                part.use_cache = False
        model: nn.Module = model_class(config)
        return model.float()

    return _built(reference, build)


def _with_defaults(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the fields of a file with the sizes that it leaves to the library, those of its towers too."""
    own = {name: value for name, value in vars(config).items() if name in SIZES or name.endswith("_token_id")}
    fields: dict[str, Any] = {name: value for name, value in own.items() if isinstance(value, int)}
    fields |= {name: value for name, value in vars(config).items() if isinstance(value, dict) and SECTIONS in value}
    fields |= dict(given)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            fields[name] = _with_defaults(given.get(name) or {}, part)
    return fields


def _from_factory(reference: str, to: Smaller) -> nn.Module:
    factory = load_factory(reference)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    small = shrink_fields(defaults, to)
    changed: dict[str, Any] = {name: value for name, value in small.items() if value != defaults[name]}
    model = _built(reference, lambda: factory(**changed))
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference} returned {type(model).__name__}, expected an nn.Module")
    _shorten(model, to.num_layers)
    return model.float()


def _built(reference: str, build: Any) -> nn.Module:
    model: nn.Module = call_user_code(reference, "a smaller model of it was built", build)
    return model


def _shorten(model: nn.Module, num_layers: int) -> None:
    """Leave the first `num_layers` blocks of a stack that is a list."""
    stack = find_blocks(model)
    if stack is None or len(stack) <= num_layers:
        return
    parent, _, _ = stack.names[0].rpartition(".")
    container = model.get_submodule(parent)
    if isinstance(container, nn.ModuleList) and len(container) == len(stack):
        del container[num_layers:]


def _turn_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = isinstance(value, float) and ("dropout" in name or name.endswith("drop"))
            if is_rate or (name == "p" and isinstance(module, _DROPOUTS)):
                setattr(module, name, 0.0)


def check_batch(model: nn.Module, *, num_sequences: int, seq_length: int, seed: int) -> tuple[Any, torch.Tensor]:
    """Return inputs and targets of `num_sequences` for `model`: random token ids, some targets masked.

    A model with `example_inputs(batch, tokens)` is given those. Ids are such that every embedding of the model has.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    most = min(tables, default=2)
    ids = torch.randint(most, (num_sequences, seq_length), generator=generator)
    targets = torch.randint(most, (num_sequences, seq_length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = -100
    own = getattr(model, "example_inputs", None)
    if own is not None:
        return own(num_sequences, seq_length), targets
    config = getattr(model, "config", None)
    if config is None:
        return ids, targets
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}, targets
    return {"input_ids": ids}, targets
