"""Smaller models in place of those that a script of transformers builds or loads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rank_harness import RankHarness

pytest.importorskip("transformers")


def loads_and_builds(checked: Callable[[dict[str, None]], None]) -> None:
    """Run what is checked in a process whose models are made smaller."""
    from paraplan.script_check.smaller_models import SmallerModels

    notes: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        SmallerModels(2, Path(folder), note=notes.setdefault, inside=nullcontext).follow()
        checked(notes)


def loads_a_bundled_model_twice(notes: dict[str, None]) -> None:
    """Equal weights, the sizes that a split asks for, the vocabulary of the tokenizer."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = (load("HuggingFaceTB/SmolLM2-135M", dtype=torch.float32, local_files_only=True) for _ in range(2))
    assert one.config.num_hidden_layers == 2
    assert one.config.vocab_size == 49152
    assert one.config.hidden_size < 576
    assert one.dtype == torch.float32
    assert all(torch.equal(first, second) for first, second in zip(one.parameters(), other.parameters(), strict=True))
    assert not any(parameter.is_meta for parameter in one.parameters())
    assert [*notes] == ["a model of llama was made smaller, 2 of 30 layers, with weights drawn"]


def builds_from_a_configuration_and_again(notes: dict[str, None]) -> None:
    """A configuration is made smaller once, for all models that are built of it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    model = transformers.MixtralForCausalLM(config)
    assert (model.config.num_hidden_layers, model.config.num_local_experts) == (2, 4)
    again = transformers.AutoModelForCausalLM.from_config(config)
    assert again.config.hidden_size == model.config.hidden_size < 4096
    assert len(notes) == 1


def builds_towers_and_other_heads(notes: dict[str, None]) -> None:
    """The number of labels stays, and each tower has fewer layers."""
    import transformers

    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_hidden_layers=12, num_labels=3))
    assert len(model.bert.encoder.layer) == 2
    assert model.classifier.out_features == 3
    seen = transformers.CLIPModel(transformers.CLIPConfig())
    assert len(seen.vision_model.encoder.layers) == 2
    assert len(seen.text_model.encoder.layers) == 2
    assert len(notes) == 2


@pytest.mark.parametrize(
    "checked", [loads_a_bundled_model_twice, builds_from_a_configuration_and_again, builds_towers_and_other_heads]
)
def test_models_that_a_script_has_are_small_and_of_the_same_structure(
    ranks: RankHarness, checked: Callable[[dict[str, None]], None]
) -> None:
    ranks.run_alone(loads_and_builds, checked, is_fresh=True)
