"""Forms of messages: a chat is rendered in a form in which the chat template writes all its texts.

A template skips a role or a key that it does not know, without an error. So each text of a chat (contents, reasoning,
names and arguments of calls, results) must be found in the rendering. If one is missing, or the template fails, other
forms of the
same messages are tried: arguments of calls as JSON text or as objects, an absent content as null or as an empty text,
calls under `function`, and developer messages as system messages. If no form is written whole, the chat is refused.

Reasoning may be left out: templates drop that of earlier turns, as they do when the model samples. That is reported.

A short text may also occur elsewhere in the rendering. So the first chat of each shape (the roles, and the kinds of
values) is rendered once more with an anchor in each text (`lean_ft.tokenizers.turns.anchored`), and every anchor must
arrive.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lean_ft.system.foreign_values import JSON, MARKERS
from lean_ft.tokenizers.chat_template import REASONING, ChatTemplate
from lean_ft.tokenizers.turns import ANCHOR_PLACES, ANCHORS, anchored

Messages = list[dict[str, Any]]
MOST_SHAPES = 4096
_PROBE: dict[str, JSON] = {"probe": 0}
_PROBE_TEXT = json.dumps(_PROBE)
# In an assistant's content, the answer follows the last of these. Templates treat the text before it as reasoning.
_ENDS_OF_REASONING = (
    *("</think>", "</thinking>", "</thought>", "</reasoning>", "</seed:think>", "◁/think▷"),
    *("[/THINK]", "<|END_THINKING|>", "<channel|>"),
)
_STARTS_OF_REASONING = re.compile(r"\A\s*(?:<[\w:|]+>|\[THINK\]|◁think▷)")


class MessageForm(NamedTuple):
    """How messages are given to a template. `given`: unchanged."""

    roles: Literal["given", "system"] = "given"
    calls: Literal["given", "function"] = "given"
    content: Literal["absent", "empty", "null"] = "absent"
    """Of a message without content. As in transformers, absent if another form is not needed."""
    arguments: Literal["given", "objects", "texts"] = "given"


@dataclass(frozen=True)
class WholeChat:
    """A chat in the form that a template writes whole."""

    messages: Messages
    text: str
    """The rendering, in which markers show generation blocks."""
    unread: tuple[str, ...] = ()
    """Names of keys and tools that the template does not write."""
    developer_as_system: bool = False
    """Whether developer messages are written as system messages."""


class Text(NamedTuple):
    """A text of a message."""

    message: int
    part: Literal["content", "reasoning", "tool call"]
    text: str


class Forms:
    """Finds forms for one chat template, and keeps them by the shape of a chat."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._known: dict[Any, MessageForm] = {}

    def whole(
        self, messages: Messages, tools: list[dict[str, Any]] | None, prompt: bool, variables: dict[str, Any]
    ) -> WholeChat:
        """Return the chat in the first form that the template writes whole.

        Raises the ValueError of the unchanged chat if there is none: the template rejects the chat, or leaves out a
        text.
        """
        rendering = _Rendering(self.template, tools, prompt, variables)
        shape = tuple(map(_shape, messages)), tools is None, prompt, repr(variables)
        problems = list[ValueError]()
        if (remembered := self._known.get(shape)) is not None:
            try:
                return rendering.whole(messages, remembered, is_known=True)
            except ValueError as error:  # a text of this chat made a difference
                problems.append(error)
        for form in _forms(messages):
            try:
                form = form._replace(arguments=rendering.arguments(_changed(messages, form)))
                chat = rendering.whole(messages, form, is_known=False)
            except ValueError as error:
                problems.append(error)
                continue
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[shape] = form
            return chat
        raise problems[0]


