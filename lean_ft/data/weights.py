"""Sources that are seen more or less often than once an epoch."""

from collections.abc import Sequence

import numpy as np


def weigh(source_of: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """Indices of documents, in order, each as often as its source's weight says.

    source_of: (N,) which source a document is from. A weight of 2 takes each of a source's documents twice, 0.5 a half
    of them, 1.5 all of them once and a half of them once more; halves are drawn by `seed` and `round(weight * n)` is met
    exactly.
    """
    counts = np.zeros(len(source_of), dtype=np.int64)
    for source, weight in enumerate(weights):
        documents = np.flatnonzero(source_of == source)
        whole = int(weight)
        counts[documents] = whole
        num_more = round(weight * len(documents)) - whole * len(documents)
        drawn = np.random.default_rng([seed, source]).permutation(len(documents))[:num_more]
        counts[documents[drawn]] += 1
    return np.repeat(np.arange(len(source_of)), counts)
