"""embed on the embedded model: a loop by hand over transformers' model; sentence-transformers on the saved folder."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

from lean_ft.embedding.encode import open_embedder
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.models.safetensors_file import read_header
from tests.recipes.cases import SETTINGS
from tests.recipes.conftest import Train, update
from tests.training.toy_runs import digests, metrics

RECIPE = "embed"
ROWS = [json.loads(line) for line in resolve_data_path("tiny/notes_train.jsonl").read_text().splitlines()[:8]]
PAIRS = [
    {"sentence1": row["query"], "sentence2": row[name], "score": score}
    for row in ROWS[:4]
    for name, score in (("positive", 0.5 + len(row["query"]) / 100), ("negative", 0.1))
]
TEXTS = [row[name] for row in ROWS for name in ("query", "positive", "negative")]
# All rows are in each step, so their order changes nothing.
WHOLE_STEPS = ("batch_size=8", "gradient_accumulation_steps=1", "epochs=3", "max_steps=3")
TWO_PARTS = ("batch_size=4", "gradient_accumulation_steps=2", "epochs=3", "max_steps=3")
PLAIN = ("optimizer.name=sgd", "optimizer.lr=0.05")


def file_of(rows: list[dict[str, Any]], folder: Path) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return f"data.source={file}"


def info_nce(vectors: Tensor) -> Tensor:
    """vectors: (P, S, D). Each query's cosines with all passages, the own ones first, over a temperature of 0.05."""
    queries, passages = (
        normalize(vectors[:, 0], dim=-1),
        normalize(vectors[:, 1:].transpose(0, 1).flatten(0, 1), dim=-1),
    )
    return cross_entropy(queries @ passages.T / 0.05, torch.arange(len(queries)))


def cosent(vectors: Tensor) -> Tensor:
    """log(1 + sum over pairs of texts with a lower and a higher score of exp of the difference of their cosines)."""
    cosines = torch.cosine_similarity(vectors[:, 0], vectors[:, 1]) / 0.05
    scores = torch.tensor([pair["score"] for pair in PAIRS])
    differences = (cosines[:, None] - cosines)[scores[:, None] < scores]
    return torch.cat((torch.zeros(1), differences)).logsumexp(0)


def by_hand(rows: list[list[str]], loss_of: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of SGD: the losses, and the weights."""
    folder = resolve_model_path("tiny")
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        vectors = [
            model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1] for row in rows for text in row
        ]
        losses.append(update(optimizer, loss_of(torch.stack(vectors).unflatten(0, (len(rows), -1)))))
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    "settings", [pytest.param(WHOLE_STEPS, id="whole", marks=pytest.mark.long), pytest.param(TWO_PARTS, id="parts")]
)
@pytest.mark.parametrize("name", ["infonce", pytest.param("cosent", marks=pytest.mark.long)])
def test_steps_of_any_parts_are_those_of_a_loop_by_hand(
    train: Train, tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    of_texts = ("query", "positive", "negative") if name == "infonce" else ("sentence1", "sentence2")
    rows = ROWS if name == "infonce" else PAIRS
    source = file_of(rows, tmp_path)
    lines = train(source, f"data.negatives={len(of_texts) - 2}", f"loss.name={name}", *settings, *PLAIN)
    texts = [[row[field] for field in of_texts] for row in rows]
    losses, weights = by_hand(texts, info_nce if name == "infonce" else cosent)
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    (file,) = (tmp_path / "run" / "step_00000003").glob("*.safetensors")
    ours = {entry.removeprefix("model."): value.read() for entry, value in read_header(file).items()}
    assert ours.keys() == weights.keys()
    for entry, value in ours.items():
        torch.testing.assert_close(value, weights[entry], rtol=1e-5, atol=1e-5)


@pytest.mark.long  # importing sentence-transformers takes long
def test_sentence_transformers_computes_the_same_vectors_and_the_same_next_loss(train: Train, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    source = file_of(ROWS, tmp_path)
    train(source, "data.negatives=1", *TWO_PARTS, "data.query_prompt='Question: '")
    folder = tmp_path / "run" / "step_00000003"
    theirs, ours = library.SentenceTransformer(str(folder), device="cpu"), open_embedder(folder, "cpu")
    for used_as, encode in {"query": theirs.encode_query, "passage": theirs.encode_document}.items():
        expected = torch.from_numpy(encode(TEXTS))
        torch.testing.assert_close(ours.encode(TEXTS, used_as), expected, rtol=0, atol=1e-6)
        assert (expected[0] - expected[1]).norm() > 0.01

    (first,) = train(source, "data.negatives=1", f"model.path={folder}", *TWO_PARTS, "max_steps=1", output="next")
    columns = [[row[name] for row in ROWS] for name in ("query", "positive", "negative")]
    columns[0] = [f"Question: {text}" for text in columns[0]]
    features = [theirs.preprocess(column) for column in columns]
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    loss = losses.MultipleNegativesRankingLoss(theirs)(features, torch.zeros(8))
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.long
def test_a_run_that_is_killed_in_its_steps_ends_as_the_undisturbed_one(train: Train, tmp_path: Path) -> None:
    """SIGKILL while micro-batches are embedded again, with dropout and noise."""
    given = ("data.negatives=1", "batch_size=2", "gradient_accumulation_steps=3", "max_steps=8", "save_every=2")
    given += ("lora.rank=4", "lora.dropout=0.3", "neftune_alpha=5", "eval_every=2", "data.validation_fraction=0.02")
    train(*given)
    whole, output = tmp_path / "run", tmp_path / "killed"
    command = [sys.executable, "-m", "lean_ft", "run", RECIPE, *SETTINGS[RECIPE], *given, f"output_dir={output}"]
    for step in (3, 6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and all(line["step"] < step for line in lines_of(output)):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert metrics(output, timed=False) == metrics(whole, timed=False)
    assert digests(output / "step_00000008") == digests(whole / "step_00000008")


def lines_of(output: Path) -> list[dict[str, Any]]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
