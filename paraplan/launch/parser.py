"""The options of `paraplan launch`: torchrun's own, taken from the torch that is installed, and ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paraplan.launch.spec import ArgumentError, LaunchSpec
from paraplan.launch.torch_private.parser import torchs_parser

_EXEC = "exec"


class LaunchParser(argparse.ArgumentParser):
    """A parser that raises `ArgumentError` in place of exiting, and lets no option of ours shadow one of torchrun's.

    torchrun accepts abbreviated options. Where an abbreviation fits one of its options and one of ours, it means
    torchrun's, as it always did.
    """

    own_options: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        """Raise `ArgumentError`; argparse calls this for every mistake in the arguments."""
        if "training_script" in message:
            raise ArgumentError(
                "no training script given", hint="paraplan launch [options] train.py [arguments of train.py]"
            )
        raise ArgumentError(message, hint="paraplan launch --help lists the options")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        matches = super()._get_option_tuples(option_string)
        torchs = [match for match in matches if not self.own_options.intersection(match[0].option_strings)]
        candidates = torchs or matches
        is_one_option = len({id(match[0]) for match in candidates}) == 1  # its spellings with - and _ are one
        return candidates[:1] if is_one_option else candidates


_KINDS = {"N": int, "STEPS": int, "RANKS": int, "RANK": int, "SECONDS": float}
_OPTIONS = {
    "--plan PLAN.json": "Run this plan: sets the numbers of nodes and ranks where they are not given, refuses any "
    "that differ. auto: a plan for the ranks that are here, made again when nodes leave or come; by --model, or by "
    "the script. auto:PLAN.json: this one, and another for its training where nodes, ranks or GPUs are not those it "
    "is for.",
    "--model MODEL": "Make the plan first, as paraplan recommend MODEL does: a config.json, a bundled name, "
    "file.py:factory.",
    "--global-batch N": "With --model: sequences of one step, all GPUs.",
    "--seq-len N": "With --model: tokens of a sequence.",
    "--precision NAME": "With --model: its precision, as paraplan recommend has it.",
    "--optimizer NAME": "With --model: its optimizer, as paraplan recommend has it.",
    "--attention NAME": "With --model: its attention, as paraplan recommend has it.",
    "--hostfile FILE": "Start one launcher on each host of this file through ssh: a name a line, with slots=8 for 8 "
    "ranks.",
    "--gpus 0,2": "Use these GPUs of each node in this order (2: the first two), one rank each without "
    "--nproc-per-node.",
    "--hang-timeout SECONDS": "End the job, with the stacks of all ranks, when no rank has made progress for so long: "
    "a step, a collective, a line of output, data read or written, work. Give more than the longest single call that "
    "only computes takes. Default: never.",
    "--metrics FILE": "Have paraplan.runtime append a line of JSON for every step: loss, gradient norm, tokens/s, "
    "MFU, memory.",
    "--no-logs": "Keep no run folder. Without --log-dir it is a new one in ./paraplan-runs: the command, versions, "
    "plan, what each rank wrote, and how the run ended.",
    "--preempt-notice SOURCE": "Look here once a second for a notice that the machine is to go: a file that comes to "
    "be, a URL that answers (the cloud's metadata service), or command:COMMAND that succeeds. Default: signals alone.",
    "--preempt-window SECONDS": "After SIGTERM, SIGUSR1 or a notice, ranks of paraplan.runtime get so long to end "
    "their step and save; the job then ends with status 75. Default: 30, or --shutdown-timeout.",
    "--memory-checkpoint STEPS": "Keep a copy of the training's state in this machine's memory, renewed every so many "
    "steps: with --max-restarts, engine.resume goes on from there when a rank is lost. At most half of what is free.",
    "--spare-ranks N": "With --max-restarts: so many processes of each node stand by, with what the script imports at "
    "its top, and ranks that start again begin in them. As many as ranks of a node are used at once.",
    "--requeue": "Have Slurm queue the job again (scontrol requeue) after status 75.",
    "--preflight": "measure: before the script, all ranks measure matmuls, memory and links for 20 s; what is slower "
    "than its like is named, and with --nnodes MIN:MAX such a host is left out. Default: look at GPUs and disks.",
    "--skip-preflight": "Do not look at GPUs in use, NVLinks, the driver and free space before ranks start.",
    "--no-cpu-binding": "Under a plan, do not keep each rank on the CPUs next to its GPU where a machine has several "
    "sockets.",
    "--no-straggler-watch": "Do not time the steps of ranks, and name none that is slower than the others.",
    "--watch-steps": "Time the steps of any script of torch, as those of paraplan.runtime are: five functions of "
    "torch are replaced in its ranks. --hang-timeout does so too.",
    "--guard STEPS": "Every so many optimizer steps of any script, compare the bits of what ranks hold alike "
    "(parameters, optimizer state, constant buffers), and what they read: end the job (status 65) where ranks are "
    "apart or read the same data.",
    "--dry-run": "Show every rank with its host, GPU, place in the plan, environment and command; start nothing. Exit "
    "status 1 if it could not run or would not fit.",
    "--fake RANKS": "Run the script in a world of so many ranks without GPUs, other ranks or values: two steps of one "
    "rank of each pipeline stage. Shows its memory by parts beside the estimate, and what it sends.",
    "--fake-rank RANK": "With --fake: run this rank alone.",
    "--profile NAME": "With --dry-run and --fake: for machines of this profile, not this one.",
    "--json": "With --dry-run and --fake: as JSON.",
}
"""The options of paraplan as --help shows them: with a word for their value, whose kind follows from it, or flags."""

_HELP_OF_TORCHS = {
    "start_method": "How ranks start: forked with torch imported already (the default), or 'exec': each with an "
    "interpreter that imports torch itself, as torchrun does. With --run-path: multiprocessing's methods.",
    "nproc_per_node": "Number of ranks per node: a number, auto, gpu, cpu or xpu. Default: the plan's, or one for each "
    "GPU, or 1 without a GPU.",
    "nnodes": "Number of nodes, or MIN:MAX of an elastic job. Default: the plan's, or 1.",
}


def build_parser() -> LaunchParser:
    """Return the parser of `paraplan launch`. PET_ variables of the environment are its defaults, as with torchrun."""
    torchs = torchs_parser()
    parser = LaunchParser(
        prog="paraplan launch",
        usage="paraplan launch [options] train.py [arguments of train.py]",
        description=(
            "Start one process (rank) per GPU, or --nproc-per-node on a CPU, that train together; a replacement for "
            "torchrun, with the same options and the same environment in each rank. A plan made by `paraplan recommend "
            "-o plan.json` sets the number of ranks and reaches the script through paraplan.runtime."
        ),
        epilog="The job ends with the exit status of the rank that failed first; 128+n where signal n ended it.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this and exit.")
    _add_own_options(parser)
    group = parser.add_argument_group("options of torchrun (each also as PET_<NAME> in the environment)")
    for action in torchs._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        action.help = _HELP_OF_TORCHS.get(action.dest, action.help)
        if action.dest == "start_method" and action.choices is not None:
            action.choices = [*action.choices, _EXEC]
        (group if action.option_strings else parser)._add_action(action)
        if action.nargs != 0 and action.metavar is None and action.choices is None and action.option_strings:
            action.metavar = "VALUE"  # argparse repeats a long name for each spelling
    if "--shutdown-timeout" not in torchs._option_string_actions:  # torch 2.11
        words = "Seconds from SIGTERM to SIGKILL."
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, help=words)
    return parser


def known_options() -> dict[str, argparse.Action]:
    """Return what each option sets, by its spellings; ours alone where there is no torch to ask for its own."""
    try:
        parser = build_parser()
    except ImportError:
        parser = LaunchParser()
        _add_own_options(parser)
    return {option: action for action in parser._actions for option in action.option_strings}


def _add_own_options(parser: LaunchParser) -> None:
    ours = parser.add_argument_group("options of paraplan")
    for words, text in _OPTIONS.items():
        option, _, value = words.partition(" ")
        if option == "--preflight":
            ours.add_argument(option, choices=("look", "measure"), default="look", help=text)
        elif value:
            default = 0 if option == "--spare-ranks" else None
            ours.add_argument(option, metavar=value, type=_KINDS.get(value, str), default=default, help=text)
        else:
            ours.add_argument(option, action="store_true", help=text)
    parser.own_options = frozenset(parser._option_string_actions) - {"-h", "--help"}


def parse_arguments(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> LaunchSpec:
    """Return what the command line `arguments` (None: of this process) asks for.

    Nodes, ranks per node and the port are None where neither the command line nor PET_ variables give them: a torch
    before 2.13 has a port from the start, and does not know whether it was asked for.
    Raises `ArgumentError` for mistakes.
    """
    parser = build_parser()
    names = ("nnodes", "nproc_per_node", "master_port")
    defaults = {name: None for name in names if f"PET_{name.upper()}" not in environment}
    return LaunchSpec.of_namespace(parser.parse_args(arguments, argparse.Namespace(**defaults)))
