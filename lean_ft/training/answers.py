"""Answer held-out questions with the model, and count the answers that match exactly.

The loss measures how likely the right answer was; this measures whether the model gives it. The right answer is the
last trained stretch of a held-out sequence, or the part of it that a pattern finds, such as the last line of a worked
solution. The question is everything before it (in a chat, up to the header of the last assistant turn). Decoding is
greedy, so it draws no random number and does not change the run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from lean_ft.data import Batch
from lean_ft.data.columns import Document
from lean_ft.generation import Sampling, longest_first, sample, stop_ids
from lean_ft.models import Decoder
from lean_ft.system.log import say
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.user_turns import UserTurns
from lean_ft.training.progress import shown

T = TypeVar("T")

_SHOWN = 40  # characters of a question or an answer in a sample line


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question, the expected answer and the model's answer; with a pattern, the parts of the answers that it
    finds."""

    question: str
    """Everything before the answer, without special tokens."""
    asked: str
    """The last user message of the question, if the chat template shows where it is."""
    expected: str
    given: str | None
    """None if the pattern finds nothing."""
    whole: str
    """The model's whole answer."""
    ended: bool
    """Whether the model ended its answer. An answer without an end is wrong."""

    @property
    def right(self) -> bool:
        return self.ended and self.given == self.expected


@dataclass(frozen=True)
class AnswerReport:
    answers: list[AnsweredQuestion]  # in the order of the questions

    @property
    def num_right(self) -> int:
        return sum(answer.right for answer in self.answers)

    @property
    def exact_match(self) -> float:
        return self.num_right / len(self.answers)


def say_answers(
    when: str,
    model: Decoder,
    tokenizer: Tokenizer,
    held_out: Iterable[Batch] | None,
    max_questions: int,
    num_samples: int = 3,
    pattern: str | None = None,
) -> AnswerReport | None:
    """Answer held-out questions, and print the share of right answers and a few samples, the same ones each time.

    `when` starts the printed line (`before training`). Does nothing if `max_questions` is 0. Raises ValueError as
    `answer_held_out`, and if nothing is held out.
    """
    check_questions(max_questions, has_held_out=held_out is not None)
    if max_questions == 0 or held_out is None:
        return None
    report = answer_held_out(model, tokenizer, held_out, max_questions, pattern)
    total, what = len(report.answers), "the whole answer" if pattern is None else f"the text that {pattern} finds last"
    share = f"{report.num_right} of {total} held-out questions right ({report.exact_match:.1%})"
    say("answers", f"{when}: {share}; exact match of {what}")
    for answer in _spread(report.answers, num_samples):
        shown_answer = "(no match)" if answer.given is None else one_line(answer.given)
        wrong = "did not end" if answer.given == answer.expected else f"expected: {one_line(answer.expected)}"
        say("", f"{one_line(answer.asked)}  ->  {shown_answer}  ({'right' if answer.right else wrong})")
    return report


def check_questions(max_questions: int, *, has_held_out: bool) -> None:
    """Raise ValueError if questions are asked and nothing is held out."""
    if max_questions and not has_held_out:
        raise ValueError(
            f"eval_answers={max_questions} needs held-out rows, and there are none. Set data.validation_source or "
            "data.validation_fraction, or eval_answers=0."
        )


def answer_held_out(
    model: Decoder,
    tokenizer: Tokenizer,
    held_out: Iterable[Batch],
    max_questions: int,
    pattern: str | None = None,
) -> AnswerReport:
    """Return the model's greedy answers to at most `max_questions` held-out sequences, evenly spaced.

    An answer may have as many tokens as the longest expected answer in its batch. With a regular expression `pattern`,
    the first group of its last match is compared (or the whole match), and an answer may have twice the tokens of the
    longest expected answer. No batch has more positions than the largest held-out batch. Raises ValueError if a
    sequence has no question (plain text), or the pattern finds nothing in an expected answer.
    """
    questions, most_tokens = _questions(held_out, max_questions)
    user_turns = UserTurns.of(tokenizer)

    def asked(ids: list[int]) -> str:
        found = "" if user_turns is None else user_turns.last(tokenizer.decode(ids)).strip()
        return found or text(ids)

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True).strip()

    def compared(ids: list[int]) -> str | None:
        return text(ids) if pattern is None else last_match(pattern, text(ids))

    expected = dict[int, str]()
    for i, (_, answer) in enumerate(questions):
        if (compared_text := compared(answer)) is None:
            raise ValueError(
                f"eval_pattern={pattern!r} finds nothing in the expected answer that ends in "
                f"{text(answer)[-_SHOWN:]!r}. Set a pattern that every held-out answer matches, or leave it out."
            )
        expected[i] = compared_text
    ends = stop_ids(model, tokenizer)
    longest = 2 * max(len(answer) for _, answer in questions)
    limits = [len(answer) if pattern is None else longest for _, answer in questions]  # tokens of an answer

    answer_ids: dict[int, list[int]] = {}
    lengths = [len(prompt) + limit for (prompt, _), limit in zip(questions, limits, strict=True)]
    together = list(longest_first(lengths, most_tokens))
    for indices in shown(together, len(together), "answering"):
        prompts, limit = [questions[i][0] for i in indices], max(limits[i] for i in indices)
        answers = sample(model, prompts, Sampling(limit, stop_ids=ends))
        answer_ids.update(zip(indices, (answer.ids for answer in answers), strict=True))

    def answered(i: int, prompt: list[int]) -> AnsweredQuestion:
        ids = answer_ids[i]
        return AnsweredQuestion(text(prompt), asked(prompt), expected[i], compared(ids), text(ids), ids[-1] in ends)

    return AnswerReport([answered(i, prompt.ids.tolist()) for i, (prompt, _) in enumerate(questions)])


def _questions(held_out: Iterable[Batch], most: int) -> tuple[list[tuple[Document, list[int]]], int]:
    """At most `most` prompts, evenly spaced, each with the ids of the right answer; and the tokens of the largest
    batch. Raises ValueError if a sequence has no question."""
    questions, most_tokens = list[tuple[Document, list[int]]](), 0
    for batch in held_out:  # whose built inputs are not kept
        questions += batch.questions()
        most_tokens = max(most_tokens, batch.num_tokens)
    questions = _spread(questions, most)
    if any(len(prompt) < 2 for prompt, _ in questions):  # a bos token asks nothing
        raise ValueError(
            "a held-out sequence is trained from its first token, so it has no question, as in plain text and with "
            "data.train_on=all. Set eval_answers=0 in a training run, or loss=true in evaluate."
        )
    return questions, most_tokens


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the pattern's last match in `text`; the whole match if there is no group."""
    matches = list(re.finditer(pattern, text))
    return (matches[-1][1 if matches[-1].re.groups else 0] or "").strip() if matches else None


def all_are_questions(batches: Iterable[Batch]) -> bool:
    """Whether every trained stretch in the batches has a prompt, which plain text lacks. A bos token asks nothing."""
    return all(len(prompt) >= 2 for batch in batches for prompt, _ in batch.questions())


def _spread(items: list[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def one_line(text: str, most: int = _SHOWN) -> str:
    """The text on one line, cut to `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 4]} ..."
