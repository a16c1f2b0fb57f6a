"""Amounts are formatted and parsed."""

import pytest

from lean_ft.system.units import counted, duration, gibibytes, number, parse_bytes


def test_amounts():
    texts = {0.04: "0.0 s", 9.6: "9.6 s", 42.2: "42 s", 200: "3 min 20 s", 7500: "2 h 5 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
    texts = {5: "5 B", 2048: "2.0 KiB", 5 * 2**20: "5.0 MiB", 2**29: "0.50 GiB", 13.25 * 2**30: "13.25 GiB"}
    assert {count: gibibytes(count) for count in texts} == texts
    assert [counted(n, "packed rows") for n in (0, 1, 1200)] == ["0 packed rows", "1 packed row", "1,200 packed rows"]
    assert (number(1.23456), number(None)) == ("1.235", "not finite")


def test_sizes_are_read_with_their_units():
    texts = ("5GB", "2GiB", "1.5 MB", "7B", " 24gib ", "1kib")
    assert [parse_bytes(text, "") for text in texts] == [5 * 10**9, 2**31, 1_500_000, 7, 24 * 2**30, 1024]
    for text in ("5", "GB", "0GB", "5 TB", "five GB", "5iB", "-5GB", ""):
        with pytest.raises(ValueError, match=f"^--budget is '{text}'; expected a number and a unit"):
            parse_bytes(text, "--budget")
