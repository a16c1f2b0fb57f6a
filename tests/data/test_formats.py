"""Rows of each format are rendered as in the table of `lean_ft.data.formats`; formats are detected."""

from typing import Any

import pytest

from lean_ft.data.formats import Fields, formats_of, meant_fields
from lean_ft.data.pairs import PairReader
from lean_ft.data.rows import Row
from lean_ft.data.sft import SFTReader, read_token_row
from lean_ft.data.sources import RowSources
from lean_ft.data.unpaired import UnpairedReader
from lean_ft.settings import PreferenceDataConfig, RewardDataConfig, SFTDataConfig, UnpairedDataConfig
from lean_ft.tokenizers import Passage

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


def read(fields: dict[str, Any], tokenizer: Any, **settings: Any) -> Passage:
    row = Row(fields, "rows.jsonl, line 7")
    return SFTReader.of(RowSources.of(SFTDataConfig(source="rows.jsonl", **settings)), [row], tokenizer).passages(row)[
        0
    ]


def trained(passage: Passage) -> list[str]:
    return [passage.text[start:end] for start, end in passage.trained]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": MESSAGES},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, MESSAGES[1]], "tools": "[]"},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "output": "a"},
        {"input": "q", "output": "a"},
    ],
)
def test_chats(fields: dict[str, Any], chat_tokenizer):
    passage = read(fields, chat_tokenizer)
    assert passage.text == CHAT
    assert trained(passage) == ["a<|im_end|>"]
    assert not passage.add_bos
    assert not passage.add_eos


def test_a_new_format_is_an_entry_that_says_what_its_fields_hold(chat_tokenizer, plain_tokenizer, monkeypatch):
    monkeypatch.setattr(SFTReader, "known", SFTReader.known.copy())
    SFTReader.known["questions"] = Fields(
        ("topic", "question", "reply"), ("context", "system"), prompts=(("question", "context"),), completion="reply"
    )
    SFTReader.known["turns"] = Fields(("topic", "turns"), chat="turns")
    row = {"topic": "t", "question": "q", "reply": "a"}
    assert read(row, chat_tokenizer).text == read({"topic": "t", "turns": MESSAGES}, chat_tokenizer).text == CHAT
    assert read(row | {"context": "c"}, plain_tokenizer).text == "q\n\nca"
    for incomplete in ({}, {"completion": "reply"}, {"prompts": (("question",),)}):
        with pytest.raises(AssertionError):
            Fields(("question", "reply"), **incomplete)


def test_alpaca_input_follows_the_instruction_and_columns_rename(chat_tokenizer):
    passage = read({"instruction": "do", "input": "this", "output": "a"}, chat_tokenizer)
    assert passage.text == CHAT.replace("q", "do\n\nthis")
    fields = {"question": "q", "answer": "a", "prompt": "not this"}
    assert read(fields, chat_tokenizer, columns={"prompt": "question", "completion": "answer"}).text == CHAT


def test_texts_without_template(plain_tokenizer):
    passage = read({"prompt": "q", "completion": "a"}, plain_tokenizer)
    assert (passage.text, trained(passage), passage.add_bos, passage.add_eos) == ("qa", ["a"], True, True)
    passage = read({"instruction": "do", "input": "this", "output": "a"}, plain_tokenizer)
    assert (passage.text, trained(passage)) == ("do\n\nthis\n\na", ["a"])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ],
)
def test_a_separator_stands_between_prompt_and_completion(fields, plain_tokenizer, chat_tokenizer):
    settings, reader = (PreferenceDataConfig, PairReader) if "chosen" in fields else (SFTDataConfig, SFTReader)
    config, row = settings(source="rows.jsonl", separator="\nA: "), Row(fields, "rows.jsonl, line 7")
    passage = reader.of(RowSources.of(config), [row], plain_tokenizer).passages(row)[0]
    assert isinstance(passage, Passage)
    assert (passage.text, trained(passage)) == ("q\nA: a", ["a"])
    with pytest.raises(ValueError, match="but this model has one. Leave it out, or set data.chat=false"):
        reader.of(RowSources.of(config), [row], chat_tokenizer)


