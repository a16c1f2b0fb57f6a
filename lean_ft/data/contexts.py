"""Rows with a context that the teacher reads and the student does not, such as a demonstration or feedback.

A row becomes two sequences with the same trained tokens: the student's, as in `lean_ft.data.sft`, and the teacher's,
whose prompt also has the context. A document is the student's sequence; the teacher's is in two of its per-document
columns. So packing, shuffling and weights are those of the student's sequences, and a batch has the teacher's sequences
as a separate batch. The i-th target of one is the i-th target of the other, at another position.

A text ends the system message, or stands before a plain-text prompt with an empty line between, or enters the last user
message by `data.context_template`. A list of messages stands before the prompt's messages, behind the system message;
none of them is trained. Neither sequence is ever cut, because both need the same completion.

Source: Snell et al. 2022, Learning by Distilling Context (arXiv:2209.15189), for the training; TRL's SDFTTrainer, for
the template.

Legend: M texts of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lean_ft.data import sft
from lean_ft.data.batch import Batch, rounded_up
from lean_ft.data.chats import Chat, check_text, read_chat, read_opening
from lean_ft.data.columns import Document
from lean_ft.data.formats import FORMATS, SYSTEM_ROLES, Fields, join, reading, writes_chats
from lean_ft.data.objective import PLAIN, Objective
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row, kind
from lean_ft.data.text_files import parse_json
from lean_ft.settings import DataConfig, TaughtDataConfig
from lean_ft.tokenizers import Passage

if TYPE_CHECKING:
    from lean_ft.data.batches import Batches
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

IDS, TRAINED = "teacher_ids", "teacher_trained"  # columns of the teacher's sequence
Context = str | list[dict[str, Any]]


@dataclass(frozen=True)
class ContextReader(sft.SFTReader):
    """Converts a row to the student's and the teacher's text."""

    config: TaughtDataConfig

    known: ClassVar[dict[str, Fields]] = {
        name: replace(fields, required=(*fields.required, "context"))
        for name, fields in FORMATS.items()
        if fields.chat or fields.completion
    }
    expected: ClassVar[str] = (
        "reads a context for the teacher (data.columns.context) beside a chat, or a prompt and a completion. Rows of "
        "plain texts, ids and pairs have no place for it."
    )

    def passages(self, row: Row) -> list[Passage | Document]:
        """Return both sequences. Raises ValueError with the row's place."""
        with reading(row):
            form, fields = self.formats[row.source].fields, self.fields_of(row)
            context = read_context(fields.pop("context"))
            student = self._read(form, fields)
            if form.completion and not writes_chats(self.config, self.tokenizer):
                prompt = form.prompt_of(fields)
                if not isinstance(prompt, list):
                    fields = self._with_prompt(form, fields, self._plain_prompt(context, prompt))
                    return [student, _uncounted(self._read(form, fields))]
            return [student, _uncounted(self._read(form, fields | {"context": context}))]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """Return the student's sequence with the teacher's in its columns, or [] if the row is dropped.

        Raises ValueError that starts with `place` for a sequence that is too long under `overflow=raise`.
        """
        student, teacher = documents
        if not student.trained[1:].any():
            report.drop("nothing to train on")
            return []
        limits = {"": self.config.max_length, ", with its context": self.config.teacher_tokens}
        for (which, limit), document in zip(limits.items(), documents, strict=True):
            if self.config.longest is not None and len(document) > limit:
                if self.config.overflow == "raise":
                    setting = "max_teacher_length" if which and self.config.max_teacher_length else "max_length"
                    raise ValueError(
                        f"{place}{which}: {len(document):,} tokens, more than data.{setting}={limit:,}. Raise "
                        f"data.{setting}, or set data.overflow=drop."
                    )
                report.drop(f"longer than {limit:,} tokens{which}")
                return []
        if not np.array_equal(targets_of(student), targets_of(teacher)):
            report.drop("the completion has other tokens behind the context")
            return []
        report.note("tokens of the teacher's sequences", len(teacher))
        return [_beside(student, teacher)]

    def _chat(self, chat: Chat, fields: dict[str, Any]) -> Passage:
        if (context := fields.get("context")) is None:
            return super()._chat(chat, fields)
        opening = [] if chat.messages[0]["role"] in SYSTEM_ROLES else read_opening(fields)
        if self.config.system and (opening + chat.messages)[0]["role"] not in SYSTEM_ROLES:
            opening.insert(0, {"role": "system", "content": self.config.system})
        chat = join(Chat(opening), chat, train_prompt=self.config.train_on != "completion")
        fields = {name: value for name, value in fields.items() if name not in ("system", "history", "context")}
        return super()._chat(self._behind(context, chat), fields)

    def _behind(self, context: Context, chat: Chat) -> Chat:
        """Return the chat behind the context."""
        messages, template = chat.messages, self.config.context_template
        if isinstance(context, str) and template is not None:
            asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if not asked:
                raise ValueError("the chat has no user message for data.context_template. Remove the setting.")
            prompt = check_text(messages[asked[-1]]["content"], "the content of the last user message")
            text = template.format(context=context, prompt=prompt)
            changed = [*messages[: asked[-1]], {**messages[asked[-1]], "content": text}, *messages[asked[-1] + 1 :]]
            return Chat(changed, chat.untrained)
        num_before = int(messages[0]["role"] in SYSTEM_ROLES)
        head, rest = messages[:num_before], messages[num_before:]
        added = [{"role": "system", "content": context}] if isinstance(context, str) else context
        if added[0]["role"] in SYSTEM_ROLES:
            texts = [check_text(one["content"], "the content of a system message") for one in (*head, added[0])]
            head, added = [{**(head or added)[0], "content": "\n\n".join(texts)}], added[1:]
        before = [*head, *added]
        shift = len(before) - num_before
        untrained = {i + shift if i >= num_before else i for i in chat.untrained}
        untrained |= {i for i, message in enumerate(before) if message["role"] == "assistant"}
        return Chat([*before, *rest], frozenset(untrained))

    def _plain_prompt(self, context: Context, prompt: object) -> str:
        """Return the teacher's prompt of plain text."""
        if not isinstance(context, str):
            raise ValueError(
                "`context` is a list of messages, which needs a chat template, but the row's prompt and completion are "
                "not rendered with one. Write the context as a text, or set data.chat_template or data.chat=true."
            )
        template = self.config.context_template or "{context}\n\n{prompt}"
        return template.format(context=context, prompt=check_text(prompt, "the prompt"))

    def _with_prompt(self, form: Fields, fields: dict[str, Any], prompt: str) -> dict[str, Any]:
        names = {name for names in form.prompts for name in names}
        return {name: value for name, value in fields.items() if name not in names} | {form.prompts[0][0]: prompt}


