"""A peft model, untouched, under every kind of plan: trained as in one process, and its adapters written alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan import runtime
from paraplan.errors import PlanError, UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.checkpoints.adapter_files import adapters_of
from paraplan.runtime.engine import Engine
from paraplan.runtime.fake.collective_count import CollectiveCount

pytest.importorskip("peft")

BATCH, TOKENS = 8, tiny_transformers.TOKENS
Gradients = dict[str, torch.Tensor]


def plan_of(**options: Any) -> ParallelPlan:
    shares = options.get("dp", 1) * options.setdefault("num_microbatches", 1)
    return ParallelPlan(**options, micro_batch_size=BATCH // shares)


ALONE = plan_of()
DDP = plan_of(dp=2, num_microbatches=2)
ZERO = {stage: plan_of(dp=2, zero_stage=stage, num_microbatches=1 if stage == 1 else 2) for stage in (1, 2, 3)}
TP = plan_of(tp=2)
PP = plan_of(pp=2, pipeline_schedule="1f1b", num_microbatches=2)
VERIFIED = [TP, *with_all([PP])]  # stages beside replicas have parameter groups, below
"""The check before the first step goes over adapters and frozen parameters under these."""
MORE = with_all([plan_of(cp=2), ZERO[1]])  # split tokens are beside split layers in test_low_rank_adapters
# Schedules run one stage alike, and ZeRO-2 shards what ZeRO-3 does, and gathers less of it.
MORE += with_all([plan_of(pp=2, pipeline_schedule="zero_bubble", num_microbatches=2), ZERO[2]])
FOUR = [
    plan_of(dp=2, tp=2, zero_stage=3),
    plan_of(dp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2),
    *with_all([plan_of(dp=2, tp=2), plan_of(tp=2, pp=2, pipeline_schedule="gpipe", num_microbatches=2)]),
]


def base(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return tiny_transformers.build("llama", attn_implementation="sdpa").to(dtype)


def adapted(dtype: torch.dtype = torch.float32, *, is_pure: bool = False, **options: Any) -> Any:
    import peft

    chosen = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options
    config = peft.LoraConfig(task_type="CAUSAL_LM", **chosen)
    return peft.get_peft_model(base(dtype), config, autocast_adapter_dtype=not is_pure)


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=1e-3, fused=True)


def tokens() -> torch.Tensor:
    return torch.randint(1, 24, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(3))


class Training:
    """A job with an engine that trains `model`, and this rank's share of one batch."""

    def __init__(
        self, plan: ParallelPlan, model: nn.Module, *, precision: TrainingPrecision = "fp32", **options: Any
    ) -> None:
        self.job = runtime.init(plan, precision=precision)
        whole = tokens()
        share = BATCH // self.job.dp
        self.batch = whole[self.job.dp_rank * share : (self.job.dp_rank + 1) * share]
        self.engine: Engine = self.job.prepare(
            model,
            **{
                "loss_fn": loss_fn,
                "optimizer": adamw,
                "example_inputs": {"input_ids": whole[:2, :-1]},
                "verify": "off",  # a comparison with one process or with peft is the test
            }
            | options,
        )

    def step(self) -> float:
        return self.engine.step({"input_ids": self.batch[:, :-1]}, self.batch[:, 1:]).item()

    def gradients(self) -> Gradients:
        held = self.engine.parameters
        return {key: self.engine.whole(key, one.grad).clone() for key, one in held.items() if one.grad is not None}

    def values(self) -> Gradients:
        return {key: self.engine.whole(key).clone() for key in self.engine.parameters}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft
        yield


def assert_close(found: Gradients, expected: Gradients, what: Any, *, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys(), what
    for key, value in found.items():
        size = max(float(expected[key].abs().max()), 1e-12)
        assert float((value - expected[key]).abs().max()) < tolerance * size, (what, key)


def union(answers: Sequence[Any], number: int) -> Gradients:
    return {key: value for answer in answers for key, value in answer[number].items()}


Trained = tuple[list[float], Gradients, dict[str, Any]]


def trained(plan: ParallelPlan, dtype: torch.dtype) -> Trained:
    """Two steps: losses, gradients of the last, and how the frozen parameters are held."""
    with quiet():
        training = Training(plan, adapted(dtype), verify="auto" if plan in VERIFIED else "off")
    losses = [training.step(), training.step()]
    frozen = {name: one for name, one in training.engine.parameters.items() if not one.requires_grad}
    held = {
        "types": {one.dtype for one in frozen.values()},
        "local": sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in frozen.values()),
        "all": sum(one.numel() for one in frozen.values()),
    }
    return losses, training.gradients(), held


