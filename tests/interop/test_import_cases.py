"""Files of other tools as people have them: parallel axes, objectives, names of a tool's own, shells, comments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paraplan.api.imported import import_plan
from paraplan.errors import PlanError
from paraplan.plan.task import parse_task

AXOLOTL = "base_model: m\nsequence_len: 8192\n"
PAIRS = "model: m\ntuner_type: lora\nmax_length: 512\nper_device_train_batch_size: 2\n"
FACTORY = "model_name_or_path: m\ndo_train: true\nbf16: true\n"


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("context_parallel_size: 2\n", "dp4 x cp2, DDP"),
        ("sequence_parallel_degree: 4\n", "dp2 x cp4, DDP"),
        ("tensor_parallel_size: 2\ncontext_parallel_size: 2\n", "dp2 x tp2 x cp2, DDP"),
        ("context_parallel_size: 4\ndeepspeed: {zero_optimization: {stage: 3}}\n", "dp2 x cp4, ZeRO-3"),
        ("context_parallel_size: 8\ndeepspeed: {zero_optimization: {stage: 1}}\n", "cp8, ZeRO-1"),
        ("context_parallel_size: 2\nfsdp_config: {reshard_after_forward: true}\n", "dp4 x cp2, ZeRO-3"),
        (
            "dp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\nfsdp_config: {offload_params: false}\n",
            "dp4 x tp2, ZeRO-3 in groups of 2",
        ),
    ],
)
def test_axolotls_axes_are_read_whatever_shards_beside_them(read: Any, words: str, plan: str) -> None:
    sizes = "train_micro_batch_size_per_gpu: auto"
    words = words.replace("{zero_optimization", f"{{{sizes}, zero_optimization")
    assert read(AXOLOTL + words, num_gpus=8).plan.describe().startswith(plan)


def test_sizes_that_multiply_to_other_gpus_are_refused_by_their_names(read: Any) -> None:
    text = AXOLOTL + "dp_shard_size: 8\ntensor_parallel_size: 2\nfsdp_config: {reshard_after_forward: true}\n"
    with pytest.raises(PlanError, match=r"tp_size 2 .* dp_shard_size 8 = 16 ranks, and there are 8 processes"):
        read(text, num_gpus=8)
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config: "
        "{parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}\n"
    )
    with pytest.raises(PlanError, match=r"dp_replicate_size 2 x dp_shard_size 2 = 4 ranks, and there are 8 processes"):
        read(text)


def test_accelerates_axes_are_read_or_named_under_every_kind(read: Any) -> None:
    sizes = "parallelism_config: {parallelism_config_%s_size: 2}\n"
    ulysses = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\n" + sizes % "sp"
    assert read(ulysses).plan.describe().startswith("dp2 x cp2, ZeRO-3")
    tensor = read("distributed_type: MULTI_GPU\nnum_processes: 8\n" + sizes % "tp")
    assert tensor.plan.describe().startswith("dp4 x tp2, DDP")
    assert "accelerate 1.15 refuses it" in "\n".join(tensor.notes)
    context = read("distributed_type: MULTI_GPU\nnum_processes: 8\n" + sizes % "cp")
    assert "parallelism_config_cp_size" in "\n".join(context.notes)


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "cp8, ZeRO-3"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "dp4 x cp2, ZeRO-3"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n", "dp2 x cp4, ZeRO-3"),
    ],
)
def test_axes_of_accelerates_file_hold_for_the_tool_that_names_it(tmp_path: Path, config: str, plan: str) -> None:
    cp = int(re.findall(r"cp(\d)", plan)[0])
    axis = "sp" if "DEEPSPEED" in config else "cp"
    sizes = f"parallelism_config: {{parallelism_config_{axis}_size: {cp}}}\n"
    (tmp_path / "acc.yaml").write_text(f"num_processes: 8\nmixed_precision: bf16\n{config}{sizes}")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\naccelerate_config: acc.yaml\nuse_peft: true\n")
    assert import_plan(tmp_path / "sft.yaml").plan.describe().startswith(plan)


def test_yamls_no_is_accelerates_one_process(read: Any) -> None:
    assert read("distributed_type: NO\nmixed_precision: bf16\nnum_processes: 4\n").plan.world_size == 1


def test_deepspeeds_comments_commas_and_byte_order_marks_are_passed_over(read: Any) -> None:
    text = """{
      "train_micro_batch_size_per_gpu": 2, // a comment
      # another, with a brace }
      "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/a//b#c",},},
      /* and one
         of two lines */
    }"""
    setup = read("\ufeff" + text, "ds.json", num_gpus=4)
    assert (setup.plan.zero_stage, setup.plan.micro_batch_size, setup.plan.offload) == (3, 2, "optimizer")
    with pytest.raises(PlanError, match="is not JSON"):
        read('{"train_batch_size": 8,, "zero_optimization": {}}', "broken.json", num_gpus=4)


def test_deepspeeds_auto_sizes_are_said_beside_a_global_batch(read: Any) -> None:
    text = '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}'
    setup = read(text, "ds.json", num_gpus=8, global_batch_size=64)
    assert (setup.plan.micro_batch_size, setup.plan.num_microbatches) == (1, 8)
    assert any(note.startswith("train_micro_batch_size_per_gpu is auto") for note in setup.notes)


@pytest.mark.parametrize(
    ("text", "task", "sequences"),
    [
        (AXOLOTL + "rl: ipo\nmicro_batch_size: 2\n", "dpo", 4),
        (AXOLOTL + "rl: orpo\n", "orpo", 2),
        (AXOLOTL + "rl: grpo\ntrl: {max_completion_length: 256}\n", "grpo:completion=256", 1),
        (AXOLOTL + "reward_model: true\n", "reward", 2),
        (FACTORY + "stage: dpo\nper_device_train_batch_size: 2\n", "dpo", 4),
        (FACTORY + "stage: dpo\npref_loss: simpo\nper_device_train_batch_size: 1\n", "orpo", 2),
        (FACTORY + "stage: kto\nper_device_train_batch_size: 3\n", "kto", 3),
        (AXOLOTL + "rl: kto\n", "kto", 1),
        (PAIRS + "rlhf_type: orpo\n", "orpo", 4),
        (PAIRS + "task_type: embedding\n", "embedding", 4),
        (PAIRS + "task_type: reranker\n", "reranker", 2),
        (FACTORY + "stage: rm\nper_device_train_batch_size: 3\n", "reward", 6),
        (PAIRS + "rlhf_type: dpo\n", "dpo", 4),
        ("model_name_or_path: m\nuse_peft: true\nloss_type: sigmoid\nper_device_train_batch_size: 1\n", "dpo", 2),
    ],
)
def test_objectives_are_tasks_and_pairs_two_sequences(read: Any, text: str, task: str, sequences: int) -> None:
    setup = read(text, num_gpus=2)
    assert (setup.task, setup.plan.micro_batch_size) == (task, sequences)


@pytest.mark.parametrize(("key", "name"), [("kd_trainer: true\n", "kd"), ("rl: ebft\n", "ebft")])
def test_an_objective_that_is_not_modelled_is_named(read: Any, key: str, name: str) -> None:
    assert any(name in note and "not priced" in note for note in read(AXOLOTL + key, num_gpus=2).notes)


def test_muon_of_llama_factory_is_muon_and_others_are_named(read: Any) -> None:
    full = FACTORY + "stage: sft\nfinetuning_type: full\n"
    assert read(full + "use_muon: true\n").optimizer == "muon"
    for key in ("use_badam", "use_apollo", "use_adam_mini"):
        assert any(note.startswith(f"{key}: priced as adamw") for note in read(full + f"{key}: true\n").notes)


def test_llama_factorys_megatron_backend_is_read_with_its_degrees(read: Any) -> None:
    text = FACTORY + (
        "stage: sft\nfinetuning_type: full\npipeline_model_parallel_size: 2\nexpert_model_parallel_size: 4\n"
        "use_distributed_optimizer: true\nrecompute_granularity: full\ngradient_accumulation_steps: 6\n"
        "per_device_train_batch_size: 1\nmoe_token_dispatcher_type: alltoall\n"
    )
    setup = read(text, num_gpus=16)
    assert setup.plan.describe() == "dp8 x pp2 x ep4, ZeRO-1, 1f1b, micro-batch 1 x 6, recompute full"
    assert (setup.framework, setup.notes) == ("megatron-core", ())
    assert read(text).plan.world_size == 8  # as many as the degrees need


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model_name_or_path: m\ntemplate: qwen3\ninfer_backend: vllm\n", "LLaMA-Factory's file is for inference"),
        ("model_name_or_path: m\ntemplate: t\nexport_dir: out\nexport_size: 5\n", "LLaMA-Factory's file exports"),
        (FACTORY.replace("do_train: true", "do_predict: true") + "stage: sft\ntemplate: t\n", "predicts"),
        ("model: m\npeft_config: {name: lora, export_dir: out}\nmodel_class: llm\n", "LLaMA-Factory v1's file exports"),
        ("swift infer --model m --max_length 10\n", "ms-swift's command swift infer trains nothing"),
    ],
)
def test_files_that_train_nothing_are_refused_as_their_own_tools(read: Any, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read(text, num_gpus=2)


def test_ms_swifts_own_names_of_configurations_are_known(read: Any) -> None:
    text = "model: m\ntuner_type: full\nmax_length: 4096\nper_device_train_batch_size: 2\n"
    found = {name: read(text + f"deepspeed: {name}\n", num_gpus=4).plan for name in ("zero1", "zero2_offload", "zero3")}
    assert [plan.zero_stage for plan in found.values()] == [1, 2, 3]
    assert found["zero2_offload"].offload == "optimizer"
    fsdp = read(text + "fsdp: fsdp2\n", num_gpus=4)
    assert (fsdp.plan.zero_stage, fsdp.plan.recompute, fsdp.framework) == (3, "full", "fsdp")
    assert read(text, num_gpus=4).plan.num_microbatches == 2  # sixteen sequences a step, unless told otherwise


def test_megatron_swift_is_read_as_megatron_core(read: Any) -> None:
    text = (
        "model: m\ntuner_type: lora\nlora_rank: 4\nmax_length: 1024\nmicro_batch_size: 2\nglobal_batch_size: 32\n"
        "tensor_model_parallel_size: 2\nexpert_model_parallel_size: 4\nsequence_parallel: true\n"
    )
    setup = read(text, num_gpus=8)
    assert setup.plan.describe().startswith("dp4 x tp2 x ep2, ZeRO-1, sequence parallel, micro-batch 2 x 4")
    assert (setup.framework, setup.train, setup.seq_length) == ("megatron-core", "lora:r=4,dropout=0.05", 1024)


def test_a_command_of_ms_swift_is_read_from_its_script(read: Any) -> None:
    text = """#!/bin/bash
    GPUS=4   # of one machine
    NPROC_PER_NODE=$GPUS \\
    swift rlhf --rlhf_type dpo --model m \\
        --tuner_type lora --target_modules q_proj v_proj --max_length 2048 \\
        --gradient_accumulation_steps $(expr 32 / $GPUS) --per_device_train_batch_size 1 --deepspeed zero2
    """
    setup = read(text, "train.sh")
    assert setup.plan.describe() == "dp4, ZeRO-2, micro-batch 2 x 8, recompute full"
    assert (setup.train, setup.task) == ("lora:r=8,targets=q_proj|v_proj,dropout=0.05", "dpo")


SCRIPT = """#!/bin/bash
export TP=${TP:-4} # how blocks are divided
PP=2
NODES=1; GPUS_PER_NODE=8
WORLD=$((NODES * GPUS_PER_NODE))
BATCH=$(( WORLD / TP / PP * 16 ))
MODEL_ARGS=(
    --num-layers 32   # blocks
    --seq-length ${SEQ:-2048}
)
PARALLEL_ARGS="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP"
PARALLEL_ARGS+=" --sequence-parallel --no-such-option-of-mine 3"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES pretrain_gpt.py "${MODEL_ARGS[@]}" $PARALLEL_ARGS \\
    --micro-batch-size 1 --global-batch-size $BATCH --bf16 --overlap-grad-reduce --wandb-project mine
