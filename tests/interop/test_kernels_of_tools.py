"""Liger's kernels and products in 8 bits, read and written in the words of each tool."""

from __future__ import annotations

import json
from typing import Any

import pytest
from exported_plans import subject

from paraplan.api.imported import ImportedPlan
from paraplan.interop.export import export_plan
from paraplan.model.reader import read_model
from paraplan.plan.stack import StackSettings

TRL = "model_name_or_path: m\nuse_peft: true\ndataset_name: d\n"
FACTORY = "model_name_or_path: m\ndo_train: true\nbf16: true\n"
SWIFT = "model: m\ntuner_type: lora\nmax_length: 64\n"
AXOLOTL = "base_model: m\nsequence_len: 64\nplugins: [axolotl.integrations.liger.LigerPlugin]\n"
ACCELERATE = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\nmixed_precision: fp8\n"
NORMS_AND_MLPS = "liger_rms_norm: true\nliger_glu_activation: true\n"


@pytest.mark.parametrize(
    ("text", "loss", "kernels"),
    [
        (TRL + "use_liger_kernel: true\n", "liger", "liger"),
        (TRL + "use_liger_kernel: true\nliger_kernel_config: {fused_linear_cross_entropy: false}\n", "plain", "liger"),
        (TRL + "use_liger_kernel: true\nliger_kernel_config: {rms_norm: false, swiglu: false}\n", "liger", None),
        (SWIFT + "use_liger_kernel: true\n", "liger", "liger"),
        (FACTORY + "stage: sft\nenable_liger_kernel: true\n", "liger", "liger"),
        # Trainers that read logits have its other kernels alone.
        (FACTORY + "stage: dpo\nenable_liger_kernel: true\n", "plain", "liger"),
        (AXOLOTL + "liger_fused_linear_cross_entropy: true\n", "liger", None),
        (AXOLOTL + NORMS_AND_MLPS, "plain", "liger"),
        (AXOLOTL + NORMS_AND_MLPS + "liger_fused_linear_cross_entropy: true\nliger_rope: true\n", "liger", "liger"),
    ],
)
def test_liger_is_what_a_tool_switches_on(read: Any, text: str, loss: str, kernels: str | None) -> None:
    setup = read(text, num_gpus=1)
    assert (setup.loss or "plain", setup.stack.fused_kernels) == (loss, kernels)


@pytest.mark.parametrize(
    ("text", "model", "loss", "kernels"),
    [
        (TRL + "use_liger_kernel: true\n", "qwen3-8b", "liger", "liger"),
        (TRL + "use_liger_kernel: true\n", "qwen3.5-27b", "liger", "liger"),
        (TRL + "use_liger_kernel: true\n", "minimax-m2", "plain", None),
        (TRL + "use_liger_kernel: true\nloss_type: sigmoid\n", "minimax-m2", "liger", "liger"),
        (FACTORY + "stage: sft\nenable_liger_kernel: true\n", "smollm3-3b", "plain", None),
        (SWIFT + "use_liger_kernel: true\n", "smollm3-3b", "liger", "liger"),
        (AXOLOTL + NORMS_AND_MLPS + "liger_fused_linear_cross_entropy: true\n", "minimax-m2", "liger", None),
    ],
)
def test_families_without_ligers_kernels_train_without(
    read: Any, text: str, model: str, loss: str, kernels: str | None
) -> None:
    setup = ImportedPlan(read(text, num_gpus=1)).for_model(read_model(model)).setup
    assert (setup.loss, setup.stack.fused_kernels) == (loss, kernels)
    assert any(f"Liger has no kernels for {read_model(model).model_type}" in note for note in setup.notes) == (
        kernels is None
    )


def test_a_part_of_ligers_kernels_is_told(read: Any) -> None:
    setup = read(AXOLOTL + "liger_rms_norm: true\n", num_gpus=1)
    assert (setup.stack.fused_kernels, setup.notes) == (
        None,
        ("Liger's kernels for norms alone: priced without them",),
    )


@pytest.mark.parametrize(
    ("text", "precision", "recipe", "gathers"),
    [
        (ACCELERATE, "fp8", "tensorwise", True),
        (ACCELERATE + "fp8_config: {backend: AO, enable_fsdp_float8_all_gather: false}\n", "fp8", "tensorwise", None),
        (ACCELERATE + "fp8_config: {backend: TE}\n", "fp8", "delayed", None),
        (ACCELERATE + "fp8_config: {backend: TE, use_mxfp8_block_scaling: true}\n", "mxfp8", None, None),
        (
            AXOLOTL + "fp8: true\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n",
            *("fp8", "tensorwise", None),
        ),
        (
            AXOLOTL + "fp8: true\nfp8_enable_fsdp_float8_all_gather: true\nfsdp_version: 2\nfsdp_config: {a: 1}\n",
            *("fp8", "tensorwise", True),
        ),
        (AXOLOTL + "fp8: true\nfp8_enable_fsdp_float8_all_gather: true\n", "fp8", "tensorwise", None),
        (FACTORY + "stage: sft\nfp8: true\n", "fp8", "rowwise", None),
        (FACTORY + "stage: sft\nfp8: true\nfp8_backend: te\n", "fp8", "delayed", None),
    ],
)
def test_products_in_8_bits_have_the_scales_of_the_tool(
    read: Any, text: str, precision: str, recipe: str | None, gathers: bool | None
) -> None:
    setup = read(text, num_gpus=2)
    assert (setup.linear_precision, setup.fp8_recipe, setup.fp8_gather) == (precision, recipe, gathers)
    assert not any("priced as bf16" in note for note in setup.notes)


@pytest.mark.parametrize("kernels", [None, "liger"])
@pytest.mark.parametrize("loss", ["plain", "liger"])
def test_ligers_loss_and_kernels_are_written_each_by_itself(read: Any, loss: str, kernels: str | None) -> None:
    plan = subject("zero-3", loss=loss, stack=StackSettings.model_validate({"fused_kernels": kernels}))
    axolotl = export_plan(plan, "axolotl")
    found = read(axolotl.text, num_gpus=8)
    assert (found.loss, found.stack.fused_kernels) == (loss, kernels)
    arguments = json.loads(export_plan(plan, "hf-trainer").text)
    liger = {key: value for key, value in arguments.items() if "liger" in key}
    trl = export_plan(plan, "trl").text
    keys = liger | ({"loss_type": "nll"} if loss == "plain" else {})
    setup = read(TRL + "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()), num_gpus=1)
    assert (setup.loss, setup.stack.fused_kernels) == (loss, kernels)
    assert ("use_liger_kernel" in trl, "liger_kernel_config" in trl) == (bool(liger), "liger_kernel_config" in liger)
    assert not any("fused_kernels" in note for note in axolotl.notes)


@pytest.mark.parametrize("gathers", [True, False])
def test_axolotl_and_accelerate_are_told_of_8_bits(read: Any, gathers: bool) -> None:
    plan = subject("zero-3", linear_precision="fp8", fp8_recipe="tensorwise", fp8_gather=gathers)
    for target in ("axolotl", "accelerate"):
        written = export_plan(plan, target)
        setup = read(written.text, num_gpus=8, micro_batch_size=2, global_batch_size=64)
        assert (setup.linear_precision, setup.fp8_recipe, bool(setup.fp8_gather)) == ("fp8", "tensorwise", gathers)
        assert not any("linear layers in fp8" in note for note in written.notes)
