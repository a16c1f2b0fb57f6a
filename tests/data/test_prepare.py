"""Context lengths and chat templates."""

import json
import pickle

import pytest

from lean_ft.data import prepare_batches
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import load_tokenizer
from tests.data.conftest import build


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
