"""NeMo AutoModel's YAML, read back. Sections as in its recipes and `FSDP2Config` of August 2026."""

from __future__ import annotations

import math
from typing import NamedTuple

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, data_parallel_ranks, make_plan, optimizer_of, steps_of
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.narrow_products import torchao_recipe
from paraplan.model.trainable import AdapterKind
from paraplan.plan.parallel import ParallelPlan, ScheduleName
from paraplan.plan.stack import Dispatcher
from paraplan.plan.training import LossKernel, OptimizerName, TrainingPrecision

_STAGES = {"fsdp2": 3, "megatron_fsdp": 3, "ddp": 0}
_SCHEDULES: dict[str, ScheduleName] = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved_1f1b"}
_LOSSES: dict[str, LossKernel] = {"FusedLinearCrossEntropy": "cut", "ChunkedCrossEntropy": "chunked"}
_LENGTHS = ("seq_len", "seq_length", "max_length", "max_seq_length", "block_size", "sequence_length")
_TOWERS = ("freeze_vision_tower", "freeze_audio_tower")


class _Degrees(NamedTuple):
    tp: int
    pp: int
    cp: int
    ep: int
    """Ranks of a stage that share out experts."""


def read_automodel(text: str, *, source: str, given: Given) -> Setup:
    """Return the training that a recipe's YAML describes.

    Raises `PlanError` naming the file and key for what is broken, and for recipes that train no language model.
    """
    fields = Fields(load_document(text, source, hint="examples/llm_finetune of AutoModel has some"), source=source)
    notes: list[str] = []
    if "step_scheduler" not in fields:
        raise PlanError(
            f"{source}: without step_scheduler it is not a recipe of AutoModel for language models",
            hint="give one that trains, as in examples/llm_finetune",
        )
    sizes, model = fields.section("distributed"), fields.section("model")
    degrees = _Degrees(*(_degree(sizes, f"{name}_size") for name in ("tp", "pp", "cp", "ep")))
    product = degrees.tp * degrees.pp * degrees.cp
    ranks = given.num_gpus or math.lcm(product * (_degree(sizes, "dp_size")), degrees.ep * degrees.pp)
    if given.num_gpus is None:
        notes.append(f"no GPUs are named: {ranks} taken, as the sizes need, --profile and --nodes say otherwise")
    dp = data_parallel_ranks(source, ranks, tp=degrees.tp, pp=degrees.pp, cp=degrees.cp)
    if _degree(sizes, "dp_size") not in (1, dp):
        notes.append(f"distributed.dp_size: {dp}, what the other sizes leave of {ranks} GPUs, is priced")
    train = _trained(fields, notes)
    optimizer, optimizer_notes = _optimizer(fields.section("optimizer"))
    adapts = bool(fields.section("peft").values)
    packed = fields.section("packed_sequence").number("packed_sequence_size") or 0
    setup = Setup(
        plan=_plan(fields, sizes, given, degrees, dp=dp, notes=notes),
        tool="NeMo AutoModel",
        target="nemo-automodel",
        framework="nemo-automodel",
        precision=_precision(fields, is_full=train is None or train == "text"),
        optimizer=optimizer,
        attention=trainer.attention_of(_attention(model), notes),
        train=train,
        base_weights=trainer.quantized_weights(fields.section("quantization")) or ("bf16" if adapts else None),
        loss=_LOSSES.get(_class(fields.section("loss_fn")), "plain"),
        compiled=sizes.flag("enable_compile") or fields.section("compile").flag("enabled") or None,
        packs_samples=packed > 0,
        seq_length=packed or _length(fields.section("dataset")),
        model_name=model.text("pretrained_model_name_or_path"),
        says_gpus=False,
        notes=(*notes, *optimizer_notes),
    )
    setup = _narrow(setup, fields.section("fp8"))
    setup = setup.replace(stack=setup.stack.replace(dispatcher=_dispatcher(model)))
    return setup.replace(notes=(*setup.notes, *key_table("nemo-automodel").notes(fields)))


def _degree(sizes: Fields, key: str) -> int:
    value = sizes.values.get(key)
    return 1 if value in (None, "none", 0) and sizes.value(key) is value else sizes.count(key) or 1


def _class(section: Fields) -> str:
    return (section.text("_target_") or "").rpartition(".")[2]


