"""Configurations of peft, TRL, axolotl and LLaMA-Factory as plans: their defaults, what they nest, what is broken."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from exported_plans import subject

from paraplan.errors import PlanError, UnsupportedPlanError
from paraplan.interop.export import export_plan

AXOLOTL = "base_model: m\n"
TRL = "model_name_or_path: m\n"
FACTORY = "stage: sft\nmodel_name_or_path: m\n"
PEFT = "peft_type: LORA\n"


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("", "bf16-pure"),
        ("bf16: auto\nfp16:\n", "bf16-pure"),
        ("fp16: true\n", "fp16"),
        ("bf16: false\n", "fp32"),
        ("adapter: lora\nlora_r: 8\nlora_target_linear: true\n", "bf16"),
    ],
)
def test_axolotl_trains_in_bf16_unless_told_otherwise(read: Any, words: str, precision: str) -> None:
    assert read(AXOLOTL + words).precision == precision


def test_axolotl_quantizes_as_its_arguments_for_bitsandbytes_say(read: Any) -> None:
    text = AXOLOTL + "adapter: qlora\nlora_target_linear: true\n"
    assert read(text).base_weights == "nf4:double"
    assert read(text + "bnb_config_kwargs: {bnb_4bit_use_double_quant: false}\n").base_weights == "nf4"
    assert read(text + "bnb_config_kwargs: {bnb_4bit_quant_type: fp4}\n").base_weights == "fp4:double"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_axolotls_recipe_of_8_bits_is_written_and_read(read: Any, recipe: str) -> None:
    made = subject("zero-3", linear_precision="fp8", fp8_recipe=recipe)
    text = export_plan(made, "axolotl").text
    again = read(text, num_gpus=8)
    assert (again.linear_precision, again.fp8_recipe) == ("fp8", recipe)
    with pytest.raises(PlanError, match=r"fp8_config.recipe: expected tensorwise or rowwise"):
        read(AXOLOTL + "fp8: true\nfp8_config: {recipe: nosuch}\n")


@pytest.mark.parametrize("words", ["true", "offload", "offload_disk"])
def test_axolotls_checkpointing_is_recompute_wherever_it_keeps_inputs(read: Any, words: str) -> None:
    assert read(AXOLOTL + f"gradient_checkpointing: {words}\n").plan.recompute == "full"


def test_deepspeed_inside_of_an_axolotl_export_is_read_back(read: Any) -> None:
    made = subject("zero-1 offloaded")
    again = read(export_plan(made, "axolotl").text, num_gpus=made.plan.world_size)
    names = ("dp", "zero_stage", "offload", "micro_batch_size", "num_microbatches", "recompute")
    assert {name: getattr(again.plan, name) for name in names} == {name: getattr(made.plan, name) for name in names}


def test_the_configurations_that_come_with_trl_have_eight_processes(read: Any) -> None:
    assert read(TRL + "accelerate_config: zero3\n").plan.world_size == 8
    assert read(TRL + "accelerate_config: zero3\n", num_gpus=4).plan.world_size == 4
    assert read(TRL + "accelerate_config: zero3\nnum_processes: 2\n").plan.world_size == 2
    assert read(TRL + "accelerate_config: single_gpu\n", num_gpus=4).plan.world_size == 1


def test_trls_number_of_processes_comes_before_that_of_accelerates_file(read: Any, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\n")
    assert read(TRL + "accelerate_config: acc.yaml\nnum_processes: 2\n").plan.world_size == 2


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("accelerate_config: fsdp2\n", True),
        ("accelerate_config: fsdp2\nbnb_4bit_quant_storage: uint8\n", True),
        ("accelerate_config: fsdp2\nbnb_4bit_quant_storage: bfloat16\n", False),
        ("accelerate_config: zero3\n", False),
        ("num_processes: 8\n", False),
    ],
)
def test_4_bit_weights_that_fsdp_does_not_shard_are_told(read: Any, words: str, *, is_told: bool) -> None:
    notes = read(TRL + "use_peft: true\nload_in_4bit: true\n" + words).notes
    assert any("leaves others whole on each rank" in note for note in notes) is is_told
    swift = "model: m\ntuner_type: lora\nquant_method: bnb\nquant_bits: 4\nfsdp: fsdp2\n"
    assert any("leaves others whole on each rank" in note for note in read(swift, num_gpus=2).notes)


def test_a_global_batch_is_divided_among_the_ranks_that_the_file_names(read: Any) -> None:
    plan = read(TRL + "num_processes: 4\nper_device_train_batch_size: 2\n", global_batch_size=32).plan
    assert (plan.dp, plan.num_microbatches, plan.global_batch_size) == (4, 4, 32)


def test_a_global_batch_that_the_ranks_do_not_divide_is_refused(read: Any) -> None:
    for text in (TRL, PEFT):
        with pytest.raises(PlanError, match="a global batch of 10 is not a multiple") as raised:
            read(text, global_batch_size=10, num_gpus=4, micro_batch_size=1)
        assert raised.value.hint == "use --global-batch 8"


@pytest.mark.parametrize(
    ("words", "stage"), [("full_shard auto_wrap", 3), ("shard_grad_op", 2), ("no_shard", 0), ("hybrid_shard_zero2", 2)]
)
def test_strategies_of_the_trainers_fsdp_key(read: Any, words: str, stage: int) -> None:
    assert read(FACTORY + f"fsdp: {words}\n", num_gpus=4).plan.zero_stage == stage


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [("", "adamw"), ("optim: sgd\n", "sgd"), ("optim: sgd\noptim_args: momentum=0.9\n", "sgd_momentum")],
)
def test_the_trainers_sgd_has_a_momentum_where_it_is_told(read: Any, words: str, optimizer: str) -> None:
    assert read(FACTORY + words).optimizer == optimizer


@pytest.mark.parametrize("target", ["trl", "axolotl"])
def test_a_plan_with_momentum_is_exported_with_it(target: str) -> None:
    made = subject("ddp")
    assert made.training is not None
    spec = made.training.replace(optimizer="sgd_momentum", precision="bf16-pure")
    text = export_plan(made.model_copy(update={"file": made.file.replace(training=spec)}), target).text
    assert "momentum=0.9" in text


@pytest.mark.parametrize(
    ("task", "first", "words"),
    [
        ("dpo", "trl dpo", "--per_device_train_batch_size 1"),
        ("dpo:precomputed", "trl dpo", "--precompute_ref_log_probs true"),
        ("reward", "trl reward", "--per_device_train_batch_size 1"),
        (
            "grpo:completion=256,gpus=2",
            "trl grpo",
            "--max_completion_length 256 --beta 0 --use_vllm true --vllm_mode server",
        ),
        ("grpo:beta=0.1", "trl grpo", "--beta 0.1 --use_vllm true --vllm_mode colocate"),
        ("grpo:reserve=0.5", "trl grpo", "--use_vllm true --vllm_gpu_memory_utilization 0.5 --vllm_mode colocate"),
        ("grpo:reserve=0", "trl grpo", "--use_vllm true --vllm_enable_sleep_mode true --vllm_mode colocate"),
    ],
)
def test_tasks_beside_given_sequences_are_trls(task: str, first: str, words: str) -> None:
    made = subject("zero-3")
    assert made.training is not None
    trained = made.file.replace(training=made.training.replace(task=task))
    asked = made.model_copy(update={"file": trained})
    command = export_plan(asked, "trl").text.splitlines()[-1]
    assert command.startswith(first)
    assert words in command
    for target in ("axolotl", "deepspeed", "slurm", "torchtune"):
        with pytest.raises(UnsupportedPlanError, match=f"{target} has no words for task") as caught:
            export_plan(asked, target, partial=True)
        assert "--to trl" in str(caught.value.hint)


@pytest.mark.parametrize(
    "key",
    [
        *("beta: 0.1", "max_prompt_length: 512", "max_completion_length: 512", "label_smoothing: 0.1"),
        *("sync_ref_model: true", "reference_free: false", "f_divergence_type: js_divergence", "rpo_alpha: 1.0"),
        *("num_iterations: 2", "temperature: 0.7", "cpo_alpha: 1.0", "desirable_weight: 1.0"),
    ],
)
def test_what_no_training_on_given_sequences_has_is_not_taken_for_one_in_silence(read: Any, key: str) -> None:
    found = read(TRL + key + "\n")
    assert found.task is not None or any("kto" in note for note in found.notes)
    assert not any("without a place" in note for note in found.notes)


def test_keys_without_a_value_say_nothing_of_an_objective(read: Any) -> None:
    keys = ("beta", "use_vllm", "num_generations", "temperature", "center_rewards_coefficient", "rpo_alpha")
    found = read(TRL + "".join(f"{key}: null\n" for key in keys))
    assert (found.task, found.notes) == (None, read(TRL).notes)


@pytest.mark.parametrize(
    ("words", "task", "said"),
    [
        ("", "dpo", "taken for dpo"),
        ("output_dir: data/zephyr-orpo\n", "orpo", "its name says orpo"),
        ("hub_model_id: me/kto-7b\n", "kto", "its name says kto"),
        ("run_name: dpo-2\n", "dpo", "its name says dpo"),
    ],
)
def test_preferences_of_several_kinds_are_told_apart_by_names(
    read: Any, words: str, task: str | None, said: str
) -> None:
    found = read(TRL + "beta: 0.1\nmax_prompt_length: 512\n" + words)
    assert found.task == task
    assert any(said in note for note in found.notes)
    assert found.plan.micro_batch_size == (8 if task == "kto" else 16)


def test_machines_that_nobody_names_are_said_to_be_assumed(read: Any) -> None:
    notes = read(FACTORY + "fsdp: full_shard\n").notes
    assert "no GPUs are named: 1 assumed, --profile and --nodes say otherwise" in notes


NESTED = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("fsdp: [[full_shard]]\n", id="list in a list"),
        pytest.param("fsdp_config: {1: 2, x: 2020-01-01}\nplugins: true\nfsdp: [3]\n", id="odd types"),
        pytest.param(NESTED + "fsdp_config: *a39\n", id="aliases of aliases"),
        pytest.param("lora_target: &a [*a]\nlora_target_modules: *a\nplugins: *a\n", id="an alias of itself"),
        pytest.param("fsdp_config: 2020-99-99\n", id="no date"),
        pytest.param("fsdp_config: !!int x\n", id="no number"),
        pytest.param('accelerate_config: "a\\0b"\ndeepspeed: "a\\0b"\n', id="a zero byte in a path"),
        pytest.param(f"accelerate_config: {'x' * 5000}\ndeepspeed: {'x' * 5000}\n", id="a long path"),
        pytest.param("accelerate_config: /\ndeepspeed: .\n", id="a folder"),
        pytest.param("lora_dropout: .nan\nlora_r: 0\nlora_rank: -1\nr: 0\n", id="numbers out of range"),
    ],
)
@pytest.mark.parametrize("text", [AXOLOTL + "adapter: lora\n", TRL + "use_peft: true\n", FACTORY, PEFT])
def test_odd_configurations_are_read_or_refused_in_a_sentence(read: Any, text: str, words: str) -> None:
    with contextlib.suppress(PlanError):
        assert read(text + words).plan.world_size >= 1


def test_lists_in_lists_without_end_are_refused_in_a_sentence(read: Any) -> None:
    with contextlib.suppress(PlanError):  # all tools' files are parsed alike
        assert read(AXOLOTL + "adapter: lora\nfsdp_config: " + "[" * 1000 + "]" * 1000 + "\n").plan.world_size >= 1


def test_llama_factorys_galore_is_an_optimizer(read: Any) -> None:
    assert read(FACTORY + "finetuning_type: full\nuse_galore: true\n").optimizer == "galore_adamw"
    assert read(FACTORY + "finetuning_type: full\n").optimizer == "adamw"


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n", "bf16-pure"),
        ("fsdp_config:\n  version: 2\n  reshard_after_forward: true\n", "bf16-pure"),
        ("fsdp_version: 1\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n", "bf16"),
        ("fsdp_version: 2\nadapter: lora\nlora_r: 8\nfsdp_config:\n  reshard_after_forward: true\n", "bf16"),
        ("fsdp_version: 2\nfp16: true\nfsdp_config:\n  reshard_after_forward: true\n", "fp16"),
    ],
)
def test_axolotl_upcasts_nothing_under_fsdp2(read: Any, words: str, precision: str) -> None:
    assert read(AXOLOTL + words, num_gpus=8).precision == precision


def test_what_stores_experts_in_fewer_bits_is_read_and_written(read: Any) -> None:
    qlora = "adapter: qlora\nload_in_4bit: true\nlora_target_modules: [q_proj]\n"
    assert read(AXOLOTL + qlora).quantizer is None
    setup = read(AXOLOTL + qlora + "quantize_moe_experts: true\n")
    assert setup.quantizer == "axolotl"
    assert read(AXOLOTL + qlora + "llama4_linearized_experts: true\n").quantizer == "axolotl"
    assert setup.training["quantizer"] == "axolotl"
    assert read(FACTORY + "quantization_bit: 4\nlora_target: q_proj\nuse_unsloth: true\n").quantizer == "unsloth"


def test_axolotl_trains_the_language_model_where_patterns_leave_towers_frozen(read: Any) -> None:
    setup = read(AXOLOTL + "unfrozen_parameters: [^model.language_model.*, ^lm_head.*]\n")
    assert (setup.train, setup.precision, setup.notes[1:]) == ("text", "bf16-pure", ())
    assert "unfrozen_parameters: all" in read(AXOLOTL + "unfrozen_parameters: [model.layers.4*]\n").notes[-1]


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("finetuning_type: lora\n", "bf16"),
        ("finetuning_type: full\n", "fp32"),
        ("finetuning_type: full\nbf16: true\n", "bf16"),
        ("finetuning_type: full\nuse_badam: true\n", "bf16-pure"),
        ("finetuning_type: lora\nfp16: true\n", "fp16"),
    ],
)
def test_llama_factory_makes_trainable_weights_fp32_and_leaves_frozen_ones(
    read: Any, words: str, precision: str
) -> None:
    text = "model_name_or_path: m\nstage: sft\ndo_train: true\ncutoff_len: 64\n"
    assert read(text + words, num_gpus=1).precision == precision
