"""Preference pairs: a chosen and a rejected answer to one prompt, rendered and truncated.

The prompt is a field of the row, or the common beginning of both answers: the common messages of chats, or the common
characters of strings up to the last space. Answers given as messages may repeat the prompt. In tokens, the
prompt is the common prefix of both sequences, so a token that straddles its end belongs to the answers.

Truncation happens in this order. First the end of the sequence is appended, by the chat template or as eos. Then the
prompt is cut to its last `max_prompt_length` tokens, each answer to its first `max_completion_length` tokens, and the
pair to `max_length` according to `overflow`. A pair is dropped and counted if an answer has no token left or both
answers are equal. A pair becomes two documents, prompt + chosen answer and prompt + rejected answer, with labels on the
answers only. `lean_ft.data.unpaired` reads and truncates single completions with a label in the same way.

Legend: P pairs of a batch, N labels of their completions, B rows of T positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lean_ft.data.batch import Batch
from lean_ft.data.chats import Chat, check_text, parse_if_json
from lean_ft.data.columns import Document
from lean_ft.data.formats import (
    FORMATS,
    Fields,
    RowReader,
    as_chat,
    drops,
    join,
    plain,
    reading,
    refuse_in_plain_text,
    writes_chats,
)
from lean_ft.data.objective import Objective
from lean_ft.data.parts import first_type
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row, kind
from lean_ft.settings import AnswerDataConfig, DataConfig, PreferenceDataConfig, RewardDataConfig
from lean_ft.tokenizers import Passage, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from lean_ft.data.batches import Batches
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

NUMBER = r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*"


@dataclass(frozen=True)
class PairReader(RowReader):
    """Converts a row to the two texts of a pair."""

    config: AnswerDataConfig
    known: ClassVar[dict[str, Fields]] = {name: fields for name, fields in FORMATS.items() if fields.is_pair}
    expected: ClassVar[str] = (
        "trains on preference pairs; expected the fields `chosen` and `rejected`, and `prompt` or the same beginning "
        "in both. If the columns have other names, set data.columns."
    )

    def passages(self, row: Row) -> list[Passage | Document]:
        """Return each side as one text with a trained answer. Raises ValueError with the row's place."""
        with reading(row):
            fields = self.fields_of(row)
            sides = self._passages(self.formats[row.source].fields.prompt_of(fields), fields)
            if not all(side.trained for side in sides):
                raise ValueError("`chosen` or `rejected` has no assistant message to train on.")
            return [*sides]

    @property
    def unused(self) -> tuple[str, ...]:
        return () if isinstance(self.config, RewardDataConfig) else ("margin",)

    def values(self, row: Row) -> list[float]:
        """Return the pair's margin for each sequence; 0 without a margin or for recipes that do not use margins."""
        if not isinstance(self.config, RewardDataConfig):
            return [0.0, 0.0]
        with reading(row):
            margin = self.fields_of(row).get("margin", 0.0)
            number = float(margin) if re.fullmatch(NUMBER, str(margin)) else math.nan  # CSV values are strings
            if not math.isfinite(number):
                raise ValueError(f"`margin` is {kind(margin)} ({margin!r:.40}); expected a number, or no `margin`.")
            return [number] * 2

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """Return the truncated sequences, with labels on the answers, or [] if the row is dropped. The prompt's columns
        are the first sequence's."""
        documents = [until_the_answer_ends(document) for document in documents]
        length = num_prompt_tokens(documents)
        prompt = replace(documents[0][:length], trained=np.zeros(length, dtype=bool))
        fitted = fit_answers(prompt, [document[length:] for document in documents], self.config, place, report)
        if fitted is None or drops(prompt, slice(length - len(fitted[0]), length), report):
            return []
        return [fitted[0].then(answer) for answer in fitted[1]]

    def _passages(self, prompt: Any, fields: dict[str, Any]) -> list[Passage]:
        prompt = parse_if_json(prompt, "prompt")
        chosen, rejected = (parse_if_json(fields[name], name) for name in ("chosen", "rejected"))
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if answer is None and isinstance(fields[name], str):
                name = "completion" if "completion" in fields else name
                raise ValueError(f"`{name}` is empty; expected a completion. Remove the row, or add a completion.")
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
            chosen, rejected = check_text(chosen, "`chosen`"), check_text(rejected, "`rejected`")
            if prompt is None:
                prompt = _shared_text(chosen, rejected)
                chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
                # Answers that contain the prompt as plain text are already rendered.
                refuse_in_plain_text(fields)
                return [_plain(prompt, answer) for answer in (chosen, rejected)]
            if not writes_chats(self.config, self.tokenizer):
                separator = self.config.separator or ""
                refuse_in_plain_text(fields)
                return [plain(check_text(prompt, "`prompt`"), answer, separator) for answer in (chosen, rejected)]
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
            if (part_type := first_type(answer.messages)) is not None:
                raise ValueError(
                    f"`chosen` or `rejected` has {part_type.with_article} behind the prompt. Put {part_type.unit}s "
                    "into the prompt."
                )
            if not asked.messages or answer.messages[0]["role"] != "assistant":
                raise ValueError(
                    "`chosen` and `rejected` must begin with the same messages, followed by an assistant message. Put "
                    "the prompt into the field `prompt`, or start both with the prompt's messages."
                )
            passages.append(self.render(join(asked, answer, train_prompt=False), fields))
        if any(passage.num_rewritten for passage in passages):
            raise ValueError(
                "`chosen` or `rejected` has several assistant messages, and the chat template ends the earlier ones "
                "with another token than the last. Keep one assistant message in each, and move earlier messages to "
                "`prompt`."
            )
        return passages


