"""Preference losses compared with TRL's method, in float64 if TRL supports it, and their errors."""

import inspect
import math
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lean_ft
from lean_ft.losses.preference import LOSSES, log_odds, preference_loss
from lean_ft.settings import PREFERENCE_LOSSES, PreferenceLossConfig

NUM_PAIRS, NUM_TOKENS = 5, 9


@pytest.fixture
def answers() -> dict[str, Tensor]:
    """Token log-probabilities (2 P, T) in TRL's order, chosen completions before rejected ones, and their lengths."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(2 * NUM_PAIRS, NUM_TOKENS, generator=generator, dtype=torch.float64) * 3 - 1e-3
    reference = log_probs + torch.randn(2 * NUM_PAIRS, NUM_TOKENS, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, NUM_TOKENS + 1, (2 * NUM_PAIRS,), generator=generator)
    mask = (torch.arange(NUM_TOKENS) < lengths[:, None]).to(torch.float64)
    squares = -torch.rand(2 * NUM_PAIRS, NUM_TOKENS, generator=generator, dtype=torch.float64)
    return {
        "log_probs": (log_probs * mask).requires_grad_(),
        "reference": reference * mask,
        "mask": mask,
        "squares": squares * mask,
    }


def ours(name: str, answers: dict[str, Tensor], **settings: Any) -> Tensor:
    sums, frozen, counts = (answers[key].sum(1) for key in ("log_probs", "reference", "mask"))
    if name in ("simpo", "cpo", "orpo"):
        frozen = torch.zeros_like(frozen)
    chunks = [half for tensor in (sums, frozen, counts) for half in tensor.chunk(2)]
    return preference_loss(name, *chunks, **settings)


def trl_dpo_loss(loss_type: str, answers: dict[str, Tensor], label_smoothing: float = 0.0, **changes: Any) -> Tensor:
    """The mean loss of TRL's DPOTrainer, with stubs for its model and accelerator."""
    from trl.trainer import dpo_trainer as trl_dpo

    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
    )

    def model(**_: Any) -> Any:
        nothing = torch.zeros_like(answers["mask"])
        return SimpleNamespace(
            log_probs=answers["log_probs"],
            log_sum_sq_probs=answers["squares"],
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
        )

    mask = torch.nn.functional.pad(answers["mask"].long(), (1, 0))
    trainer = SimpleNamespace(
        **{
            "accelerator": accelerator,
            "model": SimpleNamespace(training=True),
            "aux_loss_enabled": False,
            "ld_alpha": None,
            "precompute_ref_logps": True,
            "f_divergence_type": "reverse_kl",
            "loss_types": [loss_type],
            "loss_weights": [1.0],
            "beta": 0.3,
            "label_smoothing": label_smoothing,
            "use_weighting": False,
            "_metrics": {"train": defaultdict(list)},
            "_total_train_tokens": 0,
            "_tp_size": 1,
            **changes,
        }
    )
    frozen = answers["reference"].sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": frozen[0],
        "ref_rejected_logps": frozen[1],
    }
    return trl_dpo.DPOTrainer._compute_loss(trainer, model, inputs, False)


# our loss and settings -> TRL's name
DPO = [
    ("sigmoid", {}, "sigmoid"),
    ("robust", {"label_smoothing": 0.2}, "robust"),
    ("ipo", {}, "ipo"),
    ("hinge", {}, "hinge"),
    ("sigmoid_norm", {}, "sigmoid_norm"),
    ("apo_zero", {}, "apo_zero"),
    ("apo_down", {}, "apo_down"),
    ("nca", {}, "nca_pair"),
    ("bco_pair", {}, "bco_pair"),
    ("sppo", {}, "sppo_hard"),
    ("exo", {"label_smoothing": 0.01}, "exo_pair"),
]


@pytest.mark.parametrize(("name", "settings", "theirs"), DPO, ids=[name for name, _, _ in DPO])
def test_a_loss_with_a_reference_is_that_of_trl(name: str, settings: Any, theirs: str, answers: Any) -> None:
    # TRL computes log(label_smoothing) in float32.
    tolerance = 1e-12 if name != "exo" else 1e-7
    expected = trl_dpo_loss(theirs, answers, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, answers["log_probs"])
    loss = ours(name, answers, beta=0.3, **settings).mean()
    (gradient,) = torch.autograd.grad(loss, answers["log_probs"])
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        gradient * answers["mask"], expected_gradient * answers["mask"], rtol=tolerance, atol=1e-9
    )


