"""Subject and result of an export, and the parts of a plan that it could not express."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from paraplan.arguments import checked
from paraplan.errors import ProfileError, UsageError
from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.quantizers import quantizer_of
from paraplan.model.weight_formats import is_stored_below_16_bits
from paraplan.plan.allocators import segment_variables
from paraplan.plan.files import ClusterReference, PlanFile
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.support import training_reason, unsupported_reason
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record
from paraplan.units import one_line


class Subject(Record):
    """A plan file to be exported: its content, the path by which commands name it, and the script that it trains.

    `image` is the container image of targets that need one.
    """

    file: PlanFile
    path: str = "plan.json"
    script: str = "train.py"
    image: str | None = None
    made_for: str | None = None
    """The target that writes for the framework that the plan was made for, None for paraplan's runtime and others."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments."""
    job_name: str | None = None
    """The name of the job, None for one after the model."""
    is_planned: bool = True
    """Whether ranks take the plan in `path`; else they plan when they start, and the file says the size of the job."""
    plans_again: bool = False
    """Whether ranks make another plan where the machines that they get are not those of the plan."""
    needs_gpus: bool = True
    """Whether GPUs are asked for; ranks run on CPUs otherwise."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan itself."""
        return self.file.plan

    @property
    def training(self) -> TrainingSpec | None:
        """Training of the plan, None where the file does not say."""
        return self.file.training

    @property
    def name(self) -> str:
        """A name for jobs: the model's, in small letters, digits and hyphens, a letter first, for Kubernetes."""
        if self.job_name is not None:
            return self.job_name
        model = self.file.model.name if self.file.model is not None else "training"
        cleaned = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model.lower())
        joined = "-".join(part for part in cleaned.split("-") if part)[:40].strip("-") or "training"
        return joined if joined[0].isalpha() else f"train-{joined}"

    @property
    def layout(self) -> ClusterReference:
        """Nodes and GPUs per node: the file's machines where they hold the plan's ranks exactly, else one node."""
        cluster, world_size = self.file.cluster, self.plan.world_size
        if cluster is not None and cluster.num_nodes * cluster.gpus_per_node == world_size:
            return cluster
        return ClusterReference(name="one node", num_nodes=1, gpus_per_node=world_size)

    @property
    def gpu(self) -> GpuProfile | None:
        """The kind of GPU that the plan was made for, None where no profile has the name of its machines."""
        if self.file.cluster is None:
            return None
        try:
            return load_machine(self.file.cluster.name).gpu
        except ProfileError:
            return None

    @property
    def gpu_order(self) -> str | None:
        """The order of each node's GPUs as `0,2,1,3`, None where it is that of their numbers or unknown."""
        placement = self.file.placement
        if placement is None or placement.local_gpus == tuple(range(len(placement.local_gpus))):
            return None
        return ",".join(map(str, placement.local_gpus))

    @property
    def gpu_variables(self) -> str | None:
        """The variables that show each node's GPUs in the plan's order, None where it is that of their numbers.

        CUDA puts the fastest first unless told: kinds of GPU that a plan leaves out are told by the bus.
        """
        if self.gpu_order is None:
            return None
        by_bus = "CUDA_DEVICE_ORDER=PCI_BUS_ID " if self.skips_gpus else ""
        return f"{by_bus}CUDA_VISIBLE_DEVICES={self.gpu_order}"

    @property
    def skips_gpus(self) -> bool:
        """Whether the plan leaves a GPU idle that is numbered before one that it uses."""
        return self.file.placement is not None and self.file.placement.skips_gpus

    def describe(self) -> list[str]:
        """Return the lines that head every exported file: the plan, what it trains and on what."""
        if not self.is_planned:
            return [
                f"Written by paraplan for {self.layout.num_nodes} x {self.layout.gpus_per_node} ranks without a plan"
            ]
        lines = [f"Written by paraplan export from {self.path}: {self.plan.describe()}"]
        if self.file.model is not None:
            lines.append(f"for {self.file.model.name}, global batch {self.plan.global_batch_size}")
        return lines


class Gap(Record):
    """A part of a plan that a target has no words for, and why."""

    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part}: {self.reason}"


