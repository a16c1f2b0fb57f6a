"""Rotary position embeddings and the scalings that stretch them to longer contexts.

Position m turns each pair of features (i, i + head_dim / 2) of a query or key by the angle m * frequency[i]
(Su et al. 2021, https://arxiv.org/abs/2104.09864; the halves are paired as Hugging Face pairs them). A scaling is a
row of `SCALINGS`: a function from the settings to frequencies and a factor on cos and sin. Angles are computed in
float32 whatever the model's dtype: in bfloat16 positions above 256 would no longer be told apart.

Left out until a family needs them: `dynamic`, `yarn` and `longrope`, and rotating only a part of the head.

Shapes: B batch, T tokens, H heads, D features of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Fields that a scaling does not read are None."""

    theta: float
    scaling: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: float | None = None


def _plain_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / rope.theta**exponents  # (D / 2,), radians a position


def _default(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    return _plain_frequencies(rope, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """All frequencies divided by the factor (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""
    assert rope.factor is not None
    return _plain_frequencies(rope, head_dim) / rope.factor, 1.0


def _llama3(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Slow features are stretched by the factor, fast ones kept, those between blended (Llama 3.1)."""
    factor, low, high, original = (getattr(rope, name) for name in REQUIRED_FIELDS["llama3"])
    frequencies = _plain_frequencies(rope, head_dim)
    turns = original * frequencies / (2 * math.pi)  # over the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


# What each scaling computes: (frequencies of shape (D / 2,), the factor on cos and sin).
SCALINGS: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}

# The settings a scaling cannot do without.
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
}


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the scaled frequencies (head_dim / 2,), radians a position."""
    return SCALINGS[rope.scaling](rope, head_dim)[0]


class RotaryEmbedding:
    """Computes cos and sin for positions.

    Deliberately no nn.Module: a buffer would follow `model.to(torch.bfloat16)` and lose the frequencies' precision.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self._frequencies: dict[torch.device, Tensor] = {}
        self._factor = 1.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, each (B, T, D) in `dtype`, of positions (B, T)."""
        frequencies = self._frequencies.get(positions.device)
        if frequencies is None:
            # On a CPU always: other devices round powers differently, and all must agree with the trained model.
            with torch.device("cpu"):
                frequencies, self._factor = SCALINGS[self.rope.scaling](self.rope, self.head_dim)
            frequencies = frequencies.to(positions.device)
            self._frequencies[positions.device] = frequencies
        angles = positions[..., None].float() * frequencies  # (B, T, D / 2)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the features of x (B, T, H, D) by the angles of cos and sin (B, T, D); the result has the dtype of x."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    # Under autocast the residual stream, and so cos and sin, is float32, and x is not.
    return (x * cos.unsqueeze(2) + turned * sin.unsqueeze(2)).to(x.dtype)
