"""Evaluation mode without gradients for a while, whatever the modes of the modules before."""

import pytest
import torch
from torch import nn

from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import sample
from lean_ft.losses import CrossEntropy
from lean_ft.peft import apply_lora
from lean_ft.settings import LoRAConfig
from lean_ft.system.passes import evaluating, first_pass
from lean_ft.training.regularization import add_embedding_noise
from tests.parallel.small_training import Config, make_batch, small_model
from tests.peft.conftest import randomize


def test_each_module_has_its_earlier_mode_afterwards_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    with evaluating(model), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    with pytest.raises(RuntimeError), evaluating(model):
        model(torch.zeros(3))
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_a_decorated_function_evaluates_at_each_call() -> None:
    model = nn.Linear(2, 2)

    @evaluating(model)
    def evaluate() -> tuple[bool, bool]:
        return model.training, torch.is_grad_enabled()

    assert evaluate() == evaluate() == (False, False)
    assert model.training


def test_evaluations_and_samples_of_a_model_in_training_have_no_dropout_and_no_noise() -> None:
    """And they draw no random numbers, so that they do not change the training that follows."""
    model = small_model()
    apply_lora(model, LoRAConfig.model_validate({"rank": 4, "dropout": 0.5}))
    randomize(model)
    add_embedding_noise(model, 5.0)
    cross_entropy, batches = CrossEntropy(model, Config()), [make_batch(0)]
    results = []
    for mode in (True, False):
        model.train(mode)
        state = torch.get_rng_state()
        evaluated = cross_entropy.evaluate(model, batches)["eval_loss"]
        sampled = sample(model, [[1, 2, 3]], Sampling(8, temperature=1.0))[0]
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training == mode
        results.append((evaluated, sampled.ids, sampled.log_probs))
    assert results[0] == results[1]


def test_the_first_pass_keeps_nothing_for_backward() -> None:
    layer = nn.Linear(2, 2)
    with first_pass(compiled=True):
        recorded = layer(torch.ones(2)).square().sum()
    with pytest.raises(RuntimeError, match="kept nothing for backward"):
        recorded.backward()
