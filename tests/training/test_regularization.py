"""Frozen weights do not change; NEFTune noise has the right scale and only in training; unsupported recipes raise
errors."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.losses import CrossEntropy
from lean_ft.models import load_model
from lean_ft.peft import apply_lora
from lean_ft.settings import LoRAConfig
from lean_ft.system.passes import evaluating
from lean_ft.training.regularization import add_embedding_noise, freeze_parameters
from tests.training.toy_runs import QWEN, metrics

LAYER_NORMS = {
    f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return load_model(tmp_path, random_init=True)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("freeze", "train", "matches"),
    [
        ([], [], lambda name: True),
        (["embed_tokens"], [], lambda name: "embed_tokens" not in name),
        (["layers.0", "model.norm"], [], lambda name: "layers.0." not in name and name != "model.norm.weight"),
        (["model.layers.[0-9].*"], [], lambda name: "layers" not in name),
        ([], ["*layernorm"], LAYER_NORMS.__contains__),
        (["layers.1"], ["*layernorm"], lambda name: name in LAYER_NORMS and "layers.0." in name),
        (["q_proj.bias"], ["self_attn"], lambda name: "self_attn" in name and not name.endswith("q_proj.bias")),
    ],
)
def test_patterns_choose_what_trains(freeze, train, matches, model):
    names = trained(model)
    freeze_parameters(model, freeze, train)
    assert trained(model) == set(filter(matches, names))


def test_of_an_adapter_a_part_can_be_frozen_and_nothing_else_is_thawed(model):
    apply_lora(model, LoRAConfig())
    freeze_parameters(model, ["lora_A"])
    assert trained(model)
    assert all(name.endswith("lora_B") for name in trained(model))
    with pytest.raises(ValueError, match="train: 'embed_tokens' matches no trained parameter"):
        freeze_parameters(model, [], ["embed_tokens"])


@pytest.mark.parametrize(
    ("freeze", "train", "message"),
    [
        (["q_prj"], [], r"freeze: 'q_prj' matches no trained parameter. Did you mean 'q_proj'\?"),
        (["lm_head"], [], "freeze: 'lm_head' matches no"),  # tied: it is the embedding
        ([], ["mlpp"], "train: 'mlpp' matches no"),
        (["*"], [], "leave no parameter to train"),
        (["mlp"], ["mlp"], "leave no parameter to train"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(freeze, train, message, model):
    with pytest.raises(ValueError, match=message):
        freeze_parameters(model, freeze, train)


@pytest.mark.first(1)
@pytest.mark.parametrize("optimizer", [[], ["optimizer.in_backward=true", "memory.activation_checkpointing=full"]])
def test_frozen_weights_keep_every_bit(optimizer, train_real, tmp_path):
    run = train_real(tmp_path / "run", *optimizer, "save_every=1", "max_steps=3", "freeze=[embed_tokens,mlp]")
    first, last = (load_file(run / f"step_0000000{step}/model.safetensors") for step in (1, 3))
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {name for name in first if "embed_tokens" in name or "mlp" in name}
    with pytest.raises(ValueError, match=r"freeze: .* then, \[\] now"):
        train_real(run, *optimizer, "max_steps=4")


def added_noise(model, **batch):
    """Noise that a forward pass adds to the embeddings, (B, T, D), read from the first layer's input."""
    seen = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(**batch)
    hook.remove()
    return seen[0] - model.model.embed_tokens.weight.detach()[batch["input_ids"]]


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        ({}, [[6] * 6, [6] * 6]),
        ({"cu_seqlens": torch.tensor([0, 2, 6, 12, 12], dtype=torch.int32)}, [[2] * 2 + [4] * 4, [6] * 6]),
        ({"is_token": torch.tensor([[1] * 3 + [0] * 3, [1] * 6]).bool()}, [[3] * 6, [6] * 6]),
    ],
)
def test_noise_is_even_and_shrinks_with_the_length_of_the_sequence(batch, lengths, model):
    """As in Jain et al.: alpha / sqrt(L * D) times a uniform number from -1 to 1."""
    add_embedding_noise(model, alpha=5.0)
    ids = torch.randint(0, 64, (2, 6))
    torch.manual_seed(0)
    noise = torch.stack([added_noise(model, input_ids=ids, **batch) for _ in range(50)])  # (50, B, T, D)
    scale = 5.0 / (torch.tensor(lengths) * 16.0).sqrt()
    assert torch.allclose(noise.abs().amax((0, 3)), scale, rtol=0.01)
    assert torch.allclose(noise.std((0, 3)), scale / math.sqrt(3), rtol=0.05)
    assert noise.mean().abs() < 0.01
    assert bool((noise.abs() <= scale[..., None] * 1.001).all())
    with evaluating(model):
        assert not added_noise(model, input_ids=ids, **batch).any()
    torch.manual_seed(0)
    with torch.no_grad():  # the first pass of gradient caching
        assert torch.equal(added_noise(model, input_ids=ids, **batch), noise[0])


def test_a_recipe_that_would_ignore_a_setting_is_refused(train, tmp_path):
    for setting, value in {"freeze": "[mlp]", "train": "[mlp]", "neftune_alpha": 5}.items():
        with pytest.raises(ValueError, match=f"{setting} is set, and this recipe ignores it.*apply_regularization"):
            train(tmp_path / "run", **{setting: value})


def test_of_held_out_rows_without_a_target_no_loss_is_told(train_real, inputs, monkeypatch, tmp_path, capsys):
    evaluate = CrossEntropy.evaluate
    monkeypatch.setattr(CrossEntropy, "evaluate", lambda self, model, batches: evaluate(self, model, []))
    run = train_real(tmp_path / "run", f"data.validation_source={inputs / 'rows.jsonl'}", "max_steps=1")
    assert metrics(run)[-1] == {"step": 1, "epoch": 0.25, "eval_loss": None}
    assert "evaluation  after step 1: no held-out token has a label" in capsys.readouterr().out
