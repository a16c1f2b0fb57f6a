"""The tokenizer class that all recipes use: text and chats to ids, with a mask of the trained tokens."""

import json
import re
import shutil
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_json
from lean_ft.tokenizers.chat_template import LITERAL_END, LITERAL_START, MARKERS, ROLES, ChatTemplate, generation_blocks
from lean_ft.tokenizers.tokenizer_json import TokenizerJson
from lean_ft.tokenizers.turns import Turns, outside_literals
from lean_ft.tokenizers.vocabulary import Span, Vocabulary, any_of

TrainOn = Literal["completion", "assistant", "last", "all"]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Passage:
    """A text that becomes one training sequence."""

    text: str
    trained: list[Span]
    """Spans whose tokens are trained, including tokens that lie only partly in a span."""
    literal: list[Span] = field(default_factory=list)
    """Control tokens that a message contains; they are encoded as ordinary text."""
    add_bos: bool = False
    """Prepend bos, if this tokenizer does so and the text does not begin with it."""
    add_eos: bool = False
    """Append a trained eos, if the tokenizer has one and the text does not end with it."""
    num_rewritten: int = 0
    """Assistant messages trained without an end token: the template ends them with another token in the history."""
    num_empty: int = 0
    """Assistant messages that may be trained but have no content and no tool call."""
    joined_by: str | None = None
    """The separator between a prompt and its completion; None if a chat template wrote them."""


class BatchEncoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of one or more texts, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no attribute {name}; an encoding has {', '.join(self)}")
        return self[name]


