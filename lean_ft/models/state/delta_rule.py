"""The gated delta rule as a mixer: projections, a short convolution, the state, and a gated norm.

Source: Yang et al. 2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464.

Shapes: B rows, T tokens of a row, G heads of queries and keys, H heads of values, K and V features of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.cache import StateCache
from lean_ft.models.config import DecoderConfig, DeltaRuleConfig
from lean_ft.models.layers import RMSNorm, gated, wide
from lean_ft.models.state.convolution import Convolution
from lean_ft.models.state.decoding import Rates, Token, decodes, gated_norm, recurrent_step
from lean_ft.models.state.state_mixer import Recurrence, StateMixer, log_decay_of, read_state


def _draw_decays(decays: Tensor) -> None:
    decays.copy_(torch.empty_like(decays, dtype=torch.float32).uniform_(0.01, 16.0).log_())


class GatedDeltaRule(StateMixer):
    """The gated delta rule with its projections, convolution, norm and gate."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.initial = {"dt_bias": 1.0, "A_log": _draw_decays}
        mixer, hidden_size = config.layers[layer_index].mixer, config.hidden_size
        assert isinstance(mixer, DeltaRuleConfig)
        self.config = mixer
        self.key_size, self.value_size = mixer.num_key_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
        num_channels, num_heads = 2 * self.key_size + self.value_size, mixer.num_heads
        if mixer.fused_projections:
            self.in_proj_qkvz = nn.Linear(hidden_size, num_channels + self.value_size, bias=False)
            self.in_proj_ba = nn.Linear(hidden_size, 2 * num_heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(hidden_size, num_channels, bias=False)
            self.in_proj_z = nn.Linear(hidden_size, self.value_size, bias=False)
            self.in_proj_b = nn.Linear(hidden_size, num_heads, bias=False)
            self.in_proj_a = nn.Linear(hidden_size, num_heads, bias=False)
        self.conv1d = Convolution(num_channels, mixer.num_taps, activation=config.activation)
        self.dt_bias, self.A_log = nn.Parameter(torch.empty(num_heads)), nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(mixer.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(self.value_size, hidden_size, bias=False)

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, cache: StateCache | None) -> Tensor:
        mixed, gate, beta, step = self._projected(x)  # (B, T, 2 G K + H V), (B, T, H V), (B, T, H) twice
        mixed = self.conv1d(mixed, cu_seqlens, cache)
        query, key, value = mixed.split((self.key_size, self.key_size, self.value_size), -1)
        query, key = (part.unflatten(-1, (-1, self.config.key_dim)) for part in (query, key))
        value = value.unflatten(-1, (-1, self.config.value_dim))
        if cache is not None and decodes(x, cache):
            token, rates = Token(query, key, value, step, beta), Rates(self.A_log, self.dt_bias)
            read = recurrent_step(token, rates, cache.state_of(x), corrects=True).flatten(-2)
            norm, num_heads = self.norm, self.config.num_heads
            return self.out_proj(gated_norm(read, gate, norm.weight, norm.eps, num_heads, gates_first=False))
        log_decay = log_decay_of(self.A_log, F.softplus(wide(step) + self.dt_bias))
        inputs = Recurrence(query, key, value, log_decay, beta.sigmoid())
        read = read_state(inputs, cu_seqlens, cache, corrects=True)
        read = gated(gate.unflatten(-1, (-1, self.config.value_dim)), self.norm(read), "silu")
        return self.out_proj(read.flatten(-2))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Concatenated queries, keys and values; the gate; betas; and steps, which determine the decays."""
        if not self.config.fused_projections:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        # For each key head: its query, its key, and the values and gates of the heads that share them.
        num_key_heads, group = self.config.num_key_heads, self.config.num_heads // self.config.num_key_heads
        sizes = 2 * (self.config.key_dim,) + 2 * (group * self.config.value_dim,)
        parts = self.in_proj_qkvz(x).unflatten(-1, (num_key_heads, -1)).split(sizes, -1)
        query, key, value, gate = (part.flatten(-2) for part in parts)
        beta, step = (part.flatten(-2) for part in self.in_proj_ba(x).unflatten(-1, (num_key_heads, -1)).chunk(2, -1))
        return torch.cat((query, key, value), -1), gate, beta, step
