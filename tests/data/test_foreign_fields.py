"""Fields and keys that other tools give a meaning to: each is read, refused with its remedy, or named in the report."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lean_ft.data import prompt_rows
from lean_ft.data.documents import renderer_of
from lean_ft.data.prepare import prepare_batches
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row
from lean_ft.online.rewards import GIVEN
from lean_ft.settings import (
    ClassificationDataConfig,
    DataConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    RewardDataConfig,
    SFTDataConfig,
    UnpairedDataConfig,
)
from tests.data.conftest import build

TEMPLATE = """\
{{- effort | default('high') }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = {"chosen": "a", "rejected": "b"}
# objective, format, row: each is rendered as the messages Q, A
CHATS = [
    (SFTDataConfig, "messages", {"messages": [Q, A]}),
    (SFTDataConfig, "sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    (SFTDataConfig, "prompt_completion", {"prompt": "q", "completion": "a"}),
    (SFTDataConfig, "alpaca", {"instruction": "q", "output": "a"}),
    (SFTDataConfig, "input_output", {"input": "q", "output": "a"}),
    (UnpairedDataConfig, "unpaired", {"prompt": "q", "completion": "a", "label": True}),
    *(
        (kind, "preference", row)
        for kind in (PreferenceDataConfig, RewardDataConfig, UnpairedDataConfig)
        for row in (
            {"prompt": "q", **PAIR},
            {"instruction": "q", **PAIR},
            {"input": "q", **PAIR},
            {"chosen": [Q, A], "rejected": [Q, {**A, "content": "b"}]},
            {"prompt": "q", "messages": [Q, A], "chosen": [Q, A], "rejected": [Q, {**A, "content": "b"}]},
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
        )
    ),
]
TEXTS = [
    (SFTDataConfig, "text", {"text": "t"}),
    (SFTDataConfig, "tokens", {"input_ids": [1, 2]}),
    (ClassificationDataConfig, "classification", {"text": "t", "label": "x"}),
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return build(tmp_path_factory.mktemp("effort") / "t", chat_template=TEMPLATE, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def theirs(tokenizer) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer.folder)


@pytest.fixture
def render(tmp_path: Path, tokenizer) -> Any:
    def of(kind: type[DataConfig], fields: dict[str, Any], **settings: Any) -> tuple[str, str, DataReport]:
        """Return the first sequence of a row, its trained text, and the report."""
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(fields))
        settings |= {"labels": ["x", "y"]} if kind is ClassificationDataConfig else {}
        config = kind.model_validate({"source": str(file), **settings})
        documents, report = renderer_of(config, tokenizer, str(file))([Row(fields, "rows.jsonl, line 1")])
        ids, mask = documents[0].ids, documents[0].trained
        return tokenizer.decode(ids), tokenizer.decode(ids[mask]), report

    return of


def ids(cases: list[Any]) -> list[str]:
    return [f"{kind.objective}-{format}-{'-'.join(row)}" for kind, format, row in cases]


@pytest.mark.first(8)
@pytest.mark.parametrize(("kind", "format", "row"), CHATS, ids=ids(CHATS))
def test_what_a_chat_reads_is_rendered_as_in_transformers(kind, format, row, render, theirs) -> None:
    system, past = {"role": "system", "content": "s"}, [{"role": "user", "content": "p"}, {**A, "content": "r"}]
    given: list[tuple[dict[str, Any], list[Any], dict[str, Any]]] = [
        ({}, [Q, A], {}),
        ({"system": "", "tools": [], "chat_template_kwargs": None}, [Q, A], {}),
        ({"system": "s"}, [system, Q, A], {}),
        ({"tools": TOOLS}, [Q, A], {"tools": TOOLS}),
        ({"tools": json.dumps(TOOLS)}, [Q, A], {"tools": TOOLS}),
        ({"chat_template_kwargs": {"effort": "low"}}, [Q, A], {"effort": "low"}),
        ({"chat_template_kwargs": '{"effort": "low"}'}, [Q, A], {"effort": "low"}),
    ]
    if format not in ("messages", "sharegpt"):
        given.append(({"system": "s", "history": [["p", "r"]]}, [system, *past, Q, A], {}))
        given.append(({"history": past}, [*past, Q, A], {}))
    for extra, messages, variables in given:
        text, trained, report = render(kind, row | extra)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **variables)
        trains_history = kind is SFTDataConfig and "history" in extra
        assert trained == ("r<|im_end|>a<|im_end|>" if trains_history else "a<|im_end|>")
        assert [*report.unread] == (["messages"] if "chosen" in row and "messages" in row else [])
        assert f"({format}, detected" in str(report)


IMAGE = (
    "(an image, and model.images=none ignores images. Set model.images=frozen|.*`images?`, and images are read from)"
)
FIELDS_REFUSED = [
    ({"images": ["cat.png"]}, IMAGE),
    ({"image": "cat.png"}, IMAGE),
    ({"videos": ["cat.mp4"]}, "`videos`, and only text and images are read.*on_bad_row=skip"),
    ({"audio": {"path": "a.wav"}}, "`audio`"),
    ({"weight": 0.5}, r"`weight`, and rows have no weights.*data.source=\[\{path"),
    ({"sample_weight": 2}, "`sample_weight`"),
    ({"img": "a.png"}, "`img`, which looks like an image, and model.images=none.*data.columns.images=img"),
    ({"frames": ["a.jpg", "b.jpg"]}, "`frames`, which looks like an image"),
    ({"pixel_values": [[0.5, 0.1]]}, "`pixel_values`, which looks like an image"),
    ({"crop": "data:image/png;base64,AAAA"}, "`crop`, which looks like an image"),
    ({"clip": "a.mp4"}, "`clip`, which looks like video, and only text and images are read"),
    ({"heard": {"array": [0.1], "sampling_rate": 16_000}}, "`heard`, which looks like audio"),
]
OF_CHATS_REFUSED = [
    ({"functions": [{"name": "f"}]}, "`functions` and no `tools`. Set data.columns.tools=functions"),
    ({"system_prompt": "s"}, "`system_prompt` and no `system`. Set data.columns.system=system_prompt"),
    ({"effort": "low"}, "`effort`, which is a variable of the chat template.*data.chat_template_kwargs.effort"),
]
NAMED = {"id": 7, "source": "web", "score": 0.5, "score_chosen": 8.0, "chosen_score": 8.0, "rating": 4}
NAMED |= {
    "weight": 1,
    "sample_weight": 1.0,
    "reference_chosen_logps": -3.0,
    "special_tokens_mask": [0, 0],
    "token_type_ids": [0, 0],
    "name": "n",
    "image_id": 7,
    "file_name": "train/7.jpg",
    "origin": "video transcript",
    "picture": "a red house",
}
NEUTRAL = {"images": [], "functions": "[]", "system_prompt": " ", "id": None}


@pytest.mark.first(8)
@pytest.mark.parametrize(("kind", "format", "row"), CHATS + TEXTS, ids=ids(CHATS + TEXTS))
def test_other_fields_are_refused_or_named_once(kind, format, row, render) -> None:
    plain = render(kind, row)
    is_chat = format not in ("text", "tokens", "classification")
    for extra, message in FIELDS_REFUSED + OF_CHATS_REFUSED * is_chat:
        with pytest.raises(ValueError, match=f"rows.jsonl, line 1: the row has (the field )?{message}"):
            render(kind, row | extra)
    named = NAMED if is_chat else NAMED | {"functions": [1], "chat_template_kwargs": {"effort": "low"}, "effort": "low"}
    text, trained, report = render(kind, row | named)
    assert (text, trained) == plain[:2]
    before = list(plain[2].unread)
    assert [*report.unread] == before + list(named)
    assert str(report).count(f"fields not read: {', '.join(before + list(named))}; ") == 1
    assert list(render(kind, row | NEUTRAL)[2].unread) == before


def test_the_margin_is_read_by_reward_models_alone(render) -> None:
    row = {"prompt": "q", **PAIR, "margin": 2.0}
    unread = {
        kind: [*render(kind, row)[2].unread] for kind in (RewardDataConfig, PreferenceDataConfig, UnpairedDataConfig)
    }
    assert list(unread.values()) == [[], ["margin"], ["margin"]]
    assert [*render(ClassificationDataConfig, {"text": "t", "label": "x", "labels": ["y"]})[2].unread] == ["labels"]


PROMPT_COMPLETION, PREFERENCE = {"prompt": "q", "completion": "a"}, {"prompt": "q", **PAIR}


@pytest.mark.parametrize(
    ("kind", "row", "fix"),
    [
        (SFTDataConfig, PROMPT_COMPLETION | {"input": "x y"}, {"prompt": "prompt"}),
        (
            SFTDataConfig,
            PROMPT_COMPLETION | {"instruction": "do it"},
            {"prompt": "instruction"},
        ),
        (SFTDataConfig, {"input": "q", "output": "a", "prompt": "do it"}, {"instruction": "prompt"}),
        (PreferenceDataConfig, PREFERENCE | {"instruction": "do it"}, {"prompt": "instruction"}),
        (PreferenceDataConfig, PAIR | {"question": "do it"}, {"prompt": "question"}),
        (PreferenceDataConfig, PAIR | {"query": "do it"}, {"prompt": "query"}),
        (UnpairedDataConfig, PROMPT_COMPLETION | {"label": 1, "input": "x y"}, {"prompt": "prompt"}),
    ],
)
def test_a_second_prompt_is_refused_until_columns_decide(kind, row, fix, render) -> None:
    name = [*row][-1]
    with pytest.raises(
        ValueError, match=f"the field `{name}`, and its text is not part of the prompt. Set data.columns"
    ):
        render(kind, row)
    text, _, report = render(kind, row, columns=fix)
    assert all(row[name] in text or name in report.unread for name in ("prompt", "instruction", "input") if name in row)
    if "chosen" not in row:  # the text is part of the prompt, or the prompt of the text
        prompt = row["input" if name == "prompt" else "prompt"]
        for value in (prompt[:1], f"### {prompt}:"):
            assert name in render(kind, row | {name: value})[2].unread


@pytest.mark.parametrize(
    ("keys", "trained", "unread"),
    [
        ({"train": False}, False, []),
        ({"training": False}, False, []),
        ({"loss": False}, False, []),
        ({"weight": 0}, False, []),
        ({"masked": True}, False, []),
        ({"train": True, "training": True, "loss": True, "weight": 1, "masked": False}, True, []),
        ({"thinking": "t", "reasoning_content": "t"}, True, ["messages.thinking", "messages.reasoning_content"]),
        ({"name": "n", "id": 4, "refusal": None, "annotations": []}, True, ["messages.name", "messages.id"]),
    ],
)
def test_keys_of_a_message(keys, trained, unread, render) -> None:
    last = {"role": "assistant", "content": "z"}
    _, text, report = render(SFTDataConfig, {"messages": [Q, {**A, **keys}, Q, last]})
    assert text == ("a<|im_end|>z<|im_end|>" if trained else "z<|im_end|>")
    assert [*report.unread] == unread


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask": True}, "a message has the key `mask`, and parts.*`train: false`"),
        ({"train_detail": [{"begin_offset": 0}]}, "`train_detail`"),
        ({"loss_scale": 0.5}, "`loss_scale`"),
        ({"weight": 0.5}, "`weight` is 0.5; expected 0 or 1"),
        ({"loss": "no"}, "`loss` is a string; expected true or false"),
        ({"images": ["x"]}, "`images`, and images are read from chats"),
        ({"img": "a.png"}, "`img`, and images are read from chats"),
        ({"tool_calls": [{"name": "f"}]}, "does not write tool calls. Set data.chat_template"),
    ],
)
def test_keys_of_a_message_that_are_refused(keys, message, render) -> None:
    for row in ({"messages": [Q, {**A, **keys}]}, {"prompt": [Q], "completion": [{**A, **keys}]}):
        with pytest.raises(ValueError, match=f"rows.jsonl, line 1: .*{message}"):
            render(SFTDataConfig, row)
    with pytest.raises(ValueError, match=message):
        render(PreferenceDataConfig, {"prompt": "q", "chosen": [{**A, **keys}], "rejected": "b"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": False}, "content part with the key `train`, and parts of a message cannot be selected"),
        ({"weight": 0.5}, "content part with the key `weight`, and parts"),
        ({"image": "a.png"}, "content part with the key `image`. A part is one text or one image"),
        ({"video": "a.mp4"}, "content part with the key `video`. A part is one text or one image"),
        ({"img": "a.png"}, "content part with the key `img`. A part is one text"),
    ],
)
def test_keys_of_a_content_part_that_are_refused(keys, message, render) -> None:
    content = [{"type": "text", "text": "q", **keys}]
    for row in (
        {"messages": [{**Q, "content": content}, A]},
        {"prompt": [{**Q, "content": content}], "completion": "a"},
    ):
        with pytest.raises(ValueError, match=f"rows.jsonl, line 1: .*{message}"):
            render(SFTDataConfig, row)


