"""Guard of replicas: what ranks must hold alike, and read unlike, compared by their sums (`ranks.replica_sums`)."""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paraplan.launch.nodes.store import NodeStore
from paraplan.launch.ranks.replica_sums import HEADER, LAYOUT_FILE, NUM_SLOTS, SUMS_FILE
from paraplan.units import ranks_in_words

GUARD_EXIT_STATUS = 65
"""Exit status of a job whose ranks went apart: EX_DATAERR of sysexits.h."""

_INTERVAL_S, _INTERVAL_OF_NODES_S = 0.1, 0.5
_MOST_LOOKS = 2 * NUM_SLOTS

Entry = tuple[str, str, tuple[tuple[int, ...], ...] | None]
"""Name, kind, and the groups of ranks that hold the same; None where that is to be learned."""


@dataclass(frozen=True)
class Look:
    """The sums that one rank wrote after a step of one optimizer."""

    number: int
    optimizer: int
    step: int
    entries: tuple[Entry, ...]
    sums: Sequence[int]


@dataclass(frozen=True)
class GuardVerdict:
    """Ranks hold, or read, what they must not. `ranks` are those that are told apart from the others."""

    text: str
    ranks: tuple[int, ...]
    hint: str

    def render(self) -> str:
        """Return the report."""
        return f"paraplan: {self.text}; ending the job\n  hint: {self.hint}\n"


