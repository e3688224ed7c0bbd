"""Machines side by side, as rows of a table and as a page."""

from __future__ import annotations

from html import escape

from paraplan.cost.workload import Workload
from paraplan.report.page import page, paragraph, section, table
from paraplan.report.sections import Column, Row
from paraplan.search.machine_comparison import MachineComparison, MachineOffer
from paraplan.units import DAYS_OF_A_YEAR, format_bytes, format_count, format_run, format_seconds


def machines_title(found: MachineComparison) -> str:
    """Return by what machines are ranked, in words."""
    if not found.is_by_cost:
        return "fastest first"
    return "cheapest first" + (f" ({found.currency})" if found.currency else " (in the currency of --price)")


def machine_rows(
    found: MachineComparison, *, with_links: bool = True
) -> tuple[tuple[Column, ...], tuple[Row, ...], tuple[str, ...]]:
    """Return columns and rows of the table, and the sources of its prices, a sentence each."""
    titles = ["step", "tokens/s", "MFU", "memory", "GPU-hour", "1e9 tokens"]
    if found.tokens is not None:
        titles += ["run", "cost"]
    columns = (Column("machine"), Column("plan"), *(Column(title, is_number=True) for title in titles))
    rows = tuple(
        Row(_cells(offer, has_run=found.tokens is not None), is_chosen=not number and offer.fits)
        for number, offer in enumerate(found.machines)
    )
    priced = [offer for offer in found.machines if offer.price_source is not None and offer.price_url is not None]
    if with_links:
        notes = [f"{offer.machine}: price of {offer.price_source}, {offer.price_url}" for offer in priced]
    else:
        each = "; ".join(f"{offer.machine}, {offer.price_source}" for offer in priced)
        notes = [f"prices: {each}. Their links: --json"] if each else []
    if found.tokens is not None:
        notes[:0] = _over_a_year(found)
        notes.insert(0, f"run: {format_count(found.tokens)} tokens; steps alone, without starts and failures")
    return columns, rows, tuple(notes)


def _over_a_year(found: MachineComparison) -> list[str]:
    """Return which machines would take over a year: of those shown, and of those left out for that."""
    slow = [one for one in found.machines if (one.seconds or 0.0) > DAYS_OF_A_YEAR * 86_400]
    notes = [f"over a year: {', '.join(one.machine for one in slow)}"] if slow else []
    if found.too_long:
        left_out = "; ".join(
            f"{one.machine}, {format_run(one.seconds or 0.0)} for {_money(one.cost)}" for one in found.too_long
        )
        notes.append(f"cheaper and left out, as they take over a year: {left_out}. --days takes in what ends by then")
    return notes


def machines_page(found: MachineComparison, workload: Workload) -> str:
    """Return the comparison as one HTML file."""
    columns, rows, notes = machine_rows(found)
    title = f"{workload.model.name} on {len(found.machines)} machines"
    training = workload.training
    words = f"{training.global_batch_size} sequences of {training.seq_length} tokens, {training.title}"
    return page(
        title=title,
        head=f"<h1>{escape(title)}</h1>{paragraph(words)}",
        sections=[
            section(
                "Machines", table(columns, rows, caption=machines_title(found)), *(paragraph(note) for note in notes)
            )
        ],
    )


def _cells(offer: MachineOffer, *, has_run: bool) -> tuple[str, ...]:
    name = f"{offer.machine}, {offer.num_gpus} GPUs" if offer.num_gpus > 1 else f"{offer.machine}, 1 GPU"
    if not offer.fits or offer.step_time_s is None:
        return (name, (offer.why_not or "no plan fits").partition(";")[0], *[""] * (8 if has_run else 6))
    used = "" if offer.num_gpus_used == offer.num_gpus else f" (on {offer.num_gpus_used} GPUs)"
    cells = [
        name,
        f"{offer.plan}{used}",
        format_seconds(offer.step_time_s),
        format_count(offer.tokens_per_s or 0),
        f"{offer.mfu or 0:.1%}",
        format_bytes(offer.peak_memory_bytes or 0),
        _money(offer.price_per_gpu_hour),
        _money(offer.cost_per_billion_tokens),
    ]
    if has_run:
        cells += [format_run(offer.seconds or 0.0), _money(offer.cost)]
    return tuple(cells)


def _money(amount: float | None) -> str:
    """Return an amount with the three digits that a prediction has."""
    return "" if amount is None else f"{float(f'{amount:.3g}'):,g}"
