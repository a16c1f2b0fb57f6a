"""Context parallelism: a row's tokens are split over ranks; attention sees whole rows for some of the heads.

Each rank computes per-token operations for its own tokens. Before attention, ranks exchange heads for tokens, so that
each rank has all tokens of its heads; afterwards they exchange back. Attention with its documents, windows, caps and
sinks thus runs on whole rows, as on one device, and no rank waits for another's block of keys. If there are fewer
key-value heads than ranks, each one is sent to all ranks whose queries use it.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509. Left out: ring attention, which would
allow more ranks than query heads.

Shapes: B batch, T tokens of a row, n ranks, H heads, D features of a head.
"""

from dataclasses import dataclass

from torch import Tensor

from lean_ft.models import Decoder
from lean_ft.models.attention.attention import Scoring, Sight, attend
from lean_ft.parallel.collectives import all_to_all, gather_tokens, sum_over
from lean_ft.parallel.ranks import CONTEXT, ManyRanks


@dataclass(frozen=True)
class RowTokens:
    """How several ranks split the T tokens of a row."""

    group: str  # name of the group of ranks that share a row
    num_slices: int  # slices of a row's tokens for attention's projections
    place: int  # this rank's slice
    num_ranks: int  # of the group

    @property
    def num_head_parts(self) -> int:
        """Number of ranks that the heads are split over; a KV cache has one rank's heads."""
        return self.num_ranks // self.num_slices

    def of_attention(self, values: Tensor) -> Tensor:
        """From values for each token (B or 1, T), those of the tokens that a layer projects here for attention."""
        return values.chunk(self.num_slices, 1)[self.place] if values.shape[1] > 1 else values

    def gather(self, values: Tensor) -> Tensor:
        """From values of this rank's tokens (B, T / n, ...), those of all tokens."""
        return gather_tokens(values, self.group, self.num_ranks)

    def sum(self, values: Tensor) -> Tensor:
        """The differentiable sum over the ranks that share a row."""
        return sum_over(values, self.group)


@dataclass(frozen=True)
class HeadExchange:
    """Replaces `attend` for rows whose tokens are split over the ranks of a group."""

    group: str
    size: int
    place: int

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None,
        scoring: Scoring,
        sinks: Tensor | None,
        sight: Sight | None = None,
    ) -> Tensor:
        """query (B, T / n, H, D), key and value (B, T / n, K, D) for this rank's tokens; returns (B, T / n, H, D)."""
        copies = max(1, self.size // key.shape[2])
        if copies > 1:
            key, value = key.repeat_interleave(copies, 2), value.repeat_interleave(copies, 2)
        query, key, value = (self._to_heads(x) for x in (query, key, value))
        own_sinks = None if sinks is None else sinks.chunk(self.size)[self.place]
        return self._to_tokens(attend(query, key, value, cu_seqlens, scoring, own_sinks, sight))

    def _to_heads(self, x: Tensor) -> Tensor:
        """(B, T / n, H, D) to (B, T, H / n, D)."""
        by_rank = x.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)  # (n * T / n, B, H / n, D)
        return self._exchanged(by_rank).transpose(0, 1).contiguous()

    def _to_tokens(self, x: Tensor) -> Tensor:
        """(B, T, H / n, D) to (B, T / n, H, D)."""
        received = self._exchanged(x.transpose(0, 1))  # (n * T / n, B, H / n, D), each rank's heads
        return received.unflatten(0, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, rows: Tensor) -> Tensor:
        even = [rows.shape[0] // self.size] * self.size
        return all_to_all(rows, even, even, self.group)


def check_heads(model: Decoder, num_context: int, num_tensor: int) -> None:
    """Raise ValueError unless the heads of each of `num_tensor` ranks can be exchanged over `num_context` ranks."""
    config = model.config
    unsupported = {"recurrent layers": config.has_states, "learned positions": config.position_row is not None}
    for what in (what for what, is_present in unsupported.items() if is_present):
        raise ValueError(
            f"parallel.context={num_context} does not support this model's {what}. Set parallel.shard instead."
        )
    num_heads, *kv_heads = (n // num_tensor for n in (config.num_heads, *config.kv_head_counts))
    if num_heads % num_context or any(n % num_context and num_context % n for n in kv_heads):
        after = f" (before parallel.tensor={num_tensor} divides them)" if num_tensor > 1 else ""
        raise ValueError(
            f"parallel.context={num_context} splits attention heads evenly, and the model has {config.num_heads} query "
            f"and {' and '.join(map(str, config.kv_head_counts))} key-value heads{after}. Set a parallel.context that "
            "divides the query heads, and that divides or is a multiple of the key-value heads."
        )


def exchange_heads(model: Decoder, ranks: ManyRanks) -> None:
    """Make every layer's attention exchange heads for tokens."""
    group = ranks.groups[CONTEXT]
    exchange = HeadExchange(group.group_name, group.size(), group.rank())
    for layer in model.layers:
        layer.get_submodule("self_attn").attend = exchange  # type: ignore[assignment]
