"""Policy losses compared with TRL's method in float64, their gradients with the cross-entropy's, and their
denominators."""

import inspect
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from lean_ft.losses import TokenStatistics, linear_log_probs
from lean_ft.losses.policy import LOSSES, advantages, correction, policy_loss
from lean_ft.settings import POLICY_LOSSES, PolicyLossConfig

NUM_ANSWERS, NUM_TOKENS, LONGEST = 6, 9, 12


@pytest.fixture
def answers() -> dict[str, Tensor]:
    """Log-probabilities that changed enough for every clip to be active somewhere."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(NUM_ANSWERS, NUM_TOKENS, generator=generator, dtype=torch.float64)

    old = -noise(1.0).abs()
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    return {
        "logps": (old + noise(0.6)).requires_grad_(),
        "old_logps": old,
        "reference": old + noise(0.5),
        "sampler": old + noise(0.5),
        "advantages": torch.tensor([1.0, -2.0, 0.5, -0.3, 0.0, 2.0], dtype=torch.float64),
        "mask": (torch.arange(NUM_TOKENS) < lengths[:, None]).to(torch.float64),
        "entropies": noise(1.0).abs(),
    }


def ours(name: str, answers: dict[str, Tensor], **settings: Any) -> Tensor:
    if LOSSES[name][1] == "longest":
        settings["max_length"] = LONGEST
    given = [answers[key] for key in ("logps", "old_logps", "advantages", "mask")]
    return policy_loss(name, *given, **settings)


def inputs_of(answers: dict[str, Tensor]) -> dict[str, Any]:
    """The part of a batch that both of TRL's trainers read."""
    empty = torch.zeros(NUM_ANSWERS, 1, dtype=torch.long)
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(NUM_ANSWERS, NUM_TOKENS, dtype=torch.long),
        "completion_mask": answers["mask"],
        "advantages": answers["advantages"],
    }


