"""Previews show the tokens and labels of batches."""

from collections.abc import Callable
from typing import Any

import pytest

from lean_ft.data import prepare_batches
from lean_ft.data.preview import Preview, preview, visible

Config = Callable[..., Any]
TEXTS = [{"prompt": f"p{i} ü🦙", "completion": f"c{i} " * (i % 5 + 1)} for i in range(12)]


def shown(found: Preview) -> list[str]:
    return ["".join(s.text for document in row.documents for s in document.stretches) for row in found.rows]


@pytest.mark.parametrize("packing", ["none", "bfd", "bfd_split", "wrapped", "padding_free"])
def test_rows_are_those_of_the_batches(packing: str, config: Config, plain_tokenizer):
    settings = config(TEXTS, packing=packing, max_length=32)
    found = preview(settings, plain_tokenizer, num_rows=100, batch_size=3)
    batches, _ = prepare_batches(settings, plain_tokenizer, batch_size=3 if packing == "padding_free" else 1, seed=0)
    epoch = batches.take(batches.batches_per_epoch)
    assert len(found.rows) == len(epoch)
    num_trained = [sum(document.num_trained for document in row.documents) for row in found.rows]
    num_tokens = [sum(document.num_tokens for document in row.documents) for row in found.rows]
    assert sum(num_trained) == sum(batch.num_targets for batch in epoch)
    if packing == "padding_free":  # batches are regrouped in every epoch
        return
    texts = [plain_tokenizer.decode(batch.input_ids[0].tolist()) for batch in epoch]
    for text, tokens, trained, row in zip(shown(found), num_tokens, num_trained, found.rows, strict=True):
        batch = epoch[next(i for i, whole in enumerate(texts) if whole.startswith(text))]
        assert batch.num_targets == trained
        if packing != "none":
            assert row.padding == 32 - tokens


def test_what_is_trained_and_what_a_control_token_is(config: Config, chat_tokenizer):
    messages = [{"role": "user", "content": "q <|im_end|> ü"}, {"role": "assistant", "content": "a🦙\nb"}]
    found = preview(config([{"messages": messages}]), chat_tokenizer, num_rows=1, batch_size=1)
    assert [(s.text, s.trained, s.control) for s in found.rows[0].documents[0].stretches] == [
        ("<|im_start|>", False, True),
        ("user\nq <|im_end|> ü", False, False),
        ("<|im_end|>", False, True),
        ("\n", False, False),
        ("<|im_start|>", False, True),
        ("assistant\n", False, False),
        ("a🦙\nb", True, False),
        ("<|im_end|>", True, True),
        ("\n", False, False),
    ]


def test_rows_that_are_cut_or_left_out_are_told(config: Config, plain_tokenizer):
    rows = [{"prompt": "p" * 70, "completion": "c"}, {"prompt": "p", "completion": "c" * 70}, {"prompt": "p"}, *TEXTS]
    found = preview(config(rows, on_bad_row="skip"), plain_tokenizer, num_rows=2, batch_size=1)
    assert [note.partition("rows.jsonl, ")[2] for note in found.notes] == [
        "line 1: dropped, nothing to train on within max_length",
        "line 2: truncated by 8 tokens",
        "line 3: no field `completion`. The format prompt_completion needs prompt, completion; the row has prompt. "
        "If a column has another name, add `data.columns.completion=COLUMN`.",
    ]
    assert [row.documents[0].place[-6:] for row in found.rows] == ["line 2", "line 4"]
    assert found.report.rows == 4  # reads no more rows than needed


def test_what_acts_on_a_terminal_is_shown_instead():
    assert visible("a\x1b[31mb\x07\r\n\tc") == "a␛[31mb␇␍↵\n\tc"
    assert visible("\u202egpj.exe\u200b \x9b") == "⟨U+202E⟩gpj.exe⟨U+200B⟩ ⟨U+009B⟩"
    assert visible("né 你 🦙") == "né 你 🦙"
