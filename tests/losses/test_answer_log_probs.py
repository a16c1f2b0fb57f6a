"""Summed log-probabilities of completions, LD-DPO and WPO, compared with TRL's method."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lean_ft.losses import AnswerLogProbs, preference_loss
from lean_ft.settings import MemoryConfig, PreferenceLossConfig
from tests.losses.test_preference import trl_dpo_loss

NUM_PAIRS, NUM_TOKENS, DIM, VOCAB = 4, 10, 12, 40


class Model:
    """A model with given hidden states, (2 P, T, D)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(2 * NUM_PAIRS, NUM_TOKENS, DIM, generator=generator).requires_grad_()
        self.output_weight = torch.randn(VOCAB, DIM, generator=generator) * 0.5
        self.config = SimpleNamespace(logits_softcap=None)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self.hidden, None


@pytest.fixture
def batch() -> SimpleNamespace:
    """Completions of different lengths, each at the beginning of its row; labels are in pair order."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([[3, 9], [10, 2], [5, 5], [1, 10]])
    index = [row * NUM_TOKENS + t for row, count in enumerate(lengths.flatten().tolist()) for t in range(count)]
    label = torch.randint(0, VOCAB, (len(index),), generator=generator)
    ids = torch.zeros(2 * NUM_PAIRS, NUM_TOKENS)
    return SimpleNamespace(positions=ids, index=torch.tensor(index), label=label, answer_tokens=lengths, inputs={})


def answers_of(model: Model, batch: SimpleNamespace, **settings: Any) -> Any:
    cfg: Any = SimpleNamespace(
        model=SimpleNamespace(dtype="float32"),
        loss=PreferenceLossConfig.model_validate(settings),
        memory=MemoryConfig.model_validate({"loss_chunk_tokens": 7}),
        compile=False,
    )
    return AnswerLogProbs(model, cfg)(model, batch)


def as_trl_has_them(model: Model, batch: SimpleNamespace) -> dict[str, Tensor]:
    """Log-probabilities per token, (2 P, T), all chosen completions before all rejected ones."""
    log_probs = (model.hidden @ model.output_weight.T).log_softmax(-1)
    order = torch.cat([torch.arange(0, 2 * NUM_PAIRS, 2), torch.arange(1, 2 * NUM_PAIRS, 2)])
    labels = torch.zeros(2 * NUM_PAIRS * NUM_TOKENS, dtype=torch.long).index_copy(0, batch.index, batch.label)
    mask = torch.zeros(2 * NUM_PAIRS * NUM_TOKENS).index_fill(0, batch.index, 1.0).view(2 * NUM_PAIRS, NUM_TOKENS)
    of_labels = log_probs.gather(-1, labels.view(2 * NUM_PAIRS, NUM_TOKENS, 1)).squeeze(-1) * mask
    found = {"log_probs": of_labels, "mask": mask, "squares": (2 * log_probs).logsumexp(-1) * mask}
    found = {name: value[order] for name, value in found.items()}
    return {**found, "reference": torch.zeros_like(mask)}


@pytest.mark.parametrize("settings", [{}, {"ld_alpha": 0.3}, {"ld_alpha": 0.0}, {"wpo": True}], ids=str)
def test_they_are_those_of_trl_with_every_modifier(batch: SimpleNamespace, settings: dict[str, Any]) -> None:
    model = Model()
    changes = {"ld_alpha": settings.get("ld_alpha"), "use_weighting": settings.get("wpo", False)}
    expected = trl_dpo_loss("sigmoid", as_trl_has_them(model, batch), **changes)
    (expected_gradient,) = torch.autograd.grad(expected, model.hidden)
    answers = answers_of(model, batch, **settings)
    columns = [*answers.log_probs.unbind(1), *torch.zeros(2, NUM_PAIRS), *batch.answer_tokens.T]
    loss = (preference_loss("sigmoid", *columns, beta=0.3) * answers.weights).mean()
    (gradient,) = torch.autograd.grad(loss, model.hidden, retain_graph=True)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    chosen = as_trl_has_them(model, batch)["log_probs"][:NUM_PAIRS]
    torch.testing.assert_close(answers.chosen_loss, -chosen.sum(), rtol=1e-5, atol=1e-5)


def test_an_answers_sum_is_the_same_in_any_batch(batch: SimpleNamespace) -> None:
    model = Model()
    together = answers_of(model, batch).log_probs
    begin = 0
    for pair in range(NUM_PAIRS):
        count = int(batch.answer_tokens[pair].sum())
        labels = slice(begin, begin + count)
        alone = SimpleNamespace(**{**vars(batch), "index": batch.index[labels], "label": batch.label[labels]})
        alone.answer_tokens = batch.answer_tokens[pair : pair + 1]
        torch.testing.assert_close(answers_of(model, alone).log_probs[0], together[pair], rtol=1e-6, atol=0)
        begin += count
