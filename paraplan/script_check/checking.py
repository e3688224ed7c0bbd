"""The check of a script: its ranks, then one process on all that they read, and where the two part."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paraplan.errors import UsageError
from paraplan.script_check.buffers import other_buffer
from paraplan.script_check.evidence import Process, Sight
from paraplan.script_check.failures import ALONE_WHERE, no_step_error, run_error
from paraplan.script_check.findings import first_difference, sums_rows
from paraplan.script_check.places import is_unexplained
from paraplan.script_check.plans import CheckRunError, LaunchRanks
from paraplan.script_check.reading_plan import (
    as_taken,
    drawn,
    groups_of,
    is_random,
    numbers_taken,
    of_rows,
    origins,
    past_line,
    put_together,
    read_by_rank,
    rows_read_twice,
    write_inputs,
)
from paraplan.script_check.records import ALONE, Difference, Role, ScriptReport, ScriptRequest
from paraplan.script_check.sources import DRAWN
from paraplan.script_check.steadiness import loose, why_loose

_OF_THE_WAY = ("another direction", "another output", "another loss")
"""Kinds of differences that a script also makes which goes other ways by what it reads."""
_NEEDING_SHARES = ("another direction", "another output", "another loss", "scaled", "update")
"""Kinds of differences of which what each rank's batch gives alone may say more."""


def check_script(
    request: ScriptRequest, *, num_ranks: int, launch: LaunchRanks, say: Callable[[str], None] = lambda text: None
) -> ScriptReport:
    """Return whether the script of `request` trains on ranks what one process trains, as `paraplan.check_script` says.

    `launch` starts ranks, and the one process, with the launcher's words.
    """
    if not request.is_module and not Path(request.script).is_file():
        raise UsageError(
            f"there is no script {request.script}", hint="give the path of a file, or --module with a module's name"
        )
    if num_ranks < 2:
        raise UsageError(f"--ranks {num_ranks} compares one process with itself", hint="use 2 ranks or more")
    began = time.monotonic()
    num_steps = request.num_steps
    with tempfile.TemporaryDirectory(prefix="paraplan_") as name:
        runs = _Runs(Path(name), request, launch, say)
        say(f"{request.script} on {num_ranks} CPU ranks")
        ranks = runs.run("ranks", num_ranks)
        sight, notes = _sight(runs, ranks)
        if unsure := loose(sight):
            sight = replace(sight, again=runs.repeated())
            notes.append(why_loose(sight, *unsure))
        sight, (difference, gradient_error, parameter_error) = _judged(runs, sight, notes)
    record = ranks[0].record
    if difference is not None and difference.kind in _OF_THE_WAY and (place := numbers_taken(ranks)):
        notes.append(
            f"the script takes numbers out of what it reads ({_shown(place)}), as lengths or counts: one process, "
            "which has those of all ranks, may compute something else by them"
        )
    if difference is None and (buffer := other_buffer(sight)):
        notes.append(buffer)
    num_done = min(len(process.record.steps) for process in (*ranks, sight.alone))
    if num_done < num_steps:
        notes.append(f"the script made {num_done} of {num_steps} steps")
    notes += record.made_smaller
    if request.shrink_for and not record.made_smaller:
        notes.append("no model was made smaller: --shrink makes those of transformers so, and the script has none")
    return ScriptReport(
        script=request.script,
        num_ranks=num_ranks,
        num_steps=num_done,
        num_parameters=len(record.names),
        is_equal=difference is None,
        difference=difference,
        gradient_error=gradient_error,
        parameter_error=parameter_error,
        losses=tuple(_mean_loss(ranks, step) for step in range(num_done)),
        alone_losses=tuple(_mean_loss([sight.alone], step) for step in range(num_done)),
        notes=tuple(dict.fromkeys((*notes, *record.notes, *sight.alone.record.notes))),
        seconds=time.monotonic() - began,
    )


def _judged(runs: _Runs, sight: Sight, notes: list[str]) -> tuple[Sight, tuple[Difference | None, float, float]]:
    """Return the first thing that parts, and what was seen to know it; note how batches were put together."""
    answer = first_difference(sight)
    if answer[0] is None or not (answer[0].kind in _NEEDING_SHARES or is_unexplained(answer[0].cause)):
        return sight, answer
    sight = runs.with_shares(sight)
    if sight.num_micro_batches > 1 and not sight.shares and not runs.spreads and answer[0].kind != "scaled":
        sight = runs.with_passes(sight)
    if answer[0].kind == "scaled" and sums_rows(sight):
        notes.append(
            f"the loss is a sum over rows, or divided by a number of them that the script writes down: one "
            f"process, which has those of {len(sight.groups)} ranks at once, took 1/{len(sight.groups)} of it"
        )
        sight = runs.with_smaller_loss(sight)
    answer = first_difference(sight)
    if answer[0] is not None and answer[0].kind == "mean of shares":
        paired = runs.with_halves(sight)
        other = first_difference(paired)
        if other[0] is None or other[0].step > answer[0].step or other[0].quantity != "gradient":
            notes.append(
                "the halves of a batch belong together, as chosen and rejected answers: one process has the first "
                "halves of the ranks' batches, and then the second ones"
            )
            return paired, other
    found = answer[0]
    is_unclear = found is not None and (found.kind in _OF_THE_WAY or is_unexplained(found.cause)) and found.step == 1
    if is_unclear and not runs.spreads and not runs.halves:
        sight = runs.with_outputs(sight)
        answer = first_difference(sight)
    return sight, answer


