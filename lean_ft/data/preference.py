"""Pairs of a chosen and a rejected answer to one prompt, rendered and cut to length.

A row has its prompt explicitly, or both answers begin with it: messages by their common messages, strings by their
common characters up to the last space. An answer given as messages may repeat the prompt. What both sides share is
one list of ids: where a token straddles the end of the prompt it belongs to the answers.

Cutting goes in this order: the end of the sequence is appended (to a chat by its template, to a text as eos); the
prompt is cut to its last `max_prompt_length` tokens; each answer to its first `max_completion_length`; then the pair to
`max_length`, as `overflow` says. A pair of which a side has no token left is dropped and counted, as is one whose sides
are the same. A pair becomes two documents, the prompt with the chosen answer and the prompt with the rejected one, of
which the answers are trained. Single answers with a label are read and cut as the sides of a pair are.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_tools
from lean_ft.data.formats import (
    RowFormat,
    as_chat,
    check_rendering,
    formats_of,
    join,
    plain,
    reading,
    with_system,
    writes_chats,
)
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document, Row, kind
from lean_ft.settings import AnswerDataConfig, Sources
from lean_ft.tokenizers import Passage, Tokenizer

NUMBER = r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*"


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    prompt: np.ndarray  # (P,) int32
    chosen: Document  # (C,) ids and which of them the assistant wrote
    rejected: Document  # (R,) the same

    @classmethod
    def of(cls, chosen: Document, rejected: Document) -> "Pair":
        """The pair of two sequences: their prompt is what both share before either answer begins."""
        most = min(int(chosen[1].argmax()), int(rejected[1].argmax()))
        differing = np.flatnonzero(chosen[0][:most] != rejected[0][:most])
        length = int(differing[0]) if len(differing) else most
        answers = [(ids[length:], mask[length:]) for ids, mask in (chosen, rejected)]
        return cls(chosen[0][:length], answers[0], answers[1])

    def documents(self) -> list[Document]:
        """The two sequences, each trained on its answer."""
        masked = np.zeros(len(self.prompt), dtype=bool)
        answers = (self.chosen, self.rejected)
        return [(np.concatenate([self.prompt, ids]), np.concatenate([masked, mask])) for ids, mask in answers]

    @property
    def num_tokens(self) -> int:
        """Of both sequences, each with the prompt."""
        return 2 * len(self.prompt) + len(self.chosen[0]) + len(self.rejected[0])


@dataclass(frozen=True)
class PairReader:
    """Turns rows into the two texts of a pair."""

    config: AnswerDataConfig
    formats: dict[int, RowFormat]
    """Of every source."""
    tokenizer: Tokenizer

    takes: ClassVar[tuple[str, ...]] = ("preference",)
    expected: ClassVar[str] = (
        "learns from pairs; expected the fields `chosen` and `rejected`, with a `prompt` or with one in both"
    )

    @property
    def format(self) -> str:
        """The formats, for people to read."""
        return " + ".join(dict.fromkeys(format.name for format in self.formats.values()))

    @classmethod
    def of(
        cls,
        config: AnswerDataConfig,
        first_rows: Sequence[Row],
        tokenizer: Tokenizer,
        source: Sources | None = None,
    ) -> Self:
        """A reader for the rows of `source`, told by its first ones. Raises ValueError where they are of other formats than
        it takes."""
        formats = formats_of(config, first_rows, source)
        check_rendering(config, tokenizer, formats.values())
        if other := next((format.name for format in formats.values() if format.name not in cls.takes), None):
            raise ValueError(
                f"{first_rows[0].place}: the rows are {other}, and this recipe {cls.expected}. Rename with data.columns."
            )
        return cls(config, formats, tokenizer)

    def passages(self, row: Row) -> list[Passage | Document]:
        """Each side as one text, of which the answer is trained. Raises ValueError with the row's place."""
        with reading(row):
            sides = self._passages(self.formats[row.source].fields_of(row))
            if not all(side.trained for side in sides):
                raise ValueError("a side holds no answer of the assistant that is trained.")
            return [*sides]

    def values(self, row: Row) -> list[float]:
        """The margin of the pair, for each of its sequences, where the settings have it read; 0 where it has none."""
        if self.config.tells != "margin":
            return [0.0, 0.0]
        with reading(row):
            margin = self.formats[row.source].fields_of(row).get("margin", 0.0)
            number = float(margin) if re.fullmatch(NUMBER, str(margin)) else math.nan  # CSV has text alone
            if not math.isfinite(number):
                raise ValueError(f"`margin` is {kind(margin)} ({margin!r:.40}); expected a number, or none.")
            return [number] * 2

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """The chosen and the rejected sequence within their lengths, or none if the pair is dropped."""
        chosen, rejected = map(until_the_answer_ends, documents)
        pair = fit_pair(Pair.of(chosen, rejected), self.config, place, report)
        return [] if pair is None else pair.documents()

    def _passages(self, fields: dict[str, Any]) -> list[Passage]:
        prompt, chosen, rejected = (parse_if_json(fields.get(name), name) for name in ("prompt", "chosen", "rejected"))
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if answer is None and isinstance(fields[name], str):
                name = "completion" if "completion" in fields else name
                raise ValueError(f"`{name}` is empty; expected an answer. Leave the row out, or give it one.")
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
            chosen, rejected = check_text(chosen, "`chosen`"), check_text(rejected, "`rejected`")
            if prompt is None:
                prompt = _shared_text(chosen, rejected)
                chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
                # Whoever wrote both as one text rendered them, too.
                return [_plain(prompt, answer) for answer in (chosen, rejected)]
            if not writes_chats(self.config, self.tokenizer):
                separator = self.config.separator or ""
                return [plain(check_text(prompt, "`prompt`"), answer, separator) for answer in (chosen, rejected)]
        tools = read_tools(fields.get("tools"))
        sides = as_chat(chosen, "chosen"), as_chat(rejected, "rejected")
        begins_anew = all(side.messages[0]["role"] != "assistant" for side in sides)
        if prompt is None or begins_anew:
            shared = _num_shared_messages(*sides)
            prompts = [Chat(side.messages[:shared]) for side in sides]
            sides = tuple(
                Chat(side.messages[shared:], frozenset(i - shared for i in side.untrained if i >= shared))
                for side in sides
            )
        else:
            prompts = [as_chat(prompt, "prompt")] * 2
        passages = []
        for asked, answer in zip(prompts, sides, strict=True):
            if not asked.messages or answer.messages[0]["role"] != "assistant":
                raise ValueError(
                    "`chosen` and `rejected` do not begin with the same prompt, followed by an answer of the assistant "
                    "each. Give the prompt as `prompt`, or both sides as messages that begin alike."
                )
            chat = with_system(join(asked, answer, train_prompt=False), self.config)
            passages.append(
                self.tokenizer.passage(chat.messages, tools, train_on="completion", untrained=chat.untrained)
            )
        if any(passage.num_rewritten for passage in passages):
            raise ValueError(
                "a side answers more than once, and the chat template ends an answer with another token once another "
                "message follows. Give one answer each, and the messages before it as `prompt`."
            )
        return passages


