"""Prices of machines, each with its date and source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.errors import ProfileError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_gpu, load_machine
from paraplan.hardware.prices import known_price, load_prices, price_of


def test_every_bundled_price_names_a_known_gpu_a_date_and_an_address() -> None:
    offers = [offer for file in load_prices() for offer in file.offers]
    assert len(offers) > 20
    for offer in offers:
        assert load_gpu(offer.gpu).name == offer.gpu
        assert offer.source.startswith("https://")
        assert offer.date.year >= 2025
        assert offer.on_demand_per_hour is not None
        assert offer.spot_per_hour is None or offer.spot_per_hour < offer.on_demand_per_hour
        if offer.machine is not None:
            machine = load_machine(offer.machine)
            assert (machine.gpu.name, len(machine.node.gpus)) == (offer.gpu, offer.num_gpus)


def test_a_clouds_own_machine_has_its_own_price_and_a_plain_one_the_cheapest() -> None:
    files = load_prices()
    own = known_price(cluster_from_profile("p5.48xlarge"), files)
    assert own.provider == "AWS"
    assert own.per_gpu_hour == pytest.approx(55.04 / 8)
    plain = known_price(cluster_from_profile("8xh100"), files)
    assert plain.per_gpu_hour < own.per_gpu_hour
    assert known_price(cluster_from_profile("p5.48xlarge", num_nodes=2), files).per_hour == pytest.approx(2 * 55.04)


def test_a_part_of_a_machine_costs_the_whole_and_spot_prices_are_apart(tmp_path: Path) -> None:
    offer = {"instance": "box", "gpu": "rtx-4090", "num_gpus": 4, "on_demand_per_hour": 4, "spot_per_hour": 1}
    path = tmp_path / "mine.json"
    dated = offer | {"date": "2026-11-01", "source": "my contract"}
    path.write_text(json.dumps({"provider": "mine", "currency": "EUR", "offers": [dated]}))
    files = load_prices(path)
    half = known_price(cluster_from_profile("2xrtx-4090"), files)
    assert (half.per_hour, half.per_gpu_hour, str(half)) == (4, 2, "mine box, 2026-11-01")
    assert known_price(cluster_from_profile("4xrtx-4090"), files, is_spot=True).per_gpu_hour == 0.25
    assert price_of(cluster_from_profile("8xh100"), files) is None
    with pytest.raises(ProfileError, match="no spot price of NVIDIA H100"):
        known_price(cluster_from_profile("8xh100"), files, is_spot=True)
    path.write_text(json.dumps({"provider": "mine", "currency": "EUR", "offers": [offer]}))
    with pytest.raises(ProfileError, match="date"):
        load_prices(path)


def test_mixed_cards_have_no_price() -> None:
    assert price_of(cluster_from_profile("rtx-3090+rtx-4090"), load_prices()) is None
