"""Requests of `leanft serve`: OpenAI's chat completions, with a type and a bound for every field.

Source: https://platform.openai.com/docs/api-reference/chat; `top_k`, `min_p` and `chat_template_kwargs` as in vLLM.
"""

import re
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from lean_ft.generation.content_parts import AnyPart, TextPart
from lean_ft.generation.request_objects import ContentPart, RequestObject
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import kind

MOST_TOOLS = 128  # in a request, and calls in a message
# Values that change nothing here, which clients of OpenAI, vLLM and llama.cpp send by default. Other values of a field
# that `ChatRequest` lacks are refused.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    name: values
    for values, names in (
        ((-1,), "seed max_tokens max_completion_tokens"),
        ((-1, 0), "top_k"),
        ((0,), "min_p frequency_penalty presence_penalty top_logprobs prompt_logprobs n_probs min_tokens min_keep"),
        ((0,), "mirostat dry_multiplier xtc_probability dynatemp_range"),
        ((1,), "n best_of length_penalty repetition_penalty repeat_penalty typical_p tfs_z"),
        ((False,), "logprobs echo use_beam_search ignore_eos include_stop_str_in_output add_special_tokens"),
        ((True,), "skip_special_tokens spaces_between_special_tokens include_reasoning"),
        (([], {}), "tools functions logit_bias chat_template_kwargs stop_token_ids bad_words lora documents"),
        (("none", "auto"), "function_call"),
        (({"type": "text"}, ["text"], "medium", ""), "response_format modalities verbosity grammar"),
    )
    for name in names.split()
}
# Fields for other servers' caches, queues and records, and settings of what is off.
_IGNORED = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention priority request_id "
    "cache_salt cache_prompt id_slot timings_per_token return_progress return_tokens_as_token_ids repeat_last_n "
    "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold "
    "dynatemp_exponent"
)


