"""A Python script of transformers' Trainer or with its `DistributedConfig`, read without running it.

Rules as in transformers 5.24 (distributed/configuration_utils.py). Numbers and words count that the script writes down,
in the call or under a name; what it computes is refused where the plan depends on it, and else told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.setup import Given, Setup, make_plan, steps_of
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.plan.training import TrainingPrecision

CONFIG = "DistributedConfig"
ARGUMENTS = ("TrainingArguments", "SFTConfig", "DPOConfig", "RewardConfig", "GRPOConfig")
"""Classes of a Trainer's arguments: transformers' own, and those that TRL makes of it."""
_SIZES = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size", "ep_size")
_PLANS = ("tp_plan", "ep_plan", "fsdp_plan")
_LORA = "LoraConfig"


class _Made:
    """Stands for a value that the script computes."""

    def __init__(self, node: ast.expr) -> None:
        self.text = ast.unparse(node)

    def __repr__(self) -> str:
        return self.text


def read_transformers(text: str, *, source: str, given: Given) -> Setup:
    """Return the training of a script that loads its model with a `DistributedConfig`.

    Raises `PlanError` for a script without one, for sizes that it computes, and for what transformers refuses.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise PlanError(f"{source} is not Python: {error}", hint=f"give the script that calls {CONFIG}") from None
    calls = _Calls(tree)
    nothing = Fields({}, source=source)
    config = calls.fields(CONFIG, source)
    arguments = next(filter(None, (calls.fields(name, source) for name in ARGUMENTS)), nothing)
    loading = calls.fields("from_pretrained", source) or nothing
    if config is None and arguments is nothing:
        raise PlanError(
            f"{source} calls neither {CONFIG} nor {' nor '.join(ARGUMENTS)}", hint="give the script that trains"
        )
    sizes, notes = _sizes(config, given) if config is not None else _replicas(given)
    config = config or nothing
    if arguments.values:
        micro = given.micro_batch_size or _number(arguments, "per_device_train_batch_size", notes) or 8
        steps = _number(arguments, "gradient_accumulation_steps", notes) or 1
    else:
        micro, steps = given.micro_batch_size or given.least_micro_batch, 1
        if given.micro_batch_size is None:
            notes.append(f"the micro-batch is in the script: {micro} assumed, --micro-batch says otherwise")
    steps = steps_of(source, given.global_batch_size, micro=micro, dp=sizes["dp"] or 1) or steps
    recompute = "full" if arguments.values.get("gradient_checkpointing") is True else "none"
    if not arguments.values and "gradient_checkpointing_enable" in text:
        recompute = "full"
    offload = "parameters" if config.flag("fsdp_cpu_offload") and sizes["zero_stage"] else "none"
    plan = make_plan(
        source,
        **sizes,
        micro_batch_size=micro,
        num_microbatches=steps,
        recompute=given.recompute or recompute,
        offload=offload,
    )
    adapter, quantized = calls.fields(_LORA, source), calls.fields("BitsAndBytesConfig", source)
    weights = trainer.quantized_weights(quantized) if quantized is not None else None
    train, of_adapter = _trainable(adapter) if adapter is not None else (None, [])
    optimizer, of_optimizer = trainer.trainer_optimizer(arguments, "optim") if arguments.values else (None, [])
    return Setup(
        plan=plan,
        tool="transformers, " + (CONFIG if config is not nothing else "DDP"),
        says_gpus=config is not nothing,
        target="transformers",
        framework="transformers",
        precision=_precision(config, arguments, loading, notes, is_full=train is None),
        optimizer=optimizer,
        attention=trainer.attention_of(_word(loading, "attn_implementation"), notes),
        train=train,
        base_weights=weights or ("bf16" if train is not None and _loads_half(loading) else None),
        seq_length=_number(arguments, "max_length", notes) or _number(arguments, "max_seq_length", notes),
        model_name=_word(loading, "0") or _word(loading, "pretrained_model_name_or_path"),
        notes=(*notes, *of_adapter, *of_optimizer),
    )


