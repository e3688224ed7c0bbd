"""Models of transformers that a script builds or loads, made smaller: the same structure, with weights drawn."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers

from paraplan.model.reader import bundled_config
from paraplan.model.shrink import Smaller, shrink_fields

_MARK = "is_smaller"
"""A field of a configuration that was made smaller; its copies and the file of its model have it too."""
_LEFT_OUT = ("model_type", "transformers_version", "quantization_config")
_OF_FILES = ("subfolder", "variant", "gguf_file", "quantization_config", "state_dict")
"""Where weights lie, and how they are stored: drawn ones have neither."""
_TYPES = ("dtype", "torch_dtype")
_NUM_LAYERS = 2
_LONGEST = 2**20
"""Positions and windows of models stay: scripts choose the length of their sequences."""


class SmallerModels:
    """Makes every model of transformers smaller that this process builds, before it is built.

    Configurations of bundled models are read from there, so that nothing is downloaded; vocabularies stay, since the
    script's tokenizer has them. `num_ranks` ranks can share the heads of a smaller model where they can those of the
    whole one. `note` is told what was made smaller, `inside` is around what the script does not compute.
    """

    def __init__(
        self,
        num_ranks: int,
        folder: Path,
        *,
        note: Callable[[str], None],
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._to = Smaller(num_layers=_NUM_LAYERS, tp=num_ranks, seq_length=_LONGEST, keeps_vocabulary=True)
        self._folder, self._numbers = folder, count()
        self._note, self._inside = note, inside

    def follow(self) -> None:
        """Do so from now on."""
        model, config = transformers.PreTrainedModel, transformers.PretrainedConfig
        load, read = model.from_pretrained.__func__, config.get_config_dict.__func__

        def smaller(cls: Any, given: Any = None, *_: Any, config: Any = None, **__: Any) -> Any:
            self._shrink(config if given is None else given)
            return object.__new__(cls)

        def load_smaller(cls: Any, /, name: Any, *args: Any, config: Any = None, **more: Any) -> Any:
            if not isinstance(config, transformers.PretrainedConfig):
                types = {key: more.pop(key) for key in _TYPES if key in more}
                config, more = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **more)
                more |= types
            more = {key: value for key, value in more.items() if key not in _OF_FILES}
            return load(cls, self._drawn(cls, config, args), *args, config=config, **more)

        def local(load: Callable[..., Any]) -> Callable[..., Any]:
            return lambda cls, name, *args, **more: load(cls, self._local(name), *args, **more)

        def read_local(cls: Any, /, name: Any, **more: Any) -> Any:
            return read(cls, self._local(name), **more)

        model.__new__ = smaller
        model.from_pretrained = classmethod(load_smaller)
        for each in _classes_below(transformers.AutoModel.__base__):  # each has a copy of its methods
            each.from_pretrained = classmethod(local(each.from_pretrained.__func__))
        config.get_config_dict = classmethod(read_local)

    def _local(self, name: Any) -> Any:
        """Return a folder with the configuration of a bundled model that `name` is the hub id of, else `name`."""
        found = None if name is None or Path(name).exists() else bundled_config(str(name))
        if found is None:
            return name
        folder = self._folder / f"{found.stem}-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(found, folder / "config.json")
        return str(folder)

    def _drawn(self, cls: Any, config: Any, args: tuple[Any, ...]) -> Path:
        """Return a folder with the smaller model of `config`, with the weights of seed 0; `config` becomes its own."""
        self._shrink(config)
        folder = self._folder / f"smaller-{os.getpid()}-{next(self._numbers)}"
        with self._inside(), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = cls(copy.deepcopy(config), *args)
            model.should_save_on_this_rank = lambda *_: (
                True
            )  # to a folder of its own, whose model the others do not read
            model.save_pretrained(folder)
        return folder

    def _shrink(self, config: Any) -> None:
        """Give `config` the fields of a smaller model in place: who built it reads sizes from it."""
        if not isinstance(config, transformers.PretrainedConfig) or hasattr(config, _MARK):
            return
        fields = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
        small = type(config)(**shrink_fields(fields, self._to))
        kept = {name: value for name, value in vars(config).items() if name.startswith("_")}
        before = config.get_text_config()
        size = f"{before.num_hidden_layers} layers" if hasattr(before, "num_hidden_layers") else "its layers"
        vars(config).clear()
        vars(config).update({**vars(small), **kept})
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            if isinstance(part, transformers.PretrainedConfig):
                setattr(part, _MARK, True)
        self._note(f"a model of {config.model_type} was made smaller, {_NUM_LAYERS} of {size}, with weights drawn")


def _classes_below(base: Any) -> list[Any]:
    return [each for one in base.__subclasses__() for each in (one, *_classes_below(one))]
