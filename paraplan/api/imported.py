"""Configurations of other tools as plans, and what would be faster than they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paraplan.api.estimates import Estimate, estimate
from paraplan.api.executors import executor_of
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.interop.allocator import with_allocator
from paraplan.interop.recognized import Tool as Tool
from paraplan.interop.recognized import is_known_document, tool_of
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.accelerate import read_accelerate
from paraplan.interop.sources.automodel import read_automodel
from paraplan.interop.sources.axolotl import read_axolotl
from paraplan.interop.sources.deepspeed import read_deepspeed
from paraplan.interop.sources.hf_trainer import read_hf_trainer
from paraplan.interop.sources.jobs import script_of_job
from paraplan.interop.sources.liger import with_families_of_liger
from paraplan.interop.sources.llama_factory import read_llama_factory
from paraplan.interop.sources.llama_factory_v1 import read_llama_factory_v1
from paraplan.interop.sources.megatron_bridge import read_megatron_bridge
from paraplan.interop.sources.megatron_lm import read_megatron_lm
from paraplan.interop.sources.ms_swift import read_ms_swift
from paraplan.interop.sources.peft import read_peft
from paraplan.interop.sources.shell import with_sourced, without_documents
from paraplan.interop.sources.shell_arguments import with_arguments
from paraplan.interop.sources.torchtitan import read_torchtitan
from paraplan.interop.sources.transformers import read_transformers
from paraplan.interop.sources.trl import read_trl
from paraplan.interop.stage_rule import with_stages
from paraplan.interop.stock_configs import StockConfig, stock_config
from paraplan.model.spec import ModelSpec
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import TrainingSpec
from paraplan.python_words import in_python_words
from paraplan.search.plan_files import reference_of
from paraplan.search.search import search

_WORTH_CHANGING = 1.02
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_FUNCTION = re.compile(r"(.+\.py):(\w+)")


@dataclass(frozen=True, eq=False)
class ImportedPlan:
    """Plan of another tool's configuration, with the parts of the training that it names."""

    setup: Setup
    """The plan, precision, optimizer, framework and notes."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.setup.plan

    @property
    def framework(self) -> str:
        """The framework that the tool runs."""
        return self.setup.framework

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions for each setting that the configuration leaves open."""
        return tuple(map(in_python_words, self.setup.notes))

    def for_model(self, model: ModelSpec) -> ImportedPlan:
        """Return what the tool does with a model: the stages of its layers, kernels of Liger that its family has."""
        return ImportedPlan(with_stages(with_families_of_liger(self.setup, model), model))

    def plan_file(self, seq_length: int | None = None) -> PlanFile:
        """Return the plan, and its training where the configuration or `seq_length` says how long sequences are."""
        setup = self.setup
        length = seq_length or setup.seq_length
        if length is None:
            return PlanFile(plan=self.plan, framework=self.framework)
        values = {"global_batch_size": self.plan.global_batch_size, "seq_length": length} | setup.training
        return PlanFile(plan=self.plan, training=TrainingSpec.model_validate(values), framework=self.framework)

    def __str__(self) -> str:
        lines = [f"{self.setup.tool}: {in_python_words(self.plan.describe())}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def import_plan(
    source: str | Path,
    tool: Tool | None = None,
    *,
    num_gpus: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    recompute: Recompute | None = None,
    task: str = "sft",
    arguments: Sequence[str] = (),
) -> ImportedPlan:
    """Return the plan of another tool's configuration: a file, or for Megatron-LM its arguments.

    Of torchtitan's Python `FILE.py:NAME` names the function whose configuration is read. `arguments` are the words that
    a shell script is started with (`$1`).
    Without `tool` the text says whose it is. The keywords fill in what scripts decide. Raises `PlanError` naming the
    file and key for what is broken.
    """
    given = Given(
        num_gpus=num_gpus,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        recompute=recompute,
        task=task,
    )
    words, path = str(source), Path(source)
    has_arguments = words.lstrip().startswith("--") or tool == "megatron-lm"
    function = None
    if not has_arguments and (named := _FUNCTION.fullmatch(words)) is not None:
        path, function = Path(named.group(1)), named.group(2)

    read_beside = _FilesBeside(path)
    text = words if has_arguments else _read(path)
    if path.suffix in SCRIPTS:
        text, documents = without_documents(with_arguments(with_sourced(text, read_beside), arguments), words)
        read_beside.written |= documents
    if path.suffix in (".yaml", ".yml") and tool is None and not is_known_document(text, words):
        text = script_of_job(text, words) or text
    tool = tool or ("megatron-lm" if has_arguments else tool_of(text, words, read_beside))
    if tool == "megatron-lm":
        setup = read_megatron_lm(text, source="the arguments" if has_arguments else words, given=given)
    elif tool == "torchtitan":
        setup = read_torchtitan(text, source=str(path), given=given, name=function, read_file=read_beside)
    elif tool in _OF_ONE_FILE:
        setup = _OF_ONE_FILE[tool](text, source=words, given=given)
    else:
        setup = _READERS[tool](text, source=words, given=given, read_file=read_beside)
    return ImportedPlan(with_allocator(setup.replace(notes=(*read_beside.notes, *setup.notes)), text))