def test_label_smoothing_is_that_of_trls_aot_of_single_pairs(answers: Any) -> None:
    """TRL's sigmoid ignores the setting. Its aot with a single pair has the same formula."""
    for i in range(NUM_PAIRS):
        pair = {key: value[[i, NUM_PAIRS + i]].detach() for key, value in answers.items()}
        expected = trl_dpo_loss("aot", pair, label_smoothing=0.1)
        torch.testing.assert_close(ours("sigmoid", pair, beta=0.3, label_smoothing=0.1).mean(), expected)


@pytest.mark.parametrize("name", ["simpo", "cpo"])
def test_a_loss_without_a_reference_is_that_of_trl(name: str, answers: Any) -> None:
    """Except cpo's loss of the chosen completion, which TRL averages over all tokens of the batch, including
    prompts."""
    from trl.experimental.cpo import cpo_trainer as cpo

    trainer = SimpleNamespace(
        alpha=0.0,
        beta=2.0,
        simpo_gamma=0.5,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo" if name == "simpo" else "sigmoid",
    )
    chosen, rejected = answers["log_probs"].sum(1).chunk(2)
    counts = answers["mask"].sum(1).chunk(2)
    given = (chosen / counts[0], rejected / counts[1]) if name == "simpo" else (chosen, rejected)
    expected, _, _ = cpo.CPOTrainer.cpo_loss(trainer, *given)
    if name == "cpo":
        expected = expected - 0.7 * chosen / counts[0]
    loss = ours(name, answers, beta=2.0, **({"gamma": 0.5} if name == "simpo" else {"alpha": 0.7}))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def test_orpo_is_that_of_trl(answers: Any) -> None:
    """In float32, because TRL casts to it; without the term of the chosen completion, as for cpo."""
    from trl.experimental.orpo import orpo_trainer as orpo

    counts = answers["mask"].sum(1).chunk(2)
    chosen, rejected = (half / count for half, count in zip(answers["log_probs"].sum(1).chunk(2), counts, strict=True))
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    ratio = orpo.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    torch.testing.assert_close(
        ours("orpo", answers, beta=0.3), -chosen - ratio, rtol=1e-5, atol=1e-5, check_dtype=False
    )


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_the_float64_value_and_gradient_and_all_gradients_are_finite_at_the_ends(
    name: str, answers: Any
) -> None:
    exact = ours(name, answers)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), answers["log_probs"])
    narrow = {key: value.detach().float() for key, value in answers.items()}
    narrow["log_probs"].requires_grad_()
    loss = ours(name, narrow)
    (gradient,) = torch.autograd.grad(loss.sum(), narrow["log_probs"])
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-5)
    for log_prob in (0.0, -1e-9, -1e-3, -1e4):
        ends = torch.full((2,), log_prob, requires_grad=True)
        some = torch.tensor([-1.0, -2.0], requires_grad=True)
        ones = torch.ones(2)
        value = preference_loss(name, ends, some, 0 * ones, 0 * ones, ones, ones)
        value = value + preference_loss(name, some, ends, 0 * ones, 0 * ones, ones, ones)
        gradients = torch.autograd.grad(value.sum(), [ends, some])
        assert all(x.isfinite().all() for x in (value, *gradients)), log_prob


def test_log_odds_are_exact_for_every_probability() -> None:
    x = -torch.logspace(-6, 1.5, 200, dtype=torch.float64)
    exact = [float(v) - math.log(-math.expm1(float(v))) for v in x]
    torch.testing.assert_close(log_odds(x.float()), torch.tensor(exact).float(), rtol=1e-5, atol=2e-6)


