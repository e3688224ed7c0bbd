"""Megatron-LM's arguments, read back. Options as in its training/arguments.py of August 2026 and older spellings."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping

from paraplan.errors import PlanError
from paraplan.interop.setup import Fields, Given, Setup, data_parallel_ranks, make_plan, optimizer_of
from paraplan.interop.targets.megatron_lm import PIPELINE_INSIDE_DATA
from paraplan.plan.parallel import MEGATRON_RANK_ORDER
from paraplan.plan.training import AttentionKind, Fp8Recipe, LinearPrecision, TrainingPrecision

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_READ = frozenset(
    f"--{name}"
    for name in (
        *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
        *("expert-model-parallel-size", "expert-tensor-parallel-size", "moe-token-dispatcher-type"),
        *("micro-batch-size", "global-batch-size", "seq-length", "num-layers", "optimizer", "bf16", "fp16"),
        *("sequence-parallel", "use-distributed-optimizer", "optimizer-cpu-offload", "use-tp-pp-dp-mapping"),
        *("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp", "data-parallel-sharding-strategy"),
        *("num-distributed-optimizer-instances", "recompute-method"),
        *("recompute-granularity", "recompute-activations", "checkpoint-activations", "transformer-impl"),
        *("pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        *("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"),
        *("use-flash-attn", "attention-backend"),
    )
)
_MISSPELT = 0.93
"""An option as near to one of `_READ` as this (difflib's ratio) is that one misspelt.

Of the 924 options in Megatron-LM's sources (commit d98e8a64dd) none is nearer than 0.89 to one that is read here.
"""
_ATTENTION: dict[str, AttentionKind] = {"flash": "flash", "fused": "flash", "unfused": "eager", "local": "eager"}


def read_megatron_lm(arguments: str, *, source: str, given: Given) -> Setup:
    """Return the training that a Megatron-LM command line describes; the model's own options are passed over.

    The number of GPUs is not among them. Raises `PlanError` naming the option for what is broken.
    """
    fields = Fields(_options(arguments, source), source=source)
    tp, pp, cp = (
        fields.count(f"--{name}-parallel-size") or 1 for name in ("tensor-model", "pipeline-model", "context")
    )
    if given.num_gpus is None:
        raise PlanError(f"{source} does not say how many GPUs there are", hint="give --profile NAME and --nodes N")
    dp = data_parallel_ranks(source, given.num_gpus, tp=tp, pp=pp, cp=cp)
    micro, steps = _batch(fields, given, dp)
    zero_stage = _zero_stage(fields) if dp * cp > 1 else 0
    has_momentum = str(fields.values.get("--sgd-momentum")) not in ("0", "0.0")
    optimizer, notes = optimizer_of(fields.text("--optimizer") or "adam", has_momentum=has_momentum)
    ep, expert_notes = _experts(fields, tp, dp * cp)
    shards = _shards(fields, dp, cp, ep, notes) if zero_stage else None
    notes += _unpriced(fields)
    notes += expert_notes
    stages = _stages(fields, pp)
    virtual = _virtual(fields, pp, len(stages) if stages else None)
    plan = make_plan(
        source,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero_stage=zero_stage,
        zero_shards=shards,
        sequence_parallel="--sequence-parallel" in fields and tp > 1,
        micro_batch_size=micro,
        num_microbatches=steps,
        pipeline_schedule=None if pp == 1 else "interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_pipeline_size=virtual,
        stage_blocks=stages,
        recompute=given.recompute or _recompute(fields),
        offload="optimizer" if "--optimizer-cpu-offload" in fields else "none",
        rank_order=PIPELINE_INSIDE_DATA if "--use-tp-pp-dp-mapping" in fields else MEGATRON_RANK_ORDER,
    )
    local = " transformer-impl=local" if fields.text("--transformer-impl") == "local" else ""
    return Setup(
        plan=plan,
        tool="Megatron-LM",
        target="megatron-lm",
        framework="megatron-core" + local,
        seq_length=fields.count("--seq-length"),
        precision=_precision(fields),
        linear_precision=_linear_precision(fields),
        fp8_recipe=_fp8_recipe(fields),
        fp8_gather=True if "--fp8-param-gather" in fields and _linear_precision(fields) in ("fp8", "mxfp8") else None,
        optimizer=optimizer,
        attention=_attention(fields),
        notes=tuple(notes),
    )


def _shards(fields: Fields, dp: int, cp: int, ep: int, notes: list[str]) -> int | None:
    """Return the ranks of a sharded group where there are several of them (instances), None for one; add notes."""
    name = "--num-distributed-optimizer-instances"
    instances = fields.count(name) or 1
    if (dp * cp) % instances:
        raise fields.error(name, f"a divisor of the {dp * cp} data-parallel ranks")
    if instances in (1, dp * cp):
        return None
    if cp > 1 or ep > 1:
        notes.append(f"{name} {instances}: priced as sharded over all ranks, as its groups are of cp or ep too")
        return None
    return dp // instances


def _unpriced(fields: Fields) -> list[str]:
    """Return what is priced otherwise than the command line has it."""
    notes = []
    if fields.text("--recompute-method") == "block":
        notes.append("--recompute-method block: recomputes some layers of a stage; priced as all of them")
    return notes


def _batch(fields: Fields, given: Given, dp: int) -> tuple[int, int]:
    """Return the micro-batch, and how many of them a step has."""
    source = fields.source
    micro = given.micro_batch_size or fields.count("--micro-batch-size")
    if micro is None:
        raise PlanError(f"{source}: --micro-batch-size is missing", hint="Megatron-LM needs it too")
    batch = given.global_batch_size or fields.count("--global-batch-size") or micro * dp
    steps, rest = divmod(batch, micro * dp)
    if rest or not steps:
        raise PlanError(
            f"{source}: --global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x {dp} "
            "data-parallel ranks",
            hint="fix the sizes, or say what machines they are for: --profile NAME --nodes N",
        )
    return micro, steps


def _experts(fields: Fields, tp: int, ranks: int) -> tuple[int, list[str]]:
    """Return the ranks that share out experts, and where these are laid out or sent otherwise than a plan has it.

    `ranks` are those along dp and cp together.
    """
    ep = fields.count("--expert-model-parallel-size") or 1
    if ranks % ep:
        raise PlanError(
            f"{fields.source}: --expert-model-parallel-size {ep} does not divide the {ranks} data- and "
            "context-parallel ranks",
            hint="say how many GPUs there are (--profile NAME --nodes N); experts over ranks of tp too are not priced",
        )
    notes: list[str] = []
    if ep == 1:
        return ep, notes
    if (fields.count("--expert-tensor-parallel-size") or tp) != tp:
        notes.append(f"--expert-tensor-parallel-size: experts are priced as divided over the {tp} ranks of tp")
    kind = fields.text("--moe-token-dispatcher-type") or "allgather"
    if kind != "alltoall":
        notes.append(f"--moe-token-dispatcher-type {kind}: tokens are priced as sent all-to-all")
    return ep, notes


def _options(arguments: str, source: str) -> Mapping[str, object]:
    """Return the options of a command line with their values, True for those without one; words before are passed."""
    try:
        words = shlex.split(arguments.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"{source} is no command line: {error}", hint="check its quotes") from None
    options: dict[str, object] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, is_given, value = word.partition("=")
            name = "--" + name[2:].replace("_", "-")
            options[name] = value if is_given else True
        elif name is not None and options[name] is True:
            options[name] = word
    if not options:
        raise PlanError(f"{source} holds no option", hint='for example "--tensor-model-parallel-size 2 ..."')
    for name in options.keys() - _READ:
        meant = difflib.get_close_matches(name, sorted(_READ), n=1, cutoff=_MISSPELT)
        if meant:
            raise PlanError(f"{source}: {name} is no option of Megatron-LM", hint=f"did you mean {meant[0]}?")
    return options


def _zero_stage(fields: Fields) -> int:
    if "--use-torch-fsdp2" in fields:
        return 3
    if "--use-megatron-fsdp" in fields or "--use-custom-fsdp" in fields:
        strategy = fields.text("--data-parallel-sharding-strategy") or "optim_grads_params"
        if strategy not in _STRATEGIES:
            raise fields.error("--data-parallel-sharding-strategy", ", ".join(_STRATEGIES))
        return _STRATEGIES[strategy]
    return 1 if "--use-distributed-optimizer" in fields else 0


def _recompute(fields: Fields) -> str:
    granularity = fields.text("--recompute-granularity")
    if granularity not in (None, "full", "selective"):
        raise fields.error("--recompute-granularity", "full or selective")
    if granularity == "selective" and fields.text("--recompute-modules") not in (None, "core_attn"):
        return "selective_ops"  # of several modules the first is read
    if granularity is not None:
        return granularity
    if "--checkpoint-activations" in fields:
        return "full"
    return "selective" if "--recompute-activations" in fields else "none"


def _stages(fields: Fields, pp: int) -> tuple[int, ...] | None:
    """Return the blocks of each stage of a layout, or of a shorter first or last stage; None for an even cut."""
    layout = fields.text("--pipeline-model-parallel-layout")
    if layout is not None:
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            layout = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), layout.replace(",", ""))
        stages = tuple(part.count("t") for part in layout.split("|"))
        if re.fullmatch(r"[EtmL|]+", layout) is not None and 0 in stages:
            raise fields.error(
                "--pipeline-model-parallel-layout", "a block (t) in every stage, without which none is priced"
            )
        if re.fullmatch(r"[EtmL|]+", layout) is None or len(stages) % pp:
            raise fields.error(
                "--pipeline-model-parallel-layout",
                f"E, t, m and L in stages apart by |, a multiple of {pp}",
            )
        return stages
    ends = [fields.count(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    num_blocks = fields.count("--num-layers")
    if pp == 1 or num_blocks is None or ends == [None, None]:
        return None
    inner, rest = divmod(num_blocks - sum(end or 0 for end in ends), pp - sum(end is not None for end in ends) or 1)
    if rest or inner < 0:
        raise fields.error("--num-layers", "layers that the other stages share evenly")
    return (ends[0] or inner, *[inner] * (pp - 2), ends[1] or inner)


def _virtual(fields: Fields, pp: int, num_stages: int | None) -> int:
    if pp == 1:
        return 1
    if num_stages is not None:
        return num_stages // pp
    stages = fields.count("--num-virtual-stages-per-pipeline-rank")
    if stages is not None:
        return stages
    layers = fields.count("--num-layers-per-virtual-pipeline-stage")
    if layers is None:
        return 1
    num_blocks = fields.count("--num-layers")
    if num_blocks is None or num_blocks % (pp * layers):
        raise fields.error(
            "--num-layers-per-virtual-pipeline-stage",
            f"a divisor of --num-layers {num_blocks or '(missing)'} / pp {pp}",
        )
    return num_blocks // pp // layers


def _precision(fields: Fields) -> TrainingPrecision:
    return "bf16" if "--bf16" in fields else "fp16" if "--fp16" in fields else "fp32"


def _linear_precision(fields: Fields) -> LinearPrecision | None:
    if _precision(fields) == "fp32":  # Megatron-LM multiplies in fewer bits beside 16-bit parameters alone
        return None
    if fields.text("--fp4-format") is not None:
        return "nvfp4"
    if fields.text("--fp8-format") is None:
        return None
    return "mxfp8" if fields.text("--fp8-recipe") == "mxfp8" else "fp8"


def _fp8_recipe(fields: Fields) -> Fp8Recipe | None:
    """Return how operands in fp8 are scaled: Megatron-LM's own default is "delayed"."""
    if _linear_precision(fields) != "fp8":
        return None
    recipes: dict[str, Fp8Recipe] = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise"}
    return recipes.get(fields.text("--fp8-recipe") or "delayed")


def _attention(fields: Fields) -> AttentionKind | None:
    if "--use-flash-attn" in fields:
        return "flash"
    return _ATTENTION.get(fields.text("--attention-backend") or "")
