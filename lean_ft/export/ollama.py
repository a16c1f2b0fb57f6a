"""Write a Modelfile, from which Ollama makes a model of a GGUF file: `ollama create NAME -f Modelfile`.

A model's chat template is a Jinja program, and Ollama's TEMPLATE is a program in Go's template language. Most chat
templates write fixed texts around each message. `chat_format` finds these texts in rendered chats, and checks that they
give the same text as the chat template for other chats. Tools and reasoning are left out. A template that writes
today's date gets the date of the export.

Source: Ollama, docs/modelfile.mdx, parser/parser.go and template/template.go.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lean_ft.generation import stop_ids
from lean_ft.models import Decoder
from lean_ft.tokenizers import Tokenizer

_MAX_CONTEXT = 8192  # tokens; Ollama allocates memory for all of them
# generation_config.json -> Modelfile
_PARAMETERS = {name: name for name in ("temperature", "top_p", "top_k", "min_p")} | {
    "repetition_penalty": "repeat_penalty"
}
_SYSTEM, *_TURNS = (f"content-{i}" for i in range(4))
_CONTENTS = ("Hi", 'Two "lines"\nof {{ text }} <b>', "Größe, 大きさ, 🙂", "1 + 1 = ?", "Yes.")

_Render = Callable[[str | None, Sequence[str], bool], str]


class ChatFormat(NamedTuple):
    """The fixed texts of a chat. A pair is the text before and after a message's content."""

    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str
    """Before the answer to generate."""
    start: str
    """Before the first message; if the system message has its own turn, only in chats without one."""
    system: tuple[str, str] | None = None
    """None if the template does not write system messages."""
    in_user: bool = False
    """Whether the system message is part of the first user message, before its content."""

    def render(self, system: str | None, turns: Sequence[str]) -> str:
        """Return the text of a chat. `turns` alternate between user and assistant."""
        block = system.join(self.system or ("", "")) if system is not None else ""
        text = self.start if system is None or self.in_user else block
        for i, content in enumerate(turns):
            before, after = self.assistant if i % 2 else self.user
            text += before + (block if self.in_user and i == 0 else "") + content + after
        return text + self.prompt

    def go_template(self) -> str:
        """Return the same as a template for Ollama."""
        user, assistant, start = "{{ .Content }}".join(self.user), "{{ .Content }}".join(self.assistant), self.start
        of_system = ""
        if self.in_user and self.system:
            block = "{{ $system }}".join(self.system)
            user = (
                f'{self.user[0]}{{{{ if $system }}}}{block}{{{{ $system = "" }}}}{{{{ end }}}}{{{{ .Content '
                f"}}}}{self.user[1]}"
            )
            start = f"{{{{ $system := .System }}}}{start}"
        elif self.system:
            of_system = f'{{{{ else if eq .Role "system" }}}}{"{{ .Content }}".join(self.system)}'
            start = start and f"{{{{ if not .System }}}}{start}{{{{ end }}}}"
        of_roles = (
            f'{{{{ if eq .Role "user" }}}}{user}{{{{ else if eq .Role "assistant" }}}}{assistant}{of_system}{{{{ end '
            f"}}}}"
        )
        return f"{start}{{{{ range .Messages }}}}{of_roles}{{{{ end }}}}{self.prompt}"


