"""torchtitan since v0.2.2, which is configured in Python: a function that sets what a plan decides.

Fields as in its config/configs.py, trainer.py and distributed/activation_checkpoint.py of August 2026. Replicas are
FSDP groups of one there, so they go with any other axis.
"""

from __future__ import annotations

from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    field_gap,
    order_gap,
    remarks,
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

_POLICIES = {"full": "FullAC", "selective": "SelectiveAC"}


def to_torchtitan_python(subject: Subject) -> Exported:
    """Return a Python module with `apply_plan`, to be called where a configuration is made."""
    gaps = _gaps(subject)
    notes = [
        "call it in a configuration of your own: def my_run(): return apply_plan(llama3_8b())",
        "the data set, the number of steps and the learning rate are those of that configuration",
    ]
    notes += shared_notes(subject)
    lines = [f"    config.{name} = {value}\n" for name, value in _settings(subject).items()]
    policy = _POLICIES.get(subject.plan.recompute)
    imported = f"from torchtitan.distributed.activation_checkpoint import {policy}\n" if policy else ""
    text = comment(remarks(subject, gaps, notes)) + imported + _FUNCTION + "".join(lines) + "    return config\n"
    return Exported(target="torchtitan-python", text=text, gaps=tuple(gaps), notes=tuple(notes))


def _gaps(subject: Subject) -> list[Gap]:
    plan = subject.plan
    gaps = field_gap(
        plan, "zero_stage", (0, 2, 3), "torchtitan shards with FSDP2: gradients too (2), parameters too (3)"
    )
    gaps += shared_gaps(subject)
    gaps += training_gap(subject.training, "optimizer", ("adamw",), "apply_plan leaves the configuration's optimizer")
    return gaps + order_gap(plan, "torchtitan", MEGATRON_RANK_ORDER)


def _settings(subject: Subject) -> dict[str, str]:
    """Return the fields of the configuration with their values as Python writes them."""
    plan, training = subject.plan, subject.training
    replicates = plan.zero_stage == 0
    settings: dict[str, object] = {
        "parallelism.data_parallel_replicate_degree": plan.dp if replicates else 1,
        "parallelism.data_parallel_shard_degree": 1 if replicates else plan.dp,
        "parallelism.fsdp_reshard_after_forward": "always" if plan.zero_stage == 3 else "never",
        "parallelism.tensor_parallel_degree": plan.tp,
        "parallelism.enable_sequence_parallel": plan.sequence_parallel,
        "parallelism.context_parallel_degree": plan.cp,
        "parallelism.pipeline_parallel_degree": plan.pp,
        "training.enable_cpu_offload": plan.offload == "parameters",
    }
    if plan.pp > 1:
        settings["parallelism.num_pp_microbatches"] = plan.num_microbatches
        if plan.pipeline_schedule in SCHEDULES:
            settings["parallelism.pipeline_parallel_schedule"] = SCHEDULES[plan.pipeline_schedule]
        parts = model_parts(subject, head="lm_head")
        if parts is not None:
            settings["parallelism.module_fqns_per_model_part"] = parts
    if training is not None:
        settings["training.max_context_length"] = training.seq_length
        settings["training.num_tokens_per_microbatch_per_dp_rank"] = plan.micro_batch_size * training.seq_length
        settings["training.num_tokens_per_train_step"] = plan.global_batch_size * training.seq_length
        settings["training.mixed_precision_param"] = DTYPES.get(training.precision, "bfloat16")
    policy = _POLICIES.get(plan.recompute)
    checkpoint = f"{policy}.Config()" if policy else "None"
    return {name: repr(value) for name, value in settings.items()} | {"activation_checkpoint": checkpoint}
