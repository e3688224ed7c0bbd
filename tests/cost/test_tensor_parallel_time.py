"""Tensor parallelism by framework: shared heads of keys, transformers' plans, 8 bits without attention."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.variants import shardings_of
from paraplan.cost.communication.tensor_parallel import planned_sends
from paraplan.cost.estimate import evaluate_plan, why_unsuitable
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields, read_model
from paraplan.model.spec import ModelSpec
from paraplan.plan.executor import ANYTHING
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import LinearPrecision, TrainingSpec
from paraplan.search.constraints import Constraints
from paraplan.search.search import search

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SMALL |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


def made(model: ModelSpec, framework: str, *, linear: LinearPrecision = "16bit") -> Workload:
    training = TrainingSpec(global_batch_size=64, seq_length=4096, attention="flash", linear_precision=linear)
    return Workload.of(model, training, cluster_from_profile("dgx-h100"), framework=framework)


def small(family: str, *layer_types: str) -> ModelSpec:
    fields = SMALL | {"model_type": family} | ({"layer_types": list(layer_types)} if layer_types else {})
    return read_fields(ModelConfig(family, fields))


@pytest.mark.parametrize(
    ("model", "forward", "gathered", "backward"),
    [  # as torch's dispatcher saw them on two ranks, without those of the embedding and the head
        (small("llama"), {32: 2}, {}, {32: 5}),
        (small("qwen3_5_text", "full_attention"), {32: 2}, {}, {32: 5}),
        (small("qwen3_5_text", "linear_attention"), {32: 1}, {64: 1, 32: 2, 4: 2}, {32: 7}),
    ],
    ids=["llama", "full attention", "linear attention"],
)
def test_ranks_send_what_the_plan_of_transformers_makes_them_send(
    model: ModelSpec, forward: dict[float, float], gathered: dict[float, float], backward: dict[float, float]
) -> None:
    ahead, back = planned_sends(made(model, "transformers"))
    assert (ahead.sums, ahead.gathers) == (Counter(forward), Counter(gathered))
    assert (back.sums, back.gathers) == (Counter(backward), Counter())


def test_whole_attention_takes_each_rank_as_long_as_one_and_divides_by_no_head() -> None:
    workload = made(read_model("phi-4"), "transformers")
    block = workload.model.runs[0].block
    assert block.tp_limit is None
    assert all(one.split != "tensor" for one in block.saved)
    tp = np.array([1, 8])
    shardings = shardings_of(workload, [tp, tp * 0, tp // tp, tp // tp, tp * 0, tp * 0, tp // tp])
    times = KernelTimes(workload.training, workload.cluster.gpu, shardings, workload.constants, workload.framework)
    alone, beside = times.attention_s(block)
    assert alone == beside


def test_more_ranks_than_heads_of_keys_are_megatron_cores_alone() -> None:
    plan = ParallelPlan(tp=8, sequence_parallel=True, num_microbatches=64)
    for framework in ("torchtitan", "transformers", "paraplan", "megatron-lm-te"):
        broken = why_unsuitable(made(read_model("qwen3.5-27b"), framework), plan.replace(sequence_parallel=False))
        assert broken is not None
        assert broken.message == "tp=8: 8 does not divide the 24 attention and 4 key-value heads of qwen3.5-27b"
        assert broken.hint == (
            "use --tp 1, 2 or 4, or --framework megatron-core, in which several ranks attend to the same keys"
        )
    workload = made(read_model("qwen3.5-27b"), "megatron-core")
    assert why_unsuitable(workload, plan) is None
    gathered = 64 * 16 * 4096 * (2 * 24 + 2 * 4) * 256 * 2 / 450e9  # attention layers, both passes are over that
    assert evaluate_plan(workload, plan).step.tensor_parallel_s > gathered
    six = why_unsuitable(workload, plan.replace(tp=6))
    assert six is not None
    assert six.allowed == (1, 2, 4, 8)


def test_weights_are_divided_where_heads_of_keys_are_shared_and_keys_are_not() -> None:
    workload = made(read_model("glm-4-9b"), "megatron-core")
    plan = ParallelPlan(tp=2, sequence_parallel=True, num_microbatches=64)
    wide, narrow = (evaluate_plan(workload, plan.replace(tp=tp)).memory[0] for tp in (2, 4))
    assert narrow.parameter_bytes == pytest.approx(wide.parameter_bytes / 2, rel=0.001)
    again = 40 * 4096 * 2 * 128 * 2 / 2  # half of the keys and values of all layers is not divided any more
    assert narrow.activation_bytes == pytest.approx(wide.activation_bytes / 2 + again, rel=0.001)


def test_a_search_prices_more_ranks_than_heads_of_keys() -> None:
    workload = made(read_model("qwen3.5-27b"), "megatron-core")
    assert search(workload, executor=ANYTHING, fixed=Constraints(tp=8)).best.plan.tp == 8


@pytest.mark.parametrize(("name", "block"), [("qwen3-next-80b-a3b", 0), ("nemotron-3-nano", 0), ("nemotron-3-nano", 1)])
def test_blocks_without_attention_multiply_in_8_bits_and_the_head_does_not(name: str, block: int) -> None:
    model = read_model(name)
    seconds = {}
    for linear in ("16bit", "fp8"):
        workload = made(model, "megatron-core", linear=linear)
        one = np.ones(1, dtype=np.int64)
        shardings = shardings_of(workload, [one, one * 0, one, one, one * 0, one * 0, one])
        times = KernelTimes(workload.training, workload.cluster.gpu, shardings, workload.constants, workload.framework)
        kinds = [workload.model.runs[block].block, workload.model.head]
        assert kinds[0].attention is None
        seconds[linear] = [times.matmuls_s(kind, backward=False)[0] for kind in kinds]
        products = [each for each in kinds[0].matmuls if each.of_activations]
        if products:
            seconds[linear].append(times.matmuls_s(kinds[0].replace(matmuls=tuple(products)), backward=False)[0])
    assert seconds["fp8"][0] < 0.95 * seconds["16bit"][0]
    assert seconds["fp8"][1:] == seconds["16bit"][1:]
