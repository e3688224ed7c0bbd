"""Expert parallelism in the keys of axolotl's plugin and of DeepSpeed's AutoEP."""

from __future__ import annotations

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.setup import Given, make_plan
from paraplan.plan.parallel import ParallelPlan

_SIZE = "expert_parallel_size"
_PLUGIN = "ExpertParallelPlugin"
_ONE_MACHINE = 8
"""Ranks that stand on one machine as a rule, whose links are alike."""
_FACTORS = (_SIZE, "dp_shard_size", "context_parallel_size", "tensor_parallel_size")


def axolotl_ep(fields: Fields, given: Given) -> tuple[int, Given, list[str]]:
    """Return axolotl's expert-parallel ranks, what is given with the GPUs that they imply, and notes.

    Experts go over ranks of their own mesh axis, each with a batch of its own: that axis times `dp_shard_size` and
    `context_parallel_size` are all ranks (axolotl/integrations/expert_parallel/plugin.py, `_resolve_ep_group`). Raises
    `PlanError` for what axolotl refuses.
    """
    ep = fields.count(_SIZE) or 1
    if ep == 1:
        return 1, given, []
    if _PLUGIN not in str(fields.value("plugins")):
        return 1, given, [f"{_SIZE}={ep}: not priced, as plugins does not name axolotl's {_PLUGIN}"]
    if (fields.count("tensor_parallel_size") or 1) > 1:
        raise PlanError(
            f"{fields.source}: {_SIZE}={ep} beside tensor_parallel_size: axolotl spreads experts beside dp_shard_size "
            "and context_parallel_size alone",
            hint="leave out one of the two",
        )
    ranks = 1
    for key in _FACTORS:
        ranks *= fields.count(key) or 1
    if given.num_gpus not in (None, ranks):
        named = " x ".join(f"{key} {fields.count(key)}" for key in _FACTORS if (fields.count(key) or 1) > 1)
        raise PlanError(
            f"{fields.source}: {named} = {ranks} ranks, and there are {given.num_gpus} GPUs",
            hint=f"axolotl refuses it too: use dp_shard_size {max(1, (given.num_gpus or ranks) // ep)}, "
            "or say what machines it is for: --profile NAME --nodes N",
        )
    apart = ranks // ep
    notes = []
    if apart > 1 and ranks > _ONE_MACHINE:
        notes.append(f"{_SIZE}={ep}: axolotl has every {apart}th rank share out experts, priced as neighbors are")
    return ep, given.replace(num_gpus=ranks), notes


def with_ep(fields: Fields, plan: ParallelPlan, ep: int) -> ParallelPlan:
    """Return a plan whose experts go over `ep` ranks. Raises `PlanError` that names the file."""
    return plan if ep == 1 else make_plan(fields.source, **plan.model_dump() | {"ep": ep})


def autoep(fields: Fields, *, dp: int, tp: int, zero_stage: int) -> tuple[int, list[str]]:
    """Return the ranks of `dp` over which DeepSpeed's AutoEP spreads experts, and notes.

    `autoep_size` counts neighbours among the ranks of dp and tp together, which hold whole experts
    (deepspeed/module_inject/auto_ep_folding.py). Raises `PlanError` for what DeepSpeed refuses.
    """
    section = fields.section("expert_parallel")
    size = section.count("autoep_size") or 1
    if not section.flag("enabled") or size == 1:
        return 1, []
    named = f"expert_parallel.autoep_size {size}"
    if (dp * tp) % size:
        raise PlanError(
            f"{fields.source}: {named} does not divide the {dp * tp} GPUs",
            hint="DeepSpeed refuses it too: fix that key",
        )
    if tp > 1 and zero_stage == 3:
        raise PlanError(
            f"{fields.source}: {named} beside tensor_parallel.autotp_size {tp} under ZeRO-3: AutoEP has tensor "
            "parallelism beside ZeRO stages 0 to 2",
            hint="use stage 2, or one of the two",
        )
    if size % tp:
        return 1, [f"{named}: priced as over the {tp} ranks of autotp_size, which it is not a multiple of"]
    if size == tp:
        return 1, [f"{named}: priced as experts that tensor parallelism divides, over the same ranks"]
    return size // tp, []
