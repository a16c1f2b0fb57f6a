"""Source weights (exact proportions, drawn by seed, held-out rows unchanged), context lengths and chat templates."""

import json
import pickle
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from pydantic import ValidationError

from lean_ft.data import prepare_batches
from lean_ft.data.prepare import weigh
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import load_tokenizer
from tests.data.conftest import build


@pytest.mark.parametrize("weights", [(1, 1), (2, 0.5), (0.25, 3.3), (0.001, 1)])
def test_proportions(weights: tuple[float, float]):
    source_of = np.repeat([0, 1], [100, 37])
    taken = weigh(source_of, weights, seed=1)
    assert (np.diff(taken) >= 0).all()
    for source, weight in enumerate(weights):
        documents = np.flatnonzero(source_of == source)
        counts = Counter(taken[np.isin(taken, documents)].tolist())
        assert sum(counts.values()) == round(weight * len(documents))
        assert {counts[i] for i in documents.tolist()} <= {int(weight), int(weight) + 1}
        assert all(counts[i] >= int(weight) for i in documents.tolist())


def sources(write: Callable[..., str], weights: tuple[float, float]) -> list[dict[str, object]]:
    paths = [write([{"text": name * (i + 1)} for i in range(20)], f"{name}.jsonl") for name in "ab"]
    return [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]


def first_characters(batches, tokenizer) -> Counter[str]:
    return Counter(
        tokenizer.decode(row[:1])
        for batch in batches.take(batches.batches_per_epoch)
        for row in batch.input_ids.tolist()
    )


def test_an_epoch_shows_each_source_as_often_as_it_should(write: Callable[..., str], plain_tokenizer):
    config = SFTDataConfig(source=sources(write, (2, 0.5)))  # pyright: ignore
    batches, _ = prepare_batches(config, plain_tokenizer, batch_size=4, seed=0)
    assert first_characters(batches, plain_tokenizer) == {"a": 40, "b": 10}
    assert (batches.report.rows, batches.report.kept) == (40, 50)
    plain = SFTDataConfig(source=[source["path"] for source in sources(write, (1, 1))])  # pyright: ignore
    assert prepare_batches(plain, plain_tokenizer, 4, seed=0)[0].fingerprint != batches.fingerprint
    # The seed draws the half, so another seed gives other data.
    assert prepare_batches(config, plain_tokenizer, 4, seed=1)[0].fingerprint != batches.fingerprint


def test_held_out_rows_are_neither_repeated_nor_trained_on(write: Callable[..., str], plain_tokenizer):
    config = SFTDataConfig(source=sources(write, (3, 1)), validation_fraction=0.25)  # pyright: ignore
    batches, held_out = prepare_batches(config, plain_tokenizer, batch_size=1, seed=0)
    assert held_out is not None

    def rows(some) -> list[str]:
        return [plain_tokenizer.decode(batch.input_ids[0]).split("<|end|>")[0] for batch in some]

    trained, validated = rows(batches.take(batches.batches_per_epoch)), rows(held_out)
    assert len(validated) == len(set(validated)) == 10
    assert not set(trained) & set(validated)
    counts = Counter(trained)
    assert len(counts) == 30
    assert {(text[0], count) for text, count in counts.items()} == {("a", 3), ("b", 1)}


def test_weights_that_are_refused(write: Callable[..., str], plain_tokenizer):
    config = SFTDataConfig(source=sources(write, (0.01, 0.01)))  # pyright: ignore
    with pytest.raises(ValueError, match="leave no row to train on"):
        prepare_batches(config, plain_tokenizer, batch_size=4, seed=0)
    with pytest.raises(ValidationError, match="held-out rows have no weight"):
        SFTDataConfig(source="a.jsonl", validation_source=[{"path": "b.jsonl", "weight": 2.0}])  # pyright: ignore


@pytest.fixture
def short_tokenizer(tmp_path):
    """Tokenizer of a model with a context of 16 tokens."""
    folder = build(tmp_path / "model").folder
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({}, 2),
        ({"max_length": 16}, 0),
        ({"packing": "bfd_split", "max_length": 32}, 2),
        ({"packing": "bfd_split", "max_length": 16}, 0),
        ({"packing": "wrapped", "max_length": 32}, 2),  # a row is one text: of 32, 32 and 10 tokens
        ({"packing": "padding_free", "max_length": 16}, 2),  # no truncation
    ],
)
def test_texts_beyond_the_models_context_are_counted(write, short_tokenizer, settings, number):
    source = write([{"text": "a" * (length - 1)} for length in (16, 17, 41)])
    config = SFTDataConfig(source=source, **{"max_length": 64, **settings})
    report = prepare_batches(config, short_tokenizer, batch_size=1, seed=0)[0].report
    assert report.beyond_context == number
    said = f"WARNING: {number} longer than the model's context of 16 tokens"
    assert (said in str(report)) == bool(number) == ("context" in str(report))


def test_texts_beyond_the_models_context_are_refused_where_none_may_be_lost(write, short_tokenizer):
    config = SFTDataConfig(source=write([{"text": "a" * 40}, {"text": "a"}]), overflow="raise")
    with pytest.raises(ValueError, match="1 sequence is longer than the model's context of 16 tokens.*longest 41"):
        prepare_batches(config, short_tokenizer, batch_size=1, seed=0)


def test_another_chat_template_is_other_data_and_must_be_the_tokenizers(write, chat_tokenizer, tmp_path):
    rows = [{"prompt": "q", "completion": "a"}] * 4
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}")
    config = SFTDataConfig(source=write(rows), chat_template=tmp_path / "t.jinja")
    with pytest.raises(ValueError, match="loads its tokenizer without it"):
        prepare_batches(config, chat_tokenizer, batch_size=1, seed=0)
    tokenizer = load_tokenizer(chat_tokenizer.folder, config.chat_template)
    batches, _ = prepare_batches(config, tokenizer, batch_size=1, seed=0)
    ids = batches.take(1)[0].input_ids[0].tolist()
    assert tokenizer.decode(ids).startswith("<user>q<|im_end|><assistant>a<|im_end|>")
    plain = prepare_batches(SFTDataConfig(source=config.source), chat_tokenizer, batch_size=1, seed=0)[0]
    (tmp_path / "moved.jinja").write_bytes((tmp_path / "t.jinja").read_bytes())
    moved = SFTDataConfig(source=config.source, chat_template=tmp_path / "moved.jinja")
    again = load_tokenizer(chat_tokenizer.folder, moved.chat_template)
    assert prepare_batches(moved, again, 1, seed=0)[0].fingerprint == batches.fingerprint != plain.fingerprint
    # Worker processes use it as well.
    assert (
        pickle.loads(pickle.dumps(tokenizer)).chat_template == tokenizer.chat_template != chat_tokenizer.chat_template
    )
