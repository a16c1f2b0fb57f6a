"""Assistant's turns that may call tools: their text, piece by piece, and their calls."""

import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lean_ft.generation.decoding import sample_steps
from lean_ft.generation.texts import asked_of, before_stop, text_of
from lean_ft.models import Decoder
from lean_ft.system.log import slow_calls_reported
from lean_ft.system.redaction import on_one_line, redact
from lean_ft.tokenizers import Tokenizer
from lean_ft.tools import Call, Tools, ToolTurns


class CallingTurn:
    """A turn whose tokens are being sampled. `content` yields its text; afterwards it has `calls` and `tool_calls`.

    Without `schemas`, it is text alone. forced: the name of a function that the turn must call, or an empty text for
    any function. The turn then starts with the tokens `begun`, which the caller appends to the prompt. Raises
    ValueError for a chat template that writes no tools, and for a forced call whose beginning the template does not
    show.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        schemas: list[dict[str, Any]],
        template_kwargs: dict[str, Any] | None = None,
        forced: str | None = None,
        parallel: bool = True,
    ) -> None:
        self._turns = ToolTurns(tokenizer, schemas, template_kwargs) if schemas else None
        self.begun = list[int]()
        self.calls = list[Call]()
        self.tool_calls = list[dict[str, Any]]()
        """The calls in OpenAI's form. A turn with a malformed call is text, and has none; `parallel`: also more than
        one."""
        self._tokenizer, self._parallel = tokenizer, parallel
        if self._turns and forced is not None:
            self.begun = self._turns.begin(forced)
        self._ids = list(self.begun)

    def content(self, tokens: Iterable[int | None], stop_texts: Sequence[str] = ()) -> Iterator[str]:
        """Yield the turn's text as `text_of` does. What may be a call waits for the turn's end, and so do spaces before
        it."""
        if self._turns is None:
            yield from text_of(self._tokenizer, tokens, stop_texts)
            return
        sent, held, opening = "", "", self._turns.opening
        tags = (*stop_texts, *([opening] if len(opening) > 1 else []))
        for piece in text_of(self._tokenizer, self._before_calls(tokens, opening), tags):
            held += piece
            is_whole = not sent and held.lstrip()[:1] == opening  # the turn may be nothing but calls
            text = "" if is_whole else held.rstrip()
            held = held[len(text) :]
            sent += text
            yield text
        whole, self.calls = self._turns.read(self._ids)
        if self.calls and not any(call.error for call in self.calls):
            self.tool_calls = [_as_message(call) for call in self.calls[: None if self._parallel else 1]]
            whole = whole.removeprefix(self._turns.before_calls(self.begun)).lstrip() if self.begun else whole
        else:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        whole = before_stop(whole, stop_texts)
        yield whole[len(sent) :] if whole.startswith(sent) else ""

    def _before_calls(self, tokens: Iterable[int | None], opening: str) -> Iterator[int | None]:
        """Yield tokens up to one that opens a call, and None from there on: special tokens have no text."""
        is_call = bool(self.begun)
        for token in tokens:
            if token is not None:
                self._ids.append(token)
                is_call = is_call or self._tokenizer.token_text(token) == opening
            yield None if is_call else token


def converse(
    model: Decoder,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: Tools,
    most_turns: int,
    **sampling: Any,
) -> Iterator[str]:
    """Yield the text of the answer to `messages` in pieces, and append the answer to them, also if it is not read to
    its end.

    Calls run, and the model continues, `most_turns` times at most. Each call and its result are a line on stderr. Other
    arguments are those of `generate`.
    """
    for number in range(most_turns + 1):
        row = {"messages": messages, "tools": tools.schemas}
        how, prompts = asked_of(model, tokenizer, [row], True, sampling)
        turn = CallingTurn(tokenizer, tools.schemas, sampling.get("chat_template_kwargs"))
        messages.append(said := {"role": "assistant", "content": ""})
        tokens = (token for (token,) in sample_steps(model, prompts, how, tokenizer.decode))
        for text in turn.content(tokens, how.stop_texts):
            said["content"] += text
            yield text
        if turn.tool_calls and number == most_turns:
            _print_dimly(
                f"not called, since the model may call tools in {most_turns} turns: {turn.calls[0].name!r:.60}"
            )
        if not turn.tool_calls or number == most_turns:
            return
        with tools.unchanged_process(len(messages)), slow_calls_reported("a tool"):
            results = tools.results(turn.calls)
        said["tool_calls"] = turn.tool_calls
        for call, sent, (result, _) in zip(turn.calls, turn.tool_calls, results, strict=True):
            arguments = ", ".join(f"{name}={value!r:.60}" for name, value in call.arguments.items())
            _print_dimly(f"{redact(call.name):.60}({arguments}): {result!r:.200}")
            messages.append({"role": "tool", "tool_call_id": sent["id"], "name": call.name, "content": result})


def _print_dimly(line: str) -> None:
    line = on_one_line(line)
    print(f"\033[2m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def _as_message(call: Call) -> dict[str, Any]:
    # Mistral's templates only write ids of 9 letters and digits.
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or secrets.token_hex(5)[:9], "type": "function", "function": function}
