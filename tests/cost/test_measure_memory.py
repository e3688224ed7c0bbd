"""The script that measures memory on a GPU, as far as it goes without one."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from paraplan.errors import UsageError
from tests.script_module import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_memory.py"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MACHINE = {"date": "2026-01-01", "gpu": "none", "torch": "0"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_memory")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return str(path)


def test_the_grid_covers_every_value_of_every_setting(script: ModuleType) -> None:
    cases = script.grid()
    assert len(cases) == len(set(cases))
    for name, values in (
        ("model", script.MODELS),
        ("seq_length", script.SEQUENCES),
        ("recompute", script.RUNNABLE_RECOMPUTE),
        ("attention", script.ATTENTIONS),
        ("optimizer", script.OPTIMIZERS),
        ("precision", script.PRECISIONS),
    ):
        assert {getattr(case, name) for case in cases} >= set(values)


def test_settings_move_the_prediction_as_they_move_memory(script: ModuleType) -> None:
    base = script.Case()
    peak = script.predict(base)
    assert script.predict(script.replace(base, recompute="full")) < peak
    assert script.predict(script.replace(base, attention="eager")) > peak
    assert script.predict(script.replace(base, optimizer="sgd")) < peak
    assert script.predict(script.replace(base, model="gpt2-medium")) > peak


def test_a_file_of_measurements_is_read_as_it_was_written(script: ModuleType) -> None:
    rows = [script.Row(script.Case(), 5, 7), script.Row(script.Case(optimizer="sgd"), None)]
    text = script.to_json(MACHINE, rows)
    assert json.loads(text)["gpu"] == "none"
    assert script.from_json(text, source="file") == rows
    for wrong in ("{", '{"rows": []}', '{"schema_version": 1, "rows": [{"model": "gpt2"}]}'):
        with pytest.raises(UsageError, match="file holds no measurements"):
            script.from_json(wrong, source="file")


def test_measurements_are_compared_row_by_row(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    case = script.Case()
    peak = script.predict(case)
    assert script.print_comparison([script.Row(case, round(peak / 1.02)), script.Row(case, None)]) == 0
    assert script.print_comparison([script.Row(case, peak // 2)]) == 1
    assert script.print_comparison([script.Row(case, None)]) == 2
    printed = capsys.readouterr().out
    assert "+2.0%" in printed
    assert "+100.0%" in printed
    assert "too much" in printed


def test_without_a_gpu_it_says_so_with_status_3(
    script: ModuleType, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch", reason="the script looks for torch first")
    pytest.importorskip("transformers", reason="and for transformers")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script.main(["--model", tiny]) == 3
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_case_is_trained_with_the_runtimes_engine(script: ModuleType, tiny: str, precision: str) -> None:
    pytest.importorskip("torch", reason="training needs torch")
    pytest.importorskip("transformers", reason="the model is a transformers model")
    case = script.Case(
        tiny, 16, micro_batch_size=2, num_microbatches=2, recompute="full", attention="eager", precision=precision
    )
    called: list[str] = []
    script.train(case, num_steps=1, before_steps=lambda: called.append("prepared"))
    assert called == ["prepared"]


MEASURED = SCRIPT.parents[1] / "profiles" / "measured" / "memory-nvidia-h200-2026-11-26.json"


def test_peaks_on_a_gpu_are_those_that_were_predicted(script: ModuleType) -> None:
    rows = script.from_json(MEASURED.read_text(), source="file")
    errors = [script.predict(row.case) / row.peak_bytes - 1 for row in rows]
    assert len(errors) == 48
    assert sum(map(abs, errors)) / len(errors) < 0.003
    assert max(map(abs, errors)) < 0.02


def test_steps_that_wait_for_the_host_are_told_from_others(script: ModuleType) -> None:
    """Nothing says how fast a host is: two machines of this kind differ by half. On this one all waits are longer."""
    rows = script.from_json(MEASURED.read_text(), source="file")
    waiting = [row for row in rows if row.step_s > 1.3 * row.busy_s]
    steps = [script.estimated(row.case, profile="hgx-h200").step.step_time_s / row.step_s for row in waiting]
    assert len(steps) > 25
    assert 0.6 < sum(steps) / len(steps) < 1.0


def test_a_measurement_says_where_and_with_what_it_was_made() -> None:
    torch = pytest.importorskip("torch", reason="its version is said")
    facts = load_script("gpu_trainings").machine_facts()
    assert facts["torch"] == torch.__version__
    assert (facts["gpu"] is None) != torch.cuda.is_available()
    assert json.loads(json.dumps(facts)) == facts
