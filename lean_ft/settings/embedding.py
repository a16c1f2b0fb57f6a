"""Settings of the vectors of texts."""

from typing import Literal

from lean_ft.settings.base import Settings


class PoolingConfig(Settings):
    """How the vector of a text is made of its tokens' hidden states. It is saved with the model."""

    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """The last token's hidden state, the mean of all tokens, or the first token's. `auto`: as the model's folder says,
    else `mean` for an encoder and `last` for a causal model."""
    normalize: Literal["auto"] | bool = "auto"
    """Scale vectors to length 1. `auto`: as the model's folder says, else true."""
