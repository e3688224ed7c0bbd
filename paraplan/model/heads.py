"""The end of a model: the final norm and what the class named in `architectures` puts after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, kept, linear
from paraplan.model.spec import BlockSpec, Matmul

LANGUAGE_MODEL_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class HeadStyle:
    """Final norm, and the output projection of `width` features.

    `tied_by_default` is what the family does where `tie_word_embeddings` is absent; `label_bias` says whether its
    sequence classifier has one.
    """

    width: int
    tied_by_default: bool
    norm: tuple[str, NormKind, int] | None = None
    bias: bool = False
    projection: Part = field(default_factory=Part)
    name: str = "lm_head"


def number_of_labels(config: ModelConfig) -> int:
    """Return the classes of a classifier: the entries of `id2label`, else `num_labels`, else two as in transformers."""
    labels = config.section("id2label").fields
    return len(labels) if labels else config.count("num_labels", default=2)


def read_head(config: ModelConfig, style: HeadStyle, vocab_size: int) -> tuple[BlockSpec, bool]:
    """Return the head of the class that the config names, and whether its matrix is the embedding's.

    Without `architectures` the model is taken as a language model. Raises ModelError for a class of another task.
    """
    part = Part()
    if style.norm is not None:
        part += norm(*style.norm)
    part += style.projection
    architecture = config.architecture
    tied = False
    if not architecture or architecture.endswith(LANGUAGE_MODEL_CLASSES):
        tied = config.flag("tie_word_embeddings", default=style.tied_by_default)
        part += kept("head_input", style.width, split="sequence", num_readers=1)
        part += output_projection(style, vocab_size, tied=tied)
        if config.model_type in ("gemma2", "gemma3n_text", "gemma4_text") and config.has("final_logit_softcapping"):
            part += kept("capped_logits", vocab_size, split="tensor")
    elif architecture.endswith("ForSequenceClassification"):
        part += linear("score", style.width, number_of_labels(config), bias=False)
    elif architecture.endswith("ForTokenClassification"):
        part += linear("score", style.width, number_of_labels(config), bias=True)
    elif architecture.endswith("ForQuestionAnswering"):
        # Start and end of the answer; GPT-J's class asks for the number of labels instead.
        outputs = number_of_labels(config) if config.model_type == "gptj" else 2
        part += linear("qa_outputs", style.width, outputs, bias=True)
    elif not architecture.endswith("Model") or architecture.endswith("DoubleHeadsModel"):
        raise unknown_architecture(config)
    block = BlockSpec(
        kind="head",
        parameters=part.parameters,
        matmuls=part.matmuls,
        saved=part.saved,
        saved_fused=part.saved_fused,
    )
    return block, tied


def output_projection(style: HeadStyle, vocab_size: int, *, tied: bool) -> Part:
    """Return the projection to the vocabulary; a tied one brings its matmul and bias, but no matrix of its own."""
    part = linear(style.name, style.width, vocab_size, bias=style.bias, split="column")
    if not tied:
        return part
    return Part(
        parameters=tuple(parameter for parameter in part.parameters if not parameter.name.endswith(".weight")),
        matmuls=(Matmul(name=style.name, k=style.width, n=vocab_size, split="column"),),
    )


def unknown_architecture(config: ModelConfig) -> ModelError:
    """Return the error for a class of `architectures` that no reader describes."""
    return ModelError(
        f"{config.source}: architectures names {config.architecture!r}, which is not described for {config.model_type}",
        hint="name the language model or the bare model class, or give a factory as file.py:factory",
    )
