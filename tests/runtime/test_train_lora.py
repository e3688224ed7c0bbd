"""The script that fine-tunes by LoRA: a model that knows some text learns another, under python and under plans."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from case_selection import with_all
from rank_harness import RankHarness

from paraplan.errors import ModelError, UsageError
from paraplan.model.trainable import AdapterSpec
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_lora.py"
KNOWN, NEW = "to train is to learn what the next byte will be. ", "most people adapt a model that others have trained. "
SEQ_LENGTH, BATCH = 32, 8
PLANS = [
    ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=2),
    *with_all(  # the script does the same under these; what a plan changes is in test_adapter_training
        [
            ParallelPlan(dp=2, zero_stage=3, micro_batch_size=2, num_microbatches=2),
            ParallelPlan(tp=2, micro_batch_size=8),
        ]
    ),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that has learned one sentence."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    text = torch.frombuffer(bytearray((KNOWN * 20).encode()), dtype=torch.uint8).long()
    windows = text[: 24 * (SEQ_LENGTH + 1)].view(24, SEQ_LENGTH + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss.detach()) < 0.7
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(NEW * 20)
    return folder


def run_script(arguments: tuple[str, ...], plan_file: str | None) -> str:
    """Run the script in this rank and return what it prints."""
    if plan_file is not None:
        os.environ["PARAPLAN_PLAN"] = plan_file
    sys.argv = [str(SCRIPT), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft and transformers
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def validation_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"validation loss ([0-9.]+)", output)]


def arguments(base: Path, text: Path, output: Path, *more: str, steps: int = 3) -> tuple[str, ...]:
    given = ("--model", str(base), "--data", str(text), "--output", str(output), "--steps", str(steps))
    return (*given, "--seq-len", str(SEQ_LENGTH), "--lr", "2e-3", "--eval-batches", "2", *more)


def script() -> Any:
    spec = importlib.util.spec_from_file_location("train_lora_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_of_peft(base: Path, adapters: Path, text: Path) -> float:
    """Return the validation loss of what plain peft loads."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(whole, adapters).eval()
        module = script()
        _, validation = module.read_text(text)
        windows = module.Windows(module.tokens_of(validation, base, 256), SEQ_LENGTH)
        pairs = [windows[index] for index in range(2 * BATCH)]
        logits = model(torch.stack([inputs for inputs, _ in pairs])).logits
        targets = torch.stack([found for _, found in pairs])
        return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.fixture(scope="module")
def one_process_losses(
    ranks: RankHarness, base: Path, text_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    adapters = tmp_path_factory.mktemp("one") / "adapters"
    given = arguments(base, text_folder, adapters, "--batch", str(BATCH), "--rank", "4")
    losses = validation_losses(ranks.run_alone(run_script, given, None))
    assert loss_of_peft(base, adapters, text_folder) == pytest.approx(losses[1], abs=2e-4)
    return losses


def test_a_model_learns_another_text_by_its_adapters(
    ranks: RankHarness, base: Path, text_folder: Path, tmp_path: Path
) -> None:
    options = ("--batch", str(BATCH), "--rank", "4")
    given = arguments(base, text_folder, tmp_path / "adapters", *options, steps=25)
    before, after = validation_losses(ranks.run_alone(run_script, given, None))
    assert after < 0.5 * before


@pytest.mark.with_all  # the tutorial trains adapters under a plan, and loads them with peft
@pytest.mark.ranks
@pytest.mark.parametrize("plan", PLANS, ids=ParallelPlan.describe)
def test_plans_of_lora_give_the_losses_of_one_process_and_files_for_peft(
    plan: ParallelPlan,
    ranks: RankHarness,
    base: Path,
    text_folder: Path,
    tmp_path: Path,
    one_process_losses: list[float],
) -> None:
    count = sum(one.numel() for one in transformers.AutoModelForCausalLM.from_pretrained(base).parameters())
    training = TrainingSpec(global_batch_size=BATCH, seq_length=SEQ_LENGTH, precision="fp32", train="lora:r=4")
    reference = ModelReference(name="base", num_parameters=count, num_blocks=2)
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan=plan, training=training, model=reference).to_json())
    adapters = tmp_path / "adapters"
    outputs = ranks.run(run_script, arguments(base, text_folder, adapters), str(path), size=2)
    assert validation_losses(outputs[0]) == pytest.approx(one_process_losses, abs=1e-3)
    assert outputs[1] == ""
    assert loss_of_peft(base, adapters, text_folder) == pytest.approx(one_process_losses[1], abs=1e-3)


def test_the_plan_names_what_trains(base: Path) -> None:
    module = script()
    spec = TrainingSpec(global_batch_size=8, seq_length=32, train="dora:r=2,targets=q|v,dropout=0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = module.build_model(base, module.adapter_of(spec, 16), "bf16")
    config = model.peft_config["default"]
    assert (config.r, config.target_modules, config.use_dora, config.lora_dropout) == (
        2,
        {"q_proj", "v_proj"},
        True,
        0.1,
    )
    types = {one.requires_grad: one.dtype for one in model.parameters()}
    assert types == {False: torch.bfloat16, True: torch.float32}
    assert module.adapter_of(None, 16).rank == 16


def test_what_the_script_cannot_train_is_refused(base: Path) -> None:
    module = script()
    with pytest.raises(ModelError, match=r"no linear layer of the model is named query.*it has down_proj, gate_proj"):
        module.build_model(base, AdapterSpec(targets=("query",)), "fp32")
    spec = TrainingSpec(global_batch_size=8, seq_length=32, train="ia3")
    with pytest.raises(UsageError, match="the plan trains ia3, and this script trains LoRA"):
        module.adapter_of(spec, 16)
    with pytest.raises(ModelError, match="vocab_size=64 has no room for 256 bytes"):
        module.tokens_of(b"text", base, 64)
