"""News of a rank for its launcher while it trains: the numbers of its block of the status page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from paraplan.runtime.agreement import Call, RankSync
from paraplan.shared_memory import STATUS_PAGE_VARIABLE, RankField, StatusPage

_TIMES: dict[Call, RankField] = {
    "save": "save_s",
    "load": "load_s",
    "eval_step": "evaluation_s",
    "predict": "evaluation_s",
}
_COUNTS: dict[Call, RankField] = {"save": "num_saves", "load": "num_loads"}


@dataclass
class RankStatus:
    """The block of this rank. Without a page (no launcher of ours, several engines) nothing is told."""

    page: StatusPage | None = None
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankStatus:
        """Return the block that the launcher keeps for this rank, if there is one."""
        path, rank = environment.get(STATUS_PAGE_VARIABLE), environment.get("LOCAL_RANK", "0")
        page = None
        if path and rank.isdecimal():
            with suppress(OSError, ValueError):  # a launcher in another container
                page = StatusPage.open(path)
        if page is None or int(rank) >= page.num_ranks:
            return cls()
        return cls(page, int(rank))

    def leave(self) -> None:
        """Tell nothing from now on: several engines have no step in common."""
        if self.page is not None:
            self.set("can_stop", 0)
            self.page = None

    def set(self, name: RankField, value: float) -> None:
        """Write a number."""
        if self.page is not None:
            self.page.set(self.local_rank, name, value)

    def add(self, name: RankField, value: float) -> None:
        """Add to a number."""
        if self.page is not None:
            self.page.add(self.local_rank, name, value)

    @property
    def stop_by(self) -> float:
        """When this node's ranks are to have saved; 0: they may go on; below: they end at once."""
        return -1.0 if self.page is None else self.page.stop_by

    def is_to_stop(self) -> bool:
        """Whether this node's ranks are to save and end."""
        return self.page is not None and self.page.stop_by > 0

    @contextmanager
    def timed(self, call: Call, sync: RankSync) -> Iterator[None]:
        """Tell how long `call` takes, and how far the training is after it."""
        if self.page is None:
            yield
            return
        began, began_s = time.time(), time.monotonic()
        if call == "step" and not self.page.get(self.local_rank, "first_began"):
            self.set("first_step", sync.num_steps)
            self.set("first_began", began)
        yield
        if call in _TIMES:
            self.add(_TIMES[call], time.monotonic() - began_s)  # a clock that is set back makes no negative cost
        if call in _COUNTS:
            self.add(_COUNTS[call], 1)
        if call == "step":
            self.set("last_ended", time.time())
            self.set("last_step", sync.num_steps)

    def note_whole(self, seconds: float, num_steps: int) -> None:
        """Tell that a checkpoint after `num_steps` steps is whole, `seconds` after it was begun."""
        self.add("write_s", seconds)
        self.set("saved_step", num_steps)
