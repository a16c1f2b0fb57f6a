"""Whether a server computes the model that trains."""

from collections.abc import Sequence

from lean_ft.generation import Completion

NUM_PROMPTS, NUM_TOKENS = 8, 8
_LIMIT = 0.5


def check_agreement(own: Sequence[Completion], served: Sequence[Completion], url: str) -> float:
    """Return the largest difference between the two log-probabilities of a token, among tokens behind equal ones.
    Completions are greedy.

    Raises ValueError if most first tokens differ, or have very different log-probabilities: a server loads the weights
    of another model as far as their names and shapes agree.
    """
    gaps = [_gaps(one, other) for one, other in zip(own, served, strict=True)]
    largest = max((gap for some in gaps for gap in some), default=0.0)
    if sum(max(0.0, 1 - some[0]) for some in gaps if some) < _LIMIT * len(own):
        equal = sum(map(bool, gaps))
        raise ValueError(
            f"{url} computes another model: with the run's weights, it chooses the same first token for {equal} of "
            f"{len(own)} prompts, and log-probabilities differ by up to {largest:.2g}. Serve the model of model.path, "
            "without other --hf-overrides."
        )
    return largest


def _gaps(own: Completion, served: Completion) -> list[float]:
    """The differences up to the first token that differs."""
    equal = [one == other for one, other in zip(own.ids, served.ids, strict=False)]
    end = equal.index(False) if False in equal else len(equal)
    return [abs(one - other) for one, other in zip(own.log_probs[:end], served.log_probs[:end], strict=True)]
