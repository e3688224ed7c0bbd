"""NVIDIA Megatron-Bridge (NeMo): a YAML of overrides for a recipe, as its examples' `*_override_example.yaml`.

Sections and fields as in its `ConfigContainer` (training/config.py) of August 2026: model, train, optimizer, ddp,
dist, checkpoint, mixed_precision.
"""

from __future__ import annotations

from paraplan.interop.exported import Exported, Subject, expert_ranks, remarks, shard_degrees, shared_notes
from paraplan.interop.exported import order_gap as gap_of_order
from paraplan.interop.quoting import comment, to_yaml
from paraplan.interop.targets.megatron_lm import (
    GRAPHS,
    MODULES_NOTE,
    TOLD,
    interleaved_group,
    megatron_gaps,
    pipeline_layout,
    recipe_name,
    recomputed_modules,
)
from paraplan.plan.parallel import MEGATRON_RANK_ORDER
from paraplan.plan.stack import StackSettings
from paraplan.plan.stages import even_split
from paraplan.plan.training import LinearPrecision

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "sgd_momentum": "sgd", "muon": "muon"}


_NARROW: dict[LinearPrecision, str] = {
    "16bit": "",
    "fp8": "",
    "mxfp8": "_with_mxfp8",
    "nvfp4": "_with_nvfp4",
}
_SCALING = {
    "delayed": "_with_fp8_delayed_scaling",
    "tensorwise": "_with_fp8_current_scaling",
    "blockwise": "_with_fp8_subchannel_scaling",
}
"""Names of its recipes of precision (src/megatron/bridge/training/mixed_precision.py)."""


def to_megatron_bridge(subject: Subject) -> Exported:
    """Return the overrides; the recipe of the model supplies the rest."""
    plan, training = subject.plan, subject.training
    gaps = megatron_gaps(subject)
    notes = [
        "the model: start from its recipe, and give this file as the overrides",
        *shared_notes(subject, {"linear_precision", "seq_length", "optimizer"}, tells=TOLD),
    ]
    if plan.recompute == "selective_ops":
        notes.append(MODULES_NOTE)
    config: dict[str, object] = {
        "model": _model(subject),
        "train": {"micro_batch_size": plan.micro_batch_size, "global_batch_size": plan.global_batch_size},
    }
    if training is not None:
        config["dataset"] = {"seq_length": training.seq_length}
        # null stands for fp32: left out, the recipe's own 16 bits would stay.
        narrow = _NARROW[training.linear_precision]
        if training.linear_precision == "fp8":
            narrow = _SCALING[recipe_name(training, usual="tensorwise")]
        config["mixed_precision"] = f"{training.precision}{narrow}_mixed" if training.precision != "fp32" else None
    optimizer = _optimizer(subject)
    if optimizer:
        config["optimizer"] = optimizer
    config["ddp"] = _ddp(subject)
    distributed: dict[str, object] = {"use_megatron_fsdp": plan.zero_stage >= 2}
    if gap_of_order(plan, "", MEGATRON_RANK_ORDER):
        distributed["use_tp_pp_dp_mapping"] = True
    config["dist"] = distributed
    if plan.zero_stage >= 2:
        config["checkpoint"] = {"ckpt_format": "fsdp_dtensor"}
    text = comment(remarks(subject, gaps, notes)) + to_yaml(config)
    return Exported(target="megatron-bridge", text=text, gaps=tuple(gaps), notes=tuple(notes))


def _model(subject: Subject) -> dict[str, object]:
    plan, file_model = subject.plan, subject.file.model
    model: dict[str, object] = {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "context_parallel_size": plan.cp,
        "sequence_parallel": plan.sequence_parallel,
    }
    stack = subject.training.stack if subject.training is not None else StackSettings()
    is_split = (stack.etp or 1) > 1
    experts = plan.ep if is_split else expert_ranks(subject)
    if experts > 1:
        model |= {
            "expert_model_parallel_size": experts,
            "expert_tensor_parallel_size": plan.tp if is_split else 1,
            "moe_token_dispatcher_type": "alltoall" if stack.dispatcher in (None, "alltoall") else "flex",
        }
    model |= _told(stack)
    if subject.training is not None:
        model["seq_length"] = subject.training.seq_length
    num_blocks = file_model.num_blocks if file_model is not None else None
    blocks = plan.stage_blocks or (even_split(num_blocks, plan.num_stages) if num_blocks is not None else None)
    if plan.pp > 1 and blocks is not None and len(set(blocks)) > 1:
        model["pipeline_model_parallel_layout"] = pipeline_layout(plan, sum(blocks))
    elif plan.virtual_pipeline_size > 1:
        model["virtual_pipeline_model_parallel_size"] = plan.virtual_pipeline_size
    group = interleaved_group(plan)
    if group is not None:
        model["microbatch_group_size_per_vp_stage"] = group
    if plan.recompute == "selective":
        model["recompute_granularity"] = "selective"
    elif plan.recompute == "selective_ops":
        model |= {"recompute_granularity": "selective", "recompute_modules": recomputed_modules(plan)}
        if experts > 1:
            model["moe_grouped_gemm"] = True
    elif plan.recompute == "full":
        model |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return model


def _told(stack: StackSettings) -> dict[str, object]:
    """Return the fields of the model for settings of the software that the plan was made for."""
    told: dict[str, object] = {
        "moe_flex_dispatcher_backend": stack.dispatcher if stack.dispatcher in ("deepep", "hybridep") else None,
        "overlap_moe_expert_parallel_comm": stack.overlaps_experts,
        "cuda_graph_impl": GRAPHS[stack.cuda_graphs] if stack.cuda_graphs is not None else None,
        "fp8_dot_product_attention": stack.fp8_attention,
        "cross_entropy_loss_fusion": True if stack.engine_loss else stack.compiled_loss,
        "cross_entropy_fusion_impl": "te" if stack.engine_loss else "native" if stack.compiled_loss else None,
        "gradient_accumulation_fusion": stack.fuses_accumulation,
        "tp_comm_overlap": stack.overlaps_products,
    }
    return {name: value for name, value in told.items() if value is not None}


def _optimizer(subject: Subject) -> dict[str, object]:
    optimizer: dict[str, object] = {}
    if subject.training is not None and subject.training.optimizer in _OPTIMIZERS:
        optimizer["optimizer"] = _OPTIMIZERS[subject.training.optimizer]
        if subject.training.optimizer == "sgd":
            optimizer["sgd_momentum"] = 0.0
    if subject.plan.offload == "optimizer":
        optimizer |= {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
    return optimizer


def _ddp(subject: Subject) -> dict[str, object]:
    plan = subject.plan
    stack = subject.training.stack if subject.training is not None else StackSettings()
    overlaps = stack.overlaps_gradients is not False
    ddp: dict[str, object] = {
        "use_distributed_optimizer": plan.zero_stage >= 1,
        "overlap_grad_reduce": overlaps and plan.dp * plan.cp > 1,
        "overlap_param_gather": overlaps and plan.zero_stage >= 1,
    }
    if stack.gradient_bytes is not None:
        ddp["grad_reduce_in_fp32"] = stack.gradient_bytes == 4
    replicas, _ = shard_degrees(plan)
    if replicas > 1:
        ddp["num_distributed_optimizer_instances"] = replicas
    if plan.zero_stage >= 2:
        ddp |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _SHARDING[plan.zero_stage]}
    return ddp
