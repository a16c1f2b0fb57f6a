"""Rounds of completions of prompts with images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.data import EvalBatches, prepare_batches, prompt_rows
from lean_ft.data.collate import batch_of
from lean_ft.frozen.reward_model import JudgingModel, open_reward_model
from lean_ft.frozen.scoring import score_rows
from lean_ft.generation import Completion
from lean_ft.losses import TokenLogProbs
from lean_ft.models import REWARD_LABELS, load_model, save_model
from lean_ft.online import PairRollouts, Rollouts, Sampler, ValuedRollouts
from lean_ft.online.rewards import Scores
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import answer_held_out
from tests.data.image_folders import WRITTEN
from tests.recipes.conftest import config_of, planned, run_recipe
from tests.training.image_runs import model_folder, write_rows

FAMILIES = ["qwen3_vl", "gemma3"]
ROUND = ("generation.num_answers=2", "generation.max_new_tokens=6", "generation.temperature=1.0", "batch_size=4")
RUN = ("max_steps=2", "model.dtype=float32", "device=cpu", "plan=false", "save_every=0", "rewards=[length]")


@pytest.fixture(scope="module", params=FAMILIES)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of a model, and of two prompts with the same text and different images, one with two, and one with
    none."""
    top = tmp_path_factory.mktemp(request.param)
    model_folder(request.param, top / "model")
    rows = write_rows(request.param, top / "rows", [[0], [1], [2, 3], []])
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[1]["messages"][0] = lines[0]["messages"][0]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (
        f"model.path={top / 'model'}",
        "model.images=frozen",
        f"data.source={rows}",
        "data.shuffle=false",
        *ROUND,
        *RUN,
    )


@pytest.mark.parametrize("shares", [False, True], ids=["repeated", "shared"])
@torch.no_grad()
def test_the_trainer_computes_the_log_probabilities_of_the_sampler(given, shares: bool):
    cfg = config_of("grpo", *given, "batch_size=8")
    tokenizer, model = load_tokenizer(cfg.model), load_model(cfg.model)
    prompts, _ = prompt_rows(cfg.data, tokenizer, cfg.seed)
    rollouts: Any = Rollouts(cfg, prompts, tokenizer.pad_id, share_prompts=shares)
    optimizer: Any = None
    answer = Sampler(cfg, model, tokenizer, optimizer)
    rollouts.sample(answer, lambda asked, _: Scores([float(i) for i in range(8)], [[]] * 8, [""] * 8))
    rollouts.begin()
    (batch,) = rollouts.take()
    assert batch.counted["images"] == (4 if shares else 8)
    now = TokenLogProbs(model, cfg)(model, batch)
    torch.testing.assert_close(now.log_probs[batch.counts], batch.sampled[batch.counts], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "kind"), [("grpo", Rollouts), ("online_dpo", PairRollouts), ("ppo", ValuedRollouts)]
)
def test_a_sampled_token_that_opens_or_closes_an_image_is_not_trained(given, recipe: str, kind: Any):
    cfg = config_of(recipe, *given, "batch_size=2" if recipe == "online_dpo" else "batch_size=4")
    tokenizer = load_tokenizer(cfg.model)
    prompts, _ = prompt_rows(cfg.data, tokenizer, cfg.seed)
    rollouts, marks = kind(cfg, prompts, tokenizer.pad_id), WRITTEN["qwen3_vl"][1] + WRITTEN["gemma3"][1]
    never = {number for token in marks if (number := tokenizer.token_id(token)) is not None}
    said = [[*never], [65, *never, 66], [67, 68], [69, max(never)]]
    samples = [Completion(ids=ids, log_probs=[-1.0] * len(ids), ended=True) for ids in said]
    rollouts.sample(lambda *_: samples, lambda *_: Scores([0.0, 1.0, 2.0, 3.0], [[]] * 4, [""] * 4))
    if recipe == "ppo":
        for i, ids in enumerate(said):
            told = [0.5] * len(ids)
            rollouts._token_values[i] = {"old": told, "entropies": told, "divergences": told, "values": told}
    rollouts.begin()
    (batch,) = rollouts.take()
    # A pair needs two completions with trained tokens, and the first prompt has one.
    assert sorted(batch.label.tolist()) == ([67, 68, 69] if recipe == "online_dpo" else [65, 66, 67, 68, 69])
    assert recipe == "online_dpo" or batch.counts.sum() == batch.num_targets == 5


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["grpo", "online_dpo", "ppo"])
def test_recipes_train(given, recipe: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def reward(completion_ids, **_): return [float(i) for i, _ in enumerate(completion_ids)]\n"
    )
    own = (f"rewards=[{tmp_path}/mine.py:reward]", *(("batch_size=2",) if recipe == "online_dpo" else ()))
    lines = run_recipe(recipe, tmp_path / "run", *given, *own)
    assert [line["step"] for line in lines if line.get("grad_norm", 0) > 0] == [1, 2]


