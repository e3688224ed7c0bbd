"""torchtitan since v0.3.0, which is configured in Python: a function that sets what a plan decides.

Fields as in its config/configs.py, trainer.py and distributed/activation_checkpoint.py, at v0.3.0 and in August 2026:
v0.3.0 counts batches in sequences, what came after it in tokens. Replicas are FSDP groups of one there, so they go
with any other axis.
"""

from __future__ import annotations

from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    expert_ranks,
    field_gap,
    order_gap,
    remarks,
    shard_degrees,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment
from paraplan.interop.targets.torchtitan import DTYPES, SCHEDULES, model_parts, shared_gaps
from paraplan.plan.parallel import MEGATRON_RANK_ORDER

_FUNCTION = '''\
from torchtitan.trainer import Trainer


def apply_plan(config: Trainer.Config) -> Trainer.Config:
    """Set what the plan decides, in a configuration such as llama3_8b() of a config_registry."""
'''

_POLICIES = {"full": "FullAC", "selective": "SelectiveAC", "selective_ops": "SelectiveAC"}


def to_torchtitan_python(subject: Subject) -> Exported:
    """Return a Python module with `apply_plan`, to be called where a configuration is made."""
    gaps = torchtitan_python_gaps(subject)
    notes = [
        "call it in a configuration of your own: def my_run(): return apply_plan(llama3_8b())",
        "the data set, the number of steps and the learning rate are those of that configuration",
    ]
    notes += shared_notes(subject, {"compiled", "seq_length", "optimizer"})
    lines = [f"    config.{name} = {value}\n" for name, value in _settings(subject).items()]
    released, later = (
        [f"        config.{name} = {value!r}\n" for name, value in sizes.items()] for sizes in _batch(subject)
    )
    lines += ['    if hasattr(config.training, "local_batch_size"):  # v0.3.0\n', *released]
    lines += ["    else:\n", *later] if later else []
    policy = _POLICIES.get(subject.plan.recompute)
    imported = f"from torchtitan.distributed.activation_checkpoint import {policy}\n" if policy else ""
    text = comment(remarks(subject, gaps, notes)) + imported + _FUNCTION + "".join(lines) + "    return config\n"
    return Exported(target="torchtitan-python", text=text, gaps=tuple(gaps), notes=tuple(notes))


def torchtitan_python_gaps(subject: Subject) -> list[Gap]:
    """Return what its configuration has no words for."""
    plan = subject.plan
    gaps = field_gap(
        plan, "zero_stage", (0, 2, 3), "torchtitan shards with FSDP2: gradients too (2), parameters too (3)"
    )
    if plan.zero_stage == 0:
        reason = "torchtitan lays experts out over the ranks of FSDP, ZeRO stages 2 and 3, and of tp, which splits none"
        gaps += field_gap(plan, "ep", (1,), reason)
    gaps += shared_gaps(subject)
    gaps += training_gap(subject.training, "optimizer", ("adamw",), "apply_plan leaves the configuration's optimizer")
    return gaps + order_gap(plan, "torchtitan", MEGATRON_RANK_ORDER)


def _settings(subject: Subject) -> dict[str, str]:
    """Return the fields of the configuration with their values as Python writes them."""
    plan, training = subject.plan, subject.training
    replicas, shards = shard_degrees(plan) if plan.zero_stage else (plan.dp, 1)
    settings: dict[str, object] = {
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": shards,
        "parallelism.fsdp_reshard_after_forward": "always" if plan.zero_stage == 3 else "never",
        "parallelism.tensor_parallel_degree": plan.tp,
        "parallelism.enable_sequence_parallel": plan.sequence_parallel,
        "parallelism.context_parallel_degree": plan.cp,
        "parallelism.pipeline_parallel_degree": plan.pp,
        "training.enable_cpu_offload": plan.offload == "parameters",
    }
    ranks = expert_ranks(subject)
    if ranks > 1 and plan.zero_stage:
        settings["parallelism.expert_parallel_degree"] = ranks
    if plan.pp > 1:
        if plan.pipeline_schedule in SCHEDULES:
            settings["parallelism.pipeline_parallel_schedule"] = SCHEDULES[plan.pipeline_schedule]
        parts = model_parts(subject, head="lm_head")
        if parts is not None:
            settings["parallelism.module_fqns_per_model_part"] = parts
    if training is not None:
        settings["training.mixed_precision_param"] = DTYPES.get(training.precision, "bfloat16")
        if training.compiled:
            settings |= {"compile.enable": True, "compile.components": ["model"]}
    policy = _POLICIES.get(plan.recompute)
    checkpoint = f"{policy}.Config()" if policy else "None"
    return {name: repr(value) for name, value in settings.items()} | {"activation_checkpoint": checkpoint}


def _batch(subject: Subject) -> tuple[dict[str, object], dict[str, object]]:
    """Return the sizes of a batch as v0.3.0 has them, in sequences, and as later torchtitan does, in tokens."""
    plan, training = subject.plan, subject.training
    released: dict[str, object] = {
        "training.local_batch_size": plan.micro_batch_size * (plan.num_microbatches if plan.pp > 1 else 1),
        "training.global_batch_size": plan.global_batch_size,
    }
    later: dict[str, object] = {}
    has_graphs = training is not None and training.stack.cuda_graphs == "full"
    if not has_graphs or plan.pp > 1 or expert_ranks(subject) > 1 or plan.offload != "none":
        later["training.disable_cuda_graphs"] = (
            True  # of August 2026; it refuses them beside a pipeline, ep and offload
        )
    if plan.pp > 1:
        released["parallelism.pipeline_parallel_microbatch_size"] = plan.micro_batch_size
        later["parallelism.num_pp_microbatches"] = plan.num_microbatches
    if training is None:
        return released, later
    released["training.seq_len"] = training.seq_length
    later |= {
        "training.max_context_length": training.seq_length,
        "training.num_tokens_per_microbatch_per_dp_rank": plan.micro_batch_size * training.seq_length,
        "training.num_tokens_per_train_step": plan.global_batch_size * training.seq_length,
    }
    return released, later