def test_keys_of_a_content_part_that_are_named(render) -> None:
    part = {
        "type": "text",
        "text": "q",
        "cache_control": {"type": "ephemeral"},
        "train": True,
        "index": None,
        "image": None,
    }
    chat = [{**Q, "content": [part]}, A]
    for row in ({"messages": chat}, {"messages": json.dumps(chat)}, {"prompt": chat[:1], "completion": "a", "id": 1}):
        text, _, report = render(SFTDataConfig, row)
        assert text.endswith("<|im_start|>userq<|im_end|><|im_start|>assistanta<|im_end|>")
        assert [*report.unread] == [
            *(["id"] if "id" in row else []), "messages.content.cache_control", "messages.content.train"
        ]  # fmt: skip


def test_places_of_images_in_texts_without_images_are_named(render) -> None:
    for row in ({"messages": [{**Q, "content": "<image>q"}, A]}, {"text": "<image> t"}):
        assert [*render(SFTDataConfig, row)[2].unread] == ["<image> in texts"]


@pytest.mark.parametrize("name", sorted({*GIVEN, "environments", "environment_reward"}))
def test_a_column_must_not_have_a_name_that_rewards_get_otherwise(name: str, tmp_path: Path, tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "answer": "a", name: "mine"}))
    config = PromptDataConfig.model_validate({"source": f"{tmp_path}/rows.jsonl"})
    with pytest.raises(
        ValueError, match=f"line 1: the rows have the column `{name}`.*set data.columns.my_{name}={name}"
    ):
        prompt_rows(config, tokenizer, seed=0)
    prompts, _ = prompt_rows(config.model_copy(update={"columns": {f"my_{name}": name}}), tokenizer, seed=0)
    assert prompts[0].columns == {"answer": "a", f"my_{name}": "mine"}