def num_prompt_tokens(sides: Sequence[Document]) -> int:
    """Return the number of prompt tokens of one or two sequences: their common prefix before any answer starts."""
    most = min(int(side.trained.argmax()) for side in sides)
    differing = np.flatnonzero(sides[0].ids[:most] != sides[-1].ids[:most])
    return int(differing[0]) if len(differing) else most


def fit_answers(
    prompt: Document, answers: list[Document], config: AnswerDataConfig, place: str, report: DataReport
) -> tuple[Document, list[Document]] | None:
    """Truncate a prompt and its one or two answers to the lengths in `config`; `report` counts lost tokens.

    `truncation_side=right` cuts the end of each sequence. `left` cuts the start of the prompt until the longer answer
    fits, and the end of an answer only if no prompt is left. Returns None, and counts a drop, if both answers are equal
    or an answer has no trained token left. Raises ValueError that starts with `place` for sequences longer than
    max_length under `overflow=raise`.
    """
    num_before = sum(len(prompt) + len(answer) for answer in answers)
    if _are_equal(answers):
        report.drop("chosen equals rejected")
        return None
    if config.max_prompt_length is not None:
        prompt = prompt[max(0, len(prompt) - config.max_prompt_length) :]
    if config.max_completion_length is not None:
        answers = [answer[: config.max_completion_length] for answer in answers]
    too_many = len(prompt) + max(map(len, answers)) - config.max_length
    if too_many > 0 and not report.truncates(config.max_length + too_many, config, place):
        return None
    if config.truncation_side == "left":
        prompt = prompt[max(0, too_many) :]
    answers = [answer[: max(0, config.max_length - len(prompt))] for answer in answers]
    # Without a prompt, nothing predicts the first token of an answer.
    if not all(answer.trained[0 if len(prompt) else 1 :].any() for answer in answers):
        report.drop("no completion left on one side" if len(answers) > 1 else "no completion left")
        return None
    if _are_equal(answers):
        report.drop("chosen equals rejected within the lengths")
        return None
    report.count_lost(num_before - sum(len(prompt) + len(answer) for answer in answers))
    return prompt, answers


def _are_equal(answers: list[Document]) -> bool:
    return len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids)


def _plain(prompt: str, answer: str) -> Passage:
    return Passage(prompt + answer, [(len(prompt), len(prompt + answer))], add_bos=True, add_eos=True)


def until_the_answer_ends(document: Document) -> Document:
    """Remove tokens that the template writes after the answer, such as a line break."""
    return document[: len(document) - int(document.trained[::-1].argmax())]


