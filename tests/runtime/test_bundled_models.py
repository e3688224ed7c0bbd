"""Every bundled model, made small, trains under a plan of each kind as it does in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_selection import with_all
from model_variants import VARIANTS, random_config
from rank_harness import RankHarness

from paraplan.errors import UnsupportedPlanError
from paraplan.model.reader import bundled_models, read_model
from paraplan.model.shrink import Smaller
from paraplan.model.tensor_split import split_reason
from paraplan.plan.check import CheckRequest
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.step.loss import token_loss
from paraplan.script_check.plan_rank import check
from paraplan.script_check.small_model import build_small, check_batch

PLANS = (ParallelPlan(dp=2), ParallelPlan(tp=2))
ODD = ["nemotron-3-nano", *with_all(["deepseek-v3", "gemma-4-e4b-it", "qwen3.5-0.8b"])]
"""Files that leave groups of experts to the library, buffers with infinite bounds, layers named by letters alone, and
states of a fused projection in a cache."""


OF_OWN_CODE = {"ling-mini-2.0"}
"""Bundled models without a class in transformers, which nothing can build."""
BUNDLED = sorted(bundled_models().keys() - OF_OWN_CODE)
READ = ["glm", "ernie4_5", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "arcee", "olmo3", "exaone4"]
READ += [
    "cohere2",
    "solar_open",
    "dots1",
    "hy_v3",
    "flex_olmo",
    "exaone_moe",
    "youtu",
    "bailing_hybrid",
    "llama4_text",
    "gemma3n_text",
]
"""Families that are read from their configurations, and of which no model is bundled."""


def findings(names: list[str]) -> dict[str, str]:
    """Return what differs or fails, by model and plan; nothing where all is equal, or refused as it is in planning."""
    wrong = {}
    for name in names:
        for plan in PLANS:
            request = CheckRequest(model=name, plan=plan, folder="", max_layers=2, seq_length=8, num_steps=1)
            try:
                gaps = check(request).gaps
            except UnsupportedPlanError as error:
                if split_reason(read_model(name), plan.tp) is None:
                    wrong[f"{name} {plan.describe()}"] = str(error)
            except (RuntimeError, ValueError) as error:
                wrong[f"{name} {plan.describe()}"] = f"{type(error).__name__}: {error}"
            else:
                wrong |= {f"{name} {plan.describe()}": str(gap) for gap in gaps[:1]}
    return wrong


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_model_is_made_small_and_runs(name: str) -> None:
    torch.manual_seed(0)
    model = build_small(name, Smaller(num_layers=2, tp=2, seq_length=8))
    inputs, targets = check_batch(model, num_sequences=2, seq_length=8, seed=0)
    assert token_loss(model(**inputs), targets).isfinite()


@pytest.mark.ranks
def test_odd_bundled_models_are_equal_over_dp_and_over_tp(ranks: RankHarness) -> None:
    for found in ranks.run(findings, ODD, size=2):
        assert found == {}


@pytest.mark.ranks
@pytest.mark.with_all
@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_model_is_equal_over_dp_and_over_tp(ranks: RankHarness, name: str) -> None:
    for found in ranks.run(findings, [name], size=2):
        assert found == {}


@pytest.mark.ranks
@pytest.mark.with_all
def test_families_without_a_bundled_model_are_equal_over_dp_and_over_tp(ranks: RankHarness, tmp_path: Path) -> None:
    names = []
    for family in READ:
        path = tmp_path / f"{family}.json"
        fields = random_config(family, 0) | {"architectures": VARIANTS[family][0][:1]}
        path.write_text(json.dumps(fields), encoding="utf-8")
        names.append(str(path))
    for found in ranks.run(findings, names, size=2, timeout_s=900):
        assert found == {}