@dataclass(eq=False)
class _FilesBeside:
    """The files that a configuration names."""

    path: Path
    """The configuration."""
    written: dict[str, str] = field(default_factory=dict)
    """Files that a script writes before it starts the training, by their names."""
    stock: dict[str, StockConfig] = field(default_factory=dict)
    """Files that are not on this machine, and come with a tool, by the path that names them."""

    @property
    def notes(self) -> list[str]:
        """Notes on files that were not read from this machine."""
        return [one.note for one in self.stock.values()]

    def __call__(self, name: str) -> str:
        if Path(name).name in self.written:
            return self.written[Path(name).name]
        # A name is as the tool finds it from where it is started: in the file's folder, or in one above.
        beside = (folder / name for folder in self.path.absolute().parents)
        place = next((one for one in beside if os.path.exists(one)), None)  # noqa: PTH110  # raises for long names
        if place is None and (stock := stock_config(name)) is not None:
            self.stock[name] = stock
            return stock.text
        try:
            return _read(place or Path(name))
        except PlanError as error:
            hint = f"it is named in {self.path}: put it there, in {self.path.absolute().parent} or above"
            raise PlanError(error.message, hint=error.hint if "$" in name else hint) from None


_OF_ONE_FILE = {
    "deepspeed": read_deepspeed,
    "transformers": read_transformers,
    "peft": read_peft,
    "megatron-bridge": read_megatron_bridge,
    "nemo-automodel": read_automodel,
}
_READERS = {
    "accelerate": read_accelerate,
    "trl": read_trl,
    "hf-trainer": read_hf_trainer,
    "axolotl": read_axolotl,
    "llama-factory": read_llama_factory,
    "llama-factory-v1": read_llama_factory_v1,
    "ms-swift": read_ms_swift,
}


@dataclass(frozen=True, eq=False)
class Alternatives:
    """A configuration that runs today beside plans that may be faster."""

    setup: Setup
    """The configuration."""
    now: Estimate
    """Estimate of the imported plan, modelled for the tool's framework."""
    others: dict[str, Estimate]
    """Estimates to compare with, by a name for each: the tool's own best, and what paraplan recommends."""
    reason: str | None
    """Why there is nothing to compare with."""

    def plan_file(self) -> PlanFile:
        """Return the imported plan with the model, training and machines that it was priced for."""
        workload = self.now.workload
        model, cluster = workload.model, workload.cluster
        return PlanFile(
            plan=self.now.plan,
            model=ModelReference(
                name=model.name,
                source=model.source,
                num_parameters=model.parameters.total,
                num_blocks=model.num_blocks,
                num_experts=model.num_experts,
            ),
            training=workload.training,
            cluster=reference_of(cluster),
            framework=self.setup.framework,
        )

    @property
    def verdict(self) -> str:
        """Result of the comparison, in a sentence."""
        name, best = min(self.others.items(), key=lambda pair: pair[1].step.step_time_s)
        ratio = self.now.step.step_time_s / best.step.step_time_s
        if not self.now.fits:
            return f"The configuration does not fit; '{name}' does."
        if self.now.is_lower_bound or best.is_lower_bound:
            bounded = "what runs today" if self.now.is_lower_bound else f"'{name}'"
            return f"Of {bounded} a bound is predicted, not a speed: a ratio would say nothing."
        if ratio < _WORTH_CHANGING:
            return "Nothing that was searched is predicted to be over 2 % faster than what runs today."
        return f"'{name}' is predicted to be {ratio:.2f} times as fast as what runs today."


