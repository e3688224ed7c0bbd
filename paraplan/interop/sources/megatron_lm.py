"""Megatron-LM's arguments, read back. Options as in its training/arguments.py of August 2026 and older spellings."""

from __future__ import annotations

import difflib
import re
from itertools import pairwise

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, data_parallel_ranks, make_plan, optimizer_of
from paraplan.interop.sources.launches import TRAINS_NOTHING
from paraplan.interop.sources.megatron_files import as_arguments
from paraplan.interop.sources.megatron_stack import flexible_dispatcher, megatron_stack, recomputed_modules
from paraplan.interop.sources.megatron_stages import stage_rule, virtual_stages
from paraplan.interop.sources.options import options_of
from paraplan.interop.sources.shell import Command, command_of
from paraplan.interop.stage_rule import with_stages_of_layers
from paraplan.interop.targets.megatron_lm import PIPELINE_INSIDE_DATA
from paraplan.plan.parallel import MEGATRON_RANK_ORDER
from paraplan.plan.training import AttentionKind, Fp8Recipe, LinearPrecision, TrainingPrecision

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_EVALUATES = re.compile(r"EVAL|PROMPT|ZEROSHOT|LAMBADA|WIKITEXT")
"""Values of `--task` of Megatron-LM's tasks/main.py and tasks/msdp/main.py that train nothing."""
_MISSPELT = 0.93
"""An option as near to one that is read as this (difflib's ratio) is that one misspelt.

Of the 924 options in Megatron-LM's sources (commit d98e8a64dd) none is nearer than 0.89 to one that is read here.
"""
_ATTENTION: dict[str, AttentionKind] = {"flash": "flash", "fused": "flash", "unfused": "eager", "local": "eager"}


def read_megatron_lm(arguments: str, *, source: str, given: Given) -> Setup:
    """Return the training that a Megatron-LM command line describes, or a script or a file that holds one.

    The model's own options are passed over. Raises `PlanError` naming the option for what is broken.
    """
    command = command_of(as_arguments(arguments, source), source)
    options = _options(command, source)
    if "moe_expert_parallel_size" in options:  # Megatron-DeepSpeed's
        options = {"moe_token_dispatcher_type": "alltoall"} | options
        options["expert_model_parallel_size"] = options.pop("moe_expert_parallel_size")
    notes = command.notes(source)
    fields = Fields({**key_table("megatron-lm").defaults, **options}, source=source, prefix="--")
    processes, nodes = fields.value("nproc_per_node") or fields.value("nproc"), fields.value("nnodes") or "1"
    if given.num_gpus is None and str(processes).isdigit() and str(nodes).isdigit():
        given = given.replace(num_gpus=max(1, int(str(processes)) * int(str(nodes))))
    elif given.num_gpus is None and processes is None:
        given = given.replace(num_gpus=command.num_tasks)
    if given.num_gpus is None:
        raise PlanError(f"{source} does not say how many GPUs there are", hint="give --profile NAME and --nodes N")
    setup = megatron_setup(fields, given)
    return setup.replace(notes=(*setup.notes, *notes, *key_table("megatron-lm").notes(fields)))


