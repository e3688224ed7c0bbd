"""GPU architectures, from `profiles/architectures`: attention kernels, matrix libraries' workspaces, link rates."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from pydantic import Field

from paraplan.hardware.profile_json import read_object, validated
from paraplan.records import Record, Source, SourceKind
from paraplan.resources import profiles_folder

UNKNOWN = "unknown"
"""The file that stands for architectures that no other describes: values taken from others."""

FLASH_ATTENTION_2 = 2
"""The generation of torch's own kernels, and of most others."""

_NARROW, _WIDE = 64, 128
"""The widths of heads that most kernels are measured at."""


class FlashAttentionSpeed(Record):
    """Share of the matmul peak that one generation of FlashAttention reaches, causal FLOPs counted.

    From figures for long sequences and heads of 128, somewhat below their best case.
    """

    generation: int
    """Generation of the kernels."""
    forward: float = Field(gt=0)
    """Share of the peak in forward passes."""
    backward: float = Field(gt=0)
    """Share of the peak in backward passes."""
    is_of_reached: bool = False
    """The shares are of the best product measured on a GPU, not of its peak: cards of one chip differ in the clocks
    that they hold and in how fast their tensor cores may be."""
    narrow_forward: float = Field(default=0.89, gt=0)
    """Rate with heads of 64 over that with heads of 128, forward: a score costs as many exponentials for half the
    FLOPs. 0.89 is what kernels of the second generation have: FlashAttention 2 on A100 0.87 to 0.91, H100 0.86 to 0.89,
    B200 0.83 to 0.92, AOTriton on MI300X 0.81 to 0.99, Triton and composable kernels on MI355X 0.85 to 0.99."""
    narrow_backward: float = Field(default=0.89, gt=0)
    """Efficiency of narrow heads in the backward pass: FlashAttention 2 on H100 0.90 to 0.93, on B200 0.89 to 0.98."""
    causal_tokens: float = Field(default=350.0, ge=0)
    """A causal pass over s tokens takes 1 + causal_tokens / s times as long as the shares of long sequences say: blocks
    on the diagonal are computed whole, and rows differ in length."""
    backward_bytes: float = Field(default=0.0, ge=0)
    """Bytes for each element of queries that a backward pass moves beside its products, where that was measured apart
    from them: gradients of queries are summed in fp32, and outputs multiplied by their gradients before."""
    dropout_slowdown: tuple[float, float] = (1.0, 1.0)
    """How much longer a forward and a backward pass of torch's sdpa take with dropout, where that was measured."""
    source: str
    """Paper and section, or what it was taken from."""
    source_kind: SourceKind
    """How good the source is."""

    def peak_share(self, head_dim: float, *, backward: bool) -> float:
        """Return the share of the peak for heads of one width.

        The time of a FLOP is linear in 1 / width from 64 to 128: products take 1, exponentials 1 / width. Narrower and
        wider heads are taken for these: with heads of 256 forward kernels of H100 are 12 % slower to 17 % faster.
        """
        share, narrow = (self.backward, self.narrow_backward) if backward else (self.forward, self.narrow_forward)
        width = min(max(head_dim, _NARROW), _WIDE)
        return share / (1.0 + (1.0 / narrow - 1.0) * (1.0 / width - 1.0 / _WIDE) / (1.0 / _NARROW - 1.0 / _WIDE))


class MatmulShapeCosts(Record):
    """Measured costs of the shape of a product `[m, k] x [k, n]`.

    It stands in place of what `CostConstants` says of it from an A100: `matmul_half_n` and so on.
    """

    half_n: float = Field(ge=0)
    """Columns at which a product reaches half of its rate."""
    half_k: float = Field(ge=0)
    """The inner size at which it does."""
    wave_share: float = Field(ge=0)
    """How much of a last wave's idle multiprocessors is lost."""
    small_tile_share: float = Field(ge=0)
    """Time for each further read of operands by smaller tiles."""
    launch_s: float = Field(ge=0)
    """Seconds of a product of no size."""
    plain_share: float = Field(gt=0)
    """Share of `CostConstants.plain_matmul_efficiency` that products without tensor cores reach."""
    unaligned_slowdown: float = Field(ge=1)
    """How much longer a 16-bit product takes whose operands' rows are not multiples of 16 bytes."""


