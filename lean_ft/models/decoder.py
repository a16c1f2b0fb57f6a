"""One decoder for every dense family: what differs between them is data in `DecoderConfig`.

The parameter names and the rotary convention are Hugging Face's, so loading renames nothing and saving neither.
Norm statistics and rotary angles are computed in float32 whatever the dtype of the weights, as transformers does.

Shapes: B batch, T tokens of a row, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.attention import Attention
from lean_ft.models.cache import KVCache, LayerCache
from lean_ft.models.layers import MLP, RMSNorm
from lean_ft.models.rope import RopeConfig, RotaryEmbedding


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder computes, each fact named by its effect."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # the longest context the model was made for; nothing stops a longer one
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    rope: RopeConfig
    initializer_range: float


class Block(nn.Module):
    """One layer: attention, then the feed-forward layer, each normed on its way in and added to the residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """hidden (B, T, D), cos and sin (B or 1, T, head_dim); returns (B, T, D)."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cu_seqlens, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Trunk(nn.Module):
    """Everything before the output layer; it exists so that parameter names begin as Hugging Face's do."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """A decoder-only language model.

    `source_folder` and `hf_config` remember where it was loaded from and the config.json there, for saving.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head: nn.Linear | None = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        self.tied_output_weight: Callable[[], Tensor] | None = None  # set by memory.tied_gradient
        self.source_folder: Path | None = None
        self.hf_config: dict[str, Any] = {}
        self.generation_config: bytes | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def output_weight(self) -> Tensor:
        """The parameter (V, D) of the output layer; the embedding's own, or what stands for it, where they are tied."""
        if self.tied_output_weight is not None:
            return self.tied_output_weight()
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        return_hidden: bool = False,
    ) -> Tensor:
        """Returns the logits (B, T, V) of the next token, or with `return_hidden` the final norm's output (B, T, D).

        input_ids (B, T) int64, padded on the right where rows are shorter. positions (B, T) int64; where left out they
        count from 0 in each row or document, or go on from the cache. cu_seqlens (documents + 1,) int32: boundaries of
        packed documents in the B * T tokens, row after row; none is longer than a row. With a cache the new tokens go
        on from what it holds, and it is advanced.

        Raises ValueError for a cache together with cu_seqlens, positions or gradients, and where the cache is full.
        """
        num_rows, num_tokens = input_ids.shape
        if cache is not None:
            if cu_seqlens is not None or positions is not None:
                raise ValueError("a cache goes with neither cu_seqlens nor positions: it knows its own positions.")
            if torch.is_grad_enabled():
                raise ValueError("a cache keeps no gradients: call the model inside torch.no_grad().")
            positions = cache.begin(num_tokens)
        elif cu_seqlens is not None:
            _check_documents(cu_seqlens, num_rows, num_tokens)
            if positions is None:
                indices = torch.arange(num_rows * num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
                document = torch.bucketize(indices, cu_seqlens, right=True) - 1
                positions = (indices - cu_seqlens[document]).view(num_rows, num_tokens)
        if positions is None:
            positions = torch.arange(num_tokens, device=input_ids.device)[None]  # (1, T) serves all rows

        hidden = self.model.embed_tokens(input_ids)
        cos, sin = self.rotary(positions, hidden.dtype)
        for i, layer in enumerate(self.model.layers):
            hidden = layer(hidden, cos, sin, cu_seqlens, None if cache is None else cache.layers[i])
        hidden = self.model.norm(hidden)
        if cache is not None:
            cache.advance(num_tokens)
        return hidden if return_hidden else F.linear(hidden, self.output_weight)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Returns an empty cache for `batch_size` rows of up to `capacity` positions."""
        weight = self.output_weight
        return KVCache(
            self.config.num_layers,
            batch_size,
            capacity,
            self.config.num_kv_heads,
            self.config.head_dim,
            weight.dtype,
            weight.device,
        )


def _check_documents(cu_seqlens: Tensor, num_rows: int, num_tokens: int) -> None:
    """Raises ValueError where documents do not end with the batch or one is longer than a row.

    On a GPU the check runs there, so that nothing waits for it, and a failure is a device-side assertion.
    """
    fits = (cu_seqlens.diff() <= num_tokens).all() & (cu_seqlens[-1] == num_rows * num_tokens)
    message = (
        f"cu_seqlens has a document longer than a row of {num_tokens} tokens, or does not end with the batch, at "
        f"{num_rows * num_tokens}."
    )
    if cu_seqlens.is_cuda:
        torch.ops.aten._assert_async.msg(fits, message)
    elif not fits:
        raise ValueError(message)
