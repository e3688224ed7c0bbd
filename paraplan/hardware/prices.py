"""Prices of machines by the hour: files of `profiles/prices`, each figure with its date and source."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from pydantic import Field

from paraplan.errors import ProfileError
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.profile_json import read_object, validated
from paraplan.records import Record
from paraplan.resources import profiles_folder

_GPUS = 8
"""GPUs of the machine of an offer that rents GPUs one by one."""


class PriceOffer(Record):
    """Price that one provider asks by the hour for a machine, or for one GPU of it."""

    instance: str
    """The machine as the provider calls it."""
    gpu: str
    """The GPU's profile."""
    num_gpus: int = Field(gt=0)
    """GPUs that the price is for; more are taken in multiples of them."""
    on_demand_per_hour: float | None = Field(default=None, gt=0)
    spot_per_hour: float | None = Field(default=None, gt=0)
    """The price of a machine that may be taken back, which changes from day to day; None where nobody noted one."""
    machine: str | None = None
    """The machine's profile, where there is one."""
    region: str | None = None
    date: dt.date
    """When it was read."""
    source: str
    """Where it was read."""


class PriceFile(Record):
    """The offers of one provider, as `profiles/prices/*.json` and `--prices FILE` hold them."""

    provider: str
    currency: str
    offers: tuple[PriceOffer, ...]


class MachinePrice(Record):
    """The price of a cluster: all its machines for an hour, and where that is from."""

    provider: str
    currency: str
    offer: PriceOffer
    is_spot: bool
    per_hour: float
    per_gpu_hour: float
    """Price of an hour for each used GPU: higher than the provider's where machines are larger than what is used."""

    def __str__(self) -> str:
        return f"{self.provider} {self.offer.instance}{', spot' if self.is_spot else ''}, {self.offer.date}"


def load_prices(path: Path | None = None) -> tuple[PriceFile, ...]:
    """Return the prices of a file, by default those that come with paraplan. Raises `ProfileError` for a bad file."""
    paths = [path] if path is not None else sorted((profiles_folder() / "prices").glob("*.json"))
    return tuple(validated(PriceFile, read_object(each), where=str(each)) for each in paths)


def machines_for_rent(prices: Sequence[PriceFile], *, most_nodes: int) -> list[tuple[str, int]]:
    """Return the machines that somebody asks a price for, as names of profiles with numbers of nodes.

    A GPU by itself is taken as a machine with eight of them. Of such a machine, and of one with another provider's
    name, nobody says how several are connected: it is taken alone. Others are taken up to `most_nodes` times.
    """
    offers = [offer for file in prices for offer in file.offers]
    whole = dict.fromkeys(offer.machine for offer in offers if offer.machine is not None)
    parts = dict.fromkeys(f"{_GPUS}x{offer.gpu}" for offer in offers if offer.machine is None)
    sizes = [2**power for power in range(most_nodes.bit_length())]
    return [(machine, size) for machine in whole for size in sizes] + [(machine, 1) for machine in parts]


def price_of(cluster: Cluster, files: Sequence[PriceFile], *, is_spot: bool = False) -> MachinePrice | None:
    """Return the cheapest price of a cluster, None where no file has its machine or its kind of GPU.

    Offers of the very machine come before those of its GPUs. Prices in other currencies than the first file's are left
    out, for they do not compare.
    """
    if len({gpu.name for gpu in cluster.node.gpus}) > 1:
        return None
    found = []
    for file in files:
        for offer in file.offers:
            hour = offer.spot_per_hour if is_spot else offer.on_demand_per_hour
            if hour is None or offer.gpu != cluster.gpu.name or file.currency != files[0].currency:
                continue
            per_hour = cluster.num_nodes * ceil(cluster.gpus_per_node / offer.num_gpus) * hour
            price = MachinePrice(
                provider=file.provider,
                currency=file.currency,
                offer=offer,
                is_spot=is_spot,
                per_hour=per_hour,
                per_gpu_hour=per_hour / cluster.num_gpus,
            )
            found.append((offer.machine != cluster.name, per_hour, str(price), price))
    return min(found)[-1] if found else None


def known_price(cluster: Cluster, files: Sequence[PriceFile], *, is_spot: bool = False) -> MachinePrice:
    """Return the price of a cluster as `price_of` does. Raises `ProfileError` where none is known."""
    found = price_of(cluster, files, is_spot=is_spot)
    if found is None:
        kind = "spot price" if is_spot else "price"
        raise ProfileError(
            f"no {kind} of {cluster.gpu.title} is known",
            hint="say it with --price N (of a GPU-hour), or give a file of yours with --prices FILE",
        )
    return found
