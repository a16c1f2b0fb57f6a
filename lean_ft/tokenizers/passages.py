"""Passages: texts with the spans that are trained, and operations on spans."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from lean_ft.tokenizers.chat_template import MARKERS
from lean_ft.tokenizers.vocabulary import Span


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
    num_other_prompts: int = 0
    """Assistant messages trained after another text than the prompt that generation starts from."""
    is_endless: bool = False
    """Whether the last message is trained without a token that ends it: neither the template nor the tokenizer has one."""
    num_empty: int = 0
    """Assistant messages that may be trained but have no content and no tool call."""
    joined_by: str | None = None
    """The separator between a prompt and its completion; None if a chat template wrote them."""
    unread: Sequence[str] = ()
    """Keys of messages and template variables that the chat template does not mention."""


def without_markers(full: str, spans: list[list[Span]]) -> tuple[str, list[list[Span]]]:
    """Remove the markers from a rendered chat; also return the lists of `spans` in the remaining text."""
    markers = [match.start() for match in MARKERS.finditer(full)]
    moved = [
        [(start - bisect_left(markers, start), end - bisect_left(markers, end)) for start, end in some]
        for some in spans
    ]
    return MARKERS.sub("", full), moved


def spans_of(wanted: list[int], turns: list[int], blocks: list[tuple[int | None, Span]]) -> list[Span]:
    """Return the generation blocks of the messages `wanted`; `turns` are all the assistant's messages."""
    if wanted and wanted != turns and any(turn is None for turn, _ in blocks):
        raise ValueError(
            "the chat template has a {% generation %} block outside its loop over the messages, so a single message cannot be "
            "selected for training. Put the block inside the loop, or train all of the assistant's messages."
        )
    return [span for turn, span in blocks if wanted == turns or turn in wanted]


def without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Remove `holes` from `spans`."""
    for hole_start, hole_end in holes:
        parts = [part for start, end in spans for part in ((start, min(end, hole_start)), (max(start, hole_end), end))]
        spans = [(start, end) for start, end in parts if start < end]
    return spans
