"""Pairs of a chosen and a rejected answer to one prompt, rendered and cut to length.

A row has its prompt explicitly, or both answers begin with it: messages by their common messages, strings by their
common characters up to the last space. An answer given as messages may repeat the prompt. What both sides share is
one list of ids: where a token straddles the end of the prompt it belongs to the answers.

Cutting goes in this order: the end of the sequence is appended (to a chat by its template, to a text as eos); the
prompt is cut to its last `max_prompt_length` tokens; each answer to its first `max_completion_length`; then the pair to
`max_length`. A pair of which a side has no token left is dropped and counted, as is one whose sides are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_tools
from lean_ft.data.detection import RowFormat, formats_of
from lean_ft.data.formats import as_chat, join
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document, Row
from lean_ft.settings import PreferenceDataConfig
from lean_ft.tokenizers import Passage, Tokenizer


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    prompt: np.ndarray  # (P,) int32
    chosen: Document  # (C,) ids and which of them the assistant wrote
    rejected: Document  # (R,) the same

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of prompt and answer, for each side."""
        return len(self.prompt) + len(self.chosen[0]), len(self.prompt) + len(self.rejected[0])


@dataclass(frozen=True)
class PairRenderer:
    """Maps rows to pairs."""

    config: PreferenceDataConfig
    formats: dict[int, RowFormat]
    """Of every source."""
    tokenizer: Tokenizer

    @classmethod
    def of(cls, config: PreferenceDataConfig, first_rows: Sequence[Row], tokenizer: Tokenizer) -> "PairRenderer":
        """A renderer for `config`. Raises ValueError where the rows are no pairs."""
        formats = formats_of(config, first_rows)
        if other := next((format.name for format in formats.values() if format.name != "preference"), None):
            raise ValueError(
                f"{first_rows[0].place}: the rows are {other}, and this recipe learns from pairs; expected the fields "
                "`chosen` and `rejected`, with a `prompt` or with one in both. Rename with data.columns."
            )
        return cls(config, formats, tokenizer)

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Pair], DataReport]:
        """The pairs that can be trained on, in order, and the counts of these rows alone; `tokens` are those of both
        sides, each with the prompt. Raises ValueError for a bad row unless `on_bad_row` skips it.
        """
        report = DataReport("preference", detected=self.config.format == "auto", rows=len(rows))
        pairs = []
        for row in rows:
            try:
                pair = self.pair(row)
            except ValueError as error:
                if self.config.on_bad_row == "raise":
                    raise
                report.skip_bad_row(str(error))
                continue
            kept = fit_pair(pair, self.config, report)
            if kept is not None:
                pairs.append(kept)
                targets = int(kept.chosen[1].sum() + kept.rejected[1].sum())
                report.keep(sum(kept.lengths), targets, row.source)
        report.check_bad_rows(self.config.max_bad_rows)
        return pairs, report

    def pair(self, row: Row) -> Pair:
        """The pair of `row` at its full length. Raises ValueError with the row's place."""
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            sides = self._passages(self.formats[row.source].fields_of(row))
            (chosen, chosen_mask), (rejected, rejected_mask) = map(
                _until_the_answer_ends, self.tokenizer.tokenize(sides)
            )
            length = _shared_length(chosen, rejected, int(chosen_mask.argmax()), int(rejected_mask.argmax()))
            return Pair(
                chosen[:length],
                (chosen[length:], chosen_mask[length:]),
                (rejected[length:], rejected_mask[length:]),
            )
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
        except RecursionError:
            raise ValueError(f"{row.place}: its objects are nested too deeply to be written as text.") from None

    def _passages(self, fields: dict[str, Any]) -> list[Passage]:
        """Each side as one text, of which the answer is trained."""
        prompt, chosen, rejected = (parse_if_json(fields.get(name), name) for name in ("prompt", "chosen", "rejected"))
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
            chosen, rejected = check_text(chosen, "`chosen`"), check_text(rejected, "`rejected`")
            if prompt is None:
                prompt = _shared_text(chosen, rejected)
                chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
                # Whoever wrote both as one text rendered them, too.
                return [_plain(prompt, answer) for answer in (chosen, rejected)]
            if self.tokenizer.chat_template is None:
                return [_plain(check_text(prompt, "`prompt`"), answer) for answer in (chosen, rejected)]
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
            chat = join(asked, answer, train_prompt=False)
            passages.append(
                self.tokenizer.passage(chat.messages, tools, train_on="completion", untrained=chat.untrained)
            )
        if any(passage.num_rewritten for passage in passages):
            raise ValueError(
                "a side answers more than once, and the chat template ends an answer otherwise once another message "
                "follows. Give one answer each, and what comes before it as `prompt`."
            )
        return passages


def fit_pair(pair: Pair, config: PreferenceDataConfig, report: DataReport) -> Pair | None:
    """The pair within the lengths of `config`, or None if it is dropped; `report` counts what was lost.

    Of the pair, `truncation_side=right` cuts each sequence behind max_length, as long as a prompt allows; `left` cuts
    the beginning of the prompt until the longer answer fits, and the end of an answer only where no prompt is left.
    """
    before = sum(pair.lengths)
    prompt, answers = pair.prompt, [pair.chosen, pair.rejected]
    if np.array_equal(pair.chosen[0], pair.rejected[0]):
        report.drop("chosen equals rejected")
        return None
    if config.max_prompt_length is not None:
        prompt = prompt[max(0, len(prompt) - config.max_prompt_length) :]
    if config.max_completion_length is not None:
        answers = [_first(answer, config.max_completion_length) for answer in answers]
    if config.truncation_side == "left":
        too_many = len(prompt) + max(len(ids) for ids, _ in answers) - config.max_length
        prompt = prompt[max(0, too_many) :]
    answers = [_first(answer, config.max_length - len(prompt)) for answer in answers]
    # Without a prompt nothing predicts an answer's first token.
    if not all(mask[0 if len(prompt) else 1 :].any() for _, mask in answers):
        report.drop("no answer left on a side")
        return None
    kept = Pair(prompt, answers[0], answers[1])
    if np.array_equal(kept.chosen[0], kept.rejected[0]):
        report.drop("chosen equals rejected within the lengths")
        return None
    if lost := before - sum(kept.lengths):
        report.truncated += 1
        report.lost_tokens += lost
    return kept


def _first(answer: Document, count: int) -> Document:
    return answer[0][: max(0, count)], answer[1][: max(0, count)]


def _plain(prompt: str, answer: str) -> Passage:
    return Passage(prompt + answer, [(len(prompt), len(prompt + answer))], add_bos=True, add_eos=True)


def _until_the_answer_ends(document: Document) -> Document:
    """Without what a template writes behind the answer, such as a line break."""
    ids, mask = document
    if not mask.any():
        raise ValueError("a side holds no answer of the assistant that is trained.")
    end = len(mask) - int(mask[::-1].argmax())
    return ids[:end], mask[:end]


def _shared_length(chosen: np.ndarray, rejected: np.ndarray, *answers_begin: int) -> int:
    """Tokens that both sides share before either answer begins."""
    most = min(*answers_begin, len(chosen), len(rejected))
    differing = np.flatnonzero(chosen[:most] != rejected[:most])
    return int(differing[0]) if len(differing) else most


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