def _sight(runs: _Runs, ranks: Sequence[Process]) -> tuple[Sight, list[str]]:
    """Run one process as often as it takes to know what it is to be given; return all that is known, and notes."""
    notes: list[str] = []
    read = origins(ranks)
    groups, draws = groups_of(ranks, read), drawn(ranks)
    runs.ranks, runs.read, runs.start = ranks, [*read, *draws], ranks[0].of("start")
    if told := [place for place, time in draws if is_random(ranks, place, time)]:
        place = told[0].removeprefix(DRAWN)
        notes.append(
            f"models draw random numbers themselves ({_shown(place)}): one process is given those of the ranks"
        )
    readers = [group[0] for group in groups]
    runs.say(f"one process on the batches of {len(groups)} rank{'s' if len(groups) > 1 else ''}")
    alone, shaken = runs.alone_as_it_can(readers)
    ranks, num_divided, num_parts = put_together(ranks, alone)
    if num_divided:
        notes.append(
            f"{num_divided} parameters are in parts that torch knows not of, put together in the order of ranks"
        )
        runs.start = ranks[0].of("start")
        alone, shaken = runs.alone(readers)
    num_micro_batches = len(ranks[0].record.steps[0].losses)
    if num_micro_batches and len(alone.record.steps[0].losses) == num_micro_batches * len(groups) > num_micro_batches:
        runs.spreads = True
        alone, shaken = runs.alone(readers)
    by_rank = [] if runs.spreads else read_by_rank(ranks, alone, runs.read, groups)
    if by_rank:
        runs.read = [*runs.read, *by_rank]
        alone, shaken = runs.alone(readers)
    notes += [*runs.notes, *rows_read_twice(ranks, readers)]
    return Sight(ranks, alone, shaken, (), groups, num_micro_batches, num_parts, by_rank=by_rank), notes


def _shown(place: str) -> str:
    """Return the file's name, the line and the call of a place."""
    where, _, call = place.rpartition(" ")
    path, _, line = where.rpartition(":")
    return f"{call} at {Path(path).name}:{line.partition('+')[0]}"


_LINE = re.compile(r"\(line (\d+)\)")
_MOST_LINES = 6
"""Lines of a script that one process may fail to compute in turn."""
_STILL_S = "40"
"""A script is ended once no rank of it has moved for so many seconds."""


