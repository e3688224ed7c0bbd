"""torchtitan's configurations, read back: the TOML of releases up to v0.2.2 and the Python of later ones.

Keys as in config/job_config.py at v0.2.2, and in config/configs.py and trainer.py of v0.3.0 and of August 2026. The
sections have the same names in all of them; v0.3.0 counts batches in sequences, what came after it in tokens.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, data_parallel_ranks, make_plan, optimizer_of, steps_of
from paraplan.interop.sources.torchtitan_command import COMMAND, apply_settings, named_configuration
from paraplan.interop.sources.torchtitan_python import CLASS, python_values
from paraplan.interop.sources.torchtitan_stack import (
    NarrowProducts,
    narrow_products,
    torchtitan_stack,
    trained_adapters,
)
from paraplan.interop.targets.torchtitan import DTYPES, SCHEDULES
from paraplan.plan.parallel import MEGATRON_RANK_ORDER
from paraplan.plan.stages import even_split
from paraplan.plan.training import LossKernel, OptimizerName, TrainingPrecision

_TOML_LENGTH, _TOML_BATCH = 2048, 8
_PYTHON_LENGTH, _PYTHON_TOKENS = 2048, 16384
_SINGLE_STAGE = ("gpipe", "1f1b")
_EXPERTS = re.compile(r"moe|deepseek|gpt[-_]oss|llama4|kimi|moonlight|a\d+b\b|\d+bx\d+e")
"""Models with experts, by torchtitan's names of them."""
_SECTION = re.compile(r"^\s*\[\w[\w.]*\]\s*(#.*)?$", flags=re.MULTILINE)
_RESHARD = {"always": 3, "never": 2}


def read_torchtitan(
    text: str,
    *,
    source: str,
    given: Given,
    name: str | None = None,
    read_file: Callable[[str], str] | None = None,
) -> Setup:
    """Return the training of a TOML file, or of the function `name` of a Python configuration, which is not run.

    `name` may be left out where there is one function. A script's command names the file, which `read_file` reads, and
    sets keys beside it. Raises `PlanError` naming the file and key for what is broken.
    """
    settings, notes, says_gpus = dict[str, object](), list[str](), False
    if read_file is not None and COMMAND.search(text) and not _SECTION.search(text) and "Trainer.Config" not in text:
        named = named_configuration(text, source=source, read_file=read_file)
        text, name, settings, notes = named.text, named.function, named.settings, named.notes
        says_gpus = named.num_gpus is not None
        given = given.replace(num_gpus=given.num_gpus or named.num_gpus)
    is_python = not _SECTION.search(text)
    if is_python:
        values, found = python_values(text, source=source, name=name, read_file=read_file)
    else:
        values, found = _toml(text, source), []
    fields = Fields(apply_settings(values, settings), source=source)
    if "flux" in f"{values.get('model')} {values.get('tokenizer')}".lower():
        raise PlanError(
            f"{source} trains a model that makes pictures, which is not priced", hint="give a language model's"
        )
    setup = _setup(fields, given, is_python=is_python)
    notes = [*setup.notes, *notes, *found, *key_table("torchtitan").notes(fields)]
    return setup.replace(says_gpus=says_gpus or setup.says_gpus, notes=tuple(notes))


