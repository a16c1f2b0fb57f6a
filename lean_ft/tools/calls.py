"""Tool calls in the text of an assistant's turn, in the form that each family of models writes.

A malformed call becomes a call with an `error`, which the model gets instead of a result, and its text stays in the
turn's content. Qwen3-Coder and GLM write a parameter's value as plain text. The tool's schema says whether the value is
that text, or JSON.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

from lean_ft.system.foreign_values import check_text, plain
from lean_ft.system.whole_files import why_unusable


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]
    error: str = ""  # of a malformed call: the model gets this text instead of a result
    id: str = ""  # that the model gave the call, if it writes one (Mistral)


class Turn(NamedTuple):
    """What an assistant's turn says."""

    content: str  # without the calls, but with the text of malformed ones
    calls: list[Call]


Types = dict[str, dict[str, Any]]
"""The JSON schemas of the parameters of each tool."""
Read = Callable[[str, Types], list[Call]]
"""Reads the text of one or more calls. Raises ValueError if it is malformed."""


class CallForm(NamedTuple):
    """How a family writes calls."""

    begin: str
    """What a call begins with. One character: the turn is nothing but calls."""
    read: Callable[[str, Types], Turn]
    """Reads the text of a turn, without reasoning and without the token that ends it."""


REASONING = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>": "<channel|>"}
"""Texts around the reasoning that precedes an answer. A call in it is not meant."""


def read_turn(form: CallForm, text: str, types: Types, opened: str = "") -> Turn:
    """Read the text of a turn. opened: the beginning of reasoning in the prompt, if the turn begins inside of
    reasoning."""
    begin = opened or next((tag for tag in REASONING if text.lstrip().startswith(tag)), "")
    if not begin:
        return form.read(text, types)
    reasoning, closed, rest = text.partition(REASONING[begin])
    turn = form.read(rest, types)
    return Turn(reasoning + closed + turn.content, turn.calls)


def _between(begin: str, end: str, read: Read) -> CallForm:
    """Each call, or group of calls, is between two texts. `end` may be empty: up to the next `begin`."""

    def turn(text: str, types: Types) -> Turn:
        content, *pieces = text.split(begin)
        calls = list[Call]()
        for piece in pieces:
            body, closed, after = piece.partition(end) if end else (piece, "", "")
            read_calls = _tried(read, body, types)
            calls += read_calls
            content += after if _is_read(read_calls) else f"{begin}{body}{closed}{after}"
        return Turn(content, calls)

    return CallForm(begin, turn)


def _whole(begin: str, start: str, read: Read) -> CallForm:
    """The turn is nothing but calls, if it matches the pattern `start`."""
    pattern = re.compile(rf"\s*(?:{start})")

    def turn(text: str, types: Types) -> Turn:
        calls = _tried(read, text, types) if pattern.match(text) else []
        return Turn("" if _is_read(calls) else text, calls)

    return CallForm(begin, turn)


def _is_read(calls: list[Call]) -> bool:
    return bool(calls) and not calls[0].error


def _tried(read: Read, body: str, types: Types) -> list[Call]:
    try:
        calls = read(body.strip(), types)
        for call in calls:  # infinity, half of a surrogate pair, a marker, and Python's values that are not JSON
            check_text(call.id, "the id", markers=False)
            plain([call.name, call.arguments], "the call", finite=True)
        return calls
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        return [Call("", {}, f"error: malformed tool call: {why_unusable(error)[:200] or 'it cannot be read'}")]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse)  # texts may contain line breaks


def _call(name: object, arguments: object, id: object = "") -> Call:
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("expected the name of a tool, and an object with its arguments")
    return Call(name, arguments, "", id if isinstance(id, str) else "")


def _json(body: str, types: Types) -> list[Call]:
    """`{"name": "f", "arguments": {...}}`, a list of such objects, or several with `;` or spaces between them. Llama
    writes `parameters`."""
    calls, body = list[Call](), body.removeprefix("<|python_tag|>").lstrip()
    while body:
        value, end = _JSON.raw_decode(body)
        body = body[end:].lstrip("; \t\r\n")
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                raise ValueError("expected a JSON object")
            calls.append(_call(item.get("name"), item.get("arguments", item.get("parameters")), item.get("id", "")))
    if not calls:
        raise ValueError("expected a JSON object")
    return calls


def _mistral(body: str, types: Types) -> list[Call]:
    """`[{"name": "f", "arguments": {...}, "id": "..."}]`, or `f[CALL_ID]...[ARGS]{...}`, in which the id is
    optional."""
    if body.startswith(("[", "{")):
        return _json(body, types)
    header, _, arguments = body.partition("[ARGS]")
    name, _, call_id = header.partition("[CALL_ID]")
    return [_call(name.strip(), arguments.strip(), call_id.strip())]


def _deepseek(body: str, types: Types) -> list[Call]:
    """`f<｜tool▁sep｜>{...}`. Before version 3.1, `function<｜tool▁sep｜>f` and a code block of JSON."""
    name, _, arguments = body.partition("<｜tool▁sep｜>")
    if name == "function":
        name, _, arguments = arguments.partition("```json\n")
        arguments = arguments.removesuffix("```")
    return [_call(name.strip(), arguments.strip())]


