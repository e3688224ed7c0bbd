"""A plan beside one process, on the ranks of a check: what is equal, and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import FAMILIES
from torch import nn

from paraplan.plan.check import CheckRequest, Gap, RankFinding
from paraplan.plan.parallel import ParallelPlan
from paraplan.script_check.plan_rank import check

pytestmark = pytest.mark.ranks

TWO_MICRO_BATCHES = ParallelPlan(tp=2, num_microbatches=2)
PLANS = [
    ParallelPlan(dp=2, zero_stage=3, num_microbatches=2),
    ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2),
    ParallelPlan(tp=2, sequence_parallel=True),
]
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return paths of configurations as transformers saves them, by family."""
    folder = tmp_path_factory.mktemp("configs")
    paths = {}
    for family, architecture in ARCHITECTURES.items():
        path = folder / f"{family}.json"
        path.write_text(json.dumps(FAMILIES[family] | {"model_type": family, "architectures": [architecture]}))
        paths[family] = str(path)
    return paths


def check_all(requests: list[CheckRequest]) -> list[RankFinding]:
    return [check(request) for request in requests]


def request(model: str, plan: ParallelPlan, *, num_steps: int = 2, **more: object) -> CheckRequest:
    layers = max(2, plan.num_stages)
    return CheckRequest(model=model, plan=plan, folder="", max_layers=layers, seq_length=8, num_steps=num_steps, **more)


def gaps_of(findings: list[RankFinding]) -> Iterator[Gap]:
    return (gap for finding in findings for gap in finding.gaps)


def test_plans_of_every_axis_are_equal(ranks: RankHarness, configs: dict[str, str]) -> None:
    steps = [2, *(with_all([2, 2]) or [1, 1])]  # a second step begins with the state of the optimizer, in any of them
    equal = [
        request(configs[family], plan, num_steps=count)
        for family, plan, count in zip(ARCHITECTURES, PLANS, steps, strict=True)
    ]
    equal += with_all([request(configs["qwen3"], TWO_MICRO_BATCHES, num_steps=1)])
    by_rank = ranks.run(check_all, equal, size=2, timeout_s=240.0)
    fine = list(zip(*by_rank, strict=True))
    for findings in fine:
        assert not list(gaps_of(list(findings)))
        assert all(finding.losses == pytest.approx(finding.reference_losses, rel=1e-5) for finding in findings)
    held = [finding.num_compared for finding in fine[1]]  # the stages of a pipeline, which share no parameter but ties
    assert all(count < fine[0][0].num_compared for count in held)


@pytest.mark.with_all  # plans of two ranks are checked, above
def test_tokens_beside_layers_and_stages_are_checked_on_a_model_whose_heads_they_share_out(
    ranks: RankHarness, configs: dict[str, str]
) -> None:
    plans = {
        "llama": ParallelPlan(cp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=2),
        "gpt2": ParallelPlan(cp=2, tp=2, sequence_parallel=True),
    }
    families = ["llama", *with_all(["gpt2"])]
    requests = [request(configs[family], plans[family], num_steps=1) for family in families]
    for findings in ranks.run(check_all, requests, size=4, timeout_s=240.0):
        assert not list(gaps_of(findings))
        assert all(finding.num_compared > 0 for finding in findings)


class Uneven(nn.Module):
    """A model whose second block does something else on rank 1: no plan over two ranks trains it as one process."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            is_wrong = index == 1 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
            hidden = hidden + block(hidden) * (1.5 if is_wrong else 1.0)
        return self.head(hidden)


def build_uneven(num_layers: int = 40) -> nn.Module:
    return Uneven(num_layers)


def test_a_gradient_that_is_wrong_on_one_rank_is_named(ranks: RankHarness, tmp_path: Path) -> None:
    findings = ranks.run(check_all, [request("test_plan_rank:build_uneven", ParallelPlan(dp=2))], size=2)
    for (finding,) in findings:
        assert finding.num_parameters == Uneven(2).head.weight.numel() * 2 + 16 + 2 * 72
        names = {gap.name for gap in finding.gaps if gap.quantity == "gradient"}
        assert "blocks.1.weight" in names
        worst = max(finding.gaps, key=lambda gap: gap.error)
        assert 0.05 < worst.error < 2.0
