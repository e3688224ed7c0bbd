"""Framework profiles: names and aliases, inheritance, sources, and files of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paraplan.api.executors import executor_of
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import GROUPS, FrameworkCatalog, load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError, ProfileError
from paraplan.plan.executor import training_gap
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import ENGINE_SETTINGS, StackSettings

MakeWorkload = Callable[..., Workload]
CATALOG = FrameworkCatalog()
NAMES, MEASURED = CATALOG.names(), CATALOG.measured_names()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NeMo / Megatron-Core", "megatron-core"),
        ("llm.c (CUDA)", "llm-c"),
        ("PyTorch DDP, NVIDIA DLE run_squad.py", "nvidia-examples"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("torchtitan (FSDP2)", "torchtitan"),
        ("DeepSpeed ZeRO-3 (Megatron-DeepSpeed)", "deepspeed-zero-megatron"),
        ("Megatron-LM 23e00ed + TE 2.11", "megatron-lm-te"),
        ("torchtune FSDP", "torchtune"),
        ("PaddlePaddle 2.5.1 (PaddleNLP)", "paddlenlp"),
        ("FlagScale (Megatron-LM)", "flagscale"),
        ("paraplan", "paraplan"),
        ("nanotron v0.5", "nanotron"),
        ("Hugging Face Trainer", "huggingface-trainer"),
        ("LLaMA-Factory", "huggingface-trainer"),
        ("LLaMA-Factory (DeepSpeed ZeRO-3)", "deepspeed-zero"),
        ("ms-swift, FSDP2", "fsdp"),
        ("HF Trainer (DDP)", "huggingface-trainer"),
        ("GPT-NeoX", "megatron-deepspeed"),
    ],
)
def test_the_longest_alias_whose_words_a_text_has_names_the_framework(text: str, name: str) -> None:
    found = FrameworkCatalog().find(text)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("name", ["megatron", "Megatron-LM", "megatron-core"])
def test_plans_are_made_for_what_megatron_lm_is_today_and_tables_may_mean_what_it_was(name: str) -> None:
    assert load_framework(name).name == "megatron-core"
    assert CATALOG.find(f"NVIDIA's {name}") == CATALOG.bundled(
        "megatron-core" if name.endswith("core") else "megatron-lm"
    )


@pytest.mark.parametrize("framework", ["something new", "papaxos", "vfsdpx", "megatron_core", "megatron-cor", ""])
def test_an_unknown_framework_is_an_error_and_not_paraplans_runtime(framework: str) -> None:
    with pytest.raises(ProfileError, match="there is no framework") as refused:
        load_framework(framework)
    assert refused.value.hint


def test_where_no_name_is_near_the_profiles_are_listed_and_not_every_alias() -> None:
    with pytest.raises(ProfileError) as refused:
        load_framework("nosuch")
    assert refused.value.hint == f"known: {', '.join(FrameworkCatalog().names())}"


@pytest.mark.parametrize("name", [*NAMES, *MEASURED])
def test_every_value_of_a_framework_has_a_source(name: str) -> None:
    profile = CATALOG.find(name) if name in MEASURED else CATALOG.load(name)
    assert profile is not None
    assert profile.name == name
    for group_name in GROUPS:
        group = getattr(profile, group_name)
        named = {field for source in group.sources for field in source.fields}
        assert named <= set(type(group).model_fields)
        named |= {field for field in group.model_fields_set if hasattr(getattr(group, field), "source")}  # has its own
        covers_all = any(not source.fields for source in group.sources)
        assert covers_all or group.model_fields_set - {"sources"} <= named, f"{group_name} has values without a source"


def test_megatron_fsdp_keeps_and_sends_gradients_in_16_bits(workload: MakeWorkload) -> None:
    made = replace(workload("llama-3-8b", seq_length=4096), framework=load_framework("megatron-core"))
    wide = replace(made, framework=made.framework.changed(storage={"sharded_gradient_bytes": None}))
    for stage, halves in ((1, False), (2, True), (3, True)):
        plan = ParallelPlan(dp=8, zero_stage=stage, num_microbatches=8)
        narrow_memory, wide_memory = (evaluate_plan(one, plan).memory[0].gradient_bytes for one in (made, wide))
        assert narrow_memory == wide_memory / (2 if halves else 1)
        narrow, whole = (evaluate_plan(one, plan).step for one in (made, wide))
        assert (narrow.data_parallel_wire_s < whole.data_parallel_wire_s) == halves
    fp32 = [replace(one, training=one.training.replace(precision="fp32")) for one in (made, wide)]
    assert len({evaluate_plan(one, plan).peak_memory_bytes for one in fp32}) == 1


@pytest.mark.parametrize("name", sorted({*MEASURED} - {"megatron-lm"}))
def test_nothing_is_planned_for_frameworks_of_tables_alone(name: str) -> None:
    with pytest.raises(ProfileError, match="there is no framework") as refused:
        load_framework(name)
    assert name not in (refused.value.hint or "")


def test_every_alias_names_one_framework() -> None:
    aliases = [alias for name in NAMES for alias in (name, *load_framework(name).aliases)]
    # In tables of runs "transformers" is the Trainer from before it sharded by itself; asked for, it is what it is now.
    assert sorted(aliases) == sorted([*set(aliases), "transformers"])
    found = FrameworkCatalog().find("transformers + Accelerate")
    assert found is not None
    assert (found.name, load_framework("transformers").name) == ("huggingface-trainer", "transformers")


def test_a_file_of_the_user_is_based_on_a_bundled_framework(tmp_path: Path) -> None:
    own = {"source": "measured here", "source_kind": "measured"}
    content = {
        "name": "mine",
        "title": "My trainer",
        "based_on": "fsdp",
        "storage": {"gradient_bytes": 2, "sources": [own]},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    mine, fsdp = load_framework(str(path)), load_framework("fsdp")
    assert (mine.storage.gradient_bytes, mine.storage.weight_bytes) == (2, fsdp.storage.weight_bytes)
    assert mine.storage.sources[0].source == "measured here"
    assert mine.kernels == fsdp.kernels


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"name": "a", "title": "A", "based_on": "fsdq"}, "based_on: there is no framework 'fsdq'"),
        ({"name": "a", "title": "A", "based_on": "own"}, "based_on: profiles are based on each other"),
        ({"name": "a", "title": "A", "based_on": "fsdp", "storage": {"gradient_byte": 2}}, "storage.gradient_byte"),
        ({"name": "a", "title": "A"}, "storage: is missing"),
    ],
)
def test_a_file_at_fault_is_an_error_that_names_the_field(
    tmp_path: Path, content: dict[str, object], words: str
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=words):
        load_framework(str(path))


def test_compiled_blocks_are_fused_and_all_else_stays() -> None:
    plain = load_framework("paraplan")
    compiled = plain.compiled()
    assert compiled.kernels.fused
    assert compiled.kernels.traffic_per_saved_byte < plain.kernels.traffic_per_saved_byte
    assert isinstance(compiled, FrameworkProfile)
    assert compiled.changed(kernels=plain.kernels.model_dump()) == plain


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("axolotl", "yes"),
        ("axolotl fsdp", "yes"),
        ("llama-factory", "several_processes"),
        ("trl", "no"),
        ("fsdp", "no"),
    ],
)
def test_tools_that_have_the_allocator_grow_its_segments_do_so_whatever_shards_beneath(name: str, grows: str) -> None:
    assert load_framework(name).storage.expandable_segments == grows
    assert load_framework("torchtitan").storage.expandable_segments == "yes"


def test_a_framework_may_switch_settings_on_that_nobody_names(workload: MakeWorkload) -> None:
    plain = workload()
    training = plain.training.replace(train="lora:r=8")
    made = Workload.of(plain.model, training, plain.cluster, framework="unsloth")
    assert (made.training.loss, made.training.offloads_activations) == ("liger", True)
    assert made.training.stack.fused_kernels == "unsloth"
    assert made.recomputes == ("full",)
    cut = Workload.of(plain.model, training.replace(loss="cut"), plain.cluster, framework="unsloth")
    assert cut.training.loss == "cut"
    assert made.framework.fixed.lacking(ParallelPlan(dp=4)) is None
    assert made.framework.fixed.lacking(ParallelPlan(tp=2)) == "tp: it has dp alone"


ENGINE_VALUES = {"dispatcher": "deepep", "etp": 1, "cuda_graphs": "full"}


@pytest.mark.parametrize("name", sorted(ENGINE_SETTINGS))
def test_a_setting_that_a_framework_lacks_is_refused_by_name(name: str, workload: MakeWorkload) -> None:
    plain = workload()
    stack = StackSettings.model_validate({name: ENGINE_VALUES.get(name, True)})
    for framework in map(CATALOG.load, NAMES):
        told = Workload.of(plain.model, plain.training.replace(stack=stack), plain.cluster, framework=framework.name)
        if framework.is_own_runtime:
            assert training_gap(executor_of(told), told.training, 4)
        elif name in framework.levers.engine_settings:
            assert training_gap(executor_of(told), told.training, 4) is None
        else:
            with pytest.raises(PlanError, match=f"--stack {name}="):
                executor_of(told)
    assert name in load_framework("megatron-core").levers.engine_settings
    assert name not in load_framework("fsdp").levers.engine_settings


@pytest.mark.parametrize("train", ["full", "lora:r=16"])
def test_shards_of_the_trainer_are_fsdps_and_its_replicas_run_under_autocast(
    workload: MakeWorkload, train: str
) -> None:
    made = workload("qwen3-8b", profile="dgx-h100", seq_length=4096, global_batch_size=16, train=train)
    fsdp, trainer = load_framework("fsdp"), load_framework("hf-trainer")
    alike = trainer.replace(kernels=fsdp.kernels, loss=fsdp.loss)
    both = [replace(made, framework=one, plain_framework=None).trained_as(made.training) for one in (alike, fsdp)]
    for stage in (2, 3):
        plan = ParallelPlan(dp=8, zero_stage=stage, num_microbatches=2, recompute="full")
        first, second = (evaluate_plan(one, plan) for one in both)
        assert first.peak_memory_bytes == second.peak_memory_bytes
        assert first.step.step_time_s == second.step.step_time_s
    copied, other = (evaluate_plan(one, ParallelPlan(dp=8, num_microbatches=2)).peak_memory_bytes for one in both)
    assert copied > other