def modelfile(model: Decoder, tokenizer: Tokenizer, gguf_name: str) -> str:
    """Return the Modelfile for a GGUF file in its folder. Raises ValueError if the chat template cannot be
    converted."""
    settings: dict[str, Any] = json.loads(model.source.generation_config or b"{}")
    lines, stops = [f"FROM ./{gguf_name}"], list[str]()
    if tokenizer.chat_template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    else:
        chat = chat_format(tokenizer)
        if (default := _default_system(chat)) is not None:
            lines.append(f'SYSTEM """{default}"""')
            chat = chat._replace(start="")
        lines.append(f'TEMPLATE """{chat.go_template()}"""')
        end = chat.assistant[1].strip() or chat.user[0].strip()
        stops.append(next((token for token in tokenizer.added_tokens if end.startswith(token)), end))
    ends = sorted(stop_ids(model, tokenizer), key=lambda token_id: (token_id != tokenizer.eos_id, token_id))
    stops += map(tokenizer.token_text, ends)
    lines.append(f"PARAMETER num_ctx {min(model.config.max_positions, _MAX_CONTEXT)}")
    stops = [stop for stop in dict.fromkeys(stops) if stop]
    if bad := next((stop for stop in stops if '"' in stop or not _is_writable(stop)), None):
        raise ValueError(
            f"{tokenizer.folder}: --ollama cannot write {bad!r}, which ends an answer, into a Modelfile. Export "
            "without --ollama, and write a Modelfile by hand."
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    for name, parameter in _PARAMETERS.items():
        if type(value := settings.get(name)) in (int, float):
            lines.append(f"PARAMETER {parameter} {value}")
    return "\n".join(lines) + "\n"


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the fixed texts of the chat template, without a BOS token that llama.cpp adds.

    Raises ValueError if the template writes other texts than fixed ones around the contents.
    """
    bos = tokenizer.special_tokens.get("bos_token", "") if tokenizer.adds_bos else ""

    def render(system: str | None, turns: Sequence[str], prompt: bool = True) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text.removeprefix(bos)

    try:
        chat = _fixed_texts(render, tokenizer.special_tokens.get("eos_token", ""))
        parts = (*chat.user, *chat.assistant, chat.prompt, chat.start, *(chat.system or ()))
        if any("{{" in part or part.endswith("{") for part in parts) or not _is_writable("".join(parts)):
            raise ValueError("it writes characters that a Modelfile cannot have")
        for system in (None, *(_CONTENTS[:3] if chat.system else ())):
            for turns in (_CONTENTS[:1], _CONTENTS[:3], _CONTENTS):
                if chat.render(system, turns) != render(system, turns):
                    raise ValueError("a chat has other texts around its messages than the chats before")
    except ValueError as error:
        raise ValueError(
            f"{tokenizer.folder}: --ollama cannot convert the chat template, which must write fixed texts around each "
            f"message: {error}. Export without --ollama, and write a Modelfile by hand."
        ) from None
    return chat


def _is_writable(text: str) -> bool:
    """Whether Ollama reads a quoted text back: it ends at three quotes, and leaves out control characters."""
    return '"""' not in text and re.sub(r"[\n\t]", "", text).isprintable()


def _fixed_texts(render: _Render, eos: str) -> ChatFormat:
    first, middle, between, end = _cut(render(None, _TURNS, True), _TURNS)
    user_after = _cut(render(None, _TURNS, False), _TURNS)[-1]
    assistant_after = _cut(render(None, _TURNS[:2], False), _TURNS[:2])[-1]
    if not end.startswith(user_after):  # the template ends a chat that needs no answer
        user_after = user_after.removesuffix(eos)
    if not middle.startswith(user_after):  # the template asks for an answer in any case
        user_after = ""
    user_before = between.removeprefix(assistant_after)
    if not (between.startswith(assistant_after) and first.endswith(user_before)):  # the last answer ends in another way
        starts = (match.start() for match in re.finditer(r"^|(?<=\n)|(?=[<\[])", between))
        user_before = next((between[i:] for i in starts if first.endswith(between[i:])), "")
        assistant_after = between.removesuffix(user_before)
    chat = ChatFormat(
        user=(user_before, user_after),
        assistant=(middle.removeprefix(user_after), assistant_after),
        prompt=end.removeprefix(user_after),
        start=first.removesuffix(user_before),
    )
    try:
        before, after, *_ = _cut(render(_SYSTEM, _TURNS, True), [_SYSTEM, *_TURNS])
    except ValueError:  # the template rejects system messages, or leaves them out
        return chat
    if after.endswith(user_before):
        return chat._replace(system=(before, after.removesuffix(user_before)))
    return chat._replace(system=(before.removeprefix(first), after), in_user=True)


def _cut(text: str, contents: Sequence[str]) -> list[str]:
    """Return the texts before, between and after the contents. Raises ValueError if a content is missing."""
    texts = list[str]()
    for content in contents:
        before, found, text = text.partition(content)
        if not found:
            raise ValueError("it leaves out a message")
        texts.append(before)
    return [*texts, text]


def _default_system(chat: ChatFormat) -> str | None:
    """Return the template's own system message, which chats without one have; None if there is none."""
    before, after = chat.system or ("", "")
    default = chat.start.removeprefix(before).removesuffix(after)
    has_turn = chat.system is not None and not chat.in_user and chat.start == before + default + after
    return default if has_turn and default else None
