"""Rotary position embeddings and the scalings that stretch them to longer contexts.

Position m turns each pair of features (i, i + R / 2) of a query or key by the angle m * frequency[i]
(Su et al. 2021, https://arxiv.org/abs/2104.09864; the halves are paired as Hugging Face pairs them). A scaling is a
row of `SCALINGS`: a function from the settings to frequencies and a factor on cos and sin. Angles are computed in
float32 whatever the model's dtype: in bfloat16 positions above 256 would no longer be told apart.

Two scalings, `dynamic` and `longrope`, choose their frequencies by the length of the text. That is the length of each
row, padding included, or of each packed document by itself: so a document's numbers never depend on its neighbours,
and equal those it gets alone.

Shapes: B batch, T tokens, H heads, D features of a head, R <= D features that are turned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Fields that a scaling does not read stay as they are here."""

    theta: float
    scaling: str = "default"
    head_dim: int | None = None  # of the heads that are turned, where it is not the model's
    turned_share: float = 1.0  # of a head's features, the first ones; the others are left as they are
    turns_neighbours: bool = False  # a pair is features 2 * i and 2 * i + 1, not i and i + R / 2
    in_float32: bool = False  # queries and keys are turned in float32, and rounded to the model's dtype afterwards
    # Queries are multiplied by 1 + query_growth * log(1 + (position + query_growth_start) // query_growth_positions).
    query_growth: float = 0.0
    query_growth_positions: float = math.inf
    query_growth_start: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: float = math.inf
    attention_factor: float = 1.0  # on cos and sin
    long_attention_factor: float | None = None  # the same in texts beyond the original length, where it is another
    beta_fast: float = 32.0  # turns over the original context from which on a frequency is kept
    beta_slow: float = 1.0  # and below which it is divided by the factor
    truncate: bool = True  # whether the bounds between the two are whole features
    moving_share: float = 1.0  # of the frequencies, the fastest ones; the others are 0, so that their features are left
    short_factors: tuple[float, ...] = ()  # (R / 2,) divisors of the frequencies up to the original length
    long_factors: tuple[float, ...] = ()  # and beyond it

    @property
    def depends_on_length(self) -> bool:
        return self.scaling in ("dynamic", "longrope")

    def same_frequencies(self, length: int, other: int) -> bool:
        """Whether texts of the two lengths, in tokens, have the same frequencies."""
        original = self.original_max_positions
        if self.scaling == "longrope":
            return (length > original) == (other > original)
        return self.scaling != "dynamic" or max(length, original) == max(other, original)


def _periods(rope: RopeConfig, size: int) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return rope.theta**exponents  # (R / 2,), positions a radian


def _plain(rope: RopeConfig, size: int) -> Tensor:
    return 1.0 / _periods(rope, size)


def _linear(rope: RopeConfig, size: int) -> Tensor:
    """All frequencies divided by the factor (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""
    return _plain(rope, size) / rope.factor


def _llama3(rope: RopeConfig, size: int) -> Tensor:
    """Slow features are stretched by the factor, fast ones kept, those between blended (Llama 3.1)."""
    frequencies = _plain(rope, size)
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # over the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, size: int) -> Tensor:
    """As llama3, but blended by the feature's index and not by its turns (Peng et al. 2023,
    https://arxiv.org/abs/2309.00071)."""

    def feature_of(turns: float) -> float:
        """The index, not whole, of the feature that makes so many turns over the original context."""
        return size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = feature_of(rope.beta_fast), feature_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    periods = _periods(rope, size)
    indices = torch.arange(len(periods), dtype=torch.float32)
    stretched = ((indices - first) / (last - first)).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * periods) * stretched + 1.0 / periods * (1 - stretched)


def _longrope(rope: RopeConfig, size: int) -> Tensor:
    """Each frequency has two divisors found by search, one for short texts and one for long ones (Ding et al. 2024,
    https://arxiv.org/abs/2402.13753). Returns both rows, (2, R / 2)."""
    divisors = torch.tensor([rope.short_factors, rope.long_factors], dtype=torch.float32)
    return 1.0 / (divisors * _periods(rope, size))


