"""Cheap levers on memory, before other machines: one ordered list, each tried and priced as a search of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paraplan.cost.blocks.tiled_mlp import has_tiles
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import FrameworkCatalog
from paraplan.cost.stored_weights import untrainable_notes, wider_quantizers
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.model.quantizers import quantizer_of
from paraplan.model.trainable import ALL_LINEAR, QLORA_WEIGHTS
from paraplan.model.weight_formats import WEIGHT_FORMATS, is_stored_below_16_bits
from paraplan.plan.allocators import grows_segments
from paraplan.plan.executor import Executor, training_gap
from paraplan.plan.support import rule_of
from paraplan.plan.training import TrainingSpec
from paraplan.search.constraints import Constraints
from paraplan.search.results import SPARE

LORA = "lora:r=16"
_OF_ATTENTION = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Lever:
    """One change of a training, or of what is fixed of its plan, that saves memory."""

    name: str
    """Usual name of the lever."""
    options: str
    """The options that ask for it."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the training that it sets."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the constraints that it sets."""
    keeps_training: bool = True
    """Whether the same parameters train with the same arithmetic."""
    framework: FrameworkProfile | None = None
    """The framework that it takes, None for the one that was asked for."""

    def workload(self, workload: Workload) -> Workload:
        """Return the workload under the lever. Raises `ParaplanError` where the model has no layers for it."""
        if self.framework is not None:
            workload = replace(workload, framework=self.framework, plain_framework=self.framework)
        changes = self.training or self.framework is not None
        return workload.trained_as(workload.training.replace(**self.training)) if changes else workload

    def constraints(self, fixed: Constraints) -> Constraints:
        """Return the constraints under the lever."""
        return replace(fixed, **self.fixed)

    @property
    def fields(self) -> set[str]:
        """The names of what it sets."""
        return {*self.training, *self.fixed}

    @property
    def is_choice(self) -> bool:
        """Whether it only leaves free what was fixed of a plan."""
        return not self.training

    @property
    def keeps_asked(self) -> bool:
        """Whether it leaves the training as it was asked for.

        A tool that stores all weights as asked does, though it may want the layers of adapters named.
        """
        return self.keeps_training or "quantizer" in self.fields <= {"quantizer", "train"}

    @property
    def trains_adapter(self) -> bool:
        """Whether it trains adapters, or stores their base, in place of what was asked."""
        return bool({"train", "base_weights", "quantizer"} & self.fields)

    def beside(self, other: Lever) -> Lever:
        """Return both levers as one; where they set the same field, `other` decides."""
        drops, before, words = "without ", self.options, other.options
        if "train" in self.training and "train" in other.training:
            before = re.sub(r"--train \S+ ?", "", before).strip()
        both_drop = before.startswith(drops) and words.startswith(drops)
        options = f"{before} and {words.removeprefix(drops)}" if both_drop else f"{before} {words}".strip()
        return Lever(
            f"{self.name}, {other.name}",
            options,
            {**self.training, **other.training},
            {**self.fixed, **other.fixed},
            self.keeps_training and other.keeps_training,
            other.framework or self.framework,
        )


def levers(workload: Workload, fixed: Constraints, executor: Executor) -> Iterator[Lever]:
    """Yield the levers that the training and what is `fixed` leave, in the order in which they are tried.

    A fused or chunked loss; the model's own 4-bit weights, or QLoRA, with scales in bytes, those first over which the
    tool trains; an 8-bit optimizer; recompute; feed-forward layers in tiles; activation offload; fewer sequences.
    """
    training = workload.training
    has_gpu = workload.cluster.gpu.vendor != "cpu"
    yield from _choices_left_free(fixed)
    yield from smaller_loss(workload, executor)
    if has_gpu:
        yield from _narrower_weights(workload)
    if training.optimizer in ("adamw", "adamw_foreach"):
        narrow = {"optimizer": "adamw_8bit"}
        yield Lever("8-bit AdamW", "--optimizer adamw_8bit", narrow, keeps_training=False)
        if training.precision == "bf16" and training.train == "full":
            options = "--precision bf16-pure --optimizer adamw_8bit"
            yield Lever("Pure bf16", options, {"precision": "bf16-pure", **narrow}, keeps_training=False)
    if fixed.recompute not in (None, "full"):
        yield Lever("recompute", f"without --recompute {fixed.recompute}", fixed={"recompute": None})
    yield from tiled_mlp(workload)
    if has_gpu and not training.offloads_activations:
        yield Lever("activation offload", "--offload-activations", {"offloads_activations": True})
    if (fixed.micro_batch_size or 1) > training.learns_from.group:
        option = f"without --micro-batch {fixed.micro_batch_size}"
        yield Lever("fewer sequences at once", option, fixed={"micro_batch_size": None})


def smaller_loss(workload: Workload, executor: Executor) -> Iterator[Lever]:
    """Yield the first loss that keeps fewer logits which the executor has: a fused one, or one over chunks."""
    if workload.training.loss in ("plain", "chunked"):
        offers = [Lever("fused loss", "--loss liger", {"loss": "liger"}), *chunked_loss(workload)]
        yield next((one for one in offers if lacking(one, workload, executor) is None), offers[0])


def growing_segments(workload: Workload) -> Iterator[Lever]:
    """Yield segments of torch's allocator that grow, so that larger requests find room in what is freed.

    CUDA alone is known to have them everywhere; it is one variable in the environment.
    """
    cluster, stack = workload.cluster, workload.training.stack
    grows = grows_segments(workload.framework.storage.expandable_segments, cluster.num_gpus)
    if cluster.gpu.vendor == "nvidia" and not grows and stack.expandable_segments is None:
        changed = stack.replace(expandable_segments=True)
        words = ",".join(filter(None, [stack.text, "expandable_segments"]))
        yield Lever("segments that grow", f"--stack {words}", {"stack": changed})


def chunked_loss(workload: Workload) -> Iterator[Lever]:
    """Yield a loss over chunks of tokens, where it is of all logits."""
    if workload.training.loss == "plain":
        yield Lever("chunked loss", "--loss chunked", {"loss": "chunked"})


def tiled_mlp(workload: Workload) -> Iterator[Lever]:
    """Yield feed-forward layers over tiles of as many tokens as a token has features, where sequences have more."""
    stack, tile = workload.training.stack, workload.model.hidden_size
    if (
        stack.mlp_tile is None
        and workload.training.seq_length > tile
        and any(has_tiles(run.block) for run in workload.model.runs)
    ):
        tiled = stack.replace(mlp_tile=tile)
        yield Lever("feed-forward layers in tiles", f"--stack {tiled.text}", {"stack": tiled})


def _choices_left_free(fixed: Constraints) -> Iterator[Lever]:
    """Yield what is fixed of a plan, each left free: that costs nothing but the choice."""
    for each in fields(fixed):
        value = getattr(fixed, each.name)
        if value is not None and each.name not in ("recompute", "micro_batch_size"):
            option = Constraints(**{each.name: value}).words[0]
            yield Lever(f"Without {option}", f"without {option}", fixed={each.name: None})


def _narrower_weights(workload: Workload) -> Iterator[Lever]:
    """Yield LoRA for full training, then the model's own narrow weights and QLoRA, each with experts stored so too."""
    training, released = workload.training, workload.model.released_in
    is_full = training.train == "full"
    adapter = {"train": LORA} if is_full else {}
    if is_full:
        yield Lever("LoRA", f"--train {LORA}", adapter, keeps_training=False)
    yield from _with_experts(Lever("", "", keeps_training=False), workload)
    narrower = f"{training.frozen_weights}:double"
    if not is_full and narrower in WEIGHT_FORMATS:
        yield Lever("scales in bytes", f"--base-weights {narrower}", {"base_weights": narrower}, keeps_training=False)
    is_wide = training.base_weights in (None, "bf16", "fp32")
    if training.linear_precision != "16bit" or not is_wide:
        return  # weights in 4 bits are multiplied in 16
    if training.replace(**adapter).trainable.adapter is None:
        return  # parts of the model train in their own precision
    found = list[Lever]()
    for name, weights in ((f"the model's own {released} weights", released), ("QLoRA", QLORA_WEIGHTS)):
        if weights is not None:
            options = f"--train {LORA} --base-weights {weights}" if is_full else f"--base-weights {weights}"
            lever = Lever(name, options, {**adapter, "base_weights": weights}, keeps_training=False)
            found += [lever, *_with_experts(lever, workload)]
    yield from sorted(found, key=lambda lever: not _trains(lever, workload))


