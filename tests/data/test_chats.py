"""All chat formats convert to the same messages; errors name the invalid message."""

from typing import Any

import pytest

from lean_ft.data.chats import read_chat, read_tools
from tests.data.conftest import build

CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": [1, None]}}}
OPENAI = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "1"},
    {"role": "assistant", "content": "a"},
]


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    return [*OPENAI[:2], {**OPENAI[2], "tool_calls": [call]}, *OPENAI[3:]]


@pytest.mark.parametrize(
    "value",
    [
        OPENAI,
        [*OPENAI[:1], {"role": "user", "content": [{"type": "text", "text": "q"}]}, *OPENAI[2:]],
        '[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": null, '
        '"tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": [1, null]}}}]}, '
        '{"role": "tool", "content": "7", "tool_call_id": "1"}, {"role": "assistant", "content": "a"}]',
    ],
)
def test_ways_to_write_messages(value: Any):
    assert read_chat(value, "messages").messages == OPENAI


@pytest.mark.parametrize(("given", "read"), [('{"x":[1,  null]}', '{"x":[1,  null]}'), ("", "{}"), (" ", "{}")])
def test_arguments_in_a_string_stay_as_they_are(given: str, read: str):
    assert read_chat(with_arguments(given), "messages").messages == with_arguments(read)


def test_sharegpt():
    names = ["system", "human", "gpt", "observation", "user", "assistant", "tool", "function", "model", "chatgpt"]
    chat = read_chat([{"from": name, "value": name} for name in names], "conversations")
    roles = ["system", "user", "assistant", "tool", "user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert chat.messages == [{"role": r, "content": n} for r, n in zip(roles, names, strict=True)]
    call = read_chat(
        [{"from": "function_call", "value": '{"name": "f", "arguments": "{\\"x\\": 1}"}'}], "conversations"
    )
    assert call.messages == [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}
    ]


def test_messages_that_are_not_trained():
    value = [
        {"role": "user", "content": "q", "train": False},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "assistant", "content": "b", "train": False},
        {"role": "assistant", "content": "c", "train": True, "weight": 1.0},
        {"role": "assistant", "content": "d", "train": None},
    ]
    chat = read_chat(value, "messages")
    assert chat.untrained == {0, 1, 2}
    assert all(message.keys() == {"role", "content"} for message in chat.messages)  # no other keys


@pytest.mark.parametrize("value", [None, [], "", "[]"])
def test_no_tools(value: Any):
    assert read_tools(value) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "`messages` is empty"),
        (None, "`messages` is null"),
        ("hi", "`messages` is a string"),
        ('[{"role": }]', "`messages` is a string that is not JSON: malformed"),
        (["hi"], "`messages`, message 1 is a string; expected an object with `role` and `content`"),
        ([OPENAI[1], {"speaker": "x"}], "message 2 has speaker; expected `role` and `content`, or `from` and `value`"),
        ([{"role": None, "content": "q"}], "message 1: `role` is null"),
        ([{"from": "humann", "value": "q"}], "unknown role 'humann'.*Did you mean 'human'"),
        ([{"role": "user", "content": None}], "message 1: `content` is null; expected a string"),
        ([{"role": "user"}], "message 1 has role; expected also a `content`.$"),
        ([{"role": "user", "contents": "q"}], "has role, contents; expected also a `content`. Rename `contents`"),
        ([{"role": "user", "content": float("nan")}], "`content` is a number"),
        ([{"role": "user", "content": {"text": "q"}}], "`content` is an object"),
        ([{"role": "user", "content": "\udc00"}], "message 1: `content` has half a surrogate pair"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}],
            "of the type video; only text and images are"),
        ([{"role": "user", "content": [{"type": "file"}]}], "part that is neither text nor an image"),
        (with_arguments("{x: 1}"), "message 3: the arguments of the tool call 'f' are not JSON"),
        ([{"role": "assistant", "content": "", "tool_calls": {}}], "`tool_calls` is an object; expected a list"),
        ([{"role": "assistant", "content": "", "tool_calls": [1]}], "a tool call is a number"),
        ([{"role": "assistant", "content": "a", "train": "no"}], "`train` is a string; expected true or false"),
        ([{"role": "assistant", "content": "a", "weight": 0.5}], "`weight` is 0.5; expected 0 or 1"),
        ([{"role": "user", "content": "q", "train": True}], "message 1 has the role user, but `train` selects it"),
    ],
)  # fmt: skip
def test_chats_that_cannot_be_read(value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        read_chat(value, "messages")


@pytest.mark.parametrize(
    ("role", "meant"),
    [("bot", "assistant"), ("gpt", "assistant"), ("Assistant", "assistant"), ("human", "user"), ("function", "tool")],
)
def test_a_role_in_messages_is_one_of_the_chat_template(role: str, meant: str, chat_tokenizer) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": role, "content": "a"}]
    assert read_chat(messages, "messages").messages[1]["role"] == role
    with pytest.raises(
        ValueError,
        match=rf"message 2: the chat template has no role '{role}'.*expected one of system, .*mean '{meant}'",
    ):
        chat_tokenizer.passage(messages)
    if role != "Assistant":
        assert read_chat(messages, "conversations").messages[1]["role"] == meant
        assert read_chat([{"from": role, "value": "a"}], "messages").messages[0]["role"] == meant


def test_a_template_may_have_roles_of_its_own(tmp_path) -> None:
    source = (
        "{% for m in messages %}{% if m['role'] == 'critic' %}!{% endif %}<|im_start|>{{ m.role }}\n{{ m.content "
        "}}<|im_end|>\n{% endfor %}"
    )
    tokenizer = build(tmp_path / "tokenizer", chat_template=source)
    text = tokenizer.passage([{"role": "critic", "content": "hm"}, {"role": "assistant", "content": "a"}]).text
    assert text.startswith("!<|im_start|>critic")
