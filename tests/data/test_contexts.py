"""Contexts for the teacher: where they enter its prompt, rows that have none, lengths, and batches with both sides."""

import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lean_ft.data import prepare_batches
from lean_ft.data.contexts import Contexts, TaughtBatch
from lean_ft.data.documents import renderer_of
from lean_ft.data.objective import objective_of
from lean_ft.data.preview import preview
from lean_ft.data.rows import Row
from lean_ft.data.statistics import gather_statistics
from lean_ft.settings import SFTDataConfig, TaughtDataConfig

CONTEXT = {"columns": {"context": "context"}}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def chatml(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


@pytest.fixture
def render(tmp_path, chat_tokenizer, plain_tokenizer) -> Any:
    def of(*fields: dict[str, Any], chat: bool = True, **settings: Any) -> tuple[list[tuple[str, str, str]], Any]:
        """Return the student's text, the teacher's and the trained text of each row, and the report."""
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, fields)))
        config = TaughtDataConfig(**{"source": str(file), **CONTEXT, **settings})
        tokenizer = chat_tokenizer if chat else plain_tokenizer
        rows = [Row(one, f"rows.jsonl, line {i}") for i, one in enumerate(fields, start=1)]
        documents, report = renderer_of(config, tokenizer, str(file))(rows)
        found = []
        for student in documents:
            teacher = objective_of(config).beside(student)["teacher"]
            trained = [tokenizer.decode(one.ids[one.trained]) for one in (student, teacher)]
            assert trained[0] == trained[1]
            found.append((tokenizer.decode(student.ids), tokenizer.decode(teacher.ids), trained[0]))
        return found, report

    return of


DEMONSTRATION = [said("user", "x"), said("assistant", "y")]
LAST = (("user", "q"), ("assistant", "a"))
CASES: list[tuple[dict[str, Any], dict[str, Any], tuple[tuple[str, str], ...]]] = [
    # a row, settings, and the teacher's messages
    ({"context": "be brief"}, {}, (("system", "be brief"), *LAST)),
    ({"context": "be brief", "system": "s"}, {}, (("system", "s\n\nbe brief"), *LAST)),
    ({"context": "be brief"}, {"system": "s"}, (("system", "s\n\nbe brief"), *LAST)),
    ({"context": "[1] is wrong"}, {}, (("system", "[1] is wrong"), *LAST)),
    ({"context": "c"}, {"context_template": "{prompt}?{context}{{}}"}, (("user", "q?c{}"), LAST[1])),
    ({"context": DEMONSTRATION}, {}, (("user", "x"), ("assistant", "y"), *LAST)),
    ({"context": json.dumps(DEMONSTRATION)}, {}, (("user", "x"), ("assistant", "y"), *LAST)),
    ({"context": said("system", "s")}, {}, (("system", "s"), *LAST)),
    (
        {"context": [said("system", "more"), *DEMONSTRATION], "system": "s", "history": [["h", "i"]]},
        {"train_on": "completion"},
        (("system", "s\n\nmore"), ("user", "x"), ("assistant", "y"), ("user", "h"), ("assistant", "i"), *LAST),
    ),
]


@pytest.mark.parametrize(("row", "settings", "expected"), CASES, ids=str)
@pytest.mark.parametrize("form", ["prompt_completion", "messages", "alpaca"])
def test_a_context_stands_in_the_teachers_prompt_alone(render, row, settings, expected, form) -> None:
    fields = {
        "prompt_completion": {"prompt": "q", "completion": "a"},
        "messages": {"messages": [said("user", "q"), said("assistant", "a")]},
        "alpaca": {"instruction": "q", "input": "", "output": "a"},
    }[form]
    if form == "messages" and "history" in row:
        pytest.skip("chats have no history beside them")
    ((student, teacher, trained),), report = render({**fields, **row}, **settings)
    assert teacher == chatml(*expected)
    system = row.get("system", settings.get("system"))
    history = (("user", "h"), ("assistant", "i")) if "history" in row else ()
    assert student == chatml(*((("system", system),) if system else ()), *history, *LAST)
    assert trained == "a<|im_end|>"
    assert report.target_tokens == 2
    num_tokens = len(teacher.replace("<|im_start|>", "1").replace("<|im_end|>", "1"))
    assert report.notes == {"tokens of the teacher's sequences": num_tokens}


