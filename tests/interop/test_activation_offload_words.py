"""Activations that wait on the host, in the words of the tools that do it, and of those that do not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from exported_plans import subject

from paraplan.api.imported import Tool, import_plan
from paraplan.errors import UnsupportedPlanError
from paraplan.interop.export import TARGETS, export_plan, why_inexpressible
from paraplan.plan.executor import Executor, training_gap
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import TrainingSpec

WITH_WORDS = ("trl", "axolotl", "hf-trainer", "torchtune", "deepspeed")
PURE: dict[str, object] = {"precision": "bf16-pure", "offloads_activations": True}


def test_tools_that_offload_activations_are_told_to() -> None:
    script = export_plan(subject("zero-2", **PURE), "trl", partial=True).text
    assert "--activation_offloading true" in script
    assert yaml.safe_load(export_plan(subject("zero-2", **PURE), "axolotl").text)["activation_offloading"] is True
    assert yaml.safe_load(export_plan(subject("zero-2", **PURE), "torchtune").text)["enable_activation_offloading"]
    mixed = subject("zero-2", **PURE | {"precision": "bf16"})
    section = json.loads(export_plan(mixed, "deepspeed").text)["activation_checkpointing"]
    assert section == {"cpu_checkpointing": True}
    arguments = json.loads(export_plan(subject("zero-2", **PURE), "hf-trainer").text)
    assert arguments["gradient_checkpointing"] is True
    assert arguments["gradient_checkpointing_kwargs"] == {"offload": True}
    assert arguments["fsdp_config"]["activation_checkpointing"] is False
    without = PURE | {"offloads_activations": False}
    assert "activation_offloading" not in export_plan(subject("zero-2", **without), "axolotl").text


@pytest.mark.parametrize("target", ["axolotl", "hf-trainer", "torchtune", "deepspeed"])
def test_tools_that_offload_what_checkpointing_keeps_refuse_it_without(target: str) -> None:
    with pytest.raises(UnsupportedPlanError, match="offloads activations of checkpointed blocks alone"):
        export_plan(subject("zero-3", **PURE), target)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - set(WITH_WORDS)))
def test_what_frees_memory_is_not_left_out_in_silence(target: str) -> None:
    with pytest.raises(UnsupportedPlanError, match=f"no offloads_activations=True for {target}"):
        export_plan(subject("zero-2", **PURE), target, partial=True)


@pytest.mark.parametrize("target", WITH_WORDS)
def test_tools_that_do_it_under_some_plan_are_not_said_to_lack_it(target: str) -> None:
    precision = "bf16-pure" if target == "torchtune" else "bf16"
    training = TrainingSpec(global_batch_size=8, seq_length=128, precision=precision, offloads_activations=True)
    assert training_gap(Executor(target, partial(why_inexpressible, target)), training, 32) is None


def test_the_search_knows_who_has_it() -> None:
    training = TrainingSpec(global_batch_size=8, seq_length=128, offloads_activations=True)
    plan = ParallelPlan(dp=8, zero_stage=2, recompute="full")
    assert "--offload-activations" in (why_inexpressible("megatron-lm", plan, training, 32) or "")
    assert why_inexpressible("accelerate", plan, training, 32) is None


@pytest.mark.parametrize(
    ("text", "tool", "offloads"),
    [
        ("model_name_or_path: m\nactivation_offloading: true\n", "trl", True),
        ("model_name_or_path: m\n", "trl", None),
        ("base_model: m\ngradient_checkpointing: true\nactivation_offloading: true\n", "axolotl", True),
        ("base_model: m\ngradient_checkpointing: offload\n", "axolotl", True),
        ("base_model: m\ngradient_checkpointing: true\n", "axolotl", None),
        ("model_name_or_path: m\ngradient_checkpointing_kwargs: {offload: true}\n", "trl", True),
        ("model_name_or_path: m\nactivation_checkpointing_kwargs: {use_reentrant: false}\n", "trl", None),
        ("base_model: m\ngradient_checkpointing_kwargs: {offload: true}\n", "axolotl", True),
        ("model: m\nactivation_checkpointing_kwargs: {offload: true}\n", "ms-swift", True),
        ("model_name_or_path: m\nstage: sft\nuse_unsloth_gc: true\n", "llama-factory", True),
    ],
)
def test_configurations_that_ask_for_it_are_read_so(tmp_path: Path, text: str, tool: Tool, offloads: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    training = import_plan(path, tool).setup.training
    assert training.get("offloads_activations") is offloads


def test_the_trainers_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    written = subject("zero-2", loss="liger", offloads_activations=True)
    export_plan(written, "hf-trainer").save(path)
    setup = import_plan(path, num_gpus=8).setup
    assert setup.tool == "transformers' Trainer, FSDP"
    assert setup.plan.describe() == written.plan.describe()
    assert (setup.training["offloads_activations"], setup.training["loss"]) == (True, "liger")
    assert not any("not known" in note or "without a place" in note for note in setup.notes)


@pytest.mark.parametrize(("number", "is_told"), [(1, False), (2, True)])
def test_recompute_of_every_second_block_is_told(tmp_path: Path, number: int, is_told: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model_name_or_path: m\ngradient_checkpointing_kwargs: {{every_n_layers: {number}}}\n")
    assert any("every n-th block" in note for note in import_plan(path, "trl").notes) == is_told


@pytest.mark.parametrize(
    ("more", "loss"),
    [
        ("", "cut"),  # since TRL 1.8
        ("loss_type: nll\n", "plain"),
        ("use_liger_kernel: true\n", "liger"),
        ("use_liger_kernel: true\nliger_kernel_config: {fused_linear_cross_entropy: false}\n", "plain"),
        ("precompute_ref_log_probs: true\n", "plain"),  # DPO
    ],
)
def test_trls_loss_is_in_chunks_unless_the_file_says_otherwise(tmp_path: Path, more: str, loss: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model_name_or_path: m\n{more}")
    imported = import_plan(path, "trl")
    assert imported.setup.training["loss"] == loss
    assert any("before TRL 1.8" in note for note in imported.notes) == (loss == "cut")


@pytest.mark.parametrize(("loss", "name"), [("plain", "nll"), ("cut", "chunked_nll")])
def test_trl_is_told_its_loss(loss: str, name: str) -> None:
    assert f"--loss_type {name}\n" in export_plan(subject("zero-2", loss=loss), "trl").text


@pytest.mark.parametrize(("recompute", "offloads"), [(None, True), ("none", None)])
def test_deepspeeds_own_checkpoints_wait_on_the_host(tmp_path: Path, recompute: str | None, offloads: bool) -> None:
    path = tmp_path / "ds.json"
    sizes = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    path.write_text(json.dumps(sizes | {"activation_checkpointing": {"cpu_checkpointing": True}}), encoding="utf-8")
    setup = import_plan(path, "deepspeed", num_gpus=4, recompute=recompute).setup
    assert (setup.plan.recompute, setup.offloads_activations) == (recompute or "full", offloads)
    assert "torch's own checkpoints" in " ".join(setup.notes)


@pytest.mark.parametrize(
    ("text", "tool", "tile"),
    [
        ("base_model: m\nsequence_len: 65536\ntiled_mlp: true\n", "axolotl", 32768),
        ("base_model: m\nsequence_len: 65536\ntiled_mlp: true\ntiled_mlp_num_shards: 16\n", "axolotl", 4096),
        ("base_model: m\nsequence_len: 65536\ntiled_mlp: false\n", "axolotl", None),
        ("model: m\nmax_length: 65536\nuse_tiled_mlp: true\n", "ms-swift", 16384),
    ],
)
def test_mlps_in_tiles_are_read(tmp_path: Path, text: str, tool: Tool, tile: int | None) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    setup = import_plan(path, tool).setup
    assert setup.stack.mlp_tile == tile
    assert "tiled" not in " ".join(setup.notes)


def test_mlps_in_tiles_are_written_for_axolotl_and_told_to_others() -> None:
    tiled = subject("zero-2", **PURE, stack=StackSettings(mlp_tile=32))
    config = yaml.safe_load(export_plan(tiled, "axolotl").text)
    tiles = -(-tiled.training.seq_length // 32) if tiled.training is not None else 0
    assert (config["tiled_mlp"], config["tiled_mlp_num_shards"]) == (True, tiles)
    assert any("mlp_tile=32" in note for note in export_plan(tiled, "torchtune", partial=True).notes)
