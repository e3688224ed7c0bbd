"""What transformers' modules move between matmuls, against the operators that torch dispatches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.module_traffic import module_traffic, num_kernels
from paraplan.cost.blocks.saved_tensors import Shardings
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.config_file import load_config
from paraplan.model.reader import find_config, read_model
from paraplan.model.transformers_model import library_factory
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import AttentionKind, TrainingPrecision, TrainingSpec
from paraplan.runtime.fake import storage_tracking
from paraplan.runtime.fake.run import trace_memory

pytest.importorskip("transformers")

BATCH, LENGTH = 2, 128
NARROW: dict[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "n_embd": 128,
    "n_head": 4,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LAYERS = {"gpt2": "n_layer"}
OTHERS = ("mm", "attention", "foreach", "adam")
"""Words in the names of operators that are counted elsewhere."""
MakeWorkload = Callable[..., Workload]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read and written by the operators of each phase."""
    counts: Counter[str] = Counter()
    plain = storage_tracking.StorageTracker.__torch_dispatch__

    def dispatch(tracker: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = plain(tracker, func, types, args, kwargs)
        if out is NotImplemented or any(word in str(func) for word in OTHERS):
            return out
        read, written = (
            [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
            for tree in ((args, kwargs), out)
        )
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        is_view = not func._schema.is_mutable and all(one.untyped_storage()._cdata in storages for one in written)
        if not is_view:
            counts[tracker.phase] += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *written))
        return out

    monkeypatch.setattr(storage_tracking.StorageTracker, "__torch_dispatch__", dispatch)
    return counts


@lru_cache
def narrow_config(name: str, layers: int, folder: Path) -> Path:
    content = json.loads(Path(find_config(name)).read_text())
    content |= {key: value for key, value in NARROW.items() if key in content}
    content |= {LAYERS.get(name, "num_hidden_layers"): layers, "max_window_layers": layers}
    content |= {"layer_types": content["layer_types"][:layers]} if content.get("layer_types") else {}
    path = folder / f"{name}-{layers}.json"
    path.write_text(json.dumps(content))
    return path


ARITHMETIC = [("bf16", "sdpa"), ("bf16-pure", "sdpa"), ("bf16", "eager"), ("fp32", "eager")]
RUN = {
    ("gpt2", "fp32", "eager"),
    ("qwen3-0.6b", "bf16-pure", "sdpa"),
    ("qwen3-0.6b", "bf16", "eager"),
    ("qwen2.5-0.5b", "bf16", "sdpa"),
}
"""Blocks and kinds of arithmetic, each met at least once: Qwen2.5's is Qwen3's without norms of queries and keys, and
with biases; Llama's is without both."""


@pytest.mark.parametrize(
    ("name", "precision", "attention"),
    [
        pytest.param(name, *chosen, marks=[] if (name, *chosen) in RUN else pytest.mark.with_all)
        for name in ("gpt2", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b")
        for chosen in ARITHMETIC
    ],
)
def test_a_block_moves_what_its_operators_read_and_write(
    name: str, precision: TrainingPrecision, attention: AttentionKind, counted: Counter[str], tmp_path: Path
) -> None:
    training = TrainingSpec(global_batch_size=BATCH, seq_length=LENGTH, precision=precision, attention=attention)
    found: list[Mapping[str, int]] = []
    for layers in (1, 2):
        counted.clear()
        build = library_factory(
            load_config(narrow_config(name, layers, tmp_path)), attention="eager" if attention == "eager" else "sdpa"
        )
        trace_memory(build, plan=ParallelPlan(micro_batch_size=BATCH), training=training)
        found.append(dict(counted))
    block = read_model(str(narrow_config(name, 1, tmp_path)), seq_length=LENGTH).runs[0].block
    columns = [np.array([one]) for one in (1, 0, 1, BATCH, 0, 0, 1)]
    shardings = Shardings.of_columns(columns, training, autocast=precision == "bf16")
    # Autocast's copies of weights, and what makes fp32 gradients of theirs, are counted by weight.
    casts = 6 * sum(matmul.k * matmul.n for matmul in block.matmuls) if precision == "bf16" else 0
    for phase in ("forward", "backward"):
        each = (found[1][phase] - found[0][phase]) / 2 - casts  # a layer more, in two steps
        traffic = module_traffic(block, training, shardings, backward=phase == "backward")
        assert float(traffic.plain[0] + traffic.mixed[0]) == pytest.approx(each, rel=0.11), phase


def test_instructions_bound_mixed_operations_on_a_gpu_with_fast_memory(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b", "dgx-h200")
    training = made.training
    shardings = Shardings.of_columns([np.array([one]) for one in (1, 0, 1, 4, 0, 0, 1)], training, autocast=True)
    for profile, is_bound in (("dgx-h200", True), ("dgx-a100-40gb", False)):
        gpu = cluster_from_profile(profile).gpu
        times = KernelTimes(training, gpu, shardings, made.constants, made.framework)
        moved = np.array([1e9])
        assert (times.mixed_s(moved) > times.moved_s(moved)).all() == is_bound, profile
    assert gpu.num_multiprocessors is not None
    unknown = KernelTimes(training, gpu.replace(num_multiprocessors=None), shardings, made.constants, made.framework)
    assert unknown.mixed_s(moved) == unknown.moved_s(moved)


@pytest.mark.parametrize(
    ("profile", "framework", "picoseconds"),
    [("dgx-h200", "fsdp", 12.9), ("dgx-b200", "megatron-core", 18.6), ("dgx-a100-40gb", "fsdp", None)],
)
def test_losses_take_as_long_for_a_logit_as_was_measured(
    workload: MakeWorkload, profile: str, framework: str, picoseconds: float | None
) -> None:
    # torch's cross-entropy on an H200 (profiles/measured), Megatron-LM's on a B200 (SimuMax); an A100's memory decides.
    made, loss = workload("llama-3.2-1b", profile), load_framework(framework)
    shardings = Shardings.of_columns([np.array([one]) for one in (1, 0, 1, 4, 0, 0, 1)], made.training, autocast=True)
    times = KernelTimes(made.training, cluster_from_profile(profile).gpu, shardings, made.constants, loss)
    each = float(times.loss_s(1)[0] / shardings.tokens[0]) * 1e12
    if picoseconds is None:
        picoseconds = float(times.moved_s(np.array([loss.loss.implementation.traffic_per_logit]))[0]) * 1e12
    assert each == pytest.approx(picoseconds, rel=0.02)


@pytest.mark.parametrize(("name", "measured"), [("gpt2", 84), ("llama-3.2-1b", 142), ("qwen3-0.6b", 186)])
def test_kernels_of_a_block_are_about_as_many_as_were_profiled(name: str, measured: int) -> None:
    assert num_kernels(read_model(name).runs[0].block) == pytest.approx(measured, rel=0.03)


def test_the_host_needs_longer_for_blocks_with_more_kernels(workload: MakeWorkload) -> None:
    # So few tokens that the GPU waits: 186 kernels of a Qwen3 block, 142 of a Llama block.
    few = ParallelPlan(micro_batch_size=1)
    seconds = [
        evaluate_plan(workload(name, seq_length=16, global_batch_size=1), few).step.compute_s / blocks
        for name, blocks in (("qwen3-0.6b", 28 + 1), ("llama-3.2-1b", 16 + 1))
    ]
    assert seconds[0] / seconds[1] == pytest.approx(186 / 142, rel=0.03)
