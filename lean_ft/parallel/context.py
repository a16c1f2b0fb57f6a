"""Context parallelism: the tokens of a row are cut over ranks, and attention gets whole rows of some of the heads.

All that a layer computes of each token by itself, it computes of the tokens that are here. Around attention the ranks
exchange heads for tokens: each sends the others their heads of its tokens, so that it has all tokens of its own heads, and
afterwards the reverse. So attention itself, its documents, windows, caps and sinks, is one device's, on whole rows; nothing
is said twice, and no rank waits for another's block of keys. Where there are fewer key-value heads than ranks, each is sent
to all the ranks whose queries see it.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509. Left out: rings, which could go beyond as
many ranks as there are query heads.

Shapes: B batch, T tokens of a row, n ranks, H heads, D features of a head.
"""

from dataclasses import dataclass

from torch import Tensor

from lean_ft.models import Decoder
from lean_ft.models.attention.attention import Prefixes, Scoring, attend
from lean_ft.parallel.collectives import all_to_all, gather_tokens, sum_over
from lean_ft.parallel.ranks import CONTEXT, ManyRanks


@dataclass
class RowTokens:
    """Of a row's T tokens the ones that are here, where several ranks share a row; `Decoder.tokens`."""

    group: str  # of the ranks that share a row
    num_slices: int  # that a row's tokens are cut into for attention's projections
    place: int  # which of them is here
    num_ranks: int  # of the group
    rows_are_whole: bool = False
    """Whether the pass under way has all tokens of its rows here, as every pass with a cache; set as it begins."""

    @property
    def num_head_parts(self) -> int:
        """Over how many ranks heads are cut, of which a cache here has one rank's."""
        return self.num_ranks // self.num_slices

    def of_attention(self, values: Tensor) -> Tensor:
        """Of something of each token (B or 1, T) that of the tokens which a layer here projects for attention."""
        return values.chunk(self.num_slices, 1)[self.place] if values.shape[1] > 1 else values

    def gather(self, values: Tensor) -> Tensor:
        """Of something of each token here (B, T / n, ...) that of all tokens."""
        return gather_tokens(values, self.group, self.num_ranks)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share a row, through which gradients go."""
        return sum_over(values, self.group)


@dataclass(frozen=True)
class HeadExchange:
    """Attention of a row whose tokens are cut over the ranks of a group, in the place of `attend`."""

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
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        """query (B, T / n, H, D), key and value (B, T / n, K, D) of this rank's tokens; returns (B, T / n, H, D)."""
        copies = max(1, self.size // key.shape[2])
        if copies > 1:
            key, value = key.repeat_interleave(copies, 2), value.repeat_interleave(copies, 2)
        query, key, value = (self._to_heads(x) for x in (query, key, value))
        own_sinks = None if sinks is None else sinks.chunk(self.size)[self.place]
        return self._to_tokens(attend(query, key, value, cu_seqlens, scoring, own_sinks, prefixes))

    def _to_heads(self, x: Tensor) -> Tensor:
        """(B, T / n, H, D) to (B, T, H / n, D)."""
        by_rank = x.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)  # (n * T / n, B, H / n, D)
        return self._exchanged(by_rank).transpose(0, 1).contiguous()

    def _to_tokens(self, x: Tensor) -> Tensor:
        """(B, T, H / n, D) to (B, T / n, H, D)."""
        received = self._exchanged(x.transpose(0, 1))  # (n * T / n, B, H / n, D), from each rank its heads
        return received.unflatten(0, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, rows: Tensor) -> Tensor:
        even = [rows.shape[0] // self.size] * self.size
        return all_to_all(rows, even, even, self.group)


def check_heads(model: Decoder, num_context: int, num_tensor: int) -> None:
    """Raises ValueError unless the heads that each of `num_tensor` ranks has can be exchanged over `num_context`."""
    config = model.config
    num_heads, *kv_heads = (n // num_tensor for n in (config.num_heads, *config.numbers_of_kv_heads))
    among = f", {num_tensor} parts of which parallel.tensor makes" if num_tensor > 1 else ""
    if num_heads % num_context or any(n % num_context and num_context % n for n in kv_heads):
        raise ValueError(
            f"parallel.context={num_context} gives each process as many heads of attention, and the model has "
            f"{config.num_heads} query and {' and '.join(map(str, config.numbers_of_kv_heads))} key-value heads{among}: the query heads have to "
            "be a multiple of it, and the key-value heads a multiple or a divisor. Set another parallel.context."
        )


def exchange_heads(model: Decoder, ranks: ManyRanks) -> None:
    """Has every layer attend by exchanging heads for tokens."""
    group = ranks.groups[CONTEXT]
    exchange = HeadExchange(group.group_name, group.size(), group.rank())
    for layer in model.layers:
        layer.get_submodule("self_attn").attend = exchange  # type: ignore[assignment]
