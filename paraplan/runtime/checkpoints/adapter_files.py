"""Adapters in peft's own files: which tensors of a model they are, and writing them alone from a checkpoint."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paraplan.errors import UsageError
from paraplan.runtime.checkpoints.weight_files import read_checkpoint, save_tensors

_DEFAULT = "default"  # peft writes the adapter of this name to the folder itself (PeftModel.save_pretrained)
_WEIGHTS = "adapter_model.safetensors"  # peft.utils.constants.SAFETENSORS_WEIGHTS_NAME


@dataclass(frozen=True)
class Adapter:
    """One adapter of a peft model. `names` maps the tensors of its file to those of the model."""

    name: str
    config: Any
    names: Mapping[str, str]
    auto_mapping: Mapping[str, str] | None


def adapters_of(model: nn.Module) -> tuple[Adapter, ...]:
    """Return the adapters of `model`, which is still whole; none where it is not a `peft.PeftModel`.

    peft says itself what its files hold. It does not look on the network whether the vocabulary was resized.
    """
    if "peft" not in sys.modules:
        return ()
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        return ()
    state = model.state_dict(keep_vars=True)
    first = {id(held): name for name, held in [*model.named_parameters(), *model.named_buffers()]}
    mapping = {"base_model_class": type(model.get_base_model()).__name__}
    mapping["parent_library"] = type(model.get_base_model()).__module__
    found = []
    for adapter, config in model.peft_config.items():
        base, config.base_model_name_or_path = config.base_model_name_or_path, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that embeddings which have adapters are written too
                saved = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
        finally:
            config.base_model_name_or_path = base or model.base_model.__dict__.get("name_or_path")
        # Tensors that peft computes for its file have no name in the model: `check_adapters` refuses them.
        names = {key: first.get(id(tensor), "") for key, tensor in saved.items()}
        found.append(Adapter(adapter, config, names, mapping if config.task_type is None else None))
    return tuple(found)


def count_base(model: nn.Module) -> int:
    """Return the number of parameters of `model` without its adapters, as its configuration has them."""
    # With adapters of embeddings peft saves the embedding itself too, its base layer.
    added = {name for adapter in adapters_of(model) for name in adapter.names.values() if ".base_layer." not in name}
    return sum(one.numel() for name, one in model.named_parameters() if name not in added)


def check_adapters(adapters: Sequence[Adapter]) -> None:
    """Raise `UsageError` where there is no adapter to write, or one that peft computes anew for its file."""
    if not adapters:
        raise UsageError(
            "the model has no adapters of peft", hint="give job.prepare a peft.PeftModel, or use engine.export"
        )
    for adapter in adapters:
        computed = [key for key, name in adapter.names.items() if not name]
        if computed:
            raise UsageError(
                f"peft computes {computed[0]} of the adapter {adapter.name} ({adapter.config.peft_type}) for its file",
                hint="use engine.export, which writes the whole model",
            )


def write_adapters(folder: Path, checkpoint: Path, adapters: Sequence[Adapter]) -> None:
    """Write `adapters`, of which `checkpoint` holds the tensors, to `folder` as peft's `save_pretrained` does.

    One process calls it. Raises `UsageError` where the folder does not take it.
    """
    for adapter in adapters:
        place = folder if adapter.name == _DEFAULT else folder / adapter.name
        tensors = read_checkpoint(checkpoint, only=set(adapter.names.values()))
        held = {key: tensors[name] for key, name in adapter.names.items()}  # of two names for one tensor both
        is_inference, adapter.config.inference_mode = adapter.config.inference_mode, True
        try:
            place.mkdir(parents=True, exist_ok=True)
            save_tensors(held, place / _WEIGHTS)
            adapter.config.save_pretrained(str(place), auto_mapping_dict=adapter.auto_mapping)
        except OSError as error:
            hint = "choose a folder that exists and is yours"
            raise UsageError(f"cannot write {place}: {error.strerror}", hint=hint) from None
        finally:
            adapter.config.inference_mode = is_inference
