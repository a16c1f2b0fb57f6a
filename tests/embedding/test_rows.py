"""`leanft embed`: files of vectors, and searches, next to sentence-transformers and NumPy."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from lean_ft.cli.main import app
from lean_ft.embedding import rows as rows_module
from lean_ft.embedding.encode import Embedder, open_embedder
from lean_ft.embedding.folder import VectorsOf
from lean_ft.embedding.rows import RowSearch, embed_rows
from lean_ft.settings import DataConfig
from tests.embedding import theirs as st
from tests.embedding.conftest import Save

HOW = VectorsOf("mean", True, "Query: ", "passage: ", 64)
TEXTS = [
    f"In {1900 + i} the {'river' if i % 3 else 'town'} of Zanemar had {i * 7} boats." * (1 + i % 4) for i in range(60)
]
QUESTIONS = ["How many boats had the town in 1909?", "the river"]


@pytest.fixture(scope="module")
def folder(save_folder: Save) -> Path:
    return save_folder(HOW)


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return open_embedder(folder, "cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def _leanft(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.mark.long
def test_a_file_and_its_search_equal_sentence_transformers(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 16)  # several parts
    array, table = file.with_name("vectors.npy"), file.with_name("vectors.parquet")
    searches = [word for question in QUESTIONS for word in ("--search", question)]
    out = _leanft("embed", folder, file, array, "--field", "body", *searches, "--top", 4, "--device", "cpu")
    _leanft("embed", folder, file, table, "--field", "body", "--as", "query", "--device", "cpu")
    theirs = st.library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    expected = theirs.encode_document(TEXTS)
    found = np.load(array)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    read = pyarrow.parquet.read_table(table)
    assert read["body"].to_pylist() == TEXTS
    np.testing.assert_allclose(np.stack(read["embedding"].to_numpy()), theirs.encode_query(TEXTS), rtol=0, atol=1e-6)
    hits = st.util.semantic_search(
        torch.from_numpy(theirs.encode_query(QUESTIONS)), torch.from_numpy(expected), top_k=4
    )
    lines = out.splitlines()
    for question, of_question in zip(QUESTIONS, hits, strict=True):
        at = lines.index(question)
        for line, hit in zip(lines[at + 1 : at + 5], of_question, strict=True):
            assert line.split()[0] == f"{hit['score']:.4f}"
            assert f"line {hit['corpus_id'] + 1}: {TEXTS[hit['corpus_id']][:60]}" in line
    assert lines[-1] == f"embedded 60 texts: {array}, 60 x 128 in float32, of length 1"


def test_first_numbers_of_vectors_have_length_1_again(embedder: Embedder):
    whole = embedder.encode(TEXTS[:5], "query")
    expected = torch.nn.functional.normalize(whole[:, :32], dim=-1)
    torch.testing.assert_close(embedder.encode(TEXTS[:5], "query", 32), expected, rtol=0, atol=1e-6)


def test_vectors_depend_neither_on_the_order_nor_on_other_texts(embedder: Embedder):
    """Texts of a pass do not see each other: equal bits, unless matrix products of other sizes round otherwise."""
    together = embedder.encode(TEXTS)
    torch.testing.assert_close(together[3:4], embedder.encode(TEXTS[3:4]), rtol=0, atol=1e-6)
    torch.testing.assert_close(together.flip(0), embedder.encode(TEXTS[::-1]), rtol=0, atol=1e-6)


def test_equally_similar_rows_are_in_their_order(embedder: Embedder, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["same"] * 5 + [QUESTIONS[0]] + ["same"] * 3))
    search = RowSearch(embedder, QUESTIONS[0], 4)
    for some in embed_rows(embedder, DataConfig(source=str(path)), used_as="query"):
        search.add(some)
    assert [match.number for match in search.matches] == [5, 0, 1, 2]
    assert search.matches[0].similarity == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("words", "message"), [
    (["DEST", "--field", "text"], r"rows.jsonl, line 1: no field `text`; the row has body, id. Name the field"),
    (["DEST", "--field", "id"], r"rows.jsonl, line 1: the field `id` is a number; expected a text"),
    (["x.txt"], r"x.txt is not the name of a file of vectors; expected one that ends in .npy or .parquet"),
    ([], "expected DEST, a new .npy or .parquet file, or --search QUESTION"),
    (["DEST", "--field", "body", "--dimensions", "129"], "dimensions is 129; expected 1 to 128"),
    (["DEST", "--field", "body", "--as", "document"], "--as is 'document'; expected query or passage"),
])  # fmt: skip
def test_wrong_input_leaves_no_file(folder: Path, file: Path, words: list[str], message: str):
    destination = file.with_name("vectors.npy")
    with pytest.raises(ValueError, match=message):
        _leanft("embed", folder, file, *(str(destination) if word == "DEST" else word for word in words))
    assert [path.name for path in file.parent.iterdir()] == ["rows.jsonl"]


def test_an_existing_file_is_kept_without_force(folder: Path, file: Path):
    destination = file.with_name("vectors.npy")
    destination.write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists already. Choose another name, or overwrite it with --force"):
        _leanft("embed", folder, file, destination, "--field", "body")
    assert destination.read_bytes() == b"mine"
    file.write_text(file.read_text() + '{"body": " "}\n')
    with pytest.raises(ValueError, match="line 61: the field `body` is empty"):
        _leanft("embed", folder, file, destination, "--field", "body", "--force")
    assert destination.read_bytes() == b"mine"
