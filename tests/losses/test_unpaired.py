"""Losses of single completions compared with TRL's method in float64; bco's mean and the metrics over micro-batches."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_ft.losses import RunningMean, UnpairedStatistics, unpaired_loss

NUM_ANSWERS, NUM_TOKENS = 6, 9
LABELS = torch.tensor([True, False, False, True, True, False])


@pytest.fixture
def answers() -> dict[str, Tensor]:
    """Token log-probabilities (P, T) of matched and mismatched completions under the model and the reference."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return -torch.rand(NUM_ANSWERS, NUM_TOKENS, generator=generator, dtype=torch.float64) * 3

    answers = {name: draw() for name in ("log_probs", "reference", "mismatched", "mismatched_reference")}
    answers["log_probs"].requires_grad_()
    return answers


def trl_loss(loss_type: str, answers: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The mean loss of TRL's KTOTrainer, with stubs for its model and accelerator."""
    kto = pytest.importorskip("trl.trainer.kto_trainer")
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
    nothing = torch.zeros(NUM_ANSWERS, NUM_TOKENS)

    def model(**_: Any) -> Any:
        return SimpleNamespace(log_probs=answers["log_probs"], entropy=nothing, mean_logits=nothing)

    trainer = SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=loss_type == "kto",
        loss_type=loss_type,
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: answers["mismatched"].sum(1),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    mask = torch.ones(NUM_ANSWERS, NUM_TOKENS + 1, dtype=torch.int64)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": mask,
        "completion_mask": mask,
        "label": labels,
        "ref_logps": answers["reference"].sum(1),
        "ref_KL_logps": answers["mismatched_reference"].sum(1),
    }
    return kto.KTOTrainer._compute_loss(trainer, model, inputs, False)


@pytest.mark.parametrize("labels", [LABELS, torch.ones_like(LABELS), torch.zeros_like(LABELS)], ids=str)
@pytest.mark.parametrize("shift", [-5.0, 5.0])  # the first baseline is clamped to 0
@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_a_loss_is_that_of_trl(name: str, shift: float, labels: Tensor, answers: Any) -> None:
    answers["mismatched"] = answers["mismatched"] + shift
    baseline = (answers["mismatched"] - answers["mismatched_reference"]).sum(1).mean().clamp(min=0)
    assert (baseline > 0) == (shift > 0)
    gained = (answers["log_probs"] - answers["reference"]).sum(1)
    loss = unpaired_loss(name, gained, labels, baseline, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7).mean()
    (gradient,) = torch.autograd.grad(loss, answers["log_probs"])
    expected = trl_loss(name, answers, labels)
    (expected_gradient,) = torch.autograd.grad(expected, answers["log_probs"])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)  # TRL uses a float32 tensor for an empty half
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_bco_is_a_classification_above_and_below_its_baseline() -> None:
    """Jung et al., eq. 13: r = beta d, delta = beta b."""
    gained, baseline = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    losses = unpaired_loss("bco", gained, torch.tensor([True, False, False]), baseline, beta=0.3)
    r, delta = 0.3 * gained, 0.3 * baseline
    expected = torch.stack([-logsigmoid(r[0] - delta), -logsigmoid(-(r[1] - delta)), -logsigmoid(-(r[2] - delta))])
    torch.testing.assert_close(losses, expected)


def test_a_misspelt_loss_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown unpaired loss 'apo_zero'. Did you mean 'apo_zero_unpaired'\?"):
        unpaired_loss("apo_zero", torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(()))


def test_the_running_mean_is_that_of_all_values_and_leaves_out_what_is_not_finite() -> None:
    values = torch.randn(7, generator=torch.Generator().manual_seed(0))
    mean = RunningMean(torch.device("cpu"))
    assert mean.mean == 0
    mean.add(values[:3].mean(), 3)
    mean.add(values[3:].mean(), 4)
    torch.testing.assert_close(mean.mean, values.mean())
    other = RunningMean(torch.device("cpu"))
    other.load_state_dict({"mean": mean.mean.item(), "count": 7})
    for one in (mean, other):
        one.add(torch.tensor(10.0), 1)
    assert torch.equal(mean.mean, other.mean)
    mean.add(torch.tensor(float("nan")), 5)
    assert torch.equal(mean.mean, other.mean)


def test_metrics_are_means_over_each_kind_however_a_step_is_cut() -> None:
    gained = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, 1.0])

    def metrics(*cuts: list[int]) -> dict[str, float]:
        statistics = UnpairedStatistics()
        for cut in cuts:
            statistics.count(LABELS[cut])
            statistics.add_answers(gained[cut], -gained[cut], LABELS[cut], beta=0.5)
            statistics.add(loss=gained[cut].sum())
        return {name: float(value) for name, value in statistics.answer_means("eval_").items()}

    whole = metrics([0, 1, 2, 3, 4, 5])
    assert whole["eval_rewards/chosen"] == pytest.approx(0.5 * (1 + 0 + 5) / 3)
    assert whole["eval_rewards/rejected"] == pytest.approx(0.5 * (-2 + 3 + 1) / 3)
    assert whole["eval_rewards/margins"] == pytest.approx(whole["eval_rewards/chosen"] - whole["eval_rewards/rejected"])
    assert whole["eval_logps/chosen"] == pytest.approx(-2)
    assert whole["eval_loss"] == whole["eval_gain"] == pytest.approx(8 / 6)
    # 1 > -2, 1 < 3, 1 = 1; 0 > -2, 0 < 3, 0 < 1; 5 above all
    assert whole["eval_rewards/accuracies"] == pytest.approx((1 + 0 + 0.5 + 1 + 0 + 0 + 3) / 9)
    cut = metrics([0, 1], [2, 3, 4, 5])
    for name in whole.keys() - {"eval_rewards/accuracies"}:  # accuracies compare completions within a micro-batch
        assert cut[name] == pytest.approx(whole[name]), name
    only = metrics([0, 3])
    assert "eval_rewards/rejected" not in only and "eval_rewards/margins" not in only
