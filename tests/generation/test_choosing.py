"""Chosen tokens compared with the reference implementation of draws and with the distribution."""

from typing import Any

import pytest
import torch

from lean_ft.data.columns import identity
from lean_ft.generation import choosing
from lean_ft.generation.choosing import RowKey, Sampling, choose, waiting_times
from tests.generation.plain_draws import draw, waiting_time

PROMPT = [3, 1, 4]


def keys(count: int, seed: int = 0, prompt: list[int] = PROMPT, sample: int = 0) -> torch.Tensor:
    key = RowKey(seed, identity(prompt), sample)
    return torch.tensor([key.at(position) for position in range(count)], dtype=torch.int32)


def test_waiting_times_are_the_hash_and_depend_on_all_that_a_draw_depends_on():
    expected = [[waiting_time(9, PROMPT, 2, position, token) for token in range(50)] for position in range(4)]
    found = waiting_times(keys(4, 9, PROMPT, 2), 50)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    others = [keys(4, 8, PROMPT, 2), keys(4, 9, PROMPT, 1), keys(4, 9, [3, 1], 2), keys(5, 9, PROMPT, 2)[1:]]
    for other in others:
        assert ((waiting_times(other, 50) / found).log().abs() > 1e-3).all()


def test_waiting_times_are_exponential_and_independent_of_each_other():
    times = waiting_times(keys(400), 1000)
    shares = (1 - (-times).exp()).flatten().sort().values  # evenly spread from 0 to 1
    assert (shares - torch.linspace(0, 1, len(shares))).abs().max() < 1.95 / len(shares) ** 0.5  # Kolmogorov, 0.1 %
    assert times.min() > 0 and times.isfinite().all()
    uniform = (-times).exp()
    for one, other in (
        (uniform[:, 1:], uniform[:, :-1]),
        (uniform[1:], uniform[:-1]),
        (uniform[1:, 1:], uniform[:-1, :-1]),
    ):
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 4 / one.numel() ** 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_and_log_probabilities_are_those_computed_plainly(temperature: float):
    logits = 3 * torch.randn(40, 101, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = choose(logits, keys(40), Sampling(1, temperature))
    assert tokens.tolist() == [draw(row, temperature, 0, PROMPT, 0, i) for i, row in enumerate(logits)]
    expected = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected)
    tokens, log_probs = choose(logits, None, Sampling(1))
    assert torch.equal(tokens, logits.argmax(1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(1))


@pytest.mark.long
def test_one_graph_serves_all_seeds_and_numbers_of_rows():
    """What a GPU compiles: whole, and once for each kind of settings."""
    graphs = []
    torch.compiler.reset()
    backend = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    compiled = torch.compile(choosing._choose, backend=backend, dynamic=True, fullgraph=True)
    kinds: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.0}]
    for settings in [*kinds, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}]:
        before = len(graphs)
        for rows in (6, 4, 9):
            logits = torch.randn(rows, 101, generator=torch.Generator().manual_seed(rows))
            sampling = Sampling(rows, seed=rows, stop_ids=frozenset([rows]), **settings)
            drawn = keys(rows) if sampling.temperature else None
            for found, expected in zip(compiled(logits, drawn, sampling), choose(logits, drawn, sampling), strict=True):
                torch.testing.assert_close(found, expected)
        assert len(graphs) == before + 1


def kept(probabilities: torch.Tensor, settings: dict) -> torch.Tensor:
    """Return a mask of the tokens that can be drawn, computed from the definitions of the settings."""
    order = probabilities.argsort(descending=True).tolist()
    order = order[: settings.get("top_k", len(order))]
    order = [token for token in order if probabilities[token] >= settings.get("min_p", 0) * probabilities.max()]
    total, chosen = sum(float(probabilities[token]) for token in order), []
    for token in order:
        if sum(float(probabilities[t]) for t in chosen) >= settings.get("top_p", 1) * total:
            break
        chosen.append(token)
    return torch.tensor(sorted(chosen))


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"top_k": 5}, {"top_k": 1}, {"top_p": 0.5}, {"top_p": 1e-9}, {"min_p": 0.2}, {"min_p": 1.0}),
        {"top_k": 20, "min_p": 0.05, "top_p": 0.8},
    ],
    ids=str,
)
def test_samples_follow_the_distribution_of_what_is_left(settings: dict):
    logits, count = 2 * torch.randn(101, generator=torch.Generator().manual_seed(1)), 6000
    probabilities = (logits / 1.5).softmax(-1)
    left = kept(probabilities, settings)
    expected = torch.zeros(101).index_copy(0, left, probabilities[left] / probabilities[left].sum())
    tokens, log_probs = choose(logits.expand(count, -1), keys(count), Sampling(1, 1.5, **settings))
    counts = torch.bincount(tokens, minlength=101)
    assert counts[expected == 0].sum() == 0
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((counts / count - expected).abs() <= 4.5 * deviation + 1e-6).all()
    torch.testing.assert_close(log_probs, expected[tokens].log(), atol=1e-5, rtol=1e-5)
    assert Sampling(1, 1.5, **settings).narrows == bool(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"stop_texts": ("",)}, "an empty text"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 1, **settings})
