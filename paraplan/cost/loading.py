"""Memory that loading a model takes: on each GPU and in the host's memory, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.framework_loading import LoadWay
from paraplan.cost.plan_table import Ints, Mask
from paraplan.cost.workload import Workload
from paraplan.hardware.cluster import Cluster
from paraplan.model.quantizers import quantizer_of
from paraplan.model.weight_formats import is_stored_below_16_bits
from paraplan.plan.parallel import AXES
from paraplan.records import Record
from paraplan.units import format_bytes

_FP32, _HALF = 4.0, 2.0
_WORTH_SAYING = 0.5
"""The share of the host's memory from which loading is worth a word."""


class LoadingEstimate(Record):
    """The memory of loading in one way, beside what there is."""

    way: LoadWay
    """Who reads the weights, and where they are whole (`LoadWay`)."""
    option: str | None = None
    """The value of the tool's configuration for this way, None where it is the tool's only one."""
    weights_bytes: int
    """All weights as they are loaded."""
    gpu_bytes: int
    """The most that a GPU holds while they are loaded."""
    host_bytes_per_node: int
    """The most that the ranks of a machine hold in its memory, without the files that the kernel caches."""
    usable_memory_bytes: int
    """The memory that training may allocate on a GPU."""
    host_memory_bytes: int | None
    """The memory of a machine, with what GPUs share of it; None where nobody said."""
    step_memory_bytes: int
    """The memory of a GPU at the peak of a step."""
    way_out: str
    """The remedy where there is no room."""
    keeps_plan: bool = True
    """Whether that leaves the plan, its framework and its GPUs as they are."""
    without: LoadingEstimate | None = None
    """Loading without `option`."""

    @property
    def fits_gpu(self) -> bool:
        """Whether a GPU has room for what it holds meanwhile."""
        return self.gpu_bytes <= self.usable_memory_bytes

    @property
    def fits(self) -> bool:
        """Whether GPU and host have room for it."""
        return self.fits_gpu and (self.host_memory_bytes is None or self.host_bytes_per_node <= self.host_memory_bytes)

    @property
    def is_worth_saying(self) -> bool:
        """Whether it takes more than a step does, or much of the host's memory, in this way or without its option."""
        share = self.host_bytes_per_node / self.host_memory_bytes if self.host_memory_bytes else 0.0
        here = self.gpu_bytes > self.step_memory_bytes or share > _WORTH_SAYING
        return here or (self.without is not None and self.without.is_worth_saying)

    @property
    def in_words(self) -> str:
        """Who holds what, and what to do where there is no room."""
        words = self.whole_in_words
        if self.option is not None:
            words = f"with {self.option}, {words}"
        if not self.fits:
            words = f"cannot be loaded so: {words}; use {self.way_out}"
        if self.without is not None:
            words += f". Without it {self.without.whole_in_words}" + (
                "" if self.without.fits else ", which does not fit"
            )
        return words

    @property
    def lacking_in_words(self) -> str | None:
        """A sentence that names what there is no room for while it is loaded, None where there is."""
        if self.fits:
            return None
        if not self.fits_gpu:
            return f"{format_bytes(self.gpu_bytes)} on each GPU first"
        return f"{format_bytes(self.host_bytes_per_node)} of the host's memory first"

    @property
    def whole_in_words(self) -> str:
        """Who holds what, beside what there is."""
        whole, on_gpu = format_bytes(self.weights_bytes), format_bytes(self.gpu_bytes)
        host = f"{format_bytes(self.host_bytes_per_node)} of the host's memory"
        if self.host_memory_bytes is not None:
            host = f"{format_bytes(self.host_bytes_per_node)} of the host's {format_bytes(self.host_memory_bytes)}"
        return {
            "each_rank_gpu": f"each rank has all weights on its GPU first, {on_gpu} of "
            f"{format_bytes(self.usable_memory_bytes)} usable ({format_bytes(self.step_memory_bytes)} in a step)",
            "each_rank_host": f"each rank of a machine reads all weights, {whole}: {host}",
            "first_rank_host": f"one rank of a machine reads all weights: {host}",
            "shards": f"each rank reads its own share, {on_gpu}",
        }[self.way]


