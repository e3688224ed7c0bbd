"""The user's words to `paraplan launch`: one frozen record, which the parser makes and nobody changes."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from paraplan.errors import UsageError

DEFAULT_MASTER_PORT = 29500
"""The port of a static rendezvous that names none, as torchrun has it."""

AUTO = "auto"
"""The value of --plan that asks for a plan for the machines found; `auto:plan.json` where they are not its own."""

RUNS_FOLDER = "paraplan-runs"
"""Where runs are kept, in the current folder, without --log-dir."""

END_WITH_STDIN = "PARAPLAN_END_WITH_STDIN"
"""Set for a launcher that another one has started on its node: it ends when its standard input does.

The first line there is an object of JSON: the variables that it gets. A command line is for every user to read.
"""


class ArgumentError(UsageError, ValueError):
    """An argument that cannot be used. A ValueError too: callers of torchrun's API expect one.

    Its options stay options, which Python gives a launch too.
    """

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class NodeRange:
    """The number of nodes of a job: `min` to `max`, which differ in an elastic job only."""

    min: int
    max: int

    @classmethod
    def parse(cls, text: str) -> NodeRange:
        """Read `N` or `MIN:MAX`. Raises `ArgumentError` for anything else."""
        if not re.fullmatch(r"\d+(:\d+)?", text):
            raise ArgumentError(f"--nnodes {text} is not a number of nodes", hint="use a number such as 2, or MIN:MAX")
        low, _, high = text.partition(":")
        nodes = cls(int(low), int(high or low))
        if not 0 < nodes.min <= nodes.max:
            raise ArgumentError(
                f"--nnodes {text} is not a range of nodes", hint="use a number above 0, or MIN:MAX with 0 < MIN <= MAX"
            )
        return nodes

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}:{self.max}"


ONE_NODE = NodeRange(1, 1)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The options of one launch, named as on the command line. None: neither it nor a PET_ variable gives the option.

    `torch_options` are those of torchrun's that only torch reads, and that a newer torch may add to.
    """

    training_script: str
    training_script_args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    run_path: bool = False

    nodes: NodeRange | None = None
    """--nnodes."""
    nproc_per_node: str | None = None
    """A number, or auto, gpu, cpu or the name of another type of device."""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    local_addr: str | None = None
    standalone: bool = False
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    max_restarts: int = 0
    shutdown_timeout: int | None = None
    """Seconds from SIGTERM to SIGKILL."""

    start_method: str = "spawn"
    numa_binding: str | None = None
    role: str = "default"
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    torch_options: Mapping[str, object] = field(default_factory=dict)

    plan: str | None = None
    """The path of a plan file, `auto`, or both: `auto:plan.json`."""
    model: str | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    attention: str | None = None

    hostfile: str | None = None
    gpus: str | None = None
    hang_timeout: float | None = None
    """Seconds without movement that end the job."""
    preempt_notice: str | None = None
    """A file, a URL or `command:` that tells that the machine is to go."""
    preempt_window: float | None = None
    """Seconds for ranks to save in."""
    requeue: bool = False
    memory_checkpoint: int | None = None
    """Every how many steps the state is copied to memory."""
    spare_ranks: int = 0
    """Processes of each node that stand by for a restart of its ranks."""
    metrics: str | None = None
    no_logs: bool = False
    preflight: str = "look"
    """look or measure."""
    skip_preflight: bool = False
    no_cpu_binding: bool = False
    no_straggler_watch: bool = False
    watch_steps: bool = False
    """Whether the steps of other scripts than those of paraplan.runtime are noted too."""
    guard: int | None = None
    """Every how many optimizer steps it is compared what ranks hold alike; None never."""
    dry_run: bool = False
    fake: int | None = None
    """The number of ranks of a world without GPUs."""
    fake_rank: int | None = None
    profile: str | None = None
    json: bool = False

    @property
    def plan_path(self) -> str | None:
        """The plan file, None where none is named."""
        return None if self.plan in (None, AUTO) else str(self.plan).removeprefix(f"{AUTO}:")

    @property
    def plans_again(self) -> bool:
        """Whether another plan is made where the plan file is one for other machines."""
        return self.plan is not None and self.plan.startswith(f"{AUTO}:")

    @classmethod
    def of_namespace(cls, namespace: Namespace) -> LaunchSpec:
        """Return what a parser of ours or of torchrun's has read. Raises `ArgumentError` for a bad --nnodes."""
        given = dict(vars(namespace))
        nnodes = given.pop("nnodes", None)
        given["nodes"] = None if nnodes is None else NodeRange.parse(str(nnodes))
        given["training_script_args"] = tuple(given.get("training_script_args") or ())
        names = {one.name for one in fields(cls)}
        rest = {name: value for name, value in given.items() if name not in names}
        return cls(**{name: value for name, value in given.items() if name in names}, torch_options=rest)

    def to_namespace(self) -> Namespace:
        """Return the options as torchrun's parser gives them, for torch."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["nnodes"] = None if self.nodes is None else str(self.nodes)
        values["training_script_args"] = list(self.training_script_args)
        return Namespace(**(dict(self.torch_options) | values))
