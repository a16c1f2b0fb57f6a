"""The recipe on the embedded model equals an independent loop, with any settings of memory and layout."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lean_ft.data import UnpairedBatch, prepare_batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.tokenizers import load_tokenizer
from tests.recipes import cases
from tests.recipes.conftest import Train, config_of, first_rows, planned, run_recipe, update

RECIPE = "kto"
SETTINGS = cases.SETTINGS[RECIPE]
WEIGHTS = ("loss.desirable_weight=1.5", "loss.undesirable_weight=0.5", "loss.beta=0.3")


@cache
def by_hand(name: str, packing: str, num_steps: int = 4) -> tuple[list[float], list[float]]:
    """KTO written by hand: one completion at a time, whole logits, two transformers models, torch's AdamW.
    Return losses and baselines."""
    config = config_of("kto", *SETTINGS, f"data.packing={packing}")
    batches, _ = prepare_batches(config.data, load_tokenizer("tiny"), batch_size=4, seed=config.seed)
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"), dtype=torch.float32) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)

    def gain(prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        def log_prob(model: Any) -> torch.Tensor:
            ids = torch.cat([prompt, answer])[:96]
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
            return sum(log_probs[t - 1, ids[t]] for t in range(len(prompt), len(ids)))

        with torch.no_grad():
            expected = log_prob(frozen)
        return log_prob(policy) - expected

    losses, baselines, seen = [], [], []
    for _ in range(num_steps):
        (batch,) = batches.take(1)
        documents, ids, labels = [], batch.input_ids.flatten(), batch.labels.flatten()
        for start in (batch.positions.flatten() == 0).nonzero()[:, 0].tolist():
            targets = start + (labels[start:] >= 0).nonzero()[:, 0]
            if len(targets) and (batch.positions.flatten()[start + 1 : targets[0]] > 0).all():
                first = int(targets[0]) + 1
                last = first
                while last < len(labels) and labels[last] >= 0:
                    last += 1
                documents.append((ids[start:first], ids[first : last + 1]))
        assert len(documents) == 4
        with torch.no_grad():
            mismatched = [gain(documents[i][0], documents[i - 1][1]) for i in range(4)]
        z = torch.stack(mismatched).mean().clamp(min=0) if name == "kto" else torch.zeros(())
        z = torch.tensor(seen).mean() if name == "bco" and seen else z
        gained = torch.stack([gain(*document) for document in documents])
        seen += gained.tolist()
        losses_of_answers = []
        for d, desirable in zip(gained, batch.is_desirable, strict=True):
            above = 0.3 * (d - z) * (1 if desirable else -1)
            weight = 1.5 if desirable else 0.5
            losses_of_answers.append(weight * (-above.sigmoid().log() if name == "bco" else 1 - above.sigmoid()))
        loss = torch.stack(losses_of_answers).mean()
        losses.append(update(optimizer, loss))
        baselines.append(z.item())
    return losses, baselines


EQUAL = [
    ("kto", ()),
    ("bco", ("batch_size=2", "gradient_accumulation_steps=2")),
    ("kto", ("data.packing=padding_free", "reference.kind=model", "optimizer.in_backward=true")),
    ("kto", ("memory.activation_checkpointing=full", "memory.loss_chunk_tokens=16", "memory.tile_mlp=2")),
    ("bco", ()),
    ("apo_zero_unpaired", ("batch_size=1", "gradient_accumulation_steps=4", "memory.tied_gradient=separate")),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "settings"), EQUAL, ids=str)
def test_four_steps_equal_a_loop_by_hand(train: Train, name: str, settings: tuple[str, ...]) -> None:
    """Also with micro-batches, except kto: its baseline uses the prompts and completions of one micro-batch."""
    lines = train("max_steps=4", f"loss.name={name}", *WEIGHTS, *settings)
    losses, baselines = by_hand(name, "padding_free" if "data.packing=padding_free" in settings else "none")
    assert name == "apo_zero_unpaired" or max(map(abs, baselines)) > 0.02
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=5e-5)  # as in test_dpo
    assert [line["baseline"] for line in lines] == pytest.approx(baselines, rel=1e-3, abs=1e-4)


@pytest.mark.long
def test_the_planner_counts_adapter_and_full_runs() -> None:
    def peak(*settings: str) -> int:
        return planned("kto", *SETTINGS, *settings).peak_bytes

    assert peak("reference.kind=model") > peak("reference.kind=cached") > peak("lora.rank=4")
    # The pass over mismatched pairs ends before the pass that needs gradients.
    assert peak("reference.kind=cached") == pytest.approx(peak("loss.name=apo_zero_unpaired"), rel=0.05)


@pytest.mark.long
def test_the_reference_computes_each_text_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 completions, whose batches change in each of 3 epochs, and each epoch's 10 mismatched ones."""
    settings = (*SETTINGS, first_rows("tiny/pairs_train.jsonl", 5, tmp_path), "max_steps=null", "epochs=3")
    settings += (f"data.cache_dir={tmp_path / 'cache'}",)
    for computed in (10 + 3 * 10, 0):
        lines = run_recipe("kto", tmp_path / f"{computed}", *settings, "reference.kind=cached")
        text = f"computed log-probabilities of {computed} of 40 mismatched and other answers"
        assert text in capsys.readouterr().out
    model = run_recipe("kto", tmp_path / "model", *settings, "reference.kind=model")
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in model], abs=1e-5)


@pytest.mark.parametrize("packing", ["none", "bfd", "padding_free"])
def test_mismatched_pairs_rotate_the_completions_of_a_batch(packing: str) -> None:
    data = config_of("kto", *SETTINGS, f"data.packing={packing}").data
    batches, _ = prepare_batches(data, load_tokenizer("tiny"), batch_size=4, seed=0)
    for batch in (batch.built for batch in batches.take(3)):
        assert isinstance(batch, UnpairedBatch)
        assert batch.mismatched is not None
        answers, turned = (
            [ids.tolist() for ids in one.label.split(one.answer_tokens[:, 0].tolist())]
            for one in (batch, batch.mismatched)
        )
        assert turned == [answers[i - 1] for i in range(len(answers))]
        assert len({*batch.pairs.tolist(), *batch.mismatched.pairs.tolist()}) == 2 * len(answers)
