"""Configurations of other tools, read: what paraplan writes comes back, and what is broken is named."""

from __future__ import annotations

import contextlib
import json

import pytest
from exported_plans import PLANS, subject
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paraplan.errors import ParaplanError, PlanError
from paraplan.interop.export import TARGETS, export_plan
from paraplan.interop.recognized import tool_of
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.accelerate import read_accelerate
from paraplan.interop.sources.automodel import read_automodel
from paraplan.interop.sources.axolotl import read_axolotl
from paraplan.interop.sources.deepspeed import read_deepspeed
from paraplan.interop.sources.hf_trainer import read_hf_trainer
from paraplan.interop.sources.megatron_bridge import read_megatron_bridge
from paraplan.interop.sources.megatron_lm import read_megatron_lm
from paraplan.interop.sources.torchtitan import read_torchtitan
from paraplan.interop.sources.transformers import read_transformers

GPUS = Given(num_gpus=8)


def no_file(path: str) -> str:
    raise PlanError(f"cannot read {path}")


def accelerate(text: str, given: Given = GPUS) -> Setup:
    return read_accelerate(text, source="config.yaml", given=given, read_file=no_file)


def deepspeed(given: Given = GPUS, **values: object) -> Setup:
    return read_deepspeed(json.dumps(values), source="ds.json", given=given)


def megatron(arguments: str, given: Given = GPUS) -> Setup:
    return read_megatron_lm(arguments, source="--from-megatron", given=given)


def expressible(target: str) -> list[str]:
    return [name for name in PLANS if not export_plan(subject(name), target, partial=True).gaps]


@pytest.mark.parametrize("name", expressible("deepspeed"))
def test_a_deepspeed_export_is_read_back_as_the_same_plan(name: str) -> None:
    made = subject(name)
    # What is not in the file: the script's choice, and under tensor parallelism the number of ranks.
    said = Given(recompute=made.plan.recompute, num_gpus=made.plan.world_size)
    setup = read_deepspeed(export_plan(made, "deepspeed").text, source="ds.json", given=said)
    assert setup.plan == made.plan
    assert setup.precision == "bf16"


@pytest.mark.parametrize("name", expressible("megatron-lm"))
def test_a_megatron_export_is_read_back_as_the_same_plan(name: str) -> None:
    made = subject(name)
    setup = megatron(export_plan(made, "megatron-lm").text, Given(num_gpus=made.plan.world_size))
    assert setup.plan == made.plan
    assert (setup.seq_length, setup.precision, setup.optimizer) == (4096, "bf16", "adamw")


@pytest.mark.parametrize("name", expressible("accelerate"))
def test_an_accelerate_export_is_read_back_as_the_same_plan(name: str) -> None:
    plan = subject(name).plan
    said = Given(micro_batch_size=plan.micro_batch_size, global_batch_size=plan.global_batch_size)
    setup = accelerate(export_plan(subject(name), "accelerate").text, said)
    assert setup.plan == plan
    assert setup.precision == "bf16"


def test_most_plans_go_there_and_back() -> None:
    assert len(expressible("deepspeed")) >= 5
    assert len(expressible("megatron-lm")) >= 8
    assert len(expressible("accelerate")) >= 5


@pytest.mark.parametrize(
    ("values", "dp", "micro", "steps"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, 2, 4),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, 4, 2),
        ({"train_batch_size": 64}, 8, 8, 1),
        ({"train_micro_batch_size_per_gpu": 2}, 8, 2, 1),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8, 2, 4),
        ({"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}}, 2, 2, 1),
    ],
)
def test_a_missing_batch_size_of_deepspeed_follows_from_the_others(
    values: dict[str, object], dp: int, micro: int, steps: int
) -> None:
    plan = deepspeed(**values).plan
    assert (plan.dp, plan.micro_batch_size, plan.num_microbatches) == (dp, micro, steps)


