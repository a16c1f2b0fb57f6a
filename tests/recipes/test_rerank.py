"""rerank on the embedded model: loops by hand over transformers' models, and CrossEncoder on the saved folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lean_ft.embedding.encode import open_reranker
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.models.safetensors_file import read_header
from tests.recipes.conftest import Train, update

RECIPE = "rerank"
ROWS = [json.loads(line) for line in resolve_data_path("tiny/notes_train.jsonl").read_text().splitlines()[:4]]
# All rows are in each step, so their order changes nothing.
STEPS = ("batch_size=2", "gradient_accumulation_steps=2", "epochs=3", "max_steps=3")
STEPS += ("optimizer.name=sgd", "optimizer.lr=0.05")
LABELS = torch.tensor([[1.0, 0.0]] * len(ROWS))


def by_hand(loss: str, yes_no: tuple[int, int] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of SGD: the losses, and the weights."""
    folder = resolve_model_path("tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if yes_no is None:
        model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        torch.nn.init.zeros_(model.score.weight)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(query: str, passage: str) -> Tensor:
        logits = model(
            tokenizer(f"{query}\n{passage}", add_special_tokens=False, return_tensors="pt")["input_ids"]
        ).logits
        return logits[0, 0] if yes_no is None else logits[0, -1, yes_no[0]] - logits[0, -1, yes_no[1]]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        scores = [score(row["query"], row[name]).squeeze() for row in ROWS for name in ("positive", "negative")]
        table = torch.stack(scores).view_as(LABELS)
        if loss == "bce":
            value = binary_cross_entropy_with_logits(table, LABELS)
        else:
            value = -(LABELS.softmax(1) * table.log_softmax(1)).sum(1).mean()
        losses.append(update(optimizer, value))
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("bce", None),
        pytest.param("listnet", None, marks=pytest.mark.long),
        pytest.param("bce", ("a", "b"), marks=pytest.mark.long),
    ],
)
def test_steps_are_those_of_a_loop_by_hand(
    train: Train, tmp_path: Path, loss: str, words: tuple[str, str] | None
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    own = () if words is None else (f"loss.yes_no=[{','.join(words)}]",)
    lines = train(f"data.source={file}", f"loss.name={loss}", *STEPS, *own)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    ids = None if words is None else tuple(tokenizer.convert_tokens_to_ids(list(words)))
    losses, weights = by_hand(loss, ids)
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] != losses[0]
    (saved,) = (tmp_path / "run" / "step_00000003").glob("*.safetensors")
    for name, value in read_header(saved).items():
        torch.testing.assert_close(value.read(), weights[name], rtol=1e-5, atol=1e-5)


@pytest.mark.long  # importing sentence-transformers takes long
@pytest.mark.parametrize("own", [(), ("loss.yes_no=[a,b]",)], ids=["layer", "words"])
def test_a_cross_encoder_opens_it_with_equal_scores(train: Train, tmp_path: Path, own: tuple[str, ...]) -> None:
    library = pytest.importorskip("sentence_transformers")
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    train(f"data.source={file}", *STEPS, *own)
    folder = tmp_path / "run" / "step_00000003"
    passages = [row[name] for row in ROWS for name in ("positive", "negative")]
    query = ROWS[0]["query"]
    ours = open_reranker(folder, "cpu").scores(query, passages).sigmoid()
    theirs = library.CrossEncoder(str(folder), device="cpu").predict([(query, passage) for passage in passages])
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-5)
    assert ours.std() > 1e-4
