"""Output layers of other tasks than the next token: a score for each token, or none."""

from __future__ import annotations

from paraplan.errors import PlanError
from paraplan.model.spec import ModelSpec, Parameter


def with_one_output(model: ModelSpec) -> ModelSpec:
    """Return the model with a head of one output for each token: a score in place of logits (a reward model).

    Raises `PlanError` for a model without such a head.
    """
    outputs = model.vocabulary
    heads = [one for one in model.head.matmuls if one.n == outputs]
    if len(heads) != 1:
        raise PlanError(
            f"{model.name} has {len(heads)} output layers of the vocabulary's size, and a model of scores needs one",
            hint="give a language model, or a factory of one with a head of one output",
        )
    (head,) = heads
    others = tuple(one for one in model.head.parameters if outputs not in one.shape)
    score = Parameter(name="score.weight", shape=(1, head.k), layer="linear")
    matmuls = tuple(one.replace(name="score", n=1, split="none") if one is head else one for one in model.head.matmuls)
    return model.replace(head=model.head.replace(parameters=(*others, score), matmuls=matmuls), tied_embeddings=False)


def without_output(model: ModelSpec) -> ModelSpec:
    """Return the model without its output layer: hidden states are pooled (an embedding model).

    A model whose head has none stays as it is.
    """
    outputs = model.vocabulary
    if outputs <= 1:
        return model
    head = model.head
    others = tuple(one for one in head.parameters if outputs not in one.shape)
    matmuls = tuple(one for one in head.matmuls if one.n != outputs)
    return model.replace(head=head.replace(parameters=others, matmuls=matmuls), tied_embeddings=False)
