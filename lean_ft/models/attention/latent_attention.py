"""Multi-head latent attention: keys and values of all heads are projections of one small vector per token, the latent.

Each head's query and key have a rotated part and a part without rotation; all heads share the rotated part of the key.
The cache holds the latent and this part. Cached keys and values are never computed: a new token's queries are projected
to the latents' features, attend to the latents as one head, and the result is projected to each head's values.

Source: DeepSeek-V2 technical report, 2024, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C.

Shapes: B batch, T tokens of a row, S attended tokens, H heads, L latent, R rotated features, N others, V value
features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attend, Scoring, Sight, attend, attend_filled
from lean_ft.models.cache import LayerCache
from lean_ft.models.config import DecoderConfig
from lean_ft.models.layers import RMSNorm
from lean_ft.models.rope import rotate_both
from lean_ft.torch_private import is_wrapper_tensor

_NORM_EPS = 1e-6  # transformers ignores config.json's value here


def _growth(cos: Tensor, sin: Tensor) -> Tensor:
    """The factor (B, T, 1, 1) of queries in cos and sin (2, B, T, R) of queries and keys: a turn of keys keeps the
    length of a pair of features, or multiplies it by the factor of the rotary scaling."""
    of_query, of_key = torch.hypot(cos[..., :1].float(), sin[..., :1].float())
    return (of_query / of_key)[..., None]


class LatentAttention(nn.Module):
    """Latent attention with its projections."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        latent, rope, hidden_size = config.latent, config.layers[layer_index].rope, config.hidden_size
        assert latent is not None and rope is not None
        self.latent, self.interleaved = latent, rope.interleaved
        self.query_size = latent.plain_dim + config.head_dim
        queries = config.num_heads * self.query_size
        scale, window = config.attention_scale or self.query_size**-0.5, config.layers[layer_index].window
        self.scoring = Scoring(scale, window)
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
        sight: Sight | None = None,
    ) -> Tensor:
        """Attend from hidden states (B, T, hidden_size); returns the same shape."""
        assert cos is not None and sin is not None
        sizes = [self.latent.plain_dim, self.query_size - self.latent.plain_dim]
        if self.latent.query_rank is None:
            query = self.q_proj(hidden)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query, turned = query.unflatten(-1, (-1, self.query_size)).split(sizes, -1)  # (B, T, H, N) and (B, T, H, R)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split([self.latent.rank, sizes[1]], -1)
        latent, shared = self.kv_a_layernorm(latent)[:, :, None], shared[:, :, None]  # (B, T, 1, L) and (B, T, 1, R)
        turned, shared = rotate_both(turned, shared, cos, sin, self.interleaved)
        if cos.dim() == 4:  # queries grow with the position: the growth of the features without rotation too
            query = query * _growth(cos, sin).to(query.dtype)
        if cache is not None:
            both = torch.cat((latent, shared), -1)
            kept, _ = cache.store(both, both)  # (B, filled, 1, L + R)
            if not cache.owner.starts_empty:
                return self.o_proj(self._attend_to_latents(query, turned, kept, cache).flatten(-2))
            cu_seqlens = None
        query = self._padded(torch.cat((query, turned), -1))
        attended = self.attend(query, *self._keys_and_values(latent, shared), cu_seqlens, self.scoring, None, sight)
        return self.o_proj(attended[..., : self.latent.value_dim].flatten(-2))

    def _attend_to_latents(self, query: Tensor, turned: Tensor, kept: Tensor, cache: LayerCache) -> Tensor:
        """The attention (B, T, H, V) of both parts of the queries to the cache."""
        weight = self.kv_b_proj.weight if type(self.kv_b_proj) is nn.Linear else None
        if weight is None or is_wrapper_tensor(weight):
            # With an adapter or quantized: project each feature of the latents.
            weight = self.kv_b_proj(torch.eye(self.latent.rank, dtype=kept.dtype, device=kept.device)).T
        sizes = [self.latent.plain_dim, self.latent.value_dim]
        to_key, to_value = weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)  # (H, N, L) and (H, V, L)
        query = torch.cat((torch.einsum("bthn,hnl->bthl", query, to_key), turned), -1)
        attended = attend_filled(query, kept, kept, cache, self.scoring, None)[..., : self.latent.rank]
        return torch.einsum("bthl,hvl->bthv", attended, to_value)

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, H, padded size) of latents (B, S, 1, L) and rotated parts of keys (B, S, 1, R)."""
        sizes = [self.latent.plain_dim, self.latent.value_dim]
        key, value = self.kv_b_proj(latent[:, :, 0]).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        key = torch.cat((key, shared.expand(*key.shape[:-1], -1)), -1)
        return self._padded(key), self._padded(value)

    def _padded(self, x: Tensor) -> Tensor:
        """Pad with zeros, because kernels need queries, keys and values of one size."""
        return F.pad(x, (0, max(self.query_size, self.latent.value_dim) - x.shape[-1]))