def test_a_margin_of_zero_is_a_loss_of_ln_2() -> None:
    sums, counts = torch.tensor([-3.0, -500.0]), torch.tensor([4, 400])
    loss = preference_loss("sigmoid", sums, sums - 7, sums, sums - 7, counts, counts)
    torch.testing.assert_close(loss, torch.full((2,), math.log(2)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sigmod", {}, "Did you mean.*sigmoid"),
        ("nca_pair", {}, "nca"),
        (
            "sigmoid",
            {"gamma": 1.0},
            "gamma is no setting of the loss sigmoid. Remove it, or set beta or label_smoothing",
        ),
        ("ipo", {"label_smoothing": 0.1}, "label_smoothing is no setting of the loss ipo. Remove it, or set beta"),
        (
            "robust",
            {"label_smoothing": 0.5},
            "label_smoothing=0.5 of the loss robust: the value should be less than 0.5",
        ),
        ("exo", {"label_smoothing": 0.0}, "above 0"),
        ("cpo", {"alpha": -1}, "alpha=-1 of the loss cpo: the value should be greater than or equal to 0"),
        ("ipo", {"beta": 0.0}, "beta=0.0 of the loss ipo: the value should be greater than 0"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(name: str, settings: Any, message: str, answers: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ours(name, answers, **settings)


def test_a_function_has_the_parameters_that_its_loss_reads() -> None:
    parameters = {name: [*inspect.signature(loss).parameters.values()][2:] for name, loss in LOSSES.items()}
    read = {name: {one.name: one.default for one in some} for name, some in parameters.items()}
    assert read == {name: facts.reads for name, facts in PREFERENCE_LOSSES.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_the_page_has_a_row_with_the_defaults_of_each_loss(name: str) -> None:
    page = (Path(lean_ft.__file__).parents[1] / "docs" / "preferences.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    facts = PREFERENCE_LOSSES[name]
    values = [*facts.reads.values(), *([facts.beta] if facts.beta != 0.1 else [])]
    assert all(re.search(rf" {value:g}\b", row) for value in values), row
    assert ("no reference" in row) != facts.needs_reference


NEW_LOSS = """
def squared(pairs: Pairs, beta: float, gamma: float = 0.5) -> Tensor:
    return (pairs.margin - gamma).square()
"""
USE_OF_IT = """
from lean_ft.losses import preference_loss
from lean_ft.settings import PreferenceLossConfig
from lean_ft.settings.describing import describe
from lean_ft.system import catalog
assert PreferenceLossConfig(name="squared", gamma=2).own_settings == {"gamma": 2}
assert PreferenceLossConfig(name="squared").beta_of_loss == 0.3
[name] = [one for one in describe(catalog.load_recipe(catalog.find_recipe("dpo")).Config) if one.key == "loss.name"]
assert "squared" in name.type
import torch
one = torch.ones(1)
print(preference_loss("squared", 5 * one, one, one, one, one, one, gamma=1.5).item())
for given in ({"alpha": 1}, {"gamma": float("inf")}):
    try: preference_loss("squared", *[one] * 6, **given)
    except ValueError as error: print(error)
"""


@pytest.mark.long
def test_a_new_loss_is_a_function_and_a_row_of_the_settings(tmp_path: Path) -> None:
    """Names, help, defaults, checks of the settings and of the arguments, and `preference_loss` follow from them."""
    package = Path(lean_ft.__file__).parent
    shutil.copytree(package, tmp_path / "lean_ft", ignore=shutil.ignore_patterns("tiny", "__pycache__"))
    (tmp_path / "recipes").symlink_to(package.parent / "recipes")
    for file, mark, new in (
        ("losses/preference.py", "LOSSES: dict", NEW_LOSS.lstrip()),
        ("settings/losses.py", '    "orpo": ', '    "squared": LossFacts({"gamma": 0.5}, beta=0.3),'),
    ):
        text = (tmp_path / "lean_ft" / file).read_text()
        assert text.count(mark) == 1
        (tmp_path / "lean_ft" / file).write_text(text.replace(mark, f"{new}\n{mark}"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USE_OF_IT], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "6.25",
        "alpha is no setting of the loss squared. Remove it, or set beta or gamma.",
        "gamma=inf of the loss squared: the value should be a finite number.",
    ], done.stderr


def test_a_function_of_ones_own_is_called_as_those_that_are_there(answers: Any, tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(
        "from lean_ft.losses.preference import ipo, sigmoid as mine\ndef wrong(pairs, beta): return "
        "pairs.margin.sum()\n"
    )
    file = f"{tmp_path / 'own.py'}:"
    torch.testing.assert_close(
        ours(f"{file}mine", answers, beta=0.3), ours("sigmoid", answers, beta=0.3), rtol=0, atol=0
    )
    for name, settings, message in (
        ("wrong", {}, r"own.py:wrong returned shape \[\]; expected a tensor of shape \[\d"),
        (
            "mine",
            {"label_smoothing": 0.1},
            "label_smoothing is no setting of the loss .*own.py:mine. Remove it, or set beta",
        ),
        ("none", {}, "own.py has no function none; it has wrong|ipo"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(file + name, answers, **settings)
    assert PreferenceLossConfig(name=f"{file}ipo").needs_reference
    with pytest.raises(ValueError, match="own.py has no function none"):
        PreferenceLossConfig(name=f"{file}none")
