"""Figures of data sheets and of calibration: `GpuProfile`, `NetworkProfile`, `MachineProfile`."""

from __future__ import annotations

from math import log
from typing import Literal

from pydantic import Field

from paraplan.hardware.architecture import ArchitectureProfile
from paraplan.hardware.topology import NodeTopology
from paraplan.records import Record, SourceKind

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]


class KernelFit(Record):
    """Speed of matmuls and attention in one precision, as `paraplan calibrate` found on one machine.

    A product [m, k] x [k, n] takes `matmul_launch_s + 2mnk (1 + half_m/m + half_n/n + half_k/k) / matmul_flops_per_s`.
    Attention rates are those of torch's fused kernel on causal sequences: half of the scores counted, and 2.5 times the
    forward FLOPs backward. `error` is the median relative error of the matmul fit over `num_timings`.
    """

    precision: Precision
    matmul_flops_per_s: float = Field(gt=0)
    half_m: float = Field(default=0.0, ge=0)
    half_n: float = Field(default=0.0, ge=0)
    half_k: float = Field(default=0.0, ge=0)
    matmul_launch_s: float = Field(default=0.0, ge=0)
    attention_forward_flops_per_s: float | None = Field(default=None, gt=0)
    attention_backward_flops_per_s: float | None = Field(default=None, gt=0)
    num_timings: int = Field(gt=0)
    error: float = Field(ge=0)


class KernelCalibration(Record):
    """Kernels of one machine as `paraplan calibrate` measured them; the cost model prefers it to published figures.

    `moved_bytes_per_s` is what norms, activations and sums move through memory, `optimizer_s_per_parameter` the time
    of AdamW with clipping; `overlap_slowdown` how much longer kernels and collectives take that run at the same time.
    None was not measured. `source` names date and versions.
    """

    kernels: tuple[KernelFit, ...] = Field(min_length=1)
    moved_bytes_per_s: float | None = Field(default=None, gt=0)
    optimizer_s_per_parameter: float | None = Field(default=None, gt=0)
    overlap_slowdown: float | None = Field(default=None, ge=1)
    source: str

    def fit(self, precision: Precision) -> KernelFit | None:
        """Return what was found for a precision, None where it was not measured."""
        return next((fit for fit in self.kernels if fit.precision == precision), None)


_POWER_EXPONENT = 0.87
"""How matmuls fall with the power limit. Measured on an RTX PRO 6000 Blackwell from 600 to 400 W: 317 to 217 TFLOP/s in
bf16 (exponent 0.93), 513 to 368 in fp8 (0.82; 1a1a11a/gpu_power on GitHub, figures/tflops_vs_power.png). A GB300 at 500
of 1,400 W keeps 617 of 1,600 TFLOP/s or more (0.93; facebookexperimental/triton on GitHub, pull request 2023). The cube
root, by which clocks would fall if the voltage fell with them, is far from both: voltages are at their floor."""


class GpuProfile(Record):
    """One kind of GPU, from its data sheet. Rates are dense; bandwidth is per direction.

    `architecture` names a file of `profiles/architectures`, or is the path of one that ends in .json.
    `driver_names` are the names under which drivers report it, without the vendor: `H100 80GB HBM3`.
    `peer_access` tells whether one GPU may read another's memory over PCIe; None where nobody said.
    `nvlink_bridge` marks cards whose NVLinks lead over a bridge to other cards, never through NVSwitch.
    `calibration` is what was measured on one machine with such GPUs, None in the profiles that come with paraplan.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    vendor: Literal["nvidia", "amd", "cpu"]
    architecture: str
    compute_capability: str | None = None
    num_multiprocessors: int | None = Field(default=None, gt=0)
    memory_bytes: int = Field(gt=0, description="what the driver reports as total")
    driver_reserved_bytes: int | None = Field(default=None, ge=0, description="of it, what CUDA does not give")
    memory_bandwidth_bytes_per_s: float = Field(gt=0)
    peak_flops_per_s: dict[Precision, float] = Field(description="dense matmul peak with fp32 accumulation")
    reached_matmul_flops_per_s: float | None = Field(
        default=None, gt=0, description="best 16-bit matmul that anyone measured, any shape"
    )
    reached_fp8_matmul_flops_per_s: float | None = Field(
        default=None, gt=0, description="best 8-bit matmul that anyone measured, any shape"
    )
    board_power_w: float | None = Field(default=None, gt=0, description="what the data sheet's rates are at")
    power_limit_w: float | None = Field(default=None, gt=0, description="a limit that somebody set below it")
    nvlink_generation: int | None = None
    nvlink_count: int | None = None
    nvlink_bandwidth_bytes_per_s: float | None = Field(default=None, description="payload of one link, one direction")
    pcie_generation: int | None = None
    pcie_bandwidth_bytes_per_s: float = Field(gt=0, description="one direction, as measured between GPUs")
    nvlink_bridge: bool = False
    peer_access: bool | None = None
    shares_host_memory: bool = Field(default=False, description="GPU and CPU have one memory")
    calibration: KernelCalibration | None = None
    source: str
    source_kind: SourceKind | None = None
    """How good the weakest part of the source is; None where nobody said."""
    architecture_profile: ArchitectureProfile | None = Field(default=None, exclude=True, repr=False)
    """Profile of the GPU's architecture, filled in from `profiles/architectures` where a profile is loaded."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the driver keeps of the total: as this profile says, else as its architecture does."""
        if self.driver_reserved_bytes is not None or self.architecture_profile is None:
            return self.driver_reserved_bytes or 0
        return self.architecture_profile.driver_reserved_bytes

    @property
    def shared(self) -> ArchitectureProfile:
        """Profile of the GPU's architecture. Raises `ValueError` for a record that no loader made."""
        if self.architecture_profile is None:
            raise ValueError(f"{self.name}: its architecture was not loaded")
        return self.architecture_profile

    @property
    def fp8_speedup(self) -> float:
        """How many times as fast as in 16 bits matmuls run in 8 bits: as measured, else as the data sheets say."""
        narrow, wide = self.reached_fp8_matmul_flops_per_s, self.reached_matmul_flops_per_s
        return narrow / wide if narrow is not None and wide is not None else self.shared.fp8_speedup

    @property
    def clock_share(self) -> float:
        """The share of its clock that a power limit leaves to matmuls, which take the whole power of the board."""
        if self.power_limit_w is None or self.board_power_w is None:
            return 1.0
        return float(min(1.0, self.power_limit_w / self.board_power_w) ** _POWER_EXPONENT)

    def peak(self, precision: Precision) -> float | None:
        """Return the dense matmul peak in FLOP/s, None where the GPU has no such arithmetic."""
        return self.peak_flops_per_s.get(precision)


