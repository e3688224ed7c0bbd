from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.workload import Workload
from paraplan.search.failure import NothingFitsError
from paraplan.search.search import search
from paraplan.search.sizes import scaling

MakeWorkload = Callable[..., Workload]


def test_sizes_go_from_a_quarter_to_four_times_the_gpus(workload: MakeWorkload) -> None:
    offers = scaling(workload("gpt2", "dgx-h100"), price_per_gpu_hour=2.0)
    assert [offer.num_gpus for offer in offers] == [2, 4, 8, 16, 32]
    times = [offer.step_time_s for offer in offers]
    assert times == sorted(times, reverse=True)
    for offer in offers:
        assert offer.cost_per_billion_tokens == pytest.approx(2 * offer.gpu_hours_per_billion_tokens)


@pytest.mark.with_all  # sizes are listed, above
def test_sizes_that_hold_no_plan_are_left_out(workload: MakeWorkload) -> None:
    offers = scaling(workload("llama-3-8b", "dgx-h100", global_batch_size=64, seq_length=8192), price_per_gpu_hour=None)
    assert offers[0].num_gpus > 1
    assert all(offer.cost_per_billion_tokens is None for offer in offers)


def test_the_cloud_shows_plans_that_the_front_beats(workload: MakeWorkload) -> None:
    result = search(workload("gpt2", "dgx-h100"), with_front=True)
    assert 20 < len(result.cloud) <= 256
    fastest = min(point.step_time_s for point in result.front)
    assert all(point.step_time_s >= fastest * (1 - 1e-9) for point in result.cloud)
    assert search(workload("gpt2", "dgx-h100")).cloud == ()


def test_the_error_where_nothing_fits_holds_the_nearest_plan(workload: MakeWorkload) -> None:
    load = workload("llama-3-70b", "rtx-3090-x2", global_batch_size=8, seq_length=1024)
    with pytest.raises(NothingFitsError) as caught:
        search(load)
    nearest = caught.value.nearest
    assert nearest.peak_memory_bytes <= load.usable_memory_bytes, "it fits the GPUs, with offload"
    assert nearest.host_bytes_per_node > (nearest.host_memory_bytes or 0)
