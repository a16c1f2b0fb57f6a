"""Random chat templates, built from the parts that published ones have: exactly the assistant's turns are trained.

A `Style` is written twice, as a Jinja template and as a function that returns a chat's pieces with their mask.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lean_ft.tokenizers import Passage, Tokenizer

NUM_TEMPLATES = 600
CONTROL = ("<bos>", "<eos>", "<|sep|>", "<|stop|>", "<|user|>", "<|assistant|>")
CONTROL += ("<|system|>", "<|tool|>", "[INST]", "[/INST]")
ROLES = ("system", "user", "assistant", "tool")
HEADERS = {
    "tokens": {role: f"<|{role}|>" for role in ROLES},
    "lines": {role: f"<|{role}|>\n" for role in ROLES},
    "separated": {role: f"<|sep|>{role}\n" for role in ROLES},
    "inst": {"system": "[INST] ", "user": "[INST] ", "assistant": "", "tool": "[INST] RESULT "},
    "words": {role: f"{role.upper()}: " for role in ROLES},
}


@dataclass(frozen=True)
class Style:
    header: str
    bos: str
    system: str  # own, first (user message), last (message of the chat), last_user, default, ignored
    end: str  # after the assistant's turns; empty: the next turn's token ends them
    others_end: str  # after other turns
    at_last: str  # same, other (another token), more (one more token), open (none)
    after_end: str
    trims: bool
    thinking: (
        str  # none, kept, emptied, dropped (from turns before the last question), prompted (`<think>` in the prompt)
    )

    def prompt(self) -> str:
        return HEADERS[self.header]["assistant"] + ("<think>\n" if self.thinking == "prompted" else "")

    def jinja(self) -> str:
        def text(value: str) -> str:
            return json.dumps(value)

        content = "(m.content | trim)" if self.trims else "m.content"
        head = {role: text(value) for role, value in HEADERS[self.header].items()}
        in_user = {
            "first": "ns.system and loop.index0 == ns.first",
            "last": "ns.system and loop.last",
            "last_user": "ns.system and loop.index0 == ns.last",
        }.get(self.system, "false")
        own = (
            f"{{{{- {head['system']} + {content} + {text(self.others_end)} }}}}"
            if self.system in ("own", "default")
            else ""
        )
        default = (
            f"{{%- if messages[0].role != 'system' %}}{{{{- "
            f"{text(HEADERS[self.header]['system'] + 'Be good.' + self.others_end)} }}}}{{% endif %}}"
            if self.system == "default"
            else ""
        )
        late = "loop.index0 > ns.last"
        keeps = {"none": "false", "dropped": late, "both": late}.get(self.thinking, "true")
        thought = "'<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n'"
        blank = "'<think>\\n\\n</think>\\n\\n'"
        otherwise = {"emptied": blank, "both": f"({blank} if {late} else '')"}.get(self.thinking, "''")
        last_end = {"same": self.end + self.after_end, "other": "<|stop|>" + self.after_end, "open": ""}.get(
            self.at_last, self.end + self.after_end + "<eos>"
        )
        return f"""\
{{{{- {text(self.bos)} }}}}
{{%- set ns = namespace(first=-1, last=-1, system='') %}}
{{%- for m in messages %}}
{{%- if m.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- if ns.first < 0 %}}{{%- set ns.first = loop.index0 %}}{{%- endif %}}{{%- endif %}}
{{%- if m.role == 'system' %}}{{%- set ns.system = m.content %}}{{%- endif %}}
{{%- endfor %}}{default}
{{%- for m in messages %}}
{{%- if m.role == 'system' %}}{own}
{{%- elif m.role == 'user' %}}{{{{- {head["user"]} + (ns.system + '\\n\\n' if {in_user} else '') + {content} + {text(self.others_end)} }}}}
{{%- elif m.role == 'tool' %}}{{{{- {head["tool"]} + {content} + {text(self.others_end)} }}}}
{{%- else %}}{{{{- {head["assistant"]} }}}}
{{{{- {thought} if m.reasoning_content and ({keeps}) else {otherwise} }}}}{{{{- {content} }}}}
{{%- for call in m.tool_calls or [] %}}{{{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}}}{{%- endfor %}}
{{{{- {text(last_end)} if loop.last and not add_generation_prompt else {text(self.end + self.after_end)} }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {text(self.prompt())} }}}}{{%- endif %}}"""  # noqa: E501

    def pieces(self, messages: list[dict[str, Any]], prompt: bool) -> list[tuple[str, bool]]:
        """Return the texts of a chat, and whether they are trained."""
        head = HEADERS[self.header]
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        system = next((m["content"] for m in messages if m["role"] == "system"), "")
        place = {"first": users[0], "last_user": users[-1], "last": len(messages) - 1}.get(self.system)
        pieces = [(self.bos, False)]
        is_open = False  # whether the next turn's token ends the assistant's turn

        def add_head(role: str) -> None:
            token = self.first_token(role) if is_open else ""
            pieces.extend([(token, True), (head[role].removeprefix(token), False)])

        if self.system == "default" and messages[0]["role"] != "system":
            pieces.append((head["system"] + "Be good." + self.others_end, False))
        for i, m in enumerate(messages):
            content = m["content"].strip() if self.trims else m["content"]
            if m["role"] == "system":
                if self.system in ("own", "default"):
                    pieces.append((head["system"] + content + self.others_end, False))
                continue
            add_head(m["role"])
            is_open = False
            if m["role"] != "assistant":
                before = f"{system}\n\n" if system and i == place and m["role"] == "user" else ""
                pieces.append((before + content + self.others_end, False))
                continue
            is_kept = self.thinking != "none" and (self.thinking not in ("dropped", "both") or i > users[-1])
            if m.get("reasoning_content") and is_kept:
                pieces += [
                    ("<think>\n", self.thinking != "prompted"),
                    (f"{m['reasoning_content']}\n</think>\n\n", True),
                ]
            elif self.thinking == "emptied" or (self.thinking == "both" and is_kept):
                pieces.append(("<think>\n\n</think>\n\n", True))
            calls = [
                f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
                for call in m.get("tool_calls", [])
            ]
            pieces += [(content, True), *((call, True) for call in calls)]
            is_open = not self.end and self.at_last != "other"
            if i < len(messages) - 1 or prompt:
                pieces += [(self.end, self.at_last != "other"), (self.after_end, False)]
            elif self.at_last == "other":
                pieces += [("<|stop|>", True), (self.after_end, False)]
            elif self.at_last == "open":
                pieces.append((self.end or self.first_token("tool" if calls else "user") or "<eos>", True))
            elif self.end:
                pieces += [(self.end, True), (self.after_end, False), ("<eos>" if self.at_last == "more" else "", True)]
            else:
                pieces += [(self.after_end, True), (self.first_token("tool" if calls else "user") or "<eos>", True)]
        if prompt:
            add_head("assistant")
            pieces.append(("<think>\n" if self.thinking == "prompted" else "", False))
        return pieces

    def first_token(self, role: str) -> str:
        """Return the control token that the turns of `role` begin with, or an empty string."""
        return next((token for token in CONTROL if HEADERS[self.header][role].startswith(token)), "")


def random_style(draw: random.Random) -> Style:
    header = draw.choice(list(HEADERS))
    end = draw.choice(["<eos>", "<|sep|>" if header != "separated" else "<|stop|>", ""])
    return Style(
        header=header,
        bos=draw.choice(["", "<bos>"]),
        system=draw.choice(["own", "first", "last", "last_user", "default", "ignored"]),
        end=end,
        others_end=draw.choice(["", "\n", end, "[/INST]"]),
        at_last=draw.choice(["same", "open", *["other"] * (end != "<|stop|>"), *["more"] * (end not in ("", "<eos>"))]),
        after_end=draw.choice(["", "\n"]),
        trims=draw.random() < 0.5,
        thinking=draw.choice(["none", "kept", "emptied", "dropped", "both", "prompted"]),
    )


CONTENTS = [
    *("Yes.", "same", "a", "", " padded \n", "two\nlines", "<b>bold</b>", "[1] is", "user: hi"),
    *("it says <|stop|> there", "字"),
]


def random_chat(draw: random.Random) -> list[dict[str, Any]]:
    """A chat with a random number of questions, some of which the assistant answers after a tool call."""

    def content() -> str:
        return draw.choice(CONTENTS)

    def said(**more: Any) -> dict[str, Any]:
        thought = {"reasoning_content": draw.choice(["hm", "same"])} if draw.random() < 0.4 else {}
        return {"role": "assistant", "content": content(), **thought, **more}

    messages = [{"role": "system", "content": draw.choice(CONTENTS[:3])}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        while draw.random() < 0.3:
            call = {"type": "function", "function": {"name": "f", "arguments": {"x": content(), "n": 1}}}
            messages += [said(tool_calls=[call]), {"role": "tool", "content": content()}]
        messages.append(said())
    return messages


def solid(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """The characters of a text that are not whitespace, each with its mask."""
    return [(character, trained) for text, trained in pieces for character in text if not character.isspace()]


@pytest.fixture
def tokenizer_of(with_template: Callable[..., Tokenizer]) -> Callable[[str], Tokenizer]:
    return lambda template: with_template(template, CONTROL)


@pytest.mark.parametrize("number", [20, pytest.param(NUM_TEMPLATES, marks=pytest.mark.long)])
def test_exactly_the_assistants_turns_are_trained(tokenizer_of: Callable[[str], Tokenizer], number: int):
    num_refused = 0
    for seed in range(number):
        draw = random.Random(seed)
        style = random_style(draw)
        tokenizer = tokenizer_of(style.jinja())
        for _ in range(3):
            messages, prompt = random_chat(draw), draw.random() < 0.25
            messages = messages[:-1] if prompt else messages
            try:
                passage = tokenizer.passage(messages, add_generation_prompt=prompt)
            except ValueError as error:
                if "does not write message 1 (system)" in str(error):
                    is_last = style.system == "last" and messages[-1]["role"] != "user"
                    assert (style.system == "ignored" or is_last) and messages[0]["role"] == "system", (seed, style)
                    continue
                # Nothing shows where an empty message ended, if the template writes the text around it differently.
                assert "cannot find the start" in str(error), (seed, style)  # noqa: PT017
                assert style.system in ("last", "last_user") and any(not m["content"].strip() for m in messages)
                num_refused += 1
                continue
            text = passage.text + "<eos>" * passage.add_eos
            mask = [passage.add_eos and i >= len(passage.text) for i in range(len(text))]
            for start, end in passage.trained:
                mask[start:end] = [True] * (end - start)
            expected = style.pieces(messages, prompt)
            assert style.system != "ignored" or messages[0]["role"] != "system"
            assert text == "".join(piece for piece, _ in expected), (seed, style)
            assert solid(list(zip(text, mask, strict=True))) == solid(expected), (seed, style, messages)
            check_ends(tokenizer, passage, is_last_trained=not prompt)
    assert num_refused < 0.05 * 3 * number


def check_ends(tokenizer: Tokenizer, passage: Passage, is_last_trained: bool) -> None:
    """Generation would stop at the end of each trained turn that has an end, and nowhere else."""
    stops = tokenizer.turn_ends | {tokenizer.eos_id}
    assert tokenizer.token_id("</tool_call>") not in stops  # a turn may have several calls
    [(ids, trained)] = tokenizer.tokenize([passage])
    turns = np.split(ids[trained], np.flatnonzero(np.diff(np.flatnonzero(trained)) > 1) + 1)
    for turn in turns:
        first = next((n for n, token_id in enumerate(turn) if token_id in stops), len(turn) - 1)
        assert not tokenizer.decode(turn[first + 1 :], skip_special_tokens=True).strip()
    assert not is_last_trained or stops & set(turns[-1].tolist())
