"""Rotary position embeddings and their scalings to longer contexts.

Position m rotates each pair of features (i, i + R / 2) of a query or key by the angle m * frequency[i] (Su et al. 2021,
https://arxiv.org/abs/2104.09864; pairs as in Hugging Face's models). `SCALINGS` computes the frequencies of each
scaling. Angles are computed in float32, because bfloat16 cannot distinguish positions above 256.

The scalings `dynamic` and `longrope` choose frequencies by the length of the row (including padding) or of the packed
document, so a document's numbers do not depend on the other documents.

Shapes: B batch, T tokens, H heads, D features of a head, R <= D rotated features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lean_ft.models.config import DecoderConfig


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Fields that a scaling does not use keep their defaults."""

    theta: float
    scaling: str = "default"
    rotary_fraction: float = 1.0  # the fraction of a head's features, from the first, that is rotated
    interleaved: bool = False  # a pair is features 2 * i and 2 * i + 1, not i and i + R / 2
    in_float32: bool = False  # queries and keys are rotated in float32, then rounded to the model's dtype
    # Queries are multiplied by 1 + query_growth * log(1 + position // query_growth_positions).
    query_growth: float = 0.0
    query_growth_positions: float = math.inf
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: float = math.inf
    attention_factor: float = 1.0  # of cos and sin
    beta_fast: float = 32.0  # frequencies with at least this many turns over the original context are kept
    beta_slow: float = 1.0  # frequencies with at most this many turns are divided by the factor
    truncate: bool = True  # the bounds between kept and divided frequencies are rounded to whole features
    # With positions on the axes time, height and width: the axis of each frequency, (R / 2,). The axes of text are
    # equal.
    axes: tuple[int, ...] = ()
    nonzero_fraction: float = 1.0  # the fraction of frequencies, from the fastest, that is not 0
    short_factors: tuple[float, ...] = ()  # (R / 2,) divisors of the frequencies up to the original length
    long_factors: tuple[float, ...] = ()  # (R / 2,) divisors beyond it

    @property
    def depends_on_length(self) -> bool:
        return self.scaling in ("dynamic", "longrope")

    def same_frequencies(self, length: int, other: int) -> bool:
        """Whether documents of these two lengths, in tokens, have the same frequencies."""
        original = self.original_max_positions
        if self.scaling == "longrope":
            return (length > original) == (other > original)
        return self.scaling != "dynamic" or max(length, original) == max(other, original)


def _periods(rope: RopeConfig, size: int) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return rope.theta**exponents  # (R / 2,), positions per radian


def _plain(rope: RopeConfig, size: int) -> Tensor:
    return 1.0 / _periods(rope, size)


def _linear(rope: RopeConfig, size: int) -> Tensor:
    """All frequencies divided by the factor (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""
    return _plain(rope, size) / rope.factor


def _llama3(rope: RopeConfig, size: int) -> Tensor:
    """Divide slow frequencies by the factor, keep fast frequencies, and interpolate in between (Llama 3.1)."""
    frequencies = _plain(rope, size)
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # over the original context
    width = max(
        rope.high_freq_factor - rope.low_freq_factor, 1e-9
    )  # Llama 4 Scout's factors are equal: no interpolation
    kept = ((turns - rope.low_freq_factor) / width).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, size: int) -> Tensor:
    """As llama3, but interpolated by the feature's index (Peng et al. 2023, https://arxiv.org/abs/2309.00071)."""

    def feature_of(turns: float) -> float:
        """The fractional index of the feature with this number of turns over the original context."""
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
    """Frequencies (2, R / 2) for short and for long documents, by divisors found by search (Ding et al. 2024,
    https://arxiv.org/abs/2402.13753)."""
    divisors = torch.tensor([rope.short_factors, rope.long_factors], dtype=torch.float32)
    return 1.0 / (divisors * _periods(rope, size))


