"""A model with another size of its vocabulary, as frameworks pad it."""

from __future__ import annotations

from paraplan.model.spec import BlockSpec, ModelSpec, Parameter, SavedTensor


def with_vocabulary(model: ModelSpec, size: int) -> ModelSpec:
    """Return the model with tables and products of a vocabulary of another `size`."""
    if not model.vocab_size:
        return model
    embedding, head = (_with_vocabulary(block, model.vocab_size, size) for block in (model.embedding, model.head))
    runs = tuple(
        run.replace(block=_with_vocabulary(run.block, model.vocab_size, size)) if run.block.kind == "mtp" else run
        for run in model.runs
    )
    return model.replace(vocab_size=size, embedding=embedding, head=head, runs=runs)


def _with_vocabulary(block: BlockSpec, old: int, new: int) -> BlockSpec:
    def kept(tensors: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
        return tuple(one.replace(elements_per_token=new) if one.elements_per_token == old else one for one in tensors)

    before = block.before_freezing
    return block.replace(
        parameters=tuple(_resized(one, old, new) for one in block.parameters),
        matmuls=tuple(one.replace(n=new) if one.n == old and one.split == "column" else one for one in block.matmuls),
        saved=kept(block.saved),
        saved_fused=kept(block.saved_fused),
        before_freezing=None if before is None else _with_vocabulary(before, old, new),
    )


def _resized(parameter: Parameter, old: int, new: int) -> Parameter:
    where, frozen = parameter.tp_dim, parameter.frozen_bytes
    if where is None or parameter.shape[where] != old:
        return parameter
    shape = (*parameter.shape[:where], new, *parameter.shape[where + 1 :])
    return parameter.replace(shape=shape, frozen_bytes=None if frozen is None else frozen * new / old)