class _Calls:
    """Calls of a script, with the arguments that it writes down."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._named: dict[str, ast.expr] = {}
        for node in self._nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._named.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.FunctionDef):
                places = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                for argument, default in zip(places, node.args.defaults, strict=True):
                    self._named.setdefault(argument.arg, default)

    def fields(self, name: str, source: str) -> Fields | None:
        """Return the arguments of the first call of a function or method by that name, None where there is none."""
        for node in self._nodes:
            if isinstance(node, ast.Call) and _name_of(node.func) == name:
                values = {str(place): self._value(argument) for place, argument in enumerate(node.args)}
                return Fields(values | dict(self._keywords(node)), source=source, path=f"{name}.")
        return None

    def _keywords(self, call: ast.Call) -> Iterator[tuple[str, object]]:
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, self._value(keyword.value)
            else:
                yield from self._unpacked(keyword.value)

    def _unpacked(self, node: ast.expr) -> Iterator[tuple[str, object]]:
        """Yield what a dictionary after `**` holds: one that is written down, under a name, or joined by `|`."""
        if isinstance(node, ast.Name) and node.id in self._named:
            yield from self._unpacked(self._named[node.id])
        elif isinstance(node, ast.BinOp):
            yield from self._unpacked(node.left)
            yield from self._unpacked(node.right)
        elif isinstance(node, ast.Call) and _name_of(node.func) == "dict":
            yield from self._keywords(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), self._value(value)

    def _value(self, node: ast.expr, depth: int = 0) -> object:
        if isinstance(node, ast.Name) and node.id in self._named and depth < 8:  # names of names
            return self._value(self._named[node.id], depth + 1)
        if isinstance(node, ast.Attribute) and _name_of(node.value) == "torch":
            return node.attr
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _Made(node)


def _name_of(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _sizes(config: Fields, given: Given) -> tuple[dict[str, int | None], list[str]]:
    """Return the degrees of a plan, and notes of what is priced otherwise."""
    source = config.source
    for key in _SIZES:
        if isinstance(config.values.get(key), _Made):
            raise PlanError(
                f"{source}: {CONFIG}.{key}={config.values[key]!r} is computed by the script, which is not run",
                hint="write the number in a copy of the script",
            )
    pp, replicas, fsdp, tp, ep = (config.count(key) or 1 for key in _SIZES)
    own = [key for key in _PLANS if config.values.get(key) not in (None, "auto", {})]
    notes = [f"{key}: priced as the model's own plan" for key in own]
    if pp > 1:
        raise PlanError(
            f"{source}: {CONFIG}.pp_size={pp}: transformers' pipeline generates text, and trains nothing",
            hint="paraplan recommend --framework transformers says what trains",
        )
    if "tp_plan" in config and config.count("tp_size") is None and given.num_gpus is not None:
        tp = max(1, given.num_gpus // (replicas * fsdp))
    is_old = bool(config.flag("enable_expert_parallel")) and "ep_size" not in config
    if tp > 1 and (config.values.get("tp_plan") == {} or (is_old and "tp_plan" not in config)):
        raise PlanError(
            f"{source}: tp_size={tp} with experts alone divided: its ranks share one batch and hold all else whole, "
            "which no plan says",
            hint=f"fsdp_size={tp}, ep_size={tp} in its place shards the rest, and gives each rank sequences of its own",
        )
    ep = tp if is_old else ep
    if ep > 1 and (ep % tp or (fsdp * tp) % ep):
        raise PlanError(
            f"{source}: {CONFIG}.ep_size={ep} has to be a multiple of tp_size={tp} and to divide fsdp_size x tp_size = "
            f"{fsdp * tp}",
            hint="transformers refuses it too",
        )
    if ep == 1 and tp > 1:
        notes.append("ep_size is not given: experts, if there are any, are priced as whole ones over the ranks of tp")
    implementation = config.values.get("ep_implementation", "auto")
    if implementation not in ("auto", "all_to_all"):
        notes.append(f"ep_implementation {implementation}: priced as all_to_all")
    ranks = replicas * fsdp * tp
    if given.num_gpus not in (None, ranks):
        raise PlanError(
            f"{source}: dp_replicate_size {replicas} x fsdp_size {fsdp} x tp_size {tp} = {ranks} ranks, and there are "
            f"{given.num_gpus} GPUs",
            hint="transformers refuses it too: say what machines it is for, --profile NAME --nodes N",
        )
    shards = fsdp if replicas > 1 and fsdp > 1 else None
    if shards is not None and ep > tp:
        notes.append(f"dp_replicate_size {replicas} beside ep_size: priced as sharded over all replicas")
        shards = None
    stage = 3 if fsdp > 1 else 0
    return {"dp": replicas * fsdp, "tp": tp, "ep": max(1, ep // tp), "zero_stage": stage, "zero_shards": shards}, notes


def _replicas(given: Given) -> tuple[dict[str, int | None], list[str]]:
    """Return the degrees of the Trainer's DDP."""
    assumed = [] if given.num_gpus else ["no GPUs are named: 1 assumed, --profile and --nodes say otherwise"]
    sizes: dict[str, int | None] = {"dp": given.num_gpus or 1, "tp": 1, "ep": 1, "zero_stage": 0, "zero_shards": None}
    return sizes, assumed


def _number(fields: Fields, key: str, notes: list[str]) -> int | None:
    if isinstance(fields.values.get(key), _Made):
        notes.append(f"{key}={fields.values[key]!r} is computed by the script, which is not run")
        return None
    return fields.count(key)


def _word(fields: Fields, key: str) -> str | None:
    value = fields.values.get(key)
    return value if isinstance(value, str) else None


def _loads_half(loading: Fields) -> bool:
    return str(loading.values.get("dtype", loading.values.get("torch_dtype", "auto"))) in ("auto", "bfloat16")


def _precision(
    config: Fields, arguments: Fields, loading: Fields, notes: list[str], *, is_full: bool
) -> TrainingPrecision:
    """Return the type of the arithmetic: weights in 16 bits stay so where all train."""
    dtype = loading.values.get("dtype", loading.values.get("torch_dtype"))
    if dtype in (None, "auto"):
        notes.append("no dtype: taken to be the bfloat16 of most checkpoints, --precision says otherwise")
    if _loads_half(loading):
        return "bf16-pure" if is_full else "bf16"
    is_mixed = bool(config.flag("fsdp_mixed_precision")) or arguments.values.get("bf16") is True
    return "bf16" if is_mixed else "fp32"


def _trainable(adapter: Fields) -> tuple[str | None, list[str]]:
    return trainable_of(
        adapter,
        kind="dora" if adapter.values.get("use_dora") is True else "lora",
        rank=_number(adapter, "r", []) or 8,
        targets=adapter.values.get("target_modules"),
        dropout=adapter.values.get("lora_dropout") or 0.0,
        by_root=adapter.values.get("use_rslora") is True,
        saved=adapter.values.get("modules_to_save"),
    )
