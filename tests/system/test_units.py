"""Amounts in words, and back."""

import pytest

from lean_ft.system.units import duration, gibibytes, number, parse_bytes


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.6, "9.6 s"), (42.2, "42 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(5, "5 B"), (2048, "2.0 KiB"), (5 * 2**20, "5.0 MiB"), (2**29, "0.50 GiB"), (13.25 * 2**30, "13.25 GiB")],
)
def test_gibibytes(count, text):
    assert gibibytes(count) == text


def test_a_number_that_was_not_finite_is_told_in_words():
    assert (number(1.23456), number(None)) == ("1.235", "not finite")


def test_sizes_are_read_with_their_units():
    texts = ("5GB", "2GiB", "1.5 MB", "7B", " 24gib ", "1kib")
    assert [parse_bytes(text, "") for text in texts] == [5 * 10**9, 2**31, 1_500_000, 7, 24 * 2**30, 1024]


@pytest.mark.parametrize("text", ["5", "GB", "0GB", "5 TB", "five GB", "5iB", "-5GB", ""])
def test_what_is_no_size_is_refused_by_its_option(text):
    with pytest.raises(ValueError, match=r"^--budget is '.*'; expected a number and a unit: 24GiB, 5GB, 800MB\.$"):
        parse_bytes(text, "--budget")