_WAYS_OUT: dict[LoadWay, str] = {
    "each_rank_gpu": "a framework whose ranks read shards, or GPUs with more memory",
    "each_rank_host": "the meta device for the model of all ranks but one, or fewer ranks on a machine",
    "first_rank_host": "a machine with more memory, or swap space while it is loaded",
    "shards": "more ranks, which share the weights",
}
_OF_QUANTIZED = "weights in fewer bits, or GPUs with more memory"
_OF_QUANTIZED_BEFORE = (
    "weights in fewer bits, GPUs with more memory, or transformers 4, which keeps them in the host's memory under FSDP "
    "(--framework fsdp --quantizer transformers-4)"
)
_CHECKPOINT_FILE = 10e9
"""Bytes of one file of a checkpoint in 16 bits, which a rank holds while it quantizes the tensors in it: the
`max_shard_size` that transformers 4 saves by."""
_OF_DEQUANTIZED = "a copy of the release in 16 bits, which FSDP and ZeRO-3 load in shares"


@dataclass(frozen=True)
class _Loading:
    """How the weights of a plan are loaded."""

    way: LoadWay
    option: str | None = None
    without: LoadWay | None = None
    way_out: str | None = None
    """The remedy where there is no room, None where the way itself says it."""
    keeps_plan: bool = True
    """Whether that leaves the plan as it is."""
    converts: bool = False
    """Whether weights in fewer bits are made of tensors in 16."""


def loading_of(workload: Workload, estimate: PlanEstimate) -> LoadingEstimate | None:
    """Return what loading a plan takes by the framework's way, None where nobody knows that.

    Weights that train are loaded in the type that they are kept in, others as they are stored. While bitsandbytes or
    a release's own format is converted, one tensor is there in 16 bits too; a rank that is sent its share holds one
    tensor whole.
    """
    plan = estimate.plan
    found = _loading(workload, is_sharded=bool(_is_sharded(workload, np.array(plan.zero_stage))))
    if found is None or plan.devices_per_process > 1:
        return None
    first = _in_way(workload, estimate, found.way, converts=found.converts)
    other = _in_way(workload, estimate, found.without, converts=found.converts) if found.without is not None else None
    way_out = found.way_out or first.way_out
    return first.replace(option=found.option, without=other, way_out=way_out, keeps_plan=found.keeps_plan)


def can_load(workload: Workload, column: Callable[[str], Ints]) -> Mask:
    """Return which plans, given by their columns, can be loaded by the framework's way.

    It goes by what stands whole. What a rank keeps of its shares is in the peak of its step.
    """
    sharded = _is_sharded(workload, column("zero_stage"))
    loads = np.ones(len(sharded), dtype=bool)
    for is_sharded in (False, True):
        found = _loading(workload, is_sharded=is_sharded)
        if found is None:
            continue
        sizes = _Sizes.of(workload, converts=found.converts)
        fits = np.full(len(sharded), sizes.fits_host(workload, found.way))
        if found.way == "each_rank_gpu":
            axes: dict[str, Ints] = {axis.name: column(axis.name) for axis in AXES}
            fits &= sizes.whole_bytes + sizes.largest_bytes * found.converts <= workload.usable_bytes(axes)
        loads &= fits | (sharded != is_sharded)
    return loads


def some_way_loads(workload: Workload) -> bool:
    """Return whether some plan may be loaded by the framework's way, on however many nodes.

    No plan leaves a GPU more than that of one process does.
    """
    stages = np.array([0, 3])
    return bool(can_load(workload, lambda name: stages if name == "zero_stage" else np.ones_like(stages)).any())


def _is_sharded(workload: Workload, zero_stage: Ints) -> Mask:
    return np.asarray((zero_stage == 3) | (workload.framework.data_parallel.sharding.is_fsdp & (zero_stage > 0)))