def trained_under(plans: list[ParallelPlan], dtype: torch.dtype) -> list[Trained]:
    return [trained(plan, dtype) for plan in plans]


@pytest.fixture(scope="module")
def alone(ranks: RankHarness) -> dict[torch.dtype, Trained]:
    """Return the trainings in one process by the type of the frozen parameters."""
    return {dtype: ranks.run_alone(trained, ALONE, dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, *with_all([4])])
def test_a_peft_model_trains_as_in_one_process_under_every_plan(
    ranks: RankHarness, alone: dict[torch.dtype, Trained], size: int
) -> None:
    losses, gradients, _ = alone[torch.float32]
    assert gradients
    assert all("lora_" in name for name in gradients)
    # Replicas and ZeRO-3 are frozen and trained by turns, and stages beside replicas have parameter groups, below.
    plans = [*VERIFIED, *MORE, *with_all([DDP, ZERO[3]])] if size == 2 else FOUR
    for plan, answers in zip(
        plans, zip(*ranks.run(trained_under, plans, torch.float32, size=size), strict=True), strict=True
    ):
        for found, _, _ in answers:
            assert found == pytest.approx(losses, abs=1e-5), plan.describe()
        assert_close(union(answers, 1), gradients, plan.describe())


@pytest.mark.ranks
@pytest.mark.parametrize("plan", [ZERO[3], *with_all([PP, DDP])], ids=ParallelPlan.describe)
def test_frozen_parameters_keep_their_own_type_and_are_sharded_under_zero_3(
    ranks: RankHarness, alone: dict[torch.dtype, Trained], plan: ParallelPlan
) -> None:
    losses, gradients, _ = alone[torch.bfloat16]
    answers = ranks.run(trained, plan, torch.bfloat16, size=2)
    for found, _, held in answers:
        assert found == pytest.approx(losses, abs=1e-5)
        assert held["types"] == {torch.bfloat16}
        assert held["local"] == held["all"] // (2 if plan.zero_stage else 1)
    assert_close(union(answers, 1), gradients, plan.describe())


def reduced(plan: ParallelPlan) -> tuple[dict[str, int], int, int]:
    """Return the bytes of the collectives of a step by operation, and of what trains and of all on this rank."""
    with quiet():
        training = Training(plan, adapted())
    training.step()
    with CollectiveCount(training.job.mesh) as count:
        training.step()
    sent: dict[str, int] = {}
    for row in count.counted():
        sent[row.operation] = sent.get(row.operation, 0) + row.total_bytes
    held = training.engine.parameters.values()
    return sent, 4 * sum(one.numel() for one in held if one.requires_grad), 4 * sum(one.numel() for one in held)


OWN_BYTES = 4096
"""More than what the engine itself sends in a step: losses, counts and the agreement on the call."""


@pytest.mark.ranks
def test_frozen_parameters_are_never_reduced(ranks: RankHarness) -> None:
    for sent, trains, whole in ranks.run(reduced, DDP, size=2):
        assert trains <= sent["all-reduce"] < trains + OWN_BYTES < whole / 2
    for sent, trains, whole in ranks.run(reduced, ZERO[3], size=2):
        # torch's operator is given all that goes in and this rank's share of what comes out; the larger one is counted.
        assert 2 * trains <= sent["reduce-scatter"] < 2 * trains + OWN_BYTES  # behind each of two micro-batches
        assert sent["all-gather"] > whole


def exported(plan: ParallelPlan, folder: str, options: dict[str, Any]) -> Any:
    with quiet():
        training = Training(plan, adapted(**options))
    training.step()
    training.engine.export_adapters(Path(folder) / "adapter")
    return training.engine.predict({"input_ids": tokens()[:, :-1]}).logits


def outputs_of_peft(folder: Path) -> torch.Tensor:
    import peft

    logits: torch.Tensor = peft.PeftModel.from_pretrained(base(torch.float32), folder).eval()(tokens()[:, :-1]).logits
    return logits


