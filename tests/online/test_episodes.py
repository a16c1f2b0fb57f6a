"""Episodes: training on sampled tokens alone, calls of tools, environments, and runs that are killed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lean_ft import load_model
from lean_ft.data import Prompt
from lean_ft.data.prompts import Prompts
from lean_ft.data.report import DataReport
from lean_ft.generation import Sample
from lean_ft.hub.paths import resolve_model_path
from lean_ft.losses import (
    AnswerLogProbs,
    TokenLogProbs,
    TokenStatistics,
    batch_loss,
    pair_losses,
    policy_loss,
    value_loss,
)
from lean_ft.memory import apply_memory
from lean_ft.online import PairRollouts, Rollouts, ValuedRollouts, ValueModel
from lean_ft.online.rewards import Scores
from tests.recipes.conftest import config_of

# Two episodes of one prompt: ids, and which of them the model sampled.
PROMPT = [11, 12, 13, 14]
EPISODES = [
    ([21, 22, 23, 24, 25, 26, 27, 28], [1, 1, 0, 0, 0, 1, 1, 1]),
    ([31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41], [1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]),
]
REWARDS = [1.5, 0.25]
GIVEN = ("model.path=tiny", "data.source=unread", "rewards=[length]", "device=cpu", "generation.num_answers=2")
GIVEN += ("batch_size=2", "generation.max_new_tokens=16", "tools.functions=[unread.py:search]")


def round_of(cfg: Any, kind: type) -> Any:
    report = DataReport("prompts")
    prompts = Prompts([Prompt(PROMPT, "", {}, "")], seed=0, report=report, fingerprint="")
    samples = [Sample(ids, [-1.0 * s for s in mask], True, sampled=[s == 1 for s in mask]) for ids, mask in EPISODES]
    rollouts = kind(cfg, prompts, 0, share_prompts=True)
    rollouts.sample(lambda *_: samples, lambda *_: Scores(list(REWARDS), [[], []], ["", ""]))
    return rollouts


def both_models(cfg: Any) -> tuple[Any, Any]:
    path = resolve_model_path("tiny")
    own = load_model(path, torch.device("cpu"), torch.float32).double()
    apply_memory(own, cfg.memory, compile=False)
    return own, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double()


def moved(*models: torch.nn.Module) -> None:
    """Change the weights of all models alike, as an update would."""
    for model in models:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=2e-3)


def by_hand(theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities of the sampled tokens of each episode, and the hidden states before them."""
    found = []
    for ids, mask in EPISODES:
        out = theirs(torch.tensor([PROMPT + ids]), output_hidden_states=True)
        places = [len(PROMPT) + i - 1 for i, sampled in enumerate(mask) if sampled]
        labels = torch.tensor([one for one, sampled in zip(ids, mask, strict=True) if sampled])
        log_probs = out.logits[0].log_softmax(-1)[places].gather(1, labels[:, None])[:, 0]
        found.append((log_probs, out.hidden_states[-1][0, places]))
    return found


def loss_by_hand(name: str, now: list[Tensor], old: list[Tensor]) -> Tensor:
    """The formulas of the papers, over the sampled tokens."""
    mean = sum(REWARDS) / 2
    std = torch.tensor(REWARDS, dtype=torch.float64).std() + 1e-4
    above = [reward - mean for reward in REWARDS]
    lengths = [len(one) for one in now]
    parts = []
    for advantage, new, was in zip(above, now, old, strict=True):
        ratio = (new - was).exp()
        match name:
            case "grpo" | "dapo" | "dr_grpo":
                scaled = advantage if name == "dr_grpo" else advantage / std
                high = 1.28 if name == "dapo" else 1.2
                value = torch.minimum(ratio * scaled, ratio.clamp(0.8, high) * scaled).sum()
                parts.append(-value / {"grpo": 2 * len(new), "dapo": sum(lengths), "dr_grpo": 2 * 16}[name])
            case "gspo":
                whole = ((new - was).sum() / len(new)).exp()
                value = torch.minimum(whole * advantage, whole.clamp(1 - 3e-4, 1 + 4e-4) * advantage) / std
                parts.append(-value / 2)
            case "cispo":
                parts.append(-(ratio.clamp(max=5).detach() * advantage / std * new).sum() / sum(lengths))
            case "rloo":
                whole, alone = (new - was).sum().exp(), 2 * advantage
                parts.append(-torch.minimum(whole * alone, whole.clamp(0.8, 1.2) * alone) / 2)
    return sum(parts)


