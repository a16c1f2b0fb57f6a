"""The loss of a pair of scores compared with TRL's method, and the positions that `scores_of` reads."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lean_ft.losses import reward_loss, scores_of


@pytest.mark.parametrize("centering", [0.0, 0.01])
@pytest.mark.parametrize("has_margins", [False, True])
def test_the_loss_is_that_of_trl(centering: float, has_margins: bool) -> None:
    trl_reward = pytest.importorskip("trl.trainer.reward_trainer")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    margins = torch.rand(5, generator=generator, dtype=torch.float64) if has_margins else torch.zeros(5)
    loss = reward_loss(scores, margins, centering=centering).mean()
    (gradient,) = torch.autograd.grad(loss, scores)

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centering or None),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs: dict[str, Any] = {"attention_mask": torch.ones(10, 3)} | ({"margin": margins} if has_margins else {})
    expected = trl_reward.RewardTrainer.compute_loss(
        trainer, lambda **_: SimpleNamespace(logits=torch.cat(scores.unbind(1))[:, None]), inputs
    )
    (expected_gradient,) = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_score_is_read_at_the_last_token_or_averaged_over_the_answers() -> None:
    hidden = torch.arange(2 * 5 * 1.0).view(2, 5, 1)  # (B, T, D)
    model = lambda *_, **__: (hidden, None)  # noqa: E731
    model.output_weight = torch.tensor([[2.0]])  # type: ignore[attr-defined]
    batch = SimpleNamespace(
        inputs={},
        last=torch.tensor([4, 8]),
        index=torch.tensor([2, 3, 6, 7]),  # positions that predict tokens 3, 4, 7 and 8
        answer_tokens=torch.tensor([[2, 2]]),
    )
    scores, _ = scores_of(model, batch)
    assert scores.tolist() == [[8.0, 16.0]]
    scores, _ = scores_of(model, batch, per_token=True)
    assert scores.tolist() == [[7.0, 15.0]]