def _trains(lever: Lever, workload: Workload) -> bool:
    """Return whether the tool that stores the weights of a lever trains adapters over them."""
    try:
        return not untrainable_notes(lever.workload(workload))
    except ParaplanError:  # the model has no layers for it, which its trial finds too
        return False


def loaders(workload: Workload) -> Iterator[Lever]:
    """Yield what loads weights in fewer bits without all of them on each GPU: a tool, and a framework that has it.

    That of the workload, or of paraplan's runtime each that plans are exported for, those first of which one rank of a
    machine reads the weights.
    """
    if workload.training.train == "full" or not is_stored_below_16_bits(workload.training.frozen_weights):
        return
    own, catalog = workload.framework, FrameworkCatalog()
    others = [catalog.load(name) for name in catalog.names()] if own.is_own_runtime else [own]
    exported = [other for other in others if other.export_target is not None]
    ways = [(way, other, tool) for other in exported for tool, way in other.loading.quantized_shards.items()]
    for _, other, tool in sorted(ways, key=lambda way: (way[0] != "first_rank_host", way[1].name)):
        is_lacking = workload.model.model_type in quantizer_of(tool).lacking_families
        if is_lacking or (tool == workload.training.quantizer and other is own):
            continue
        changes = _stored_by(tool, workload)
        options = changes.options if other is own else f"--framework {other.name} {changes.options}"
        yield replace(
            changes,
            name=f"{tool} under {other.title}",
            options=options,
            framework=None if other is own else other,
        )


