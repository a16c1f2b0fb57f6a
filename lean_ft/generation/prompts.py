"""Prompts of users: texts, chats and rows, read and tokenized.

Content parts that are not text are read as those of rows are (`lean_ft.data.parts`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lean_ft.data.chats import read_content, read_variables
from lean_ft.data.columns import Document
from lean_ft.data.parts import (
    check_needs_no_chat,
    check_prompt_is_read,
    documents_of,
    kinds_of,
    measured,
    take_parts,
)
from lean_ft.tokenizers import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Mapping[str, Any]
"""A text; a chat's messages; or a row {"prompt": text or messages} or {"messages": ...}, optionally with `tools` and
the fields of content parts that are not text."""


def is_chat(messages: Any) -> bool:
    return isinstance(messages, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in messages[:1] or [0])


def text_or_messages(prompt: Prompt) -> str | Messages:
    """Return the text or the messages of a prompt. Raise ValueError if it has neither."""
    content: Any = prompt.get("messages", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
    if isinstance(content, str) or is_chat(content):
        return content
    raise ValueError(
        f'a prompt is {prompt!r:.80}; expected text, a list of messages {{"role": ..., "content": ...}}, '
        '{"prompt": text or messages} or {"messages": [...]}.'
    )


def is_text_alone(prompt: Prompt) -> bool:
    """Whether a prompt shows nothing besides text. Raises ValueError for an invalid prompt."""
    return not take_parts(_messages(text_or_messages(prompt)), _row(prompt))[1]


def prompt_document(
    prompt: Prompt, tokenizer: Tokenizer, chat: bool, kwargs: dict[str, Any], folder: Path = Path()
) -> Document:
    """Tokenize a prompt.

    chat: a text becomes a user's message; kwargs: variables of the chat template; folder: of relative paths. Raises
    ValueError for an invalid prompt, and for one that shows what the model does not read.
    """
    content, row = text_or_messages(prompt), _row(prompt)
    if isinstance(content, str) and not chat:
        check_needs_no_chat(row)
        document = Document.of(tokenizer.encode(content, add_special_tokens=True))
        return documents_of([document], tokenizer, kinds_of(tokenizer))[0]
    messages, parts = take_parts(_messages(content), row)
    check_prompt_is_read(parts, tokenizer)
    tools, kwargs = row.get("tools") or None, kwargs | read_variables(row.get("chat_template_kwargs"))
    if messages[-1].get("role") == "assistant":
        passage = tokenizer.continued(messages, tools, kwargs)
    else:
        passage = tokenizer.passage(messages, tools, add_generation_prompt=True, template_kwargs=kwargs)
    if "tools" in passage.unread:
        raise ValueError("the chat template does not write tools. Remove `tools`, or use a model that calls tools.")
    kinds = kinds_of(tokenizer)
    return documents_of([measured(replace(passage, parts=parts), folder, kinds)], tokenizer, kinds)[0]


def _row(prompt: Prompt) -> Mapping[str, Any]:
    return prompt if isinstance(prompt, Mapping) else {}


def _messages(content: str | Messages) -> list[dict[str, Any]]:
    """The messages of a prompt, with content parts as `take_parts` reads them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages = [dict(message) for message in content]
    for number, message in enumerate(messages, start=1):
        if isinstance(message.get("content"), list):
            message["content"] = read_content(message["content"], message, f"message {number}")
    return messages