@dataclass(frozen=True)
class _Rendering:
    """Renders chats with the same tools and variables."""

    template: ChatTemplate
    tools: list[dict[str, Any]] | None
    prompt: bool
    variables: dict[str, Any]

    def text(self, messages: Messages, prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, prompt, self.variables)

    def whole(self, messages: Messages, form: MessageForm, is_known: bool) -> WholeChat:
        """Render a chat in a form. is_known: the form writes chats of this shape. Raises ValueError if a text is
        missing."""
        changed = _changed(messages, form)
        rendered = self.text(changed, self.prompt)
        written = MARKERS.sub("", rendered)
        texts = list(texts_of(changed))
        absent = set() if is_known else self._absent(changed, written)
        missing = [item for item in texts if item[:2] in absent or not _is_in(item.text, written)]
        lost = [item for item in missing if item.part != "reasoning"]
        if lost:
            number, part, text = lost[0]
            which = "" if part == "content" else f"a {part} of "
            raise ValueError(
                f"the chat template does not write {which}message {number + 1} ({messages[number]['role']}): "
                f"{text.strip()!r:.80}. Remove it, or set data.chat_template to a template that writes it."
            )
        notes = [f"messages.{_name_of_reasoning(changed[item.message])}" for item in missing]
        notes += _unwritten_tools(self.tools, written)
        return WholeChat(changed, rendered, tuple(dict.fromkeys(notes)), form.roles == "system")

    def _absent(self, messages: Messages, written: str) -> set[tuple[int, str]]:
        """Return the parts of messages whose anchors do not arrive; none if the template looks at both places of
        anchors."""
        for place in ANCHOR_PLACES:
            marked = anchored(messages, place)
            try:
                rendered = self.text(marked, self.prompt)
            except ValueError:
                continue
            if MARKERS.sub("", ANCHORS.sub("", rendered)) == written:
                arrived = set(ANCHORS.findall(rendered))
                return {text[:2] for text in texts_of(marked) if not arrived.issuperset(ANCHORS.findall(text.text))}
        return set()

    def arguments(self, messages: Messages) -> Literal["given", "objects", "texts"]:
        """The form of arguments of calls that the template takes.

        Arguments that are JSON in a string stay a string if the template writes strings unchanged (Qwen3, DeepSeek-V3),
        as in transformers. If it would encode the string as JSON again, or fails on a string, it gets the parsed
        object. Objects become JSON if the template takes strings alone, and would write an object as Python does.
        """
        kinds = {type(call.get("arguments")) for message in messages for call in _functions(message)}
        if kinds.isdisjoint((str, dict)):
            return "given"
        as_text = self._probed(messages, _PROBE_TEXT)
        as_object = self._probed(messages, _PROBE)
        takes_texts = as_text is not None and _PROBE_TEXT in as_text
        takes_objects = as_object is not None and repr(_PROBE) not in as_object
        if str in kinds and not takes_texts and (as_text is not None or as_object is not None):
            return "objects"
        return "texts" if dict in kinds and not takes_objects and takes_texts else "given"

    def _probed(self, messages: Messages, arguments: JSON) -> str | None:
        try:
            return self.text(_with_calls(messages, lambda call: {**call, "arguments": arguments}))
        except ValueError:
            return None


def texts_of(messages: Messages) -> Iterator[Text]:
    """Yield the texts that a template is to write. An assistant's content may begin with reasoning."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for text in [content] if isinstance(content, str) else _texts_of_parts(content):
            thought, answer = _split(text) if message.get("role") == "assistant" else ("", text)
            yield Text(i, "reasoning", thought)
            yield Text(i, "content", answer)
        if (reasoning := next((message[name] for name in REASONING if name in message), None)) is not None:
            yield from (Text(i, "reasoning", text) for text in _strings(reasoning))
        for call in _functions(message):
            texts = _strings([call.get("name"), _parsed(call.get("arguments"))])
            yield from (Text(i, "tool call", text) for text in texts)


def _split(content: str) -> tuple[str, str]:
    """Return the reasoning that an assistant's content begins with, without its tags, and the answer behind it."""
    end, tag = max((content.rfind(tag), tag) for tag in _ENDS_OF_REASONING)
    if end < 0:
        return "", content
    return _STARTS_OF_REASONING.sub("", content[:end]), content[end + len(tag) :]


def _texts_of_parts(content: JSON) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str)]


