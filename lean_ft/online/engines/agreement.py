"""Whether a server computes the model that trains."""

from collections.abc import Sequence

from lean_ft.generation import Completion

NUM_PROMPTS, NUM_TOKENS = 8, 8
_LIMIT = 0.5
_LARGEST_GAP = {True: 0.05, False: 1.5}  # if both sides compute in float32, and otherwise


def check_agreement(own: Sequence[Completion], served: Sequence[Completion], is_exact: bool, url: str) -> float:
    """Return the largest difference between the two log-probabilities of a token, among tokens behind equal ones.
    Completions are greedy. is_exact: both sides compute in float32 with the same weights.

    Raises ValueError if most first tokens differ, or log-probabilities differ by more than roundings: a server loads
    the weights of another model as far as their names and shapes agree.
    """
    gaps = [_gaps(one, other) for one, other in zip(own, served, strict=True)]
    largest = max((gap for some in gaps for gap in some), default=0.0)
    equal = sum(map(bool, gaps))
    if equal < _LIMIT * len(own) or largest > _LARGEST_GAP[is_exact]:
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
