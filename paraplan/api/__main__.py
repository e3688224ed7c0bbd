"""The planner in a process of its own: a question as JSON on stdin, a plan file or what was wrong as JSON on stdout.

For programs that must not hold the planner's modules and threads themselves, as the launcher, whose ranks are forked.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from paraplan.errors import ParaplanError


def plan_for(question: dict[str, Any]) -> dict[str, Any]:
    """Return `{"plan_file": ...}` for a question, or `{"error": {"message", "hint", "exit_status"}}`.

    A question holds `model`, `profile` (None for this machine), `num_nodes`, `gpus_per_node` and the fields of a
    `TrainingSpec`.
    """
    from pydantic import ValidationError

    from paraplan.api.machines import load_cluster
    from paraplan.api.models import load_model
    from paraplan.api.recommendations import recommend
    from paraplan.api.workloads import Workload, training_of

    model, profile, num_nodes, gpus_per_node = (
        question.pop(name) for name in ("model", "profile", "num_nodes", "gpus_per_node")
    )
    length = question.pop("seq_length", None)
    try:
        spec = load_model(model, seq_length=length)
        cluster = load_cluster(profile, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
        training = training_of(spec, seq_length=length, **question)
        answer = recommend(Workload.of(spec, training, cluster), uses_all_gpus=True)  # its ranks are there
    except ParaplanError as error:
        return {"error": {"message": error.message, "hint": error.hint, "exit_status": error.exit_status}}
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']} (found {first['input']!r})"
        return {"error": {"message": message, "hint": None, "exit_status": 2}}
    return {"plan_file": json.loads(answer.plan_file().to_json())}


def main() -> None:
    """Answer one question."""
    json.dump(plan_for(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