class Exported(Record):
    """A plan in the words of one target: a whole file.

    `gaps` are parts of the plan that the target cannot express, `notes` what its format leaves to the script or the
    user. Both stand in the text as comments where the format has comments.
    """

    target: str
    text: str
    gaps: tuple[Gap, ...] = ()
    notes: tuple[str, ...] = ()

    @checked
    def save(self, path: str | Path) -> None:
        """Write the text to a file. Raises `UsageError` where it cannot be written."""
        try:
            Path(path).write_text(self.text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", hint="choose a folder that exists") from None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Exported {self.target}: {len(self.text.splitlines())} lines>"


def remarks(subject: Subject, gaps: Iterable[Gap], notes: Iterable[str]) -> list[str]:
    """Return the comment lines of an exported file."""
    lines = subject.describe()
    lines += [f"NOT EXPRESSED: {one_line(str(gap))}" for gap in gaps]
    return lines + [f"Left to you: {note}" for note in notes]


def field_gap(plan: ParallelPlan, field: str, expressible: Sequence[object], reason: str) -> list[Gap]:
    """Return the gap of a field whose value is none of `expressible`; an empty list where it is one."""
    value = getattr(plan, field)
    return [] if value in expressible else [Gap(part=f"{field}={value}", reason=reason)]


def training_gap(
    training: TrainingSpec | None, field: str, expressible: Sequence[str | None], reason: str
) -> list[Gap]:
    """Return the gap of a field of the training, none where the training is unknown."""
    if training is None or getattr(training, field) in expressible:
        return []
    return [Gap(part=f"{field}={getattr(training, field)}", reason=reason)]


def checkpointed_offload_gap(subject: Subject, tool: str) -> list[Gap]:
    """Return the gap of offloaded activations without full recompute, for a tool that refuses them."""
    if subject.training is None or not subject.training.offloads_activations:
        return []
    return field_gap(subject.plan, "recompute", ("full",), f"{tool} offloads activations of checkpointed blocks alone")


def shard_degrees(plan: ParallelPlan) -> tuple[int, int]:
    """Return replicas and the ranks of each that ZeRO shards over, both along dp: (1, dp) without hybrid sharding.

    Tools that join context-parallel ranks to the shards have no such groups (see `hybrid_gap`), so none are made then.
    """
    if plan.zero_shards is None or plan.cp > 1:
        return 1, plan.dp
    return plan.dp // plan.zero_shards, plan.zero_shards


def hybrid_gap(plan: ParallelPlan, tool: str, *, lacking: str | None = None) -> list[Gap]:
    """Return the gap of hybrid sharding: why `tool` lacks it, or that it counts context-parallel ranks as shards."""
    if plan.zero_shards is None:
        return []
    part = f"zero_shards={plan.zero_shards}"
    if lacking is not None:
        return [Gap(part=part, reason=lacking)]
    if plan.cp == 1:
        return []
    return [Gap(part=part, reason=f"{tool} shards over cp={plan.cp} too, so that no group is of dp alone")]


def expert_gap(plan: ParallelPlan, tool: str) -> list[Gap]:
    """Return the gap of expert parallelism for a tool that paraplan does not write it for."""
    others = "transformers, deepspeed, axolotl, torchtitan and megatron-lm have it"
    return field_gap(plan, "ep", (1,), f"paraplan writes no expert parallelism for {tool}; {others}")


def expert_ranks(subject: Subject) -> int:
    """Return over how many ranks a tool spreads whole experts that lays them out along tp too, 1 where it has none."""
    plan, model = subject.plan, subject.file.model
    has_experts = plan.ep > 1 or (model is not None and (model.num_experts or 1) > 1)
    return plan.ep * plan.tp if has_experts else 1


def order_gap(plan: ParallelPlan, tool: str, *orders: Sequence[Axis]) -> list[Gap]:
    """Return the gap of an order of ranks that is none of `orders`, each from outermost to innermost.

    Axes of one rank have no place in an order, and those that the tool does not have are named by another gap.
    """
    wanted = [axis for axis in plan.rank_order if getattr(plan, axis) > 1 and axis in orders[0]]
    possible = [[axis for axis in order if axis in wanted] for order in orders]
    if wanted in possible:
        return []
    return [
        Gap(
            part=f"rank_order={' '.join(wanted)}",
            reason=f"{tool} lays ranks out as {' or '.join(' '.join(order) for order in possible)}, outermost first",
        )
    ]


def runtime_gap(subject: Subject) -> list[Gap]:
    """Return the gap of a plan that paraplan's own runtime, which the target starts, does not execute."""
    model, training, framework = subject.file.model, subject.training, subject.file.framework
    if framework is not None:
        return [Gap(part=f"framework={framework}", reason="the plan was made for it, and paraplan does not launch it")]
    reason = training_reason(training, subject.plan) or unsupported_reason(
        subject.plan,
        num_blocks=model.num_blocks if model is not None else None,
        precision=training.precision if training is not None else None,
        compiled=training is not None and training.compiled,
    )
    if reason is None:
        return []
    part, _, why = reason.partition(": ")
    return [Gap(part=part, reason=f"paraplan.runtime does not execute it ({why})" if why else reason)]


def launch_words(subject: Subject, *, plan_path: str) -> str:
    """Return the last words of `paraplan launch` for a shell: the order of GPUs, the plan and the script.

    GPUs of a plan that leaves some of the first idle are taken from its file.
    """
    order = ["--gpus", subject.gpu_order] if subject.gpu_order is not None and not subject.skips_gpus else []
    plan = ["--plan", f"auto:{plan_path}" if subject.plans_again else plan_path] if subject.is_planned else []
    return shlex.join([*order, *plan, subject.script, *subject.arguments])


TOLD_FIELDS = frozenset(
    ("compiled", "linear_precision", "packs_samples", "train", "seq_length", "optimizer", "attention")
)
"""Fields of a training that an export says, in its file or as a note."""


def shared_notes(
    subject: Subject,
    writes: AbstractSet[str] = frozenset(),
    *,
    losses: tuple[str, ...] = (),
    tells: frozenset[str] = frozenset(),
) -> list[str]:
    """Return what a trainer's format has no place for: all that a training says beside, and the order of GPUs.

    `writes` are those of `TOLD_FIELDS` that it has a place for, `losses` what it has beside the plain one, `tells` the
    settings of the software that it names.
    """
    training = subject.training
    if training is None:
        notes = ["precision, optimizer and sequence length: not in the plan file"]
    else:
        notes = [words for field, words in _told(training).items() if words is not None and field not in writes]
        notes += required_release(training)
        if training.loss not in ("plain", *losses):
            notes.append(f"--loss {training.loss}: the plan was made for it")
        if "expandable_segments" not in tells:
            variables = segment_variables(training.stack, {})
            notes += [
                f"{name}={value} in the environment: the plan was made for it" for name, value in variables.items()
            ]
        if rest := training.stack.without(tells | {"expandable_segments"}).text:
            notes.append(f"{rest}: the plan was made for a stack with these settings")
    if (order := subject.gpu_variables) is not None:
        usual = "in this order groups use the fastest links"
        notes.append(f"{order}: {'the plan leaves other GPUs idle' if subject.skips_gpus else usual}")
    return notes


def required_release(training: TrainingSpec) -> list[str]:
    """Return a note of the release that the plan's frozen weights are to be stored by, where it is not today's."""
    if training.quantizer is None or not is_stored_below_16_bits(training.frozen_weights):
        return []
    tool = quantizer_of(training.quantizer)
    if tool.requires is None:
        return []
    return [
        f"pip install '{tool.requires}': the plan was made for weights stored by {tool.title}, and may not fit else"
    ]


def _told(training: TrainingSpec) -> dict[str, str | None]:
    """Return in words, by field, what a plan was made for that is not what tools do by themselves."""
    stored = f" --base-weights {training.base_weights}" if training.base_weights is not None else ""
    found = {
        "compiled": (training.compiled, "torch.compile: the plan was made for compiled blocks"),
        "linear_precision": (
            training.linear_precision != "16bit",
            f"linear layers in {training.linear_precision}: the plan was made for them",
        ),
        "packs_samples": (
            training.packs_samples,
            f"samples of {training.sample_length} tokens, packed: the plan was made for them",
        ),
        "train": (training.train != "full", f"--train {training.train}{stored}: the plan was made for it"),
        "seq_length": (True, f"sequences of {training.seq_length} tokens: the plan was made for them"),
        "optimizer": (training.optimizer != "adamw", f"--optimizer {training.optimizer}: the plan was made for it"),
        "attention": (training.attention != "sdpa", f"--attention {training.attention}: the plan was made for it"),
    }
    return {field: words if is_said else None for field, (is_said, words) in found.items()}