def megatron_setup(fields: Fields, given: Given, *, steps: int | None = None) -> Setup:
    """Return the training of Megatron-LM's options, with their words apart by `_`, whatever file they stand in.

    Without `steps` the micro-batches of a step follow from the global batch. Without a number of GPUs there are as many
    as the degrees multiply to.
    """
    source = fields.source
    tp, pp, cp = (fields.count(f"{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model", "context"))
    tp = fields.count("model_parallel_size") or tp
    ranks = max(tp * pp * cp, tp * pp * (fields.count("expert_model_parallel_size") or 1))
    dp = data_parallel_ranks(source, given.num_gpus or ranks, tp=tp, pp=pp, cp=cp)
    micro, steps = _batch(fields, given, dp, steps)
    zero_stage = min(_zero_stage(fields), 3 if dp * cp > 1 else 0)
    has_momentum = str(fields.value("sgd_momentum")) not in ("0", "0.0")
    optimizer, notes = optimizer_of(fields.text("optimizer") or "adam", has_momentum=has_momentum)
    ep, expert_notes = _experts(fields, tp, dp * cp)
    has_whole_experts = _has_whole_experts(fields, tp, dp * cp)
    shards = _shards(fields, dp, cp, ep, notes) if zero_stage else None
    notes += _unpriced(fields)
    notes += expert_notes
    rule = stage_rule(fields, pp)
    virtual = virtual_stages(fields, pp, rule)
    plan = make_plan(
        source,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero_stage=zero_stage,
        zero_shards=shards,
        sequence_parallel=fields.is_on("sequence_parallel") and tp > 1,
        micro_batch_size=micro,
        num_microbatches=steps,
        pipeline_schedule=None if pp == 1 else "interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_pipeline_size=virtual,
        stage_blocks=rule.layout if rule is not None else None,
        recompute=given.recompute or _recompute(fields),
        offload=_offload(fields, notes),
        rank_order=PIPELINE_INSIDE_DATA if fields.is_on("use_tp_pp_dp_mapping") else MEGATRON_RANK_ORDER,
    )
    local = " transformer-impl=local" if fields.text("transformer_impl") == "local" else ""
    setup = Setup(
        plan=plan,
        tool="Megatron-LM",
        target="megatron-lm",
        framework="megatron-core" + local,
        seq_length=_length(fields, notes),
        train=_trained_parts(fields),
        precision=_precision(fields),
        linear_precision=_linear_precision(fields),
        fp8_recipe=_fp8_recipe(fields),
        fp8_gather=True if fields.is_on("fp8_param_gather") and _linear_precision(fields) in ("fp8", "mxfp8") else None,
        optimizer=optimizer,
        attention=_attention(fields),
        stack=megatron_stack(fields, zero_stage=zero_stage, has_whole_experts=has_whole_experts),
        stage_rule=rule,
        notes=tuple(notes),
    )
    return with_stages_of_layers(setup, fields.count("num_layers"))


def _length(fields: Fields, notes: list[str]) -> int | None:
    """Return the tokens of a sequence: of the longer half of an encoder and a decoder, of the text beside pictures."""
    whole, decoder = (
        fields.count("seq_length") or fields.count("encoder_seq_length"),
        fields.count("decoder_seq_length"),
    )
    has_encoder = bool({key for key in ("encoder_seq_length", "encoder_num_layers") if key in fields})
    if whole is None or decoder is None:
        return decoder or whole
    if not has_encoder:
        notes.append(
            f"{fields.shown('seq_length')} {whole}: tokens of pictures are priced where --image-tokens says so"
        )
        return decoder
    if whole != decoder:
        name = fields.shown("decoder_seq_length" if whole > decoder else "encoder_seq_length")
        notes.append(f"{name} {min(whole, decoder)}: both halves are priced as of {max(whole, decoder)} tokens")
    return max(whole, decoder)


def _trained_parts(fields: Fields) -> str | None:
    """Return what of a model with a tower for pictures trains (examples/multimodal/train.py); None for all."""
    frozen = {word: fields.is_on(key) for word, key in (("text", "freeze_LM"), ("tower", "freeze_ViT"))}
    if not any(frozen.values()):
        return None
    return "+".join(word for word in ("text", "projector", "tower") if not frozen.get(word, False))


def _shards(fields: Fields, dp: int, cp: int, ep: int, notes: list[str]) -> int | None:
    """Return the ranks of a sharded group where there are several of them (instances), None for one; add notes."""
    name = "num_distributed_optimizer_instances"
    instances = fields.count(name) or 1
    if (dp * cp) % instances:
        raise fields.error(name, f"a divisor of the {dp * cp} data-parallel ranks")
    if instances in (1, dp * cp):
        return None
    if cp > 1 or ep > 1:
        notes.append(
            f"{fields.shown(name)} {instances}: priced as sharded over all ranks, as its groups are of cp or ep too"
        )
        return None
    return dp // instances