def test_a_prompt_that_columns_replace_is_named(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "old", "question": "q", "picture": "target.png"}))
    config = PromptDataConfig.model_validate({"source": f"{tmp_path}/rows.jsonl", "columns": {"prompt": "question"}})
    with pytest.raises(ValueError, match="`picture`, which looks like an image, and model.images=none ignores images"):
        prompt_rows(config, tokenizer, seed=0)
    config = config.model_copy(update={"columns": {"prompt": "question", "target": "picture"}})
    prompts, _ = prompt_rows(config, tokenizer, seed=0)
    assert prompts[0].columns == {"target": "target.png"}
    assert [*prompts.report.unread] == ["prompt"]


MASKS = {"completion_mask": 0, "assistant_masks": 0, "assistant_mask": 0, "loss_mask": 0, "prompt_mask": 1}


@pytest.mark.parametrize("name", MASKS)
def test_masks_beside_token_ids_exclude_tokens(name: str, render, tokenizer) -> None:
    tokens = tokenizer.encode("abcd")
    for values in itertools.product((0, 1), repeat=4):
        kept = "".join(c for c, value in zip("abcd", values, strict=True) if value != MASKS[name])
        if not any(value != MASKS[name] for value in values[1:]):
            continue  # nothing predicts the first token
        assert render(SFTDataConfig, {"input_ids": tokens, name: list(values)})[1] == kept
    labels = {"labels": [-100, *tokens[1:]], name: [1 - MASKS[name]] * 3 + [MASKS[name]]}
    assert render(SFTDataConfig, {"input_ids": tokens, **labels})[1] == "bc"


