"""NVIDIA NeMo AutoModel: the YAML of a recipe for language models.

Sections and fields as in its recipes, `FSDP2Config` (components/distributed/config.py) and `PeftConfig`
(components/_peft/lora.py) of August 2026.
"""

from __future__ import annotations

from paraplan.interop.exported import (
    TOLD_FIELDS,
    Exported,
    Gap,
    Subject,
    expert_ranks,
    field_gap,
    hybrid_gap,
    order_gap,
    remarks,
    shard_degrees,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment, to_yaml
from paraplan.interop.targets.adapters import (
    adapter_gap,
    alpha_note,
    alpha_of,
    base_gap,
    modules_of,
    quantizer_gap,
    trainable_of,
    whole_modules,
)
from paraplan.model.trainable import ALL_LINEAR, AdapterSpec
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.stages import even_split
from paraplan.plan.training import TORCHAO_RECIPES, TrainingSpec

_PACKAGE = "nemo_automodel.components"
_SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved_1f1b": "interleaved1f1b"}
_RECOMPUTE: dict[str, object] = {"none": False, "selective_ops": "selective", "full": True}
_LOSSES = {
    "plain": f"{_PACKAGE}.loss.masked_ce.MaskedCrossEntropy",
    "cut": f"{_PACKAGE}.loss.linear_ce.FusedLinearCrossEntropy",
    "chunked": f"{_PACKAGE}.loss.chunked_ce.ChunkedCrossEntropy",
}
_OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"_target_": "torch.optim.AdamW"},
    "sgd": {"_target_": "torch.optim.SGD"},
    "sgd_momentum": {"_target_": "torch.optim.SGD", "momentum": 0.9},
}
_BASES = ("bf16", "nf4", "nf4:double", "fp4", "fp4:double", "int8")
_TYPES = {"bf16": "float32", "bf16-pure": "bfloat16"}
_TOLD = frozenset({"dispatcher"})


def to_nemo_automodel(subject: Subject) -> Exported:
    """Return the recipe; the model, its data and the learning rate are the user's."""
    plan, training, gaps = subject.plan, subject.training, nemo_automodel_gaps(subject)
    adapter = trainable_of(subject).adapter
    notes = ["model.pretrained_model_name_or_path, dataset and dataloader, and the learning rate"]
    if adapter is not None:
        notes.append(alpha_note(adapter))
    losses = tuple(_LOSSES)
    notes += shared_notes(subject, TOLD_FIELDS - {"attention"}, losses=losses, tells=_TOLD)
    in_step = plan.num_microbatches if plan.pp > 1 else 1
    config: dict[str, object] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": plan.global_batch_size,
            "local_batch_size": plan.micro_batch_size * in_step,
        },
        "dist_env": {"backend": "nccl"},
        "model": _model(training),
        "distributed": _distributed(subject),
    }
    if training is not None:
        config |= _training(training)
    if adapter is not None:
        config["peft"] = _peft(adapter)
    text = comment(remarks(subject, gaps, notes)) + to_yaml(config)
    return Exported(target="nemo-automodel", text=text, gaps=tuple(gaps), notes=tuple(notes))


def nemo_automodel_gaps(subject: Subject) -> list[Gap]:
    """Return what a recipe has no words for."""
    plan, training, trainable = subject.plan, subject.training, trainable_of(subject)
    model = subject.file.model
    gaps = []
    if plan.pp > 1:
        gaps += field_gap(plan, "zero_stage", (1,), "beside pp AutoModel's FSDP2 leaves weights gathered (stage 1)")
        gaps += field_gap(plan, "pipeline_schedule", tuple(_SCHEDULES), "AutoModel's recipes have 1F1B and GPipe")
        if model is None or model.num_blocks is None:
            gaps.append(Gap(part="stages", reason="the number of blocks is not in the plan file"))
        elif plan.stage_blocks is not None and (
            min(plan.stage_blocks) < 1 or plan.stage_blocks != even_split(model.num_blocks, plan.num_stages)
        ):
            gaps.append(Gap(part=f"stage_blocks={plan.stage_blocks}", reason="AutoModel's stages are alike"))
    else:
        gaps += field_gap(plan, "zero_stage", (0, 2, 3), "AutoModel shards with FSDP2: gradients (2), parameters (3)")
    if plan.zero_stage == 0 and plan.world_size > plan.dp:
        gaps.append(Gap(part="DDP beside other axes", reason="AutoModel has DDP alone, or FSDP2 with other axes"))
    if plan.zero_stage == 0:
        gaps += field_gap(plan, "ep", (1,), "AutoModel spreads experts beside FSDP2")
    gaps += hybrid_gap(plan, "AutoModel")
    gaps += field_gap(plan, "recompute", tuple(_RECOMPUTE), "AutoModel's selective recompute chooses other operations")
    gaps += field_gap(plan, "offload", ("none", "parameters"), "AutoModel offloads all of FSDP2's state or nothing")
    if plan.offload == "parameters" and plan.zero_stage == 0:
        gaps += field_gap(plan, "offload", ("none",), "AutoModel offloads under FSDP2")
    gaps += training_gap(training, "precision", tuple(_TYPES), "AutoModel's FSDP2 computes in bf16")
    gaps += training_gap(training, "optimizer", tuple(_OPTIMIZERS), "paraplan writes torch's AdamW and SGD for it")
    gaps += training_gap(training, "linear_precision", ("16bit", "fp8"), "AutoModel's fp8 section is torchao's")
    gaps += training_gap(training, "fp8_recipe", (None, *TORCHAO_RECIPES), "AutoModel's fp8 section is torchao's")
    gaps += training_gap(training, "loss", tuple(_LOSSES), "AutoModel has its own fused and chunked losses")
    gaps += adapter_gap(trainable, "AutoModel")
    if trainable.adapter is not None and whole_modules(trainable):
        gaps.append(Gap(part=f"train={trainable.text}", reason="AutoModel trains adapters alone"))
    elif trainable.adapter is None and training is not None and training.train not in ("full", "text"):
        gaps.append(Gap(part=f"train={training.train}", reason="AutoModel freezes towers"))
    gaps += base_gap(subject, "AutoModel", _BASES) + quantizer_gap(subject, "AutoModel", ("transformers",))
    return gaps + order_gap(plan, "AutoModel", MEGATRON_RANK_ORDER)


