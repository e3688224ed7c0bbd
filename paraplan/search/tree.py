"""The decision tree of Hugging Face's guide "Efficient Training on Multiple GPUs", as rules with their numbers.

https://huggingface.co/docs/transformers/perf_train_gpu_many
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.estimate import estimate_plan, stage_memories
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.interconnect import InterconnectThresholds, Verdict, network_verdict, node_verdict
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record
from paraplan.search.results import Decision
from paraplan.units import format_bytes, format_seconds


class TreeFacts(Record):
    """The numbers that the tree looks at. Bytes are those of one unsplit model; bandwidths are per GPU and direction.

    `training_state_bytes` is parameters, gradients and optimizer state; `least_step_bytes` what a step of the smallest
    micro-batch adds under full recompute: activations, or the copies that the optimizer makes; `largest_layer_bytes`
    the training state of the largest single layer.
    `ddp_step_s` and `one_process_step_s` are steps of one micro-batch under DDP and under DataParallel in one process.
    `has_gpus` is False of CPU processes. `node` says whether the links inside a node are fast (None where nothing is
    known of them), `network` those between nodes (None with one node).
    """

    num_gpus: int
    num_nodes: int
    usable_memory_bytes: int
    training_state_bytes: int
    least_step_bytes: int
    largest_layer_bytes: int
    node: Verdict | None = None
    network: Verdict | None = None
    ddp_step_s: float | None = None
    one_process_step_s: float | None = None
    has_gpus: bool = True
    sequence_bytes: int = 0
    """Activations of one sequence under full recompute."""
    num_experts: int = 1
    """Routed experts of a layer; 1 without a mixture."""

    @property
    def needed_bytes(self) -> int:
        """Memory that one GPU needs to train the whole model."""
        return self.training_state_bytes + self.least_step_bytes


class TreeAnswer(Record):
    """The families of plans that the tree names, most preferred first, and the decisions that led there."""

    families: tuple[str, ...]
    decisions: tuple[Decision, ...]


_EQUAL = 1.02  # predictions closer than this decide nothing: DDP is what torch recommends

Rule = Callable[[TreeFacts], "tuple[Decision, tuple[str, ...]] | None"]


def family(plan: ParallelPlan) -> str:
    """Return the family of a plan in the words of the tree: `single`, `DDP`, `ZeRO`, `PP`, `TP`, `PP x DP`, ..."""
    axes = [name for name, degree in (("PP", plan.pp), ("TP", plan.tp), ("CP", plan.cp)) if degree > 1]
    if not axes:
        if plan.dp == 1:
            return "single"
        return "ZeRO" if plan.zero_stage else "DDP"
    return " x ".join([*axes, "DP"] if plan.dp > 1 else axes)


def decide(facts: TreeFacts) -> TreeAnswer:
    """Walk the rules in order; the last rule that names families decides."""
    decisions: list[Decision] = []
    families: tuple[str, ...] = ()
    for rule in RULES:
        outcome = rule(facts)
        if outcome is not None:
            decision, named = outcome
            decisions.append(decision)
            families = named or families
    if facts.num_gpus > 1 and not _fits(facts) and facts.sequence_bytes > facts.usable_memory_bytes:
        families = (*dict.fromkeys(_with_context(name) for name in families), *families)
    return TreeAnswer(families=families, decisions=tuple(decisions))


def _with_context(name: str) -> str:
    """Return a family with context parallelism too: `TP x DP` is `TP x CP x DP`, ZeRO is `CP x DP`."""
    axes = [axis for axis in name.split(" x ") if axis in ("PP", "TP")]
    return " x ".join([*axes, "CP", *(["DP"] if name.endswith("DP") or name == "ZeRO" else [])])


def _one_gpu(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    if facts.num_gpus > 1:
        return None
    outcome = "train in one process" if _fits(facts) else "recompute, smaller micro-batches or offload"
    return Decision(rule="number of GPUs", outcome=outcome, because="there is one GPU"), ("single",)


def _model_fits(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    numbers = (
        f"training state {format_bytes(facts.training_state_bytes)} + at least {format_bytes(facts.least_step_bytes)} "
        f"for a step against {format_bytes(facts.usable_memory_bytes)} usable per GPU"
    )
    rule = "does the model fit one GPU?"
    if not _fits(facts):
        return Decision(rule=rule, outcome="no: the model has to be split", because=numbers), ()
    outcome = "yes: DDP or ZeRO" if facts.num_gpus > 1 else "yes"
    return Decision(rule=rule, outcome=outcome, because=numbers), ("DDP", "ZeRO") if facts.num_gpus > 1 else ()


def _processes(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    """DataParallel in one process against DDP, as the guide's benchmark ranks them: GPT-2 on two TITAN RTX."""
    if not _fits(facts) or facts.num_gpus == 1 or facts.num_nodes > 1 or facts.node is None or not facts.has_gpus:
        return None
    rule = "DDP, or DataParallel in one process?"
    because = (
        f"{facts.node.because}; the guide's GPT-2 on two GPUs: DDP 101 s, DataParallel 110 s, DDP without NVLink 131 s"
    )
    if facts.ddp_step_s is None or facts.one_process_step_s is None:
        return Decision(rule=rule, outcome="DDP", because=because), ()
    predicted = (
        f"predicted for one micro-batch: DDP {format_seconds(facts.ddp_step_s)}, DataParallel "
        f"{format_seconds(facts.one_process_step_s)}"
    )
    is_ddp = facts.ddp_step_s <= _EQUAL * facts.one_process_step_s
    outcome = "DDP" if is_ddp else "DataParallel in one process is faster; the search keeps to DDP"
    return Decision(rule=rule, outcome=outcome, because=f"{predicted}; {because}"), ()