def _loading(workload: Workload, *, is_sharded: bool) -> _Loading | None:
    profile, weights = workload.framework.loading, workload.training.frozen_weights
    if workload.cluster.gpu.vendor == "cpu":
        return None
    if workload.training.train != "full" and is_stored_below_16_bits(weights):
        by_tool = profile.quantized_shards if is_sharded else {}
        tool = workload.training.quantizer or workload.framework.storage.quantizer
        quantized = by_tool.get(tool, profile.quantized)
        is_whole = quantized == "each_rank_gpu"
        has_older = workload.model.model_type not in quantizer_of("transformers-4").lacking_families
        way_out = (_OF_QUANTIZED_BEFORE if has_older else _OF_QUANTIZED) if is_whole else None
        found = quantized and _Loading(quantized, way_out=way_out, keeps_plan=not is_whole, converts=True)
        if found is None or by_tool.get(tool) is None or profile.quantized_without is None:
            return found
        return replace(found, option=profile.quantized_option, without=profile.quantized_without)
    if profile.dequantized is not None and workload.model.model_type in profile.released_quantized:
        return _Loading(
            profile.dequantized, way_out=_OF_DEQUANTIZED if profile.dequantized == "each_rank_gpu" else None
        )
    way = profile.sharded if is_sharded else profile.replicated
    if way is None or way != profile.sharded:
        return way and _Loading(way)
    return _Loading(way, profile.option, profile.without)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the weights that are loaded."""

    whole_bytes: float
    """All weights."""
    largest_bytes: float
    """The largest tensor, as it is before it is converted."""
    file_bytes: float
    """The file of the checkpoint that a rank converts; nothing where weights are read as they are kept."""
    ranks: int
    """Ranks of a machine."""

    @classmethod
    def of(cls, workload: Workload, *, converts: bool) -> _Sizes:
        each = workload.framework.storage.weight_bytes if workload.is_mixed_precision else _FP32
        parameters = list(workload.model.all_parameters)
        whole = sum(
            count * (one.num_elements * each if one.frozen_bytes is None else one.frozen_bytes)
            for one, count in parameters
        )
        largest = max((one.num_elements for one, _ in parameters), default=0) * (_HALF if converts else each)
        half = sum(count * one.num_elements * _HALF for one, count in parameters)
        file = min(_CHECKPOINT_FILE, half) * converts
        return cls(whole, largest, file, min(workload.cluster.num_gpus, workload.cluster.gpus_per_node))

    def host_bytes(self, way: LoadWay) -> float:
        """Return what the ranks of a machine hold in its memory."""
        whole = self.whole_bytes + self.file_bytes
        return {"each_rank_host": self.ranks * whole, "first_rank_host": whole}.get(way, 0.0)

    def fits_host(self, workload: Workload, way: LoadWay) -> bool:
        """Return whether the host has room for it."""
        limit = _host_memory(workload.cluster)
        return limit is None or self.host_bytes(way) <= limit


def _host_memory(cluster: Cluster) -> int | None:
    """Return what a machine has for weights that are read, None where nobody said: with what GPUs share of it."""
    known = cluster.host_memory_bytes
    shared = cluster.gpus_per_node * cluster.gpu_memory_bytes if cluster.gpu.shares_host_memory else 0
    return None if known is None else known + shared


def _in_way(workload: Workload, estimate: PlanEstimate, way: LoadWay, *, converts: bool) -> LoadingEstimate:
    sizes = _Sizes.of(workload, converts=converts)
    whole, largest = sizes.whole_bytes, sizes.largest_bytes
    kept = max(stage.parameter_bytes for stage in estimate.memory)
    on_gpu = {
        "each_rank_gpu": whole + largest * converts,
        "first_rank_host": min(kept + largest, max(whole, kept)),
        "each_rank_host": kept,
        "shards": kept,
    }[way]
    return LoadingEstimate(
        way=way,
        way_out=_WAYS_OUT[way],
        weights_bytes=round(whole),
        gpu_bytes=round(on_gpu),
        host_bytes_per_node=round(sizes.host_bytes(way)),
        usable_memory_bytes=estimate.usable_memory_bytes,
        host_memory_bytes=_host_memory(workload.cluster),
        step_memory_bytes=estimate.peak_memory_bytes,
    )
