"""Random plans that the runtime admits, and the pairs of a model and a plan that are tried."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fuzz_grammar import Recipe, random_recipe, simpler

from paraplan.errors import ParaplanError
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.support import unsupported_reason

PLANS_PER_MODEL = 4
WORLD_SIZES = (1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 6, 8)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")


@dataclass(frozen=True)
class Case:
    """One pair of a model and a plan. `number` and `seed` make it again."""

    seed: int
    number: int
    recipe: Recipe
    plan: ParallelPlan
    gives_example: bool = True

    @property
    def kind(self) -> str:
        """The plan in few words: the axes that are in use, with what changes how they work."""
        plan = self.plan
        words = [axis for axis in ("dp", "tp", "pp", "cp") if getattr(plan, axis) > 1]
        if plan.zero_stage:
            words = [f"zero{plan.zero_stage}" if word == "dp" else word for word in words]
            words += [f"zero{plan.zero_stage}"] if plan.dp == 1 else []
        return "+".join(words) or ("micro-batches" if plan.num_microbatches > 1 else "one")


def make_case(seed: int, number: int, *, largest: int = 8, new_forms: bool = False) -> Case:
    """Return case `number` of `seed`, whose plan has at most `largest` ranks."""
    recipe = random_recipe(seed, number // PLANS_PER_MODEL, new_forms=new_forms)
    dice = random.Random(f"{seed}/{number}/plan")  # noqa: S311 (no secret)
    gives_example = recipe.source != "tokens" or dice.random() < 0.8
    return Case(seed, number, recipe, random_plan(dice, recipe, largest), gives_example)


def random_plan(dice: random.Random, recipe: Recipe, largest: int) -> ParallelPlan:
    """Return a plan for the batch of `recipe` that `plan/support.py` admits."""
    while True:
        plan = _drawn(dice, recipe, dice.choice([size for size in WORLD_SIZES if size <= largest]))
        if plan is not None and unsupported_reason(plan, num_blocks=recipe.num_blocks) is None:
            return plan


def simpler_cases(case: Case) -> Iterator[Case]:
    """Yield cases that are a little simpler than `case`."""
    for recipe in simpler(case.recipe):
        yield Case(case.seed, case.number, recipe, case.plan, case.gives_example)
    plain: dict[str, Any] = {"recompute": "none", "offload": "none", "zero_shards": None, "stage_blocks": None}
    plain |= {"sequence_parallel": False, "rank_order": MEGATRON_RANK_ORDER, "zero_stage": 0}
    plain |= {"pipeline_schedule": "1f1b", "virtual_pipeline_size": 1} if case.plan.pp > 1 else {}
    changes = [{name: value} for name, value in plain.items()]
    changes += [{"pipeline_schedule": "1f1b", "virtual_pipeline_size": 1}] if case.plan.pp > 1 else []
    changes += [{axis: 1} for axis in ("dp", "tp", "cp")]
    changes += [{"dp": 1, "zero_stage": 0}, {"tp": 1, "sequence_parallel": False}]
    changes += [{"pp": 1, "pipeline_schedule": None, "virtual_pipeline_size": 1, "stage_blocks": None}]
    changes += [{"num_microbatches": count} for count in (1, 2) if count < case.plan.num_microbatches]
    for change in changes:
        fields = case.plan.model_dump() | change
        share = case.recipe.batch // (fields["dp"] * fields["num_microbatches"])
        plan = _valid(fields | {"micro_batch_size": max(1, share)})
        if plan is None or plan == case.plan or plan.global_batch_size != case.recipe.batch:
            continue
        if unsupported_reason(plan, num_blocks=case.recipe.num_blocks) is None:
            yield Case(case.seed, case.number, case.recipe, plan, case.gives_example)


def _drawn(dice: random.Random, recipe: Recipe, size: int) -> ParallelPlan | None:
    """Return a random plan of `size` ranks, None where what was drawn contradicts itself."""
    degrees = [axes for axes in itertools.product(range(1, size + 1), repeat=4) if _product(axes) == size]
    if recipe.source == "image":
        degrees = [axes for axes in degrees if axes[3] == 1]
    # Few models run on some tokens alone: not every second pair is to be refused.
    dp, tp, pp, cp = dice.choices(degrees, [1.0 if axes[3] == 1 else 0.15 for axes in degrees])[0]
    counts = [count for count in (1, 2, 3, 4, 6, 8, 12) if recipe.batch % (dp * count) == 0]
    if recipe.batch % dp or not counts or tp > 4:
        return None
    count = dice.choice(counts)
    schedule = dice.choice(SCHEDULES) if pp > 1 else None
    fields: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "num_microbatches": count}
    fields |= {"micro_batch_size": recipe.batch // (dp * count), "pipeline_schedule": schedule}
    fields["virtual_pipeline_size"] = 2 if schedule == "interleaved_1f1b" else 1
    fields["zero_stage"] = dice.choice((0, 0, 1, 2, 3)) if dp * cp > 1 else 0
    fields["sequence_parallel"] = tp > 1 and dice.random() < 0.5
    has_core = any(part.startswith("attention") and "written" not in part for part in recipe.parts)
    kept = ("none", "none", "none", "full", "selective" if has_core or dice.random() < 0.1 else "full")
    fields["recompute"] = dice.choice(kept)
    fields["offload"] = dice.choice(("none",) * 8 + ("optimizer", "parameters"))
    if fields["zero_stage"] and dp == size >= 4 and dice.random() < 0.3:
        fields["zero_shards"] = 2
    if dice.random() < 0.1:
        fields["rank_order"] = tuple(dice.sample(MEGATRON_RANK_ORDER, 4))
    if pp == 2 and fields["virtual_pipeline_size"] == 1 and dice.random() < 0.15:
        first = dice.randrange(1, recipe.num_blocks)
        fields["stage_blocks"] = (first, recipe.num_blocks - first)
    return _valid(fields)


def _product(axes: tuple[int, ...]) -> int:
    total = 1
    for axis in axes:
        total *= axis
    return total


def _valid(fields: dict[str, Any]) -> ParallelPlan | None:
    try:
        return ParallelPlan.model_validate(fields)
    except (ValueError, ParaplanError):
        return None