def _toml(text: str, source: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(
            f"{source} is not TOML: {error}", hint="torchtitan's train_configs up to v0.2.2 are working ones"
        ) from None


def _setup(fields: Fields, given: Given, *, is_python: bool) -> Setup:
    notes: list[str] = []
    sizes, training = fields.section("parallelism"), fields.section("training")
    tp, pp, cp = (sizes.count(f"{axis}_parallel_degree") or 1 for axis in ("tensor", "pipeline", "context"))
    dp, shards, says_gpus = _data_parallel(sizes, given, tp=tp, pp=pp, cp=cp)
    micro, steps, length = _batch(training, sizes, given, dp=dp, pp=pp, is_python=is_python, notes=notes)
    schedule, virtual, stages = _stages(sizes, pp, notes)
    ep, etp = _experts(fields, tp, notes)
    sharding = _sharding(fields, notes, dp=dp, shards=shards, cp=cp, pp=pp)
    plan = make_plan(
        fields.source,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        **sharding,
        sequence_parallel=tp > 1 and sizes.flag("enable_sequence_parallel") is not False,
        micro_batch_size=micro,
        num_microbatches=steps,
        pipeline_schedule=schedule,
        virtual_pipeline_size=virtual,
        stage_blocks=stages,
        recompute=given.recompute or _recompute(fields, notes, is_python=is_python),
        rank_order=MEGATRON_RANK_ORDER,
    )
    optimizer, found = _optimizer(fields)
    precision = _precision(training, notes, has_autocast=is_python or plan.zero_stage > 0 or tp * pp == 1)
    products, train = narrow_products(fields, notes), trained_adapters(fields, notes)
    if products.precision is not None and precision == "fp32":
        notes.append(f"products in {products.precision} beside float32: priced in float32")
        products = NarrowProducts()
    return Setup(
        plan=plan,
        tool="torchtitan",
        target="torchtitan-python" if is_python else "torchtitan",
        framework="torchtitan",
        seq_length=length,
        precision=precision,
        optimizer=optimizer,
        train=train,
        base_weights=None if train is None else "bf16" if precision == "bf16-pure" else "fp32",
        loss=_loss(fields, notes),
        compiled=_compiles_model(fields.section("compile")),
        linear_precision=products.precision,
        fp8_recipe=products.recipe,
        fp8_gather=products.gathers,
        stack=torchtitan_stack(fields, etp=etp, has_graphs=is_python and _counts_tokens(training), notes=notes),
        model_name=_model_name(fields),
        says_gpus=says_gpus,
        notes=(*notes, *found),
    )


def _sharding(fields: Fields, notes: list[str], *, dp: int, shards: int, cp: int, pp: int) -> dict[str, object]:
    """Return what FSDP shards over `shards` of the `dp` ranks and those of cp, and what it offloads."""
    stage = _zero_stage(fields.section("parallelism"), pp, notes)
    zero_stage = stage if shards * cp > 1 else 0
    zero_shards = shards if zero_stage and 1 < shards < dp and cp == 1 else None
    if zero_stage and shards < dp and zero_shards is None:
        notes.append(f"replicas of groups of {shards * cp} ranks over cp too: priced as sharded over all of dp and cp")
    offloads = bool(fields.section("training").flag("enable_cpu_offload"))
    if offloads and not zero_stage:
        notes.append("training.enable_cpu_offload: torchtitan offloads under FSDP alone")
    offload = "parameters" if offloads and zero_stage else "none"
    return {"zero_stage": zero_stage, "zero_shards": zero_shards, "offload": offload}


def _compiles_model(compiling: Fields) -> bool:
    components = compiling.value("components")
    return bool(compiling.flag("enable")) and (components is None or "model" in str(components))


def _data_parallel(sizes: Fields, given: Given, *, tp: int, pp: int, cp: int) -> tuple[int, int, bool]:
    """Return the ranks of dp, those of them that FSDP shards over, and whether the file says how many there are."""
    replicas = sizes.count("data_parallel_replicate_degree") or 1
    shards = sizes.number("data_parallel_shard_degree")
    shards = -1 if shards is None else shards
    if shards != -1 and shards < 1:
        raise sizes.error("data_parallel_shard_degree", "-1 or a whole number above 0")
    if given.num_gpus is None:
        return replicas * max(1, shards), max(1, shards), shards != -1
    dp = data_parallel_ranks(sizes.source, given.num_gpus, tp=tp, pp=pp, cp=cp)
    if shards == -1:
        if dp % replicas:
            raise sizes.error("data_parallel_replicate_degree", f"a divisor of the {dp} ranks that are left for it")
        shards = dp // replicas
    if replicas * shards != dp:
        raise PlanError(
            f"{sizes.source}: data_parallel_replicate_degree {replicas} x data_parallel_shard_degree {shards} are not "
            f"the {dp} data-parallel ranks of {given.num_gpus} GPUs",
            hint="torchtitan refuses it too: use data_parallel_shard_degree = -1, or --profile NAME --nodes N",
        )
    return dp, shards, True


def _zero_stage(sizes: Fields, pp: int, notes: list[str]) -> int:
    """Return the stage of FSDP, which by default frees parameters after forward unless there is a pipeline.

    Beside a pipeline gradients are reduced at the end of a step, so that they and parameters are whole until then.
    """
    policy = sizes.text("fsdp_reshard_after_forward") or "default"
    if policy not in ("default", *_RESHARD):
        raise sizes.error("fsdp_reshard_after_forward", "default, always or never")
    if pp > 1:
        if policy == "always":
            notes.append("parallelism.fsdp_reshard_after_forward always: priced as never beside a pipeline")
        return 1
    return _RESHARD.get(policy, 3)


def _batch(
    training: Fields, sizes: Fields, given: Given, *, dp: int, pp: int, is_python: bool, notes: list[str]
) -> tuple[int, int, int]:
    """Return the micro-batch, the micro-batches of a step and the length of a sequence."""
    if is_python and _counts_tokens(training):
        length = training.count("max_context_length") or _PYTHON_LENGTH
        tokens = training.count("num_tokens_per_microbatch_per_dp_rank") or _PYTHON_TOKENS
        micro, rest = divmod(tokens, length)
        if rest or not micro:
            raise training.error("num_tokens_per_microbatch_per_dp_rank", f"a multiple of max_context_length {length}")
        each = (sizes.count("num_pp_microbatches") or 1) if pp > 1 else 1
        total = _total(training, "num_tokens_per_train_step")
        if total is not None and total % length:
            raise training.error("num_tokens_per_train_step", f"a multiple of max_context_length {length}")
        total = None if total is None else total // length
    else:
        length = training.count("seq_len") or _TOML_LENGTH
        local = training.count("local_batch_size") or training.count("batch_size") or _TOML_BATCH
        micro, each = local, 1
        if pp > 1:
            micro = sizes.count("pipeline_parallel_microbatch_size") or 1
            each, rest = divmod(local, micro)
            if rest or not each:
                raise sizes.error("pipeline_parallel_microbatch_size", f"a divisor of local_batch_size {local}")
        total = _total(training, "global_batch_size")
    micro = given.micro_batch_size or micro
    steps = steps_of(training.source, given.global_batch_size or total, micro=micro, dp=dp) or each
    if pp > 1 and steps > each:
        notes.append(f"{steps // each} passes through the pipeline in a step: priced as one of {steps} micro-batches")
    return micro, steps, length


def _counts_tokens(training: Fields) -> bool:
    """Return whether Python's sizes are those of releases since v0.3.0, which count tokens."""
    return not ({"local_batch_size", "batch_size", "seq_len"} & training.values.keys())


def _total(training: Fields, key: str) -> int | None:
    """Return the size of a step; -1, the default, is one pass of every rank."""
    return None if training.number(key) in (None, -1) else training.count(key)


def _stages(sizes: Fields, pp: int, notes: list[str]) -> tuple[str | None, int, tuple[int, ...] | None]:
    """Return the schedule, the stages of a rank and the blocks of each stage; None for an even cut."""
    words = sizes.text("pipeline_parallel_schedule") or "1F1B"
    parts = sizes.value("module_fqns_per_model_part")
    if pp == 1:
        return None, 1, None
    schedule = next((name for name, theirs in SCHEDULES.items() if theirs.lower() == words.lower()), None)
    if schedule is None:
        notes.append(f"parallelism.pipeline_parallel_schedule {words}: priced as Interleaved1F1B")
        schedule = "interleaved_1f1b"
    virtual = 1 if schedule in _SINGLE_STAGE else 2
    if not isinstance(parts, list) or not parts:
        notes.append("stages: priced as an even cut; torchtitan gives the first and the last one layer less")
        return schedule, virtual, None
    if len(parts) % pp or not all(isinstance(part, list) for part in parts):
        raise sizes.error("module_fqns_per_model_part", f"lists of modules, a multiple of {pp}")
    blocks = tuple(sum(str(module).startswith("layers.") for module in part) for part in parts)
    if not any(blocks):
        raise sizes.error("module_fqns_per_model_part", "layers among the modules")
    is_even = 0 not in blocks and blocks == even_split(sum(blocks), len(blocks))
    return schedule, len(parts) // pp, None if is_even else blocks


def _experts(fields: Fields, tp: int, notes: list[str]) -> tuple[int, int | None]:
    """Return the ranks of dp and cp over which experts go, and those of tp that divide each; None for whole ones.

    torchtitan's degree counts the ranks of tp too, which hold whole experts; beside a degree of 1 they divide each.
    """
    sizes = fields.section("parallelism")
    degree, inner = (sizes.count(f"expert_{name}") or 1 for name in ("parallel_degree", "tensor_parallel_degree"))
    if degree == 1:
        names = f"{_model_name(fields)} {fields.values.get('model_spec')}".lower()
        has_experts = "expert_parallel_degree" in sizes.values or _EXPERTS.search(names)
        return 1, (tp if tp > 1 and has_experts else None)
    if inner > 1 and tp > 1:
        return degree, inner
    if degree % tp:
        notes.append(f"parallelism.expert_parallel_degree {degree}: priced as over the {tp} ranks of tp alone")
        return 1, None
    return degree // tp, None


def _recompute(fields: Fields, notes: list[str], *, is_python: bool) -> str:
    """Return what is recomputed: in TOML a mode, in Python a policy, of which None is no recompute."""
    value = fields.value("activation_checkpoint")
    if is_python and "activation_checkpoint" in fields.values and value is None:
        return "none"
    if isinstance(value, str):  # an expression of Python
        notes.append(f"activation_checkpoint {value}: priced as SelectiveAC, torchtitan's default")
        return "selective_ops"
    section = fields.section("activation_checkpoint")
    if is_python:
        name = str(section.value(CLASS) or "SelectiveAC")
        if name not in ("FullAC", "SelectiveAC"):
            notes.append(f"activation_checkpoint {name}: priced as SelectiveAC")
        return "full" if name == "FullAC" else "selective_ops"
    mode, option = section.text("mode") or "selective", str(section.value("selective_ac_option") or "2")
    if mode in ("none", "full"):
        return mode
    if mode == "selective" and option.isdigit():
        if option != "1":
            notes.append(f"activation_checkpoint.selective_ac_option {option}: priced as full, of every block")
        return "full"
    if mode == "memory_budget":
        notes.append("activation_checkpoint.mode memory_budget: priced as selective recompute of operations")
    elif mode != "selective" or option != "op":
        key, words = (
            ("mode", "none, selective, full or memory_budget")
            if mode != "selective"
            else ("selective_ac_option", "op or a number")
        )
        raise section.error(key, words)
    return "selective_ops"


def _optimizer(fields: Fields) -> tuple[OptimizerName | None, list[str]]:
    section = fields.section("optimizer")
    name = section.text("name") or str(section.value(CLASS) or "adamw").removeprefix("default_")
    return optimizer_of(name)


def _loss(fields: Fields, notes: list[str]) -> LossKernel:
    """Return how the loss is computed: from all logits, or from those of a chunk of tokens at a time."""
    section = fields.value("loss")
    name = str(section.get(CLASS) if isinstance(section, dict) else section or "CrossEntropyLoss")
    if name not in ("CrossEntropyLoss", "ChunkedLossWrapper"):
        notes.append(f"loss {name}: priced as the cross entropy of all logits")
    return "chunked" if name == "ChunkedLossWrapper" else "plain"


def _precision(training: Fields, notes: list[str], *, has_autocast: bool) -> TrainingPrecision:
    """Return the type of the arithmetic: without FSDP, beside tp or pp, that of the weights (distributed/utils.py)."""
    stored, computed = training.text("dtype") or "float32", training.text("mixed_precision_param") or "bfloat16"
    names = {theirs: ours for ours, theirs in DTYPES.items()}
    for key, value in (("dtype", stored), ("mixed_precision_param", computed)):
        if value not in names:
            raise training.error(key, " or ".join(names))
    if computed != stored and not has_autocast:
        notes.append("torchtitan up to v0.2.2 has mixed precision beside tp and pp under FSDP alone: priced in float32")
        return "fp32"
    return "bf16-pure" if stored == "bfloat16" else "bf16" if computed == "bfloat16" else "fp32"


def _model_name(fields: Fields) -> str | None:
    assets = fields.text("hf_assets_path")
    section = fields.section("model")
    words = [section.text("name"), section.text("flavor")]
    assets = assets or section.text("hf_assets_path")
    if assets is not None and "tests/" not in assets:
        return assets.rstrip("/").rpartition("/")[2]
    return " ".join(word for word in words if word) or None
