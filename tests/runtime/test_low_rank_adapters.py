"""LoRA beside layers that tensor parallelism splits, with and without sequence parallelism: one process's training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tiny_transformers
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, AttentionLayer, GroupedLayer, Transformer
from training_cases import loss_fn as token_loss

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.split.adapters import find_adapters

BATCH = 8
Trained = tuple[list[float], float, dict[str, torch.Tensor]]


class LowRank(nn.Module):
    """A layer that is not trained, and two thin ones beside it that are."""

    def __init__(self, base: nn.Linear, rank: int, *, bias: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = nn.Linear(base.in_features, rank, bias=False)
        self.second = nn.Linear(rank, base.out_features, bias=bias)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(given)) * 2.0 + self.base(given)


def adapted(layer: type[nn.Module], *, rank: int, bias: bool) -> nn.Module:
    model = Transformer(layer, num_layers=2)
    for block in model.layers:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, LowRank(child, rank, bias=bias))
    return model


def by_peft(family: str, options: dict[str, Any]) -> nn.Module:
    import peft

    model = tiny_transformers.build(family, attn_implementation="sdpa")
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=8, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


ALL = {"r": 4, "target_modules": "all-linear"}
MODELS = {
    "fused": lambda: adapted(AttentionLayer, rank=4, bias=False),
    "uneven": lambda: adapted(AttentionLayer, rank=3, bias=True),  # a rank that tp does not divide
    "grouped": lambda: adapted(GroupedLayer, rank=2, bias=False),
    "llama": lambda: by_peft("llama", ALL | {"use_rslora": True}),
    "llama, as peft chooses": lambda: by_peft("llama", {"r": 4, "bias": "lora_only"}),
    "gpt2": lambda: by_peft("gpt2", ALL | {"lora_bias": True}),
    "dora": lambda: by_peft("llama", ALL | {"use_dora": True}),
}


def trained(plan: ParallelPlan, name: str) -> Trained | str:
    warnings.simplefilter("ignore")  # of peft
    job = runtime.init(plan, precision="fp32")
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(1, 24, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    share = BATCH // job.dp
    mine = ids[job.dp_rank * share : (job.dp_rank + 1) * share]
    own_loss = not isinstance(model, Transformer)
    example = ids[:2, :-1]
    try:
        engine = job.prepare(
            model,
            loss_fn=(lambda outputs, _: outputs.loss) if own_loss else token_loss,
            optimizer=lambda given: torch.optim.SGD([one for one in given if one.requires_grad], lr=0.05),
            max_grad_norm=10.0,
            verify="off",
            example_inputs={"input_ids": example, "labels": example} if own_loss else example,
        )
    except UnsupportedPlanError as error:
        return str(error)
    inputs: Any = {"input_ids": mine[:, :-1], "labels": mine[:, :-1]} if own_loss else mine[:, :-1]
    losses = [engine.step(inputs, None if own_loss else mine[:, 1:]).item() for _ in range(2)]
    held = {key: value.grad for key, value in engine.parameters.items() if value.grad is not None}
    return losses, engine.grad_norm.item(), {key: engine.whole(key, value).clone() for key, value in held.items()}


def trained_all(cases: list[tuple[ParallelPlan, str]]) -> list[Trained | str]:
    return [trained(*case) for case in cases]


def plan_of(**options: Any) -> ParallelPlan:
    shares = options.get("dp", 1) * options.setdefault("num_microbatches", 1)
    return ParallelPlan(**options, micro_batch_size=BATCH // shares)


def assert_right(ranks: RankHarness, cases: list[tuple[ParallelPlan, str]], *, size: int) -> None:
    names = list(dict.fromkeys(name for _, name in cases))
    expected = dict(zip(names, ranks.run_alone(trained_all, [(plan_of(), name) for name in names]), strict=True))
    by_rank = ranks.run(trained_all, cases, size=size)
    for number, (plan, name) in enumerate(cases):
        gradients: dict[str, torch.Tensor] = {}
        for answers in by_rank:
            losses, norm, held = answers[number]
            assert losses == pytest.approx(expected[name][0], rel=5e-6), (plan, name)
            # Large adapters amplify rounding: in fp64 the norm is within 3e-7 and each gradient within 4e-6.
            assert norm == pytest.approx(expected[name][1], rel=1e-4), (plan, name)
            gradients |= held
        assert gradients.keys() == expected[name][2].keys()
        for key, gradient in gradients.items():
            whole = expected[name][2][key]
            error = float((gradient - whole).abs().max() / whole.abs().max())
            assert error < 5e-4, (plan, name, key)


SPLIT = plan_of(tp=2)
TOKENS_SPLIT = plan_of(tp=2, sequence_parallel=True)
MIXES = [
    plan_of(tp=2, sequence_parallel=True, dp=2, zero_stage=3),
    plan_of(tp=2, sequence_parallel=True, pp=2, pipeline_schedule="1f1b", num_microbatches=2),
    plan_of(tp=2, sequence_parallel=True, cp=2),
]


@pytest.mark.ranks
def test_adapters_train_as_in_one_process_beside_split_layers_and_split_tokens(ranks: RankHarness) -> None:
    cases = [(TOKENS_SPLIT, "fused"), (SPLIT, "uneven")]
    cases += with_all([(TOKENS_SPLIT, "grouped"), (SPLIT, "fused"), (TOKENS_SPLIT, "uneven"), (SPLIT, "grouped")])
    assert_right(ranks, cases, size=2)


@pytest.mark.ranks
def test_adapters_train_as_in_one_process_where_axes_meet(ranks: RankHarness) -> None:
    # Shards and stages hold adapters as they are, and are in test_adapter_training.
    assert_right(ranks, [(plan, "fused") for plan in [MIXES[2], *with_all(MIXES[:2])]], size=4)


@pytest.mark.ranks
def test_adapters_of_peft_train_as_in_one_process(ranks: RankHarness) -> None:
    pytest.importorskip("peft")
    cases = [(SPLIT, "gpt2")]
    cases += with_all(
        [
            (TOKENS_SPLIT, "dora"),  # whose scales need whole weights
            (SPLIT, "llama, as peft chooses"),
            (TOKENS_SPLIT, "llama"),
            (SPLIT, "llama"),
            (TOKENS_SPLIT, "llama, as peft chooses"),
            (TOKENS_SPLIT, "gpt2"),
            (SPLIT, "dora"),
        ]
    )
    assert_right(ranks, cases, size=2)


def test_pairs_are_found_by_their_sizes_alone() -> None:
    found = find_adapters(adapted(AttentionLayer, rank=4, bias=False).layers[0])
    assert found.downs["qkv.second"] == "qkv.first"
    assert found.bases["down.first"] == found.bases["down.second"] == "down.base"
    assert {found.holders[f"up.{name}"] for name in ("base", "first", "second")} == {"up"}
    assert len(found.downs) == 4
    for layer in (AttentionLayer(), GroupedLayer()):
        assert not find_adapters(layer).bases