def _offload(fields: Fields, notes: list[str]) -> str:
    is_on = fields.is_on("optimizer_cpu_offload") or fields.is_on("cpu_optimizer")
    return "optimizer" if is_on and fields.mostly_offloads("optimizer_offload_fraction", notes) else "none"


def _unpriced(fields: Fields) -> list[str]:
    """Return what is priced otherwise than the command line has it."""
    name = fields.shown("recompute_method")
    layers = fields.number("recompute_num_layers") or 1
    if fields.text("recompute_method") == "block":
        return [f"{name} block: recomputes some layers of a stage; priced as all of them"]
    if layers > 1 and fields.text("recompute_granularity") == "full":
        return [f"{name} uniform: keeps the input of one layer in {layers}; priced as that of every layer"]
    return []


def _batch(fields: Fields, given: Given, dp: int, steps: int | None) -> tuple[int, int]:
    """Return the micro-batch, and how many of them a step has."""
    source = fields.source
    micro = given.micro_batch_size or fields.count("micro_batch_size")
    if micro is None:
        raise PlanError(f"{source}: {fields.shown('micro_batch_size')} is missing", hint="Megatron-LM needs it too")
    if steps is not None and given.global_batch_size is None:
        return micro, steps
    batch = given.global_batch_size or fields.count("global_batch_size") or micro * dp
    steps, rest = divmod(batch, micro * dp)
    if rest or not steps:
        raise PlanError(
            f"{source}: {fields.shown('global_batch_size')} {batch} is not a multiple of "
            f"{fields.shown('micro_batch_size')} {micro} x {dp} data-parallel ranks",
            hint="fix the sizes, or say what machines they are for: --profile NAME --nodes N",
        )
    return micro, steps


def _experts(fields: Fields, tp: int, ranks: int) -> tuple[int, list[str]]:
    """Return the ranks that share out experts, and where these are laid out or sent otherwise than a plan has it.

    `ranks` are those along dp and cp together.
    """
    ep = fields.count("expert_model_parallel_size") or 1
    name = fields.shown("expert_model_parallel_size")
    kind = fields.text("moe_token_dispatcher_type")
    if _has_whole_experts(fields, tp, ranks):
        return ep // tp, _dispatched(fields, kind)
    if ranks % ep:
        raise PlanError(
            f"{fields.source}: {name} {ep} does not divide the {ranks} data- and context-parallel ranks",
            hint="say how many GPUs there are (--profile NAME --nodes N); experts over ranks of tp too are not priced",
        )
    notes: list[str] = []
    if ep == 1:
        return ep, notes
    if (fields.count("expert_tensor_parallel_size") or tp) != tp:
        name = fields.shown("expert_tensor_parallel_size")
        notes.append(f"{name}: experts are priced as divided over the {tp} ranks of tp")
    return ep, notes + _dispatched(fields, kind)


