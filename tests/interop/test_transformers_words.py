"""Scripts of transformers' own parallelism: what is written for a plan, what is read of a script, what is refused."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from exported_plans import subject

from paraplan.api.imported import import_plan
from paraplan.errors import PlanError
from paraplan.interop.export import export_plan
from paraplan.interop.setup import Setup

EXPERTS = {"dp": 4, "tp": 2, "ep": 2, "zero_stage": 3, "num_microbatches": 2, "recompute": "full"}


def words_of(plan: dict[str, object], **training: object) -> dict[str, object]:
    """Return the arguments of the `DistributedConfig` that is written for a plan."""
    tree = ast.parse(export_plan(subject(plan, **training), "transformers").text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "DistributedConfig":
            return {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    return {}


def test_degrees_are_written_as_sizes() -> None:
    assert words_of(EXPERTS) == {"fsdp_size": 4, "tp_size": 2, "ep_size": 4, "fsdp_mixed_precision": True}
    hybrid = {"dp": 8, "zero_stage": 3, "zero_shards": 4}
    assert words_of(hybrid, precision="bf16-pure") == {"fsdp_size": 4, "dp_replicate_size": 2}
    assert words_of({"dp": 4, "tp": 2}, precision="fp32") == {"dp_replicate_size": 4, "tp_size": 2}
    assert words_of({"dp": 4}) == words_of({}) == {}


def test_a_mixtures_experts_are_whole_beside_tp() -> None:
    made = subject({"dp": 2, "tp": 4, "zero_stage": 3})
    assert made.file.model is not None
    mixture = made.file.replace(model=made.file.model.replace(num_experts=8))
    text = export_plan(made.model_copy(update={"file": mixture}), "transformers").text
    assert "    ep_size=4,\n" in text
    assert "ep_size" not in export_plan(made, "transformers").text


@pytest.mark.parametrize(
    ("plan", "training", "part"),
    [
        ({"pp": 2, "pipeline_schedule": "1f1b", "num_microbatches": 2}, {}, "pp=2"),
        ({"cp": 2}, {}, "cp=2"),
        ({"dp": 2, "zero_stage": 2}, {}, "zero_stage=2"),
        ({"dp": 4, "ep": 4}, {}, "ep=4"),
        ({"tp": 2, "sequence_parallel": True}, {}, "sequence_parallel=True"),
        ({"dp": 2, "zero_stage": 3, "recompute": "selective"}, {}, "recompute=selective"),
        ({"dp": 2, "zero_stage": 3, "offload": "optimizer"}, {}, "offload=optimizer"),
        ({"dp": 2}, {"precision": "fp16"}, "precision=fp16"),
        ({"dp": 2}, {"optimizer": "adamw_8bit"}, "optimizer=adamw_8bit"),
        ({"dp": 2}, {"loss": "liger"}, "loss=liger"),
        ({"dp": 2}, {"compiled": True}, "compiled"),
        ({"tp": 2}, {"train": "lora:r=8"}, "tp=2"),
        ({"dp": 2, "zero_stage": 3}, {"train": "lora:r=8", "base_weights": "nf4"}, "base_weights=nf4"),
        ({"dp": 2}, {"train": "lora:r=8", "base_weights": "int8"}, "base_weights=int8"),
    ],
)
def test_what_it_has_no_words_for_is_a_gap(plan: dict[str, object], training: dict[str, object], part: str) -> None:
    exported = export_plan(subject(plan, **training), "transformers", partial=True)
    assert [gap.part for gap in exported.gaps] == [part]


def test_adapters_are_written_with_what_keeps_them_equal_on_all_ranks() -> None:
    made = subject({"dp": 4, "zero_stage": 3}, train="lora:r=16,targets=q_proj|v_proj", base_weights="bf16")
    text = export_plan(made, "transformers").text
    assert "LoraConfig(\n    r=16,\n    lora_alpha=32,\n" in text
    assert "dist.all_reduce(parameter.grad)" in text
    assert "dtype=torch.bfloat16" in text
    compile(text, "train.py", "exec")


@pytest.mark.parametrize("weights", ["nf4", "nf4:double"])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_base_in_4_bits_is_written_for_replicas_and_read_again(tmp_path: Path, weights: str, dp: int) -> None:
    exported = export_plan(subject({"dp": dp}, train="lora:r=16", base_weights=weights), "transformers")
    assert not exported.gaps
    compile(exported.text, "train.py", "exec")
    path = tmp_path / "train.py"
    path.write_text(exported.text, encoding="utf-8")
    setup = import_plan(path, num_gpus=dp).setup
    assert (setup.base_weights, setup.train, setup.plan.dp) == (weights, "lora:r=16", dp)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return what reads a script that loads a model with the words of a `DistributedConfig`."""

    def read_script(words: str, beside: str = "", **given: Any) -> Setup:
        path = tmp_path / "train.py"
        path.write_text(
            "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
            "from transformers.distributed import DistributedConfig\n"
            f"{beside}\n"
            f'm = AutoModelForCausalLM.from_pretrained("a/b", dtype="bfloat16", distributed_config={words})\n',
            encoding="utf-8",
        )
        return import_plan(path, **given).setup

    return read_script