def workloads_of(imported: ImportedPlan, workload: Workload, *, has_attention: bool) -> tuple[Workload, Workload]:
    """Return a workload modelled for the tool's framework, and for paraplan's runtime, which no file tells settings.

    Unless `has_attention`, both train with the attention that the framework uses by default.
    """
    model, training, cluster = workload.whole_model or workload.model, workload.training, workload.cluster
    theirs = Workload.of(model, training, cluster, framework=imported.framework)
    # What the tool's own configuration can say, not that of others who train by the same framework.
    levers = theirs.framework.levers
    levers = levers.replace(tiles_mlp=levers.tiles_mlp or theirs.training.stack.mlp_tile is not None)
    theirs = replace(theirs, framework=theirs.framework.replace(export_target=imported.setup.target, levers=levers))
    plain = training.replace(stack=StackSettings()) if imported.setup.stack.text else training
    ours = workload.trained_as(plain) if plain != training else workload
    if not has_attention:
        attention = theirs.framework.kernels.default_attention
        training, plain = training.replace(attention=attention), plain.replace(attention=attention)
    return replace(theirs, training=training), replace(ours, training=plain)


def alternatives(imported: ImportedPlan, theirs: Workload, ours: Workload) -> Alternatives:
    """Return the estimate of an imported plan and the plans to compare with.

    `theirs` is modelled for the tool's framework, `ours` for paraplan's runtime. One plan is the tool's own best, the
    fastest that its configuration can express, left out where it is no faster than what runs; the other is what
    paraplan recommends. Raises `PlanError` where the plan does not suit the workload.
    """
    setup, now = imported.setup, _estimate_of(imported, theirs)
    if setup.plan.world_size != ours.cluster.num_gpus:
        reason = f"the configuration uses {setup.plan.world_size} of {ours.cluster.num_gpus} GPUs"
        return Alternatives(setup, now, {}, reason)
    found: dict[str, Estimate] = {}
    reasons: dict[str, str] = {}
    try:
        executor = executor_of(theirs)
        best = Estimate(theirs, search(theirs, num_candidates=1, objective="fastest", executor=executor).best)
        if not now.fits or best.step.step_time_s < now.step.step_time_s:
            found[f"best of {setup.tool}"] = best
        else:
            reasons[setup.tool] = "no plan that it can run is predicted to be faster"
    except (NoPlanFitsError, PlanError) as error:
        reasons[setup.tool] = error.message
    name = "recommended, paraplan"
    try:
        found[name] = Estimate(ours, search(ours, num_candidates=1).best)
    except NoPlanFitsError as error:
        reasons["paraplan's runtime"] = error.message
    return Alternatives(setup, now, found, None if found else _told_once(reasons))


def _told_once(reasons: dict[str, str]) -> str:
    """Return why each of some tools has no plan, one sentence where it is the same for all of them."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{tool}: {reason}" for tool, reason in reasons.items())


def _estimate_of(imported: ImportedPlan, theirs: Workload) -> Estimate:
    """Return the estimate of what the configuration runs; the way out of a plan that does not suit is in its file."""
    try:
        return estimate(theirs, imported.plan)
    except PlanError as error:
        trains = imported.setup.model_name
        own = f"the file trains {trains}, and --model says that {theirs.model.name} is priced" if trains else None
        there = f"in the file, {error.hint.replace('use --', 'use ')}" if error.hint else None
        raise PlanError(error.message, hint="; ".join(filter(None, [own, there])) or None) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise PlanError(f"cannot read {path}: it is not text", hint="give the configuration file") from None
    except OSError as error:
        unset = "give the script its own arguments behind --, or set what it takes from the environment"
        hint = unset if "$" in str(path) else "check the path"
        raise PlanError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except ValueError as error:  # a zero byte in the path
        raise PlanError(f"cannot read {str(path)!r}: {error}", hint="check the path") from None
