"""torchtitan's files, read back: TOML up to v0.2.2, and Python, which is not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exported_plans import PLANS, subject
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.api.imported import import_plan
from paraplan.errors import PlanError
from paraplan.interop.export import export_plan
from paraplan.interop.fields import is_off
from paraplan.interop.known_keys import key_table
from paraplan.interop.recognized import tool_of
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.torchtitan import read_torchtitan

MORE = {
    "replicas of shards": {"dp": 8, "zero_stage": 3, "zero_shards": 4},
    "experts": {"dp": 8, "ep": 4, "zero_stage": 3},
    "pipeline alone": {"pp": 4, "pipeline_schedule": "1f1b", "num_microbatches": 8, "stage_blocks": (9, 8, 8, 7)},
    "gpipe": {"pp": 4, "pipeline_schedule": "gpipe", "num_microbatches": 8},
    "recompute of operations": {"dp": 8, "zero_stage": 2, "recompute": "selective_ops"},
}
REGISTRY = """
from torchtitan.trainer import Trainer

def small() -> Trainer.Config:
    registry = model_registry("8B", moe_comm_backend="hybridep")
    return Trainer.Config(
        model_spec=registry,
        optimizer=default_adamw(lr=1e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 2048, max_context_length=2048),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
    )

def wide() -> Trainer.Config:
    config = small()
    config.parallelism.tensor_parallel_degree = 4
    config.activation_checkpoint = None
    config.override.imports.append("mine")
    return config
