"""The 8-bit code is bitsandbytes', and every number gets the nearest value, by tables and by arithmetic alike."""

import math

import pytest
import torch
from torch import Tensor

from lean_ft.optim.dynamic_code import ArithmeticCode, DynamicCode, TableCode, code_values

CPU = torch.device("cpu")
SIGNED = pytest.mark.parametrize("signed", [True, False])
CODES = pytest.mark.parametrize("kind", ["table", "arithmetic"])


def make(kind: str, signed: bool) -> DynamicCode:
    return TableCode(signed=signed, device=CPU) if kind == "table" else ArithmeticCode(signed=signed)


def numbers(signed: bool) -> Tensor:
    """All magnitudes down to far below the code's smallest, its own values, and the ends."""
    torch.manual_seed(0)
    magnitudes = torch.cat([torch.rand(30_000), 10 ** (-9 * torch.rand(60_000)), torch.tensor([0.0, 1.0, 1e-30])])
    values = code_values(signed)
    return torch.cat([magnitudes, -magnitudes, values]) if signed else torch.cat([magnitudes, values])


@SIGNED
def test_values_are_bitsandbytes_values_bitwise(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(code_values(signed), functional.create_dynamic_map(signed=signed))


@SIGNED
@CODES
def test_encode_takes_the_nearest_value(signed: bool, kind: str) -> None:
    x = numbers(signed)
    distances = (x.double()[:, None] - code_values(signed).double()).abs()
    chosen = distances.gather(1, make(kind, signed).encode(x).long()[:, None])[:, 0]
    # Arithmetic rounds in float32, so where two values are equally near to a few parts in 1e7, either will do.
    assert (chosen <= distances.amin(1) + 1e-6 * x.abs().double()).all()


@SIGNED
@CODES
def test_decode_gives_the_values_and_encode_gives_them_back(signed: bool, kind: str) -> None:
    code = make(kind, signed)
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(code.decode(codes), code_values(signed), rtol=1e-6, atol=0.0)
    assert torch.equal(code.encode(code_values(signed)), codes)


@SIGNED
def test_tables_and_arithmetic_agree(signed: bool) -> None:
    x = numbers(signed)
    differing = make("table", signed).encode(x) != make("arithmetic", signed).encode(x)
    assert differing.float().mean() < 1e-4


def test_shapes_are_kept_and_numbers_unchanged() -> None:
    x = torch.rand(4, 6).t()
    before = x.clone()
    for kind in ("table", "arithmetic"):
        codes = make(kind, signed=False).encode(x)
        assert codes.shape == x.shape
        assert make(kind, signed=False).decode(codes).shape == x.shape
    assert torch.equal(x, before)


def test_a_number_that_is_none_gets_some_code() -> None:
    """Its block's scale is NaN, which is what shows; a table's index must not run over its end."""
    assert make("table", signed=True).encode(torch.tensor([math.nan, math.inf, -math.nan])).shape == (3,)