@pytest.mark.parametrize(
    ("settings", "reader", "fields"),
    [
        (SFTDataConfig, SFTReader, {"prompt": "q", "completion": "a"}),
        (SFTDataConfig, SFTReader, {"instruction": "q", "input": "x", "output": "a"}),
        (PreferenceDataConfig, PairReader, {"prompt": "q", "chosen": "a", "rejected": "b"}),
        (RewardDataConfig, PairReader, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1.0}),
        (UnpairedDataConfig, UnpairedReader, {"prompt": "q", "completion": "a", "label": True}),
    ],
)
@pytest.mark.parametrize("separator", [None, "\n"])
def test_without_chat_strings_become_what_a_model_without_a_template_reads(
    settings, reader, fields, separator, plain_tokenizer, chat_tokenizer
):
    row = Row(fields, "rows.jsonl, line 7")

    def sequences(tokenizer: Any, **chat: Any) -> list[tuple[list[int], list[bool]]]:
        passages = reader.of(RowSources.of(settings(source="rows.jsonl", **chat)), [row], tokenizer).passages(row)
        return [(ids.tolist(), mask.tolist()) for ids, mask in tokenizer.tokenize(passages)]

    between = "\n\n" if separator is None and "output" in fields else separator or ""
    prompt = chat_tokenizer.encode(("q\n\nx" if "output" in fields else "q") + between)
    answers = [fields[name] for name in ("completion", "output", "chosen", "rejected") if name in fields]
    expected = [
        (
            [*prompt, *chat_tokenizer.encode(answer), chat_tokenizer.eos_id],
            [False] * len(prompt) + [True] * (len(answer) + 1),
        )
        for answer in answers
    ]
    found = sequences(chat_tokenizer, chat=False, separator=separator)
    assert found == expected
    plain = sequences(plain_tokenizer, separator=separator)
    assert [(ids[:-1], mask) for ids, mask in found] == [(ids[:-1], mask) for ids, mask in plain]  # eos differs
    assert sequences(chat_tokenizer) == sequences(chat_tokenizer, chat=True) != expected


BEHIND = "<|im_start|>system\ns<|im_end|>\n" + CHAT


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": MESSAGES}, BEHIND),
        ({"prompt": "q", "completion": "a"}, BEHIND),
        ({"messages": [{"role": "system", "content": "own"}, *MESSAGES]}, BEHIND.replace("\ns<", "\nown<")),
        ({"conversations": MESSAGES, "system": "own"}, BEHIND.replace("\ns<", "\nown<")),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, BEHIND),
    ],
)
def test_a_system_message_stands_in_front_of_chats_without_one(fields, text, chat_tokenizer):
    settings, reader = (PreferenceDataConfig, PairReader) if "chosen" in fields else (SFTDataConfig, SFTReader)
    row = Row(fields, "rows.jsonl, line 7")
    passage = reader.of(RowSources.of(settings(source="rows.jsonl", system="s")), [row], chat_tokenizer).passages(row)[
        0
    ]
    assert isinstance(passage, Passage)
    assert (passage.text, trained(passage)) == (text, ["a<|im_end|>"])


def test_what_needs_a_chat_template_is_refused_without_one(plain_tokenizer):
    for fields, given, message in (
        ({"messages": MESSAGES}, {}, r"no chat template.*data\.chat_template=FILE"),
        (
            {"prompt": "q", "completion": "a"},
            {"chat": True},
            "data.chat=true needs a chat template, and this model has none",
        ),
        ({"prompt": "q", "completion": "a"}, {"system": "s"}, "this model has no chat template"),
    ):
        with pytest.raises(ValueError, match=message):
            read(fields, plain_tokenizer, **given)


@pytest.mark.parametrize("train_on", ["completion", "assistant", "last", "all"])
def test_train_on(train_on: str, plain_tokenizer, chat_tokenizer):
    two_turns = {"messages": [*MESSAGES, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]}
    chat = read(two_turns, chat_tokenizer, train_on=train_on)
    expected = {"last": ["b<|im_end|>"], "all": [chat.text]}
    assert trained(chat) == expected.get(train_on, ["a<|im_end|>", "b<|im_end|>"])
    plain = read({"prompt": "q", "completion": "a"}, plain_tokenizer, train_on=train_on)
    assert trained(plain) == (["qa"] if train_on == "all" else ["a"])
    assert trained(read({"text": "abc"}, chat_tokenizer, train_on=train_on)) == ["abc"]


