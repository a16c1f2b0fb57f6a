"""Batches of sampled completions: sharing a prompt gives the same training as repeating the prompt."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_ft.data import PolicyBatch, Prompt
from lean_ft.data.prompts import Prompts
from lean_ft.data.report import DataReport
from lean_ft.generation import Completion
from lean_ft.losses import TokenLogProbs, TokenStatistics, batch_loss
from lean_ft.memory import apply_memory
from lean_ft.models import Decoder, decoder_config
from lean_ft.online import PairRollouts, Rollouts
from lean_ft.online.episodes import Episode
from lean_ft.online.rewards import Scores
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.training import shares_prompts
from tests.data.pair_texts import texts_of
from tests.models.family_cases import CASES, SIZES

GROUP = 4
LENGTHS = [7, 1, 5, 6, 3, 9, 1, 2, 8, 4, 0, 6]  # of three groups; one completion is empty
PROMPTS = [[11, 12, 13, 14, 15], [21], [31, 32, 33]]
FAMILIES = ["llama_biases", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"]


def settings(*more: str, recipe: str = "grpo") -> Any:
    given = ("model.path=tiny", "data.source=unread", "rewards=[length]", f"generation.num_answers={GROUP}")
    given += ("generation.temperature=0.8", "output_dir=unused", "device=cpu", "loss.mask_truncated=true", *more)
    return load_config(load_recipe(find_recipe(recipe)).Config, None, list(given))


def random_model(case: str, cfg: Any) -> Decoder:
    kind, more = CASES[case]
    model, generator = Decoder(decoder_config({**SIZES, "model_type": kind, **more})), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.2, generator)
    for layer in model.layers:
        if hasattr(getattr(layer.mlp, "gate", None), "e_score_correction_bias"):
            layer.mlp.gate.e_score_correction_bias.zero_()  # a buffer without a value of its own
    apply_memory(model.double(), cfg.memory, compile=False)
    return model


def rollouts_of(cfg: Any, kind: type = Rollouts, shortest: int = 0, num_choices: int = 0, **sharing: bool) -> Any:
    """A sampled round whose second completion is truncated and whose last completion has no reward. With `num_choices`,
    its tokens have recorded experts, which are equal in equal prompts."""
    prompts = Prompts(
        [Prompt(ids, "", {}, "") for ids in PROMPTS], seed=0, report=DataReport("prompts"), fingerprint=""
    )
    generator = torch.Generator().manual_seed(0)
    samples = [
        Completion(torch.randint(3, 101, (n,), generator=generator).tolist(), [-1.0] * n, i != 1)
        for i, n in enumerate(max(n, shortest) for n in LENGTHS)
    ]
    rewards = [*torch.rand(11, generator=generator).tolist(), None]
    rollouts = kind(cfg, prompts, 0, **sharing)
    # The first of some consecutive experts, by position and token.
    first = np.random.default_rng(0).integers(0, 4, (20, 101, 1))

    def answer(asked: list[Prompt], seed: int) -> list[Completion]:
        for prompt, one in zip(asked, samples if num_choices else (), strict=False):
            ids = [*prompt.ids, *one.ids][:-1]
            experts = (first[range(len(ids)), ids] + np.arange(num_choices)) % 4 + 1
            one.experts = base64.b64encode(experts.astype(np.int16).tobytes()).decode()
        return samples

    rollouts.sample(answer, lambda *_: Scores(rewards, [[]] * 12, [""] * 12))
    return rollouts


def learned(cfg: Any, model: Decoder, frozen: Decoder, share: bool) -> tuple[list[Any], list[PolicyBatch]]:
    """Losses, log-probabilities, metrics and gradients of two passes over a round, and the batches of the last pass."""
    num_choices = sum(model.config.choices_of_mixtures)
    rollouts = rollouts_of(cfg, shortest=min(num_choices, 1), num_choices=num_choices, share_prompts=share)
    log_probs, found = TokenLogProbs(model, cfg), list[Any]()
    with torch.no_grad():
        for batch in rollouts.to_remember():
            rollouts.remember(batch, log_probs(model, batch), None)
    rollouts.begin()
    batches: list[PolicyBatch] = []
    for _ in range(2):
        batches, statistics = rollouts.take(), TokenStatistics()
        num_answers, num_tokens = (sum(getattr(b, n) for b in batches) for n in ("num_answers", "num_targets"))
        for batch in batches:
            now = log_probs(model, batch, statistics)
            with torch.no_grad():
                reference = log_probs(frozen, batch).log_probs
            loss = batch_loss(
                cfg, batch, now, reference, num_answers=num_answers, num_tokens=num_tokens, statistics=statistics
            )
            statistics.add(loss=loss * num_tokens)
            loss.backward()
            found += [loss.detach(), now.log_probs.detach()]
        found += [torch.as_tensor(value) for value in statistics.means(num_tokens).values()]
        found += [parameter.grad for parameter in model.parameters()]
        with torch.no_grad():  # an update, so that ratios differ from 1
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1 / (1 + float(parameter.grad.norm())))
                parameter.grad = None
    return found, batches


@pytest.mark.first
@pytest.mark.parametrize("size", [12, 4, 3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_that_share_a_prompt_learn_what_each_does_alone(family: str, size: int) -> None:
    """Micro-batches of a round, a group, parts of two groups, and one completion each."""
    given = [f"batch_size={size}", f"gradient_accumulation_steps={12 // size}", "generation.passes=2"]
    given += [
        "loss.kl_weight=0.1",
        "loss.name=grpo",
        f"memory.activation_checkpointing={'full' if size == 3 else 'none'}",
    ]
    cfg = settings(*given)
    (alone, repeated), (shared, once) = (
        learned(cfg, *(random_model(family, one) for one in (cfg, settings())), share) for share in (False, True)
    )
    for ours, theirs in zip(shared, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(once, repeated, strict=True):
        assert (ours.num_targets, theirs.num_prefix_tokens) == (theirs.num_targets, 0)
        assert int(theirs.is_token.sum()) - int(ours.is_token.sum()) == ours.num_prefix_tokens
        assert (ours.num_prefix_tokens > 0) == (size > 1)


def test_ranks_that_share_rows_divide_the_recorded_experts() -> None:
    rollouts = rollouts_of(settings("batch_size=12", "gradient_accumulation_steps=1"), shortest=1, num_choices=3)
    rollouts.begin()
    (batch,) = rollouts.take()
    parts = [batch.part_of_rows(place, 2).inputs["recorded_experts"] for place in range(2)]
    assert parts[0].shape == (12, batch.labels.shape[1] // 2, 3)
    assert torch.equal(torch.cat(parts, 1), batch.inputs["recorded_experts"])


def test_pairs_of_a_round_share_their_prompts() -> None:
    """The texts of a pair equal those of separate rows. The loss of pairs is tested with data from files."""
    cfg = settings("batch_size=3", "gradient_accumulation_steps=1", f"generation.num_answers={GROUP}")
    batches = []
    for share in (False, True):
        rollouts = rollouts_of(cfg, PairRollouts, shortest=1, share_prompts=share)
        rollouts.begin()
        batches += rollouts.take()
    alone, shared = batches
    assert list(texts_of(shared)) == list(texts_of(alone))
    assert int(alone.is_token.sum()) - int(shared.is_token.sum()) == shared.num_prefix_tokens > 0


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("case", "longest", "reason"),
    [
        ("llama_dynamic_rope", 24, ""),
        ("llama_dynamic_rope", 25, r"rotary frequencies \(dynamic\) change"),
        ("granitemoehybrid", 24, "recurrent layers"),
        ("llama4_text", 24, "within chunks"),
    ],
)
def test_a_model_whose_prompts_depend_on_the_completion_computes_each(
    case: str, longest: int, reason: str, tmp_path: Path
) -> None:
    kind, more = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": kind, **more}))
    given = (f"model.path={tmp_path}", "data.max_prompt_length=16", f"generation.max_new_tokens={longest - 16}")
    assert shares_prompts(settings(*given)) == (not reason)
    of_values = settings(f"value.path={tmp_path}", *given[1:], recipe="ppo")
    assert shares_prompts(of_values) == (not reason)
    if reason:
        with pytest.raises(ValueError, match=f"data.shared_prompt=true, but .*{reason}"):
            shares_prompts(settings(*given, "data.shared_prompt=true"))
    with pytest.raises(ValueError, match="this recipe repeats the prompt"):
        rollouts_of(settings("data.shared_prompt=true", "batch_size=12"))


def test_tokens_that_the_policy_did_not_sample_are_read_and_not_trained() -> None:
    """A completion with given tokens in its middle, such as a tool's result, equals a plain loop over its sampled
    tokens."""
    cfg = settings("batch_size=12", "gradient_accumulation_steps=1", "loss.mask_truncated=false")
    model = random_model("llama_biases", cfg)
    for share in (False, True):
        rollouts = rollouts_of(cfg, shortest=4, share_prompts=share)
        for i, one in enumerate(rollouts._rollouts):
            one.trained = [place not in (1, 2, i % 7) for place in range(len(one.ids))]
            one.counts = [sampled and one.reward is not None for sampled in one.trained]
        rollouts.begin()
        [batch] = rollouts.take()
        found = TokenLogProbs(model, cfg)(model, batch).log_probs
        expected = torch.zeros_like(found)
        for row, one in enumerate(rollouts._rollouts):
            ids = torch.tensor([*rollouts._prompts[one.prompt].ids, *one.ids])
            log_probs = (model(ids[None])[0].float() / 0.8).log_softmax(-1)
            for place, token in enumerate(one.ids):
                if one.trained[place]:
                    expected[row, place] = log_probs[len(ids) - len(one.ids) + place - 1, token]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        counted = sum(sum(one.counts) for one in rollouts._rollouts)
        assert batch.num_targets == int(batch.counts.sum()) == counted > 0
        assert len(batch.label) == sum(sum(one.trained) for one in rollouts._rollouts)


def test_tool_calls_that_all_fail_are_one_warning_until_one_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = settings("batch_size=4", "gradient_accumulation_steps=1")
    prompts = Prompts([Prompt(PROMPTS[0], "", {}, "")], seed=0, report=DataReport("prompts"), fingerprint="")
    rollouts = Rollouts(cfg, prompts, 0)

    def fill(errors: list[int]) -> str:
        results = [{"role": "tool", "name": "add", "content": f"error: TypeError: {i}"} for i in range(GROUP)]
        told = [{"messages": [{"role": "assistant"}, result], "calls": 1} for result in results]
        episodes = [Episode([5], [-1.0], True, errors=n, **one) for n, one in zip(errors, told, strict=True)]
        scores = Scores([0.0, 1.0, 2.0, 3.0], [[]] * GROUP, [""] * GROUP)
        rollouts.sample(lambda asked, seed: episodes, lambda asked, completions: scores)
        return capsys.readouterr().out

    warning = "all 4 tool calls of this round failed (samples.jsonl has messages). The first: add: error: TypeError: 0"
    assert warning in fill([1, 1, 1, 1])
    assert "WARNING" not in fill([1, 1, 1, 1])
    assert "WARNING" not in fill([1, 0, 1, 1])
    assert warning in fill([1, 1, 1, 1])