class MeasuredRate(Record):
    """The bus bandwidth that messages of one size reached, latency and all, as nccl-tests prints it."""

    bus_bandwidth_bytes_per_s: float = Field(gt=0)
    message_bytes: int = Field(gt=0)

    def of_share(self, share: float) -> MeasuredRate:
        """Return the rate of a group that has a share of each node's NICs."""
        return self.replace(bus_bandwidth_bytes_per_s=self.bus_bandwidth_bytes_per_s * share)


class MeasuredRanks(Record):
    """Bus bandwidths in bytes/s, by collective, of `num_ranks` ranks that fill their nodes."""

    num_ranks: int = Field(gt=1)
    bus_bandwidth_bytes_per_s: dict[Collective, float]
    message_bytes: int = Field(default=2**28, gt=0)


class NetworkProfile(Record):
    """The network between nodes, as one node sees it. Rates are per direction.

    `protocol` is how collectives use it: NICs that read the memory of GPUs (rdma), or sockets (tcp).
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    nics_per_node: int = Field(gt=0)
    nic_bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(gt=0)
    protocol: Literal["rdma", "tcp"] = "rdma"
    measured: tuple[MeasuredRanks, ...] = ()
    """Measured collectives: on some networks each step of a ring waits so long that
    their time grows with the ranks, not with the bytes alone."""
    source: str
    source_kind: SourceKind | None = None
    """How good the weakest part of the source is; None where nobody said."""

    def measured_rate(self, collective: Collective, num_ranks: int) -> MeasuredRate | None:
        """Return what nodes of `num_ranks` GPUs in all reach in a collective; None where nobody measured it.

        Between two measured numbers of ranks it is their geometric interpolation, beyond the first and last it stays.
        A reduce-scatter that nobody measured is an all-gather: both go round the same ring once.
        """
        known = self._known(collective) or (self._known("all_gather") if collective == "reduce_scatter" else {})
        if not known:
            return None
        ranks = min(max(num_ranks, min(known)), max(known))
        below, above = max(each for each in known if each <= ranks), min(each for each in known if each >= ranks)
        share = log(ranks / below) / log(above / below) if above > below else 0.0
        (rate, size), (last_rate, last_size) = known[below], known[above]
        return MeasuredRate(
            bus_bandwidth_bytes_per_s=rate * (last_rate / rate) ** share,
            message_bytes=round(size * (last_size / size) ** share),
        )

    @property
    def node_bandwidth_bytes_per_s(self) -> float:
        """All NICs of a node together, one direction."""
        return self.nics_per_node * self.nic_bandwidth_bytes_per_s

    def _known(self, collective: Collective) -> dict[int, tuple[float, int]]:
        rates = {entry.num_ranks: (entry.bus_bandwidth_bytes_per_s.get(collective), entry) for entry in self.measured}
        return {ranks: (rate, entry.message_bytes) for ranks, (rate, entry) in rates.items() if rate is not None}


class MeasuredCollective(Record):
    """A collective measured on a group of GPUs: time = `latency_s` + bytes on the bus / `bus_bandwidth_bytes_per_s`.

    `link` names the kind of link that decides, as `profiles/links.json` does; `payload_bytes_per_s` is what the links
    of one GPU of the group carry at most (None: it holds for all links of that kind). A message of S bytes counts as
    S + sqrt(S * `ramp_bytes`). Bus bandwidth is defined as nccl-tests defines it (`bus_bandwidth.bus_factor`).
    """

    collective: Collective
    num_ranks: int = Field(gt=1)
    link: str
    latency_s: float = Field(ge=0)
    bus_bandwidth_bytes_per_s: float = Field(gt=0)
    ramp_bytes: int = Field(default=0, ge=0)
    payload_bytes_per_s: float | None = Field(default=None, gt=0)
    source: str


class MachineProfile(Record):
    """One kind of machine: its GPUs, the links inside it, and the network that it comes with.

    `measured` holds what calibration found on it, which is to be preferred to the data sheets.
    `notes` says what is unknown and would have to be filled in.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    gpu: GpuProfile
    node: NodeTopology
    network: NetworkProfile | None = None
    host_memory_bytes: int | None = None
    cpu: str | None = None
    """The model of its CPUs, as Linux names it."""
    measured: tuple[MeasuredCollective, ...] = ()
    notes: tuple[str, ...] = ()
    source: str
    source_kind: SourceKind | None = None
    """How good the weakest part of the source is; None where nobody said."""
