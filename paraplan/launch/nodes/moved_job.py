"""Where an elastic job is whose endpoint's host is away: other hosts of the command line are asked."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.election import Answer, survey

_MOST_ASKED = 16
_PATIENCE_S = 1.0


def find_moved_job(doors: Doors) -> Answer | None:
    """Return what launchers elsewhere say of a job that has moved from its endpoint; None where none knows of one.

    Of many places some are asked, others the next time.
    """
    found = survey(
        some_of(doors.elsewhere, but=doors.standing.door),
        token=doors.token,
        standing=doors.standing,
        patience_s=_PATIENCE_S,
    )
    moved = [one for one in found.answers.values() if one.leader and one.term]
    return max(moved, key=lambda one: one.term, default=None)


def some_of(places: Sequence[str], *, but: str) -> list[str]:
    """Return these places, or as many of them as are asked at once, without this node's own door."""
    others = [place for place in places if place != but]
    return random.sample(others, min(_MOST_ASKED, len(others)))