@dataclass(frozen=True)
class UnpairedReader(PairReader):
    """Turns rows of a prompt, an answer and a label into a text, and pairs into the texts of a good and a bad answer."""

    takes: ClassVar[tuple[str, ...]] = ("unpaired", "preference")
    expected: ClassVar[str] = (
        "learns from answers that are good or bad; expected the fields `prompt`, `completion` and `label`, or pairs of "
        "`chosen` and `rejected`"
    )

    def passages(self, row: Row) -> list[Passage | Document]:
        if self.formats[row.source].name == "preference":
            return super().passages(row)
        with reading(row):
            fields = self.formats[row.source].fields_of(row)
            answer, _ = self._passages(fields | {"chosen": fields["completion"], "rejected": fields["completion"]})
            if not answer.trained:
                raise ValueError("`completion` holds no answer of the assistant that is trained.")
            return [answer]

    def values(self, row: Row) -> list[float]:
        """1 for what is desirable, 0 for what is not."""
        with reading(row):
            fields = self.formats[row.source].fields_of(row)
            if self.formats[row.source].name == "preference":
                return [1.0, 0.0]
            label = fields["label"]
            label = label.strip().lower() if isinstance(label, str) else label
            if not isinstance(label, bool | int | float | str) or label not in LABELS:
                raise ValueError(
                    f"`label` is {kind(label)} ({fields['label']!r:.40}); expected true for a desirable answer or false for "
                    "an undesirable one (1 or 0)."
                )
            return [float(LABELS[label])]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """The sequences within their lengths, or none if the row is dropped."""
        if len(documents) == 2:
            return super().fit(documents, place, report)
        ids, mask = until_the_answer_ends(documents[0])
        begin = int(mask.argmax())
        cut = _fit_answers(ids[:begin], [(ids[begin:], mask[begin:])], self.config, place, report)
        if cut is None:
            return []
        prompt, [(answer, trained)] = cut
        report.count_lost(len(ids) - len(prompt) - len(answer))
        return [(np.concatenate([prompt, answer]), np.concatenate([np.zeros(len(prompt), dtype=bool), trained]))]


