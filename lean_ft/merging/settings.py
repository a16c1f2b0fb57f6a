"""The options of a merge."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MergeSettings:
    """How models are merged. None is the default of the method."""

    method: str = "linear"
    """`linear`, `ties`, `dare` (with task arithmetic), `dare_ties` or `slerp`."""
    weights: Sequence[float] | None = None
    """A factor per model. Default: 1 for each."""
    normalize: bool | None = None
    """Divide by the sum of the weights. Default: true for linear and ties, false for dare and dare_ties."""
    density: float | None = None
    """Share of each task vector that ties and dare keep."""
    rescale: str | None = None
    """How dare makes up for what it drops: `l1` to the same sum of magnitudes, as mergekit does; `density` by 1 /
    density, as in the paper; or `none`. Default: l1."""
    seed: int | None = None
    """Of dare's random masks. Default: 0."""
    t: float | None = None
    """Place of slerp's result, from the first model (0) to the second (1). Default: 0.5."""
    base: str | None = None
    """The model that the others were trained from, for ties and dare. For adapters, the base model of all."""
    dtype: str | None = None
    """Dtype of the output. Default: that of the first model; float32 for adapters."""
    max_shard_size: str | None = None
    """Largest size of a file of weights. Default: 5GB."""
    chat_template: str | None = None
    """A model whose chat template the output gets, or a file. Needed if the models' templates differ."""
    rank: int | None = None
    """Of a merged adapter. Default: the sum of the ranks for linear and slerp, otherwise the largest rank."""
