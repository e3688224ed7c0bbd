from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.units import (
    format_bandwidth,
    format_bytes,
    format_bytes_apart,
    format_count,
    format_days,
    format_digits,
    format_flops,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (85_520_809_984, "79.6 GiB"), (2**40, "1.00 TiB")],
)
def test_bytes_are_shown_in_binary_units(num_bytes: int | None, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_need_is_never_shown_as_the_limit_that_it_exceeds() -> None:
    assert format_bytes_apart(73.94 * 2**30, 73.91 * 2**30) == ("73.94 GiB", "73.91 GiB")
    assert format_bytes_apart(913 * 2**30, 73.91 * 2**30) == ("913 GiB", "73.9 GiB")
    assert format_bytes_apart(80 * 2**30, 80 * 2**30) == ("80.0 GiB", "80.0 GiB")
    needed, limit = format_bytes_apart(80 * 2**30 + 1, 80 * 2**30)
    assert needed != limit


def test_bandwidth_is_shown_in_decimal_gigabytes() -> None:
    assert format_bandwidth(450e9) == "450 GB/s"
    assert format_bandwidth(12.5e9) == "12.5 GB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-6, "2.50 us"), (0.0032, "3.20 ms"), (1.5, "1.50 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")],
)
def test_seconds_are_shown_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_and_rates_are_scaled_by_thousands() -> None:
    assert format_count(8_030_261_248) == "8.03 B"
    assert format_count(999) == "999"
    assert [format_days(value) for value in (1, 0.001, 5930.4)] == ["1 day", "0.001 days", "5,930 days"]
    assert [format_digits(value) for value in (5930.4, 1234567.0, 0.001234, 12.0)] == [
        "5,930",
        "1,230,000",
        "0.00123",
        "12",
    ]
    assert format_count(548.189) == "548"
    assert format_flops(989e12) == "989 TFLOP/s"


@pytest.mark.parametrize(("text", "num_bytes"), [("70GiB", 70 * 2**30), ("80 GB", 80 * 10**9), ("1024", 1024)])
def test_amounts_of_memory_are_read_with_their_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "70 Gb/s", "-1GiB", "7e10"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of memory"):
        parse_bytes(text)


@given(st.integers(min_value=2**10, max_value=2**45))
def test_shown_bytes_read_back_within_their_three_digits(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)
