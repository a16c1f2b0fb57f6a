"""Several residual streams, of which each layer computes one and predicts the others (AltUp), and a low-rank branch beside
attention (LAuReL).

A layer predicts all streams from its input by coefficients that depend on the token. Attention and the feed-forward layer
compute the active stream; what they add to its prediction corrects every stream.

Sources: Baykal et al. 2023, https://arxiv.org/abs/2301.13310; Menghani et al. 2024, https://arxiv.org/abs/2411.07501.

Shapes: B batch, T tokens of a row, S streams, D hidden size.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.config import DecoderConfig
from lean_ft.models.layers import residual_norm, wide


class _Coefficients(nn.Linear):
    """A small linear layer that is never quantized. In training its weight is clamped to `limit` from both sides."""

    def __init__(self, in_features: int, out_features: int, limit: float | None = None) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.limit = limit

    def forward(self, input: Tensor) -> Tensor:
        limit = self.limit if self.training else None
        return F.linear(input, self.weight if limit is None else self.weight.clamp(-limit, limit))


class ResidualStreams(nn.Module):
    """How one layer predicts and corrects the streams."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        streams, size = config.streams, config.hidden_size
        assert streams is not None
        self.active, self.scales = streams.active, streams.scales_input
        self.initial = {"correct_output_scale": 0.0}
        scale = torch.zeros(size)
        self.correct_output_scale = nn.Parameter(scale) if self.scales else nn.Buffer(scale)  # stored in either case
        self.correction_coefs = _Coefficients(streams.number, streams.number, streams.coefficient_limit)
        self.prediction_coefs = _Coefficients(streams.number, streams.number**2, streams.coefficient_limit)
        self.modality_router = _Coefficients(size, streams.number)
        self.router_norm = residual_norm(config)

    def _routed(self, x: Tensor) -> Tensor:
        """(..., S) from a stream (..., D)."""
        return wide(self.modality_router(self.router_norm(x) / x.shape[-1])).tanh().to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """Each stream plus a weighted sum of all: (B, T, S, D)."""
        number = streams.shape[-2]
        coefficients = self.prediction_coefs(self._routed(streams[..., self.active, :]))
        return streams + coefficients.unflatten(-1, (number, number)) @ streams

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """The predicted streams, corrected by the active stream (B, T, D) that a layer computed."""
        coefficients = self.correction_coefs(self._routed(computed)) + 1.0  # (B, T, S)
        missed = computed - predicted[..., self.active, :]
        return predicted + coefficients.unsqueeze(-1) * missed.unsqueeze(-2)

    def read(self, streams: Tensor) -> Tensor:
        """The active stream (B, T, D) as the gate of a per-layer input reads it."""
        active = streams[..., self.active, :]
        return active * self.correct_output_scale if self.scales else active

    def add(self, streams: Tensor, added: Tensor) -> Tensor:
        """Add (B, T, D) to all streams but the first."""
        first, others = streams.split((1, streams.shape[-2] - 1), -2)
        return torch.cat((first, others + added.unsqueeze(-2)), -2)


class LowRankBranch(nn.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.linear_left = nn.Linear(config.hidden_size, config.branch_rank, bias=False)
        self.linear_right = nn.Linear(config.branch_rank, config.hidden_size, bias=False)
        self.post_laurel_norm = residual_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


def streams_of(hidden: Tensor, projections: Iterable[nn.Module]) -> Tensor:
    """The streams (B, T, S, D) of embeddings (B, T, D): these, and a projection for each other stream, of equal magnitude."""
    return torch.stack((hidden, *(_as_large_as(hidden, project(hidden)) for project in projections)), -2)


def mean_of_streams(streams: Tensor, projections: Iterable[nn.Module]) -> Tensor:
    """The mean (B, T, D) of the first stream and of projections of the others, of equal magnitude."""
    first, *others = streams.unbind(-2)
    projected = [_as_large_as(first, project(x)) for project, x in zip(projections, others, strict=True)]
    return torch.stack((first, *projected)).mean(0)


def _as_large_as(x: Tensor, projected: Tensor) -> Tensor:
    expected, own = (wide(values).square().mean(-1, keepdim=True) for values in (x, projected))
    return (projected * expected.sqrt() / own.clamp(min=1e-5).sqrt()).to(x.dtype)