@pytest.mark.ranks
@pytest.mark.parametrize("plan", [TP, ZERO[3], *with_all([ALONE, PP, DDP, *FOUR])], ids=ParallelPlan.describe)
def test_plain_peft_loads_what_a_plan_has_exported(ranks: RankHarness, plan: ParallelPlan, tmp_path: Path) -> None:
    options = {"modules_to_save": ["lm_head"]} if plan in (ALONE, PP, TP) else {}
    if plan == ALONE:
        answers = [ranks.run_alone(exported, plan, str(tmp_path), options)]
    else:
        answers = ranks.run(exported, plan, str(tmp_path), options, size=plan.world_size)
    written = tmp_path / "adapter"
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}
    assert {path.name for path in written.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((written / "adapter_config.json").read_text())["inference_mode"] is True
    with quiet(), torch.no_grad():
        found = outputs_of_peft(written)
        untrained = adapted(**options).eval()(tokens()[:, :-1]).logits
    assert float((found - untrained).abs().max()) > 1e-3  # the step has changed the adapters
    for expected in answers:
        assert float((found - expected).abs().max()) < 1e-5


def test_the_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with quiet():
        model = adapted(use_dora=True, modules_to_save=["lm_head"])
        model.add_adapter("second", model.peft_config["default"].__class__(r=2, target_modules=["q_proj"]))
        model.save_pretrained(tmp_path / "peft")
        training = Training(ALONE, model)
        training.engine.export_adapters(tmp_path / "ours")
    for name in ("", "second"):
        config, weights = "adapter_config.json", "adapter_model.safetensors"
        ours, theirs = tmp_path / "ours" / name, tmp_path / "peft" / name
        assert json.loads((ours / config).read_text()) == json.loads((theirs / config).read_text())
        expected = load_file(theirs / weights)
        found = load_file(ours / weights)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    model = base(torch.float32)
    assert adapters_of(model) == ()
    with pytest.raises(UsageError, match="the model has no adapters of peft"):
        Training(ALONE, model).engine.export_adapters(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with LoRA+'s second rate for the B matrices, and no decay of norms."""
    named = [(name, one) for name, one in parameters.named() if one.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [one for name, one in named if one.ndim > 1 and "lora_B" not in name], "lr": 1e-3},
            {"params": [one for name, one in named if "lora_B" in name], "lr": 1.6e-2},
            {"params": [one for _, one in named if one.ndim < 2], "lr": 5e-3, "weight_decay": 0.0},
        ],
        weight_decay=0.3,
        fused=True,
        eps=1e-4,  # rounding of gradients near 0 would decide their sign
    )


def with_norms() -> nn.Module:
    model: nn.Module = adapted()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    return model


def trained_in_groups(plan: ParallelPlan) -> tuple[list[float], Gradients]:
    with quiet():
        training = Training(plan, with_norms(), optimizer=in_groups, max_grad_norm=1.0)
    return [training.step() for _ in range(2)], training.values()


@pytest.mark.ranks
def test_parameter_groups_step_as_in_one_process(ranks: RankHarness) -> None:
    losses, values = ranks.run_alone(trained_in_groups, ALONE)
    # Sharded parameters, and stages: the other plans have one of these, and are for `--all`.
    for plan in [ZERO[3], PP, *with_all([TP, DDP, *FOUR, *MORE])]:
        answers = ranks.run(trained_in_groups, plan, size=plan.world_size)
        for found, _ in answers:
            assert found == pytest.approx(losses, abs=1e-5), plan.describe()
        assert_close(union(answers, 1), values, plan.describe())


def trained_by_turns(plan: ParallelPlan) -> tuple[list[float], Gradients, list[list[str]]]:
    """Freeze the A matrices behind the first step, and train them again behind the second."""
    with quiet():
        training = Training(
            plan,
            adapted(),
            optimizer=lambda given: torch.optim.AdamW(
                [one for one in given if one.requires_grad], lr=1e-3, weight_decay=0.3, eps=1e-4, fused=True
            ),
            max_grad_norm=0.05,
        )
    turned = [one for name, one in training.engine.parameters.items() if "lora_A" in name]
    losses, gradients = [], []
    for trains in (True, False, True):
        for parameter in turned:
            parameter.requires_grad_(trains)
        losses.append(training.step())
        gradients.append(sorted(training.gradients()))
        assert all(parameter.requires_grad == trains for parameter in turned)
    return losses, training.values(), gradients


@pytest.mark.with_all  # layers that steps leave out are in test_conditional_parameters
@pytest.mark.ranks
def test_parameters_are_frozen_and_trained_by_turns_as_in_one_process(ranks: RankHarness) -> None:
    losses, values, gradients = ranks.run_alone(trained_by_turns, ALONE)
    assert not any("lora_A" in name for name in gradients[1])
    assert gradients[0] == gradients[2] != gradients[1]
    for plan in [ZERO[3], *with_all([PP, DDP, TP, *FOUR, *MORE])]:
        answers = ranks.run(trained_by_turns, plan, size=plan.world_size)
        for found, _, _ in answers:
            assert found == pytest.approx(losses, abs=1e-5), plan.describe()
        assert_close(union(answers, 1), values, plan.describe())
        held = [sorted({name for answer in answers for name in answer[2][step]}) for step in range(3)]
        assert held == gradients, plan.describe()


