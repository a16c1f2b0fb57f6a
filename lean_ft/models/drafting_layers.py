"""Drafting layers (multi-token prediction): after the last layer, each predicts one token further ahead.

Drafting layer k of position i reads the hidden state of layer k - 1 (for the first one the decoder's output, which
predicts token i + 1) and the embedding of token i + k. It predicts token i + k + 1, with the output layer of the model.
As in transformers and vLLM, the hidden state that a layer passes on is normed, and so is the decoder's.

Tokens of a document whose token i + k is in the next document compute values that nothing reads: only later tokens of
the document attend to them, which have no label either.

Source: DeepSeek-V3 technical report, section 2.2 (arXiv:2412.19437). vLLM replaces the embedding at position 0 by zeros
in DeepSeek's form of the layers; the report and transformers do not.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lean_ft.models.block import Block, Pass
from lean_ft.models.config import DecoderConfig, LayerConfig
from lean_ft.models.layers import residual_norm
from lean_ft.models.routing import Routes


class DraftingLayer(Block):
    """One drafting layer: a layer of the model, which reads a hidden state and the embedding of a later token."""

    def add_others(self, config: DecoderConfig, layer: LayerConfig) -> None:
        self.enorm, self.hnorm = residual_norm(config), residual_norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": residual_norm(config)})

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, embedded: Tensor, context: Pass
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Compute normed hidden states (B, T, D) from those of the layer before and the later tokens' embeddings,
        (B, T, D) each, and a mixture's choices as `Block` does."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        hidden, routes, _ = super().forward(joined, context)
        return self.shared_head["norm"](hidden), routes


def drafting_layers(config: DecoderConfig) -> list[DraftingLayer]:
    """The modules of a decoder's drafting layers, whose places follow those of its layers."""
    return [DraftingLayer(config, place) for place in range(config.num_layers, len(config.layers))]


def drafted(
    layers: Sequence[nn.Module],
    hidden: Tensor,
    embedded: Tensor,
    context_of: Callable[[int], Pass],
    routes: Routes,
    first: int,
) -> list[Tensor]:
    """Return each drafting layer's hidden states (B, T, D).

    hidden: (B, T, D), the decoder's output. embedded: (B, T, D), the tokens' embeddings. context_of: what a layer reads
    besides, by its place. first: the place of the first one.
    """
    drafts = list[Tensor]()
    for depth, layer in enumerate(layers, 1):
        place = first + depth - 1
        hidden, routed = cast(DraftingLayer, layer)(hidden, embedded.roll(-depth, 1), context_of(place))
        if routed is not None:
            routes.add(place, *routed)
        drafts.append(hidden)
    return drafts
