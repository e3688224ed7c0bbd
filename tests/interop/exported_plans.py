"""Plans of many kinds for the tests of exports."""

from __future__ import annotations

from paraplan.interop.exported import Subject
from paraplan.plan.files import ClusterReference, ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

PLANS: dict[str, dict[str, object]] = {
    "one process": {},
    "ddp": {"dp": 8, "num_microbatches": 2},
    "zero-1 offloaded": {"dp": 16, "zero_stage": 1, "offload": "optimizer"},
    "zero-2": {"dp": 8, "zero_stage": 2, "recompute": "full"},
    "zero-3": {"dp": 8, "zero_stage": 3, "micro_batch_size": 2, "num_microbatches": 4},
    "zero-3 offloaded": {"dp": 8, "zero_stage": 3, "offload": "parameters", "recompute": "selective"},
    "fsdp and tp": {"dp": 4, "tp": 2, "zero_stage": 3},
    "fsdp, tp and cp": {"dp": 2, "tp": 2, "cp": 2, "zero_stage": 3, "sequence_parallel": True},
    "pipeline": {
        "dp": 4,
        "tp": 2,
        "pp": 4,
        "zero_stage": 1,
        "pipeline_schedule": "1f1b",
        "sequence_parallel": True,
        "num_microbatches": 8,
        "stage_blocks": (9, 8, 8, 7),
        "rank_order": ("dp", "pp", "cp", "tp"),
    },
    "interleaved": {
        "pp": 4,
        "tp": 2,
        "pipeline_schedule": "interleaved_1f1b",
        "virtual_pipeline_size": 2,
        "num_microbatches": 8,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "zero bubble": {"dp": 2, "pp": 4, "pipeline_schedule": "zero_bubble", "num_microbatches": 4},
}

STARTS_OUR_RUNTIME = {"jobset", "pytorchjob", "ray", "skypilot", "slurm", "torchrun", "trainjob"}


def subject(
    plan: dict[str, object] | str,
    *,
    name: str = "llama-3-8b",
    path: str = "plan.json",
    script: str = "train.py",
    **training: object,
) -> Subject:
    """Return the plan file of a plan, by its name in `PLANS` or its fields, made for DGX H100 machines."""
    parallel = ParallelPlan.model_validate(PLANS[plan] if isinstance(plan, str) else plan)
    values: dict[str, object] = {"global_batch_size": parallel.global_batch_size, "seq_length": 4096}
    per_node = min(8, parallel.world_size)
    file = PlanFile(
        plan=parallel,
        model=ModelReference(name=name, num_blocks=32),
        training=TrainingSpec.model_validate(values | training),
        cluster=ClusterReference(name="dgx-h100", num_nodes=parallel.world_size // per_node, gpus_per_node=per_node),
    )
    return Subject(file=file, path=path, script=script, image="registry/image:tag")
