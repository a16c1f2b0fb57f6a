"""Both sides of the preparation benchmark get the same rows and ids."""

from pathlib import Path

import data_preparation as benchmark
import prepare_data
import pytest

from lean_ft.tokenizers import load_tokenizer

QUESTIONS = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (f"{row['question']}\n{row['answer']}" for row in QUESTIONS)
    return benchmark.write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer", texts)


def test_the_tokenizer_gives_transformers_ids(tokenizer: Path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    messages = [{"role": "user", "content": "What is 3  and it's\n\n4?"}, {"role": "assistant", "content": "7"}]
    ids, mask = load_tokenizer(tokenizer).render(messages)
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert theirs.decode([i for i, trained in zip(ids, mask, strict=True) if trained]) == "7<|im_end|>"


def test_our_side_prepares_and_finds_its_work_again(tmp_path: Path, tokenizer: Path):
    data = benchmark.write_rows(tmp_path / "rows.jsonl", QUESTIONS, 100)
    first, second = (prepare_data.ours(data, tokenizer, tmp_path / "cache", 256, 1) for _ in range(2))
    assert first.pop("seconds") > second.pop("seconds")
    assert first == second
    assert first["packed_rows"] * 256 >= first["tokens"] > 100 * 20