def _model(training: TrainingSpec | None) -> dict[str, object]:
    model: dict[str, object] = {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}
    if training is None:
        return model
    has_adapters = training.trainable.adapter is not None
    model["torch_dtype"] = "bfloat16" if has_adapters else _TYPES.get(training.precision, "float32")
    if training.stack.dispatcher in ("deepep", "hybridep"):
        backend = {"_target_": f"{_PACKAGE}.models.common.BackendConfig", "dispatcher": training.stack.dispatcher}
        model["backend"] = backend
    return model


def _distributed(subject: Subject) -> dict[str, object]:
    plan, file_model = subject.plan, subject.file.model
    is_ddp = plan.zero_stage == 0 and plan.world_size > 1
    section: dict[str, object] = {
        "strategy": "ddp" if is_ddp else "fsdp2",
        "tp_size": plan.tp,
        "cp_size": plan.cp,
        "pp_size": plan.pp,
        "sequence_parallel": plan.sequence_parallel,
        "activation_checkpointing": _RECOMPUTE.get(plan.recompute, False),
    }
    ranks = expert_ranks(subject)
    if ranks > 1 and plan.zero_stage:
        section["ep_size"] = ranks
    replicas, _ = shard_degrees(plan)
    if replicas > 1 and plan.zero_stage:
        section["dp_replicate_size"] = replicas
    if plan.pp == 1 and plan.zero_stage == 2:
        section["reshard_after_forward"] = False
    if plan.offload == "parameters" and plan.zero_stage:
        section["offload_policy"] = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    if plan.pp > 1:
        section["pipeline"] = _pipeline(plan, file_model.num_blocks if file_model is not None else None)
    return section


def _pipeline(plan: ParallelPlan, num_blocks: int | None) -> dict[str, object]:
    section: dict[str, object] = {
        "pp_schedule": _SCHEDULES.get(plan.pipeline_schedule or "", "1f1b"),
        "pp_microbatch_size": plan.micro_batch_size,
    }
    if num_blocks is not None:
        section["layers_per_stage"] = max(even_split(num_blocks, plan.num_stages))
    return section


def _training(training: TrainingSpec) -> dict[str, object]:
    config: dict[str, object] = {"dataset": {"seq_length": training.seq_length}}
    if training.packs_samples:
        config["packed_sequence"] = {"packed_sequence_size": training.seq_length}
    config["loss_fn"] = {"_target_": _LOSSES.get(training.loss, _LOSSES["plain"])}
    config["optimizer"] = _OPTIMIZERS.get(training.optimizer, _OPTIMIZERS["adamw"])
    if training.compiled:
        config["compile"] = {"enabled": True}
    if training.linear_precision == "fp8":
        recipe = {"recipe_name": training.fp8_recipe or "tensorwise"}
        config["fp8"] = {"enabled": True, **recipe, "enable_fsdp_float8_all_gather": bool(training.fp8_gather)}
    base = training.base_weights or "bf16"
    if base == "int8":
        config["quantization"] = {"load_in_8bit": True}
    elif base != "bf16" and training.trainable.adapter is not None:
        kind, _, double = base.partition(":")
        config["quantization"] = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": bool(double),
        }
    return config


def _peft(adapter: AdapterSpec) -> dict[str, object]:
    names = modules_of(adapter)
    section: dict[str, object] = {"_target_": f"{_PACKAGE}._peft.lora.PeftConfig"}
    if names == [ALL_LINEAR]:
        section["match_all_linear"] = True
    else:
        section["target_modules"] = [f"*{name}" for name in names]
    section |= {"dim": adapter.rank, "alpha": alpha_of(adapter), "dropout": adapter.dropout}
    return section | ({"use_dora": True} if adapter.kind == "dora" else {})
