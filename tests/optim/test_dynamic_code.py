"""The 8-bit code is bitsandbytes', and every number gets the nearest value, by tables and by arithmetic alike."""

import math

import pytest
import torch
from torch import Tensor

from lean_ft.optim.dynamic_code import DynamicCode, code_values

SIGNED = pytest.mark.parametrize("signed", [True, False])
WAYS = pytest.mark.parametrize("way", ["tables", "arithmetic"])


def encode(way: str, signed: bool, numbers: Tensor) -> Tensor:
    code = DynamicCode(signed=signed)
    return code.encode_by_tables(numbers) if way == "tables" else code.encode_by_arithmetic(numbers)


def decode(way: str, signed: bool, codes: Tensor) -> Tensor:
    code = DynamicCode(signed=signed)
    return code.decode_by_tables(codes) if way == "tables" else code.decode_by_arithmetic(codes)


def numbers(signed: bool) -> Tensor:
    """All magnitudes down to far below the code's smallest, its own values, and the ends."""
    torch.manual_seed(0)
    magnitudes = torch.cat([torch.rand(4000), 10 ** (-9 * torch.rand(8000)), torch.tensor([0.0, 1.0, 1e-30])])
    values = code_values(signed)
    return torch.cat([magnitudes, -magnitudes, values]) if signed else torch.cat([magnitudes, values])


@SIGNED
def test_values_are_bitsandbytes_values_bitwise(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(code_values(signed), functional.create_dynamic_map(signed=signed))


@SIGNED
@WAYS
def test_encode_takes_the_nearest_value(signed: bool, way: str) -> None:
    x = numbers(signed)
    distances = (x.double()[:, None] - code_values(signed).double()).abs()
    chosen = distances.gather(1, encode(way, signed, x).long()[:, None])[:, 0]
    # Arithmetic rounds in float32: if two values are equally near within a few parts in 1e7, either is right.
    assert (chosen <= distances.amin(1) + 1e-6 * x.abs().double()).all()


@SIGNED
@WAYS
def test_decode_gives_the_values_and_encode_gives_them_back(signed: bool, way: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(decode(way, signed, codes), code_values(signed), rtol=1e-6, atol=0.0)
    assert torch.equal(encode(way, signed, code_values(signed)), codes)


def test_a_number_that_is_none_gets_some_code() -> None:
    """Its block's scale is NaN, which is what shows; a table's index must not run over its end."""
    assert encode("tables", True, torch.tensor([math.nan, math.inf, -math.nan])).shape == (3,)