@pytest.mark.parametrize("packed", [{"position_ids": [0, 1, 0, 1]}, {"seq_lengths": [2, 2]}])
def test_several_documents_in_a_row_are_refused(packed, render) -> None:
    with pytest.raises(ValueError, match="several documents"):
        render(SFTDataConfig, {"input_ids": [1, 2, 3, 4], **packed})
    assert render(SFTDataConfig, {"input_ids": [1, 2], "position_ids": [0, 1], "seq_lengths": [2]})[2].kept == 1


@pytest.mark.parametrize("field", ["system", "history", "tools", "chat_template_kwargs"])
def test_fields_of_chats_are_refused_in_plain_texts(field: str, render) -> None:
    value = {"system": "s", "history": [["p", "r"]], "tools": TOOLS, "chat_template_kwargs": {"effort": "low"}}[field]
    for kind, _, row in CHATS:
        if isinstance(row.get("completion", row.get("output", row.get("chosen"))), str):
            with pytest.raises(ValueError, match=f"the field `{field}`, which needs a chat template"):
                render(kind, {**row, field: value}, chat=False)


def test_variables_of_settings_and_rows_are_merged_and_reserved_names_refused(render, theirs) -> None:
    def effort(row: Any, setting: Any) -> str:
        fields = {"messages": [Q, A]} | ({} if row is None else {"chat_template_kwargs": row})
        return render(SFTDataConfig, fields, chat_template_kwargs=setting)[0]

    expected = {value: theirs.apply_chat_template([Q, A], tokenize=False, effort=value) for value in ("low", "mid")}
    assert effort(None, {"effort": "mid"}) == expected["mid"]
    assert effort({"effort": "low"}, {"effort": "mid"}) == expected["low"]
    assert effort({}, {"effort": "mid"}) == effort({"other": 1}, {"effort": "mid"}) == expected["mid"]
    assert [*render(SFTDataConfig, {"messages": [Q, A], "chat_template_kwargs": {"other": 1}})[2].unread] == [
        "chat_template_kwargs.other"
    ]
    for name in ("messages", "tools", "add_generation_prompt", "eos_token", "bos_token", "no name"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs.{name}: expected the name of a variable"):
            effort({name: "x"}, {})
    for value, message in (([1], "is a list"), ("low", "malformed JSON"), ({"effort": "<|end|>"}, "control token")):
        with pytest.raises(ValueError, match=message):
            effort(value, {})
    with pytest.raises(ValueError, match="chat_template_kwargs.efort: the chat template does not mention it"):
        effort(None, {"efort": "low"})
    with pytest.raises(ValueError, match="data.chat_template_kwargs applies to chats"):
        render(SFTDataConfig, {"text": "t"}, chat_template_kwargs={"effort": "low"})


def test_variables_are_part_of_what_caches_depend_on(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", **PAIR, "label": True}) + "\n")
    settings = {"source": f"{tmp_path}/rows.jsonl", "cache_dir": tmp_path / "cache"}
    for kind in (SFTDataConfig, PreferenceDataConfig, UnpairedDataConfig):
        found = [
            prepare_batches(kind.model_validate(settings | given), tokenizer, 1, seed=0)[0]
            for given in ({}, {"chat_template_kwargs": {"effort": "low"}}, {"chat_template_kwargs": {"effort": "mid"}})
        ]
        assert len({batches.fingerprint for batches in found}) == 3
        assert len({batches.layout.columns.values["ids"].tobytes() for batches in found}) == 3


def test_prompts_are_rendered_with_variables_and_other_columns_go_to_rewards(tmp_path: Path, tokenizer, theirs) -> None:
    row = {"prompt": [{**Q, "id": 1}], "chat_template_kwargs": {"effort": "low"}, "answer": 4, "sounds": ["x"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "q", "other": 1}) + "\n")
    config = PromptDataConfig.model_validate(
        {"source": f"{tmp_path}/rows.jsonl", "chat_template_kwargs": {"effort": "mid"}, "shuffle": False}
    )
    prompts, _ = prompt_rows(config, tokenizer, seed=0)
    for number, effort in enumerate(("low", "mid")):
        expected = theirs.apply_chat_template([Q], tokenize=False, add_generation_prompt=True, effort=effort)
        assert tokenizer.decode(prompts[number].ids) == expected
    further = {name: value for name, value in row.items() if name != "prompt"}  # as in TRL
    assert [prompts[i].columns for i in range(2)] == [further, {"other": 1}]
    named = "fields not read: messages.id; columns for rewards: chat_template_kwargs, answer, sounds, other; 2 prompts"
    assert named in str(prompts.report)
    plain, _ = prompt_rows(config.model_copy(update={"chat_template_kwargs": {}}), tokenizer, seed=0)
    assert plain.fingerprint != prompts.fingerprint
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<video>q", "videos": ["x"]}))
    with pytest.raises(ValueError, match="a placeholder for `videos`"):
        prompt_rows(config, tokenizer, seed=0)
