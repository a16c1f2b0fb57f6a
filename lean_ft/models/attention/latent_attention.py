"""Multi-head latent attention: keys and values of all heads are made from one small vector a token, the latent.

Each head's query and key have a part that positions turn and one that they do not; the turned part of the key is the same
for all heads. The cache holds the latent and that part, and no keys or values are made of what it holds: a new token's
queries are taken to the latents' features, meet them as one head's keys and values, and what they attended is taken to each
head's values, by the weights as they are in this pass.

Source: DeepSeek-V2 technical report, 2024, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C.

Shapes: B batch, T tokens of a row, S tokens attended to, H heads, L latent, R turned features, N others, V value features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attend, Prefixes, Scoring, attend, attend_filled
from lean_ft.models.cache import LayerCache
from lean_ft.models.config import DecoderConfig
from lean_ft.models.layers import RMSNorm
from lean_ft.models.rope import rotate_both
from lean_ft.torch_private import is_wrapper_tensor

_NORM_EPS = 1e-6  # whatever config.json has, as in transformers


class LatentAttention(nn.Module):
    """Projects to latents, and these to queries, keys and values; attends, and projects back."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        latent, rope, hidden_size = config.latent, config.layers[layer_index].rope, config.hidden_size
        assert latent is not None and rope is not None
        self.latent, self.turns_neighbours = latent, rope.turns_neighbours
        self.query_size = latent.plain_dim + config.head_dim
        queries = config.num_heads * self.query_size
        self.scoring = Scoring(config.attention_scale or self.query_size**-0.5, config.layers[layer_index].window)
        if latent.query_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, latent.query_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, _NORM_EPS)
            self.q_b_proj = nn.Linear(latent.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, latent.rank + config.head_dim, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, _NORM_EPS)
        self.kv_b_proj = nn.Linear(latent.rank, config.num_heads * (latent.plain_dim + latent.value_dim), bias=False)
        self.o_proj = nn.Linear(config.num_heads * latent.value_dim, hidden_size, bias=config.output_bias)
        self.attend: Attend = attend

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        """hidden (B, T, hidden_size); cos and sin as `RotaryEmbedding` gives them; returns (B, T, hidden_size)."""
        assert cos is not None and sin is not None
        sizes = [self.latent.plain_dim, self.query_size - self.latent.plain_dim]
        if self.latent.query_rank is None:
            query = self.q_proj(hidden)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query, turned = query.unflatten(-1, (-1, self.query_size)).split(sizes, -1)  # (B, T, H, N) and (B, T, H, R)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split([self.latent.rank, sizes[1]], -1)
        latent, shared = self.kv_a_layernorm(latent)[:, :, None], shared[:, :, None]  # (B, T, 1, L) and (B, T, 1, R)
        turned, shared = rotate_both(turned, shared, cos, sin, self.turns_neighbours)
        if cache is not None:
            both = torch.cat((latent, shared), -1)
            kept, _ = cache.store(both, both)  # (B, filled, 1, L + R)
            if not cache.owner.starts_empty:
                return self.o_proj(self._attend_to_latents(query, turned, kept, cache).flatten(-2))
            cu_seqlens = None
        query = self._filled(torch.cat((query, turned), -1))
        attended = self.attend(query, *self._keys_and_values(latent, shared), cu_seqlens, self.scoring, None, prefixes)
        return self.o_proj(attended[..., : self.latent.value_dim].flatten(-2))

    def _attend_to_latents(self, query: Tensor, turned: Tensor, kept: Tensor, cache: LayerCache) -> Tensor:
        """The attention (B, T, H, V) of both parts of queries to what the cache holds."""
        weight = self.kv_b_proj.weight if type(self.kv_b_proj) is nn.Linear else None
        if weight is None or is_wrapper_tensor(weight):
            # One with an adapter, or of fewer bits: what it makes of each feature of the latents.
            weight = self.kv_b_proj(torch.eye(self.latent.rank, dtype=kept.dtype, device=kept.device)).T
        sizes = [self.latent.plain_dim, self.latent.value_dim]
        to_key, to_value = weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)  # (H, N, L) and (H, V, L)
        query = torch.cat((torch.einsum("bthn,hnl->bthl", query, to_key), turned), -1)
        attended = attend_filled(query, kept, kept, cache, self.scoring, None)[..., : self.latent.rank]
        return torch.einsum("bthl,hvl->bthv", attended, to_value)

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Of latents (B, S, 1, L) and the turned parts of keys (B, S, 1, R), both (B, S, H, one size)."""
        sizes = [self.latent.plain_dim, self.latent.value_dim]
        key, value = self.kv_b_proj(latent[:, :, 0]).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        key = torch.cat((key, shared.expand(*key.shape[:-1], -1)), -1)
        return self._filled(key), self._filled(value)

    def _filled(self, x: Tensor) -> Tensor:
        """With zeros up to one size of queries, keys and values, which the kernels want; they add nothing."""
        return F.pad(x, (0, max(self.query_size, self.latent.value_dim) - x.shape[-1]))
