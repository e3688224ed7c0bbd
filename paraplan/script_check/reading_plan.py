"""From the records of ranks: what one process starts with, and what it reads in the ranks' place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from paraplan.script_check.batches import joined
from paraplan.script_check.evidence import Process
from paraplan.script_check.records import Inputs, SourceRecord
from paraplan.script_check.sources import DRAWN

START_FILE, READ_FILE, INPUTS_FILE = "start.safetensors", "read.safetensors", "inputs.json"
"""Files of what one process is given: parameters, what it reads, and how that belongs together."""

_ARRAYS = ("tensor", "from_numpy")
"""Ends of places where models make tensors of arrays."""
_SELECTING = ("__setitem__", "__getitem__", "masked_fill", "masked_fill_")
_BY_NUMBERS = ("add", "sub", "rsub", "mul", "div", "remainder", "roll")
"""Calls that compute with numbers of the script: with that of its rank, where it takes none out of what it reads."""

Place = tuple[str, int]
_Leaves = Sequence[tuple[str, torch.Tensor]]


def origins(ranks: Sequence[Process]) -> list[Place]:
    """Return the places and times at which ranks first read unlike values that a model or loss takes.

    Of what is computed from such values nothing is given: the script computes it again. So it does where each rank
    takes its part of the columns of what all have read, as of a sequence: one process has the whole.
    """
    tables = [{source.place: source for source in process.record.sources} for process in ranks]
    shared = [place for place in tables[0] if all(place in table for table in tables) and not place.startswith(DRAWN)]
    unlike = {
        (place, time)
        for place in shared
        for time in range(min(len(table[place].prints) for table in tables))
        if len({table[place].prints[time] for table in tables}) > 1
    }
    unlike -= _written_over(tables[0], unlike)
    first = set()
    for place in shared:
        source = tables[0][place]
        if any(
            (place, time) in unlike
            and source.is_used[time]
            and not _comes_from(source, time, unlike)
            and not _is_part(ranks, (place, time))
            for time in range(min(len(table[place].prints) for table in tables))
        ):
            first.add(place)
    return [
        (place, time)
        for place in shared
        if place in first
        for time in range(min(len(table[place].prints) for table in tables))
        if all(table[place].is_used[time] for table in tables)
    ]


def _written_over(table: Mapping[str, SourceRecord], unlike: set[Place]) -> set[Place]:
    """Return those of `unlike` that are tensors of which a part was not yet set, and that are alike once it is.

    What memory held before is in them, as where rows of `torch.empty` are set one by one.
    """
    over: set[Place] = set()
    for place in (place for place in table if place.endswith("__setitem__")):
        for time in reversed(range(len(table[place].prints))):
            if (place, time) not in unlike or (place, time) in over:
                over |= {at for at in table[place].made_of[time] if at in unlike and at[0].endswith("__setitem__")}
    return over


def of_rows(ranks: Sequence[Process], read: Sequence[Place]) -> list[Place]:
    """Return `read` with what is made of a reading in place of those that have no row for each sample.

    As of one random number by which a rank multiplies all of its rows: there is no such number of all ranks.
    """
    table = {source.place: source for source in ranks[0].record.sources}
    made: dict[Place, list[Place]] = {}
    for source in table.values():
        for time, parents in enumerate(source.made_of):
            for parent in parents:
                made.setdefault(parent, []).append((source.place, time))
    rows = [at for at in read if not at[0].startswith(DRAWN)]
    sizes = Counter(len(tensor) for at in rows for _, tensor in ranks[0].reading(*at) if tensor.ndim)
    usual = sizes.most_common(1)[0][0] if sizes else 0
    found: dict[Place, None] = {}
    waiting = list(rows)
    while waiting:
        at = waiting.pop(0)
        source = table[at[0]]
        if at in found or at[1] >= len(source.is_used) or not source.is_used[at[1]]:
            continue
        leaves = [tensor for _, tensor in ranks[0].reading(*at)]
        if at in made and any(tensor.ndim == 0 or len(tensor) != usual for tensor in leaves):
            waiting += made[at]
        else:
            found[at] = None
    draws = [at for at in read if at[0].startswith(DRAWN)]
    return [at for at in found if all(_is_read(process, at) for process in ranks)] + draws


def past_line(ranks: Sequence[Process], read: Sequence[Place], line: int) -> list[Place]:
    """Return `read` with what a line makes of it in place of that, where one process cannot compute the line.

    As where rows are added to a tensor whose size the script writes down.
    """
    made = {
        (source.place, time): source.made_of[time]
        for source in ranks[0].record.sources
        if f":{line}+" in source.place
        for time in range(len(source.prints))
    }
    parents = {at for made_of in made.values() for at in made_of if at in set(read)}
    results = [at for at, made_of in made.items() if parents & set(made_of)]
    found = [at for at in dict.fromkeys([*read, *results]) if at not in parents]
    return found if parents and all(_is_read(process, at) for process in ranks for at in results) else []


def as_taken(ranks: Sequence[Process]) -> list[Place]:
    """Return what models and losses themselves take that is unlike on ranks, and not what that is made of."""
    read = list(ranks[0].record.sources)
    parents = {
        at for source in read for time, made_of in enumerate(source.made_of) if source.is_used[time] for at in made_of
    }
    ends = [
        (source.place, time)
        for source in read
        for time in range(len(source.prints))
        if source.is_used[time] and (source.place, time) not in parents
    ]
    everywhere = [at for at in ends if all(_is_read(process, at) for process in ranks)]
    return [at for at in everywhere if len(_prints_at(ranks, range(len(ranks)), *at)) > 1 or at[0].startswith(DRAWN)]


def _is_read(process: Process, at: Place) -> bool:
    source = process.source(at[0])
    return source is not None and at[1] < len(source.is_used) and source.is_used[at[1]]


def drawn(ranks: Sequence[Process]) -> list[Place]:
    """Return the places and times at which the models of all ranks draw random numbers."""
    tables = [{source.place: source for source in process.record.sources} for process in ranks]
    return [
        (source.place, time)
        for source in ranks[0].record.sources
        if source.place.startswith(DRAWN)
        for time in range(min(len(table[source.place].prints) if source.place in table else 0 for table in tables))
        if all(process.reading(source.place, time) for process in ranks)
    ]


def is_random(ranks: Sequence[Process], place: str, time: int) -> bool:
    """Whether what models have at a place of `drawn` is random: arrays may be tables that are alike on all ranks."""
    return not place.endswith(_ARRAYS) or len(_prints_at(ranks, range(len(ranks)), place, time)) > 1


def _comes_from(source: SourceRecord, time: int, places: set[Place]) -> bool:
    return any((name, number) in places for name, number in source.made_of[time])


def _is_part(ranks: Sequence[Process], at: Place) -> bool:
    """Whether ranks have parts, along a dimension that is not that of samples, of one tensor that all have read."""
    first = {source.place: source for source in ranks[0].record.sources}
    parts = [[tensor.shape for _, tensor in process.reading(*at)] for process in ranks]
    waiting, seen = list(first[at[0]].made_of[at[1]]), set()
    while waiting:
        place, time = waiting.pop()
        if (place, time) in seen or place not in first:
            continue
        seen.add((place, time))
        waiting += first[place].made_of[time]
        wholes = [tensor.shape for _, tensor in ranks[0].reading(place, time)]
        if len(wholes) == 1 and all(len(part) == 1 and _is_along(part[0], wholes[0]) for part in parts):
            return all(
                sum(part[0][dim] for part in parts) == size
                for dim, size in enumerate(wholes[0])
                if size != parts[0][0][dim]
            )
    return False


def _is_along(part: torch.Size, whole: torch.Size) -> bool:
    """Whether a tensor has as many samples as another, and is shorter in one other dimension."""
    return len(part) == len(whole) > 1 and part[0] == whole[0] and sum(map(int.__ne__, part, whole)) == 1


def read_by_rank(
    ranks: Sequence[Process], alone: Process, read: Sequence[Place], groups: Sequence[Sequence[int]]
) -> list[Place]:
    """Return where the script changes or takes apart what it has read in a way of each rank's own.

    There one process, which is rank 0, gets other values than those of all ranks together. Where ranks that read the
    same do it in unlike ways, as for their parts of a vocabulary, one process does it for the whole.
    """
    readers = [group[0] for group in groups]
    tables = [{source.place: source for source in ranks[reader].record.sources} for reader in readers]
    own = {source.place: source for source in alone.record.sources}
    names = {place for place, _ in read}
    takes_numbers = numbers_taken(ranks) != ""
    found = []
    for place, source in own.items():
        if place in names or any(place not in table for table in tables):
            continue
        call = place.rpartition(" ")[2]
        if call not in _SELECTING and (takes_numbers or call.strip("_") not in _BY_NUMBERS):
            continue
        for time in range(min(len(source.prints), *(len(table[place].prints) for table in tables))):
            if not source.is_used[time] or not all(table[place].is_used[time] for table in tables):
                continue
            if any(len(_prints_at(ranks, group, place, time)) > 1 for group in groups):
                break
            is_unlike = _is_same_reading(ranks, alone, readers, (place, time)) is False
            # what is selected from other values than ranks have is another for that alone
            parents = [_is_same_reading(ranks, alone, readers, at) for at in source.made_of[time]]
            is_own = parents == [True] if call not in _SELECTING else False not in parents
            if is_unlike and is_own:
                found.append(place)
                break
    return [
        (place, time)
        for place in found
        for time in range(len(tables[0][place].prints))
        if tables[0][place].is_used[time]
    ]


def numbers_taken(ranks: Sequence[Process]) -> str:
    """Return where ranks read unlike values of which the script takes numbers, as counts or lengths; "" for none."""
    taken = ranks[0].record.taken
    return next((place for place, time in taken if len(_prints_at(ranks, range(len(ranks)), place, time)) > 1), "")


def _is_same_reading(ranks: Sequence[Process], alone: Process, readers: Sequence[int], at: Place) -> bool | None:
    """Whether one process reads at a place what all readers together read there; None where they cannot be compared."""
    place, time = at
    for process in (*(ranks[reader] for reader in readers), alone):
        source = process.source(place)
        if source is None or time >= len(source.prints) or not source.is_used[time]:
            return None
    parts = [ranks[reader].reading(place, time) for reader in readers]
    if len({tuple(tensor.ndim for _, tensor in part) for part in parts}) > 1:
        return None
    whole = [joined(leaves, name) for name, leaves in _by_leaf(parts)]
    mine = [tensor for _, tensor in alone.reading(place, time)]
    if [one.shape for one in whole] != [one.shape for one in mine]:
        return None
    return all(map(torch.equal, whole, mine))


def rows_read_twice(ranks: Sequence[Process], readers: Sequence[int]) -> list[str]:
    """Return a note where readers of unlike batches get some rows from their data loaders that another reads too."""
    for source in ranks[0].record.sources:
        for time in range(len(source.prints) if source.place.endswith(" next") else 0):
            read: dict[bytes, int] = {}
            for rank in readers:
                if not any(one.place == source.place and time < len(one.prints) for one in ranks[rank].record.sources):
                    continue
                leaves = [tensor for _, tensor in ranks[rank].reading(source.place, time) if tensor.ndim > 0]
                for rows in zip(*leaves, strict=False):
                    row = b"".join(bytes(str(one.tolist()), "ascii") for one in rows)
                    if rank != read.setdefault(row, rank):
                        return [
                            f"ranks {read[row]} and {rank} read the same row in batch {time + 1}, and others besides: "
                            "their samplers divide the data in unlike orders, or draw with replacement"
                        ]
    return []


def _prints_at(ranks: Sequence[Process], group: Sequence[int], place: str, time: int) -> set[str | None]:
    found: set[str | None] = set()
    for rank in group:
        source = ranks[rank].source(place)
        found.add(None if source is None or time >= len(source.prints) else source.prints[time])
    return found


def _by_leaf(parts: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> list[tuple[str, list[torch.Tensor]]]:
    return [(leaves[0][0], [tensor for _, tensor in leaves]) for leaves in zip(*parts, strict=True)]


def groups_of(ranks: Sequence[Process], read: Sequence[Place]) -> list[list[int]]:
    """Return the ranks by what they read: those of one group read the same."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for process in ranks:
        table = {source.place: source for source in process.record.sources}
        groups.setdefault(tuple(table[place].prints[time] for place, time in read), []).append(process.record.rank)
    return list(groups.values())