def offloaders(workload: Workload) -> Iterator[Lever]:
    """Yield the frameworks that offload activations whatever is asked, where the runtime would train adapters."""
    if workload.framework.is_own_runtime and workload.training.trainable.adapter is not None:
        catalog = FrameworkCatalog()
        for other in (catalog.load(name) for name in catalog.names()):
            if other.fixed.offloads_activations:
                yield Lever(other.title, f"--framework {other.name}", framework=other)


def _with_experts(lever: Lever, workload: Workload) -> Iterator[Lever]:
    """Yield a lever with a tool that stores fused experts in the format too, where the workload's own does not."""
    try:
        under = lever.workload(workload)
        tools = wider_quantizers(under)
    except ParaplanError:  # the tool lacks the format, or the model the layers
        return
    for tool in tools[:1]:
        named = _stored_by(tool.name, under)
        yield lever.beside(named) if lever.name else named


def _stored_by(tool: str, workload: Workload) -> Lever:
    """Return the lever that has a tool store weights; of one that wants them named adapters are attention's alone."""
    lever = Lever("experts too", f"--quantizer {tool}", {"quantizer": tool}, keeps_training=False)
    trainable = workload.training.trainable
    adapter = trainable.adapter
    names_layers = quantizer_of(tool).names_layers and not workload.framework.is_own_runtime
    if adapter is None or adapter.targets != (ALL_LINEAR,) or not names_layers:
        return lever
    train = trainable.replace(adapter=adapter.replace(targets=_OF_ATTENTION)).text
    is_qlora = workload.training.base_weights == QLORA_WEIGHTS and train.startswith("lora:")
    options = f"--train '{'q' * is_qlora}{train}'"  # which takes the place of a qlora that was asked for
    return lever.beside(Lever("adapters of attention", options, {"train": train}, keeps_training=False))


def lacking(lever: Lever, workload: Workload, executor: Executor) -> str | None:
    """Return why the executor cannot train under a lever at all, None where it can."""
    if not lever.training or lever.framework is not None:
        return None
    try:
        changed: TrainingSpec = workload.training.replace(**lever.training)
    except ParaplanError as error:  # options that exclude each other
        return error.message
    gap = training_gap(executor, changed, workload.model.num_blocks)
    return None if gap is None else rule_of(gap)


def with_room(workload: Workload) -> Workload:
    """Return the workload with a tenth of the usable memory kept free: what fits then is not near the limit."""
    margin = max(workload.constants.memory_margin, SPARE)
    return replace(workload, constants=workload.constants.replace(memory_margin=margin))