class ArchitectureProfile(Record):
    """Properties that GPUs of one architecture share, as a file of `profiles/architectures` describes it."""

    name: str
    """The name of its file: the architecture that GPU profiles name, in lower case with hyphens."""
    title: str
    """The name in print."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities of its GPUs: CUDA's, or gfx numbers."""
    link_bytes_per_s: dict[str, float] = Field(default_factory=dict)
    """Payload of one NVLink or xGMI link in one direction, by compute capability."""
    gpu_names: dict[str, str] = Field(default_factory=dict)
    """Regular expressions for the names of its GPUs, by compute capability, for tables that tell names alone."""
    flash_attention: tuple[FlashAttentionSpeed, ...] = Field(min_length=1)
    """Attention speed by generation of the kernels."""
    sdpa_generation: int = FLASH_ATTENTION_2
    """The generation that the kernels which torch's sdpa takes on these GPUs, from torch 2.11 on, are as fast as."""
    driver_reserved_bytes: int = Field(default=0, ge=0)
    """Bytes of NVML's total that the driver keeps (`Reserved` in `nvidia-smi -q`) and CUDA does not give, where
    no GPU profile says it. 0 where totals are those of drivers that took it off already."""
    torch_workspace_bytes: int = 0
    """The cuBLAS workspace that torch keeps for each thread that multiplies."""
    engine_workspace_bytes: int = 0
    """The cuBLAS workspace that Transformer Engine keeps beside them."""
    unaligned_line_slowdown: float = Field(default=1.0, ge=1)
    """How much longer a 16-bit product takes whose operands' rows do not begin at multiples of 128 bytes."""
    sustained_matmul_share: float = Field(default=1.0, gt=0, le=1.2)
    """Large matmuls one after the other beside what `CostConstants.matmul_efficiency` says of their best: below 1 where
    the power limit slows the clock, above 1 where most shapes are nearer to the best than on an A100."""
    matmul_cool_gain: float = Field(default=0.0, ge=0)
    """How much faster products run than one after the other where next to nothing of a block's time is theirs and
    attention's: the less of it is, the further a GPU stays below its power limit."""
    matmul_written_share: float = Field(default=0.81, ge=0)
    """Share of the time of writing a product's result that no arithmetic hides. 0.81: 2 m n bytes over the bandwidth
    are as long as 161 steps of the inner size on the A100 PCIe of SimuMax's shapes, of which a fit finds 130."""
    matmul_shapes: MatmulShapeCosts | None = None
    """Measured costs of the shape of a product; None: as on an A100."""
    fp8_speedup: float = 1.0
    """Dense 8-bit to dense 16-bit matmuls."""
    sparse_speedup: float = 1.0
    """How many times the dense rates of matmuls data sheets state too, for weights with structured sparsity, which
    training does not have."""
    narrow_precisions: tuple[str, ...] = ()
    """Precisions of matrix products below 16 bits: fp8, mxfp8, nvfp4."""
    usual_network_bits_per_s: float
    """NICs of a machine divided by its GPUs, where a description does not tell."""
    host_socket_bytes_per_s: float = Field(gt=0)
    """Memory traffic of one CPU socket of machines with its GPUs, reads and writes together."""
    sources: tuple[Source, ...] = Field(min_length=1)
    """Where the values come from."""

    @property
    def runs_flash(self) -> bool:
        """Whether torch's FlashAttention runs here: from compute capability 8.0 on, and on AMD's GPUs.

        torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (check_flash_attention_hardware_support).
        """
        return not any(name[0].isdecimal() and float(name) < 8.0 for name in self.capabilities)

    def attention_speed(self, generation: int | None, *, uses_sdpa: bool = False) -> FlashAttentionSpeed:
        """Return the speed of a generation of FlashAttention, of the nearest older one where it is not listed.

        Where None is given it is FlashAttention 2, or what torch's sdpa takes.
        """
        if generation is None:
            generation = self.sdpa_generation if uses_sdpa else FLASH_ATTENTION_2
        older = [row for row in self.flash_attention if row.generation <= generation]
        return max(older or self.flash_attention, key=lambda row: row.generation)


class LinkRates:
    """Payload of one link of a GPU in one direction, by what a table or a driver tells of the GPU."""

    def __init__(self) -> None:
        self._by_capability: dict[str, float] = {}
        self._names: list[tuple[re.Pattern[str], str]] = []
        for architecture in list_architectures():
            self._by_capability |= architecture.link_bytes_per_s
            self._names += [
                (re.compile(rf"\b(?:{names})\b"), capability) for capability, names in architecture.gpu_names.items()
            ]

    def nvlink(self, *, name: str | None = None, compute_capability: str | None = None) -> float | None:
        """Return the rate of one NVLink, None where the GPU is not known.

        The compute capability decides where it is given; else the name, in which the model number is looked for.
        """
        if compute_capability is None and name is not None:
            found = [(match.start(), capability) for names, capability in self._names if (match := names.search(name))]
            compute_capability = min(found)[1] if found else None
        return self._by_capability.get(compute_capability or "")

    def xgmi(self, gcn: str) -> float | None:
        """Return the rate of one xGMI link, by the GPU's architecture (`90a`, `gfx942`)."""
        return self._by_capability.get("gfx" + gcn.lower().removeprefix("gfx").split(":")[0])


def load_architecture(name_or_path: str, *, beside: Path | None = None) -> ArchitectureProfile:
    """Return the architecture that a GPU profile names, or a .json file, relative to the folder `beside`.

    An architecture that no file describes is the unknown one. Raises `ProfileError` for a file at fault.
    """
    if name_or_path.endswith(".json"):
        path = (beside or Path()) / Path(name_or_path).expanduser()
        return validated(ArchitectureProfile, read_object(path), where=str(path))
    return _bundled(name_or_path.strip().lower().replace(" ", "-"))


@cache
def _bundled(name: str) -> ArchitectureProfile:
    folder = profiles_folder() / "architectures"
    path = folder / f"{name}.json"
    path = path if path.is_file() else folder / f"{UNKNOWN}.json"
    return validated(ArchitectureProfile, read_object(path), where=str(path))


def architecture_of(compute_capability: str | None) -> str:
    """Return the name of the architecture of a compute capability, "unknown" where no file describes it."""
    found = (each.title for each in list_architectures() if compute_capability in each.capabilities)
    return next(found, UNKNOWN)


def list_architectures() -> list[ArchitectureProfile]:
    """Return all bundled architectures, by name."""
    return [load_architecture(path.stem) for path in sorted((profiles_folder() / "architectures").glob("*.json"))]