def _proportional(rope: RopeConfig, size: int) -> Tensor:
    """The slowest frequencies are 0 (Gemma 4). Unlike with a rotary fraction below 1, the features that are not rotated
    lie in the middle and at the end of a head."""
    frequencies = _plain(rope, size) / rope.factor
    frequencies[int(rope.nonzero_fraction * size // 2) :] = 0.0
    return frequencies


# The frequencies of each scaling, (R / 2,) for R rotated features.
SCALINGS: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,  # up to the original length; `_dynamic` beyond it
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _dynamic(rope: RopeConfig, size: int, lengths: Tensor) -> Tensor:
    """Frequencies (..., R / 2) for lengths (...). The base grows with the length, so that the slowest feature turns as
    far as it did over the original context."""
    lengths = lengths.clamp(min=int(rope.original_max_positions))
    stretch = rope.factor * lengths / rope.original_max_positions - (rope.factor - 1)
    base = rope.theta * stretch ** (size / (size - 2))
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=lengths.device) / size
    return 1.0 / base[..., None] ** exponents


class RotaryEmbedding:
    """Cos and sin of positions. Not an nn.Module, because `model.to(torch.bfloat16)` would round a buffer of
    frequencies.

    A family with another rotation overrides `angles` or `factor`.
    """

    query_growth_start = 0  # added to positions before they are divided by `query_growth_positions`

    @classmethod
    def of(cls, config: "DecoderConfig", rope: RopeConfig, head_dim: int) -> Self:
        """One of the decoder's `rotations`."""
        return cls(rope, head_dim)

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.size = int(head_dim * rope.rotary_fraction)
        self._frequencies: dict[torch.device, Tensor] = {}
        self._axes: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cos and sin (B, T, R) of positions (B, T), or (3, B, T) on three axes, in `dtype`, or in float32 if the model
        rotates in float32.

        If queries grow with positions, the shape is (2, B, T, R), for queries and for keys. lengths (B or 1, T or 1)
        int64: the length of each position's document, which some scalings use; by default the row's last position plus
        1.
        """
        turned = positions[..., None]
        if positions.dim() == 3:
            turned, positions = self._by_frequency(positions), positions[0]
        angles = self.angles(turned, positions, lengths)
        if self.rope.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        factor: Any = self.factor(positions, lengths)
        if self.rope.query_growth:
            passed = ((positions + self.query_growth_start) / self.rope.query_growth_positions).floor()
            growth = 1 + self.rope.query_growth * torch.log1p(passed)  # (B, T)
            factor = factor * torch.stack((growth, torch.ones_like(growth)))[..., None]
        dtype = torch.promote_types(dtype, torch.float32) if self.rope.in_float32 else dtype
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def angles(self, turned: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """The angles (B, T, R / 2) of positions (B, T). turned: the positions, (B, T, 1) or (B, T, R / 2) of each
        frequency."""
        return turned.float() * self._of(positions, lengths)

    def factor(self, positions: Tensor, lengths: Tensor | None) -> float | Tensor:
        """The factor of cos and sin, a number or (B or 1, T or 1, 1)."""
        return self.rope.attention_factor

    def _of(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """The frequencies, (R / 2,) or (B or 1, T or 1, R / 2)."""
        frequencies = self._frequencies.get(positions.device)
        if frequencies is None:
            # Always on the CPU: other devices round powers differently.
            with torch.device("cpu"):
                frequencies = SCALINGS[self.rope.scaling](self.rope, self.size)
            frequencies = frequencies.to(positions.device)
            self._frequencies[positions.device] = frequencies
        if not self.rope.depends_on_length:
            return frequencies
        is_long = self.is_long(positions, lengths)
        if self.rope.scaling == "longrope":
            short, long = frequencies
            return torch.where(is_long, long, short)
        if lengths is None:
            lengths = positions.amax(-1, keepdim=True) + 1
        return torch.where(is_long, _dynamic(self.rope, self.size, lengths), frequencies)

    def _by_frequency(self, positions: Tensor) -> Tensor:
        """The position for each frequency, (B, T, R / 2), of positions (3, B, T)."""
        if positions.device not in self._axes:
            self._axes[positions.device] = torch.tensor(self.rope.axes, device=positions.device)
        return positions[self._axes[positions.device]].movedim(0, -1)

    def is_long(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """Whether documents are longer than the original length, (B or 1, T or 1, 1)."""
        lengths = positions.amax(-1, keepdim=True) + 1 if lengths is None else lengths
        return (lengths > self.rope.original_max_positions)[..., None]


def rotate_both(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate query (B, T, H, D) and key (B, T, K, D) by cos and sin of `RotaryEmbedding`."""
    (cos_query, cos_key), (sin_query, sin_key) = (x if x.dim() == 4 else (x, x) for x in (cos, sin))
    return rotate(query, cos_query, sin_query, interleaved), rotate(key, cos_key, sin_key, interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R features of x (B, T, H, D) by cos and sin (B, T, R). The result has the dtype of x."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin, interleaved), x[..., size:]), dim=-1)
    if interleaved:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)  # by 90 degrees
    else:
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    # cos and sin may be float32 when x is not: under autocast, or if the model rotates in float32.
    return (x * cos.unsqueeze(2) + rotated * sin.unsqueeze(2)).to(x.dtype)
