"""The script that checks readers on random small configurations of every family, where transformers is installed."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from case_selection import with_all
from model_variants import VARIANTS, random_config
from script_module import load_script
from tower_variants import TOWERS, tower_fields

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_models.py"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


# What transformers' modules remark on is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


LIKE_OTHERS = {
    *("mistral", "smollm3", "seed_oss", "hunyuan_v1_dense", "ministral", "ministral3", "glm4", "exaone4", "cohere2"),
    *("qwen2", "qwen3", "olmo3", "glm4_moe", "solar_open", "minimax_m2", "dots1", "ernie4_5_moe", "hunyuan_v1_moe"),
    *("hy_v3", "flex_olmo", "exaone_moe", "glm_moe_dsa", "glm4_moe_lite", "mistral4", "youtu", "roberta"),
    *(
        "gemma",
        "granite",
        "glm",
        "ernie4_5",
        "mixtral",
        "qwen3_next",
        "qwen3_5_text",
        "deepseek_v2",
        "stablelm",
        "gptj",
    ),
}
"""Families whose blocks keep and compute what those of others do, with the fields that say so: with `--all` alone."""


def _main() -> Callable[[list[str]], int]:
    """Return the script's main function: in this process transformers is imported once for all tests."""
    main: Callable[[list[str]], int] = load_script("check_models").main
    return main


def _write_language_models(folder: Path, families: Sequence[str], seed: int) -> None:
    for family in families:
        classes, _ = VARIANTS[family]
        fields = random_config(family, seed) | {"architectures": [classes[0]]}
        long = {
            "max_position_embeddings",
            "n_positions",
            "window_size",
            "sliding_window",
            "max_seq_len",
        } & fields.keys()
        fields |= {name: 512 for name in long if fields[name]}
        if fields.get("num_hidden_layers") == 5:
            fields["num_hidden_layers"] = 2  # five layers are of no other kinds than these
            fields |= {name: value[:2] for name, value in fields.items() if isinstance(value, list) and len(value) == 5}
        (folder / f"{family}.json").write_text(json.dumps(fields), encoding="utf-8")


@needs_transformers
def test_random_configs_of_every_family_count_as_transformers_builds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = range(4 if with_all([1]) else 1)
    for family in VARIANTS:
        for seed in seeds:
            path = tmp_path / f"{family}-{seed}.json"
            path.write_text(json.dumps(random_config(family, seed)), encoding="utf-8")
    for family in TOWERS:
        draw = random.Random(family)  # noqa: S311  # no secret: the same seed must give the same config
        (tmp_path / f"{family}.json").write_text(json.dumps(tower_fields(family, draw.choice)), encoding="utf-8")
    status, printed = _main()([str(tmp_path), "--only", "parameters"]), capsys.readouterr()
    number = len(seeds) * len(VARIANTS) + len(TOWERS)
    assert status == 0, printed.out + printed.err
    assert f"{number} of {number} comparisons agree" in printed.out


@needs_transformers
@pytest.mark.parametrize("part", range(4))  # one test of all would take minutes beside other programs
def test_flops_and_saved_bytes_of_every_family_agree_with_transformers_modules(
    part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families = [one for one in VARIANTS if one not in LIKE_OTHERS or with_all([one])][part::4]
    _write_language_models(tmp_path, families, seed=2)
    number = len(families)
    if "deepseek_v3" in families:
        fields = json.loads((tmp_path / "deepseek_v3.json").read_text(encoding="utf-8"))
        # Heads of equal sizes are run by another kernel.
        equal = fields | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
        (tmp_path / "equal-heads.json").write_text(json.dumps(equal), encoding="utf-8")
        number += 1
    words = [str(tmp_path), "--only", "saved", *([] if with_all([1]) else ["--alike"])]
    status, printed = _main()(words), capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert f"{number} of {number} comparisons agree" in printed.out


def test_a_wrong_expected_count_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.json").write_text(json.dumps(random_config("gpt2", 0)), encoding="utf-8")
    expected = {"models": {"small": {"parameters": 1}}}
    (tmp_path / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
    assert _main()([str(tmp_path), "--only", "parameters"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no configurations" in done.stderr