def test_every_answer_of_a_chat_is_taught(render) -> None:
    chat = [said("system", "s"), said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b")]
    ((_, teacher, trained),), _ = render({"messages": chat, "context": DEMONSTRATION})
    assert trained == "a<|im_end|>b<|im_end|>"
    following = [(message["role"], message["content"]) for message in chat[1:]]
    assert teacher == chatml(("system", "s"), ("user", "x"), ("assistant", "y"), *following)


@pytest.mark.parametrize(
    ("settings", "prompt"), [({}, "c\n\nq"), ({"context_template": "{prompt} ({context})"}, "q (c)")]
)
def test_a_context_stands_in_a_plain_prompt(render, settings, prompt) -> None:
    ((student, teacher, trained),), report = render(
        {"prompt": "q", "completion": "a", "context": "c"}, chat=False, separator=" ", **settings
    )
    assert (student, teacher, trained) == ("q a<|end|>", f"{prompt} a<|end|>", "a<|end|>")
    assert report.joined == {" ": 1}


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (None, "`context` is empty, so the teacher would read the student's prompt"),
        ("  ", "`context` is empty"),
        ([], "`context` is empty"),
        (3, "`context` is a number; expected a text or a list of messages"),
        (["x"], "`context`, message 1 is a string"),
        ([{"content": "x"}], "`context`, message 1 has content; expected `role`"),
        ("\ud800", "context"),
    ],
    ids=repr,
)
def test_what_is_no_context_is_a_bad_row(render, context, message) -> None:
    row = {"prompt": "q", "completion": "a", "context": context}
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 1: .*{message}"):
        render(row)
    found, report = render(row, row | {"context": "c"}, on_bad_row="skip")
    assert (len(found), report.bad_rows) == (1, 1)


