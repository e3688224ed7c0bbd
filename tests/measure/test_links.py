"""One rank that measures links, on real ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from rank_harness import RankHarness

from paraplan.errors import UsageError
from paraplan.hardware.measurement.links import MeasureRequest, RankEvent, collectives_of
from paraplan.measure.links import measure
from paraplan.measure.rank import join

pytestmark = pytest.mark.ranks
SIZES = (1024, 40_000)


def measured_by_rank(store: str, request: MeasureRequest, size: int) -> list[RankEvent]:
    import os

    events: list[RankEvent] = []
    join(device="cpu", rank=int(os.environ["RANK"]), size=size, store_path=store)
    measure(request, events.append)
    return events


def test_each_group_reports_each_collective_and_message_once_by_its_first_rank(
    ranks: RankHarness, tmp_path: Path
) -> None:
    request = MeasureRequest(device="cpu", groups=((0, 1, 2), (1, 2)), message_bytes=SIZES, max_seconds=300)
    by_rank = ranks.run(measured_by_rank, str(tmp_path / "store"), request, 3, size=3)
    assert [len(events) for events in by_rank] == [len(SIZES) * 4, len(SIZES) * 5, 0]
    assert all(event.time_s is not None and event.time_s > 0 for events in by_rank for event in events)
    for group, events in enumerate(by_rank[:2]):
        assert {event.group for event in events} == {group}
        assert [event.collective for event in events[:: len(SIZES)]] == list(collectives_of(3 - group))
    # Three ranks share 1024 bytes in float32: the message that was sent is the largest multiple.
    assert [event.num_bytes for event in by_rank[0][:2]] == [1020, 39_996]


def test_what_there_is_no_time_for_is_said_and_left_out(ranks: RankHarness, tmp_path: Path) -> None:
    request = MeasureRequest(device="cpu", groups=((0, 1),), message_bytes=SIZES, max_seconds=1e-4)
    events = ranks.run(measured_by_rank, str(tmp_path / "store"), request, 2, size=2)[0]
    assert len(events) == request.num_timings
    assert all(event.time_s is None for event in events)
    assert {event.skipped for event in events} == {"some messages: no time left"}


def test_a_torch_that_sees_too_few_gpus_is_named_before_ranks_wait_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch sees \d+ of the 100 GPUs"):
        join(device="cuda", rank=99, size=100, store_path=str(tmp_path / "store"))
    assert not dist.is_initialized()
