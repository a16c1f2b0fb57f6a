"""Rows of embeddings and rerankers: their texts, tokens, scores and errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lean_ft.data import prepare_batches
from lean_ft.data.embedding import OBJECTIVE, EmbeddingBatch, EmbeddingDataConfig, with_negatives
from lean_ft.data.reranking import RerankingDataConfig
from lean_ft.tokenizers import load_tokenizer

TINY_MODEL = Path("lean_ft/assets/tiny/model").absolute()

ROWS = {
    "pairs": [{"anchor": f"Who is {i}?", "positive": f"It is number {i}."} for i in range(3)],
    "triplets": [{"query": f"Who is {i}?", "positive": f"It is {i}.", "negative": f"Not {i}."} for i in range(3)],
    "columns": [
        {"question": f"Who is {i}?", "answer": f"It is {i}.", "negative_1": f"Not {i}.", "negative_2": "No one."}
        for i in range(3)
    ],
    "list": [
        {"query": f"Who is {i}?", "passage": f"It is {i}.", "negatives": [f"Not {i}.", "No one.", "Me."][: 2 + i]}
        for i in range(2)
    ],
    "scored": [{"sentence1": f"Who is {i}?", "sentence2": f"Name {i}.", "score": i / 4} for i in range(3)],
    "labels": [{"text1": f"Who is {i}?", "text2": f"Name {i}.", "label": i % 2} for i in range(3)],
    "teacher": [
        {"query": f"Who is {i}?", "positive": f"It is {i}.", "negative": "No one.", "scores": [3.0 + i, 0.5]}
        for i in range(3)
    ],
}


@pytest.fixture
def file(tmp_path: Path):
    def write(rows: list[dict], name: str = "rows.jsonl") -> Path:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    return write


def only_batch(config: EmbeddingDataConfig) -> EmbeddingBatch:
    batches, _ = prepare_batches(with_negatives(config), load_tokenizer(TINY_MODEL), batch_size=8, seed=0)
    [batch] = batches.take(1)
    assert isinstance(batch.built, EmbeddingBatch)
    return batch.built


def texts_of(batch: EmbeddingBatch) -> list[list[int]]:
    ids = batch.input_ids.flatten()
    return [ids[last - length + 1 : last + 1].tolist() for last, length in zip(batch.last, batch.lengths, strict=True)]


@pytest.mark.parametrize("packing", ["padding_free", "none", "bfd"])
@pytest.mark.parametrize("name", ROWS)
def test_texts_have_the_ids_that_transformers_gives(file, name: str, packing: str):
    rows = ROWS[name]
    source = str(file(rows))
    config = EmbeddingDataConfig(
        source=source, shuffle=False, packing=packing, max_length=32, query_prompt="Query: ", passage_prompt="Note: "
    )
    reference = AutoTokenizer.from_pretrained(TINY_MODEL)
    expected = list[list[int]]()
    for row in rows:
        fields = [value for value in row.values() if isinstance(value, str)]
        wrong = row.get("negatives", [])[:2]
        query, *passages = fields + wrong
        expected += [reference("Query: " + query).input_ids, *(reference("Note: " + one).input_ids for one in passages)]
    batch = only_batch(config)
    assert sorted(texts_of(batch)) == sorted(expected)
    assert batch.num_rows == len(rows) and len(batch.last) == len(expected)


def test_scores_follow_their_passages_and_equal_texts_have_equal_identities(file):
    batch = only_batch(EmbeddingDataConfig(source=str(file(ROWS["teacher"])), shuffle=False, max_length=32))
    assert sorted(batch.scores.tolist()) == [[3.0, 0.5], [4.0, 0.5], [5.0, 0.5]]
    texts = texts_of(batch)
    identities = batch.identities.flatten().tolist()
    for i, text in enumerate(texts):
        assert [other == text for other in texts] == [identity == identities[i] for identity in identities]
    scored = only_batch(EmbeddingDataConfig(source=str(file(ROWS["scored"])), shuffle=False, max_length=32))
    assert sorted(scored.scores.flatten().tolist()) == [0.0, 0.25, 0.5]


def test_a_long_text_keeps_the_tokens_around_it(file):
    row = {"query": "one two three four five six seven", "positive": "It is eight nine ten eleven twelve."}
    reference = AutoTokenizer.from_pretrained(TINY_MODEL)
    batch = only_batch(EmbeddingDataConfig(source=str(file([row])), max_length=8))
    cut = [reference(text, truncation=True, max_length=8).input_ids for text in row.values()]
    assert texts_of(batch) == cut


def test_a_reranker_reads_the_template_and_cuts_the_passage_alone(file):
    template = "Judge. {query} Passage: {passage} Answer:"
    config = RerankingDataConfig(source=str(file(ROWS["triplets"])), shuffle=False, max_length=64, template=template)
    reference = AutoTokenizer.from_pretrained(TINY_MODEL)
    batch = only_batch(config)
    expected = [
        reference(template.format(query=row["query"], passage=row[side]), add_special_tokens=False).input_ids
        for row in ROWS["triplets"]
        for side in ("positive", "negative")
    ]
    assert sorted(texts_of(batch)) == sorted(expected)
    assert batch.scores.tolist() == [[1.0, 0.0]] * 3
    long = only_batch(config.model_copy(update={"max_length": len(expected[0]) - 2}))
    for text, whole in zip(sorted(texts_of(long)), sorted(expected), strict=True):
        assert text[-4:] == whole[-4:] and text[:8] == whole[:8]


def test_a_list_of_passages_keeps_those_with_the_highest_labels(file):
    rows = [
        {"query": "Who?", "passages": ["a", "b", "c"], "labels": [0, 2, 1]},
        {"query": "What?", "passages": ["d", "e"], "labels": [0, 1]},
    ]
    batch = only_batch(RerankingDataConfig(source=str(file(rows)), max_length=32))
    assert sorted(batch.scores.tolist()) == [[1.0, 0.0], [2.0, 1.0]]


BAD = {
    "equal": ([{"query": "a", "positive": "b", "negative": "b"}], "wrong passage 1 equals `positive`"),
    "empty": ([{"query": " ", "positive": "b"}], "`query` is empty"),
    "empty negative": ([{"query": "a", "positive": "b", "negative": ""}], "wrong passage 1 is empty"),
    "fewer": (
        [{"query": "a", "positive": "b", "negatives": ["c", "d"]}] * 16
        + [{"query": "a", "positive": "b", "negatives": ["c"]}],
        "line 17: the row has 1 wrong passage,",
    ),
    "no number": ([{"sentence1": "a", "sentence2": "b", "score": "high"}], "`score` is a string ('high')"),
    "not finite": ([{"sentence1": "a", "sentence2": "b", "score": "nan"}], "`score` is a string ('nan')"),
    "few scores": (
        [{"query": "a", "positive": "b", "negative": "c", "scores": [1.0]}],
        "`scores` has 1 numbers; expected one for each of 2 passages",
    ),
    "no list": ([{"query": "a", "positive": "b", "negatives": "c"}], "`negatives`"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_an_error_with_its_place(file, name: str):
    rows, message = BAD[name]
    with pytest.raises(ValueError) as raised:
        only_batch(EmbeddingDataConfig(source=str(file(rows))))
    assert message in str(raised.value)


def test_sources_of_two_kinds_are_refused(file):
    sources = [str(file(ROWS[name], f"{name}.jsonl")) for name in ("pairs", "scored")]
    with pytest.raises(ValueError, match="Train on one kind at a time"):
        only_batch(EmbeddingDataConfig(source=sources))


def test_a_template_without_its_two_places_is_refused():
    with pytest.raises(ValueError, match="needs {query}, and {passage} once"):
        RerankingDataConfig(source="rows.jsonl", template="{passage}")


def test_a_query_that_fills_the_template_drops_the_row(file):
    rows = [{"query": "one two three four five six seven eight", "positive": "b"}, {"query": "a", "positive": "b"}]
    config = with_negatives(RerankingDataConfig(source=str(file(rows)), max_length=12))
    batches, _ = prepare_batches(config, load_tokenizer(TINY_MODEL), batch_size=8, seed=0)
    assert batches.report.dropped == {"the template and the query leave no room in max_length for the passage": 1}
    assert torch.equal(batches.take(1)[0].built.scores, torch.ones(1, 1))


def test_the_command_of_a_search_survives_its_rows(file):
    source = file([{"query": 3}, {"query": "Who?", "positive": "b"}])
    config = EmbeddingDataConfig(source=str(source), on_bad_row="skip")
    words = ["embed", "runs/a", str(source), "--field"]
    assert OBJECTIVE.words_to_try(config, Path("runs/a")) == [*words, "positive", "--search", "Who?"]
    source.unlink()
    assert OBJECTIVE.words_to_try(config, Path("runs/a")) == [*words, "FIELD", "--search", "QUESTION"]