def read_context(value: object) -> Context:
    """Return a row's context: a text, or messages. JSON texts of a list of objects are messages, as in CSV files.

    Raises ValueError for an empty context, or another value.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value)
        except ValueError:
            parsed = None  # a text, such as "[1] is wrong"
        if isinstance(parsed, list) and parsed and all(isinstance(one, dict) for one in parsed):
            value = parsed
    if isinstance(value, dict):
        value = [value]
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise ValueError(
            "`context` is empty, so the teacher would read the student's prompt. Write a text or messages, remove the "
            "row, or skip such rows with data.on_bad_row=skip."
        )
    if isinstance(value, str):
        return check_text(value, "the field `context`")
    if not isinstance(value, list):
        raise ValueError(f"`context` is {kind(value)}; expected a text or a list of messages.")
    return read_chat(value, "context").messages


def _uncounted(passage: Passage | Document) -> Passage | Document:
    """The teacher's passage without the remarks that a report counts, which are those of the student's."""
    if isinstance(passage, Document):
        return passage
    nothing = {"num_rewritten": 0, "num_other_prompts": 0, "is_endless": False, "num_empty": 0}
    return replace(passage, **nothing, joined_by=None, unread=(), developer_as_system=False)


def targets_of(document: Document) -> np.ndarray:
    """The trained ids that a token before them predicts."""
    return document.ids[1:][document.trained[1:]]


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaughtBatch(Batch):
    """The student's sequences, and the teacher's with the same targets."""

    teacher: Batch

    @property
    def for_teacher(self) -> Batch:
        return self.teacher

    def questions(self) -> Iterator[tuple[Document, list[int]]]:
        """As in the base class. The prompts have the teacher's prompts in their columns."""
        for (prompt, ids), (of_teacher, _) in zip(super().questions(), self.teacher.questions(), strict=True):
            yield _beside(prompt, of_teacher), ids

    def without_targets(self) -> TaughtBatch:
        return replace(super().without_targets(), teacher=self.teacher.without_targets())


