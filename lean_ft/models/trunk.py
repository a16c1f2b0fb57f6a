"""Everything of a decoder before its output layer: the embeddings, the layers and the last norm.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lean_ft.models.block import Block
from lean_ft.models.config import DecoderConfig
from lean_ft.models.layers import residual_norm
from lean_ft.models.positions import position_rows


class Trunk(nn.Module):
    """The module named `model`, as in Hugging Face's format. The decoder calls its layers.

    A family with another trunk overrides a step, `embedded`, `into_layers` or `out_of_layers`, or adds modules in
    `add_others`.
    """

    num_streams = 1  # residual streams between the layers
    # Embeddings of tokens that are as large as `embed_tokens`, by name.
    more_embeddings: tuple[str, ...] = ()

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_row is not None:
            self.embed_positions = nn.Embedding(config.position_row + config.max_positions, config.hidden_size)
        block = config.parts.block or Block
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_layers))
        self.norm = residual_norm(config)
        self.add_others(config)

    def add_others(self, config: DecoderConfig) -> None:
        """Modules beside those of all families."""

    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The embeddings (B, T, D) of tokens and positions (B, T)."""
        hidden = self.scaled(self.embed_tokens(input_ids), self.config.embedding_multiplier)
        if self.config.position_row is not None:
            hidden = hidden + self.embed_positions(position_rows(positions, self.config))
        return hidden

    def into_layers(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The first layer's input, and further inputs of each layer or none, from embeddings (B, T, D) with those of
        images."""
        return hidden, ()

    def out_of_layers(self, hidden: Tensor) -> Tensor:
        """The normed hidden states (B, T, D) of the last layer's output."""
        return self.norm(hidden)

    def scaled(self, embedded: Tensor, multiplier: float) -> Tensor:
        if self.config.embedding_multiplier_in_weight_dtype:
            multiplier = torch.tensor(multiplier, dtype=embedded.dtype).item()
        return embedded if multiplier == 1.0 else embedded * multiplier
