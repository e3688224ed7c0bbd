"""Pipeline stages by Megatron-Core's options, whose sizes follow from the number of the model's layers."""

from __future__ import annotations

from paraplan.errors import PlanError
from paraplan.interop.setup import Setup, StageRule
from paraplan.model.spec import ModelSpec
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stages import even_split


def with_stages(setup: Setup, model: ModelSpec) -> Setup:
    """Return a setup whose plan has the stages that its options make of a model's blocks.

    Raises `PlanError` where the tool does not cut so many layers, in its own words for the options.
    """
    rule = setup.stage_rule
    if rule is None:
        return setup
    plan = _cut(setup.plan, rule, model.num_blocks, name=model.name)
    return setup.replace(plan=plan, notes=tuple(note for note in setup.notes if note != rule.note))


def with_stages_of_layers(setup: Setup, num_layers: int | None) -> Setup:
    """Return a setup with the stages of a model of `num_layers`, and where nobody says how many, a note of that.

    Raises `PlanError` where a layout has another number of them.
    """
    rule = setup.stage_rule
    if rule is not None and rule.layout is not None and num_layers not in (None, sum(rule.layout)):
        raise PlanError(
            f"{rule.option}: its stages have {sum(rule.layout)} layers, and the number of layers is {num_layers}",
            hint="fix the one or the other: Megatron-LM refuses this too",
        )
    if rule is None or rule.layout is not None:
        return setup
    if num_layers is None:
        return setup.replace(notes=(*setup.notes, rule.note))
    return setup.replace(plan=_cut(setup.plan, rule, num_layers))


def _cut(plan: ParallelPlan, rule: StageRule, num_blocks: int, name: str = "the model") -> ParallelPlan:
    blocks = stages_of(rule, plan, num_blocks, name=name)
    is_even = sum(blocks) == num_blocks and min(blocks) > 0 and blocks == even_split(num_blocks, len(blocks))
    return plan.replace(stage_blocks=None if is_even else blocks)


def stages_of(rule: StageRule, plan: ParallelPlan, num_blocks: int, *, name: str = "the model") -> tuple[int, ...]:
    """Return the blocks of each virtual stage, as Megatron-Core's `get_num_layers_to_build` counts them.

    (core/transformer/transformer_block.py). A layout that names layers for multi-token prediction has them in its
    stages where the model has as many blocks more, and leaves them out where it has not.
    """
    if rule.layout is not None:
        blocks, predicting = rule.layout, rule.predicting or (0,) * len(rule.layout)
        with_predicting = tuple(one + other for one, other in zip(blocks, predicting, strict=True))
        return with_predicting if sum(with_predicting) == num_blocks else blocks
    pp, virtual = plan.pp, plan.virtual_pipeline_size
    extra = int(rule.counts_embedding) + int(rule.counts_loss)
    ends = sum(end or 0 for end in (rule.first, rule.last))
    num_inner = pp - (rule.first is not None) - (rule.last is not None)
    inner, rest = divmod(num_blocks + extra - ends, num_inner) if num_inner else (0, num_blocks + extra - ends)
    of_ranks = [inner] * pp
    if rule.first is not None:
        of_ranks[0] = rule.first
    if rule.last is not None:
        of_ranks[-1] = rule.last
    counted = f"{num_blocks} blocks of {name}" + " and each end that counts as one" * bool(extra)
    if rest or min(of_ranks) < 0:
        raise PlanError(
            f"{rule.option}: the {counted} do not divide evenly over {pp} pipeline ranks",
            hint="fix the layers of the first and the last rank, or price the model that the script trains",
        )
    if any(count % virtual for count in of_ranks):
        raise PlanError(
            f"{rule.option}: the {counted} do not divide over {pp} pipeline ranks x {virtual} stages of each",
            hint=f"use virtual stages that divide the {max(of_ranks)} of a rank",
        )
    stages = [count // virtual for _ in range(virtual) for count in of_ranks]
    stages[0] -= rule.counts_embedding
    stages[-1] -= rule.counts_loss
    if min(stages) < 0:
        raise PlanError(f"{rule.option}: a stage has fewer than 0 of the {counted}", hint="use fewer virtual stages")
    return tuple(stages)