def assert_equal(own: Any, theirs: Any, loss: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    """A round keeps log-probabilities in float32, and transformers computes norms and rotary angles in float32."""
    torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=1e-7)
    loss.backward()
    expected.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in own.named_parameters():
        assert (parameter.grad - gradients[name].grad).norm() <= rtol * gradients[name].grad.norm(), name


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_losses_and_gradients_equal_those_by_hand_over_sampled_tokens(name: str) -> None:
    """In float64 with transformers, after an update, so that ratios differ from 1."""
    cfg = config_of("grpo", *GIVEN, f"loss.name={name}", "generation.passes=2")
    own, theirs = both_models(cfg)
    rollouts, log_probs = round_of(cfg, Rollouts), TokenLogProbs(own, cfg)
    with torch.no_grad():
        old = [one for one, _ in by_hand(theirs)]
        for batch in rollouts.to_remember():
            rollouts.remember(batch, log_probs(own, batch), None)
    rollouts.begin()
    moved(own, theirs)
    (batch,) = rollouts.take()
    num_sampled = sum(sum(mask) for _, mask in EPISODES)
    assert (batch.num_targets, rollouts.metrics()["completion_length"]) == (num_sampled, num_sampled / 2)
    loss = batch_loss(cfg, batch, log_probs(own, batch), num_answers=batch.num_answers, num_tokens=batch.num_targets)
    assert_equal(own, theirs, loss, loss_by_hand(name, [now for now, _ in by_hand(theirs)], old))


def test_ppo_equals_its_computation_by_hand_over_sampled_tokens() -> None:
    """The value before a sampled token follows the value before the last sampled one."""
    cfg = config_of("ppo", *GIVEN, "lora.rank=2", "loss.gamma=0.9", "loss.kl_weight=0.1")
    own, theirs = both_models(cfg)
    value = ValueModel(cfg, own)
    torch.nn.init.normal_(value.score.weight, 0.0, 0.3, torch.Generator().manual_seed(0))
    weight = value.score.weight.detach().clone().requires_grad_()
    rollouts, log_probs = round_of(cfg, ValuedRollouts), TokenLogProbs(own, cfg)
    with torch.no_grad():
        before = [(now, (hidden.float() @ weight.float().T)[:, 0]) for now, hidden in by_hand(theirs)]
        for batch in rollouts.to_remember():
            now = log_probs(own, batch)
            rollouts.remember(batch, now, now.log_probs * 0.5, value(batch, now))
    rollouts.begin()
    advantages, returns = [], []
    for (old, values), reward in zip(before, REWARDS, strict=True):
        given = -0.1 * (old - 0.5 * old)
        given[-1] += reward
        found, above = torch.empty_like(given), 0.0
        for i in reversed(range(len(given))):
            behind = values[i + 1] if i + 1 < len(values) else 0.0
            above = given[i] + 0.9 * behind - values[i] + 0.9 * 0.95 * above
            found[i] = above
        advantages.append(found)
        returns.append(found + values)
    flat = torch.cat(advantages)
    expected = torch.zeros((), dtype=torch.float64)
    moved(own, theirs)
    for (now, hidden), (old, values), above, target in zip(by_hand(theirs), before, advantages, returns, strict=True):
        even, ratio = (above - flat.mean()) / flat.std(), (now - old).exp()
        expected = expected - torch.minimum(ratio * even, ratio.clamp(0.8, 1.2) * even).sum() / len(flat)
        new = (hidden.float() @ weight.T)[:, 0]
        near = values + (new - values).clamp(-0.2, 0.2)
        expected = expected + 0.1 * 0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2).sum() / len(flat)
    (batch,) = rollouts.take()
    now, number = log_probs(own, batch), batch.num_targets
    policy = policy_loss(
        "dapo",
        now.log_probs,
        batch.old,
        batch.advantages,
        batch.counts,
        num_tokens=number,
        epsilon=0.2,
        epsilon_high=0.2,
    )
    error = value_loss(value(batch, now), batch.values, batch.returns, batch.counts, 0.2, number)
    loss = policy + 0.1 * error
    # Advantages, returns and values are stored in float32.
    assert_equal(own, theirs, loss, expected)
    torch.testing.assert_close(value.score.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_pairs_sum_the_log_probabilities_of_sampled_tokens() -> None:
    cfg = config_of("online_dpo", *GIVEN)
    own, theirs = both_models(cfg)
    rollouts = round_of(cfg, PairRollouts)
    rollouts.begin()
    (batch,) = rollouts.take()
    with torch.no_grad():
        found = AnswerLogProbs(own, cfg)(own, batch)
        expected = torch.stack([now.sum() for now, _ in by_hand(theirs)])[None]
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-6, atol=1e-9)
    assert batch.answer_tokens.tolist() == [[sum(mask) for _, mask in EPISODES]]
