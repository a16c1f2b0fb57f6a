"""Mamba-2 as a mixer: one projection, a short convolution, a decaying state, and a gate.

A token's step determines how much the state decays and how much of the token is written. The state's output for the
queries (C in the paper; keys are B) is added to the value times a factor per head, then gated, and normed in groups of
features before the gate, after it, or not at all.

Source: Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

Shapes: B rows, T tokens of a row, G heads of queries and keys, H heads of values, K and V features of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.cache import StateCache
from lean_ft.models.config import DecoderConfig, Mamba2Config
from lean_ft.models.layers import RMSNorm, gated, in_dtype, wide
from lean_ft.models.state.convolution import Convolution
from lean_ft.models.state.decoding import Rates, Token, decodes, gated_norm, recurrent_step
from lean_ft.models.state.state_mixer import Recurrence, StateMixer, log_decay_of, read_state
from lean_ft.system.autograd import AutogradContext


class Mamba2(StateMixer):
    """Mamba-2 with its projections, convolution, gate and norm."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.initial = {
            "dt_bias": 1.0,
            "D": 1.0,
            "A_log": lambda decays: decays.copy_(torch.arange(1.0, len(decays) + 1).log_()),
        }
        mixer, hidden_size = config.layers[layer_index].mixer, config.hidden_size
        assert isinstance(mixer, Mamba2Config)
        self.config = mixer
        self.key_size, self.value_size = mixer.num_key_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
        projected = self.value_size + mixer.num_channels + mixer.num_heads
        self.in_proj = nn.Linear(hidden_size, projected, bias=mixer.in_bias)
        self.conv1d = Convolution(mixer.num_channels, mixer.num_taps, mixer.convolution_bias, mixer.activation)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(mixer.num_heads)) for _ in range(3))
        if mixer.norm is not None:
            self.norm = RMSNorm(self.value_size, config.norm_eps, num_groups=mixer.num_key_heads)
        self.out_proj = nn.Linear(self.value_size, hidden_size, bias=mixer.out_bias)

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, cache: StateCache | None) -> Tensor:
        config, sizes = self.config, (self.value_size, self.config.num_channels, self.config.num_heads)
        gate, mixed, step = self.projected(x).split(sizes, -1)
        mixed = self.conv1d(mixed, cu_seqlens, cache)
        value, key, query = mixed.split((self.value_size, self.key_size, self.key_size), -1)
        value, key, query = (
            part.unflatten(-1, (heads, -1))
            for part, heads in ((value, config.num_heads), (key, config.num_key_heads), (query, config.num_key_heads))
        )
        if cache is not None and decodes(x, cache):
            token = Token(query, key, value, step, step)
            rates = Rates(self.A_log, self.dt_bias, self.D, *config.step_limits)
            read = recurrent_step(token, rates, cache.state_of(x), corrects=False).flatten(-2)
            weight, eps = (None, 0.0) if config.norm is None else (self.norm.weight, self.norm.eps)
            gates_first = config.norm == "after_gate"
            return self.out_proj(gated_norm(read, gate, weight, eps, config.num_key_heads, gates_first))
        step = F.softplus(wide(step) + self.dt_bias).clamp(*config.step_limits)  # (B, T, H)
        inputs = Recurrence(query, key, value, log_decay_of(self.A_log, step), step)
        read = read_state(inputs, cu_seqlens, cache, corrects=False)
        read = _Skip.apply(read, value, self.D).flatten(-2)
        if config.norm == "after_gate":
            read = _GatedNorm.apply(read, gate, self.norm.weight, self.norm.eps, config.num_key_heads)
        else:
            read = gated(gate, read if config.norm is None else self.norm(read), "silu")
        return self.out_proj(read)

    def projected(self, x: Tensor) -> Tensor:
        """The gates, values, keys, queries and steps of x (B, T, D), side by side."""
        return self.in_proj(x)


class _Skip(torch.autograd.Function):
    """read + weight * value in float32, for (B, T, H, V) and a weight per head."""

    @staticmethod
    def forward(ctx: AutogradContext[Tensor, Tensor], read: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return in_dtype(torch.addcmul(wide(read), wide(value), wide(weight)[:, None]), read.dtype)

    @staticmethod
    def backward(ctx: AutogradContext[Tensor, Tensor], *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        value, weight = ctx.saved_tensors
        grad_weight = (wide(grad) * value).sum((0, 1, 3)).to(weight.dtype)
        return grad, (wide(grad) * weight[:, None]).to(value.dtype), grad_weight


_GatedNormContext = AutogradContext[Tensor, Tensor, Tensor, Tensor]  # x, gate, weight, scale


class _GatedNorm(torch.autograd.Function):
    """norm(x * silu(gate)) in float32, in groups of features of x (B, T, H V); keeps only x and gate for backward."""

    @staticmethod
    def forward(ctx: _GatedNormContext, x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
        product = (wide(x) * F.silu(wide(gate))).unflatten(-1, (num_groups, -1))
        scale = torch.rsqrt(product.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gate, weight, scale)
        return in_dtype((product * scale).flatten(-2) * weight, x.dtype)

    @staticmethod
    def backward(ctx: _GatedNormContext, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,) = grads
        x, gate, weight, scale = ctx.saved_tensors
        open_gate, wide_gate, grad = F.silu(wide(gate)), wide(gate), wide(grad)
        normed = (wide(x) * open_gate).unflatten(-1, (scale.shape[-2], -1)) * scale
        grad_weight = (grad * normed.flatten(-2)).flatten(0, -2).sum(0).to(weight.dtype)
        grad = (grad * weight).view(normed.shape)
        grad = (scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))).flatten(-2)
        grad_gate = torch.ops.aten.silu_backward(grad * x, wide_gate)
        return (grad * open_gate).to(x.dtype), grad_gate.to(gate.dtype), grad_weight, None, None
