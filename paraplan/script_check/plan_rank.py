"""One rank of a check: a few steps of a small model under the plan, and the same beside it as one process does them.

    python -m paraplan.launch --plan plan.json -m paraplan.script_check.plan_rank request.json

One process is plain torch, a loop over micro-batches; every rank runs it for itself and compares what it holds.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraplan import runtime
from paraplan.model.shrink import Smaller
from paraplan.plan.check import CheckRequest, Gap, Quantity, RankFinding
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.data.batches import call_model, counted_targets
from paraplan.runtime.step.loss import token_loss
from paraplan.runtime.torch_private import pytree
from paraplan.script_check.small_model import build_small, check_batch

# Sums in fp32 in another order differ by some 1e-6 of the largest element; AdamW makes the most of small gradients.
LOSS_TOLERANCE, GRADIENT_TOLERANCE, PARAMETER_TOLERANCE = 1e-5, 1e-4, 1e-3
_SMALLEST = 1e-3  # a tensor whose values are smaller than this share of the largest one's is measured by that

Pair = tuple[Any, torch.Tensor]


@dataclass
class Trace:
    """The course of a training: its losses, the gradients of every step, and the parameters after the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def check(request: CheckRequest) -> RankFinding:
    """Return what this rank found; all ranks of the plan call it."""
    torch.manual_seed(request.seed)
    plan = request.plan
    smaller = Smaller(
        num_layers=request.max_layers,
        tp=plan.tp,
        cp=plan.cp,
        seq_length=request.seq_length,
        keeps_width=request.keeps_width,
    )
    model = build_small(request.model, smaller)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    batches = [
        check_batch(
            model,
            num_sequences=plan.global_batch_size,
            seq_length=request.seq_length,
            seed=request.seed + step,
        )
        for step in range(request.num_steps)
    ]
    expected = _train_alone(copy.deepcopy(model), batches, plan)
    found, rank = _train_under_plan(model, batches, plan)
    return _compare(expected, found, rank=rank, num_parameters=num_parameters)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of both trainings."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def _train_alone(model: nn.Module, batches: list[Pair], plan: ParallelPlan) -> Trace:
    """Train in one process, with the micro-batches of all ranks one after the other."""
    trace, optimizer = Trace(), make_optimizer(list(model.parameters()))
    for pair in batches:
        optimizer.zero_grad()
        trace.losses.append(_accumulate(model, list(_pieces(pair, plan.global_batch_size, plan.micro_batch_size))))
        trace.gradients.append(_gradients(model))
        optimizer.step()
    trace.parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    return trace


def _train_under_plan(model: nn.Module, batches: list[Pair], plan: ParallelPlan) -> tuple[Trace, int]:
    job = runtime.init(plan, shows_progress=False)
    example = next(_pieces(batches[0], plan.micro_batch_size, plan.micro_batch_size))[0]
    engine = job.prepare(model, loss_fn=token_loss, optimizer=make_optimizer, example_inputs=example)
    share = plan.micro_batch_size * plan.num_microbatches
    trace = Trace()
    for pair in batches:
        shares = list(_pieces(pair, plan.global_batch_size, share))
        trace.losses.append(engine.step(*shares[job.mesh.coordinate("dp")]).item())
        trace.gradients.append(
            {
                name: engine.whole(name, held.grad).clone()
                for name, held in engine.parameters.items()
                if held.grad is not None
            }
        )
    trace.parameters = {name: engine.whole(name).clone() for name in engine.parameters}
    return trace, job.world.rank


def _accumulate(model: nn.Module, pieces: list[Pair]) -> float:
    """Leave the gradients of the mean over all targets of `pieces` in `model`; return that mean."""
    total = sum(float(counted_targets(targets)) for _, targets in pieces)
    mean = 0.0
    for inputs, targets in pieces:
        loss = token_loss(call_model(model, inputs), targets) * (float(counted_targets(targets)) / total)
        if loss.isfinite():  # a micro-batch whose targets are all masked has no mean
            loss.backward()  # type: ignore[no-untyped-call]
            mean += loss.item()
    return mean


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: held.grad.clone() for name, held in model.named_parameters() if held.grad is not None}


def _pieces(pair: Pair, total: int, size: int) -> Iterator[Pair]:
    for start in range(0, total, size):

        def cut(leaf: Any, start: int = start) -> Any:
            return leaf[start : start + size] if isinstance(leaf, torch.Tensor) else leaf

        yield pytree.tree_map(cut, pair[0]), pair[1][start : start + size]


def _compare(expected: Trace, found: Trace, *, rank: int, num_parameters: int) -> RankFinding:
    order = {name: index for index, name in enumerate(expected.parameters)}
    held = [name for name in expected.parameters if name in found.parameters]
    gaps: list[Gap] = []
    worst: dict[Quantity, float] = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}

    def note(step: int, quantity: Quantity, errors: dict[str, float], tolerance: float) -> list[Gap]:
        worst[quantity] = max([worst[quantity], *errors.values()])
        return [
            Gap(step=step, quantity=quantity, name=name, error=error, rank=rank, order=order.get(name, -1))
            for name, error in errors.items()
            if not error <= tolerance
        ]

    for step, (loss, gradients) in enumerate(zip(found.losses, found.gradients, strict=True), start=1):
        reference = expected.losses[step - 1]
        here = note(step, "loss", {"": abs(loss - reference) / max(abs(reference), 1e-30)}, LOSS_TOLERANCE)
        errors = _errors(expected.gradients[step - 1], gradients, held)
        here += note(step, "gradient", errors, GRADIENT_TOLERANCE)
        gaps = gaps or here
    last = note(
        len(found.losses), "parameter", _errors(expected.parameters, found.parameters, held), PARAMETER_TOLERANCE
    )
    return RankFinding(
        rank=rank,
        loss_error=worst["loss"],
        gradient_error=worst["gradient"],
        parameter_error=worst["parameter"],
        num_parameters=num_parameters,
        num_compared=len(held),
        losses=tuple(found.losses),
        reference_losses=tuple(expected.losses),
        gaps=tuple(gaps or last),
    )


def _errors(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], names: list[str]) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest value; a missing one counts as zeros."""
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)

    def error(name: str) -> float:
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            return 0.0 if one is None and other is None else _size(one if one is not None else other, largest)
        if one.shape != other.shape:
            return float("inf")
        reference = max(float(one.abs().max()), _SMALLEST * largest, 1e-30)
        difference = float((one - other).abs().max()) / reference
        return float("inf") if math.isnan(difference) else difference

    return {name: error(name) for name in names}


def _size(tensor: torch.Tensor | None, largest: float) -> float:
    assert tensor is not None
    return float(tensor.abs().max()) / max(largest, 1e-30)


def main(arguments: list[str], run: Callable[[CheckRequest], RankFinding] = check) -> None:
    """Run the check that the file `arguments[0]` describes, and write what this rank found beside it."""
    request = CheckRequest.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    finding = run(request)
    path = Path(request.folder) / f"{finding.rank}.json"
    path.write_text(finding.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