def test_tools_reach_the_template(plain_tokenizer, tmp_path):
    from tests.data.conftest import build

    tokenizer = build(
        tmp_path / "t", chat_template="{{ tools[0].name }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        assert read({"messages": MESSAGES, "tools": tools}, tokenizer, train_on="all").text == "f:qa"


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"prompt": "q"}, {"format": "prompt_completion"},
            r"no field `completion`.*needs prompt, completion; the row has prompt"),
        (
            {"prompt": "q", "answer": "a"},
            {"format": "prompt_completion", "columns": {"completion": "answr"}},
            r"data.columns.completion=answr: .*line 7 .*no column `answr`; they have prompt, answer. Did you mean 'answer'",  # noqa: E501
        ),
        ({"prompt": 3, "completion": "a"}, {}, "line 7: the field `prompt` is a number; expected a string"),
        ({"prompt": "q", "completion": None}, {}, "the field `completion` is null"),
        ({"text": True}, {}, "the field `text` is a boolean"),
        ({"text": "a\ud800b"}, {}, r"line 7: the field `text` has half a surrogate pair \(\\ud800\) at character 1"),
        ({"messages": MESSAGES, "tools": "[{"}, {}, "`tools` is a string that is not JSON"),
        ({"messages": MESSAGES, "tools": ["f"]}, {}, "`tools` is not a list of objects"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {},
            "the rows are preference.*data.columns.completion=chosen"),
        ({"messages": MESSAGES}, {"chat": False},
            "data.chat=false applies to .* plain strings, but the rows are messages"),
        ({"text": "q"}, {"chat": True}, "data.chat=true applies to .* plain strings, but the rows are text"),
        ({"text": "q"}, {"system": "s"}, "the rows are text"),
        ({"prompt": "q", "completion": "a"}, {"chat": False, "system": "s"},
            "with a chat template, but data.chat=false"),
    ],
)  # fmt: skip
def test_rows_and_settings_that_are_refused(fields, settings, message, chat_tokenizer):
    with pytest.raises(ValueError, match=message):
        read(fields, chat_tokenizer, **settings)


def test_a_refusing_template_is_placed(chat_tokenizer, tmp_path: Any):
    from tests.data.conftest import build

    tokenizer = build(tmp_path / "t", chat_template="{{ raise_exception('no system messages') }}")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 7: .*no system messages"):
        read({"messages": MESSAGES}, tokenizer)


def test_tool_calls_may_stand_without_content(tmp_path: Any):
    from tests.data.conftest import build

    tokenizer = build(
        tmp_path / "t", chat_template="{% for m in messages %}{{ m.content or m.tool_calls }}{% endfor %}"
    )
    messages = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert read({"messages": messages}, tokenizer, train_on="all").text == "q[{'name': 'f'}]"


def detect(*fields: dict[str, Any], **settings: Any) -> str:
    rows = [Row(one, f"a.jsonl, line {i}") for i, one in enumerate(fields, start=1)]
    return formats_of(RowSources.of(SFTDataConfig(source="a.jsonl", **settings)), rows)[0].name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": MESSAGES, "text": "x"}, "messages"),
        ({"conversations": [], "id": 3}, "sharegpt"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference"),
        ({"chosen": "a", "rejected": "b"}, "preference"),
        ({"prompt": "q", "completion": "a", "instruction": "q", "output": "a"}, "prompt_completion"),
        ({"instruction": "q", "output": "a", "text": "x"}, "alpaca"),
        ({"instruction": "q", "input": "i", "output": "a"}, "alpaca"),
        ({"input": "q", "output": "a", "text": "x"}, "input_output"),
        ({"input_ids": [1], "text": "x"}, "tokens"),
        ({"text": "x", "prompt": "q"}, "text"),
    ],
)
def test_detection(fields: dict[str, Any], name: str):
    assert detect(fields) == name
    # A format matches only if it matches every inspected row.
    with pytest.raises(ValueError, match="3 rows have different formats:") as error:
        detect(fields, {"other": 1}, fields)
    lines = str(error.value).splitlines()
    assert lines[1:3] == [f"  {name}: a.jsonl, line 1, line 3", "  none (other): a.jsonl, line 2"]
    assert detect(fields, {"other": 1}, on_bad_row="skip") == name
    assert detect({"other": 1}, format=name) == name


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"question": "q"}, {},
            r"line 1: cannot detect the format from the fields question.*data\.columns\.prompt=COLUMN"),
        ({"Question": "q", "reply": "a", "id": 1}, {},
            "read `Question` as prompt and `reply` as completion, add `data.columns.prompt=Question data.columns.comp"),
        ({"mesages": []}, {}, "mean 'messages' by `mesages`.*if all rows have it, set data.columns.messages=mesages"),
        ({"Prompt text": "q", "prompts": "a"}, {}, "mean 'prompt' by `prompts`"),
        ({"complition": "a", "prompt": "q"}, {}, "mean 'completion' by `complition`"),
        ({"prompt": "q", "answer": "a"}, {}, "read `answer` as completion, add `data.columns.completion=answer`"),
        ({"chat": []}, {}, "read `chat` as messages, add `data.columns.messages=chat`"),
        ({"data": [{"text": "x"}]}, {}, r"If `data` holds the rows, run jq -c '.data\[\]' a.jsonl > rows.jsonl"),
        ({}, {}, "from the fields no fields"),
        ({"text": "x"}, {"columns": {"promt": "x"}},
            "data.columns.promt: no format of this recipe has such a field.*mean 'prompt'"),
    ],
)  # fmt: skip
def test_what_cannot_be_told(fields, settings, message):
    with pytest.raises(ValueError, match=message):
        detect(fields, **settings)