def test_the_number_of_gpus_follows_from_deepspeeds_batch_sizes() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert deepspeed(Given(), **sizes).plan.dp == 16


def test_auto_is_filled_in_by_what_the_user_says() -> None:
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    setup = deepspeed(GPUS.replace(micro_batch_size=2, global_batch_size=32), **auto)
    assert (setup.plan.num_microbatches, setup.precision) == (2, None)
    alone = deepspeed(**auto)
    assert (alone.plan.micro_batch_size, alone.plan.num_microbatches) == (1, 1)
    assert any("1 assumed, --micro-batch says otherwise" in note for note in alone.notes)
    with pytest.raises(PlanError) as caught:
        deepspeed(zero_optimization={"stage": 2})  # DeepSpeed refuses it too
    assert caught.value.hint is not None
    assert "--micro-batch" in caught.value.hint


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "0 or 1 or 2 or 3", "4"]),
        ({"zero_optimization": [2]}, ["zero_optimization", "an object"]),
        ({"train_micro_batch_size_per_gpu": "two"}, ["train_micro_batch_size_per_gpu", "'two'"]),
        ({"train_micro_batch_size_per_gpu": 0}, ["train_micro_batch_size_per_gpu", "above 0"]),
        ({"train_micro_batch_size_per_gpu": True}, ["train_micro_batch_size_per_gpu", "True"]),
        ({"bf16": {"enabled": 3}}, ["bf16.enabled", "true or false"]),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, ["offload_param.device", "disk"]),
        ({"train_batch_size": 7}, ["train_batch_size=7"]),
        (
            {"train_batch_size": 32, "gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 2},
            ["train_batch_size=32", "gradient_accumulation_steps=3", "= 48"],
        ),
        ({"tensor_parallel": {"autotp_size": 3}}, ["tp 3", "8 GPUs"]),
    ],
)
def test_a_broken_deepspeed_config_names_file_and_key(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        deepspeed(**({"train_micro_batch_size_per_gpu": 1} | values))
    assert caught.value.message.startswith("ds.json")
    assert all(word in caught.value.message for word in words)


def test_an_older_accelerate_config_says_its_strategy_by_number() -> None:
    old = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: 2\nmixed_precision: fp16\n"
    setup = accelerate(old)
    assert (setup.plan.zero_stage, setup.precision, setup.framework) == (2, "fp16", "fsdp")
    assert any("--micro-batch" in note for note in setup.notes)


def test_replicas_of_sharded_groups_are_read_as_hybrid_sharding() -> None:
    fsdp2 = (
        "distributed_type: FSDP\nnum_processes: 16\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    )
    assert accelerate(fsdp2).plan.zero_shards == 8
    fsdp1 = "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 4\nfsdp_config:\n  fsdp_sharding_strategy: 4\n"
    assert (accelerate(fsdp1).plan.zero_shards, accelerate(fsdp1).plan.zero_stage) == (4, 3)
    over_cp = accelerate(fsdp2 + "  parallelism_config_cp_size: 2\n")
    assert over_cp.plan.zero_shards is None
    assert any("sharded over cp too" in note for note in over_cp.notes)
    mics = deepspeed(train_micro_batch_size_per_gpu=1, zero_optimization={"stage": 3, "mics_shard_size": 4})
    assert mics.plan.zero_shards == 4
    assert any("0.19 refuses it" in note for note in mics.notes)
    instances = "--micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    assert megatron(instances).plan.zero_shards == 4
    experts = megatron(instances + " --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall")
    assert (experts.plan.zero_shards, len(experts.notes)) == (None, 1)


def test_one_process_of_accelerate_is_one_rank() -> None:
    assert accelerate("distributed_type: 'NO'\nmixed_precision: bf16\n").plan.world_size == 1


def test_what_is_priced_otherwise_is_noted() -> None:
    notes = megatron("--micro-batch-size 1 --recompute-granularity full --recompute-method block").notes
    assert [note.split()[0].rstrip(":") for note in notes] == ["--recompute-method"]
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    notes = deepspeed(train_micro_batch_size_per_gpu=1, zero_optimization=zero).notes
    assert any("zero_hpz_partition_size=8" in note for note in notes)


def test_autotp_batches_may_count_all_ranks() -> None:
    sizes = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "tensor_parallel": {"autotp_size": 2},
    }
    assert deepspeed(train_batch_size=32, **sizes).plan == deepspeed(train_batch_size=16, **sizes).plan
    with pytest.raises(PlanError, match="train_batch_size=24"):
        deepspeed(train_batch_size=24, **sizes)


def test_accelerates_megatron_section_becomes_degrees() -> None:
    text = """
distributed_type: MEGATRON_LM
num_processes: 16
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 4
  megatron_lm_num_micro_batches: 8
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
"""
    plan = accelerate(text).plan
    assert (plan.dp, plan.tp, plan.pp, plan.zero_stage, plan.num_microbatches) == (2, 2, 4, 1, 8)


def test_accelerate_may_name_a_deepspeed_file() -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    held = {"ds.json": json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}})}
    setup = read_accelerate(text, source="config.yaml", given=GPUS, read_file=held.__getitem__)
    assert (setup.plan.zero_stage, setup.plan.micro_batch_size) == (3, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: [", ["config.yaml", "line"]),
        ("just words", ["config.yaml", "no keys"]),
        ("{", ["config.yaml", "JSON"]),
        ("num_processes: 8", ["distributed_type"]),
        ("distributed_type: TPU9", ["distributed_type", "TPU9"]),
        ("distributed_type: MULTI_GPU\nnum_processes: many", ["num_processes", "many"]),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp4", ["mixed_precision", "fp4"]),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: maybe", ["fsdp_config.fsdp_reshard"]),
        (
            "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 9",
            ["fsdp_config.fsdp_version", "9"],
        ),
        ("distributed_type: FSDP\nnum_processes: 8\nparallelism_config: 3", ["parallelism_config", "an object"]),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO", ["compute_environment"]),
    ],
)
def test_a_broken_accelerate_config_names_file_and_key(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        accelerate(text)
    assert all(word in caught.value.message for word in ["config.yaml", *words])


def test_megatrons_older_spellings_are_understood() -> None:
    setup = megatron(
        "pretrain_gpt.py --tensor_model_parallel_size=2 --pipeline-model-parallel-size 2 --num-layers 24 "
        "--num-layers-per-virtual-pipeline-stage 6 --micro-batch-size 1 --global-batch-size 16 \\\n"
        "  --checkpoint-activations --use-flash-attn --fp16 --transformer-impl local"
    )
    plan = setup.plan
    assert (plan.tp, plan.pp, plan.dp, plan.virtual_pipeline_size, plan.recompute) == (2, 2, 2, 2, "full")
    assert (setup.precision, setup.attention) == ("fp16", "flash")
    assert "transformer-impl=local" in setup.framework


def test_megatrons_expert_parallelism_goes_there_and_back() -> None:
    made = subject({"dp": 4, "tp": 2, "cp": 2, "ep": 8, "sequence_parallel": True, "num_microbatches": 2})
    setup = megatron(export_plan(made, "megatron-lm").text, Given(num_gpus=16))
    assert setup.plan == made.plan
    assert setup.notes == ()
    other = megatron(
        "--micro-batch-size 1 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
        "--tensor-model-parallel-size 2 --sequence-parallel"
    )
    assert (other.plan.tp, other.plan.ep) == (2, 2)  # a rank holds a quarter of the experts, as there
    assert other.stack.etp == 1
    assert [note.split(":")[0] for note in other.notes] == ["--moe-token-dispatcher-type allgather"]


def test_megatrons_short_first_and_last_stages_become_an_uneven_cut() -> None:
    plan = megatron(
        "--pipeline-model-parallel-size 4 --num-layers 30 --decoder-first-pipeline-num-layers 7 "
        "--decoder-last-pipeline-num-layers 5 --micro-batch-size 1"
    ).plan
    assert plan.stage_blocks == (7, 9, 9, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["no option"]),
        ("--micro-batch-size", ["--micro-batch-size", "a whole number"]),
        ("--tensor-model-parallel-size 3 --micro-batch-size 1", ["tp 3", "8 GPUs"]),
        ("--bf16", ["--micro-batch-size is missing"]),
        ("--tensor-model-paralel-size 2 --micro-batch-size 1", ["--tensor-model-paralel-size is not an option"]),
        ("--micro-batch-size 3 --global-batch-size 32", ["--global-batch-size 32"]),
        ("--micro-batch-size 1 --recompute-granularity some", ["--recompute-granularity", "some"]),
        (
            "--micro-batch-size 1 --expert-model-parallel-size 16",
            ["--expert-model-parallel-size 16", "8 data- and context"],
        ),
        ('--micro-batch-size "1', ["quotation"]),
        (
            "--micro-batch-size 1 --pipeline-model-parallel-size 2 --use-megatron-fsdp",
            ["beside a pipeline only stages 0 and 1"],
        ),
        (
            "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etx|tL",
            ["--pipeline-model-parallel-layout", "E, t, m and L"],
        ),
        (
            "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|L",
            ["--pipeline-model-parallel-layout", "E, t, m and L"],
        ),
        (
            "--micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 3",
            ["--num-distributed-optimizer-instances", "a divisor of the 8"],
        ),
    ],
)
def test_broken_megatron_arguments_name_the_option(arguments: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        megatron(arguments)
    assert all(word in caught.value.message for word in ["--from-megatron", *words])


@st.composite
def plans(draw: st.DrawFn) -> dict[str, object]:
    """Fields of a plan of few ranks, of any kind; not all of them go together."""
    dp, tp, pp = (draw(st.sampled_from(degrees)) for degrees in ((1, 2, 4, 16), (1, 2), (1, 1, 2, 4)))
    schedule = draw(st.sampled_from(("1f1b", "interleaved_1f1b"))) if pp > 1 else None
    stage = draw(st.sampled_from((0, 1, 2, 3)))
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": draw(st.sampled_from((1, 1, 2))),
        "ep": draw(st.sampled_from((1, 1, 2))),
        "zero_stage": stage,
        "zero_shards": draw(st.sampled_from((None, 2, 4))) if stage and dp == 16 else None,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "micro_batch_size": draw(st.sampled_from((1, 3))),
        "num_microbatches": draw(st.sampled_from((1, 4, 6, 8))),
        "pipeline_schedule": schedule,
        "virtual_pipeline_size": 2 if schedule == "interleaved_1f1b" else 1,
        "recompute": draw(st.sampled_from(("none", "none", "selective", "full"))),
        "offload": draw(st.sampled_from(("none", "none", "optimizer", "parameters"))),
        "rank_order": draw(st.sampled_from((("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp")))),
    }


