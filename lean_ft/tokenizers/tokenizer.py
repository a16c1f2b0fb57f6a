"""The tokenizer that the rest of the package uses: text and chats to ids, with a mask of what is trained."""

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
    """Characters whose tokens are trained; a token that only partly lies in one is trained too."""
    literal: list[Span] = field(default_factory=list)
    """Control tokens that somebody typed; they are encoded as ordinary text."""
    add_bos: bool = False
    """Put bos in front, if this tokenizer does that and the text does not begin with it."""
    add_eos: bool = False
    """Put eos behind, trained, if there is one and the text does not end with it."""
    num_rewritten: int = 0
    """Answers trained without the token that ends them: as history the chat template ends them with another token."""
    num_empty: int = 0
    """Answers that may be trained and say nothing, not even by a tool call."""
    joined_by: str | None = None
    """What was put between a prompt and its completion; None where a chat template writes them."""


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of a text or several, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"an encoding has {', '.join(self)}, and no {name}")
        return self[name]


class Tokenizer:
    """Text and chats to ids and back. Made by `load_tokenizer`.

    Also has the names that transformers uses: a call, `len`, `apply_chat_template`, `eos_token_id`. `bos_id` and `eos_id` are None where the model has no such token. `pad_id` is always an id: what fills
    padding is told by position, never by id, so it may equal `eos_id`.
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
        own_template: Path | None = None,
        context_length: int | None = None,
    ):
        self._vocabulary = vocabulary
        self._special_tokens = special_tokens
        self._chat_templates = {name: ChatTemplate(source) for name, source in chat_templates.items()}
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.folder, self.files = folder, files
        self.own_template = own_template
        """The file of a chat template that the user gave in place of the folder's."""
        self._own_pad_token: str | None = None
        self.context_length = context_length
        """The longest text that the model beside the tokenizer was made for; None where nothing tells."""
        self._control = any_of(vocabulary.control)
        self._written_by_template = outside_literals(vocabulary.added)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._vocabulary.size

    def __len__(self) -> int:
        return self.vocab_size

    bos_token_id = property(attrgetter("bos_id"))
    eos_token_id = property(attrgetter("eos_id"))
    pad_token_id = property(attrgetter("pad_id"))

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_tensors: Literal["pt"] | None = None
    ) -> Encoding:
        """Encode a text or several. `return_tensors="pt"` gives tensors (B, T), padded on the right."""
        ids = [self.encode(one, add_special_tokens) for one in ([text] if isinstance(text, str) else text)]
        if return_tensors is None:
            masks = [[1] * len(one) for one in ids]
            one_text = isinstance(text, str)
            return Encoding(input_ids=ids[0] if one_text else ids, attention_mask=masks[0] if one_text else masks)
        import torch  # here, because processes that only tokenize do without it

        longest = max(map(len, ids))
        padded = [one + [self.pad_id] * (longest - len(one)) for one in ids]
        masks = [[1] * len(one) + [0] * (longest - len(one)) for one in ids]
        return Encoding(
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
        """A chat as ids, or with `tokenize=False` as text. `render` also returns what is trained of it."""
        passage = self.passage(messages, tools, add_generation_prompt, "all")
        return self.tokenize([passage])[0][0].tolist() if tokenize else passage.text

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the template for chats without tools, or None."""
        template = self._chat_templates.get("default")
        return template.source if template else None

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources of all templates by name; `default` is the one for chats without tools."""
        return {name: template.source for name, template in self._chat_templates.items()}

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that are found in the text before it is split, with their ids."""
        return dict(self._vocabulary.added)

    @property
    def control_tokens(self) -> frozenset[str]:
        """Those of `added_tokens` that a chat template writes and nobody can type."""
        return self._vocabulary.control

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects bos in front of a text."""
        return self._vocabulary.adds_bos

    @property
    def adds_eos(self) -> bool:
        """Whether the model expects eos behind a text."""
        return self._vocabulary.adds_eos

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, as chat templates see them."""
        return dict(self._special_tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; control tokens in it are recognised.

        With `add_special_tokens`, what the model expects around a text (bos for many) is added unless it is
        there.
        """
        if add_special_tokens and isinstance(self._vocabulary, TokenizerJson):
            ids = self._vocabulary.encode_with_special_tokens(text)
            return ids[1:] if ids[:2] == [self.bos_id] * 2 and self._vocabulary.adds_bos else ids
        ids = self._vocabulary.encode_ids(text)
        if add_special_tokens and self._vocabulary.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special_tokens and self._vocabulary.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`."""
        return self._vocabulary.decode(list(map(int, ids)), skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the tokenizer's file spells it, or None."""
        return self._vocabulary.token_id(token)

    def token_text(self, token_id: int) -> str:
        """A token as the tokenizer's file spells it; empty where there is no such id."""
        return self._vocabulary.id_token(token_id) or ""

    def render(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
    ) -> tuple[list[int], list[bool]]:
        """Ids of a chat and a mask of what is trained: the assistant's text and the token that ends its turn.

        Each message is a dict with `role` and `content` (and what else the chat template reads). Control
        tokens typed inside a message are ordinary text. If the chat template ends an answer with another token once it is
        history (gpt-oss: `<|end|>` for `<|return|>`), its text is trained there and that token is not. Raises ValueError
        if there is no chat template, if it refuses the messages, or if the turns cannot be told apart.
        """
        ids, mask = self.tokenize([self.passage(messages, tools, add_generation_prompt, train_on)])[0]
        return ids.tolist(), mask.tolist()

    def passage(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
        untrained: Collection[int] = (),
    ) -> Passage:
        """The text of a chat with its trained spans; see `render`. The messages `untrained` have none."""
        template = self._template(tools)
        for number, message in enumerate(messages):
            if (role := message.get("role")) not in template.roles:
                raise ValueError(
                    f"message {number}: {role!r} is not a role that the chat template knows; expected {', '.join(ROLES)}."
                    f"{did_you_mean(str(role), ROLES)}"
                )
        messages = template.with_arguments_as_it_reads_them(messages, tools, self._special_tokens)
        marked_messages, num_literals = self._mark_literals(messages)
        marked_tools, num_tool_literals = self._mark_literals(tools)

        def render(part: Sequence[dict[str, Any]], prompt: bool) -> str:
            return template.render(list(part), marked_tools, prompt, self._special_tokens)

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
            undisturbed = template.render(messages, tools, add_generation_prompt, self._special_tokens)
            whole = all(text[start:end] in self._vocabulary.control for start, end in literal)
            if not whole or MARKERS.sub("", undisturbed) != text or full.count(LITERAL_START) != len(literal):
                raise ValueError(
                    "a message holds a control token as text, and the chat template acts on it, so the two "
                    "cannot be told apart. Remove the control token from the message."
                )
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        wanted = [i for i in (turns[-1:] if train_on == "last" else turns) if (i in untrained) == (train_on == "all")]
        spans, num_rewritten = list[Span](), 0
        if template.marks_generation:
            spans = _spans_of(wanted, turns, generation_blocks(full))
        else:
            added, control = self._written_by_template, self._vocabulary.control
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
        """(ids int32, trained bool) of each passage; the ids are those of the whole text, undivided."""
        encodings = self._vocabulary.encode([p.text for p in passages], [p.literal for p in passages])
        tokenized = []
        for passage, encoding in zip(passages, encodings, strict=True):
            ids, trained = encoding.ids, encoding.touches(passage.trained)
            for start, end in passage.literal:
                typed = self._vocabulary.added[passage.text[start:end]]
                if typed in ids[encoding.touches([(start, end)])]:
                    raise ValueError(
                        f"a message holds the control token {passage.text[start:end]!r} as text, and this "
                        "tokenizer cannot write it as text. Remove it from the message."
                    )
            bos_id = self.bos_id if passage.add_bos and self._vocabulary.adds_bos else None
            if bos_id is not None and (len(ids) == 0 or ids[0] != bos_id):
                ids, trained = np.insert(ids, 0, bos_id), np.insert(trained, 0, False)
            if passage.add_eos and self.eos_id is not None:
                if len(ids) == 0 or ids[-1] != self.eos_id:
                    ids, trained = np.append(ids, np.int32(self.eos_id)), np.append(trained, True)
                trained[-1] = True
            tokenized.append((ids.astype(np.int32, copy=False), trained))
        return tokenized

    def pad_with(self, token: str) -> None:
        """Takes a control token for padding, in place of what the folder names, and says so in what is saved.

        Raises ValueError where there is no such token.
        """
        if token not in self.control_tokens:
            raise ValueError(
                f"pad_token={token!r} is no control token of this tokenizer.{did_you_mean(token, self.control_tokens)} "
                f"Expected one that ends nothing, of {', '.join(sorted(self.control_tokens))[:400]}."
            )
        self._own_pad_token, self.pad_id = token, self.added_tokens[token]

    def save(self, path: str | Path) -> None:
        """Copies the tokenizer's files, byte for byte but for a pad token of its own, into the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            target = folder / file.relative_to(self.folder)  # named templates lie in a folder of their own
            target.parent.mkdir(exist_ok=True)
            if not (target.exists() and target.samefile(file)):
                shutil.copyfile(file, target)
        if self.own_template is not None:
            shutil.copyfile(self.own_template, folder / "chat_template.jinja")
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if self._own_pad_token is not None and (folder / name).is_file():
                config = json.loads((folder / name).read_text(encoding="utf-8"))
                write_json(folder / name, config | {"pad_token": self._own_pad_token})

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._chat_templates:
            return self._chat_templates["tool_use"]
        if "default" in self._chat_templates:
            return self._chat_templates["default"]
        named = f" under the name `default` (it has: {', '.join(self._chat_templates)})" if self._chat_templates else ""
        raise ValueError(
            f"this tokenizer has no chat template{named}, so messages cannot be written as text. Use the "
            "model's instruction-tuned sibling, set data.chat_template=FILE to a Jinja chat template, put a "
            "chat_template.jinja into the model's folder, or give the data as prompt/completion or text."
        )

    def _mark_literals(self, value: Any) -> tuple[Any, int]:
        """`value` with the control tokens in its strings between literal markers, and their number."""
        if isinstance(value, str):
            if MARKERS.search(value):
                raise ValueError(
                    "a message holds one of the noncharacters U+FDD0 to U+FDEF, which stand for no "
                    "character and are used here as markers. Remove it."
                )
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
    said = [value for name, value in message.items() if name != "role"]
    return not any(value.strip() if isinstance(value, str) else value for value in said)


def _spans_of(wanted: list[int], turns: list[int], blocks: list[tuple[int | None, Span]]) -> list[Span]:
    """The generation blocks of the messages `wanted`, of all that the assistant wrote."""
    if wanted and wanted != turns and any(turn is None for turn, _ in blocks):
        raise ValueError(
            "the chat template has a {% generation %} block outside its loop over the messages, so it cannot be told "
            "whose message the block writes, and none can be left out. Put the block inside the loop, or train all "
            "of the assistant's messages."
        )
    return [span for turn, span in blocks if wanted == turns or turn in wanted]


def _without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """What of `spans` lies in none of `holes`."""
    for hole_start, hole_end in holes:
        parts = [part for start, end in spans for part in ((start, min(end, hole_start)), (max(start, hole_end), end))]
        spans = [(start, end) for start, end in parts if start < end]
    return spans
