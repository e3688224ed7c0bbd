"""Plans in accelerate's variables, and accelerate's own reading of them in real ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ForkedLaunch, WriteScript

from paraplan.launch.accelerate import accelerate_variables
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

BF16 = TrainingSpec(global_batch_size=8, seq_length=8, precision="bf16")


def variables(*, training: TrainingSpec | None = BF16, **degrees: object) -> dict[str, str]:
    return accelerate_variables(PlanFile(plan=ParallelPlan(**degrees), training=training), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(("zero_stage", "reshard"), [(1, "false"), (2, "false"), (3, "true")])
def test_zero_becomes_fsdp2_that_frees_parameters_only_under_stage_3(zero_stage: int, reshard: str) -> None:
    chosen = variables(dp=2, zero_stage=zero_stage)
    assert (chosen["ACCELERATE_USE_FSDP"], chosen["FSDP_VERSION"]) == ("true", "2")
    assert chosen["FSDP_RESHARD_AFTER_FORWARD"] == reshard


def test_plain_data_parallelism_needs_the_precision_alone() -> None:
    assert variables(dp=2) == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert variables(dp=2, training=None) == {}


@pytest.mark.parametrize("degrees", [{"pp": 2, "pipeline_schedule": "gpipe"}, {"dp": 2, "tp": 2}, {"dp": 1}])
def test_what_accelerate_cannot_do_or_need_not_sets_nothing(degrees: dict[str, object]) -> None:
    assert variables(**degrees) == {}


def test_what_the_user_has_set_is_left_alone() -> None:
    file = PlanFile(plan=ParallelPlan(dp=2, zero_stage=3), training=BF16)
    assert "FSDP_VERSION" not in accelerate_variables(file, {"FSDP_VERSION": "1"})
    assert accelerate_variables(file, {"ACCELERATE_USE_DEEPSPEED": "true"}) == {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.ranks
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed; the dev extra has it")
def test_accelerate_reads_the_plan_and_the_trainer_of_hugging_face_trains_under_it(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    file = PlanFile(plan=ParallelPlan(dp=1, tp=1), training=BF16)
    plan = ParallelPlan(dp=2, tp=1, zero_stage=3, recompute="full")
    (tmp_path / "plan.json").write_text(file.replace(plan=plan).to_json())
    train = script(
        """
        import json, os
        import torch
        from accelerate.parallelism_config import ParallelismConfig
        from accelerate.utils import FullyShardedDataParallelPlugin
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        tokens = torch.arange(64).reshape(8, 8)
        data = [{"input_ids": row, "labels": row} for row in tokens]
        options = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True)
        trainer = Trainer(model, TrainingArguments(output_dir="out", use_cpu=True, **options), train_dataset=data)
        result = trainer.train()
        plugin = FullyShardedDataParallelPlugin()
        os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "2"
        seen = {
            "fsdp": [plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing],
            "wraps": plugin.auto_wrap_policy.__name__,
            "precision": trainer.accelerator.mixed_precision,
            "ranks": trainer.accelerator.num_processes,
            "steps": result.global_step,
            "tp": ParallelismConfig().tp_size,
        }
        with open(f"seen{trainer.accelerator.process_index}", "w") as file:
            json.dump(seen, file)
        """
    )
    done = launch_forked("--plan", "plan.json", train)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((tmp_path / f"seen{rank}").read_text()) == {
            "fsdp": [2, True, True],
            "wraps": "transformer_auto_wrap_policy",
            "precision": "bf16",
            "ranks": 2,
            "steps": 2,
            "tp": 2,
        }