LABELS: dict[Any, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def fit_pair(pair: Pair, config: AnswerDataConfig, place: str, report: DataReport) -> Pair | None:
    """The pair within the lengths of `config`, or None if it is dropped; `report` counts what was lost.

    Of the pair, `truncation_side=right` cuts each sequence behind max_length, as long as a prompt allows; `left` cuts
    the beginning of the prompt until the longer answer fits, and the end of an answer only where no prompt is left.
    Raises ValueError, with `place`, for one that is longer than max_length under `overflow=raise`.
    """
    if np.array_equal(pair.chosen[0], pair.rejected[0]):
        report.drop("chosen equals rejected")
        return None
    cut = _fit_answers(pair.prompt, [pair.chosen, pair.rejected], config, place, report)
    if cut is None:
        return None
    prompt, (chosen, rejected) = cut
    kept = Pair(prompt, chosen, rejected)
    if np.array_equal(kept.chosen[0], kept.rejected[0]):
        report.drop("chosen equals rejected within the lengths")
        return None
    report.count_lost(pair.num_tokens - kept.num_tokens)
    return kept


def _fit_answers(
    prompt: np.ndarray, answers: list[Document], config: AnswerDataConfig, place: str, report: DataReport
) -> tuple[np.ndarray, list[Document]] | None:
    """A prompt and its answers within the lengths; None, counted, where one of them has no token left."""
    if config.max_prompt_length is not None:
        prompt = prompt[max(0, len(prompt) - config.max_prompt_length) :]
    if config.max_completion_length is not None:
        answers = [_first(answer, config.max_completion_length) for answer in answers]
    too_many = len(prompt) + max(len(ids) for ids, _ in answers) - config.max_length
    if too_many > 0 and not report.takes_overlong(config.max_length + too_many, config, place):
        return None
    if config.truncation_side == "left":
        prompt = prompt[max(0, too_many) :]
    answers = [_first(answer, config.max_length - len(prompt)) for answer in answers]
    # Without a prompt nothing predicts an answer's first token.
    if not all(mask[0 if len(prompt) else 1 :].any() for _, mask in answers):
        report.drop("no answer left on a side" if len(answers) > 1 else "no answer left")
        return None
    return prompt, answers


def _first(answer: Document, count: int) -> Document:
    return answer[0][: max(0, count)], answer[1][: max(0, count)]


def _plain(prompt: str, answer: str) -> Passage:
    return Passage(prompt + answer, [(len(prompt), len(prompt + answer))], add_bos=True, add_eos=True)


def until_the_answer_ends(document: Document) -> Document:
    """Without what a template writes behind the answer, such as a line break."""
    ids, mask = document
    end = len(mask) - int(mask[::-1].argmax())
    return ids[:end], mask[:end]


def _shared_text(chosen: str, rejected: str) -> str:
    """The characters that both begin with, up to the last space: a word is not cut in two."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = chosen[: next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(chosen), len(rejected)))]
    end = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return shared[:end]


def _num_shared_messages(chosen: Chat, rejected: Chat) -> int:
    """Messages that both begin with, of which an answer is left to each."""
    count = 0
    for ours, theirs in zip(chosen.messages, rejected.messages, strict=False):
        if ours != theirs:
            break
        count += 1
    # Sides that are the same to the end, or whose one continues the other, still end with an answer of their own.
    most = min(len(chosen.messages), len(rejected.messages)) - 1
    return min(count, most)
