"""Records of a check of scripts: the request to a rank, its account, and the answer."""

from __future__ import annotations

from typing import Literal

from paraplan.records import Record

Role = Literal["ranks", "alone", "shaken"]
"""The part of a process in a check: one of the script's ranks; one process on what ranks read; the same from weights
that are shaken by as much as rounding does."""

ALONE: tuple[Role, ...] = ("alone", "shaken")
"""The roles of processes that each run the script by themselves, in their order."""

Quantity = Literal["start", "batch", "gradient", "gradient norm", "parameter", "rate", "copy", "buffer", "steps"]
"""The quantities that may part: the parameters before the first step, what ranks read, gradients after the last
reduction and before they are clipped, the norm that clipping is told, parameters after a step, the rates of optimizers,
models that a loss takes values of and that are not trained, buffers with which a loss is made, and the number of steps
that ranks make."""

Kind = Literal[
    "unlike start",
    "same rows",
    "unlike rows",
    "not reduced",
    "no gradient",
    "not finite",
    "zero",
    "scaled",
    "one rank's share",
    "mean of shares",
    "other parts",
    "unlike buffers",
    "unlike copies",
    "another output",
    "another loss",
    "another direction",
    "stale",
    "16 bits",
    "norm",
    "clipping",
    "rates",
    "not stepped",
    "update",
    "unlike steps",
]
"""The kind of a difference, in a word or two."""


class ScriptRequest(Record):
    """The request to a process of a check: the script as it would be started, and where its record goes."""

    script: str
    is_module: bool
    arguments: tuple[str, ...]
    num_steps: int
    shrink_for: int = 0
    """Number of ranks that are to share the heads of the smaller models made in place of the script's; 0 for none."""
    folder: str = ""
    """Where its record goes."""
    role: Role = "ranks"
    shake: float = 0.0
    """By how much of their values weights are shaken at least, with the role `shaken`."""
    loss_scale: float = 1.0
    """By what one process multiplies its losses: of those that are sums over rows it would have more."""
    notes_passes: bool = False
    """Whether gradients are noted after each backward pass of the first step."""
    notes_outputs: bool = False
    """Whether what modules inside of models are given, and give, in the first step is noted whole."""
    inputs: str = ""
    """The folder with what one process starts with and reads; "" for ranks."""


class Inputs(Record):
    """The inputs that one process is given in place of its own values.

    The tensors lie beside it in a safetensors file.
    """

    width: int
    """Number of ranks whose batches it reads."""
    ended: tuple[tuple[str, int], ...]
    read: tuple[tuple[str, int, int], ...]
    """Place, time and number of every reading of a rank's, in the order of the tensors' names."""
    rates: tuple[dict[str, dict[str, float]], ...]
    """Numbers of the optimizer in each step, by parameter."""
    times_a_batch: dict[str, int] | None = None
    """How often a batch reads at each place, where one process reads the ranks' batches one after another, as
    micro-batches of its own; None where it reads them at once."""


class StepRecord(Record):
    """One step of an optimizer in one process."""

    optimizer: int
    """The number of the optimizer, in order of first steps."""
    losses: tuple[float, ...]
    """Values of which backward passes were made since the step before."""
    norm: float | None
    """The norm that `clip_grad_norm_` gave, None where gradients were not clipped by norm."""
    clipped_to: float | None = None
    """By how much gradients were multiplied after they were noted as clipped by norm, None where they were not."""
    rates: tuple[dict[str, float], ...]
    """Numbers of the optimizer's groups as this step used them."""
    num_skipped: int = 0
    """How often gradients were clipped, and then thrown away, since the step before."""
    members: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each group."""

    def rates_of(self, name: str) -> dict[str, float] | None:
        """Return the numbers by which a parameter is stepped, None where this optimizer does not hold it."""
        return next((one for one, names in zip(self.rates, self.members, strict=False) if name in names), None)


class SourceRecord(Record):
    """One place of the script where something was read, and each time that it was."""

    number: int
    """Number of the source in the record's tensors."""
    place: str
    """File, line and function."""
    prints: tuple[str, ...]
    """A digest of the values each time."""
    is_used: tuple[bool, ...]
    """Whether a model, or a loss, took something made of it each time."""
    is_end: tuple[bool, ...]
    """Whether a data loader ended each time."""
    made_of: tuple[tuple[tuple[str, int], ...], ...]
    """Places and times of what it was computed from, each time."""


class CopyRecord(Record):
    """One call of a model that is not trained, of which a loss took something."""

    number: int
    """Number of the model, in order of first calls."""
    name: str
    """The class of the model."""
    start: str
    """A digest of its parameters at its first call."""
    step: int
    """The optimizer step before which it was called."""
    moved: tuple[float, float]
    """How far its parameters have moved since its first call, as a norm, and the sum of their changes."""


class ProcessRecord(Record):
    """The training of one process. Its tensors lie beside it in a safetensors file."""

    rank: int
    num_ranks: int
    names: tuple[str, ...]
    """Names of the parameters, in the order of the model."""
    split: tuple[str, ...]
    """Names of those of which torch says that a rank holds a part."""
    num_replicas: int | None
    """Number of ranks among which data is divided, as the model's wrapper says; None where none says it."""
    axes: dict[str, int]
    """Sizes of the named axes of the meshes that hold parameters."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Axes of meshes and groups without a name that the script made, with the ranks of that of this process."""
    steps: tuple[StepRecord, ...]
    sources: tuple[SourceRecord, ...]
    notes: tuple[str, ...]
    made_smaller: tuple[str, ...] = ()
    """Models that were made smaller."""
    given: tuple[str, ...]
    """Digests of what its models were given."""
    outputs: dict[str, tuple[float, float, float]]
    """Sums of the squares, of the values and of their sizes, of what modules inside of models gave in the first step,
    in the order of the calls."""
    noted: tuple[str, ...] = ()
    """Values between modules that were noted whole, in order of time: `given` or `gives`, with `back` before it for the
    gradient, number of the call and module."""
    copies: tuple[CopyRecord, ...] = ()
    """Calls of models that are not trained."""
    rounding: float
    """The unit of the last place, relative to a value, of the coarsest type in which its models computed."""
    taken: tuple[tuple[str, int], ...] = ()
    """Places and times of readings of which the script takes numbers that are no tensors, by which it may compute."""
    gathers_rows: bool = False
    """Whether ranks exchange what they read."""
    is_whole: bool
    """Whether all steps that were asked for were made."""


class Difference(Record):
    """Where ranks and one process part."""

    step: int
    """Number of the optimizer step from 1; 0 before the first."""
    quantity: Quantity
    name: str
    """The parameter; "" for all of them."""
    ranks: tuple[int, ...]
    """Ranks whose values differ."""
    error: float
    """Size of the difference, relative to one process's value."""
    tolerance: float
    """The part of it that rounding explains."""
    factor: float | None
    """Ratio to one process's value where the direction is the same."""
    kind: Kind
    cause: str
    """The observation, and its usual meaning."""
    num_alike: int = 1
    """Number of parameters that part in this step."""


class ScriptReport(Record):
    """The answer: `difference` is the first thing that parts, None where nothing does."""

    script: str
    num_ranks: int
    num_steps: int
    num_parameters: int
    is_equal: bool
    difference: Difference | None
    gradient_error: float
    """Largest relative difference of a gradient that counts as equal."""
    parameter_error: float
    losses: tuple[float, ...]
    """Losses of the steps, as means over ranks."""
    alone_losses: tuple[float, ...]
    notes: tuple[str, ...]
    seconds: float
