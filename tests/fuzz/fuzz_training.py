"""One training of a random model: in plain torch on the whole batch, and on this rank under a plan."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fuzz_grammar import Recipe
from fuzz_losses import COUNTS, LOSSES, NUM_STEPS, make_batch, make_optimizer, whole_loss
from fuzz_network import Network
from fuzz_plans import Case
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.runtime.agreement import RankLeftError
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.engine import Engine
from paraplan.runtime.timeouts import CollectiveTimeoutError
from paraplan.runtime.world import World

TOLERANCES = {"loss": 1e-5, "gradient": 1e-4, "parameter": 1e-3, "buffer": 1e-3}
_ROUGH = {"muon": 50.0}
"""How much more is allowed to an optimizer that computes in bf16."""
_SMALLEST = 1e-3  # of the largest of all: tensors smaller than that are measured against it
_SHIFTS = (3, 5)  # one alone may be luckier than any plan
_NOISE_FACTOR = 10.0  # how much more than the noise of one process is no finding

Tensors = dict[str, torch.Tensor]


@dataclass
class Trace:
    """What a training did: its losses, the gradients of each step, and parameters and buffers at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


@dataclass
class Answer:
    """What one rank found. `held` names the parameters that it compared, `order` is where the first gap came."""

    status: str
    message: str = ""
    detail: str = ""
    held: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    order: int = 0


def train_plain(recipe: Recipe, *, shift: int = 0) -> Trace:
    """Train in plain torch, the whole batch in one piece; `shift` turns its rows, which changes rounding alone."""
    torch.manual_seed(recipe.seed)
    model = Network(recipe)
    optimizer = make_optimizer(recipe.optimizer, list(model.parameters()))
    trace = Trace()
    for step in range(NUM_STEPS):
        inputs, targets = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.roll(shift, 0), make_batch(recipe, step))
        model.zero_grad(set_to_none=True)
        loss = whole_loss(LOSSES[recipe.loss](call_model(model, inputs), targets))
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        trace.losses.append(loss.item())
        trace.gradients.append(
            {name: held.grad.clone() for name, held in model.named_parameters() if held.grad is not None}
        )
    trace.parameters = {name: held.detach().clone() for name, held in model.named_parameters()}
    lasting = model.state_dict().keys()
    trace.buffers = {name: held.clone() for name, held in model.named_buffers() if name in lasting}
    return trace


def reference_of(recipe: Recipe, folder: Path, *, is_first: bool) -> Callable[[], tuple[Trace, list[Trace]]]:
    """Return what reads the plain training of `recipe`, and some with other rounding. The first rank makes the file."""
    path = folder / f"{abs(hash(repr(recipe)))}.pt"  # ranks are forks of one process: their hashes agree
    if is_first and not path.exists():
        beside = path.with_suffix(f".{os.getpid()}")
        torch.save((train_plain(recipe), [train_plain(recipe, shift=shift) for shift in _SHIFTS]), beside)
        beside.rename(path)
    return lambda: torch.load(path, weights_only=False)


def try_case(case: Case, folder: Path) -> tuple[Answer, Callable[[], None]]:
    """Train `case` on this rank; return what came of it, and what ends the job once all ranks have answered."""
    torch.manual_seed(case.recipe.seed)
    torch.backends.cudnn.allow_tf32 = False  # which torch has convolutions do
    ends: list[Callable[[], None]] = []
    try:
        answer = _tried(case, folder, ends)
    except (CollectiveTimeoutError, RankLeftError) as error:
        answer = Answer("hung", message=str(error), detail=traceback.format_exc())
    except ParaplanError as error:
        answer = Answer("refused", message=f"{type(error).__name__}: {error}", detail=traceback.format_exc())
    except Exception as error:  # any other is what is looked for
        first = (str(error).strip() or "no message").splitlines()[0]
        answer = Answer("bare", message=f"{type(error).__name__}: {first}", detail=traceback.format_exc())
    return answer, ends[0] if ends else lambda: None