@pytest.mark.first(1)
@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_held_out_questions_are_asked_with_their_images(given, packing: str):
    cfg = config_of("finetune", *given[:4], "data.max_length=256", f"data.packing={packing}", "device=cpu")
    tokenizer, model = load_tokenizer(cfg.model), load_model(cfg.model, dtype=torch.float32)
    batches, _ = prepare_batches(cfg.data, tokenizer, batch_size=2, seed=0)
    held_out = EvalBatches(batches.layout, batches.report)
    prompts, _ = prompt_rows(config_of("grpo", *given).data, tokenizer, 0)
    asked = [question.identity for batch in held_out for question, _ in batch.questions()]
    assert sorted(asked) == sorted(prompts[i].text.identity for i in range(4))
    report = answer_held_out(model, tokenizer, held_out, 4)
    assert {answer.expected for answer in report.answers} == {prompts[i].columns["answer"] for i in range(4)}


@pytest.mark.first(1)
def test_a_reward_model_sees_the_images(given, tmp_path: Path):
    """The score at the last token is the same from rows, from sampled ids, and from a forward pass over a batch."""
    cfg = config_of("grpo", *given)
    tokenizer, model = load_tokenizer(cfg.model), load_model(cfg.model.path, scores=REWARD_LABELS, images="frozen")
    torch.nn.init.normal_(model.output_weight, generator=torch.Generator().manual_seed(0))
    save_model(model, tmp_path)
    tokenizer.save(tmp_path)
    prompts, _ = prompt_rows(cfg.data, tokenizer, cfg.seed)
    said = [tokenizer.encode(prompts[i].columns["answer"] + "<|im_end|>") for i in range(4)]
    documents = [prompts[i].text for i in range(4)]
    judged = JudgingModel(str(tmp_path), "cpu", tokenizer)([], [], documents, said)
    texts = [asked.continued(ids) for asked, ids in zip(documents, said, strict=True)]
    width = max(map(len, texts))
    batch = batch_of(texts, kind="padded", row_tokens=width, pad_id=0)
    with torch.no_grad():
        hidden = model(**batch.inputs, return_hidden=True) @ model.output_weight.T
    expected = [float(hidden[i, len(text) - 1]) for i, text in enumerate(texts)]
    assert judged == pytest.approx(expected, abs=1e-4) and len({round(one, 3) for one in judged}) == 4
    opened = open_reward_model(tmp_path, "cpu")
    assert [row["score"] for row in score_rows(*opened, str(cfg.data.source))] == pytest.approx(expected, abs=1e-4)
    text_alone = load_tokenizer("tiny")
    with pytest.raises(ValueError, match="only if it has a vision tower and the policy's tokenizer"):
        JudgingModel(str(tmp_path), "cpu", text_alone)(["?"] * 4, ["!"] * 4, documents, said)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["grpo", "online_dpo", "ppo"])
def test_a_plan_counts_prompts_that_are_full_of_images(given, recipe: str):
    rows = ("data.max_prompt_length=128", *(("batch_size=2",) if recipe == "online_dpo" else ()))
    plans = [planned(recipe, *given, *rows, f"model.images={images}", device=None) for images in ("frozen", "none")]
    assert plans[0].peak.total_bytes > plans[1].peak.total_bytes + 128 * 4 * 3 * 14**2