def _plan(fields: Fields, sizes: Fields, given: Given, degrees: _Degrees, *, dp: int, notes: list[str]) -> ParallelPlan:
    """Return the plan: FSDP2 leaves the weights of a pipeline's blocks gathered, which is ZeRO-1 beside it."""
    strategy = sizes.text("strategy") or "fsdp2"
    if strategy not in _STAGES:
        raise sizes.error("strategy", ", ".join(_STAGES))
    stage = _STAGES[strategy] if dp * degrees.cp > 1 else 0
    if stage and (degrees.pp > 1 or sizes.flag("reshard_after_forward") is False):
        stage = 1 if degrees.pp > 1 else 2
    replicas = _degree(sizes, "dp_replicate_size")
    if dp % replicas:
        raise sizes.error("dp_replicate_size", f"a divisor of the {dp} data-parallel ranks")
    experts, rest = divmod(degrees.ep, degrees.tp)
    if degrees.ep > 1 and (rest or not experts):
        raise sizes.error("ep_size", f"a multiple of tp_size {degrees.tp}, whose ranks hold whole experts")
    scheduler, pipeline = fields.section("step_scheduler"), sizes.section("pipeline")
    micro = given.micro_batch_size or scheduler.count("local_batch_size") or 1
    if degrees.pp == 1:
        sizes.taken("pipeline")
    else:
        micro = given.micro_batch_size or pipeline.count("pp_microbatch_size") or 1
    total = given.global_batch_size or scheduler.count("global_batch_size")
    schedule = (pipeline.text("pp_schedule") or "1f1b").lower()
    if degrees.pp > 1 and schedule not in _SCHEDULES:
        raise pipeline.error("pp_schedule", ", ".join(_SCHEDULES))
    is_interleaved = degrees.pp > 1 and schedule == "interleaved1f1b"
    if is_interleaved:
        notes.append("pp_schedule interleaved1f1b: priced with two stages on each rank, layers_per_stage says how many")
        pipeline.value("layers_per_stage")
    return make_plan(
        fields.source,
        dp=dp,
        tp=degrees.tp,
        pp=degrees.pp,
        cp=degrees.cp,
        ep=max(1, experts),
        zero_stage=stage,
        zero_shards=dp // replicas if stage and 1 < replicas < dp and degrees.cp == 1 else None,
        sequence_parallel=bool(sizes.flag("sequence_parallel")) and degrees.tp > 1,
        micro_batch_size=micro,
        num_microbatches=steps_of(fields.source, total, micro=micro, dp=dp) or 1,
        pipeline_schedule=_SCHEDULES[schedule] if degrees.pp > 1 else None,
        virtual_pipeline_size=2 if is_interleaved else 1,
        recompute=given.recompute or _recompute(fields, sizes),
        offload="parameters" if sizes.value("offload_policy") and stage else "none",
    )


def _recompute(fields: Fields, sizes: Fields) -> str:
    value = sizes.value("activation_checkpointing")
    if value is None:
        value = fields.section("parallelizer").value("activation_checkpointing")
    if value in (None, False, "false", "none"):
        return "none"
    return "selective_ops" if value == "selective" else "full"


def _optimizer(section: Fields) -> tuple[OptimizerName | None, list[str]]:
    name = _class(section) or "AdamW"
    if name == "FlashAdamW":
        return "adamw", ["optimizer FlashAdamW: priced as adamw, whose states take more"]
    momentum = section.value("momentum")
    return optimizer_of("adamw" if "adam" in name.lower() else name, has_momentum=bool(momentum))


def _precision(fields: Fields, *, is_full: bool) -> TrainingPrecision:
    """Return bf16 over what is stored in fp32: weights of that type, or the optimizer's copies."""
    dtype = (fields.section("model").text("torch_dtype") or "auto").removeprefix("torch.")
    has_masters = bool(fields.section("optimizer").flag("master_weights"))
    return "bf16-pure" if is_full and not has_masters and dtype in ("auto", "bf16", "bfloat16") else "bf16"


def _trained(fields: Fields, notes: list[str]) -> str | None:
    """Return what trains: adapters, all but towers that stay frozen, or everything."""
    peft, freezes = fields.section("peft"), fields.section("freeze_config")
    if not peft.values:
        frozen = [freezes.flag(name) for name in _TOWERS if name in freezes]
        if freezes.flag("freeze_language_model"):
            return "projector"
        return "text" if frozen and all(frozen) else None
    named = peft.value("target_modules")
    words = [str(word).lstrip("*.") for word in named] if isinstance(named, list) else []
    is_every = bool(peft.flag("match_all_linear")) or not words or any(word in ("", "_proj") for word in words)
    kind: AdapterKind = "dora" if peft.flag("use_dora") else "lora"
    train, found = trainable_of(
        peft,
        kind=kind,
        rank=peft.count("dim") or 8,
        targets="all-linear" if is_every else words,
        dropout=peft.value("dropout") or 0.0,
    )
    notes += found
    return train


def _attention(model: Fields) -> object:
    backend = model.section("backend") if isinstance(model.values.get("backend"), dict) else Fields({}, source="")
    named = model.value("attn_implementation") or backend.value("attn")
    return "flash" if named == "te" else named


def _dispatcher(model: Fields) -> Dispatcher | None:
    backend = model.section("backend") if isinstance(model.values.get("backend"), dict) else Fields({}, source="")
    named = backend.text("dispatcher")
    return "deepep" if named == "deepep" else "hybridep" if named == "hybridep" else None


def _length(dataset: Fields) -> int | None:
    return next((found for key in _LENGTHS if (found := dataset.count(key)) is not None), None)


def _narrow(setup: Setup, section: Fields) -> Setup:
    if not section.flag("enabled"):
        return setup
    recipe = torchao_recipe(section, "recipe_name")
    gathers = bool(section.flag("enable_fsdp_float8_all_gather")) and setup.plan.zero_stage > 0
    return setup.replace(linear_precision="fp8", fp8_recipe=recipe, fp8_gather=gathers or None)
