"""Where the time of a job went: steps that count, steps undone, checkpoints, restarts, waiting for nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from paraplan.shared_memory import RankField, StatusPage
from paraplan.units import format_seconds

_READ: tuple[RankField, ...] = (
    "first_began", "first_step", "last_ended", "last_step", "saved_step",
    "save_s", "num_saves", "write_s", "load_s", "num_loads", "evaluation_s",
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """The ranks from one start to their end: `told` is what the first of this node has told of itself.

    Moments are seconds from the epoch. Nodes were waited for `waited_s` before the start.
    """

    began: float
    waited_s: float
    told: Mapping[RankField, float]

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return int(self.told["last_step"] - self.told["first_step"])

    @property
    def training_s(self) -> float:
        """From its first step to its last, without checkpoints and evaluation."""
        told = self.told
        # what was read or evaluated before the first step lies outside, and hardly ever is more than this
        return max(told["last_ended"] - told["first_began"] - told["save_s"] - told["evaluation_s"], 0.0)


@dataclass(frozen=True)
class Goodput:
    """A job's time in parts that add up to `wall_s`, all in seconds."""

    wall_s: float
    useful_s: float
    """Steps that count, with the batches and whatever else the script does between them."""
    done_again_s: float
    """Steps that a failure has undone."""
    checkpoints_s: float
    evaluation_s: float
    loads_s: float
    restarts_s: float
    """From the last step before a failure to the first one after it, without loading and waiting."""
    waiting_s: float
    """For other nodes."""
    start_s: float
    """Until the first step, and from the last one to the end."""
    num_steps: int
    """Steps that count: not those that a restart did again."""
    steps_done_again: int
    num_restarts: int
    costs: Mapping[str, float | None]
    """Seconds for each: `save_s`, `write_s`, `load_s`, `restart_s`; None for what did not happen."""

    def to_dict(self) -> dict[str, object]:
        """Return what run.json holds."""
        return {"goodput": round(self.useful_s / self.wall_s, 5)} | asdict(self)

    def lines(self) -> list[str]:
        """Return what is said at the end of a job."""
        steps = f"{self.num_steps:,} steps that count took {format_seconds(self.useful_s)}"
        lines = [f"goodput {self.useful_s / self.wall_s:.1%}: {steps} of {format_seconds(self.wall_s)}"]
        restarts = f"{self.num_restarts} restart{'s' if self.num_restarts != 1 else ''}"
        undone = f"{self.steps_done_again:,} step{'s' if self.steps_done_again != 1 else ''} undone by failures"
        losses = (
            (self.start_s, "start and end"),
            (self.restarts_s, restarts),
            (self.done_again_s, undone),
            (self.checkpoints_s, "checkpoints"),
            (self.loads_s, "loading"),
            (self.waiting_s, "waiting for nodes"),
            (self.evaluation_s, "evaluation"),
        )
        shown = sorted((loss for loss in losses if loss[0] > self.wall_s / 1000), reverse=True)
        if shown:
            lines.append("the rest: " + ", ".join(f"{words} {format_seconds(seconds)}" for seconds, words in shown))
        return lines + self._advice()

    def _advice(self) -> list[str]:
        """Return how often to write a checkpoint for failures as often as here; nothing where too little is known."""
        costs = self.costs
        if not self.num_restarts or costs["save_s"] is None or not self.num_steps:
            return []
        from paraplan.plan.goodput import FailureCosts, best_interval, estimate_goodput  # pydantic, for this line alone

        mtbf_s = self.wall_s / self.num_restarts
        known = FailureCosts(**{name: value or 0.0 for name, value in costs.items()})
        step_s = (self.useful_s + self.done_again_s) / (self.num_steps + self.steps_done_again)
        interval_s = best_interval(mtbf_s, known, step_s=step_s)
        expected = estimate_goodput(mtbf_s, known, interval_s=interval_s).goodput
        every = f"a checkpoint every {max(1, round(interval_s / step_s)):,} steps is best"
        return [f"with a failure every {format_seconds(mtbf_s)} as here, {every}: expected goodput {expected:.1%}"]