class Tokenizer:
    """Text and chats to ids and back. Returned by `load_tokenizer`.

    Also has transformers' names: a call, `len`, `apply_chat_template`, `eos_token_id`. `bos_id` and `eos_id` are None if the
    model has no such token. `pad_id` is always an id and may equal `eos_id`: padding is recognized by position, never by id.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str],
        bos_id: int | None,
        eos_id: int | None,
        pad_id: int,
        folder: Path,
        files: list[Path],
        template_file: Path | None = None,
        context_length: int | None = None,
    ):
        self._vocabulary = vocabulary
        self._templates = {name: ChatTemplate(source) for name, source in chat_templates.items()}
        self.vocab_size = vocabulary.size  # one more than the largest id
        self.added_tokens = vocabulary.added  # tokens that are matched before the text is split, with their ids
        self.control_tokens = vocabulary.control  # added tokens that only a chat template may write
        self.adds_bos, self.adds_eos = vocabulary.adds_bos, vocabulary.adds_eos  # whether the model expects them
        self.special_tokens = special_tokens  # `bos_token`, `eos_token` and so on, as chat templates see them
        self.chat_templates = chat_templates  # Jinja sources by name; `default` is for chats without tools
        self.chat_template = chat_templates.get("default")
        self.template_file = template_file  # the chat template file that replaces the folder's, or None
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.folder, self.files = folder, files
        self.context_length = context_length  # tokens of the longest text that the model was made for, if known
        self._new_pad_token: str | None = None
        self._control = any_of(vocabulary.control)
        self._written_by_template = outside_literals(vocabulary.added)

    def __len__(self) -> int:
        return self.vocab_size

    bos_token_id = property(attrgetter("bos_id"))
    eos_token_id = property(attrgetter("eos_id"))
    pad_token_id = property(attrgetter("pad_id"))

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_tensors: Literal["pt"] | None = None
    ) -> BatchEncoding:
        """Encode one or more texts. `return_tensors="pt"` gives tensors (B, T), padded on the right."""
        is_single = isinstance(text, str)
        ids = [self.encode(part, add_special_tokens) for part in ([text] if is_single else text)]
        if return_tensors is None:
            masks = [[1] * len(part) for part in ids]
            return BatchEncoding(
                input_ids=ids[0] if is_single else ids, attention_mask=masks[0] if is_single else masks
            )
        import torch  # here, since processes that only tokenize do not need it

        longest = max(map(len, ids))
        padded = [part + [self.pad_id] * (longest - len(part)) for part in ids]
        masks = [[1] * len(part) + [0] * (longest - len(part)) for part in ids]
        return BatchEncoding(
            input_ids=torch.tensor(padded, dtype=torch.long), attention_mask=torch.tensor(masks, dtype=torch.long)
        )

    def apply_chat_template(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> list[int] | str:
        """Return a chat as ids, or as text with `tokenize=False`. `render` also returns the mask of trained tokens."""
        passage = self.passage(messages, tools, add_generation_prompt, "all")
        return self.tokenize([passage])[0][0].tolist() if tokenize else passage.text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, in which control tokens are recognized.

        `add_special_tokens` adds the bos and eos that the model expects, unless the text has them already.
        """
        if add_special_tokens and isinstance(self._vocabulary, TokenizerJson):
            ids = self._vocabulary.encode_with_special_tokens(text)
            return ids[1:] if ids[:2] == [self.bos_id] * 2 and self.adds_bos else ids
        ids = self._vocabulary.encode_ids(text)
        if add_special_tokens and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special_tokens and self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`."""
        return self._vocabulary.decode(list(map(int, ids)), skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as spelled in the tokenizer's file, or None."""
        return self._vocabulary.token_id(token)

    def token_text(self, token_id: int) -> str:
        """Return a token as spelled in the tokenizer's file, or an empty string if there is no such id."""
        return self._vocabulary.id_token(token_id) or ""

    def render(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat and a mask of trained tokens: the assistant's text and the token that ends its turn.

        Each message is a dict with `role`, `content`, and any other keys that the chat template reads. Control tokens inside
        a message are ordinary text. If the chat template ends a turn differently when other messages follow (gpt-oss: `<|end|>`
        instead of `<|return|>`), that token is not trained. Raises ValueError if there is no chat template, if it rejects the
        messages, or if a turn cannot be located.
        """
        ids, mask = self.tokenize([self.passage(messages, tools, add_generation_prompt, train_on)])[0]
        return ids.tolist(), mask.tolist()

    def continued(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of a chat up to the end of its last message's text, which a completion continues.

        Raises ValueError as `render` does, and if the last message has no text or the chat template changes it.
        """
        tag = "CONTINUE_THIS_MESSAGE"
        if not isinstance(text := messages[-1].get("content"), str):
            raise ValueError(f"the last message has no text to continue, but {text!r:.40}. Give its `content` as text.")
        tagged = [
            *messages[:-1],
            {**messages[-1], "content": f"{text}{tag} "},
        ]  # the space shows whether texts are stripped
        passage = self.passage(tagged, tools, train_on="all")
        before, found, after = passage.text.rpartition(tag)
        if not found or text.strip() not in before:
            raise ValueError("the chat template leaves out a part of the last message, so it cannot be continued.")
        before = before if after.startswith(" ") else before.rstrip()
        literal = [span for span in passage.literal if span[1] <= len(before)]
        return self.tokenize([Passage(before, [], literal)])[0][0].tolist()

    def passage(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
        untrained: Collection[int] = (),
    ) -> Passage:
        """Return the text of a chat with its trained spans; see `render`. The messages in `untrained` are not trained."""
        template = self._template(tools)
        for number, message in enumerate(messages):
            if (role := message.get("role")) not in template.roles:
                raise ValueError(
                    f"message {number}: the chat template has no role {role!r}; expected one of {', '.join(ROLES)}."
                    f"{did_you_mean(str(role), ROLES)}"
                )
        messages = template.with_readable_arguments(messages, tools, self.special_tokens)
        marked_messages, num_literals = self._mark_literals(messages)
        marked_tools, num_tool_literals = self._mark_literals(tools)

        def render(part: Sequence[dict[str, Any]], prompt: bool) -> str:
            return template.render(list(part), marked_tools, prompt, self.special_tokens)

        full = render(marked_messages, add_generation_prompt)
        markers = [match.start() for match in MARKERS.finditer(full)]
        text = MARKERS.sub("", full)

        def unmarked(position: int) -> int:
            return position - bisect_left(markers, position)

        literal = [
            (unmarked(match.start()), unmarked(match.end()))
            for match in re.finditer(f"{LITERAL_START}(.*?){LITERAL_END}", full, re.DOTALL)
        ]
        if num_literals + num_tool_literals:
            unmarked_text = template.render(messages, tools, add_generation_prompt, self.special_tokens)
            whole = all(text[start:end] in self.control_tokens for start, end in literal)
            if not whole or MARKERS.sub("", unmarked_text) != text or full.count(LITERAL_START) != len(literal):
                raise ValueError(
                    "a message contains a control token, and the chat template treats it as its own. Remove the control token "
                    "from the message."
                )
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        wanted = [i for i in (turns[-1:] if train_on == "last" else turns) if (i in untrained) == (train_on == "all")]
        spans, num_rewritten = list[Span](), 0
        if template.marks_generation:
            spans = _spans_of(wanted, turns, generation_blocks(full))
        else:
            added, control = self._written_by_template, self.control_tokens
            finder = Turns(full, add_generation_prompt, marked_messages, render, added, control)
            for i in wanted:
                span, has_end = finder.span(i)
                spans.append(span)
                num_rewritten += not has_end
        if train_on == "all":
            spans = _without([(0, len(full))], spans)
        trained = [(unmarked(start), unmarked(end)) for start, end in spans]
        num_empty = sum(_is_empty(messages[i]) for i in turns if i not in untrained)
        return Passage(text, trained, literal, num_rewritten=num_rewritten, num_empty=num_empty)

    def tokenize(self, passages: Sequence[Passage]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids int32, trained bool) of each passage. Each text is encoded whole."""
        encodings = self._vocabulary.encode([p.text for p in passages], [p.literal for p in passages])
        tokenized = []
        for passage, encoding in zip(passages, encodings, strict=True):
            ids, trained = encoding.ids, encoding.touches(passage.trained)
            for start, end in passage.literal:
                token = passage.text[start:end]
                if self.added_tokens[token] in ids[encoding.touches([(start, end)])]:
                    raise ValueError(
                        f"a message contains the control token {token!r}, which this tokenizer cannot encode as ordinary text. "
                        "Remove it from the message."
                    )
            bos_id = self.bos_id if passage.add_bos and self.adds_bos else None
            if bos_id is not None and (len(ids) == 0 or ids[0] != bos_id):
                ids, trained = np.insert(ids, 0, bos_id), np.insert(trained, 0, False)
            if passage.add_eos and self.eos_id is not None:
                if len(ids) == 0 or ids[-1] != self.eos_id:
                    ids, trained = np.append(ids, np.int32(self.eos_id)), np.append(trained, True)
                trained[-1] = True
            tokenized.append((ids.astype(np.int32, copy=False), trained))
        return tokenized

    def pad_with(self, token: str) -> None:
        """Use a control token for padding instead of the folder's pad token, also in saved files.

        Raises ValueError if there is no such control token.
        """
        if token not in self.control_tokens:
            raise ValueError(
                f"pad_token={token!r} is not a control token of this tokenizer.{did_you_mean(token, self.control_tokens)}"
                f" Choose one that does not end a turn: {', '.join(sorted(self.control_tokens))[:400]}."
            )
        self._new_pad_token, self.pad_id = token, self.added_tokens[token]

    def save(self, path: str | Path) -> None:
        """Copy the tokenizer's files into the folder `path`. They change only if `pad_with` was called."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            target = folder / file.relative_to(self.folder)  # named templates are in a subfolder
            target.parent.mkdir(exist_ok=True)
            if not (target.exists() and target.samefile(file)):
                shutil.copyfile(file, target)
        if self.template_file is not None:
            shutil.copyfile(self.template_file, folder / "chat_template.jinja")
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if self._new_pad_token is not None and (folder / name).is_file():
                config = json.loads((folder / name).read_text(encoding="utf-8"))
                write_json(folder / name, config | {"pad_token": self._new_pad_token})

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        named = f" named `default` (it has {', '.join(self._templates)})" if self._templates else ""
        raise ValueError(
            f"this tokenizer has no chat template{named}, so it cannot encode messages. Use the instruction-tuned version of the "
            "model, set data.chat_template=FILE to a Jinja chat template, or give the data as prompt/completion or text."
        )

    def _mark_literals(self, value: Any) -> tuple[Any, int]:
        """Put literal markers around the control tokens in the strings of `value`; also return their number."""
        if isinstance(value, str):
            if MARKERS.search(value):
                raise ValueError("a message contains one of the Unicode noncharacters U+FDD0 to U+FDEF. Remove it.")
            if not self._control.search(value):
                return value, 0
            return self._control.subn(f"{LITERAL_START}\\g<0>{LITERAL_END}", value)
        if isinstance(value, dict):
            marked = {key: self._mark_literals(inner) for key, inner in value.items()}
            return {key: inner for key, (inner, _) in marked.items()}, sum(n for _, n in marked.values())
        if isinstance(value, list):
            items = [self._mark_literals(inner) for inner in value]
            return [inner for inner, _ in items], sum(n for _, n in items)
        return value, 0


def _is_empty(message: dict[str, Any]) -> bool:
    values = [value for name, value in message.items() if name != "role"]
    return not any(value.strip() if isinstance(value, str) else value for value in values)


def _spans_of(wanted: list[int], turns: list[int], blocks: list[tuple[int | None, Span]]) -> list[Span]:
    """Return the generation blocks of the messages `wanted`; `turns` are all the assistant's messages."""
    if wanted and wanted != turns and any(turn is None for turn, _ in blocks):
        raise ValueError(
            "the chat template has a {% generation %} block outside its loop over the messages, so a single message cannot be "
            "selected for training. Put the block inside the loop, or train all of the assistant's messages."
        )
    return [span for turn, span in blocks if wanted == turns or turn in wanted]


def _without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Remove `holes` from `spans`."""
    for hole_start, hole_end in holes:
        parts = [part for start, end in spans for part in ((start, min(end, hole_start)), (max(start, hole_end), end))]
        spans = [(start, end) for start, end in parts if start < end]
    return spans