def _harmony(text: str, types: Types) -> Turn:
    """gpt-oss: messages `<|start|>HEADER<|message|>BODY<|end|>`. The header of a call has `to=functions.f`."""
    contents, calls = list[str](), list[Call]()
    for message in text.split("<|start|>"):
        header, _, body = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body, maxsplit=1)[0]
        if recipient := re.search(r"to=functions\.([^\s<]*)", header):
            read_calls = _tried(lambda body, _, name=recipient[1]: [_call(name, body)], body, types)
            calls += read_calls
            contents += [] if _is_read(read_calls) else [message]
        elif body:
            contents.append(body)
    return Turn("\n".join(contents), calls)


def _qwen3_coder(body: str, types: Types) -> list[Call]:
    """`<function=f><parameter=x>1</parameter></function>`, with a line break on each side of a value."""
    name, _, rest = body.removeprefix("<function=").partition(">")
    if not body.startswith("<function=") or not rest.endswith("</function>"):
        raise ValueError("expected <function=NAME>...</function>")
    texts = _tagged(rest, "<parameter=", ">", "</parameter>")
    return [
        _typed(name.strip(), {key: text.removeprefix("\n").removesuffix("\n") for key, text in texts.items()}, types)
    ]


def _glm(body: str, types: Types) -> list[Call]:
    """`f<arg_key>x</arg_key><arg_value>1</arg_value>`, perhaps with line breaks between the tags."""
    body = re.sub(r"</arg_key>\s*<arg_value>", "</arg_key><arg_value>", body)
    texts = _tagged(body, "<arg_key>", "</arg_key><arg_value>", "</arg_value>")
    return [_typed(body.partition("<arg_key>")[0].strip(), texts, types)]


def _tagged(text: str, begin: str, middle: str, end: str) -> dict[str, str]:
    """The parameters that are written between tags."""
    parameters = dict[str, str]()
    for piece in text.split(begin)[1:]:
        key, _, value = piece.partition(middle)
        value, closed, _ = value.partition(end)
        if not closed:
            raise ValueError(f"expected {begin}NAME{middle}VALUE{end}")
        parameters[key.strip()] = value
    return parameters


def _typed(name: str, texts: dict[str, str], types: Types) -> Call:
    """A call whose parameters are written as plain text, with Python's spelling of constants in some templates."""
    arguments = dict[str, Any](texts)
    for key, text in texts.items():
        schema = types.get(name, {}).get(key, {})
        text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
        is_text = schema.get("type") == "string"
        if not is_text or (text == "null" and schema.get("nullable")):
            with suppress(ValueError):  # of a text, which the schema may allow
                arguments[key] = _JSON.decode(text)
    return _call(name, arguments)


def _gemma(quote: str, body: str, types: Types) -> list[Call]:
    """`call:f{x:1,y:<escape>a<escape>}`: JSON with other quotation marks, and without any around keys."""
    name, brace, rest = body.removeprefix("call:").partition("{")
    parts = (brace + rest).split(quote)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            part = re.sub(r"\bNone\b", "null", re.sub(r"\b(True|False)\b", lambda match: match[0].lower(), part))
            parts[i] = re.sub(r"(?<=[{,])\s*([^\s{}\[\],:]+)\s*:", lambda match: f"{json.dumps(match[1])}:", part)
        else:
            parts[i] = json.dumps(part)
    return [_call(name.strip(), "".join(parts))]


def _python(body: str, types: Types) -> list[Call]:
    """`[f(x=1, y='a')]`"""
    with warnings.catch_warnings(action="ignore"):  # of invalid escapes
        tree = ast.parse(body, mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):  # some templates write JSON's constants
            node.id = {"true": "True", "false": "False", "null": "None"}.get(node.id, node.id)
    calls = list[Call]()
    for item in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(item, ast.Call) or item.args or any(word.arg is None for word in item.keywords):
            raise ValueError("expected [NAME(PARAMETER=VALUE, ...)]")
        arguments = {str(word.arg): ast.literal_eval(ast.unparse(word.value)) for word in item.keywords}
        calls.append(_call(ast.unparse(item.func), arguments))
    return calls


FORMS: dict[str, CallForm] = {
    "Hermes, Qwen2.5, Qwen3": _between("<tool_call>", "</tool_call>", _json),
    "Qwen3-Coder, Qwen3.5": _between("<tool_call>", "</tool_call>", _qwen3_coder),
    "GLM": _between("<tool_call>", "</tool_call>", _glm),
    "Mistral": _between("[TOOL_CALLS]", "", _mistral),
    "DeepSeek": _between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek),
    "gpt-oss": CallForm("<|channel|>", _harmony),  # of reasons, answers and calls
    "FunctionGemma": _between("<start_function_call>", "<end_function_call>", partial(_gemma, "<escape>")),
    "Gemma 4": _between("<|tool_call>", "<tool_call|>", partial(_gemma, '<|"|>')),
    "LFM2": _between("<|tool_call_start|>", "<|tool_call_end|>", _python),
    "Llama 3": _whole("{", r'<\|python_tag\|>|\{\s*"(?:name|type)"', _json),
    "Llama 4, Gemma 3": _whole("[", r"\[\s*[\w.]+\(", _python),
}
"""Sources: the chat templates of these families, and the parsers of vLLM."""