def _largest_layer(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    if _fits(facts) or facts.num_gpus == 1:
        return None
    numbers = (
        f"training state of the largest layer {format_bytes(facts.largest_layer_bytes)} against "
        f"{format_bytes(facts.usable_memory_bytes)} usable per GPU"
    )
    rule = "does the largest layer fit one GPU?"
    if facts.largest_layer_bytes > facts.usable_memory_bytes:
        outcome = "no: tensor parallelism, or ZeRO with recompute and offload; a pipeline alone cannot"
        return Decision(rule=rule, outcome=outcome, because=numbers), (
            "TP",
            "TP x DP",
            "ZeRO",
            "PP x TP",
            "PP x TP x DP",
        )
    return Decision(rule=rule, outcome="yes: a pipeline is possible too", because=numbers), ()


def _links_inside(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    if _fits(facts) or facts.num_gpus == 1 or facts.num_nodes > 1 or facts.node is None:
        return None
    rule = "are the GPUs of the node connected fast?"
    if facts.largest_layer_bytes > facts.usable_memory_bytes:
        return Decision(rule=rule, outcome=_yes_or_no(facts.node), because=facts.node.because), ()
    if facts.node.is_fast:
        outcome = "yes: ZeRO, pipeline and tensor parallelism are close; the cost model decides"
        named: tuple[str, ...] = ("ZeRO", "PP", "TP", "PP x DP", "TP x DP", "PP x TP")
    else:
        outcome = "no: a pipeline before tensor parallelism and ZeRO"
        named = ("PP", "PP x DP", "ZeRO", "TP")
    return Decision(rule=rule, outcome=outcome, because=facts.node.because), named


def _links_between(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    if facts.network is None:
        return None
    rule = "are the nodes connected fast?"
    if _fits(facts):
        return Decision(rule=rule, outcome=_yes_or_no(facts.network), because=facts.network.because), ()
    if facts.network.is_fast:
        outcome = "yes: ZeRO, or pipeline x tensor x data parallelism"
        named: tuple[str, ...] = ("ZeRO", "PP x TP x DP", "PP x DP", "TP x DP", "PP x TP")
    else:
        outcome = "no, and memory is short: data x pipeline x tensor parallelism with ZeRO-1"
        named = ("PP x TP x DP", "PP x DP", "PP x TP", "PP")
    return Decision(rule=rule, outcome=outcome, because=facts.network.because), named


def _sequence(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    """Ask what the guide does not: long sequences need their tokens divided, whatever is done about parameters."""
    if facts.num_gpus == 1 or _fits(facts):
        return None
    numbers = (
        f"one sequence keeps {format_bytes(facts.sequence_bytes)} of activations under full recompute, against "
        f"{format_bytes(facts.usable_memory_bytes)} usable per GPU"
    )
    is_long = facts.sequence_bytes > facts.usable_memory_bytes
    outcome = "no: context parallelism divides its tokens" if is_long else "yes"
    return Decision(rule="do the activations of one sequence fit one GPU?", outcome=outcome, because=numbers), ()


def _experts(facts: TreeFacts) -> tuple[Decision, tuple[str, ...]] | None:
    """Ask what the guide does not: experts can stay whole on the ranks that share them out."""
    if facts.num_gpus == 1 or facts.num_experts == 1:
        return None
    outcome = "expert parallelism, where the framework has it, else as other layers"
    because = f"each token visits a few of the {facts.num_experts} experts of a layer"
    return Decision(rule="how are experts divided?", outcome=outcome, because=because), ()


def _yes_or_no(verdict: Verdict) -> str:
    return "yes" if verdict.is_fast else "no"


def _fits(facts: TreeFacts) -> bool:
    return facts.needed_bytes <= facts.usable_memory_bytes


RULES: tuple[Rule, ...] = (
    *(_one_gpu, _model_fits, _processes, _largest_layer, _links_inside, _links_between),
    *(_sequence, _experts),
)


_SEQUENCES = 4


def tree_facts(workload: Workload, thresholds: InterconnectThresholds | None = None) -> TreeFacts:
    """Return the facts of a workload: memory of one process with the smallest micro-batch, and the links."""
    training = workload.training
    group = training.learns_from.group
    count = training.global_batch_size // group
    alone = ParallelPlan(micro_batch_size=group, num_microbatches=count, recompute="full")
    costs = block_costs(workload, PlanTable.of_plans([alone]))
    memory = stage_memories(workload, alone, costs)[0]
    # Without an optimizer's state, which blocks know nothing of, the peak is where the activations are.
    without_state = replace(workload, training=training.replace(optimizer="sgd"))
    state = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_state_bytes
    model = workload.model
    largest = max([*model.blocks, model.embedding, model.head], key=lambda block: block.num_parameters)
    bytes_per_parameter = state / max(1, model.parameters.total)
    cluster = workload.cluster
    limits = thresholds or InterconnectThresholds()
    inside, between = node_verdict(cluster, limits), network_verdict(cluster, limits)
    needed = state + memory.activation_bytes + memory.workspace_bytes
    has_gpus = cluster.gpu.vendor != "cpu"
    has_choice = has_gpus and cluster.num_nodes == 1 < cluster.num_gpus and needed <= workload.usable_memory_bytes
    ddp_s, torch_data_parallel_s = _steps_of_processes(workload) if has_choice else (None, None)
    return TreeFacts(
        num_gpus=cluster.num_gpus,
        num_nodes=cluster.num_nodes,
        usable_memory_bytes=workload.usable_memory_bytes,
        training_state_bytes=state,
        least_step_bytes=memory.activation_bytes + memory.workspace_bytes,
        largest_layer_bytes=round(largest.num_parameters * bytes_per_parameter),
        node=inside,
        network=between,
        ddp_step_s=ddp_s,
        one_process_step_s=torch_data_parallel_s,
        has_gpus=has_gpus,
        sequence_bytes=stage_memories(without_state, alone, costs)[0].activation_bytes,
        num_experts=model.num_experts,
    )


def _steps_of_processes(workload: Workload) -> tuple[float, float]:
    """Return the seconds of a step of one micro-batch, a sequence or a few on each GPU, under DDP and DataParallel."""
    gpus = workload.cluster.num_gpus
    group = workload.training.learns_from.group
    each = min(_SEQUENCES, max(1, workload.training.global_batch_size // gpus // group) * group)
    made = replace(workload, training=workload.training.replace(global_batch_size=each * gpus))
    plans = (
        ParallelPlan(dp=gpus, micro_batch_size=each),
        ParallelPlan(devices_per_process=gpus, micro_batch_size=each * gpus),
    )
    ddp, one_process = (estimate_plan(made, plan).step.step_time_s for plan in plans)
    return ddp, one_process