class Refused(ValueError):
    """A refused request: the HTTP status, and OpenAI's error body."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message[:2000], "type": kind, "param": param, "code": code}}


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(schema.get("properties", {}), dict):
        raise ValueError("expected an object as `properties`")
    return schema


def _check_arguments(arguments: str) -> str:
    if not isinstance(from_json(arguments or "{}"), dict):
        raise ValueError("expected a JSON object in a string")
    return arguments or "{}"


class _Named(RequestObject):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Function(_Named):
    description: str | None = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] = Field(
        {"type": "object", "properties": {}}
    )
    returns: dict[str, Any] | None = Field(None, alias="return")  # transformers
    strict: bool | None = None  # not read: nothing forces a call to have these parameters


class _ToolChoice(RequestObject):
    type: Literal["none", "auto", "required", "function"]
    function: _Named | None = None  # the one to call


class _Tool(RequestObject):
    type: Literal["function"]
    function: _Function


class _CalledFunction(RequestObject, extra="ignore"):  # OpenAI's client keeps the parsed arguments too
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, AfterValidator(_check_arguments)]


class _ToolCall(RequestObject, extra="ignore"):  # a streamed call has an index
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: _CalledFunction


class Message(RequestObject):
    """One message of a chat. Clients send an assistant's empty fields back, so these are accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[AnyPart], BeforeValidator(_as_parts), Field(max_length=1000)]
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        may_be_empty = message.get("role") == "assistant" and ("content" in message or message.get("tool_calls"))
        empty = {"content": []} if may_be_empty else {}
        return empty | {name: value for name, value in message.items() if value is not None}

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def attached(self) -> list[ContentPart]:
        """The parts that are no text."""
        return [part for part in self.content if not isinstance(part, TextPart)]

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates. Its content is one text, or parts if not all are text."""
        content = [part.model_dump() for part in self.content] if self.attached else self.text
        optional = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        optional["tool_calls"] = [call.model_dump() for call in self.tool_calls or ()] or None
        return {"role": self.role, "content": content} | {
            name: value for name, value in optional.items() if value is not None
        }


class _StreamOptions(RequestObject):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


def _as_choice(choice: Any) -> Any:
    return {"type": choice} if isinstance(choice, str) else choice


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]


class APIRequest(RequestObject):
    """The body of a POST request."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values that change nothing here. Other values of a field that the request lacks are refused."""
    ignored: ClassVar[Collection[str]] = ("user",)
    """Fields that are not read."""

    model: Annotated[str, Field(max_length=256)] | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read a request. Raises Refused with the problem, the value found and what is allowed."""
        try:
            fields = from_json(body)
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}.") from None
        if not isinstance(fields, dict):
            raise Refused(400, f"expected a JSON object, found {kind(fields)}.")
        fields = {
            name: value
            for name, value in fields.items()
            if value is not None and name not in cls.ignored and value not in cls.without_effect.get(name, ())
        }
        if name := next((name for name in fields if name in cls.without_effect.keys() - cls.model_fields.keys()), None):
            raise Refused(400, f"{name} is not supported. Remove it.", "unsupported_parameter", name)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _refusal(error, cls.model_fields) from None


class ChatRequest(APIRequest):
    """The body of POST /v1/chat/completions."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = _NO_EFFECT
    ignored: ClassVar[Collection[str]] = frozenset(_IGNORED.split())

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: Annotated[list[_StopText], BeforeValidator(_as_list), Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    min_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: _Count | None = None
    tools: list[_Tool] = Field([], max_length=MOST_TOOLS)
    tool_choice: Annotated[_ToolChoice, BeforeValidator(_as_choice)] = _ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    # Variables of the chat template by the names of OpenAI's and Qwen's APIs.
    reasoning_effort: Annotated[str, Field(pattern=r"^\w{1,64}$")] | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @field_validator("tools")
    @classmethod
    def _have_different_names(cls, tools: list[_Tool]) -> list[_Tool]:
        if len({tool.function.name for tool in tools}) < len(tools):
            raise ValueError("two tools have the same name")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _is_among_the_tools(cls, choice: _ToolChoice, info: ValidationInfo) -> _ToolChoice:
        names = [tool.function.name for tool in info.data.get("tools", ())]
        is_named = choice.function is not None and choice.function.name in names
        if not {"required": bool(names), "function": is_named}.get(choice.type, True):
            raise ValueError(f"expected one of the tools ({', '.join(names) or 'none is given'})")
        return choice

    @model_validator(mode="after")
    def _continues_an_assistant(self) -> Self:
        continues = self.messages[-1].role == "assistant"
        if continues and self.messages[-1].tool_calls:
            raise ValueError("the last message calls tools; send their results as messages of the role tool")
        expected = (None, True, not continues)
        if self.continue_final_message not in (None, continues) or self.add_generation_prompt not in expected:
            raise ValueError("a last message of the assistant is continued, and any other message is answered")
        return self

    @field_validator("messages")
    @classmethod
    def _has_text(cls, messages: list[Message]) -> list[Message]:
        if not any(message.text or message.attached for message in messages):
            raise ValueError("expected a message with text")
        return messages

    @property
    def num_characters(self) -> int:
        """Characters of text in all messages."""
        texts = [message.text for message in self.messages]
        texts += [message.reasoning_content or "" for message in self.messages]
        texts += [call.function.arguments for message in self.messages for call in message.tool_calls or ()]
        return sum(map(len, texts)) + len(str(self.chat_template_kwargs or "")) + len(str(self.schemas))

    def variables(self, names: Collection[str]) -> dict[str, Any]:
        """Return the variables for the chat template. names: those that the template mentions.

        Raises Refused for a field that the template does not mention, or that contradicts chat_template_kwargs.
        """
        variables = dict(self.chat_template_kwargs or {})
        for name in ("reasoning_effort", "enable_thinking"):
            if (value := getattr(self, name)) is None:
                continue
            if name not in names:
                reason = (
                    f"{name} is a variable of chat templates that this model's template does not mention. Remove it."
                )
                raise Refused(400, reason, "unsupported_parameter", name)
            if variables.setdefault(name, value) != value:
                raise Refused(
                    400,
                    f"{name} is {value!r}, and chat_template_kwargs sets {variables[name]!r}. Remove one.",
                    None,
                    name,
                )
        return variables

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools for chat templates: none if the model must not call them."""
        tools = self.tools if self.tool_choice.type != "none" else []
        return [tool.model_dump(by_alias=True, exclude={"function": {"strict"}}, exclude_none=True) for tool in tools]

    @property
    def forced(self) -> str | None:
        """The name of the tool that the model must call, an empty text for any, or None."""
        named = self.tool_choice.function
        return {"required": "", "function": named and named.name}.get(self.tool_choice.type)

    @property
    def has_calls(self) -> bool:
        return any(message.tool_calls for message in self.messages)

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages for chat templates. Results get the names of their tools, which some templates write."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        messages = [(names.get(message.tool_call_id or ""), message.for_template()) for message in self.messages]
        return [{"name": name, **message} if name else message for name, message in messages]

    @property
    def attached(self) -> list[ContentPart]:
        """The content parts that are no text."""
        return [part for message in self.messages for part in message.attached]


def _in_words(path: str) -> str:
    """Return `messages.0.content` as `message 1, content`: errors count messages and other items from 1."""
    names = {"messages": "message", "tools": "tool", "tool_calls": "tool call", "content": "content part"}

    def counted(match: re.Match[str]) -> str:
        return f"{names.get(match[1], match[1])} {int(match[2]) + 1}{match[3] and ', '}"

    return re.sub(r"(\w+)\.(\d+)(\.|$)", counted, path)


def _refusal(error: ValidationError, known: Collection[str]) -> Refused:
    first = error.errors(include_url=False)[0]
    parts = (part for part, _ in groupby(map(str, first["loc"])))  # the type of a content part is often a field too
    name = ".".join(parts)[:100]
    place = _in_words(name)
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(name, known)
        return Refused(400, f"unknown field: {place}.{hint}", "unknown_parameter", name)
    if first["type"] == "missing":
        return Refused(400, f"{place} is missing.", None, name)
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    if first["type"] == "model_type":
        expected = "expected an object"
    return Refused(400, f"{place} is {first['input']!r:.60}: {expected}.", None, name)