def _strings(value: JSON) -> Iterator[str]:
    """Yield all texts in a value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _is_in(text: str, written: str) -> bool:
    """Whether a text was written: as it is, inside JSON, or with other spaces and punctuation."""
    text = text.strip()
    if text in written:
        return True
    forms = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    letters = re.sub(r"\W+", "", text)
    return any(form in written for form in forms) or (letters != "" and letters in re.sub(r"\W+", "", written))


def _unwritten_tools(tools: list[dict[str, Any]] | None, written: str) -> Iterator[str]:
    """Yield a note for tools of which the template writes nothing, or not all names and descriptions."""
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    functions = [function for function in functions if isinstance(function, dict)]
    if any(not _is_in(str(function.get("name", "")), written) for function in functions):
        yield "tools"
    elif any(not _is_in(text, written) for function in functions for text in _words_of(function)):
        yield "parts of tools"


def _words_of(schema: JSON) -> Iterator[str]:
    """Yield the names of parameters and the descriptions in a JSON schema."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _words_of(inner)
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        if isinstance(description := schema.get("description"), str):
            yield description
        for inner in schema.values():
            yield from _words_of(inner)


def _name_of_reasoning(message: dict[str, Any]) -> str:
    return next((name for name in REASONING if name in message), "content (its reasoning)")


def _shape(message: dict[str, Any]) -> tuple[Any, ...]:
    """What decides how a template writes a message, apart from its words."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else _texts_of_parts(content)
    calls = tuple((type(call.get("arguments")), call is not outer) for outer, call in _calls(message))
    blank = tuple(not text.strip() for text in texts)
    keys = tuple(name for name, value in message.items() if value is not None)
    thinks = message.get("role") == "assistant" and any(_split(text)[0] for text in texts)
    return message.get("role"), keys, type(content), blank, thinks, calls


def _forms(messages: Messages) -> Iterator[MessageForm]:
    """Yield the forms of these messages, the given one first."""
    said = [message for message in messages if _functions(message)]
    is_nested = all(call is not outer and "arguments" in call for message in said for outer, call in _calls(message))
    contents = ("absent", "empty", "null") if any(not message.get("content") for message in said) else ("absent",)
    calls = ("given",) if is_nested else ("given", "function")
    roles = ("given", "system") if any(message.get("role") == "developer" for message in messages) else ("given",)
    for role, call, content in itertools.product(roles, calls, contents):
        yield MessageForm(role, call, content)


def _changed(messages: Messages, form: MessageForm) -> Messages:
    """Return messages in a form. Keys without a value are left out, which templates handle, as in transformers."""
    changed = []
    for message in messages:
        new = {name: value for name, value in message.items() if value is not None}
        if form.roles == "system" and new.get("role") == "developer":
            new["role"] = "system"
        if _functions(message) and not new.get("content") and form.content != "absent":
            new["content"] = "" if form.content == "empty" else None
        changed.append(new)
    if form.calls == "function":
        changed = _with_calls(changed, lambda call: {**call, "arguments": call.get("arguments") or {}}, nested=True)
    if form.arguments == "objects":
        return _with_calls(changed, lambda call: {**call, "arguments": _parsed(call.get("arguments"))})
    if form.arguments == "texts":
        return _with_calls(changed, lambda call: {**call, "arguments": _json(call.get("arguments"))})
    return changed


def _calls(message: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each call of a message, and the object that has its name and arguments: itself, or its `function`."""
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [(call, inner if isinstance(inner := call.get("function"), dict) else call) for call in calls]


def _functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [function for _, function in _calls(message)]


def _with_calls(messages: Messages, change: Callable[[dict[str, Any]], JSON], nested: bool = False) -> Messages:
    """Apply `change` to the object with the name and the arguments of every call. nested: which becomes its
    `function`."""

    def changed(call: JSON) -> JSON:
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": change(function)}
        return {"type": "function", "function": change(call)} if nested else change(call)

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]} if _functions(message) else message
        for message in messages
    ]


def _parsed(arguments: JSON) -> JSON:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments  # the template decides


def _json(arguments: JSON) -> JSON:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict | list) else arguments