def begun_later(plan: ParallelPlan) -> str:
    with quiet():
        training = Training(plan, adapted())
    for parameter in training.engine.parameters.values():
        parameter.requires_grad_(True)
    with pytest.raises(UnsupportedPlanError) as refused:
        training.step()
    return str(refused.value)


@pytest.mark.ranks
def test_what_was_frozen_at_the_start_is_not_trained_later_without_a_sum(ranks: RankHarness) -> None:
    for said in ranks.run(begun_later, DDP, size=2):
        assert "was frozen in job.prepare and now trains, and the ranks do not sum its gradient" in said


def trained_purely(plan: ParallelPlan, *, precision: TrainingPrecision, lora: bool) -> tuple[list[float], Gradients]:
    dtype = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    torch.manual_seed(0)
    with quiet():
        model = adapted(torch.bfloat16, is_pure=True).to(dtype) if lora else base(torch.bfloat16).to(dtype)
        training = Training(plan, model, precision=precision)
    losses = [training.step()]
    gradients = training.gradients()
    assert {one.dtype for one in gradients.values()} == {dtype}
    state = training.engine.optimizer.state.values()
    assert {one["exp_avg"].dtype for one in state} <= {dtype}
    losses.append(training.step())
    return losses, {name: one.float() for name, one in gradients.items()}


def error_of(found: Gradients, exact: Gradients) -> float:
    """Return the error of all gradients together, relative to their size."""
    total = sum(float((found[key] - one).square().sum()) for key, one in exact.items())
    return (total / sum(float(one.square().sum()) for one in exact.values())) ** 0.5


def pure(plan: ParallelPlan, lora: bool) -> tuple[list[float], Gradients]:
    return trained_purely(plan, precision="bf16-pure", lora=lora)


def whole_precision(lora: bool) -> tuple[list[float], Gradients]:
    return trained_purely(ALONE, precision="fp32", lora=lora)


@pytest.mark.ranks
@pytest.mark.parametrize("lora", [True, *with_all([False])])
def test_pure_bf16_is_as_near_to_fp32_under_a_plan_as_in_one_process(ranks: RankHarness, lora: bool) -> None:
    losses, exact = ranks.run_alone(whole_precision, lora)
    alone_losses, alone = ranks.run_alone(pure, ALONE, lora)
    usual = error_of(alone, exact)
    assert 1e-4 < usual < 3e-2  # 2**-8 for every rounding
    some, others = ([DDP, TP, PP], [ZERO[3]])
    for plan in (others if lora else some) + with_all([*(some if lora else others), FOUR[0]]):
        answers = ranks.run(pure, plan, lora, size=plan.world_size)
        for found, _ in answers:
            assert found == pytest.approx(losses, abs=5e-3), plan.describe()
            assert found == pytest.approx(alone_losses, abs=5e-3), plan.describe()
        gradients = union(answers, 1)
        assert gradients.keys() == exact.keys()
        assert error_of(gradients, exact) < 2 * usual, plan.describe()


def test_pure_bf16_of_a_model_in_fp32_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"bf16-pure keeps the model in bf16, and 17,568 of its 17,568 parameters are in float32"
    ):
        Training(ALONE, base(torch.float32), precision="bf16-pure")


def refused_for_quantized_weights(plan: ParallelPlan) -> str:
    import bitsandbytes

    model = base(torch.float32)
    layer = model.get_submodule("model.layers.0.mlp")
    weight = bitsandbytes.nn.Params4bit(layer.get_parameter("up_proj.weight").detach(), requires_grad=False)
    layer.up_proj = bitsandbytes.nn.Linear4bit(32, 48, bias=False)
    layer.up_proj.weight = weight
    with pytest.raises(UnsupportedPlanError) as refused:
        Training(plan, model)
    return str(refused.value)


@pytest.mark.ranks
def test_quantized_weights_are_refused_where_ranks_cannot_hold_them(ranks: RankHarness) -> None:
    pytest.importorskip("bitsandbytes")
    for said in ranks.run(refused_for_quantized_weights, TP, size=2):
        assert "tp=2: model.layers.0.mlp.up_proj.weight is quantized (Params4bit)" in said
    for said in ranks.run(refused_for_quantized_weights, DDP, size=2):
        assert "on a CPU bitsandbytes lays it out anew" in said