def _shared_text(chosen: str, rejected: str) -> str:
    """Return the common prefix up to the last space, so that no word is split."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = chosen[: next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(chosen), len(rejected)))]
    end = max((i for i, character in enumerate(shared) if character.isspace()), default=0)
    return shared[:end]


def _num_shared_messages(chosen: Chat, rejected: Chat) -> int:
    """Return the number of common first messages, leaving at least one answer to each side."""
    count = 0
    for ours, theirs in zip(chosen.messages, rejected.messages, strict=False):
        if ours != theirs:
            break
        count += 1
    # Equal sides, or a side that continues the other, still keep their last message as the answer.
    most = min(len(chosen.messages), len(rejected.messages)) - 1
    return min(count, most)


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """A batch of P pairs. The N labels are ordered by pair, the chosen completion first."""

    index: Tensor  # (N,) int64: flattened position (0 to B * T - 1) that predicts the label
    label: Tensor  # (N,) int64
    answer_tokens: Tensor  # (P, 2) int64: number of labels of the chosen and the rejected completion
    pairs: Tensor  # (P,) int64: pair numbers in the prepared data; held-out pairs follow the training pairs
    last: Tensor  # (2 P,) int64: flattened position of each sequence's last token
    margins: Tensor  # (P,) float32: margin of the chosen over the rejected completion; 0 if not given
    num_pairs: int

    labels_whole_rows: ClassVar[bool] = True

    @property
    def asked(self) -> Tensor:
        lengths = self.answer_tokens.flatten()
        return self.index[(lengths.cumsum(0) - lengths)[:: self.answer_tokens.shape[1]]]

    def without_targets(self) -> PairBatch:
        names = ("index", "label", "answer_tokens", "pairs", "last", "margins")
        nothing: dict[str, Any] = {name: getattr(self, name)[:0] for name in names}
        return replace(super().without_targets(), num_pairs=0, **nothing)


class PreferencePairs(Objective):
    """Preference pairs. With `share_prompts`, both completions are in one row: the rejected completion follows the
    chosen completion and continues the prompt (`Batch.prefixes`)."""

    reader = PairReader
    batch_type = PairBatch
    unit = "pairs"
    recipe = "dpo"
    marks = (("chosen", "rejected"),)
    worse = ("rejected",)
    shares_prompts = True

    def check(self, config: DataConfig, share_prompts: bool) -> None:
        if isinstance(config, PreferenceDataConfig) and config.shared_prompt is True and not share_prompts:
            raise ValueError(
                "data.shared_prompt=true, but this recipe computes the prompt once per completion. Leave the setting "
                "out, or edit the recipe: pass share_prompts=shares_prompts(cfg) to prepare_batches, and the batch's "
                "prefixes to the model."
            )

    def shared(self, columns: Columns, config: DataConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        shared = np.zeros(len(columns), dtype=np.int64)  # 0 for a chosen answer, the prompt for a rejected one
        for i in range(0, len(columns), 2):
            shared[i + 1] = num_prompt_tokens([columns[i], columns[i + 1]])
        return {"shared": shared}

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        sides, rows = placed.sides, placed.documents[:: placed.sides]
        return {
            "num_pairs": len(rows),
            "pairs": ((columns.first or 0) + rows) // sides,
            "answer_tokens": placed.num_labels.reshape(-1, sides),
            "margins": columns.per_document("row_values", rows)[:, 0],
        }

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        return {"index": placed.index, "label": placed.label, "last": placed.last}

    def fitted(self, config: DataConfig, batches: Batches) -> dict[str, Any]:
        fitted = super().fitted(config, batches)
        return fitted | {"max_completion_length": batches.longest_answer} if self.shares_prompts else fitted

    def remarks(self, lengths: np.ndarray, num_targets: np.ndarray) -> list[str]:
        if not self.shares_prompts:
            return []
        spared = int((lengths - num_targets)[1::2].sum())  # prompt tokens
        return [
            f"prompt tokens that both completions of a pair repeat: {spared:,} ({spared / lengths.sum():.1%}); "
            "data.shared_prompt computes them once"
        ]


OBJECTIVE = PreferencePairs()
