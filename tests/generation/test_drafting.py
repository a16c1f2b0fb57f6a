"""Accepted drafts are those of a loop that decodes speculatively with transformers' modules, step by step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lean_ft.data.columns import Document
from lean_ft.generation import Sampling
from lean_ft.generation.drafting import accepted_drafts
from lean_ft.models import load_model
from lean_ft.settings import ModelConfig
from tests.models.drafting_checkpoints import Checkpoint, checkpoint_with_drafting

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

PROMPTS = ([5, 9, 33, 7], [44, 45, 46], [8, 80, 12, 50, 51, 52])
NEW_TOKENS = 24
# The case, its drafting layers, the drafts of a step (a single layer runs again on its own output) and likely tokens.
CASES = [("glm4_moe", 1, 3, 2), ("deepseek_v3", 2, 2, 4), ("qwen3_next", 1, 2, 4)]


def drafts_by_hand(made: Checkpoint, ids: Tensor, number: int) -> list[int]:
    """Draft tokens behind a text (1, T), whose last token is the newest. All earlier tokens are verified."""
    inner, layers, tokens = made.model.get_decoder(), made.drafting.layers, ids
    hidden = inner(ids[:, :-1]).last_hidden_state  # (1, T - 1, D)
    rows = hidden, inner.embed_tokens(ids[:, 1:])  # of a single layer, with those that it adds itself
    drafted = []
    for place in range(number):
        if len(layers) > 1 and place:  # the next layer, which reads tokens one further
            rows = hidden, inner.embed_tokens(tokens[:, place + 1 :])
        layer = layers[place if len(layers) > 1 else 0]
        length = rows[0].shape[1]
        positions = torch.arange(length)[None]
        hidden = layer(
            rows[1],
            rows[0],
            position_embeddings=inner.rotary_emb(rows[1], positions),
            attention_mask=torch.full((length, length), float("-inf")).triu(1)[None, None],
            position_ids=positions,
            past_key_values=None,
        )
        drafted.append(int(made.model.lm_head(hidden[0, -1]).argmax()))
        tokens = torch.cat((tokens, torch.tensor([drafted[-1:]])), 1)
        if len(layers) == 1:
            rows = torch.cat((rows[0], hidden[:, -1:]), 1), inner.embed_tokens(tokens[:, 1:])
    return drafted


def decode_by_hand(made: Checkpoint, prompt: list[int], number: int) -> tuple[list[int], list[int]]:
    """The tokens of greedy speculative decoding, and the accepted drafts of each step."""
    ids = torch.tensor([prompt])
    ids = torch.cat((ids, made.model(ids).logits[:, -1:].argmax(-1)), 1)
    accepted = []
    while (left := len(prompt) + NEW_TOKENS - ids.shape[1]) > 0:
        drafts = torch.tensor([drafts_by_hand(made, ids, min(number, left))])
        own = made.model(torch.cat((ids, drafts), 1)).logits[0, ids.shape[1] - 1 :].argmax(-1)
        count = 0
        while count < drafts.shape[1] and drafts[0, count] == own[count]:
            count += 1
        accepted.append(count)
        ids = torch.cat((ids, own[None, : count + 1]), 1)
    return ids[0, len(prompt) : len(prompt) + NEW_TOKENS].tolist(), accepted


@pytest.mark.parametrize(("case", "layers", "drafts", "likely"), CASES)
@torch.no_grad()
def test_steps_are_those_of_decoding_by_hand(case: str, layers: int, drafts: int, likely: int, tmp_path: Path) -> None:
    made = checkpoint_with_drafting(tmp_path, case, layers)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"][likely:] *= 0.01  # so that some drafts are accepted
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    made.model.lm_head.load_state_dict({"weight": stored["lm_head.weight"]})
    model = load_model(ModelConfig(path=str(tmp_path), dtype="float32", mtp="train")).eval()
    found = accepted_drafts(model, [Document.of(ids) for ids in PROMPTS], Sampling(NEW_TOKENS), drafts, 100)
    steps = [number for prompt in PROMPTS for number in decode_by_hand(made, prompt, drafts)[1]]
    by_place = [sum(number > place for number in steps) for place in range(drafts)]
    assert (found.steps, list(found.accepted)) == (len(steps), by_place)
    assert 0 < by_place[0] < len(steps) and by_place[-1]  # the test has something to count
    assert found.tokens_per_step == pytest.approx(1 + sum(steps) / len(steps))