def _tried(case: Case, folder: Path, ends: list[Callable[[], None]]) -> Answer:
    recipe = case.recipe
    read = reference_of(recipe, folder, is_first=os.environ.get("RANK", "0") == "0")
    job = runtime.init(case.plan, shows_progress=False)
    ends.append(job.close)
    expected, others = read()
    torch.manual_seed(recipe.seed + 1000 * job.world.rank)  # other weights on every rank but the first
    inputs, _ = make_batch(recipe, 0)
    engine = job.prepare(
        Network(recipe),
        loss_fn=LOSSES[recipe.loss],
        optimizer=partial(make_optimizer, recipe.optimizer),
        max_grad_norm=recipe.max_grad_norm,
        example_inputs=_rows(inputs, 0, 2) if case.gives_example else None,
        count_targets=COUNTS.get(recipe.loss),
        batch_coupling="refuse",  # the reference takes the batch whole
    )
    before = {name: _local(held).clone() for name, held in engine.parameters.items()}
    found = Trace()
    share = recipe.batch // case.plan.dp
    start = job.mesh.coordinate("dp") * share
    for step in range(NUM_STEPS):
        inputs, targets = (_rows(part, start, share) for part in make_batch(recipe, step))
        try:
            found.losses.append(engine.step(inputs, targets).item())
        except ParaplanError as error:
            changed = [name for name, held in engine.parameters.items() if not torch.equal(_local(held), before[name])]
            if not changed or isinstance(error, (CollectiveTimeoutError, RankLeftError)):
                raise
            message = f"refused in step {step + 1}, when parameters had changed: {error}"
            return Answer("wrong", message=message, detail=traceback.format_exc())
        found.gradients.append(
            {
                name: engine.whole(name, held.grad).cpu().clone()
                for name, held in engine.parameters.items()
                if held.grad is not None
            }
        )
    found.parameters = {name: engine.whole(name).cpu().clone() for name in engine.parameters}
    found.buffers = _buffers(engine)
    return compare(expected, others, found, job.world, roughness=_ROUGH.get(recipe.optimizer, 1.0))


def compare(expected: Trace, others: Sequence[Trace], found: Trace, world: World, *, roughness: float = 1.0) -> Answer:
    """Return how far `found`, of this rank, is from `expected`; `others` are as near to that as rounding allows."""
    held = frozenset(found.parameters)
    names = frozenset(expected.parameters)
    if not held <= names:
        return Answer("wrong", message=f"parameters that the model has not: {sorted(held - names)}")
    traces = (expected, found, *others)
    parts: list[tuple[str, int, list[Tensors]]] = []
    for step in range(NUM_STEPS):
        parts.append(("loss", step, [{"loss": torch.tensor(trace.losses[step])} for trace in traces]))
        graded = held & expected.gradients[step].keys() | found.gradients[step].keys()
        gradients = [{name: trace.gradients[step].get(name, torch.zeros(())) for name in graded} for trace in traces]
        parts.append(("gradient", step, gradients))
    parts.append(("parameter", NUM_STEPS - 1, [trace.parameters for trace in traces]))
    parts.append(("buffer", NUM_STEPS - 1, [trace.buffers for trace in traces]))
    for index, (quantity, step, (one, three, *rounded)) in enumerate(parts):
        least = TOLERANCES[quantity] * (roughness if step else 1.0)
        noise = max((error for two in rounded for error in errors(one, two).values()), default=0.0)
        tolerance = max(least, _NOISE_FACTOR * noise)
        found_errors = errors({name: one[name] for name in three if name in one}, three)
        wrong = {name: error for name, error in found_errors.items() if not error <= tolerance}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            message = f"{quantity} off by {wrong[worst]:.1e} in step {step + 1}, {len(wrong)} of {len(three)}: {worst}"
            detail = f"rank {world.rank}: {wrong}"
            return Answer("wrong", message=message, detail=detail, held=held, order=index)
    return Answer("right", held=held, missing=names - held)


def errors(expected: Tensors, found: Tensors) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest value or to a share of the largest of all.

    A tensor without dimensions stands for zeros where the other has some.
    """
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)
    result = {}
    for name, value in expected.items():
        reference = max(float(value.abs().max()) if value.numel() else 0.0, _SMALLEST * largest, 1e-12)
        gap = (found[name].double() - value.double()).abs()
        error = float(gap.max()) / reference if gap.numel() else 0.0
        result[name] = error if error == error else float("inf")
    return result


def _buffers(engine: Engine) -> Tensors:
    held: Any = engine
    return {
        name: buffer.detach().cpu().clone() for name, buffer in held._part.buffers.items()
    }  # no public name has them


def _rows(tree: Any, start: int, count: int) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[start : start + count], tree)


def _local(held: nn.Parameter) -> torch.Tensor:
    return held.to_local().detach() if isinstance(held, DTensor) else held.detach()


def accepts_new_forms() -> bool:
    """Whether `loss_fn` may return a sum with a count: tried on one process."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    model = nn.Linear(2, 2)
    job = runtime.init(shows_progress=False)
    engine = job.prepare(
        model,
        loss_fn=lambda outputs, _: (outputs.square().sum(), torch.tensor(4.0)),  # what is tried
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    try:
        engine.step(torch.ones(2, 2), torch.ones(2, 2))
    except ParaplanError:
        return False
    return True
