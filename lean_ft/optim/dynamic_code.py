"""The 8-bit dynamic code: 256 values for numbers in [-1, 1] or [0, 1], dense near 1 and reaching down to 1e-7.

This is bitsandbytes' `dynamic` code, bit for bit (Dettmers 2016, https://arxiv.org/abs/1511.04561; Dettmers et al.
2022, https://arxiv.org/abs/2110.02861), so its kernels read states written here and vice versa. Decade i = 0..6 is the
interval from 10^(i-7) to 10^(i-6), divided into P equal bins whose centers are the values: P = 2^i in the signed code,
where each value also has its negative, and P = 2^(i+1) in the unsigned code. With 0 and 1 that makes 256 values.
Number the magnitudes in ascending order with k = 0 for zero (k = 1 in the unsigned code); decade i has k = P .. 2P - 1:

    magnitude(k) = 10^(i-6) * (0.9 * (k + 0.5) / P - 0.8)

A number becomes the nearest value. Searching 255 midpoints takes 33 ns per number in torch. Two faster methods give the
same codes: tables in eager mode (1 to 2 ns), and arithmetic that Inductor vectorizes.
"""

import torch
from torch import Tensor

NUM_DECADES = 7
# Low float32 bits that a table index drops. A table bin is 1/256 of a binade, narrower than the gap between midpoints.
_BIN_SHIFT = 15


def code_values(signed: bool) -> Tensor:
    """The 256 values in ascending order, float32, bitwise as bitsandbytes computes them."""
    edges = [torch.linspace(0.1, 1.0, _num_bins(i, signed) + 1) for i in range(NUM_DECADES)]
    magnitudes = torch.cat([10.0 ** (i - 6) * ((edge[:-1] + edge[1:]) / 2) for i, edge in enumerate(edges)])
    mirrored = -magnitudes.flip(0) if signed else magnitudes[:0]
    zero, unit = magnitudes.new_zeros(1), magnitudes.new_ones(1)
    return torch.cat([mirrored, zero, magnitudes, unit])


def _num_bins(decade: int, signed: bool) -> int:
    return 2**decade if signed else 2 ** (decade + 1)


class DynamicCode:
    """float32 <-> uint8, elementwise, for numbers within the code's range."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self.zero_code = 127 if signed else 0
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def encode(self, numbers: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        return self.encode_by_arithmetic(numbers) if compiling else self.encode_by_tables(numbers)

    def decode(self, codes: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        return self.decode_by_arithmetic(codes) if compiling else self.decode_by_tables(codes)

    def smallest_magnitude(self) -> float:
        return _lowest(0, self.signed)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The values (256,), the midpoint above each, and for each table bin the code of its lower end."""
        if device not in self._tables:
            values = code_values(self.signed)
            midpoints = (values[1:] + values[:-1]) / 2
            patterns = (torch.arange(2 ** (32 - _BIN_SHIFT)) << _BIN_SHIFT).to(torch.int32)
            ends = torch.stack([patterns, patterns | (2**_BIN_SHIFT - 1)]).view(torch.float32).nan_to_num(0.0)
            lower_codes = torch.searchsorted(midpoints, ends.amin(0)).to(device, torch.uint8)
            next_midpoints = torch.cat([midpoints, midpoints.new_tensor([float("inf")])])
            self._tables[device] = values.to(device), next_midpoints.to(device), lower_codes
        return self._tables[device]

    def encode_by_tables(self, numbers: Tensor) -> Tensor:
        """The upper 17 bits of a float32 select a table bin, which holds at most one midpoint.

        The table gives the code of the bin's lower end; the number gets the next code if it is above the midpoint.
        NaN gets an arbitrary code; its block's scale is NaN.
        """
        _, next_midpoints, lower_codes = self.tables(numbers.device)
        index = numbers.reshape(-1).view(torch.int32).bitwise_right_shift(_BIN_SHIFT)
        index.bitwise_and_(2 ** (32 - _BIN_SHIFT) - 1)
        codes = lower_codes.index_select(0, index)
        midpoints = next_midpoints.index_select(0, index.copy_(codes))
        return codes.add_(numbers.reshape(-1) > midpoints).view(numbers.shape)

    def decode_by_tables(self, codes: Tensor) -> Tensor:
        values, _, _ = self.tables(codes.device)
        return values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    # Comparisons and one linear map per decade. Constants are computed where they are used, because Dynamo turns float
    # attributes into graph inputs.

    def encode_by_arithmetic(self, numbers: Tensor) -> Tensor:
        signed = self.signed
        zero_k, one_k = (0.0, 128.0) if signed else (1.0, 256.0)
        magnitude = numbers.abs() if signed else numbers
        starts = [magnitude > _lower_threshold(decade, signed) for decade in range(NUM_DECADES)]
        p = _choose(starts, [float(_num_bins(decade, signed)) for decade in range(NUM_DECADES)])
        bins_per_unit = _choose(starts, [1.0 / _bin_width(decade, signed) for decade in range(NUM_DECADES)])
        # The last bin of a decade extends to the midpoint with the next decade's first value.
        k = torch.minimum(torch.floor(magnitude * bins_per_unit + p * (8 / 9)), 2 * p - 1)
        k = torch.where(starts[0], k, zero_k)
        k = torch.where(magnitude > (1.0 + _highest(NUM_DECADES - 1, signed)) / 2, one_k, k)
        if signed:  # -1 has no code
            k = self.zero_code + torch.where(numbers < 0, -k.clamp(max=one_k - 1), k)
        return (k - zero_k).to(torch.uint8)

    def decode_by_arithmetic(self, codes: Tensor) -> Tensor:
        signed = self.signed
        zero_k, one_k = (0.0, 128.0) if signed else (1.0, 256.0)
        offset_k = codes.float() - (self.zero_code if signed else -zero_k)
        k = offset_k.abs() if signed else offset_k
        starts = [k >= float(_num_bins(decade, signed)) for decade in range(NUM_DECADES)]
        width = _choose(starts, [_bin_width(decade, signed) for decade in range(NUM_DECADES)])
        offset = [0.8 * 10.0 ** (decade - 6) - 0.5 * _bin_width(decade, signed) for decade in range(NUM_DECADES)]
        magnitude = torch.where(starts[0], k * width - _choose(starts, offset), 0.0)
        magnitude = torch.where(k >= one_k, 1.0, magnitude)
        return torch.where(offset_k < 0, -magnitude, magnitude) if signed else magnitude


def _bin_width(decade: int, signed: bool) -> float:
    return 0.9 * 10.0 ** (decade - 6) / _num_bins(decade, signed)


def _lowest(decade: int, signed: bool) -> float:
    return 10.0 ** (decade - 7) + 0.5 * _bin_width(decade, signed)


def _highest(decade: int, signed: bool) -> float:
    return 10.0 ** (decade - 6) - 0.5 * _bin_width(decade, signed)


def _lower_threshold(decade: int, signed: bool) -> float:
    """Midpoint between the decade's first value and the value before it."""
    before = _highest(decade - 1, signed) if decade else 0.0
    return (before + _lowest(decade, signed)) / 2


def _choose(starts: list[Tensor], constants: list[float]) -> Tensor:
    """The constant of the highest decade that was reached, or the first constant."""
    chosen = torch.where(starts[1], constants[1], constants[0])
    for reached, constant in zip(starts[2:], constants[2:], strict=True):
        chosen = torch.where(reached, constant, chosen)
    return chosen
