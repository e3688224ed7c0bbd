"""The plan file of a recommendation: its plan, what it was made for, and what is predicted."""

from __future__ import annotations

from paraplan.cost.plain_prediction import plain_prediction
from paraplan.cost.workload import Workload
from paraplan.hardware.cluster import Cluster
from paraplan.plan.files import ClusterReference, ModelReference, PlanFile, PlannedEstimate, PlannedMemory
from paraplan.search.recommendation import Recommendation
from paraplan.search.results import SearchResult

_CLEARLY_LESS = 0.8  # of the memory: a step down that is worth trying after the estimate was exceeded


def planned_estimate(workload: Workload, result: SearchResult) -> PlannedEstimate:
    """Return the prediction for the best plan of `result`, by parts of its fullest stage, and a smaller plan."""
    best = result.best
    fullest = max(best.memory, key=lambda stage: stage.total_bytes)
    flops_per_s = best.step.model_flops_per_s_per_gpu * best.plan.world_size
    limit = _CLEARLY_LESS * best.peak_memory_bytes
    smaller = [candidate for candidate in result.candidates if candidate.peak_memory_bytes <= limit]
    return PlannedEstimate(
        step_time_s=best.step.step_time_s,
        tokens_per_s_per_gpu=best.step.tokens_per_s_per_gpu,
        peak_memory_bytes=best.peak_memory_bytes,
        memory=PlannedMemory(
            parameter_bytes=fullest.parameter_bytes,
            gradient_bytes=fullest.gradient_bytes,
            optimizer_state_bytes=fullest.optimizer_state_bytes,
            activation_bytes=fullest.activation_bytes,
            workspace_bytes=fullest.workspace_bytes,
        ),
        model_flops_per_step=flops_per_s * best.step.step_time_s,
        smaller_plan=min(smaller, key=lambda plan: plan.step_time_s).plan.describe() if smaller else None,
        plain=plain_prediction(workload, best),
    )


def plan_file(answer: Recommendation) -> PlanFile:
    """Return the plan file of the recommended plan."""
    model = answer.workload.whole_model or answer.workload.model
    return PlanFile(
        plan=answer.result.best.plan,
        model=ModelReference(
            name=model.name,
            source=model.source,
            num_parameters=model.parameters.total,
            num_blocks=model.num_blocks,
            num_experts=model.num_experts,
        ),
        training=answer.workload.training,
        cluster=cluster_reference(answer),
        estimate=planned_estimate(answer.workload, answer.result),
        placement=answer.placement,
        framework=answer.framework,
    )


def cluster_reference(answer: Recommendation) -> ClusterReference:
    """Return the machines of the recommended plan as a plan file names them."""
    return reference_of(answer.workload.cluster)


def reference_of(cluster: Cluster) -> ClusterReference:
    """Return machines as a plan file names them."""
    return ClusterReference(
        name=cluster.name,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        host_memory_bytes=None if cluster.gpu.vendor == "cpu" else cluster.host_memory_bytes,
    )