"""


def test_megatrons_script_is_read_with_its_plain_variables(read: Any) -> None:
    setup = read(SCRIPT, "train.sh")
    assert setup.plan.describe() == "tp4 x pp2, 1f1b, sequence parallel, micro-batch 1 x 16"
    assert setup.seq_length == 2048
    assert setup.notes == ("--no-such-option-of-mine: not known as keys of Megatron-LM, and not priced",)


def test_what_only_the_shell_knows_is_said_as_such(read: Any) -> None:
    with pytest.raises(
        PlanError, match=r"--pipeline-model-parallel-size: expected a whole number, found '\$1'"
    ) as raised:
        read(SCRIPT.replace("PP=2", "PP=$1"), "train.sh")
    assert "bash -x" in (raised.value.hint or "")


def test_adapters_on_experts_parameters_stand_alone_or_beside_layers_that_are_named(read: Any) -> None:
    lora = (
        AXOLOTL
        + "adapter: lora\nlora_r: 4\nlora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n"
    )
    assert read(lora).train == "lora:r=4,targets=experts"
    assert read(lora + "lora_target_modules: [q_proj]\n").train == "lora:r=4,targets=q_proj|experts"


def test_a_command_of_ms_swift_may_name_a_file_with_its_keys(read: Any, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("model: m\ntuner_type: full\nmax_length: 512\ndeepspeed: zero2\n")
    (tmp_path / "acc.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    setup = read("NPROC_PER_NODE=2 \\\nswift sft \\\n    keys.yaml --max_length 256\n", "train.sh")
    assert (setup.plan.describe()[:11], setup.seq_length) == ("dp2, ZeRO-2", 256)
    text = "accelerate launch --config_file acc.yaml swift/cli/sft.py --model m --tuner_type full --max_length 64\n"
    assert read(text, "train.sh", num_gpus=4).plan.zero_stage == 3


def test_generated_answers_count_beside_their_prompts(read: Any) -> None:
    swift = read(
        "model: m\ntuner_type: lora\nrlhf_type: grpo\nmax_length: 300\nmax_completion_length: 700\n", num_gpus=2
    )
    assert (swift.task, swift.seq_length) == ("grpo:completion=700,beta=0.04,reserve=0", 1000)  # its default
    distilled = "model: m\ntuner_type: lora\nrlhf_type: gkd\nmax_length: 300\nmax_completion_length: 700\n"
    assert [read(distilled + more, num_gpus=2).seq_length for more in ("", "lmbda: 0\n")] == [1000, 300]
    without = read("model: m\ntuner_type: full\nrlhf_type: grpo\nbeta: 0\nmax_length: 3\n", num_gpus=2)
    assert without.task == "grpo:reserve=0"
    trl = read("model_name_or_path: m\nuse_peft: true\nnum_generations: 4\nmax_completion_length: 100\n", num_gpus=2)
    assert (trl.task, trl.seq_length) == ("grpo:completion=100,reserve=0", 612)
    assert any(note.startswith("prompts of 512 tokens assumed") for note in trl.notes)


@pytest.mark.parametrize(
    ("words", "trl", "swift"),
    [
        ("", 0, 0),  # the model's own generation
        ("use_vllm: false\nvllm_gpu_memory_utilization: 0.5\n", 0, 0),
        ("use_vllm: true\n", None, 0.9),  # what each reserves unless told
        ("use_vllm: true\nvllm_gpu_memory_utilization: 0.5\n", 0.5, 0.5),
        ("use_vllm: true\nvllm_gpu_memory_utilization: 0.3\n", None, None),
        ("use_vllm: true\nvllm_mode: server\n", 0, 0),
    ],
)
def test_memory_of_the_generator_is_what_the_configuration_gives_it(
    read: Any, words: str, trl: float | None, swift: float | None
) -> None:
    files = {
        "model_name_or_path: m\nnum_generations: 4\nmax_completion_length: 100\nvllm_enable_sleep_mode: ": trl,
        "model: m\ntuner_type: lora\nrlhf_type: grpo\nmax_length: 300\nsleep_level: ": swift,
    }
    for text, reserve in files.items():
        awake, asleep = (read(f"{text}{sleeps}\n{words}", num_gpus=2) for sleeps in (0, 1))
        assert parse_task(awake.task).reserve == reserve
        assert parse_task(asleep.task).reserve == 0
        assert not any("vllm" in note for note in (*awake.notes, *asleep.notes))


def test_megatrons_programs_that_generate_are_refused(read: Any) -> None:
    text = "torchrun tools/run_text_generation_server.py --micro-batch-size 1 --num-layers 2 --seq-length 64\n"
    with pytest.raises(PlanError, match=r"run_text_generation_server\.py trains nothing"):
        read(text, "serve.sh", num_gpus=2)
    with pytest.raises(PlanError, match="Megatron-LM's --task MSDP-EVAL-F1 trains nothing"):
        read("python tasks/msdp/main.py --task MSDP-EVAL-F1 --micro-batch-size 4\n", "eval.sh", num_gpus=1)


SWIFT = "swift sft --model m --tuner_type lora --max_length 64 --per_device_train_batch_size 1\n"


@pytest.mark.parametrize(
    ("text", "num_gpus", "is_told"),
    [
        ("CUDA_VISIBLE_DEVICES=0 \\\n" + SWIFT, 1, True),
        ("NPROC_PER_NODE=2 \\\n" + SWIFT, 2, True),
        ("NNODES=2 NPROC_PER_NODE=4 \\\n" + SWIFT, 8, True),
        ("NPROC_PER_NODE=4 swift infer --model m\nCUDA_VISIBLE_DEVICES=0 " + SWIFT, 1, True),
        (
            "NPROC_PER_NODE=2 "
            + SWIFT
            + "CUDA_VISIBLE_DEVICES=0 swift infer --model m --a 1 --b 2 --c 3 --d 4 --e 5\n",
            2,
            True,
        ),
        ("torchrun --nnodes=2 --nproc_per_node=2 " + SWIFT.replace("swift sft", "swift/cli/sft.py"), 4, True),
        ("NNODES=$WORLD_SIZE NPROC_PER_NODE=8 " + SWIFT, 3, False),
        ("NPROC_PER_NODE=2 swift sft keys.yaml\n", 2, True),
    ],
)
def test_a_command_of_ms_swift_says_how_many_processes_it_starts(
    read: Any, tmp_path: Path, text: str, num_gpus: int, is_told: bool
) -> None:
    (tmp_path / "keys.yaml").write_text("model: m\ntuner_type: lora\nmax_length: 64\n")
    setup = read(text, "train.sh", num_gpus=None if is_told else 3)
    assert (setup.plan.world_size, setup.says_gpus) == (num_gpus, is_told)


def test_layers_that_ms_swift_spreads_over_several_gpus_of_a_process_are_told(read: Any) -> None:
    (note,) = read("CUDA_VISIBLE_DEVICES=0,1 " + SWIFT, "train.sh").notes
    assert note.startswith("CUDA_VISIBLE_DEVICES names 2 GPUs for 1 process: layers spread")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4"),
        ("unsloth/llama-3-8b-bnb-4bit", "nf4:double"),
        ("Qwen/Qwen2.5-7B-Instruct", "bf16"),
    ],
)
def test_a_release_in_fewer_bits_is_the_base_of_adapters(read: Any, name: str, stored: str) -> None:
    texts = [
        f"base_model: {name}\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n",
        f"model_name_or_path: {name}\ndo_train: true\nbf16: true\nfinetuning_type: lora\n",
        f"model_name_or_path: {name}\nuse_peft: true\ndtype: bfloat16\ndataset_name: d\n",
        f"model: {name}\ntuner_type: lora\nmax_length: 64\n",
        f"model: {name}\ntrain_dataset: d.yaml\npeft_config: {{name: lora, r: 8}}\n",
    ]
    assert [read(text, num_gpus=1).base_weights for text in texts] == [stored] * len(texts)
    assert not any("released" in note or "quantized" in note for text in texts for note in read(text, num_gpus=1).notes)


def test_a_release_in_a_format_that_is_not_priced_is_told(read: Any) -> None:
    setup = read("model: Qwen/Qwen3-8B-FP8\ntuner_type: lora\nmax_length: 64\n", num_gpus=1)
    assert setup.base_weights == "bf16"
    assert "Qwen/Qwen3-8B-FP8: weights that are quantized in the release are priced in 16 bits" in setup.notes


def test_axolotls_all_linear_layers_come_beside_those_that_are_named(read: Any) -> None:
    lora = AXOLOTL + "adapter: lora\nlora_r: 4\nlora_target_modules: [q_proj]\n"
    assert read(lora).train == "lora:r=4,targets=q_proj"
    assert read(lora + "lora_target_linear: true\n").train == "lora:r=4"


def test_attention_that_is_not_known_is_told_and_of_several_the_first_is_read(read: Any) -> None:
    flex = read(AXOLOTL + "attn_implementation: flex_attention\n")
    assert (flex.attention, flex.notes[-1]) == ("sdpa", "attention flex_attention: priced as sdpa")
    assert read(AXOLOTL + "xformers_attention: true\n").attention == "sdpa"
    assert read(AXOLOTL + "flash_attention: true\n").attention == "flash"
    twice = read("model: m\ntuner_type: lora\nmax_length: 64\nattn_impl: [flash_attn, flash_attn]\n", num_gpus=1)
    assert (twice.attention, twice.notes) == ("flash", ())


MEGATRON = "torchrun --nproc_per_node 2 pretrain.py --micro-batch-size 2 --bf16 "


@pytest.mark.parametrize(
    ("words", "length", "note"),
    [
        ("--encoder-seq-length 512", 512, None),
        ("--encoder-seq-length 512 --decoder-seq-length 128", 512, "--decoder-seq-length 128: both halves"),
        ("--encoder-num-layers 2 --seq-length 128 --decoder-seq-length 512", 512, "--encoder-seq-length 128: both"),
        ("--seq-length 576 --decoder-seq-length 1024", 1024, "--seq-length 576: tokens of pictures"),
    ],
)
def test_megatrons_lengths_are_those_of_the_longer_half_or_of_the_text(
    read: Any, words: str, length: int, note: str | None
) -> None:
    setup = read(f"{MEGATRON} {words}\n", "train.sh")
    assert setup.seq_length == length
    assert [found.startswith(note or "-") for found in setup.notes] == ([] if note is None else [True])


@pytest.mark.parametrize(
    ("words", "train"),
    [
        ("--freeze-LM --freeze-ViT", "projector"),
        ("--freeze-ViT", "text+projector"),
        ("--freeze-LM", "projector+tower"),
        ("", None),
    ],
)
def test_what_megatron_freezes_of_a_model_with_pictures_does_not_train(read: Any, words: str, train: str) -> None:
    setup = read(f"{MEGATRON} --seq-length 64 {words}\n", "train.sh")
    assert (setup.train, setup.notes) == (train, ())


def test_the_lines_of_a_file_that_a_script_runs_are_read(read: Any, tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text('COMMON="--bf16 --tensor-model-parallel-size ${TP}"\n')
    text = 'TP=2\nsource $(dirname $0)/common.sh\nBATCH="--micro-batch-size 2 --seq-length 64"\n'
    setup = read(text, "conf.sh", num_gpus=4)
    assert (setup.plan.tp, setup.precision, setup.notes) == (2, "bf16", ())


def test_options_in_several_variables_are_joined_and_files_that_a_script_runs_are_told(read: Any) -> None:
    text = (
        "source $(dirname $0)/common.sh\nsource .venv/bin/activate\n"
        'BATCH="--micro-batch-size 2 --global-batch-size 32"\n'
        'MODEL="--seq-length 64 --tokenizer-model "a/b" --bf16"\n'
    )
    setup = read(text, "conf.sh", num_gpus=4)
    assert (setup.plan.describe(), setup.seq_length) == ("dp4, DDP, micro-batch 2 x 4", 64)
    assert [note.partition(" runs ")[2] for note in setup.notes] == [
        "the lines of $(dirname $0)/common.sh, which are not read"
    ]


@pytest.mark.parametrize(
    ("words", "stack", "stage"),
    [
        ("use_mca: true\n", "overlaps_gradients=false", 0),
        ("use_mca: true\noverlap_grad_reduce: true\n", "", 0),
        ("use_megatron_bridge: true\n", "", 1),
        ("use_megatron_bridge: true\ncross_entropy_loss_fusion: true\n", "compiled_loss=true", 1),
        ("use_mca: true\ncuda_graph_impl: local\noverlap_grad_reduce: true\n", "cuda_graphs=layers", 0),
    ],
)
def test_llama_factorys_megatron_backends_have_the_settings_of_their_sources(
    read: Any, words: str, stack: str, stage: int
) -> None:
    setup = read(FACTORY + "stage: sft\nfinetuning_type: full\n" + words, num_gpus=4)
    told = setup.stack.without(frozenset({"expandable_segments"}))
    assert (told.text, setup.plan.zero_stage) == (stack, stage)


def test_samples_that_are_packed_and_told_apart_are_read(read: Any) -> None:
    assert read(AXOLOTL + "sample_packing: true\n").packs_samples
    factory = FACTORY + "stage: sft\npacking: true\n"
    assert not read(factory, num_gpus=1).packs_samples
    assert read(factory + "neat_packing: true\n", num_gpus=1).packs_samples
    trl = "model_name_or_path: m\nuse_peft: true\ndataset_name: d\npacking: true\n"
    assert read(trl, num_gpus=1).packs_samples
    assert not read(trl + "packing_strategy: wrapped\n", num_gpus=1).packs_samples
    assert read("model: m\ntuner_type: lora\nmax_length: 64\npacking: true\n", num_gpus=1).packs_samples


@pytest.mark.parametrize(
    "words",
    [
        "--activations-checkpoint-method uniform",
        "--checkpoint-activations --checkpoint-activations-method block",
        "--recompute-granularity full",
    ],
)
def test_megatrons_older_words_for_recompute_are_read(read: Any, words: str) -> None:
    setup = read(f"{MEGATRON} --seq-length 64 {words}\n", "train.sh")
    assert (setup.plan.recompute, setup.notes) == ("full", ())


def test_models_whose_encoder_has_ranks_of_its_own_are_refused(read: Any) -> None:
    with pytest.raises(PlanError, match="--llm-offset gives encoder and language model ranks of their own"):
        read(f"{MEGATRON} --seq-length 64 --llm-offset 1 --llm-tp 1\n", "train.sh")


def test_accelerate_without_a_number_of_processes_says_nothing_of_gpus(read: Any) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
    alone, told = read(text), read(text, num_gpus=4)
    assert (alone.says_gpus, alone.notes[0].partition(":")[0]) == (False, "num_processes is not named")
    assert (told.plan.dp, told.says_gpus) == (4, False)
    assert not any("num_processes" in note for note in told.notes)
    assert read(text + "num_processes: 2\n").says_gpus


def test_modules_that_megatron_recomputes_are_all_read(read: Any) -> None:
    words = "--seq-length 64 --recompute-granularity selective --recompute-modules"
    plans = {
        modules: read(f"{MEGATRON} {words} {modules}\n", "train.sh")
        for modules in ("core_attn", "layernorm moe_act", "core_attn moe layernorm")
    }
    assert [(setup.plan.recompute, setup.stack.recomputed_ops) for setup in plans.values()] == [
        ("selective", None),
        ("selective_ops", None),
        ("selective_ops", "experts"),
    ]


def test_a_short_last_stage_is_told_where_the_number_of_layers_is_not(read: Any) -> None:
    text = "model: m\nmax_length: 64\npipeline_model_parallel_size: 2\ndecoder_last_pipeline_num_layers: 11\n"
    (note,) = read(text, num_gpus=2).notes
    assert note.startswith("decoder_last_pipeline_num_layers: its stages follow from the model's layers")


def test_adapters_on_the_ends_beside_all_linear_layers_are_told(read: Any) -> None:
    setup = read(SWIFT.replace("--max", "--target_modules all-linear embed_tokens lm_head --max"), "train.sh")
    assert setup.train == "lora:r=8,dropout=0.05"
    assert setup.notes == ("adapters on embed_tokens, lm_head beside all linear layers: not priced",)


def test_llama_factorys_megatron_backends_have_attention_of_their_own(read: Any) -> None:
    assert read(FACTORY + "stage: sft\nuse_mca: true\n", num_gpus=1).attention is None


def test_packed_rows_of_pairs_hold_both_sequences(read: Any) -> None:
    text = "model: m\ntuner_type: full\nmax_length: 8192\nrlhf_type: dpo\nper_device_train_batch_size: 1\n"
    assert (read(text, num_gpus=1).seq_length, read(text, num_gpus=1).plan.micro_batch_size) == (8192, 2)
    packed = read(text + "packing: true\n", num_gpus=1)
    assert (packed.seq_length, packed.plan.micro_batch_size) == (4096, 2)


def test_megatrons_names_of_layers_are_those_of_transformers(read: Any) -> None:
    text = "model: m\ntuner_type: lora\nmax_length: 64\ntensor_model_parallel_size: 1\n"
    setup = read(text + "target_modules: [linear_qkv, linear_proj]\n", num_gpus=1)
    assert (setup.train or "").startswith("lora:r=8,targets=qkv|o_proj")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torchtune", "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2\n"),
        ("torchtune", "tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full\n"),
        ("nanotron", "parallelism:\n  dp: 8\n  tp: 2\n  tp_linear_async_communication: true\n"),
        ("verl", "set -x\npython3 -m verl.trainer.main_ppo \\\n  actor_rollout_ref.model.path=a/b\n"),
        ("OpenRLHF", "deepspeed --module openrlhf.cli.train_sft --zero_stage 2\n"),
        ("LLM Foundry or OLMo", "max_seq_len: 2048\ndevice_train_microbatch_size: 4\n"),
        ("NeMo 1", "trainer:\n  devices: 8\nmodel:\n  megatron_amp_O2: true\n"),
        ("LitGPT", "litgpt finetune_lora checkpoints/a --config lora.yaml\n"),
        ("XTuner", "torchrun --nproc-per-node 8 xtuner/v1/train/cli/sft.py --dataset a\n"),
        ("slime", "python train.py --tensor-model-parallel-size 2 \\\n  --rollout-batch-size 8\n"),
    ],
)
def test_tools_that_are_not_read_are_refused_by_their_names(read: Any, name: str, text: str) -> None:
    with pytest.raises(PlanError, match=f"is a configuration of {name}, which is not read"):
        read(text, "train.sh")


def test_a_program_of_ones_own_is_named_where_its_options_say_no_plan(read: Any) -> None:
    with pytest.raises(PlanError, match=r"train.sh starts train.py, and none of its options is one of a tool"):
        read("srun torchrun --nproc_per_node 8 train.py --batch 4 --sharding full\n", "train.sh")


def test_deepspeed_chats_switch_takes_the_stage_beside_it(read: Any) -> None:
    command = "deepspeed --num_gpus 8 main.py --per_device_train_batch_size 4 --zero_stage 3 --offload --deepspeed\n"
    plan = read(command, "train.sh").plan
    assert plan.describe() == "dp8, ZeRO-3, micro-batch 4 x 1, offload optimizer"


def test_a_sum_that_is_not_known_is_one_value(read: Any) -> None:
    script = "N=$(count)\nB=$(( ${N} / 2 ))\npython pretrain_gpt.py --micro-batch-size $B --num-layers 2\n"
    with pytest.raises(PlanError, match=re.escape("found '$((...))'")) as caught:
        read(script, "train.sh", num_gpus=2)
    assert "variables are not filled in" in str(caught.value.hint)


def test_forks_of_megatron_lm_spell_options_with_underscores(read: Any) -> None:
    command = "torchrun --nproc_per_node 8 pretrain_gpt.py --num_layers 8 --micro_batch_size 2 --global_batch_size 32\n"
    assert read(command, "train.sh").plan.describe() == "dp8, DDP, micro-batch 2 x 2"


def test_a_list_of_data_is_nobodys_configuration(read: Any) -> None:
    with pytest.raises(PlanError, match="is not a configuration of"):
        read("datasets:\n- path: a\n  json_path: b\n")


def test_truth_values_are_the_words_of_transformers_parser(read: Any) -> None:
    for word, recompute in (("1", "full"), ("y", "full"), ("0", "none"), ("F", "none")):
        command = f"python train.py --per_device_train_batch_size 2 --gradient_checkpointing {word}\n"
        assert read(command, "train.sh").plan.recompute == recompute


@pytest.mark.parametrize(
    "text",
    [
        '# large\n{\n  "pipe_parallel_size": 1,\n  "fp16": {"type": "float16"},\n}\n',
        "pipe-parallel-size: 2\nzero_optimization: {stage: 1}\n",
    ],
)
def test_gpt_neox_is_refused_by_its_name(read: Any, text: str) -> None:
    with pytest.raises(PlanError, match="is a configuration of GPT-NeoX, which is not read"):
        read(text, "large.yml")


@pytest.mark.parametrize(
    ("share", "offload", "words"),
    [
        (1, "optimizer", None),
        (0, "none", None),
        (0.2, "none", "0.2: priced as none of the optimizer on the host, and takes less"),
        (0.5, "optimizer", "0.5: priced as all of the optimizer on the host, and takes more"),
    ],
)
def test_a_share_of_an_offloaded_optimizer_is_priced_as_the_nearer_of_all_and_nothing(
    read: Any, share: float, offload: str, words: str | None
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": share}}
    values = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    deepspeed = read(json.dumps(values), "ds.json", num_gpus=8)
    command = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 512 --micro-batch-size 1 --optimizer-cpu-offload "
    megatron = read(command + f"--optimizer-offload-fraction {share}\n", "run.sh", num_gpus=8)
    for setup in (deepspeed, megatron):
        assert setup.plan.offload == offload
        assert (
            (words in "\n".join(setup.notes))
            if words
            else not any("optimizer on the host" in one for one in setup.notes)
        )