"""


def titan(text: str, *, num_gpus: int | None = 8, name: str | None = None) -> Setup:
    return read_torchtitan(text, source="file", given=Given(num_gpus=num_gpus), name=name)


def expressible(target: str) -> list[str]:
    plans = PLANS | MORE
    return [name for name, plan in plans.items() if not export_plan(subject(plan), target, partial=True).gaps]


@pytest.mark.parametrize(
    ("target", "name"),
    [(target, name) for target in ("torchtitan", "torchtitan-python") for name in expressible(target)],
)
def test_an_export_is_read_back_as_the_same_plan(target: str, name: str) -> None:
    made = subject((PLANS | MORE)[name], compiled=True)
    text = export_plan(made, target).text
    assert tool_of(text, "file") == "torchtitan"
    setup = titan(text, num_gpus=made.plan.world_size)
    assert setup.plan == made.plan
    assert (setup.seq_length, setup.precision, setup.optimizer, setup.compiled) == (4096, "bf16", "adamw", True)
    assert setup.notes == ()


def test_most_kinds_of_plans_have_words_in_torchtitan() -> None:
    assert {"ddp", "zero-2", "zero-3", "replicas of shards", "experts"} <= set(expressible("torchtitan"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nseq_len = 1024\n", {"zero_stage": 3, "micro_batch_size": 8, "recompute": "full"}),
        ("[activation_checkpoint]\nmode = 'none'\n", {"recompute": "none"}),
        ("[activation_checkpoint]\nselective_ac_option = 'op'\n", {"recompute": "selective_ops"}),
        ("[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n", {"zero_stage": 0}),
        ("[parallelism]\ndata_parallel_replicate_degree = 2\n", {"zero_shards": 4, "dp": 8}),
        ("[parallelism]\ntensor_parallel_degree = 2\n", {"tp": 2, "dp": 4, "sequence_parallel": True}),
        ("[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 4\n", {"ep": 2}),
        ("[parallelism]\npipeline_parallel_degree = 2\n", {"pp": 2, "zero_stage": 1, "num_microbatches": 8}),
        ("[training]\nglobal_batch_size = 128\n", {"num_microbatches": 2}),
        ("[training]\nenable_cpu_offload = true\n", {"offload": "parameters"}),
    ],
)
def test_what_is_left_out_is_torchtitans_default(text: str, expected: dict[str, object]) -> None:
    plan = titan(text).plan
    assert {key: getattr(plan, key) for key in expected} == expected


def test_a_function_of_a_python_registry_is_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(REGISTRY)
    small, wide = (import_plan(f"{path}:{name}", num_gpus=8).setup for name in ("small", "wide"))
    assert (small.plan.tp, small.plan.micro_batch_size, small.plan.recompute, small.loss) == (2, 4, "full", "chunked")
    assert (wide.plan.tp, wide.plan.recompute, wide.seq_length) == (4, "none", 2048)
    assert small.stack.text == "dispatcher=hybridep,etp=2,cuda_graphs=full"
    assert any("config.override.imports.append" in note for note in wide.notes)
    with pytest.raises(PlanError, match="has 2 configurations, and one is read") as caught:
        import_plan(path, num_gpus=8)
    assert caught.value.hint is not None
    assert "config_registry.py:small" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training\nseq_len = 1\n[parallelism]\n", "is not TOML"),
        ("[training]\nseq_len = 0\n", "training.seq_len: expected a whole number above 0, found 0"),
        ("[parallelism]\ndata_parallel_shard_degree = 3\n", "are not the 8 data-parallel ranks"),
        ("[parallelism]\ndata_parallel_shard_degree = 0\n", "-1 or a whole number above 0"),
        ("[parallelism]\nfsdp_reshard_after_forward = 'often'\n", "default, always or never"),
        ("[activation_checkpoint]\nmode = 'some'\n", "none, selective, full or memory_budget"),
        ("[training]\ndtype = 'float64'\n", "bfloat16 or float32"),
        ("[training]\nglobal_batch_size = 12\n", "a global batch of 12"),
        ("def a() -> Trainer.Config:\n    return other()\n", "returns no Trainer.Config"),
        ("def a( -> Trainer.Config:\n", "is not Python"),
        ("x = Trainer.Config()\n", "has 0 configurations"),
        ("[model]\nname = 'flux'\n[training]\n", "a model that makes pictures, which is not priced"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        titan(text)


PLAIN = "[training]\nseq_len = 64\n[activation_checkpoint]\nmode = 'none'\n"
TOML = "[training]\nseq_len = 1024\n[parallelism]\ntensor_parallel_degree = 2\n"


@pytest.mark.parametrize(
    ("script", "plan", "length"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2 -m torchtitan.train --job.config_file mine.toml\n", "dp4 x tp2", 1024),
        (
            "NGPU=4 CONFIG_FILE=./mine.toml \\\n./run_train.sh --parallelism.tensor_parallel_degree=4 "
            "--training.seq_len 256 --compile.enable\n",
            "tp4",
            256,
        ),
        ("NGPU=4\nMODULE=mine CONFIG=small ./run_train.sh --parallelism.tensor_parallel_degree 4\n", "tp4", 2048),
        ("MODULE=mine CONFIG=wide ./run_train.sh\n", "dp2 x tp4", 2048),
    ],
)
def test_a_command_names_a_configuration_and_sets_keys_beside_it(
    tmp_path: Path, script: str, plan: str, length: int
) -> None:
    (tmp_path / "mine.toml").write_text(TOML)
    registry = tmp_path / "torchtitan" / "models" / "mine" / "config_registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(REGISTRY)
    (tmp_path / "train.sh").write_text(script)
    setup = import_plan(tmp_path / "train.sh").setup
    assert setup.plan.describe().startswith(plan + ",")
    assert (setup.seq_length, setup.says_gpus) == (length, True)
    assert setup.compiled == ("compile" in script)
    if "compile" in script:
        assert setup.stack.text == "compiled_loss=true"


def test_a_command_whose_configuration_is_not_beside_it_is_refused_with_what_to_give(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("MODULE=llama3 CONFIG=llama3_8b ./run_train.sh\n")
    with pytest.raises(PlanError, match=r"llama3_8b of llama3, whose config_registry\.py is not beside") as caught:
        import_plan(path)
    assert "torchtitan/models/llama3/config_registry.py:llama3_8b" in str(caught.value.hint)
    path.write_text("./run_train.sh --training.no_such_key 3 --job.config_file a.toml\n")
    (tmp_path / "a.toml").write_text(TOML)
    assert any("training.no_such_key" in note for note in import_plan(path).notes)


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("[compile]\nenable = true\n", "compiled_loss=true"),
        ("[compile]\nenable = true\ncomponents = ['model']\n", ""),
        (
            "[parallelism]\nenable_async_tensor_parallel = true\n[compile]\nenable = true\ncomponents = []\n",
            "overlaps_products=true",
        ),
        ("[parallelism]\nexpert_parallel_degree = 2\nexpert_parallel_comm_backend = 'deepep'\n", "dispatcher=deepep"),
        ("[parallelism]\nexpert_parallel_degree = 1\ntensor_parallel_degree = 2\n", "etp=2"),
        ("[model]\nname = 'deepseek_v3'\n[parallelism]\ntensor_parallel_degree = 2\n", "etp=2"),
        ("[model]\nname = 'llama3'\n[parallelism]\ntensor_parallel_degree = 2\n", ""),
        (
            "[parallelism]\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2\n"
            "expert_tensor_parallel_degree = 2\n",
            "etp=2",
        ),
        ("[optimizer]\nimplementation = 'for-loop'\n", "optimizer_step=for_loop"),
        ("[optimizer]\nearly_step_in_backward = true\n", "steps_in_backward=true"),
        ("[debug]\ndeterministic = true\n", "deterministic=true"),
    ],
)
def test_keys_of_the_software_are_settings_of_the_stack(text: str, stack: str) -> None:
    setup = titan(PLAIN + text)
    assert (setup.stack.text, setup.notes) == (stack, ())


CONVERTERS = """
def mine() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B", converters=[{converter}]), training=TrainingConfig())
"""


@pytest.mark.parametrize(
    ("converter", "precision", "recipe", "note"),
    [
        ("Float8LinearConverter.Config()", "fp8", "rowwise", None),
        ("Float8LinearConverter.Config(recipe_name='rowwise_with_gw_hp')", "fp8", "rowwise_with_gw_hp", None),
        ("NVFP4LinearConverter.Config(fqns=some)", "nvfp4", None, "converters with fqns, which name some layers"),
        ("MXFP8LinearConverter.Config()", "mxfp8", None, None),
        ("Float8GroupedExpertsConverter.Config()", None, None, "grouped products of experts"),
    ],
)
def test_converters_of_python_say_what_linear_layers_multiply_in(
    converter: str, precision: str, recipe: str, note: str | None
) -> None:
    setup = titan(CONVERTERS.format(converter=converter))
    assert (setup.linear_precision, setup.fp8_recipe) == (precision, recipe)
    assert [found.startswith(note or "-") for found in setup.notes] == ([] if note is None else [True])


def test_cuda_graphs_are_those_of_releases_that_count_tokens() -> None:
    text = "def a() -> Trainer.Config:\n    return Trainer.Config(training=TrainingConfig({words}))\n"
    assert titan(text.format(words="")).stack.cuda_graphs == "full"
    assert titan(text.format(words="disable_cuda_graphs=True")).stack.cuda_graphs is None
    assert titan(text.format(words="seq_len=64")).stack.cuda_graphs is None


def test_toml_has_mixed_precision_beside_tp_under_fsdp_alone() -> None:
    tensor = PLAIN + "[parallelism]\ntensor_parallel_degree = 8\n"
    alone = titan(tensor + "[model]\nconverters = ['float8']\n")
    assert (alone.precision, alone.linear_precision) == ("fp32", None)
    assert [note.partition(":")[0] for note in alone.notes] == [
        "torchtitan up to v0.2.2 has mixed precision beside tp and pp under FSDP alone",
        "products in fp8 beside float32",
    ]
    assert titan(tensor, num_gpus=16).precision == "bf16"
    assert titan(PLAIN, num_gpus=1).precision == "bf16"


VALUES = st.one_of(st.integers(2, 9), st.just(True), st.sampled_from(["some", "words"]))
KEYS = sorted(key for key in key_table("torchtitan").known if key.count(".") == 1 and "()" not in key)


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from([*KEYS, "training.no_such_key", "no_such.section"]), VALUES, max_size=6))
def test_a_key_is_read_or_without_effect_or_in_a_note(values: dict[str, object]) -> None:
    table = key_table("torchtitan")
    sections: dict[str, dict[str, object]] = {"training": {}}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    text = "".join(
        f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items())
        for section, keys in sections.items()
    )
    try:
        notes = "\n".join(titan(text).notes)
    except PlanError:
        return
    silent = {key for keys in table.without_effect.values() for key in keys}
    for key, value in values.items():
        named = {key, key.partition(".")[0]}
        if not named & (silent | set(table.read)) and not is_off(value) and value not in table.neutral.get(key, ()):
            assert key in notes, (key, notes)


def test_a_configuration_that_traces_one_of_another_file_begins_with_that(tmp_path: Path) -> None:
    registry = tmp_path / "torchtitan" / "models" / "llama9" / "config_registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(
        "def llama9_1b() -> Trainer.Config:\n"
        "    return Trainer.Config(training=TrainingConfig(local_batch_size=3, seq_len=128),"
        " compile=CompileConfig(enable=False))\n"
    )
    traced = tmp_path / "torchtitan" / "experiments" / "graph_trainer" / "config_registry.py"
    traced.parent.mkdir(parents=True)
    traced.write_text(
        "from torchtitan.models.llama9.config_registry import llama9_1b\n\n\n"
        "def traced_1b() -> GraphTrainer.Config:\n"
        "    config = to_graph_trainer_config(llama9_1b(), model_registry)\n"
        "    config.compile = GraphTrainerCompileConfig(enable=True)\n"
        "    return config\n"
    )
    setup = import_plan(f"{traced}:traced_1b", num_gpus=2).setup
    assert (setup.plan.micro_batch_size, setup.seq_length, setup.compiled) == (3, 128, True)
    assert any("graph_trainer" in note for note in setup.notes)
    registry.unlink()
    with pytest.raises(PlanError, match="config_registry"):
        import_plan(f"{traced}:traced_1b", num_gpus=2)


def test_converters_of_adapters_are_read_and_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(
        "def lora_1b() -> Trainer.Config:\n"
        "    return Trainer.Config(model_spec=model_registry('1B', converters=["
        "LoRAConverter.Config(rank=4, target_modules=['wq', 'wkv']), SparseConverter.Config()]))\n"
    )
    setup = import_plan(path, num_gpus=1).setup
    assert setup.train == "lora:r=4,targets=q_proj|k_proj|v_proj"
    assert any("converters sparseconverter: not known" in note.lower() for note in setup.notes)


def test_a_stage_of_the_embedding_or_the_output_alone_is_read_and_written_back() -> None:
    parts = [["tok_embeddings"], ["layers.0", "layers.1"], ["layers.2"], ["norm", "output"]]
    text = f"""
[training]
local_batch_size = 4
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "1F1B"
module_fqns_per_model_part = {json.dumps(parts)}
"""
    plan = titan(text, num_gpus=4).plan
    assert plan.stage_blocks == (0, 2, 1, 0)
    values = plan.model_dump() | {"rank_order": PLANS["fsdp and tp"].get("rank_order", plan.rank_order)}
    written = export_plan(subject(values), "torchtitan", partial=True).text
    assert '["tok_embeddings"]' in written
    assert titan(written, num_gpus=4).plan.stage_blocks == plan.stage_blocks
