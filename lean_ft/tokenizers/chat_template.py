"""Chat templates: the Jinja programs in a model folder that write messages as text.

They run in Jinja's immutable sandbox, as in transformers, with the same functions, and within the bounds of
`lean_ft.tokenizers.template_limits`. Places in the rendered text are found with markers: Unicode noncharacters (U+FDD0
and on, which the standard reserves for a program's own use) that are rendered along and taken out again.
"""

import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from lean_ft.tokenizers.template_limits import BoundedEnvironment, Budget, TemplateLimitError

GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1"
LITERAL_START, LITERAL_END = "\ufdd2", "\ufdd3"
MARKERS = re.compile("[\ufdd0-\ufdd3]")
_MAX_DATE_FORMAT = 200  # characters


# What a program in a template may raise by itself: RuntimeError is RecursionError's kind, ValueError that of bad JSON,
# NameError that of 1e999, which jinja2 compiles to a name of Python's, `inf`.
_FAILURES = (TypeError, LookupError, AttributeError, ArithmeticError, ValueError, RuntimeError, MemoryError, NameError)


class ChatTemplate:
    """A compiled template; `marks_generation` says whether it has `{% generation %}` blocks."""

    def __init__(self, source: str):
        self.source = source
        try:
            self._template = _environment().compile_bounded(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        self.marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        special_tokens: dict[str, str],
    ) -> str:
        """Text of `messages`, with generation blocks between markers.

        Raises ValueError where the template refuses the messages, fails, or does more than a chat needs.
        """
        # Templates fail on None where they cope with a missing key, so transformers leaves such keys out too.
        messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
        try:
            with Budget(messages, tools):
                return self._template.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **special_tokens,
                )
        except (*_FAILURES, jinja2.TemplateError) as error:
            reason = f"{error}"[:1000] or type(error).__name__
            raise ValueError(f"the chat template cannot render these messages: {reason}") from None


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: what the model writes."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return GENERATION_START + caller() + GENERATION_END


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.bound_all()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the text.
    settings = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return json.dumps(value, **settings)
    return Budget.active().join(json.JSONEncoder(**settings).iterencode(value))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT or re.search(r"%[^a-zA-Z%]*\d{3}", format):
        raise TemplateLimitError("it writes a date of hundreds of characters")
    return datetime.now().strftime(format)