def test_rows_that_have_no_place_for_a_context_are_refused(render) -> None:
    row = {"prompt": "q", "completion": "a"}
    with pytest.raises(ValueError, match=r"data.columns.context=context: .*rows have no column `context`"):
        render(row)
    with pytest.raises(ValueError, match="which needs a chat template"):
        render(row | {"context": DEMONSTRATION}, chat=False)
    for other in ({"text": "t"}, {"input_ids": [1, 2]}, {"prompt": "q", "chosen": "a", "rejected": "b"}):
        with pytest.raises(ValueError, match="reads a context for the teacher"):
            render(other | {"context": "c"})
    with pytest.raises(ValueError, match="the chat has no user message for data.context_template"):
        render(
            {"messages": [said("system", "s"), said("assistant", "a")], "context": "c"},
            context_template="{context}{prompt}",
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_template": "{context}"}, r"has \{context\}; expected \{context\} and \{prompt\}"),
        ({"context_template": "{context} {prompt!r}"}, "expected {context} and {prompt}"),
        ({"context_template": "{context} {prompt.x}"}, "expected {context} and {prompt}"),
        ({"context_template": "{context"}, "cannot be read: expected '}'"),
        ({"max_teacher_length": 100}, "max_teacher_length=100 is less than max_length=2048"),
        ({"packing": "wrapped"}, "packing=wrapped cuts sequences"),
        ({"packing": "bfd_split"}, "packing=bfd_split cuts sequences"),
        ({"train_on": "all"}, "the teacher's prompts have other tokens"),
        ({"truncation_side": "left"}, "rows with a context are never cut"),
        ({"columns": {}, "max_teacher_length": 3000}, "is for rows with a context. Set columns.context"),
        ({"columns": {}, "context_template": "{context} {prompt}"}, "is for rows with a context. Set columns.context"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TaughtDataConfig(**{"source": "x", **CONTEXT, **settings})


def test_a_row_is_dropped_and_never_cut(render) -> None:
    row = {"prompt": "q", "completion": "a", "context": "c" * 40}  # 23 tokens, and 73 with the context
    (student, *_), *_ = render(row)[0]
    assert len(render(row, max_length=73)[0]) == len(render(row, max_length=23, max_teacher_length=73)[0]) == 1
    for settings, reason in (
        ({"max_length": 72}, "longer than 72 tokens, with its context"),
        ({"max_length": 23, "max_teacher_length": 72}, "longer than 72 tokens, with its context"),
        ({"max_length": 22, "max_teacher_length": 73}, "longer than 22 tokens"),
    ):
        found, report = render(row, **settings)
        assert (found, report.dropped, report.truncated) == ([], {reason: 1}, 0), student
    with pytest.raises(ValueError, match=r"line 1, with its context: 73 tokens, more than data.max_teacher_length=72"):
        render(row, max_length=23, max_teacher_length=72, overflow="raise")
    assert len(render(row, max_length=22, packing="padding_free")[0]) == 1  # which takes rows of any length


def test_without_a_context_rows_are_those_of_finetune(tmp_path, chat_tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", "context": "c"}))
    given = {"source": str(tmp_path / "rows.jsonl")}
    kinds = (TaughtDataConfig, SFTDataConfig)
    taught, sft = (prepare_batches(kind(**given), chat_tokenizer, 1, 0)[0] for kind in kinds)
    assert taught.fingerprint == sft.fingerprint
    (ours,), (theirs,) = taught.take(1), sft.take(1)
    assert ours.for_teacher is ours.built and (ours.input_ids == theirs.input_ids).all()
    assert not isinstance(objective_of(TaughtDataConfig(**given)), Contexts)


ARRANGEMENTS = [
    {"packing": "none"},
    {"packing": "none", "batch_tokens": 160},
    {"packing": "padding_free"},
    {"packing": "bfd"},
]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_both_sides_of_a_batch_have_the_same_targets_in_order(tmp_path, chat_tokenizer, arrangement) -> None:
    lines = [
        {"prompt": "q" * (i % 5), "completion": chr(97 + i) * (1 + i % 4), "context": "c" * (7 * i % 30 + 1)}
        for i in range(11)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = TaughtDataConfig(
        source=str(tmp_path / "rows.jsonl"), **CONTEXT, max_length=80, max_teacher_length=128, **arrangement
    )
    batches, _ = prepare_batches(config, chat_tokenizer, batch_size=4, seed=3)
    seen, widths = [], set()
    for batch in batches.take(batches.batches_per_epoch):
        student, teacher = batch.built, batch.built.for_teacher
        assert isinstance(student, TaughtBatch)
        assert student.num_targets == teacher.num_targets == batch.num_targets
        for of_student, of_teacher in zip(student.questions(), teacher.questions(), strict=True):
            assert of_student[1] == of_teacher[1]
            texts = [chat_tokenizer.decode(one[0].ids) for one in (of_student, of_teacher)]
            completion = chat_tokenizer.decode(of_student[1]).removesuffix("<|im_end|>")
            row = lines[ord(completion[0]) - 97]
            asked = chatml(("user", row["prompt"])) + "<|im_start|>assistant\n"
            assert texts == [asked, chatml(("system", row["context"])) + asked]
            seen.append(row["completion"])
        if teacher.cu_seqlens is not None:
            widths.add((len(student.cu_seqlens), len(teacher.cu_seqlens)))
        empty = student.without_targets()
        assert empty.num_targets == empty.for_teacher.num_targets == 0
    assert sorted(seen) == sorted(row["completion"] for row in lines)
    assert len(widths) <= 1  # compiled code sees one shape of boundaries


def test_a_sampled_completion_follows_both_prompts(tmp_path, chat_tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", "context": "c"}))
    config = TaughtDataConfig(source=str(tmp_path / "rows.jsonl"), **CONTEXT, max_length=60)
    (batch,) = prepare_batches(config, chat_tokenizer, batch_size=1, seed=0)[0].take(1)
    objective = objective_of(config)
    ((prompt, _),) = batch.questions()
    document = objective.answered(prompt, [5, 6], [True, False])
    teacher = objective.beside(document)["teacher"]
    for one, length in ((document, 20), (teacher, 31)):
        assert (len(one), one.ids[-2:].tolist(), np.flatnonzero(one.trained).tolist()) == (length + 2, [5, 6], [length])
    assert objective.room(prompt, config) == 60 - 31


def test_previews_and_statistics_have_both_sides(tmp_path, chat_tokenizer) -> None:
    rows = [{"prompt": "q", "completion": "a", "context": "c" * n} for n in (1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = TaughtDataConfig(source=str(tmp_path / "rows.jsonl"), **CONTEXT)
    (shown,) = preview(config, chat_tokenizer, num_rows=1, batch_size=1).rows
    assert [one.heading.partition("line 1")[2] for one in shown.documents] == [
        ": 23 tokens, 2 trained",
        ", teacher: 34 tokens, 2 trained",
    ]
    facts = gather_statistics(config, chat_tokenizer)
    assert facts.lengths.tolist() == [23, 23]
    assert facts.beside["teacher"].tolist() == [34, 38]
