"""What it takes to load a model: on each GPU and in the host's memory, before the first step."""

from __future__ import annotations

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.framework_loading import LoadWay
from paraplan.cost.workload import Workload
from paraplan.model.weight_formats import is_stored_below_16_bits
from paraplan.records import Record
from paraplan.units import format_bytes

_FP32, _HALF = 4.0, 2.0
_WORTH_SAYING = 0.5
"""The share of the host's memory from which loading is worth a word."""


class LoadingEstimate(Record):
    """What loading takes in one way, beside what there is."""

    way: LoadWay
    """Who reads the weights, and where they are whole (`LoadWay`)."""
    option: str | None = None
    """What this way takes in the tool's configuration, None where it is the tool's only one."""
    weights_bytes: int
    """All weights as they are loaded."""
    gpu_bytes: int
    """What a GPU holds at most while they are loaded."""
    host_bytes_per_node: int
    """What the ranks of a machine hold in its memory at most, without the files that the kernel caches."""
    usable_memory_bytes: int
    """What training may allocate on a GPU."""
    host_memory_bytes: int | None
    """The memory of a machine, None where nobody said."""
    step_memory_bytes: int
    """What a GPU holds at the peak of a step."""
    way_out: str
    """What to do where there is no room."""
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
        words = self._words
        if self.option is not None:
            words = f"with {self.option}, {words}"
        if not self.fits:
            words = f"cannot be loaded so: {words}; use {self.way_out}"
        if self.without is not None:
            words += f". Without it {self.without._words}" + ("" if self.without.fits else ", which does not fit")
        return words

    @property
    def _words(self) -> str:
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
_OF_QUANTIZED = "weights in fewer bits, or GPUs with more memory (transformers 4 read them into host memory under FSDP)"
_OF_DEQUANTIZED = "a copy of the release in 16 bits, which FSDP and ZeRO-3 load in shares"


def loading_of(workload: Workload, estimate: PlanEstimate) -> LoadingEstimate | None:
    """Return what loading a plan takes by the framework's way, None where nobody knows that.

    Weights that train are loaded in the type that they are kept in, others as they are stored. While bitsandbytes or
    a release's own format is converted, one tensor is there in 16 bits too; a rank that is sent its share holds one
    tensor whole.
    """
    profile, plan = workload.framework.loading, estimate.plan
    is_sharded = plan.zero_stage == 3 or (workload.framework.data_parallel.uses_fsdp and plan.zero_stage > 0)
    weights = workload.training.frozen_weights
    is_quantized = workload.training.train != "full" and is_stored_below_16_bits(weights)
    option = without = way_out = None
    if is_quantized:
        way, way_out = profile.quantized, _OF_QUANTIZED
    elif profile.dequantized is not None and workload.model.model_type in profile.released_quantized:
        way, way_out = profile.dequantized, _OF_DEQUANTIZED
    elif is_sharded:
        way, option, without = profile.sharded, profile.option, profile.without
    else:
        way = profile.replicated
    if way is None or plan.devices_per_process > 1 or workload.cluster.gpu.vendor == "cpu":
        return None
    first = _in_way(workload, estimate, way, has_room=is_quantized)
    other = _in_way(workload, estimate, without, has_room=False) if without is not None else None
    is_whole = way == "each_rank_gpu"
    return first.replace(option=option, without=other, way_out=way_out if is_whole and way_out else first.way_out)


def _in_way(workload: Workload, estimate: PlanEstimate, way: LoadWay, *, has_room: bool) -> LoadingEstimate:
    each = workload.framework.storage.weight_bytes if workload.is_mixed_precision else _FP32
    parameters = list(workload.model.all_parameters)
    whole = sum(
        count * (one.num_elements * each if one.frozen_bytes is None else one.frozen_bytes) for one, count in parameters
    )
    converted = _HALF if has_room else each
    largest = max((one.num_elements for one, _ in parameters), default=0) * converted
    kept = max(stage.parameter_bytes for stage in estimate.memory)
    ranks = min(estimate.plan.world_size, workload.cluster.gpus_per_node)
    on_gpu = {
        "each_rank_gpu": whole + (largest if has_room else 0.0),
        "first_rank_host": min(kept + largest, max(whole, kept)),
        "each_rank_host": kept,
        "shards": kept,
    }[way]
    on_host = {"each_rank_host": ranks * whole, "first_rank_host": whole}.get(way, 0.0)
    return LoadingEstimate(
        way=way,
        way_out=_WAYS_OUT[way],
        weights_bytes=round(whole),
        gpu_bytes=round(on_gpu),
        host_bytes_per_node=round(on_host),
        usable_memory_bytes=estimate.usable_memory_bytes,
        host_memory_bytes=estimate.host_memory_bytes,
        step_memory_bytes=estimate.peak_memory_bytes,
    )