class SumsReader:
    """Reads what one rank writes into its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next = folder, 0
        self._layouts: dict[int, tuple[Entry, ...]] = {}

    def read(self) -> list[Look]:
        """Return the looks since the last call; where there were many, the last ones."""
        found: list[Look] = []
        for slot in range(self._next, self._next + NUM_SLOTS):
            try:
                data = (self._folder / SUMS_FILE.format(slot=slot % NUM_SLOTS)).read_bytes()
            except FileNotFoundError:
                break
            number, optimizer, step, layout, count = HEADER.unpack_from(data)
            if number < self._next:
                break
            if layout not in self._layouts:
                rows = json.loads((self._folder / LAYOUT_FILE.format(layout=layout)).read_text(encoding="utf-8"))
                self._layouts[layout] = tuple(map(_entry_of, rows))
            sums = array("q", data[HEADER.size : HEADER.size + 8 * count])
            found.append(Look(number, optimizer, step, self._layouts[layout], sums))
        self._next = max((look.number + 1 for look in found), default=self._next)
        return sorted(found, key=lambda look: look.number)


def _entry_of(row: Sequence[Any]) -> Entry:
    name, kind, groups = row
    return str(name), str(kind), None if groups is None else tuple(tuple(map(int, group)) for group in groups)


@dataclass
class _Learned:
    """One tensor of whose replicas nothing says who holds it alike, as far as the sums have told."""

    first: Mapping[int, int]
    follows: list[tuple[int, ...]] | None = None
    """Groups of ranks that hold it alike after it was updated; None before it was."""
    suspects: Mapping[int, int] | None = None
    """The sums in which some ranks changed what was constant before."""
    apart: tuple[int, ...] = ()
    """Ranks that began alike, and parted in the first update or may have values of their own."""

    def odd_ones(self, kind: str, groups: Iterable[tuple[int, ...]], sums: Mapping[int, int]) -> tuple[int, ...]:
        """Return ranks that are apart from those with which they held it alike before; learn from `sums` too."""
        if self.follows is not None:
            return _first_minority(self.follows, sums)
        if self.suspects is not None:
            return self._odd_of_suspects(self.suspects, sums)
        changed = {rank for rank in sums if sums[rank] != self.first.get(rank)}
        alike = [
            part for group in groups for part in _parts([rank for rank in group if rank in self.first], self.first)
        ]
        moved = [(part, changed.intersection(part)) for part in alike]
        some = next(((part, ranks) for part, ranks in moved if 0 < len(ranks) < len(part)), None)
        if some is not None:
            if kind == "state":
                self.follows = []
            elif 2 * len(some[1]) <= len(some[0]):
                self.suspects = dict(sums)
            return ()
        return self._learn(kind, alike, sums) if changed else ()

    def _odd_of_suspects(self, then: Mapping[int, int], sums: Mapping[int, int]) -> tuple[int, ...]:
        """Return ranks where a constant changed once; one that goes on to change is no constant."""
        if all(then.get(rank) == number for rank, number in sums.items()):
            return tuple(rank for rank in sums if then[rank] != self.first.get(rank))
        self.follows, self.suspects = [], None
        return ()

    def _learn(self, kind: str, alike: Sequence[tuple[int, ...]], sums: Mapping[int, int]) -> tuple[int, ...]:
        """Take from the first update who holds it alike; return the odd ones where most of those still do."""
        self.follows = []
        if kind in ("buffer", "renewed"):  # those that change are not compared: ranks may each have their own
            self.apart = tuple(sums) if kind == "buffer" and len(_parts(list(sums), sums)) > 1 else ()
            return ()
        for part in alike:
            parts = _parts([rank for rank in part if rank in sums], sums)
            largest = max(parts, key=len, default=())
            if kind == "parameter" and len(parts) > 1 and 2 * len(largest) > len(part):
                return tuple(rank for rank in part if rank not in largest)
            self.follows += [one for one in parts if len(one) > 1]
            if len(parts) > 1 and kind == "parameter":
                self.apart = self.apart or part
        return ()


@dataclass
class Judge:
    """Compares the looks of all ranks, the oldest first."""

    num_ranks: int
    say: Callable[[str], None]
    _looks: dict[tuple[int, int], dict[int, Look]] = field(default_factory=dict)
    _learned: dict[tuple[int, str], _Learned] = field(default_factory=dict)
    _equal_at: dict[int, int] = field(default_factory=dict)
    _batches: dict[tuple[int, ...], tuple[int, Mapping[int, int]]] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)

    def add(self, rank: int, looks: Iterable[Look]) -> GuardVerdict | None:
        """Take looks of one rank; return a verdict once all ranks have made a look after which some are apart."""
        for look in looks:
            key = (look.step, look.optimizer)
            self._looks.setdefault(key, {})[rank] = look
            if len(self._looks[key]) == self.num_ranks:
                verdict = self._judge(self._looks.pop(key), *key)
                if verdict is not None:
                    return verdict
                self._equal_at[look.optimizer] = look.step
        for key in sorted(self._looks)[:-_MOST_LOOKS]:  # which some ranks never made
            del self._looks[key]
        return None

    def _judge(self, looks: Mapping[int, Look], step: int, optimizer: int) -> GuardVerdict | None:
        by_name: dict[str, dict[int, tuple[int, Entry]]] = {}
        for rank, look in sorted(looks.items()):
            for entry, number in zip(look.entries, look.sums, strict=True):
                by_name.setdefault(entry[0], {})[rank] = (number, entry)
        unlike: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, held in by_name.items():
            kind = next(iter(held.values()))[1][1]
            sums = {rank: number for rank, (number, _) in held.items()}
            if kind == "batch":
                verdict = self._same_batches(held, sums, step)
                if verdict is not None:
                    return verdict
                continue
            known = {group for _, (_, _, groups) in held.values() for group in groups or ()}
            is_known = any(groups is not None for _, (_, _, groups) in held.values())
            if kind == "parameter" and is_known:
                odd = _first_minority(known, sums)
            else:
                learned = self._learned.setdefault((optimizer, name), _Learned(sums))
                odd = learned.odd_ones(kind, known if is_known else [tuple(sums)], sums)
                if learned.apart and kind not in self._noted:
                    self._note_apart(name, kind, learned.apart)
            if odd:
                unlike[name] = kind, odd
        return self._verdict(unlike, looks) if unlike else None

    def _note_apart(self, name: str, kind: str, ranks: Sequence[int]) -> None:
        self._noted.add(kind)
        who = ranks_in_words(ranks)
        what = f"{name} begins alike on {who} and is another on each after the first update: a part of its own on each "
        what += "rank, or a gradient that is never reduced"
        if kind == "buffer":
            what = f"the buffer {name} is another on each of {who}: each takes statistics of its own batches, and a "
            what += "checkpoint holds one rank's (SyncBatchNorm takes those of all)"
        self.say(f"{what}; it is not compared")

    def _same_batches(
        self, held: Mapping[int, tuple[int, Entry]], sums: Mapping[int, int], step: int
    ) -> GuardVerdict | None:
        """Return that ranks which should divide the data were given the same at two looks, and other data at each."""
        for group in {group for _, (_, _, groups) in held.values() for group in groups or ()}:
            now = {rank: sums[rank] for rank in group if sums.get(rank)}
            before_step, before = self._batches.get(group, (0, {}))
            self._batches[group] = (step, now)
            for part in _parts(list(now), now):
                same = _parts([rank for rank in part if rank in before], before)
                largest = max(same, key=len, default=())
                if len(largest) > 1 and now[largest[0]] != before[largest[0]]:
                    text = f"{ranks_in_words(largest)} read the same data in steps {before_step} and {step}"
                    hint = "give each rank its own share: a DistributedSampler, or a seed of its own"
                    return GuardVerdict(text, largest, hint)
        return None

    def _verdict(self, unlike: Mapping[str, tuple[str, tuple[int, ...]]], looks: Mapping[int, Look]) -> GuardVerdict:
        """Return who is apart: `unlike` has the kind and the odd ranks of each tensor in which some are."""
        name, (kind, odd) = next(iter(unlike.items()))
        step, last = looks[odd[0]].step, self._equal_at.get(looks[odd[0]].optimizer, 0)
        num_alike = sum(one == kind for one, _ in unlike.values())
        total = sum(entry[1] == kind for entry in looks[odd[0]].entries)
        what = f"{kind} " if kind in ("buffer", "parameter") else ""
        what += name + (f" and {num_alike - 1} of {total - 1} others" if num_alike > 1 else "")
        where = f"{'has' if len(odd) == 1 else 'have'} another {what} than other replicas"
        values = {looks[rank].sums[[entry[0] for entry in looks[rank].entries].index(name)] for rank in odd}
        if len(values) > 1:
            where = f"have unlike values of the {what}"
        since = f"after step {step}, alike after step {last}" if step else "before the first step"
        text = f"{ranks_in_words(odd)} {where} {since}"
        hint = "a reduction that a rank did not take part in (no_sync, a branch of its own), or steps of its own"
        if num_alike == 1 and total > 1:
            hint = "one tensor alone: its memory or a kernel went wrong on that rank, or code wrote it there"
        return GuardVerdict(text, odd, f"{hint}; go on from a checkpoint of step {last} or before")


def _parts(ranks: Sequence[int], sums: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return `ranks` by their sums."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(sums[rank], []).append(rank)
    return list(map(tuple, found.values()))


def _first_minority(groups: Iterable[Sequence[int]], sums: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks of the first group that disagrees with another sum than most; all of it where none has most."""
    for group in groups:
        here = [rank for rank in group if rank in sums]
        counts = Counter(sums[rank] for rank in here).most_common(2)
        if len(counts) > 1:
            (usual, most), (_, second) = counts
            return tuple(rank for rank in here if most == second or sums[rank] != usual)
    return ()