def write_inputs(
    folder: Path,
    ranks: Sequence[Process],
    read: Sequence[Place],
    readers: Sequence[int],
    start: dict[str, torch.Tensor],
    *,
    spreads: bool,
    halves: bool = False,
) -> None:
    """Write what one process is given into `folder`: the batches of `readers`, one rank of each group.

    It reads them one after another, each as a micro-batch, where it `spreads` them; or first the first `halves` of all,
    where they can be halved.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries: list[tuple[str, int, int]] = []
    for place, time in read:
        parts = [ranks[rank].reading(place, time) for rank in readers]
        for number, part in enumerate(_halved(parts) if halves else parts):
            for leaf, (key, value) in enumerate(part):
                tensors[f"{len(entries)}/{leaf}/{key}"] = value
            entries.append((place, time, number))
    ended = [
        (source.place, time)
        for source in ranks[0].record.sources
        for time, is_end in enumerate(source.is_end)
        if is_end
    ]
    rates = tuple(
        {
            name: numbers
            for step in reversed(steps)
            for group, numbers in zip(step.members, step.rates, strict=True)
            for name in group
        }
        for steps in zip(*(process.record.steps for process in ranks), strict=False)
    )
    num_batches = sum(len(step.losses) for step in ranks[0].record.steps)
    counts = Counter(place for place, _ in read)
    times = {place: max(1, count // max(1, num_batches)) for place, count in counts.items()}
    inputs = Inputs(
        width=len(readers),
        ended=tuple(ended),
        read=tuple(entries),
        rates=rates,
        times_a_batch=times if spreads else None,
    )
    folder.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in start.items()}, folder / START_FILE)
    save_file(tensors, folder / READ_FILE)
    (folder / INPUTS_FILE).write_text(inputs.to_json(), encoding="utf-8")


def _halved(parts: Sequence[_Leaves]) -> Sequence[_Leaves]:
    """Return the first halves of `parts`, and then the second ones; `parts` where some have an odd number of rows."""
    if any(value.ndim and len(value) % 2 for part in parts for _, value in part):
        return parts
    return [
        [(key, value.chunk(2)[half].contiguous() if value.ndim else value) for key, value in part]
        for half in (0, 1)
        for part in parts
    ]


def put_together(ranks: Sequence[Process], alone: Process) -> tuple[list[Process], int, int]:
    """Return `ranks` with wholes in place of parts that torch does not know of, their number, and that of the parts.

    Parts are those of parameters that are longer in one process in one dimension, by a number that divides the ranks.
    They are taken in the order of ranks: neighbours hold the parts of one whole.
    """
    shapes = {name: value.shape for name, value in alone.of("start").items()}
    divided = {}
    for name, value in ranks[0].of("start").items():
        whole = shapes.get(name, value.shape)
        dims = [dim for dim in range(value.ndim) if len(whole) == value.ndim and value.shape[dim] != whole[dim]]
        if len(dims) == 1 and whole[dims[0]] % value.shape[dims[0]] == 0:
            count = whole[dims[0]] // value.shape[dims[0]]
            if len(ranks) % count == 0:
                divided[name] = (dims[0], count)
    if not divided:
        return list(ranks), 0, 1
    made = []
    for rank, process in enumerate(ranks):
        tensors = dict(process.tensors)
        for key in process.tensors:
            kind, _, rest = key.partition("/")
            name = rest.partition("/")[2] if kind in ("gradient", "parameter") else rest
            if kind != "source" and name in divided:
                dim, count = divided[name]
                first = rank // count * count
                parts = [ranks[other].tensors.get(key) for other in range(first, first + count)]
                if all(part is not None for part in parts):
                    tensors[key] = torch.cat([part for part in parts if part is not None], dim)
        made.append(Process(process.record, tensors))
    return made, len(divided), max(count for _, count in divided.values())
