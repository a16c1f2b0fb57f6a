"""Turns of an episode as tokens: what a sampled turn says, and the given tokens that follow it.

An episode is one growing list of ids. The tokens after a turn come from a small chat of their own: a question, a turn
with the same number of calls, their results and the generation prompt. Its text is encoded from the token that ends the
turn on. So nothing earlier is rendered or encoded again, and the model continues from exactly the tokens that it
sampled.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.passages import Passage
from lean_ft.tokenizers.vocabulary import any_of
from lean_ft.tools.calls import FORMS, REASONING, Call, CallForm, Turn, Types, read_turn

Messages = list[dict[str, Any]]
REMEDY = "Set data.chat_template to a template for models that call tools, or remove `tools`."
MARK = "LAST WORDS OF THE TURN"  # neither a name nor another text contains it
# A known call and its tool. A template writes calls in the form that reads this call back.
ARGUMENTS = {"number": 3, "flag": True, "list": [1, "b"], "text": f"a {MARK}"}
PROPERTIES = {
    name: {"type": kind, "description": "A value."}
    for name, kind in zip(ARGUMENTS, ("integer", "boolean", "array", "string"), strict=True)
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": list(ARGUMENTS)}
PROBE = {"type": "function", "function": {"name": "probe_tool", "description": "A tool.", "parameters": PARAMETERS}}
RESULT = "result 7"
ASKED = {"role": "user", "content": "Q"}


class ToolTurns:
    """Reads sampled turns, and writes the tokens that follow them."""

    def __init__(
        self, tokenizer: Tokenizer, schemas: list[dict[str, Any]], template_kwargs: dict[str, Any] | None = None
    ) -> None:
        """schemas: those of `Tools`, or none for turns without calls.

        Raises ValueError if the chat template writes no tools, no results, calls in an unknown form, or no token after
        a turn.
        """
        self._tokenizer, self._schemas, self._kwargs = tokenizer, schemas or None, template_kwargs
        self._types: Types = {
            tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in schemas
        }
        ends = {tokenizer.token_text(token) for token in {*tokenizer.turn_ends, tokenizer.eos_id} if token is not None}
        self._ends, self._control = any_of(ends), any_of(tokenizer.control_tokens)
        call, self._takes_several = Call("f", {}), False
        self._form = self._form_of_calls() if schemas else None
        self.opening = self._form.begin if self._form else ""
        prompts = [self._text([ASKED], True)]
        if schemas:
            called = self._turn([call])
            try:
                prompts.append(self._text([*called, *_results([call], [RESULT])], True))
            except ValueError:
                raise ValueError(
                    f"the chat template does not write the results of tools after the call. {REMEDY}"
                ) from None
            with contextlib.suppress(ValueError):  # Llama 3 refuses several
                self._takes_several = self._text(self._turn([call] * 2)).count(MARK) > self._text(called).count(MARK)
        # The beginning of reasoning that every turn follows.
        self._opened = next((tag for tag in REASONING if all(text.rstrip().endswith(tag) for text in prompts)), "")

    def read(self, ids: Sequence[int]) -> Turn:
        """What the sampled `ids` of a turn say. A malformed call has an `error`, and its text is in the content. A call
        inside of reasoning is text."""
        text = self._sampled(ids)
        content, calls = read_turn(self._form, text, self._types, self._opened) if self._form else (text, [])
        if len(calls) > 1 and not self._takes_several:
            content, error = text, f"error: this turn has {len(calls)} tool calls. Make one call at a time."
            calls = [Call("", {}, error)]
        return Turn(self._without_control(content), calls)

    def text(self, ids: Sequence[int]) -> str:
        """The text of the sampled `ids` of a turn, with calls as they were written, and without control tokens."""
        return self._without_control(self._sampled(ids))

    def before_calls(self, ids: Sequence[int]) -> str:
        """The part of `text` in front of the first call."""
        return self._without_control(self._sampled(ids).partition(self.opening)[0])

    def _sampled(self, ids: Sequence[int]) -> str:
        ids = list(ids)
        if ids and self._tokenizer.token_text(ids[-1]) in self._tokenizer.control_tokens:
            ids.pop()
        return self._tokenizer.decode(ids)

    def _without_control(self, text: str) -> str:
        return self._control.sub("", text).strip()

    def reply(self, ids: Sequence[int], calls: Sequence[Call], results: Sequence[str]) -> list[int]:
        """The given ids that follow the sampled `ids` of a turn with `calls`: what the template writes after the turn,
        the results in the order of the calls, and the generation prompt. Control tokens in a result are ordinary
        text."""
        return self._after(ids, calls, _results(calls, results))

    def observation(self, ids: Sequence[int], messages: Messages) -> list[int]:
        """The given ids that follow the sampled `ids` of a turn without calls: `messages`, whose contents are texts,
        and the generation prompt."""
        return self._after(ids, [], messages)

    def begin(self, name: str) -> list[int]:
        """The ids that a turn with a call of the tool `name`, or of any tool if it is empty, begins with.

        Raises ValueError if the template does not show them.
        """
        prompt = self._text([ASKED], True)
        cases = [(name, {}), (name, {"x": 1})] if name else [("a", {}), ("b", {})]
        written = [self._text(self._turn([Call(tool, {})], arguments)) for tool, arguments in cases]
        ids, other_ids = (self._tokenizer.encode(text[len(prompt) :]) for text in written)
        if not (begun := ids[: _num_shared(ids, other_ids)]) or not written[0].startswith(prompt):
            raise ValueError("the chat template does not show how a call begins. Set tool_choice to auto.")
        return begun

    def _after(self, ids: Sequence[int], calls: Sequence[Call], messages: Messages) -> list[int]:
        def written(clean: Callable[[str], str]) -> Passage:
            following = [
                {**message, "content": clean(message["content"].replace(MARK, MARK.lower()))} for message in messages
            ]
            return self._passage([*self._turn(calls), *following], True)

        try:
            passage = written(str)
        except ValueError:  # the template takes control tokens in these texts for its own
            passage = written(lambda text: self._control.sub("", text))
        begin = self._end(passage.text, self._ends if calls else self._control)
        literal = [(start - begin, end - begin) for start, end in passage.literal if start >= begin]
        continuation = self._tokenizer.tokenize([Passage(passage.text[begin:], [], literal)])[0][0].tolist()
        end, sampled = continuation[0], ids[-1] if len(ids) else None
        # gpt-oss ends an answer with another token when a message follows it.
        is_ended = sampled == end or (sampled in self._tokenizer.turn_ends and end not in self._tokenizer.turn_ends)
        return continuation[1:] if is_ended else continuation

    def _end(self, text: str, ends: re.Pattern[str]) -> int:
        """Where the token begins that ends the turn."""
        token = ends.search(text, text.rfind(MARK))
        if token is None or MARK not in text:
            raise ValueError(
                "the chat template writes no token that ends a turn. Set data.chat_template to one that does."
            )
        return token.start()

    def _turn(self, calls: Sequence[Call], arguments: dict[str, Any] = ARGUMENTS) -> Messages:
        """A question, and a turn with calls of these names, or else with an answer. The mark is the last text of the
        turn."""
        tool_calls = [
            {"type": "function", "id": _id(i, call), "function": {"name": _name(call), "arguments": arguments}}
            for i, call in enumerate(calls)
        ]
        said = {"content": "", "tool_calls": tool_calls} if calls else {"content": MARK}
        return [ASKED, {"role": "assistant", **said}]

    def _passage(self, messages: Messages, prompt: bool, tools: list[dict[str, Any]] | None = None) -> Passage:
        tools = self._schemas if tools is None else tools
        return self._tokenizer.passage(messages, tools, prompt, train_on="all", template_kwargs=self._kwargs)

    def _text(self, messages: Messages, prompt: bool = False, tools: list[dict[str, Any]] | None = None) -> str:
        return self._passage(messages, prompt, tools).text

    def _form_of_calls(self) -> CallForm:
        """Find the form of calls. Raises ValueError if the template writes no tools, or calls in an unknown form."""
        question, tool = self._text([ASKED], True, [PROBE]), PROBE["function"]
        if tool["name"] not in question:
            raise ValueError(f"the chat template writes no tools. {REMEDY}")
        try:
            called = self._text(self._turn([Call(tool["name"], ARGUMENTS)]), False, [PROBE])
        except ValueError:
            raise ValueError(f"the chat template writes no tool calls. {REMEDY}") from None
        said = called[_num_shared(question, called) :]
        said = said[: self._end(said, self._ends)]
        for form in FORMS.values():
            if [call[:3] for call in form.read(said, {tool["name"]: PROPERTIES}).calls] == [
                (tool["name"], ARGUMENTS, "")
            ]:
                return form
        raise ValueError(
            f"the chat template writes tool calls in an unknown form: {said!r:.300}. Known forms: {', '.join(FORMS)}."
        )


def _num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The number of items at the start that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _results(calls: Sequence[Call], results: Sequence[str]) -> Messages:
    return [
        {"role": "tool", "name": _name(call), "tool_call_id": _id(i, call), "content": result}
        for i, (call, result) in enumerate(zip(calls, results, strict=True))
    ]


def _name(call: Call) -> str:
    """The name in the results of a call, which a model may have written in any characters."""
    return call.name if re.fullmatch(r"[\w.:/-]{1,256}", call.name) else "unknown"


def _id(i: int, call: Call) -> str:
    return call.id if re.fullmatch(r"[\w.:/-]{1,256}", call.id) else f"call{i:05}"  # Mistral's ids have 9 characters