def test_a_script_is_read_and_not_run(read: Any, tmp_path: Path) -> None:
    beside = (
        f'open({str(tmp_path / "ran")!r}, "w")\nN, more = 8, {{"gradient_accumulation_steps": 4}}\nR = 2\n'
        'args = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, optim="adamw_torch", **dict(seed=1))'
    )
    setup = read("DistributedConfig(fsdp_size=4, ep_size=4, dp_replicate_size=R)", beside)
    assert not (tmp_path / "ran").exists()
    plan = setup.plan
    assert (plan.dp, plan.ep, plan.zero_stage, plan.micro_batch_size) == (8, 4, 3, 2)
    assert (setup.precision, setup.optimizer, setup.model_name) == ("bf16-pure", "adamw_foreach", "a/b")
    assert any("dp_replicate_size 2 beside ep_size: priced as sharded over all" in note for note in setup.notes)


def test_replicas_without_experts_are_hybrid_sharding(read: Any) -> None:
    plan = read("DistributedConfig(fsdp_size=4, dp_replicate_size=2)").plan
    assert (plan.dp, plan.zero_shards) == (8, 4)


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        ("DistributedConfig(fsdp_size=int(n))", {}, "DistributedConfig.fsdp_size=int(n) is computed by the script"),
        ("DistributedConfig(pp_size=2)", {}, "pp_size=2: transformers' pipeline generates text"),
        ("DistributedConfig(fsdp_size=4, ep_size=3)", {}, "ep_size=3 has to be a multiple of tp_size=1 and to divide"),
        ("DistributedConfig(fsdp_size=2, tp_size=4, ep_size=2)", {}, "ep_size=2 has to be a multiple of tp_size=4"),
        ("DistributedConfig(fsdp_size=4)", {"num_gpus": 8}, "= 4 ranks, and there are 8 GPUs"),
        ("DistributedConfig(tp_size=8, enable_expert_parallel=True)", {}, "its ranks share one batch"),
        ("DistributedConfig(tp_size=8, ep_size=8, tp_plan={})", {}, "its ranks share one batch"),
        ("DistributedConfig(fsdp_size=four)", {}, "fsdp_size=four is computed"),
        ("DistributedConfig(fsdp_size=4", {}, "is not Python"),
    ],
)
def test_what_is_not_written_down_or_does_not_go_is_refused_by_name(
    read: Any, words: str, given: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        read(words, **given)
    assert message in caught.value.message


def test_what_is_priced_otherwise_is_told(read: Any) -> None:
    notes = read('DistributedConfig(tp_size=2, fsdp_plan={"a": "b"}, ep_size=2, ep_implementation="all_reduce")').notes
    for words in ("fsdp_plan: priced as the model's own plan", "ep_implementation all_reduce: priced as all_to_all"):
        assert words in notes
    assert any("ep_size is not given" in note for note in read("DistributedConfig(tp_size=2)").notes)


def test_a_trainers_script_without_it_is_ddp(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("args = SFTConfig(max_length=2048, per_device_train_batch_size=4)\n", encoding="utf-8")
    setup = import_plan(path, num_gpus=8).setup
    assert (setup.plan.dp, setup.plan.zero_stage, setup.plan.micro_batch_size, setup.seq_length) == (8, 0, 4, 2048)
    path.write_text("args = dict(max_length=2048)\n", encoding="utf-8")
    with pytest.raises(PlanError, match="calls neither DistributedConfig nor TrainingArguments"):
        import_plan(path, "transformers")