@dataclass
class JobClock:
    """Takes note of a job's attempts. `waiting_s` is the time for which nodes were waited for since the last one."""

    began: float = field(default_factory=time.time)
    attempts: list[Attempt] = field(default_factory=list)
    waiting_s: float = 0.0
    _open: tuple[float, float] | None = None

    def begin_attempt(self, page: StatusPage | None) -> None:
        """Take note of ranks that start now."""
        self.end_attempt(page)
        if page is not None:
            page.clear()
        self._open, self.waiting_s = (time.time(), self.waiting_s), 0.0

    def end_attempt(self, page: StatusPage | None) -> None:
        """Take note of what ranks that have ended told of themselves. Safe to call twice."""
        if self._open is not None and page is not None:
            began, waited_s = self._open
            told = {name: page.get(0, name) for name in _READ}
            self.attempts.append(Attempt(began=began, waited_s=waited_s, told=told))
        self._open = None

    def measure(self, page: StatusPage | None, *, is_done: bool) -> Goodput | None:
        """Return where the time went; None without a step. Unless `is_done` only steps that were saved count."""
        self.end_attempt(page)
        stepped = [attempt for attempt in self.attempts if attempt.told["last_ended"] > 0]
        if not stepped:
            return None
        wall_s = time.time() - self.began
        useful_s, done_again_s, num_useful, num_again = self._steps(stepped, is_done=is_done)
        told = [attempt.told for attempt in self.attempts]
        sums = {name: sum(each[name] for each in told) for name in _READ}
        waiting_s = sum(attempt.waited_s for attempt in self.attempts) + self.waiting_s
        gaps_s = sum(after.told["first_began"] - before.told["last_ended"] for before, after in pairwise(stepped))
        waited_again_s = sum(attempt.waited_s for attempt in self.attempts[1:])
        loads_again_s = sum(each["load_s"] for each in told[1:])
        restarts_s = max(0.0, gaps_s - waited_again_s - loads_again_s)
        known_s = useful_s + done_again_s + restarts_s + waiting_s
        known_s += sums["save_s"] + sums["evaluation_s"] + sums["load_s"]
        count = max(0, len(stepped) - 1)
        return Goodput(
            wall_s=wall_s,
            useful_s=useful_s,
            done_again_s=done_again_s,
            checkpoints_s=sums["save_s"],
            evaluation_s=sums["evaluation_s"],
            loads_s=sums["load_s"],
            restarts_s=restarts_s,
            waiting_s=waiting_s,
            start_s=wall_s - known_s,
            num_steps=num_useful,
            steps_done_again=num_again,
            num_restarts=count,
            costs={
                "save_s": _mean(sums["save_s"], sums["num_saves"]),
                "write_s": _mean(sums["write_s"], sums["num_saves"]),
                "load_s": _mean(sums["load_s"], sums["num_loads"]),
                "restart_s": _mean(restarts_s + waited_again_s, count),
            },
        )

    @staticmethod
    def _steps(stepped: list[Attempt], *, is_done: bool) -> tuple[float, float, int, int]:
        """Return the seconds and the numbers of steps that count, and of those that were undone."""
        useful_s = again_s = 0.0
        num_useful = num_again = 0
        kept_to = math.inf if is_done else stepped[-1].told["saved_step"] or stepped[-1].told["first_step"]
        for attempt in reversed(stepped):
            first, last = attempt.told["first_step"], attempt.told["last_step"]
            kept = int(max(0.0, min(last, kept_to) - first))
            share = kept / attempt.num_steps if attempt.num_steps else 0.0
            useful_s += attempt.training_s * share
            again_s += attempt.training_s * (1 - share)
            num_useful, num_again = num_useful + kept, num_again + attempt.num_steps - kept
            kept_to = min(kept_to, first)
        return useful_s, again_s, num_useful, num_again


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