class GuardWatch:
    """Looks at the sums of the ranks of this node; over several nodes they are told to the first one, which judges."""

    def __init__(
        self,
        folders: Mapping[int, Path],
        *,
        num_ranks: int,
        store: NodeStore | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch the ranks whose files are in `folders`, by global rank."""
        self._readers = {rank: SumsReader(folder) for rank, folder in folders.items()}
        self._store = store if store is not None and store.num_nodes > 1 else None
        self._judge, self._clock, self._next_s = Judge(num_ranks, say), clock, 0.0
        self._recent: dict[int, list[Look]] = {rank: [] for rank in folders}
        self._seen: dict[int, int] = {}

    def look(self, *, is_end: bool = False) -> GuardVerdict | None:
        """Read what is new, if it is time or the end; return the verdict where ranks are apart."""
        if self._clock() < self._next_s and not is_end:
            return None
        self._next_s = self._clock() + (_INTERVAL_S if self._store is None else _INTERVAL_OF_NODES_S)
        new = {rank: reader.read() for rank, reader in self._readers.items()}
        for rank, looks in new.items():
            self._recent[rank] = (self._recent[rank] + looks)[-2:]
        if self._store is not None and (self._store.node == 0 or any(new.values())):
            mine = {
                str(rank): [[look.number, look.optimizer, look.step, look.entries, [*look.sums]] for look in looks]
                for rank, looks in self._recent.items()
            }
            notes = self._store.gather("sums", mine if self._store.node else {})
            for key, rows in (item for note in notes.values() for item in note.items()):
                rank, told_looks = int(key), [_look_of(row) for row in rows]
                new[rank] = [look for look in told_looks if look.number > self._seen.get(rank, -1)]
                self._seen[rank] = max((look.number for look in told_looks), default=-1)
        if self._store is not None and self._store.node != 0:
            return None
        for rank, looks in new.items():
            verdict = self._judge.add(rank, looks)
            if verdict is not None:
                return verdict
        return None


def _look_of(row: Sequence[Any]) -> Look:
    number, optimizer, step, entries, sums = row
    return Look(int(number), int(optimizer), int(step), tuple(map(_entry_of, entries)), [int(one) for one in sums])
