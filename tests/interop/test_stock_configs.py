"""Configurations that come with tools, named by scripts on machines that do not have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.api.imported import import_plan
from paraplan.errors import PlanError
from paraplan.interop.stock_configs import StockConfig, stock_config
from paraplan.resources import profiles_folder

FILES = [
    StockConfig.model_validate(one)
    for one in json.loads((profiles_folder() / "stock_configs.json").read_text(encoding="utf-8"))["files"]
]
FACTORY = "stage: sft\nmodel_name_or_path: m\nper_device_train_batch_size: 1\nfinetuning_type: full\n"


@pytest.mark.parametrize("stock", FILES, ids=lambda one: f"{one.tool} {one.name}")
def test_every_stock_file_is_read_by_its_tool_and_said(stock: StockConfig, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    key = "deepspeed" if stock.name.endswith(".json") else "accelerate_config"
    texts = {
        "LLaMA-Factory": FACTORY,
        "axolotl": "base_model: m\nmicro_batch_size: 1\n",
        "TRL": "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 1\n",
    }
    if stock.tool == "LLaMA-Factory" and key == "accelerate_config":  # named by accelerate launch, before its command
        path = tmp_path / "train.sh"
        path.write_text(
            f"accelerate launch --config_file {stock.folder}/{stock.name} src/train.py train.yaml\n", encoding="utf-8"
        )
        (tmp_path / "train.yaml").write_text(FACTORY, encoding="utf-8")
    else:
        path.write_text(f"{texts[stock.tool]}{key}: examples/{stock.folder}/{stock.name}\n", encoding="utf-8")
    imported = import_plan(path, num_gpus=8)
    assert any(stock.note == note for note in imported.notes)
    zero = stock.content.get("zero_optimization", {})
    assert isinstance(zero, dict)
    stage = zero.get("stage")
    assert stage is None or imported.plan.zero_stage == stage
    assert (imported.plan.offload == "parameters") is ("offload_param" in zero or "offload" in stock.name) or stage == 2


def test_a_file_on_this_machine_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "deepspeed"
    folder.mkdir(parents=True)
    config = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    (folder / "ds_z3_config.json").write_text(json.dumps(config))
    path = tmp_path / "train.yaml"
    path.write_text(f"{FACTORY}deepspeed: examples/deepspeed/ds_z3_config.json\n")
    imported = import_plan(path, num_gpus=8)
    assert imported.plan.zero_stage == 1
    assert not any("on this machine" in note for note in imported.notes)


@pytest.mark.parametrize("name", ["examples/deepspeed/mine.json", "elsewhere/ds_z3_config.json", "zero3.json"])
def test_a_file_that_no_tool_brings_is_asked_for_where_it_is_named(name: str, tmp_path: Path) -> None:
    assert stock_config(name) is None
    path = tmp_path / "train.yaml"
    path.write_text(f"{FACTORY}deepspeed: {name}\n")
    with pytest.raises(PlanError, match="No such file") as caught:
        import_plan(path, num_gpus=8)
    assert f"it is named in {path}" in str(caught.value.hint)
