"""Chat templates: the Jinja programs in a model folder that write messages as text.

They run in Jinja's immutable sandbox with the functions that transformers provides, and within the limits of
`lean_ft.tokenizers.template_limits`. Markers locate parts of the rendered text. They are Unicode noncharacters (U+FDD0
to U+FDEF, reserved for a program's internal use), rendered with the text and removed afterwards.

A `{% generation %}` block records which message it belongs to: among the template's variables it looks for the same
message object that it was rendered with (usually the loop's `message`). A block that finds none continues the block
directly before it.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context

from lean_ft.tokenizers.template_limits import ACTIVE, BoundedEnvironment, Budget, TemplateLimitError
from lean_ft.tokenizers.vocabulary import Span

GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1"
LITERAL_START, LITERAL_END = "\ufdd2", "\ufdd3"
ANCHOR = "\ufdd4"
# The indices of a block's messages follow GENERATION_START, and the index of an anchor's message follows ANCHOR, in
# these characters.
TURN = {ord(character): 0xFDE0 + i for i, character in enumerate("0123456789,")}
NUMBER = {mark: chr(digit) for digit, mark in TURN.items()}
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message with the same meaning
# A generation tag, or a part of a template in which one is text: a comment, raw text, an expression, another tag.
_GENERATION = re.compile(
    r"\{%(?P<before>[-+]?)\s*(?:end)?generation\s*(?P<after>[-+]?)%\}|\{#.*?#\}"
    r"|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
    r"""|\{%(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?!%\}).)*%\}|\{\{(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?!\}\}).)*\}\}""",
    re.DOTALL,
)
_MAX_DATE_FORMAT = 200  # characters
_ASSISTANT = "(assistant)"  # a variable that no template can name: id of each assistant message -> its index
# Errors that a template can cause: RecursionError is a RuntimeError, bad JSON raises ValueError, and 1e999 raises
# NameError since jinja2 compiles it to `inf`.
_FAILURES = (TypeError, LookupError, AttributeError, ArithmeticError, ValueError, RuntimeError, MemoryError, NameError)

# Variables that every caller passes, and keys of messages.
_GIVEN = {"messages", "tools", "add_generation_prompt", "role", "content"}
ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A compiled template. `marks_generation` is True if it has `{% generation %}` blocks."""

    def __init__(self, source: str):
        self.source = source
        try:
            self._template = _environment().compile_bounded(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        self.roles = {*ROLES, *re.findall(r"""==\s*["'](\w+)["']""", source)}  # and roles that it compares with
        self._reads_texts: bool | None = None  # not known before the first rendering
        self.marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        """Return the text of `messages`, with generation blocks between markers. variables: special tokens and others.

        Raises ValueError if the template rejects the messages, fails, or exceeds the limits.
        """
        messages = list(map(_with_reasoning, messages))
        if not self._writes_texts(variables):
            messages = _with_parts(messages)
        assistant = {id(message): i for i, message in enumerate(messages) if message.get("role") == "assistant"}
        try:
            ACTIVE.set(Budget(messages, tools, variables))
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **variables},
                **{_ASSISTANT: assistant},
            )
        except (*_FAILURES, jinja2.TemplateError) as error:
            reason = f"{error}"[:1000] or "an expression of it fails"
            raise ValueError(f"the chat template cannot render these messages: {reason}") from None

    def _writes_texts(self, variables: dict[str, Any]) -> bool:
        """Whether the template writes contents that are strings. Some of multimodal models write content parts
        alone (SmolVLM)."""
        if self._reads_texts is None:
            self._reads_texts = True  # while the probes are rendered, and for a template that rejects them
            with contextlib.suppress(ValueError):
                text = [{"role": "user", "content": "PROBE"}]
                written = ["PROBE" in self.render(probe, None, False, variables) for probe in (text, _with_parts(text))]
                self._reads_texts = written != [False, True]
        return self._reads_texts


def _with_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose texts are content parts."""
    return [
        {**message, "content": [{"type": "text", "text": text}]}
        if isinstance(text := message.get("content"), str)
        else message
        for message in messages
    ]


@cache
def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template reads from outside, besides messages and tools.

    A name that the template also sets counts only if the template has a default for it: a test `defined` or a filter
    `default`.
    """
    environment = _environment()
    tree = environment.parse(source)
    tests = (
        node
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d")
    )
    optional = {node.node.name for node in tests if isinstance(node.node, nodes.Name)}
    names = [*tree.find_all(nodes.Name)]
    set_names = {
        node.name for node in names if node.ctx == "param" or (node.ctx == "store" and node.name not in optional)
    }
    return frozenset(meta.find_undeclared_variables(tree) - set_names - _GIVEN.union(environment.globals))


def with_defaults(source: str, variables: Mapping[str, Any]) -> str:
    """Return a template in which variables that a caller does not set have these values, which are JSON.

    It renders every chat as `source` does with them. Raises ValueError for a value that is no JSON.
    """
    lines = "".join(
        f"{{%- if {name} is not defined or {name} is none %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n"
        for name, value in variables.items()
    )
    return source if source.startswith(lines) else lines + source


def _literal(value: object) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    if isinstance(value, bool | str) or (isinstance(value, int | float) and math.isfinite(value)):
        return json.dumps(value, ensure_ascii=False)
    raise ValueError(f"a variable of the chat template is {value!r:.80}; expected a JSON value.")


def without_generation_tags(source: str) -> str:
    """Return a template without `{% generation %}` tags, which some programs cannot read. It renders the same text.

    Comments take their place, because spaces and line breaks around them are removed by the same rules.
    """

    def changed(part: re.Match[str]) -> str:
        if part["before"] is not None:
            return f"{{#{part['before']} {part['after']}#}}"
        return part[0].replace("{%", "").replace("%}", "") if part[0].startswith("{#") else part[0]

    return _GENERATION.sub(changed, source)


def generation_blocks(marked: str) -> list[tuple[int | None, Span]]:
    """Return the message index (None if unknown) and the span of each generation block. Nested blocks count as one."""
    blocks: list[tuple[int | None, Span]] = []
    depth = start = 0
    turn = None
    for match in re.finditer("(\ufdd0)([\ufde0-\ufdea]*)|\ufdd1", marked):
        depth += 1 if match.group(1) else -1
        if match.group(1) and depth == 1:
            number, start = match.group(2).translate(NUMBER), match.end()
            continues = not number and blocks and match.start() == blocks[-1][1][1] + 1
            turn = int(number) if number.isdecimal() else blocks[-1][0] if continues else None
        elif depth == 0:
            blocks.append((turn, (start, match.start())))
    return blocks


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: text that the model writes."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = self.call_method("_mark", [nodes.DerivedContextReference()])
        return nodes.CallBlock(mark, [], [], body).set_lineno(line)

    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        variables = context.get_all()
        turns = {variables[_ASSISTANT].get(id(value)) for value in variables.values()} - {None}
        return GENERATION_START + ",".join(map(str, turns)).translate(TURN) + caller() + GENERATION_END


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Store the reasoning under the names that templates read, in the same order of keys as transformers."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> BoundedEnvironment:
    extensions = [_GenerationTag, loopcontrols]
    environment = BoundedEnvironment({"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the text.
    settings = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return json.dumps(value, **settings)
    return ACTIVE.get().gather(json.JSONEncoder(**settings).iterencode(value))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT or re.search(r"%[^a-zA-Z%]*\d{3}", format):
        raise TemplateLimitError("it writes a date of hundreds of characters")
    return datetime.now().strftime(format)