@settings(max_examples=100, deadline=None)
@given(plans(), st.sampled_from(("bf16", "fp16", "fp32")))
def test_what_a_target_can_express_is_read_back_as_the_same_plan(fields: dict[str, object], precision: str) -> None:
    try:
        made = subject(fields, precision=precision)
    except ValidationError:
        assume(False)
    plan = made.plan
    said = Given(num_gpus=plan.world_size)
    script = said.replace(micro_batch_size=plan.micro_batch_size, global_batch_size=plan.global_batch_size)
    reads = {
        "deepspeed": lambda text: read_deepspeed(text, source="ds", given=said.replace(recompute=plan.recompute)),
        "accelerate": lambda text: accelerate(text, script.replace(recompute=plan.recompute)),
        "megatron-lm": lambda text: megatron(text, said),
        "megatron-bridge": lambda text: read_megatron_bridge(text, source="overrides.yaml", given=said),
        "transformers": lambda text: read_transformers(text, source="train.py", given=said),
        "axolotl": lambda text: read_axolotl(text, source="a.yaml", given=said, read_file=no_file),
        "torchtitan": lambda text: read_torchtitan(text, source="t.toml", given=said, read_file=no_file),
        "hf-trainer": lambda text: read_hf_trainer(text, source="t.json", given=said, read_file=no_file),
        "nemo-automodel": lambda text: read_automodel(text, source="r.yaml", given=said),
    }
    for target, read in reads.items():
        exported = export_plan(made, target, partial=True)
        assert bool(exported.gaps) == bool(TARGETS[target].gaps(made)), (
            "searches ask for no other gaps than exports have"
        )
        if exported.gaps:
            continue
        assert tool_of(exported.text, "a file") == target
        setup = read(exported.text)
        # Axes of one rank have no place in an order, and 16 bits of accelerate are all that it says of training.
        order = [axis for axis in setup.plan.rank_order if getattr(plan, axis) > 1]
        assert order == [axis for axis in plan.rank_order if getattr(plan, axis) > 1]
        assert setup.plan.replace(rank_order=plan.rank_order, stage_blocks=None) == plan
        assert setup.precision == precision or (target, setup.precision) == ("axolotl", "bf16-pure")


