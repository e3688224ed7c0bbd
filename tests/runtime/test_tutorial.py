"""The tutorial, from a plan to merged weights, with a small model in place of the one that it names."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from forked_launch import launch_forked
from rank_harness import RankHarness
from typer.testing import CliRunner

from paraplan.cli.main import app

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

PAGE = (Path(__file__).parents[2] / "paraplan" / "docs" / "tutorial.md").read_text()
HUB_ID = "Qwen/Qwen2.5-0.5B"
SENTENCE = "Most people adapt a model that others have trained.\n"
LENGTH = ("--seq-len 512", "--seq-len 64")  # a byte in place of each token: sentences are as long as those of the page


def small_model(folder: Path) -> None:
    """Write a model of the family that the tutorial names, with a tokenizer of bytes."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = transformers.Qwen2Config(initializer_range=0.3, **sizes)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")  # of peft and transformers
def test_its_commands_lead_to_weights_that_know_the_text(ranks: RankHarness, tmp_path: Path) -> None:
    small_model(tmp_path / "model")
    (tmp_path / "notes.txt").write_text(SENTENCE * 140)
    for name, content in re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content.replace("lr=2e-4", "lr=2e-2"))  # for a model that knows nothing yet
    commands = re.findall(rf"^ {{4}}(.*{HUB_ID}.*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 3
    assert LENGTH[0] in commands[0]
    printed = [run(command.replace(HUB_ID, "model").replace(*LENGTH), tmp_path, ranks) for command in commands]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", printed[1])]
    assert losses[-1] < 0.8 * losses[0]
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / one) for one in ("model", "tuned"))
    tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")(SENTENCE * 4)["input_ids"]])
    with torch.no_grad():
        assert after(tokens, labels=tokens).loss < 0.8 * before(tokens, labels=tokens).loss


def run(command: str, folder: Path, ranks: RankHarness) -> str:
    program, *words = shlex.split(command)
    if program == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
        return ""
    if words[0] != "launch":
        with contextlib.chdir(folder):
            result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return result.output
    environment = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = launch_forked(ranks, folder, *words[1:], environment=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
