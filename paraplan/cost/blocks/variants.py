"""Shardings by the vocabulary that they pad to, the heads of keys, torch.compile of their blocks, and autocast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from paraplan.cost.blocks.routing import load_of_model
from paraplan.cost.blocks.saved_tensors import Shardings
from paraplan.cost.plan_table import Ints
from paraplan.cost.workload import Workload
from paraplan.model.tensor_split import with_key_heads
from paraplan.model.vocabulary import with_vocabulary


def variants(workload: Workload, columns: Sequence[Ints], missing: Ints) -> Iterator[tuple[Ints, Workload]]:
    """Yield which of the `missing` shardings price blocks alike, with a workload whose model and blocks are theirs."""
    tp, recompute = columns[0][missing], columns[4][missing]
    vocabularies, is_compiled = workload.padded_vocabulary(tp), workload.compiles(recompute)
    heads, casts = workload.key_heads(tp), workload.casts_shards(columns[5][missing] == 1)
    kinds = (vocabularies, is_compiled, heads, casts)
    for one in sorted(set(zip(*(kind.tolist() for kind in kinds), strict=True))):
        vocabulary, compiled, key_heads, casts_shards = one
        alike = missing[np.logical_and.reduce([kind == value for kind, value in zip(kinds, one, strict=True)])]
        variant = workload if compiled == workload.training.compiled else workload.uncompiled()
        if casts_shards:
            variant = variant.without_autocast()
        if vocabulary != workload.model.vocab_size:
            variant = replace(variant, model=with_vocabulary(variant.model, vocabulary))
        if key_heads > 1:
            variant = replace(variant, model=with_key_heads(variant.model, key_heads))
        yield alike, variant
    if not len(missing) and not len(columns[0]):
        yield missing, workload


def shardings_of(workload: Workload, columns: Sequence[Ints]) -> Shardings:
    """Return some shardings of a workload's blocks; `columns` are those of `sharding_columns`."""
    training, framework = workload.training, workload.framework
    return Shardings.of_columns(
        columns,
        workload.kernel_training,
        autocast=framework.storage.is_autocast,
        keeps_gathered_inputs=framework.tensor_parallel.keeps_gathered_inputs,
        rings_context=framework.kernels.ring_attention,
        fp32_weights=workload.keeps_fp32_weights,
        fp32_residual=training.upcasts_frozen,
        inputs_in_8bit=workload.constants.has_8bit_matmuls and framework.kernels.engine,
        expert_load=load_of_model(
            workload.model, training, workload.constants, framework, tp=columns[0], ep=columns[-1]
        ),
    )