def _has_whole_experts(fields: Fields, tp: int, ranks: int) -> bool:
    """Return whether experts go over all ranks of tp, each of which holds whole ones."""
    ep = fields.count("expert_model_parallel_size") or 1
    is_single = fields.count("expert_tensor_parallel_size") == 1
    return is_single and tp > 1 and ep % tp == 0 and ranks % (ep // tp) == 0


def _dispatched(fields: Fields, kind: str | None) -> list[str]:
    """Return where tokens are sent otherwise than as they are priced; Megatron-LM's default is allgather."""
    kind = kind or "allgather"
    if kind == "alltoall" or flexible_dispatcher(fields) is not None:
        return []
    return [f"{fields.shown('moe_token_dispatcher_type')} {kind}: tokens are priced as sent all-to-all"]


def _options(command: Command, source: str) -> dict[str, object]:
    """Return the options of a command line or of a script's command with their values."""
    programs = [word.rpartition("/")[2] for word in command.words if word.endswith(".py")]
    programs += [word for before, word in pairwise(command.words) if before == "-m"]
    if any(map(TRAINS_NOTHING.search, programs)) and not any("train" in name for name in programs):
        named = " ".join(programs)
        raise PlanError(f"{source}: {named} trains nothing", hint="give a script that starts a training")
    options = options_of(command.words)
    if not options:
        raise PlanError(f"{source} holds no option", hint='for example "--tensor-model-parallel-size 2 ..."')
    if "llm_offset" in options:
        raise PlanError(
            f"{source}: --llm-offset gives encoder and language model ranks of their own, which no plan has",
            hint="give the language model's own degrees as --tensor-model-parallel-size and its kin",
        )
    if _EVALUATES.search(str(options.get("task"))):
        task = options["task"]
        raise PlanError(f"{source}: Megatron-LM's --task {task} trains nothing", hint="give a script that trains")
    for name in [name for name in options if name.startswith("no_")]:  # argparse.BooleanOptionalAction
        if name not in key_table("megatron-lm").known and name[3:] in key_table("megatron-lm").known:
            options[name[3:]] = False
            del options[name]
    for name in sorted(options.keys() - key_table("megatron-lm").known):
        meant = difflib.get_close_matches(name, sorted(key_table("megatron-lm").read), n=1, cutoff=_MISSPELT)
        if meant:
            named, known = (f"--{word.replace('_', '-')}" for word in (name, meant[0]))
            raise PlanError(f"{source}: {named} is not an option of Megatron-LM", hint=f"did you mean {known}?")
    return options


def _zero_stage(fields: Fields) -> int:
    if fields.is_on("deepspeed"):  # Megatron-DeepSpeed's arguments, whose stage is 1 by default
        stage = fields.choice("zero_stage", (0, 1, 2, 3), 1)
        return 1 if stage == 0 and fields.is_on("bf16") else stage  # its BF16_Optimizer shards as stage 1 does
    is_sharded = fields.is_on("use_distributed_optimizer")
    if fields.is_on("use_torch_fsdp2"):
        return 3
    if fields.is_on("use_megatron_fsdp") or fields.is_on("use_custom_fsdp"):
        strategy = fields.text("data_parallel_sharding_strategy") or "optim_grads_params"
        if strategy not in _STRATEGIES:
            raise fields.error("data_parallel_sharding_strategy", ", ".join(_STRATEGIES))
        return _STRATEGIES[strategy]
    return 1 if is_sharded else 0


def _recompute(fields: Fields) -> str:
    granularity = fields.text("recompute_granularity") or fields.text("activations_checkpoint_granularity")
    if granularity not in (None, "full", "selective", "none"):
        raise fields.error("recompute_granularity", "full or selective")
    if granularity == "selective" and recomputed_modules(fields) - {"core_attn"}:
        return "selective_ops"
    if granularity is not None:
        return granularity
    older = ("checkpoint_activations", "checkpoint_activations_method", "activations_checkpoint_method")
    if True in [fields.is_on(name) for name in (*older, "recompute_activations_method")]:
        return "full"
    return "selective" if fields.is_on("recompute_activations") else "none"


def _precision(fields: Fields) -> TrainingPrecision:
    return "bf16" if fields.is_on("bf16") else "fp16" if fields.is_on("fp16") else "fp32"


def _linear_precision(fields: Fields) -> LinearPrecision | None:
    if _precision(fields) == "fp32":  # Megatron-LM multiplies in fewer bits beside 16-bit parameters alone
        return None
    if fields.text("fp4_format") is not None:
        return "nvfp4"
    if fields.text("fp8_format") is None:
        return None
    return "mxfp8" if fields.text("fp8_recipe") == "mxfp8" else "fp8"


def _fp8_recipe(fields: Fields) -> Fp8Recipe | None:
    """Return how operands in fp8 are scaled: Megatron-LM's own default is "delayed"."""
    if _linear_precision(fields) != "fp8":
        return None
    recipes: dict[str, Fp8Recipe] = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise"}
    return recipes.get(fields.text("fp8_recipe") or "delayed")


def _attention(fields: Fields) -> AttentionKind | None:
    if fields.is_on("use_flash_attn"):
        return "flash"
    return _ATTENTION.get(fields.text("attention_backend") or "")
