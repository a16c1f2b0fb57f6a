"""Convert chats of data sets to messages for a chat template.

A message has `role` and `content` (OpenAI) or `from` and `value` (ShareGPT). Content may be a list of parts
(`lean_ft.data.parts`).
Arguments of a tool call may be an object or a JSON string. Tools may be a JSON string. `train: false`, `weight: 0` and
the other keys in `SWITCHES` exclude an assistant message from the loss.
"""

from dataclasses import dataclass
from typing import Any

from lean_ft.data.foreign_fields import SWITCHES, is_given
from lean_ft.data.parts import read_part
from lean_ft.data.rows import kind, names_of
from lean_ft.data.text_files import parse_json
from lean_ft.system import foreign_values
from lean_ft.system.spelling import did_you_mean, nearest
from lean_ft.tokenizers import ROLES

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}
"""ShareGPT roles, used in `from` and in `conversations`. Elsewhere, roles are those of the chat template."""
_OWN_KEYS = frozenset(("role", "content", "from", "value", *SWITCHES))


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template."""

    messages: list[dict[str, Any]]
    untrained: frozenset[int] = frozenset()
    """Indices of messages marked as not trained."""


def read_chat(value: Any, field: str) -> Chat:
    """Return the chat in `value`, the content of `field`. Raises ValueError that names the invalid message."""
    value = parse_if_json(value, field)
    if not isinstance(value, list) or not value:
        found = "empty" if value == [] else kind(value)
        raise ValueError(f'`{field}` is {found}; expected a list of {{"role": ..., "content": ...}}.')
    messages = [
        _message(message, f"`{field}`, message {number}", field == "conversations")
        for number, message in enumerate(value, start=1)
    ]
    untrained = {i for i, message in enumerate(value) if not _is_trained(message, messages[i]["role"], i)}
    return Chat(messages, frozenset(untrained))


def read_opening(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages in front of a row's chat: its `system` and `history`, a list of [question, answer] or
    messages."""
    system = check_text(fields.get("system") or "", "the field `system`")
    messages = [{"role": "system", "content": system}] if system else []
    turns = parse_if_json(fields.get("history"), "history") or []
    if isinstance(turns, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        turns = [{"role": role, "content": turn[i]} for turn in turns for i, role in enumerate(("user", "assistant"))]
    return messages + (read_chat(turns, "history").messages if turns else [])


def read_variables(value: Any) -> dict[str, Any]:
    """Return the variables of the chat template in `chat_template_kwargs`, an object or JSON."""
    if not is_given(value):
        return {}
    given = parse_json(value) if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise ValueError(f"`chat_template_kwargs` is {kind(given)}; expected an object of names and values.")
    return given


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of functions, or None if there are none. Raises ValueError for other values."""
    tools = parse_if_json(value, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("`tools` is not a list of objects; expected JSON schemas of functions.")
    return tools


def parse_if_json(value: Any, field: str) -> Any:
    """Parse a string that contains a JSON array, as in CSV files; return None for blank strings, other values
    unchanged."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    if not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"`{field}` is a string that is not JSON: {error}.") from None


def check_text(value: Any, what: str) -> str:
    """Return `value` if it is valid text. Raises ValueError that names `what`."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {kind(value)}; expected a string.")
    return foreign_values.check_text(value, what)


def _message(message: Any, where: str, is_sharegpt: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {kind(message)}; expected an object with `role` and `content`.")
    if "role" in message:
        role, content = message["role"], message.get("content")
    elif "from" in message:
        role, content = message["from"], message.get("value")
    else:
        raise ValueError(f"{where} has {names_of(message)}; expected `role` and `content`, or `from` and `value`.")
    if not isinstance(role, str):
        raise ValueError(f"{where}: `role` is {kind(role)}; expected a string.")
    read = {k: v for k, v in message.items() if k not in _OWN_KEYS}
    is_sharegpt = is_sharegpt or "role" not in message
    read = {
        "role": SHAREGPT_ROLES.get(role, role) if is_sharegpt else role,
        "content": read_content(content, message, where),
        **read,
    }
    if is_sharegpt and read["role"] not in ROLES:
        known = [*SHAREGPT_ROLES, *ROLES]
        raise ValueError(
            f"{where}: unknown role {role!r}; expected one of {', '.join(known)}.{did_you_mean(role, known)}"
        )
    if "from" in message and role == "function_call":
        read["tool_calls"], read["content"] = parse_json(f"[{read['content']}]"), None
    if read.get("tool_calls") is not None:
        read["tool_calls"] = _tool_calls(read["tool_calls"], where)
    return read


def read_content(content: Any, message: dict[str, Any], where: str) -> str | list[dict[str, Any]] | None:
    """Return the text of a message, or its content parts if one of them is not text."""
    if isinstance(content, list):  # the parts of the OpenAI format
        parts = [read_part(part, where) for part in content]
        if any(part["type"] != "text" for part in parts):
            for part in parts:
                check_text(part.get("text", ""), f"{where}: `text`")
            return parts
        content = "".join(part["text"] for part in parts)
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return None
    if content is None and "content" not in message and "value" not in message:
        mistyped = nearest("content", message)
        remedy = f" Rename `{mistyped}`." if mistyped else ""
        raise ValueError(f"{where} has {names_of(message)}; expected also a `content`.{remedy}")
    return check_text(content, f"{where}: `content`")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{where}: `tool_calls` is {kind(calls)}; expected a list of calls.")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ValueError(f"{where}: a tool call is {kind(call)}; expected an object.")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"], where)}
    if not isinstance(call.get("arguments"), str):
        return call
    # OpenAI's API returns arguments as a JSON string; some compatible servers return an empty string for no arguments.
    arguments = call["arguments"] if call["arguments"].strip() else "{}"
    try:
        parse_json(arguments)
    except ValueError as error:
        raise ValueError(
            f"{where}: the arguments of the tool call {call.get('name')!r} are not JSON: {error}."
        ) from None
    return {**call, "arguments": arguments}


def _is_trained(message: dict[str, Any], role: str, i: int) -> bool:
    marks = {name: message[name] for name in SWITCHES if message.get(name) is not None}
    for name, value in marks.items():
        if name == "weight" and value not in (0, 1):
            raise ValueError(f"message {i + 1}: `weight` is {value!r}; expected 0 or 1.")
        if name != "weight" and not isinstance(value, bool):
            raise ValueError(f"message {i + 1}: `{name}` is {kind(value)}; expected true or false.")
    if role != "assistant" and (selected := next((name for name in marks if name != "masked" and marks[name]), None)):
        raise ValueError(
            f"message {i + 1} has the role {role}, but `{selected}` selects it for training; only assistant messages "
            "can be selected. data.train_on=all trains every message."
        )
    return all(value == SWITCHES[name] for name, value in marks.items())
