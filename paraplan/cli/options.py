"""The options that several commands share, and how their values become records."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

MODEL_PANEL, HARDWARE_PANEL, TRAINING_PANEL, PLAN_PANEL = "Model", "Hardware", "Training", "Plan"


class PrecisionName(StrEnum):
    """Values of --precision."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class OptimizerChoice(StrEnum):
    """Values of --optimizer."""

    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    adafactor = "adafactor"
    muon = "muon"
    sgd_momentum = "sgd_momentum"
    sgd = "sgd"


class AttentionName(StrEnum):
    """Values of --attention."""

    flash = "flash"
    sdpa = "sdpa"
    eager = "eager"


class RecomputeName(StrEnum):
    """Values of --recompute."""

    none = "none"
    selective = "selective"
    full = "full"


class ScheduleChoice(StrEnum):
    """Values of --schedule."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved_1f1b"
    zero_bubble = "zero_bubble"


class ObjectiveName(StrEnum):
    """Values of --objective."""

    throughput = "throughput"
    memory = "memory"
    cost = "cost"
    simplicity = "simplicity"


class FindName(StrEnum):
    """Values of --find."""

    fewest_gpus = "fewest-gpus"
    largest_batch = "largest-batch"
    longest_sequence = "longest-sequence"


class OffloadName(StrEnum):
    """Values of --offload."""

    none = "none"
    optimizer = "optimizer"
    parameters = "parameters"


# Far beyond any machine or text, and small enough for sums in 64 bits.
MOST_RANKS, MOST_TOKENS, MOST_SEQUENCES = 10**6, 10**9, 10**9

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json or a folder with one, a bundled name (llama-3-8b), a hub id (owner/name), or "
        "file.py:factory.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="A hardware profile in place of this machine.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
NodesOption = Annotated[
    int, typer.Option("--nodes", min=1, max=MOST_RANKS, help="Number of such machines.", rich_help_panel=HARDWARE_PANEL)
]
GpusPerNodeOption = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node", min=1, help="Use only so many GPUs of each machine.", rich_help_panel=HARDWARE_PANEL
    ),
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        min=1,
        max=MOST_TOKENS,
        help="Tokens of a sequence; by default the model's longest.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
PrecisionOption = Annotated[
    PrecisionName,
    typer.Option("--precision", help="bf16 and fp16 are mixed: fp32 master weights.", rich_help_panel=TRAINING_PANEL),
]
OptimizerOption = Annotated[
    OptimizerChoice, typer.Option("--optimizer", help="Decides the optimizer state.", rich_help_panel=TRAINING_PANEL)
]
AttentionOption = Annotated[
    AttentionName,
    typer.Option("--attention", help="The attention kernel; eager keeps all scores.", rich_help_panel=TRAINING_PANEL),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="torch.compile compiles the repeated blocks.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Predict with constants that paraplan calibrate --runs fitted.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _degree(name: str, what: str) -> Any:
    return typer.Option(f"--{name}", min=1, max=MOST_RANKS, rich_help_panel=PLAN_PANEL, help=what)


DpOption = Annotated[int, _degree("dp", "Data-parallel ranks.")]
TpOption = Annotated[int, _degree("tp", "Tensor-parallel ranks.")]
PpOption = Annotated[int, _degree("pp", "Pipeline stages.")]
CpOption = Annotated[int, _degree("cp", "Context-parallel ranks.")]
EpOption = Annotated[int, _degree("ep", "Ranks of dp x cp that share out a mixture's experts (expert parallelism).")]
VirtualStagesOption = Annotated[int, _degree("virtual-stages", "Stages per pipeline rank.")]
MicroBatchOption = Annotated[int, _degree("micro-batch", "Sequences of one micro-batch.")]
ZeroOption = Annotated[
    int, typer.Option("--zero", min=0, max=3, rich_help_panel=PLAN_PANEL, help="ZeRO stage; 0 is DDP.")
]
ZeroShardsOption = Annotated[
    int | None,
    typer.Option(
        "--zero-shards",
        min=2,
        max=MOST_RANKS,
        rich_help_panel=PLAN_PANEL,
        help="ZeRO over groups of so many data-parallel ranks, with replicas between them (hybrid sharding).",
    ),
]
DevicesOption = Annotated[
    int, _degree("devices-per-process", "GPUs over which one process divides its micro-batches (DataParallel).")
]
RecomputeOption = Annotated[
    RecomputeName, typer.Option("--recompute", rich_help_panel=PLAN_PANEL, help="Activation checkpointing.")
]
ScheduleOption = Annotated[
    ScheduleChoice | None,
    typer.Option("--schedule", rich_help_panel=PLAN_PANEL, help="Pipeline schedule; 1f1b by default."),
]
SequenceParallelOption = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        rich_help_panel=PLAN_PANEL,
        help="Split norms and dropout over tp.",
    ),
]
OffloadOption = Annotated[
    OffloadName, typer.Option("--offload", rich_help_panel=PLAN_PANEL, help="What lives in host memory.")
]
FIXED_PANEL, SEARCH_PANEL = "Fixed choices", "Search"


def _fixed(name: str, what: str, *, most: int = MOST_RANKS) -> Any:
    return typer.Option(f"--{name}", min=1, max=most, rich_help_panel=FIXED_PANEL, help=f"Only plans with {what}.")


FixedDpOption = Annotated[int | None, _fixed("dp", "so many data-parallel ranks")]
FixedTpOption = Annotated[int | None, _fixed("tp", "so many tensor-parallel ranks")]
FixedPpOption = Annotated[int | None, _fixed("pp", "so many pipeline stages")]
FixedCpOption = Annotated[int | None, _fixed("cp", "so many context-parallel ranks")]
FixedEpOption = Annotated[int | None, _fixed("ep", "experts over so many ranks")]
FixedMicroBatchOption = Annotated[int | None, _fixed("micro-batch", "so many sequences in a micro-batch")]
FixedZeroOption = Annotated[
    int | None, typer.Option("--zero", min=0, max=3, rich_help_panel=FIXED_PANEL, help="Only this ZeRO stage.")
]
FixedRecomputeOption = Annotated[
    RecomputeName | None, typer.Option("--recompute", rich_help_panel=FIXED_PANEL, help="Only this recomputation.")
]
FixedScheduleOption = Annotated[
    ScheduleChoice | None, typer.Option("--schedule", rich_help_panel=FIXED_PANEL, help="Only pipelines that run it.")
]
FixedSequenceParallelOption = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        rich_help_panel=FIXED_PANEL,
        help="Only with or without sequence parallelism.",
    ),
]
FixedOffloadOption = Annotated[
    OffloadName | None, typer.Option("--offload", rich_help_panel=FIXED_PANEL, help="Only this offload.")
]
FrameworkOption = Annotated[
    str,
    typer.Option(
        "--framework",
        metavar="NAME|FILE",
        help="Plan for another framework: a profile's name (megatron-core, torchtitan, deepspeed, ...) or JSON file. "
        "paraplan does not launch it.",
        rich_help_panel=SEARCH_PANEL,
    ),
]
PricedFrameworkOption = Annotated[
    str,
    typer.Option(
        "--framework",
        metavar="NAME|FILE",
        help="Framework whose memory layout and overlap are assumed: a profile's name or a JSON file; by default that "
        "of the plan file.",
        rich_help_panel=PLAN_PANEL,
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        rich_help_panel=PLAN_PANEL,
        help="A plan file in place of the degrees; it also brings the training that it was made for.",
    ),
]