class _Runs:
    """Starts processes of a check, and reads what they wrote."""

    def __init__(self, folder: Path, request: ScriptRequest, launch: LaunchRanks, say: Callable[[str], None]) -> None:
        self.folder, self.request, self.launch, self.say = folder, request, launch, say
        self.ranks: Sequence[Process] = ()
        self.read: list[tuple[str, int]] = []
        self.start: dict[str, torch.Tensor] = {}
        self.spreads = False
        self.halves = False
        self.notes_passes = False
        self.notes_outputs = False
        self.loss_scale = 1.0
        self.notes: list[str] = []
        self.last_folder = folder
        self.inputs = folder
        self._num_runs = 0

    def alone_as_it_can(self, readers: Sequence[int]) -> tuple[Process, Process]:
        """Run one process as `alone` does. Where it fails, try without what cannot be given.

        That is nothing at places to which it comes more often: there the script goes through what it has read, in a way
        that could not be followed, row by row of a list, say. Or only what has a row for each sample.
        """
        try:
            return self.alone(readers)
        except CheckRunError as error:
            first = error
        failed = Process.read(self.last_folder / ALONE[0], 0)
        counts = {} if failed is None else {source.place: len(source.prints) for source in failed.record.sources}
        most = {source.place: len(source.prints) for source in self.ranks[0].record.sources}
        as_often = [(place, time) for place, time in self.read if counts.get(place, 0) <= most[place]]
        before, taken = list(self.read), as_taken(self.ranks)
        others = [as_often, of_rows(self.ranks, self.read), taken]
        num_lines = 0
        while others:
            other = others.pop(0)
            if not other or set(other) == set(before):
                continue
            self.read = other
            try:
                alone = self.alone(readers)
            except CheckRunError as error:
                line = _LINE.search(error.message)
                if (
                    line is not None
                    and num_lines < _MOST_LINES
                    and (past := past_line(self.ranks, other, int(line[1])))
                ):
                    others.insert(0, past)
                    num_lines += 1
                continue
            if other is taken:
                self.notes.append(
                    "one process is given what models and losses take, since it could not make it of what ranks read: "
                    "how the script makes it is not compared"
                )
            return alone
        raise first

    def run(self, role: Role, num_ranks: int, inputs: str = "") -> list[Process]:
        """Run the script in `num_ranks` processes; return their records, in the order of ranks, or of `ALONE`."""
        self._num_runs += 1
        folder = self.folder / f"{self._num_runs}-{role}"
        folder.mkdir()
        self.last_folder = folder
        shake = max((process.record.rounding for process in self.ranks), default=0.0)
        request = self.request.replace(
            folder=str(folder),
            role=role,
            inputs=inputs,
            shake=shake,
            loss_scale=self.loss_scale,
            notes_passes=self.notes_passes,
            notes_outputs=self.notes_outputs,
        )
        path = folder / "request.json"
        path.write_text(request.to_json(), encoding="utf-8")
        words = ["--nproc-per-node", str(num_ranks), "--nnodes", "1", "--no-logs", "--skip-preflight"]
        words += ["--hang-timeout", _STILL_S, "--no-straggler-watch"]
        status, said = self.launch([*words, "-m", "paraplan.script_check.rank", str(path)])
        places = [(folder, rank) if role == "ranks" else (folder / ALONE[rank], 0) for rank in range(num_ranks)]
        found = [Process.read(place, rank) for place, rank in places]
        processes = [process for process in found if process is not None]
        where = f"on {num_ranks} CPU ranks" if role == "ranks" else ALONE_WHERE
        # where some end because they made fewer steps than others, that is what is told
        is_whole = any(process.record.is_whole for process in processes)
        if len(processes) < num_ranks or (status != 0 and not is_whole):
            raise run_error(request.script, where, status, said)
        if status != 0:
            self.notes.append(
                f"{request.script} ended {where} with status {status}: {(said.strip().splitlines() or [''])[-1]}"
            )
        if not processes[0].record.steps:
            raise no_step_error(request.script, where)
        return processes

    def alone(self, readers: Sequence[int]) -> tuple[Process, Process]:
        """Run one process on the batches of `readers`, twice: as it is, and with shaken weights."""
        self.inputs = self.folder / f"inputs-{self._num_runs}"
        write_inputs(self.inputs, self.ranks, self.read, readers, self.start, spreads=self.spreads, halves=self.halves)
        alone, shaken = self.run("alone", len(ALONE), str(self.inputs))
        return alone, shaken

    def repeated(self) -> Process | None:
        """Return one process on what the last one was given; None where the script fails in it."""
        self.say("one process again, to find what changes from run to run")
        try:
            return self.run("alone", 1, str(self.inputs))[0]
        except CheckRunError:
            return None

    def with_smaller_loss(self, sight: Sight) -> Sight:
        """Return `sight` with one process whose losses are divided by the number of ranks whose rows it has."""
        self.loss_scale = 1 / len(sight.groups)
        alone, shaken = self.alone([group[0] for group in sight.groups])
        return replace(sight, alone=alone, shaken=shaken, again=None)

    def with_passes(self, sight: Sight) -> Sight:
        """Return `sight` with one process that noted its gradients after each micro-batch of the first step."""
        self.say("one process by micro-batches, to find what is to blame")
        self.notes_passes = True
        again = self._again(sight)
        self.notes_passes = False
        return sight if again is None else replace(sight, passes=again[0])

    def with_outputs(self, sight: Sight) -> Sight:
        """Return `sight` with ranks and one process that noted what modules are given and give in the first step."""
        self.say("ranks and one process once more, to find what is to blame")
        self.notes_outputs = True
        try:
            noted = [*self.run("ranks", len(sight.ranks)), *self.run("alone", 1, str(self.inputs))]
        except CheckRunError:
            return sight
        finally:
            self.notes_outputs = False
        return replace(sight, noted=noted)

    def with_halves(self, sight: Sight) -> Sight:
        """Return `sight` with one process that has the first halves of batches before the second ones."""
        self.say("one process on the halves of batches, to find what is to blame")
        self.halves = True
        again = self._again(sight)
        return sight if again is None else replace(sight, alone=again[0], shaken=again[1], again=None)

    def _again(self, sight: Sight) -> tuple[Process, Process] | None:
        """Run one process on the batches of `sight` in another way; None where the script fails in it."""
        try:
            return self.alone([group[0] for group in sight.groups])
        except CheckRunError:
            return None

    def with_shares(self, sight: Sight) -> Sight:
        """Return `sight` with what the batches of each group of ranks make alone."""
        if len(sight.groups) < 2:
            return sight
        shares = []
        for group in sight.groups:
            self.say(f"one process on the batch of rank {group[0]}, to find what is to blame")
            self.notes_passes = sight.num_micro_batches > 1
            inputs = self.folder / f"share-{group[0]}"
            write_inputs(inputs, self.ranks, self.read, [group[0]], self.start, spreads=False)
            try:
                shares += self.run("alone", 1, str(inputs))
            except CheckRunError:
                return sight
            finally:
                self.notes_passes = False
        return replace(sight, shares=shares)


def _mean_loss(processes: Sequence[Process], step: int) -> float:
    sums = [sum(process.record.steps[step].losses) for process in processes if process.record.steps[step].losses]
    return sum(sums) / len(sums) if sums else float("nan")