def trl_loss(name: str, answers: dict[str, Tensor], **changes: Any) -> Tensor:
    """The loss of TRL's GRPOTrainer, with stubs for its model and accelerator."""
    trl_grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    ours_of = {"epsilon_low": "epsilon", "epsilon_high": "epsilon_high"}
    bounds = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}
    low, high = bounds[name]
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    trainer = SimpleNamespace(
        **{
            "accelerator": accelerator,
            "model": SimpleNamespace(training=True),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "sequence" if name == "gspo" else "token",
            "beta": 0.0,
            "args": SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
            "loss_type": "grpo" if name == "gspo" else name,
            "epsilon_low": low,
            "epsilon_high": high,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": LONGEST,
            "_entropy_bonus_enabled": False,
            "_metrics": {"train": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (answers["logps"], answers["entropies"], None),
            **{theirs: changes.pop(own) for theirs, own in ours_of.items() if own in changes},
            **changes,
        }
    )
    trainer.get_high_entropy_mask = lambda *given: trl_grpo.GRPOTrainer.get_high_entropy_mask(trainer, *given)
    inputs = inputs_of(answers) | {
        "old_per_token_logps": answers["old_logps"],
        "ref_per_token_logps": answers["reference"],
        "importance_sampling_ratio": changes.get("ratio"),
        "num_items_in_batch": answers["mask"].sum(),
    }
    return trl_grpo.GRPOTrainer._compute_loss(trainer, SimpleNamespace(training=True), inputs)


def assert_same(found: Tensor, expected: Tensor, answers: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(loss, answers["logps"])[0] for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert grads[0].abs().sum() > 0


ALL = [name for name in LOSSES if name != "rloo"]


BOUNDS = {"epsilon": 0.05, "epsilon_high": 0.4}


@pytest.mark.parametrize("kl", ["", "k3", "corrected"])
@pytest.mark.parametrize("name", ALL)
def test_losses_and_divergences_equal_trls(name: str, kl: str, answers: dict[str, Tensor]) -> None:
    args = SimpleNamespace(use_bias_correction_kl=kl == "corrected", delta=None, steps_per_generation=1)
    settings = {"kl_weight": 0.3, "reference_logps": answers["reference"], "kl": kl} if kl else {}
    expected = trl_loss(name, answers, beta=0.3 if kl else 0.0, args=args)
    assert_same(ours(name, answers, **settings), expected, answers)
    if name != "cispo":
        assert_same(ours(name, answers, **BOUNDS), trl_loss(name, answers, **BOUNDS), answers)
        assert not torch.allclose(ours(name, answers, **BOUNDS), ours(name, answers))


def test_estimates_of_the_divergence_are_right_in_the_mean() -> None:
    """Over the whole distribution, the means of k1, k3 and `corrected` equal the divergence. For tokens drawn from the
    old model, the mean gradient of `corrected` equals the divergence's gradient."""
    generator = torch.Generator().manual_seed(1)
    logits, old, reference = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    old, reference = old.log_softmax(0), reference.log_softmax(0)
    now = logits.log_softmax(0)
    exact = (now.exp() * (now - reference)).sum()
    exact_grad = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    nothing, mask = torch.zeros(7, dtype=torch.float64), torch.ones(7, 1)

    def mean(kind: str, drawn_from: Tensor) -> Tensor:
        parts = [
            policy_loss("grpo", n[None, None], o[None, None], nothing[:1], mask[:1], reference_logps=r[None, None],
                        kl_weight=1.0, kl=kind) * o.exp()
            for n, o, r in zip(now, drawn_from, reference, strict=True)
        ]  # fmt: skip
        return torch.stack(parts).sum()

    for kind in ("k1", "k3", "corrected"):
        torch.testing.assert_close(mean(kind, now.detach()), exact)
    corrected = mean("corrected", old)
    torch.testing.assert_close(corrected, exact)
    torch.testing.assert_close(torch.autograd.grad(corrected, logits, retain_graph=True)[0], exact_grad)
    k1_grad = torch.autograd.grad(mean("k1", now.detach()), logits, retain_graph=True)[0]
    assert k1_grad.abs().max() < 1e-12 < exact_grad.abs().max()


def test_rloo_equals_trls(answers: dict[str, Tensor]) -> None:
    trl_rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (answers["logps"], answers["entropies"], None),
    )
    inputs = inputs_of(answers) | {"old_logps": (answers["old_logps"] * answers["mask"]).sum(1)}
    expected = trl_rloo.RLOOTrainer._compute_loss(trainer, SimpleNamespace(training=True), inputs)
    assert_same(ours("rloo", answers), expected, answers)


@pytest.mark.parametrize("kind", get_args(PolicyLossConfig.model_fields["correction"].annotation)[1:])
def test_the_correction_is_a_weight_as_trls(kind: str, answers: dict[str, Tensor]) -> None:
    weights, limited = correction(answers["old_logps"], answers["sampler"], answers["mask"], kind, 1.5)
    difference = ((answers["old_logps"] - answers["sampler"]) * answers["mask"]).numpy()
    ratio = np.exp(difference if kind.startswith("token") else difference.sum(1, keepdims=True))
    expected = np.minimum(ratio, 1.5) if kind.endswith("truncate") else np.where(ratio > 1.5, 0.0, ratio)
    np.testing.assert_allclose(weights.numpy(), expected)
    assert limited.any() and limited.tolist() == (ratio > 1.5).tolist()
    settings = {"use_vllm": True, "vllm_importance_sampling_correction": True, "ratio": weights}
    assert_same(ours("dapo", answers, weights=weights), trl_loss("dapo", answers, **settings), answers)


@pytest.mark.parametrize("name", LOSSES)
def test_one_update_on_policy_is_the_weighted_cross_entropy(name: str) -> None:
    """Gradients of hidden states and weight, in float64: every ratio is exactly 1, so the loss is A log p."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4 * 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    label = torch.randint(0, 11, (20,), generator=generator)
    mask = torch.arange(5) < torch.tensor([5, 2, 4, 1])[:, None]
    worth = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
    log_probs = linear_log_probs(hidden, weight, torch.arange(20), label, temperature=0.7).view(4, 5)
    statistics = TokenStatistics()
    loss = policy_loss(name, log_probs, log_probs.detach(), worth, mask, max_length=LONGEST, statistics=statistics)
    assert statistics.means(1)["clip_share"] == 0

    lengths = mask.sum(1, keepdim=True)
    divisors = {
        "answers": lengths * 4,
        "tokens": mask.sum(),
        "longest": torch.tensor(4 * LONGEST),
        "sums": torch.tensor(4),
    }[LOSSES[name][1]]
    losses = torch.nn.functional.cross_entropy(hidden @ weight.T / 0.7, label, reduction="none").view(4, 5)
    if name == "gspo":  # one ratio per completion: the mean over its tokens
        losses = (losses * mask).sum(1, keepdim=True) / lengths * mask
    expected = (losses * worth[:, None] * mask / divisors).sum()
    found = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(expected, (hidden, weight)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_step_add_up_to_it_and_empty_answers_count_nothing(name: str, answers: dict[str, Tensor]) -> None:
    whole = ours(name, answers)
    of_step = {"num_answers": NUM_ANSWERS, "num_tokens": int(answers["mask"].sum())}
    for cut in (1, 4):
        parts = [{key: value[rows] for key, value in answers.items()} for rows in (slice(cut), slice(cut, None))]
        torch.testing.assert_close(sum(ours(name, part, **of_step) for part in parts), whole)
    padded = {key: torch.cat((value, value[:2])) for key, value in answers.items()}
    padded["mask"] = torch.cat((answers["mask"], torch.zeros(2, NUM_TOKENS)))
    torch.testing.assert_close(ours(name, padded), whole)
    nothing = answers | {"mask": torch.zeros_like(answers["mask"])}
    assert ours(name, nothing).item() == 0
    assert not torch.autograd.grad(ours(name, nothing), answers["logps"])[0].any()


NONE = float("nan")


@pytest.mark.parametrize("kind", ["group", "batch", "mean", "leave_one_out"])
@pytest.mark.parametrize(
    "rewards",
    [[[1, 0, 0, 1], [3, 2, 2, 2.5]], [[1, NONE, 0, 1], [NONE, NONE, NONE, 2]], [[1, 1, 1, 1], [NONE] * 4]],
    ids=["all", "some", "even"],
)
def test_advantages_are_those_computed_plainly(kind: str, rewards: list[list[float]]) -> None:
    flat = [value for group in rewards for value in group if value == value]
    expected = []
    for group in rewards:
        known = [value for value in group if value == value]
        for i, value in enumerate(group):
            others = [other for j, other in enumerate(group) if j != i and other == other]
            if value != value:
                expected.append(0.0)
            elif kind == "leave_one_out":
                expected.append(value - np.mean(others) if others else 0.0)
            else:
                among = {"group": known, "batch": flat, "mean": None}[kind]
                deviation = 1 if among is None else (np.std(among, ddof=1) if len(among) > 1 else 0) + 1e-4
                expected.append((value - np.mean(known)) / deviation)
    found = advantages(torch.tensor(rewards, dtype=torch.float64), kind).flatten()
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_a_function_has_the_parameters_that_its_loss_reads() -> None:
    parameters = {name: [*inspect.signature(loss).parameters.values()][1:] for name, (loss, _) in LOSSES.items()}
    read = {name: {one.name: one.default for one in some} for name, some in parameters.items()}
    assert read == {name: facts.reads for name, facts in POLICY_LOSSES.items()}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gpro", {}, "unknown policy loss 'gpro'. Did you mean 'grpo'"),
        ("cispo", {"epsilon": 0.1}, "epsilon is no setting of the loss cispo. Remove it, or set epsilon_max"),
        ("gspo", {"epsilon": 1.0}, "epsilon=1.0 of the loss gspo: the value should be less than 1"),
        ("dapo", {"kl": "k4"}, "kl is 'k4'; expected one of corrected, k1"),
        ("dapo", {"kl_weight": 0.1}, "Pass reference_logps"),
        ("dr_grpo", {}, "Pass max_length"),
    ],
)
def test_what_cannot_be_is_refused(name: str, settings: dict, message: str, answers: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(name, *(answers[key] for key in ("logps", "old_logps", "advantages", "mask")), **settings)


def test_a_function_of_ones_own_is_a_mean_over_the_steps_tokens(answers: dict[str, Tensor], tmp_path: Any) -> None:
    """Without a clip the loss equals dapo's with infinite bounds, including divergence and weights."""
    (tmp_path / "own.py").write_text(
        "def mine(answers): return -answers.log_ratio.exp() * answers.advantages\ndef wrong(answers): return "
        "answers.mask[0]\n"
    )
    given = [answers[key] for key in ("logps", "old_logps", "advantages", "mask")]
    more = {"reference_logps": answers["reference"], "kl_weight": 0.1, "weights": answers["mask"] / 2, "num_tokens": 31}
    found = policy_loss(f"{tmp_path / 'own.py'}:mine", *given, **more)
    torch.testing.assert_close(found, policy_loss("dapo", *given, epsilon=1 - 1e-9, epsilon_high=1e9, **more))
    statistics = TokenStatistics()
    policy_loss(f"{tmp_path / 'own.py'}:mine", *given, statistics=statistics, **more)
    assert statistics.means(1).keys() == {"kl"}  # no clip_share
    with pytest.raises(ValueError, match=r"own.py:wrong returned shape \[\d\]; expected a tensor of shape \[6, "):
        policy_loss(f"{tmp_path / 'own.py'}:wrong", *given)
