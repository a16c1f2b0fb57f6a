"""The loss of drafting layers is the one computed by hand from transformers' hidden states."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lean_ft.data import Batch
from lean_ft.losses import CrossEntropy, TokenStatistics
from lean_ft.losses.drafting import draft_labels
from lean_ft.models import load_model
from lean_ft.settings import LossConfig, MemoryConfig, ModelConfig
from tests.models.drafting_checkpoints import Checkpoint, checkpoint_with_drafting

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

LENGTHS = (9, 2, 13)  # documents of a row of 24 tokens: the second one is too short for a draft
CASES = {"glm4_moe": 2, "deepseek_v3": 2, "qwen3_next": 1}


class Settings:
    loss, memory, compile = LossConfig(), MemoryConfig(), False

    def __init__(self, folder: Path, **of_model: Any) -> None:
        self.model = ModelConfig(path=str(folder), dtype="float32", mtp="train", **of_model)


def packed() -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
    """Two rows of packed documents with some labels, and each document's ids and labels."""
    generator = torch.Generator().manual_seed(3)
    rows, documents = [], []
    for _ in range(2):
        row = []
        for length in LENGTHS:
            ids = torch.randint(3, 90, (length,), generator=generator)
            labels = torch.cat((ids[1:], torch.tensor([-100])))
            labels[torch.rand(length, generator=generator) < 0.3] = -100
            documents.append((ids[None], labels))
            row.append((ids, labels))
        rows.append([torch.cat(parts) for parts in zip(*row, strict=True)])
    ids, labels = (torch.stack(parts) for parts in zip(*rows, strict=True))
    bounds = torch.tensor([0, *LENGTHS, *LENGTHS]).cumsum(0).to(torch.int32)
    inputs = {"input_ids": ids, "cu_seqlens": bounds, "positions": None, "is_token": None}
    return Batch(inputs, labels, int((labels != -100).sum()), labels.numel()), documents


def by_hand(made: Checkpoint, documents: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The sum of the next-token loss, and the token losses of each drafting layer and whether each draft is right."""
    next_loss, losses, are_right = torch.zeros(()), [[], []], [[], []]
    for ids, labels in documents:
        logits = made.model(ids).logits[0]
        next_loss = next_loss + F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        for k, hidden in enumerate(made.drafted(ids)):
            of_depth = labels[k + 1 :]
            logits = made.model.lm_head(hidden[0])
            losses[k].append(F.cross_entropy(logits, of_depth, reduction="none", ignore_index=-100)[of_depth != -100])
            are_right[k].append((logits.argmax(-1) == of_depth)[of_depth != -100])
    number = len(made.drafting.layers)
    return next_loss, [torch.cat(one) for one in losses[:number]], [torch.cat(one) for one in are_right[:number]]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_one_by_hand(case: str, tmp_path: Path) -> None:
    made = checkpoint_with_drafting(tmp_path, case, CASES[case])
    batch, documents = packed()
    next_loss, losses, are_right = by_hand(made, documents)
    drafting = torch.stack([one.sum() for one in losses]).mean()
    means = {
        "mtp_loss": torch.stack([one.mean() for one in losses]).mean(),
        "mtp_accuracy": torch.stack([one.float().mean() for one in are_right]).mean(),
    }

    cfg, statistics = Settings(tmp_path), TokenStatistics()
    model = load_model(cfg.model)
    loss = CrossEntropy(model, cfg)(model, batch, statistics)
    torch.testing.assert_close(loss, drafting, rtol=1e-5, atol=1e-5)
    found = statistics.means(batch.num_targets)
    for name, mean in {**means, "loss": means["mtp_loss"]}.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-5, atol=1e-5, check_dtype=False)
    loss.backward()
    made.model.requires_grad_(True).zero_grad()
    drafting.backward(retain_graph=True)
    compare_gradients(model, made)

    cfg, statistics = Settings(tmp_path, mtp_trunk="train", mtp_weight=0.7), TokenStatistics()
    model = load_model(cfg.model)
    loss = CrossEntropy(model, cfg)(model, batch, statistics)
    torch.testing.assert_close(loss, next_loss + 0.7 * drafting, rtol=1e-5, atol=1e-5)
    found = statistics.means(batch.num_targets)
    for name, mean in {**means, "loss": next_loss / batch.num_targets}.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-5, atol=1e-5, check_dtype=False)
    loss.backward()
    for module in (made.model, made.drafting):
        module.zero_grad()
    (next_loss + 0.7 * drafting).backward()
    compare_gradients(model, made)
    embedding = made.model.get_input_embeddings().weight.grad
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, embedding, rtol=1e-3, atol=2e-3)


def compare_gradients(model: Any, made: Checkpoint) -> None:
    """The gradients of what every drafting layer has, and of its block's output projection."""
    for own, theirs in zip(model.drafting, made.drafting.layers, strict=True):
        pairs = [(own.eh_proj, theirs.eh_proj), (own.enorm, theirs.enorm), (own.hnorm, theirs.hnorm)]
        pairs += [(own.shared_head["norm"], theirs.post_norm)]
        pairs += [(own.self_attn.o_proj, theirs.mtp_block.self_attn.o_proj)]
        for one, other in pairs:
            torch.testing.assert_close(one.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-4)


def test_labels_stay_in_their_document() -> None:
    """Each label that is k positions further, token by token."""
    batch, _ = packed()
    bounds = batch.cu_seqlens.tolist()
    flat = batch.labels.flatten().tolist()
    for depth in (1, 2, 3):
        expected = []
        for start, end in pairwise(bounds):
            expected += [flat[i + depth] if i + depth < end else -100 for i in range(start, end)]
        assert draft_labels(batch.labels, batch.cu_seqlens, depth).flatten().tolist() == expected
        rows = [row[depth:].tolist() + [-100] * depth for row in batch.labels]
        assert draft_labels(batch.labels, None, depth).tolist() == rows


def test_an_evaluation_counts_drafts_that_the_model_would_take(tmp_path: Path) -> None:
    made = checkpoint_with_drafting(tmp_path, "glm4_moe", 2)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"][3:] *= 0.01  # few tokens are likely, so that some drafts are accepted
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    made.model.lm_head.load_state_dict({"weight": stored["lm_head.weight"]})
    batch, documents = packed()
    cfg = Settings(tmp_path)
    model = load_model(cfg.model)
    found = CrossEntropy(model, cfg).evaluate(model, [batch])
    next_loss, losses, _ = by_hand(made, documents)
    accepted: list[list[bool]] = [[], []]
    for ids, labels in documents:
        own = made.model(ids).logits[0].argmax(-1)
        for k, hidden in enumerate(made.drafted(ids)):
            drafts = made.model.lm_head(hidden[0]).argmax(-1)
            of_depth = labels[k + 1 :] != -100
            accepted[k] += (drafts == own[k + 1 :])[of_depth].tolist()
    share = sum(sum(one) / len(one) for one in accepted) / 2
    assert found["eval_mtp_accepted"] == pytest.approx(share) and 0 < share < 1
    torch.testing.assert_close(found["eval_trunk_loss"], next_loss.detach() / batch.num_targets, rtol=1e-5, atol=1e-5)
    mean = torch.stack([one.mean() for one in losses]).mean().detach()
    torch.testing.assert_close(found["eval_loss"], mean, rtol=1e-5, atol=1e-5)
    assert model.training
