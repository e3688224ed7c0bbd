"""Content of another tool's configuration: a plan with its training, and what its parts follow from."""

from __future__ import annotations

from pydantic import ValidationError

from paraplan.errors import PlanError
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.task import parse_task
from paraplan.plan.training import (
    AttentionKind,
    Fp8Recipe,
    LinearPrecision,
    LossKernel,
    OptimizerName,
    TrainingPrecision,
    optimizer_name,
)
from paraplan.records import Record


class StageRule(Record):
    """Pipeline stages whose sizes follow from the number of layers, which options of Megatron-Core leave to the model.

    Two ways: layers of the first and the last rank with the embedding and the loss that count as layers, or a layout.
    """

    option: str
    """The option that says so, as it is written."""
    first: int | None = None
    """Layers of the first pipeline rank, None for as many as the others have."""
    last: int | None = None
    """Layers of the last pipeline rank, None for as many as the others have."""
    counts_embedding: bool = False
    """Whether the embedding takes the place of a layer in the first stage."""
    counts_loss: bool = False
    """Whether the head and its loss take the place of a layer in the last stage."""
    layout: tuple[int, ...] | None = None
    """Layers of every stage, in the order of the model."""
    predicting: tuple[int, ...] = ()
    """Layers for multi-token prediction of every stage of a layout."""

    @property
    def note(self) -> str:
        """Note for readers while the number of layers is not known."""
        return f"{self.option}: its stages follow from the model's layers; give --model"


class Setup(Record):
    """A training as another tool is configured for it; None where its configuration does not say.

    `says_gpus` is False where it says neither how many GPUs there are, nor what that follows from.
    `packs_samples`: samples stand one behind the other and are told apart, which tells nothing without their length.
    `stage_rule` says how stages are cut once the model is known, None where `plan` has them.
    `target` is the tool's name in `export.TARGETS`, None where nothing is written for it, `framework` a name or alias
    in `profiles/frameworks`. `notes` tell what was assumed and what has no place in a plan.
    """

    plan: ParallelPlan
    tool: str
    target: str | None
    framework: str
    seq_length: int | None = None
    precision: TrainingPrecision | None = None
    optimizer: OptimizerName | None = None
    attention: AttentionKind | None = None
    train: str | None = None
    base_weights: WeightFormat | None = None
    quantizer: str | None = None
    loss: LossKernel | None = None
    compiled: bool | None = None
    linear_precision: LinearPrecision | None = None
    fp8_recipe: Fp8Recipe | None = None
    fp8_gather: bool | None = None
    offloads_activations: bool | None = None
    task: str | None = None
    packs_samples: bool = False
    stack: StackSettings = StackSettings()
    model_name: str | None = None
    stage_rule: StageRule | None = None
    says_gpus: bool = True
    notes: tuple[str, ...] = ()

    @property
    def keeps_fp32(self) -> bool:
        """Whether fp32 weights are kept beside those of a model in 16 bits: DeepSpeed does at every stage, and FSDP."""
        return self.framework == "deepspeed zero" or self.plan.zero_stage > 0

    @property
    def training(self) -> dict[str, object]:
        """The fields of a `TrainingSpec` that the configuration says, but for batch and length."""
        names = ("precision", "optimizer", "attention", "train", "base_weights", "loss", "compiled", "task")
        values = {
            name: getattr(self, name)
            for name in (*names, "linear_precision", "quantizer", "fp8_recipe", "fp8_gather", "offloads_activations")
        }
        told = {"stack": self.stack} if self.stack.text else {}
        return {name: value for name, value in values.items() if value is not None} | told


class Given(Record):
    """Settings that the user gives beside a configuration: it comes first, and fills in what scripts decide.

    `num_gpus` is the number of ranks, None where only the configuration may know it.
    """

    num_gpus: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    recompute: str | None = None
    task: str = "sft"
    """The words of `--task`: the objective of a configuration that does not say its own."""

    @property
    def least_micro_batch(self) -> int:
        """Sequences of the smallest micro-batch, which is assumed where nothing says it: one, or the two of a pair."""
        return parse_task(self.task).group


def make_plan(source: str, **values: object) -> ParallelPlan:
    """Return a plan from a configuration; raise `PlanError` that names it where its parts contradict each other."""
    try:
        return ParallelPlan.model_validate(values)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        dp, cp, ep = (value if isinstance(value := values.get(axis), int) else 1 for axis in ("dp", "cp", "ep"))
        raise PlanError(f"{source}: {message}", hint=_NUM_GPUS if ep > 0 and dp * cp % ep else None) from None


_NUM_GPUS = "say how many GPUs there are: --profile NAME --nodes N --gpus-per-node G"


def data_parallel_ranks(source: str, num_gpus: int, **degrees: int) -> int:
    """Return the ranks that are left for data parallelism; raise `PlanError` where the other degrees do not divide."""
    product = 1
    for degree in degrees.values():
        product *= degree
    ranks, rest = divmod(num_gpus, product)
    if rest or not ranks:
        named = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        raise PlanError(
            f"{source}: {named} = {product} ranks do not divide the {num_gpus} GPUs",
            hint=_NUM_GPUS,
        )
    return ranks


def steps_of(source: str, global_batch_size: int | None, *, micro: int, dp: int) -> int | None:
    """Return the micro-batches of a step; None where nobody says the global batch.

    Raises `PlanError` where the ranks do not divide it.
    """
    if global_batch_size is None:
        return None
    steps, rest = divmod(global_batch_size, micro * dp)
    if rest or not steps:
        raise PlanError(
            f"{source}: a global batch of {global_batch_size} is not a multiple of micro-batch {micro} x {dp} "
            "data-parallel ranks",
            hint=f"use --global-batch {max(1, steps) * micro * dp}",
        )
    return steps


def optimizer_of(name: str | None, *, has_momentum: bool = True) -> tuple[OptimizerName | None, list[str]]:
    """Return the optimizer that a tool's name of one means, and a note where it is priced as another.

    `has_momentum` says whether plain "sgd" keeps a momentum.
    """
    if name is None:
        return None, []
    words = name.lower().replace("_", "")
    if words == "sgd":
        return "sgd_momentum" if has_momentum else "sgd", []
    try:
        return optimizer_name(name), []
    except PlanError:
        pass
    if "8bit" in words or "4bit" in words:
        return "adamw_8bit" if "8bit" in words else "adamw_4bit", []
    for sign, known in _OPTIMIZERS.items():
        if sign in words:
            return known, []
    return "adamw", [f"optimizer {name}: priced as adamw, the nearest that is known"]


_OPTIMIZERS: dict[str, OptimizerName] = {"adafactor": "adafactor", "adam": "adamw", "muon": "muon"}
