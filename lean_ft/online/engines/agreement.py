"""Whether a server computes the model that trains."""

from collections.abc import Sequence

from lean_ft.generation import Completion

NUM_PROMPTS = 8
_LIMIT = 0.5


def check_agreement(own: Sequence[Completion], served: Sequence[Completion], url: str) -> float:
    """Return the largest difference between the two log-probabilities of a token, among completions whose first tokens
    are equal. Completions are greedy.

    Raises ValueError if most first tokens differ, or have very different log-probabilities: a server loads the weights
    of another model as far as their names and shapes agree.
    """
    pairs = [(one, other) for one, other in zip(own, served, strict=True) if one.ids[0] == other.ids[0]]
    gaps = [abs(one.log_probs[0] - other.log_probs[0]) for one, other in pairs]
    disagreement = 1 - sum(max(0.0, 1 - gap) for gap in gaps) / len(own)
    if disagreement > _LIMIT:
        raise ValueError(
            f"{url} computes another model: with the run's weights, it chooses the same first token for {len(pairs)} "
            f"of {len(own)} prompts, with log-probabilities that differ by up to {max(gaps, default=0.0):.2g}. Serve "
            "the model of model.path, without other --hf-overrides."
        )
    return max(gaps, default=0.0)
