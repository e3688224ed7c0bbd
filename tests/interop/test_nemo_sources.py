"""NeMo AutoModel's recipes and Megatron-Bridge's overrides, read back."""

from __future__ import annotations

from typing import Any

import pytest
from exported_plans import subject
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paraplan.errors import PlanError
from paraplan.interop.export import export_plan

RECIPE = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2, max_steps: 10}
dist_env: {backend: nccl}
model: {_target_: a.from_pretrained, pretrained_model_name_or_path: org/name, %s}
distributed: {strategy: fsdp2, tp_size: 1, cp_size: 1, %s}
dataset: {_target_: b, seq_len: 4096}
"""
OVERRIDES = """
model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, seq_length: 2048, sequence_parallel: true}
train: {micro_batch_size: 2, global_batch_size: 32, train_iters: 5}
logger: {log_interval: 1}
"""


@pytest.mark.parametrize(
    ("model", "sizes", "plan"),
    [
        ("torch_dtype: bf16", "pp_size: 1", "dp8, ZeRO-3, micro-batch 2 x 4"),
        (
            "torch_dtype: bf16",
            "ep_size: 8, activation_checkpointing: true",
            "dp8 x ep8, ZeRO-3, micro-batch 2 x 4, rec",
        ),
        ("torch_dtype: bf16", "dp_replicate_size: 2", "dp8, ZeRO-3 in groups of 4, micro-batch 2 x 4"),
        (
            "torch_dtype: bf16",
            "pp_size: 2, pipeline: {pp_schedule: 1f1b, pp_microbatch_size: 1}",
            "dp4 x pp2, ZeRO-1, 1f1b, micro-batch 1 x 16",
        ),
        ("torch_dtype: bf16", "reshard_after_forward: false", "dp8, ZeRO-2, micro-batch 2 x 4"),
    ],
)
def test_automodels_sizes_are_a_plan(read: Any, model: str, sizes: str, plan: str) -> None:
    setup = read(RECIPE % (model, sizes), num_gpus=8)
    assert setup.plan.describe().startswith(plan)
    assert (setup.framework, setup.seq_length, setup.model_name) == ("nemo-automodel", 4096, "org/name")


def test_automodel_keeps_what_weights_and_optimizer_are_stored_in(read: Any) -> None:
    sizes = "pp_size: 1"
    assert read(RECIPE % ("torch_dtype: bf16", sizes), num_gpus=8).precision == "bf16-pure"
    assert read(RECIPE % ("torch_dtype: float32", sizes), num_gpus=8).precision == "bf16"
    masters = RECIPE + "optimizer: {_target_: transformer_engine.pytorch.optimizers.FusedAdam, master_weights: true}\n"
    assert read(masters % ("torch_dtype: bf16", sizes), num_gpus=8).precision == "bf16"


def test_automodels_adapters_losses_and_products(read: Any) -> None:
    text = RECIPE % ("torch_dtype: bf16, backend: {attn: te, dispatcher: deepep}", "ep_size: 8") + (
        "peft: {_target_: c.PeftConfig, dim: 4, target_modules: ['*.q_proj', '*.v_proj']}\n"
        "loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}\n"
        "packed_sequence: {packed_sequence_size: 8192}\nquantization: {load_in_4bit: true}\n"
        "fp8: {enabled: true, recipe_name: tensorwise, enable_fsdp_float8_all_gather: true}\n"
    )
    setup = read(text, num_gpus=8)
    assert (setup.train, setup.loss, setup.base_weights) == ("lora:r=4,targets=q_proj|v_proj", "cut", "nf4")
    assert (setup.seq_length, setup.packs_samples, setup.stack.dispatcher) == (8192, True, "deepep")
    assert (setup.linear_precision, setup.fp8_recipe, setup.fp8_gather) == ("fp8", "tensorwise", True)
    every = RECIPE % ("torch_dtype: bf16", "pp_size: 1") + "peft: {dim: 8, match_all_linear: true}\n"
    assert read(every, num_gpus=8).train == "lora:r=8"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("strategy: tpu", "distributed.strategy"),
        ("tp_size: 4, ep_size: 2", "ep_size"),
        ("pp_size: 2, pipeline: {pp_schedule: zigzag}", "pp_schedule"),
        ("dp_replicate_size: 3", "dp_replicate_size"),
    ],
)
def test_broken_recipes_name_the_key(read: Any, sizes: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read(RECIPE % ("torch_dtype: bf16", sizes), num_gpus=8)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [("dp_size: 8", ()), ("dp_size: none", ()), ("dp_size: 4", ("dp_size: 8, what the other sizes",))],
)
def test_automodels_data_parallel_size_is_read_beside_the_others(read: Any, sizes: str, said: tuple[str, ...]) -> None:
    notes = read(RECIPE % ("torch_dtype: bf16", sizes), num_gpus=8).notes
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))


def test_experts_on_more_ranks_than_there_are_say_that_gpus_are_to_be_named(read: Any) -> None:
    with pytest.raises(PlanError, match="ep=16 does not divide dp=8") as caught:
        read(RECIPE % ("torch_dtype: bf16", "ep_size: 16"), num_gpus=8)
    assert "say how many GPUs there are" in str(caught.value.hint)


def test_what_trains_no_language_model_is_refused(read: Any) -> None:
    with pytest.raises(PlanError, match="not a recipe of AutoModel for language models"):
        read("recipe: r\ndist_env: {backend: nccl}\nflow_matching: {a: 1}\noptimizer: {lr: 1}\nseed: 1\n", num_gpus=8)


def test_megatron_bridges_overrides_are_megatrons_options_beside_its_recipe(read: Any) -> None:
    setup = read(OVERRIDES, num_gpus=8)
    assert setup.plan.describe() == "dp4 x tp2, ZeRO-1, sequence parallel, micro-batch 2 x 4"
    assert (setup.target, setup.framework, setup.seq_length) == ("megatron-bridge", "megatron-bridge", 2048)
    assert setup.notes == ("mixed_precision: the recipe's own, taken as bf16_mixed",)
    less = OVERRIDES.replace("tensor_model_parallel_size: 2, ", "").replace("sequence_parallel: true", "a: 1")
    assert any(note.startswith("tensor_model_parallel_size: the recipe's own") for note in read(less, num_gpus=8).notes)


@pytest.mark.parametrize(
    ("words", "precision", "recipe"),
    [
        ("bf16_with_fp8_current_scaling_mixed", "fp8", "tensorwise"),
        ("bf16_with_fp8_delayed_scaling_mixed", "fp8", "delayed"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "fp8", "blockwise"),
        ("bf16_with_mxfp8_mixed", "mxfp8", None),
        ("bf16_with_nvfp4_mixed", "nvfp4", None),
        ("bf16_mixed", None, None),
    ],
)
def test_names_of_megatron_bridges_precisions(read: Any, words: str, precision: str | None, recipe: str | None) -> None:
    setup = read(OVERRIDES + f"mixed_precision: {words}\n", num_gpus=8)
    assert (setup.precision, setup.linear_precision, setup.fp8_recipe) == ("bf16", precision, recipe)
    assert read(OVERRIDES + "mixed_precision: null\n", num_gpus=8).precision == "fp32"


PLANS = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 4, 8]),
        "tp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2, 4]),
        "zero_stage": st.integers(0, 3),
        "zero_shards": st.sampled_from([None, 2]),
        "micro_batch_size": st.integers(1, 3),
        "num_microbatches": st.sampled_from([2, 4]),
        "sequence_parallel": st.booleans(),
        "recompute": st.sampled_from(["none", "selective_ops", "full"]),
        "offload": st.sampled_from(["none", "parameters"]),
    }
)
TRAININGS = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["bf16", "bf16-pure"]),
        "optimizer": st.sampled_from(["adamw", "sgd", "sgd_momentum"]),
        "loss": st.sampled_from(["plain", "cut", "chunked"]),
        "compiled": st.booleans(),
        "linear_precision": st.sampled_from(["16bit", "fp8"]),
        "train": st.sampled_from(["full", "lora:r=4", "lora:r=8,targets=q_proj|v_proj", "dora:r=16"]),
        "base_weights": st.sampled_from([None, "nf4", "nf4:double", "int8"]),
    }
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(plan=PLANS, training=TRAININGS)
def test_what_is_written_for_automodel_is_read_back(read: Any, plan: dict[str, Any], training: dict[str, Any]) -> None:
    schedule = "1f1b" if plan["pp"] > 1 else None
    is_full = training["train"] == "full"
    assume(is_full == (training["base_weights"] is None) and (is_full or training["precision"] == "bf16"))
    try:
        made = subject({**plan, "pipeline_schedule": schedule}, **training)
        exported = export_plan(made, "nemo-automodel", partial=True)
    except (ValueError, PlanError):  # no plan, or no training
        return
    if exported.gaps:
        return
    found = read(exported.text, num_gpus=made.plan.world_size)
    assert found.plan == made.plan
    wanted = made.training
    assert wanted is not None
    assert (found.precision, found.optimizer, found.loss) == (wanted.precision, wanted.optimizer, wanted.loss)
    assert (bool(found.compiled), found.seq_length) == (wanted.compiled, wanted.seq_length)
    assert (found.linear_precision or "16bit") == wanted.linear_precision
    assert found.base_weights == (wanted.base_weights or (None if is_full else "bf16"))
    assert (found.train or "full").partition(",dropout")[0] == wanted.train


def test_layers_by_the_names_of_their_makers_are_those_of_transformers(read: Any) -> None:
    text = RECIPE % ("torch_dtype: bf16", "ep_size: 8") + "peft: {dim: 8, target_modules: ['*wq_a', '*wq_b', '*wkv']}\n"
    assert read(text, num_gpus=8).train == "lora:r=8,targets=q_a_proj|q_b_proj|kv_proj"


def test_automodels_interleaved_stages_and_towers(read: Any) -> None:
    made = subject(
        {"dp": 2, "pp": 2, "zero_stage": 1, "pipeline_schedule": "interleaved_1f1b"}
        | {"virtual_pipeline_size": 2, "num_microbatches": 4}
    )
    exported = export_plan(made, "nemo-automodel")
    assert "layers_per_stage: 8" in exported.text
    assert read(exported.text, num_gpus=4).plan == made.plan