def test_a_row_with_a_mistyped_field_is_of_its_format():
    assert meant_fields(["prompt", "completions"]) == {"prompt", "completions", "completion"}
    assert "rejected" in meant_fields(["prompt", "chosen", "reject"])
    assert meant_fields(["prompt", "answer", "texts"]) == {"prompt", "answer", "texts"}


def test_rows_that_could_not_be_read_tell_nothing():
    sources = RowSources.of(SFTDataConfig(source="a.jsonl", on_bad_row="skip"))
    bad, good = Row({}, "a.jsonl, line 1", problem="malformed JSON"), Row({"text": "x"}, "a.jsonl, line 2")
    assert formats_of(sources, [bad, good])[0].name == "text"
    with pytest.raises(ValueError, match=r"line 1: malformed JSON\. None of the first rows"):
        formats_of(sources, [bad])


def read_tokens(vocab_size: int = 10, **fields: Any) -> tuple[list[int], list[bool]]:
    document = read_token_row(fields, vocab_size)
    return document.ids.tolist(), document.trained.tolist()


def test_ids_and_labels_of_token_rows():
    assert read_tokens(input_ids=[1, 2, 3]) == ([1, 2, 3], [True] * 3)
    assert read_tokens(input_ids=[1, 2, 3], labels=[-100, 2, -100]) == ([1, 2, 3], [False, True, False])
    assert read_tokens(input_ids="[1, 2]", labels="[-100, 2]") == ([1, 2], [False, True])  # as in CSV


@pytest.mark.parametrize("attention_mask", [[0, 1, 1, 0, 0], [0, 1, 1, False, 0]])
def test_padding_of_token_rows_is_left_out(attention_mask: list[int]):
    row = read_tokens(input_ids=[0, 1, 2, 0, 0], labels=[-100, 1, 2, 0, 0], attention_mask=attention_mask)
    assert row == ([1, 2], [True, True])
    assert read_tokens(input_ids=[0, 0], attention_mask=[0, 0]) == ([], [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 values for 2 `input_ids`"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "`attention_mask` has 1 values"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "zeros between ones"),
        ({"input_ids": [1, 10]}, "`input_ids` has 10 at position 1; this tokenizer's ids are 0 to 9"),
        ({"input_ids": [1, -1]}, "`input_ids` has -1"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
            "`labels` has 2 at position 0, where `input_ids` has 1.*not shift"),
        ({"input_ids": "text"}, "`input_ids` is a string"),
        ({"input_ids": [1, 2.0]}, "`input_ids` holds 2.0"),
        ({"input_ids": [1, None]}, "`input_ids` holds None"),
        ({"input_ids": [1 << 70]}, "`input_ids` holds"),
    ],
)  # fmt: skip
def test_token_rows_that_are_something_else(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read_tokens(**fields)


ULTRA = {
    "prompt": "q",
    "messages": MESSAGES,
    "chosen": MESSAGES,
    "rejected": [MESSAGES[0], {"role": "assistant", "content": "b"}],
    "score_chosen": 8.0,
}
OTHER = {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("settings", "reader", "own"),
    [
        (SFTDataConfig, SFTReader, "messages"),
        (PreferenceDataConfig, PairReader, "preference"),
        (RewardDataConfig, PairReader, "preference"),
        (UnpairedDataConfig, UnpairedReader, "preference"),
    ],
)
def test_a_row_of_several_formats_is_read_as_the_recipe_needs(settings, reader, own, chat_tokenizer):
    for fields in (ULTRA, dict(reversed(ULTRA.items()))):
        row = Row(fields, "rows.jsonl, line 7")
        found = reader.of(RowSources.of(settings(source="rows.jsonl")), [row], chat_tokenizer)
        assert found.format == own
        assert found.passages(row)[0].text == CHAT
    if own == "preference":  # the error names a format that the row has
        with pytest.raises(ValueError, match="line 7: the rows are messages, and this recipe trains on "):
            reader.of(RowSources.of(settings(source="rows.jsonl")), [Row(OTHER, "rows.jsonl, line 7")], chat_tokenizer)
        with pytest.raises(ValueError, match=r"line 7: the rows are text, and this recipe trains on "):
            reader.of(
                RowSources.of(settings(source="rows.jsonl", format="text")),
                [Row(ULTRA, "rows.jsonl, line 7")],
                chat_tokenizer,
            )
