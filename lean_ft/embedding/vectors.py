"""The vector of a text from the hidden states of its tokens.

Texts lie in rows in any order, with padding anywhere between them. Sums are in float32 or wider and in the order of a
text's tokens, so a text's vector does not depend on the other texts or on its place, and equal passes give equal bits
on a GPU too, where `index_add` does not.

Shapes: N positions of a batch, M texts, D hidden size.
"""

from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from lean_ft.losses.output_layer import hidden_states

if TYPE_CHECKING:
    from lean_ft.data import Batch
    from lean_ft.models import Decoder

Pooling = Literal["last", "mean", "cls"]
"""The hidden state of a text's last token, the mean of all its tokens, or the hidden state of its first token."""


class Texts(Protocol):
    """A batch with the places of its texts, such as `EmbeddingBatch`."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of the forward pass by name."""
        ...

    @property
    def last(self) -> Tensor:
        """(M,) int64, flattened position of each text's last token."""
        ...

    @property
    def lengths(self) -> Tensor:
        """(M,) int64, tokens of each text."""
        ...

    @property
    def continued(self) -> tuple[Tensor, Tensor] | None:
        """How many tokens at the start of each text are those of an earlier text, (M,) int64, and the flattened
        positions of these tokens, text after text, int64. None if there are none."""
        ...


def text_vectors(model: "Decoder", batch: Texts, pooling: Pooling, *, is_float16: bool = False) -> Tensor:
    """Return the vectors of a batch's texts, (M, D) in float32 or wider, not scaled to a length.

    If the model has dense layers after pooling, D is the width of the last one. is_float16: compute hidden states in
    mixed precision.
    """
    with torch.autocast(batch.last.device.type, torch.float16, enabled=is_float16):
        hidden, _ = hidden_states(model, cast("Batch", batch), of_rows=True)
    # A model's output layer may have its bias, or the divisor of its logits, in the hidden states.
    hidden = hidden.flatten(0, -2)[:, : model.config.hidden_size]
    vectors = pooled(hidden, batch.last, batch.lengths, pooling, batch.continued)
    if model.config.logits_divisor != 1.0:
        vectors = vectors * model.config.logits_divisor
    return model.through_dense(vectors)


def pooled(
    hidden: Tensor, last: Tensor, lengths: Tensor, pooling: Pooling, continued: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return one vector per text, (M, D) in float32 or wider.

    hidden: (N, D); last: (M,) int64, position of each text's last token; lengths: (M,) int64, tokens of each text;
    continued: `Texts.continued`, for `last` and `mean`. The texts do not overlap otherwise.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if pooling != "mean":
        places = last if pooling == "last" else last - lengths + 1
        return hidden.index_select(0, places).to(wide)
    own = lengths if continued is None else lengths - continued[0]
    ends, order = (last + 1).sort()
    # Bounds of the padding before each text, the text, and the padding after the last one: (2 * M + 2,)
    bounds = torch.stack((ends - own[order], ends), 1).flatten()
    bounds = torch.cat((bounds.new_zeros(1), bounds, bounds.new_full((1,), len(hidden))))
    sums = torch.segment_reduce(hidden.to(wide), "sum", offsets=bounds, axis=0, unsafe=True)[1::2]  # checks would wait
    sums = sums.index_select(0, order.argsort())
    if continued is not None:
        shared = hidden[continued[1]].to(wide)  # backward of `index_select` would add in any order on a GPU
        sums = sums + torch.segment_reduce(shared, "sum", lengths=continued[0], axis=0, unsafe=True)
    return sums / lengths[:, None]