@pytest.mark.parametrize("keys", [{"fsdp": True, "fsdp_config": {}}, {"gradient_accumulation_steps": 4, "bf16": True}])
def test_the_trainers_arguments_are_its_own_beside_keys_of_launchers(keys: dict[str, object]) -> None:
    assert tool_of(json.dumps({"per_device_train_batch_size": 1} | keys), "arguments.json") == "hf-trainer"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["auto", "cpu", 2, "2"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
DEEPSPEED_KEYS = st.sampled_from(
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "bf16"]
)
ACCELERATE_KEYS = st.sampled_from(
    ["distributed_type", "num_processes", "fsdp_config", "deepspeed_config", "parallelism_config", "mixed_precision"]
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(DEEPSPEED_KEYS, VALUES), st.dictionaries(ACCELERATE_KEYS, VALUES), st.text(max_size=40))
def test_whatever_is_read_is_a_setup_or_a_users_error(
    ds: dict[str, object], config: dict[str, object], arguments: str
) -> None:
    for read in (
        lambda: read_deepspeed(json.dumps(ds), source="ds.json", given=GPUS),
        lambda: accelerate(json.dumps({"distributed_type": "FSDP"} | config)),
        lambda: accelerate(arguments),
        lambda: megatron(f"--micro-batch-size 1 {arguments}"),
    ):
        with contextlib.suppress(ParaplanError):
            assert read().plan.world_size >= 1


def test_megatrons_narrow_products_and_recomputed_modules_are_read() -> None:
    plain = "--tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    assert megatron(plain).training.get("linear_precision") is None
    assert megatron(plain + "--fp8-format hybrid").training["linear_precision"] == "fp8"
    assert megatron(plain + "--fp8-format hybrid").training["fp8_recipe"] == "delayed"
    assert megatron(plain + "--fp8-format hybrid --fp8-param-gather").training["fp8_gather"]
    assert megatron(plain + "--fp8-format hybrid --fp8-recipe blockwise").training["fp8_recipe"] == "blockwise"
    assert megatron(plain + "--fp8-format e4m3 --fp8-recipe mxfp8").training["linear_precision"] == "mxfp8"
    assert megatron(plain + "--fp4-format e2m1").training["linear_precision"] == "nvfp4"
    selective = plain + "--recompute-granularity selective"
    assert megatron(selective).plan.recompute == "selective"
    assert megatron(selective + " --recompute-modules layernorm moe_act").plan.recompute == "selective_ops"