def _proportional(rope: RopeConfig, size: int) -> Tensor:
    """The slowest features are left as they are; they lie in the middle and at the end of a head, and not behind the others
    alone as with a turned share below 1 (Gemma 4)."""
    frequencies = _plain(rope, size) / rope.factor
    frequencies[int(rope.moving_share * size // 2) :] = 0.0
    return frequencies


# The frequencies of each scaling, (R / 2,) for R turned features.
SCALINGS: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,  # up to the original length; `_dynamic` is what comes after
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _dynamic(rope: RopeConfig, size: int, lengths: Tensor) -> Tensor:
    """The base grows with the length of the text, so that its slowest feature turns as far as it did over the
    original context. Returns (..., R / 2) for lengths (...)."""
    lengths = lengths.clamp(min=int(rope.original_max_positions))
    stretch = rope.factor * lengths / rope.original_max_positions - (rope.factor - 1)
    base = rope.theta * stretch ** (size / (size - 2))
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=lengths.device) / size
    return 1.0 / base[..., None] ** exponents


class RotaryEmbedding:
    """Computes cos and sin for positions.

    Deliberately no nn.Module: a buffer would follow `model.to(torch.bfloat16)` and lose the frequencies' precision.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.size = int(head_dim * rope.turned_share)
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, each (B, T, R) in `dtype` or in float32 if the model turns in float32, of positions (B, T).

        Where queries grow with positions, they are (2, B, T, R): those of queries, which grow, and those of keys.

        lengths (B or 1, T or 1) int64: the length of the text that a position belongs to, which some scalings read;
        where left out it ends with the row's last position.
        """
        angles = positions[..., None].float() * self._of(positions, lengths)  # (B, T, R / 2)
        if self.rope.turns_neighbours:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        factor: Any = self.rope.attention_factor
        if self.rope.long_attention_factor is not None:
            factor = torch.where(self._is_long(positions, lengths), self.rope.long_attention_factor, factor)
        if self.rope.query_growth:
            passed = ((positions + self.rope.query_growth_start) / self.rope.query_growth_positions).floor()
            growth = 1 + self.rope.query_growth * torch.log1p(passed)  # (B, T)
            factor = factor * torch.stack((growth, torch.ones_like(growth)))[..., None]
        dtype = torch.promote_types(dtype, torch.float32) if self.rope.in_float32 else dtype
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _of(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """The frequencies, (R / 2,) or (B or 1, T or 1, R / 2)."""
        frequencies = self._frequencies.get(positions.device)
        if frequencies is None:
            # On a CPU always: other devices round powers differently, and all must agree with the trained model.
            with torch.device("cpu"):
                frequencies = SCALINGS[self.rope.scaling](self.rope, self.size)
            frequencies = frequencies.to(positions.device)
            self._frequencies[positions.device] = frequencies
        if not self.rope.depends_on_length:
            return frequencies
        is_long = self._is_long(positions, lengths)
        if self.rope.scaling == "longrope":
            short, long = frequencies
            return torch.where(is_long, long, short)
        if lengths is None:
            lengths = positions.amax(-1, keepdim=True) + 1
        return torch.where(is_long, _dynamic(self.rope, self.size, lengths), frequencies)

    def _is_long(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """Whether texts are beyond the original length, (B or 1, T or 1, 1)."""
        lengths = positions.amax(-1, keepdim=True) + 1 if lengths is None else lengths
        return (lengths > self.rope.original_max_positions)[..., None]


def rotate_both(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, turns_neighbours: bool = False
) -> tuple[Tensor, Tensor]:
    """Turns query (B, T, H, D) and key (B, T, K, D) by what `RotaryEmbedding` gives."""
    (cos_query, cos_key), (sin_query, sin_key) = (x if x.dim() == 4 else (x, x) for x in (cos, sin))
    return rotate(query, cos_query, sin_query, turns_neighbours), rotate(key, cos_key, sin_key, turns_neighbours)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, turns_neighbours: bool = False) -> Tensor:
    """Turns the first R features of x (B, T, H, D) by the angles of cos and sin (B, T, R); the result has the dtype of
    x."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin, turns_neighbours), x[..., size:]), dim=-1)
    if turns_neighbours:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    # cos and sin may be float32 where x is not: under autocast, or if the model turns in float32.
    return (x * cos.unsqueeze(2) + turned * sin.unsqueeze(2)).to(x.dtype)
