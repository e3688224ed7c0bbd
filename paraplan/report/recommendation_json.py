"""A recommendation as the JSON that programs read, and as a plan file. Apart from the tables, which import rich."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from paraplan.interop.commands import launch_command, torchrun_command
from paraplan.report.estimate_json import estimate_report
from paraplan.search.plan_files import cluster_reference
from paraplan.search.recommendation import Recommendation


def commands(answer: Recommendation, plan_path: Path | None) -> dict[str, str]:
    """Return the commands that start the plan, or write it for another tool; none where nothing is written for that."""
    path = str(plan_path or "plan.json")
    task = answer.workload.training.learns_from
    if not task.is_run_by_trl or (task.kind != "sft" and answer.workload.framework.task_tools is not None):
        return {}
    if task.kind != "sft":  # which TRL runs, under any framework
        return {"export": shlex.join(["paraplan", "export", path, "--to", "trl"])}
    if answer.framework is not None:
        target = answer.workload.framework.export_target
        return {} if target is None else {"export": shlex.join(["paraplan", "export", path, "--to", target])}
    reference = cluster_reference(answer)
    torchrun = torchrun_command(reference, training=answer.workload.training)
    if answer.placement.skips_gpus:
        gpus = ",".join(map(str, answer.placement.local_gpus))
        torchrun = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={gpus} {torchrun}"
    return {"launch": launch_command(path, reference), "torchrun": torchrun}


def recommendation_report(answer: Recommendation, *, plan_path: Path | None, seconds: float) -> dict[str, Any]:
    """Return the JSON object of `paraplan recommend --json`."""
    result, workload = answer.result, answer.workload
    best = estimate_report(workload, result.best)
    return {
        "decisions": [decision.model_dump() for decision in result.decisions],
        "plan": best.pop("plan"),
        "placement": answer.placement.model_dump(),
        "remark": result.remark,
        "reason": result.reason.model_dump() if result.reason else None,
        "guide_reason": result.guide_reason.model_dump() if result.guide_reason else None,
        "plain_reason": result.plain_reason.model_dump() if result.plain_reason else None,
        "warnings": [*best.pop("warnings"), *([answer.offload] if answer.offload else [])],
        "estimate": best,
        "found": answer.found,
        "chosen_options": None if answer.chosen is None else answer.chosen.fields,
        "idle": answer.idle,
        "mixed": answer.mixed,
        "framework": answer.framework,
        "fastest": estimate_report(workload, result.fastest) if result.fastest else None,
        "guide": estimate_report(workload, result.guide) if result.guide else None,
        "candidates": [candidate.model_dump(mode="json") for candidate in result.candidates],
        "baselines": [candidate.model_dump(mode="json") for candidate in result.baselines],
        "front": [candidate.model_dump(mode="json") for candidate in result.front],
        "explanation": answer.explanation.model_dump() if answer.explanation else None,
        "comparison": answer.comparison.model_dump() if answer.comparison else None,
        "budget": answer.budget.model_dump() if answer.budget else None,
        "bought": answer.bought.model_dump() if answer.bought else None,
        "price_source": answer.price_source,
        "goodput": answer.goodput.model_dump() if answer.goodput else None,
        "offers": [offer.model_dump() for offer in answer.offers],
        "what_helps": [one.model_dump(mode="json") for one in answer.helps],
        "levers": [one.model_dump() for one in answer.levers],
        "rejections": [rejection.model_dump() for rejection in result.rejections],
        "search": {
            "plans_considered": result.plans_considered,
            "plans_priced": result.plans_priced,
            "times_priced": result.times_priced,
            "seconds": round(seconds, 4),
        },
        "commands": commands(answer, plan_path),
    }