@dataclass(frozen=True)
class Contexts(Objective):
    """Conversations or texts with a context for the teacher. Without one, those of `finetune`."""

    longest: int = 0
    """Maximum tokens of the teacher's sequence, of the settings."""

    reader = ContextReader
    batch_type = TaughtBatch
    recipe = "distill"

    def of(self, config: TaughtDataConfig) -> Objective:
        return replace(self, longest=config.teacher_tokens) if config.has_context else sft.OBJECTIVE

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        from lean_ft.data.collate import batch_of  # loads torch

        arrangement = placed.arrangement
        teacher = batch_of(
            [_of_teacher(columns[int(i)]) for i in placed.documents],
            PLAIN,
            kind="padded" if arrangement.kind == "padded" else "flat",
            row_tokens=int(rounded_up(_lengths(columns, placed.documents).max())),
            pad_id=columns.pad_id,
            batch_size=arrangement.batch_size * arrangement.most_in_a_row,
        )
        assert teacher.num_targets == len(placed.label)
        return {"teacher": teacher}

    def beside(self, document: Document) -> dict[str, Document]:
        return {"teacher": _of_teacher(document)}

    def lengths_beside(self, columns: Columns) -> dict[str, np.ndarray]:
        return {"teacher": _lengths(columns, np.arange(len(columns)))}

    def answered(self, prompt: Document, ids: Sequence[int], trained: Sequence[bool]) -> Document:
        return _beside(prompt.continued(ids, trained), _of_teacher(prompt).continued(ids, trained))

    def room(self, prompt: Document, config: DataConfig) -> int:
        of_teacher = self.longest - len(_of_teacher(prompt))
        return max(0, min(super().room(prompt, config), of_teacher))

    def full(self, document: Document) -> Document:
        ids = np.resize(document.ids, max(self.longest, len(document)))
        return _beside(document, Document(ids, np.arange(len(ids)) > len(ids) - len(document)))

    def fitted(self, config: DataConfig, batches: Batches) -> dict[str, Any]:
        fitted = super().fitted(config, batches)
        longest = int(rounded_up(self.lengths_beside(batches.layout.columns)["teacher"].max()))
        return fitted | {"max_teacher_length": max(longest, fitted["max_length"])}


def _of_teacher(document: Document) -> Document:
    """The teacher's sequence of a document or of a prompt."""
    return Document(document.per_document[IDS], document.per_document[TRAINED])


def _beside(document: Document, teacher: Document) -> Document:
    """The document with the teacher's sequence in its columns."""
    return replace(document, per_document={**document.per_document, IDS: teacher.ids, TRAINED: teacher.trained})


def _lengths(columns: Columns, documents: np.ndarray) -> np.ndarray:
    """(M,) tokens of the teacher's sequences of documents."""
    return np.diff(columns.offsets[IDS])[columns.rows[documents]]


OBJECTIVE = Contexts()
