"""finetune on a mixture of experts: the router loss equals transformers', and no technique or resume changes a
number."""

import json
import shutil

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lean_ft.data import prepare_batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.losses import TokenLogProbs
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import load_tokenizer
from tests.recipes.cases import PROBLEMS, TINY
from tests.recipes.conftest import run_recipe

COEFFICIENT = 0.3
DATA = {"source": "tiny/validation.jsonl", "max_length": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 mixture saved by transformers, with the embedded model's tokenizer."""
    tiny, folder = resolve_model_path("tiny"), tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=json.loads((tiny / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        initializer_range=0.2,
        router_aux_loss_coef=COEFFICIENT,
        output_router_logits=True,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for file in tiny.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def train(folder, tmp_path):
    """Run the recipe in float32; return the lines of metrics.jsonl."""

    def run(*settings: str, output: str = "run"):
        given = [*TINY, f"model.path={folder}", "optimizer.lr=1e-2", "batch_size=8", "max_steps=4"]
        given += [f"data.{name}={value}" for name, value in DATA.items()]
        return run_recipe("full_finetune_single_device", tmp_path / output, *given, *settings)

    return run


def losses(lines):
    return [(line["loss"], line["router_aux_loss"], line["grad_norm"]) for line in lines]


def test_the_router_loss_equals_transformers_without_padding(train, folder):
    line = train("gradient_accumulation_steps=2", "max_steps=1")[0]
    batches, _ = prepare_batches(SFTDataConfig(**DATA), load_tokenizer(folder), batch_size=8, seed=0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected, micro_batches = 0.0, batches.take(2)
    assert any(not batch.is_token.all() for batch in micro_batches)
    for batch in micro_batches:
        logits = reference(batch.input_ids, output_router_logits=True).router_logits
        balance = load_balancing_loss_func(logits, 6, 2, batch.is_token.long())
        expected += COEFFICIENT * float(balance) * batch.num_targets / line["target_tokens"]
    assert line["router_aux_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_a_resumed_run_is_equal_and_opens_in_transformers(train, folder, tmp_path):
    settings = ("save_every=2", "schedule.name=constant", "optimizer.in_backward=true")
    whole = losses(train(*settings, output="whole"))
    train(*settings, "max_steps=2", output="parts")
    assert losses(train(*settings, output="parts")) == whole
    first, second = (tmp_path / name / "step_00000004" for name in ("whole", "parts"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    _, report = transformers.AutoModelForCausalLM.from_pretrained(first, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_the_router_coefficient_is_a_setting_and_0_disables_the_loss(train, folder, tmp_path):
    more = train("model.router_aux_loss_coef=3", "max_steps=1", output="more")[0]
    own = train("max_steps=1", output="own")[0]
    none = train("model.router_aux_loss_coef=0", "max_steps=1", output="none")[0]
    assert more["router_aux_loss"] == pytest.approx(10 * own["router_aux_loss"], rel=1e-5)
    assert "router_aux_loss" not in none
    assert more["loss"] == own["loss"] == none["loss"]
    assert more["grad_norm"] != own["grad_norm"] != none["grad_norm"]


ONLINE = (*PROBLEMS, "rewards=[length]", "generation.num_answers=4", "batch_size=8", "optimizer.lr=1e-2", "max_steps=4")
ONLINE += ("generation.passes=2", "generation.max_new_tokens=16", "model.dtype=bfloat16")


@pytest.fixture
def differences(folder, tmp_path, monkeypatch):
    """Run a recipe; return the largest difference of log-probabilities in the first step from those of sampling, and
    from those before the first update; and the metrics."""

    def run(recipe, *settings, output):
        plain, sampled, old = TokenLogProbs.__call__, [], []

        def watched(self, model, batch, statistics=None):
            now = plain(self, model, batch, statistics)
            for before, found in ((batch.sampled, sampled), (batch.old, old)):
                if before is not None:
                    found.append((now.log_probs - before)[batch.counts].abs().max().item())
            return now

        with monkeypatch.context() as patched:
            patched.setattr(TokenLogProbs, "__call__", watched)
            lines = run_recipe(recipe, tmp_path / output, *ONLINE, f"model.path={folder}", *settings)
        return max(sampled), max(old), lines

    return run


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_replayed_routers_choose_the_experts_of_sampling(differences, recipe):
    """In bfloat16, single tokens and whole rows round differently, which changes the experts of some tokens. With grpo,
    the completions of a prompt share it."""
    given = ("max_steps=1", "model.router_aux_loss_coef=0") if recipe == "grpo" else ("max_steps=1",)
    free, _, _ = differences(recipe, *given, output="free")
    replayed, since, (line,) = differences(recipe, *given, "generation.router_replay=true", output="replayed")
    assert free > 2 * replayed > 0
    assert since == 0
    assert 1 <= line["expert_load"] <= 3 and 0 < line["router_entropy"] <= 1
    assert ("router_aux_loss" in line) == (recipe == "ppo")


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["grpo", "online_dpo"])
def test_a_run_resumed_in_a_round_repeats_the_routers_choices(folder, tmp_path, recipe):
    given = [*ONLINE, f"model.path={folder}", "generation.router_replay=true", "schedule.name=constant"]
    (tmp_path / "mine.py").write_text(
        "def f(completions):\n    return [float(sum(map(ord, c)) % 7) for c in completions]"
    )
    given += ["batch_size=2", f"rewards=[{tmp_path}/mine.py:f]"]
    run_recipe(recipe, tmp_path / "parts", *given, "max_steps=3")
    found = [run_recipe(recipe, tmp_path / name, *given) for name in ("parts", "whole")]
    names = ("loss", "grad_norm", "expert_load", "unused_experts", "router_entropy", "router_aux_loss")
    parts, whole = ([tuple(line[name] for name in names) for line in lines] for lines in found)
    assert parts == whole
