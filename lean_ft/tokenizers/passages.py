"""Passages: texts with the spans that are trained, and operations on spans."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from lean_ft.system.foreign_values import MARKERS
from lean_ft.system.units import counted
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
    """Whether the last message is trained without a token that ends it: neither the template nor the tokenizer has
    one."""
    num_empty: int = 0
    """Assistant messages that may be trained but have no content and no tool call."""
    joined_by: str | None = None
    """The separator between a prompt and its completion; None if a chat template wrote them."""
    unread: Sequence[str] = ()
    """Keys of messages and template variables that the chat template does not mention."""
    developer_as_system: bool = False
    """Whether developer messages are written as system messages, because the chat template has no such role."""
    images: Sequence[Any] = ()
    """Images of the row, in the order of the placeholders that the chat template wrote."""
    runs: Sequence[int] = ()
    """How often each image token of the text is repeated."""


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
            "the chat template has a {% generation %} block outside its loop over the messages, so a single message "
            "cannot be selected for training. Put the block inside the loop, or train all of the assistant's "
            "messages."
        )
    return [span for turn, span in blocks if wanted == turns or turn in wanted]


def without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Remove `holes` from `spans`."""
    for hole_start, hole_end in holes:
        parts = [part for start, end in spans for part in ((start, min(end, hole_start)), (max(start, hole_end), end))]
        spans = [(start, end) for start, end in parts if start < end]
    return spans


def with_image_texts(passage: Passage, placeholder: str, texts: Sequence[str], runs: Sequence[int]) -> Passage:
    """Replace the placeholders that the chat template wrote with the text of each image, which is not trained.

    A placeholder that a message contains (`literal`) stays text. Raises ValueError if there are more or fewer
    placeholders.
    """
    typed = {start for start, _ in passage.literal}
    places = [match.span() for match in re.finditer(re.escape(placeholder), passage.text) if match.start() not in typed]
    if len(places) != len(texts):
        hint = " It may read texts only, and no content parts." if not places else ""
        raise ValueError(
            f"the row has {counted(len(texts), 'images')}, and the chat template wrote {placeholder} {len(places)} "
            f"times.{hint} Set data.chat_template to a template that writes it for each content part of the type "
            "image."
        )
    ends = [end for _, end in places]
    grown = [0, *accumulate(len(text) - len(placeholder) for text in texts)]

    def moved(spans: Sequence[Span]) -> list[Span]:
        return [
            (start + grown[bisect_right(ends, start)], end + grown[bisect_right(ends, end)]) for start, end in spans
        ]

    holes = [(start + grown[i], end + grown[i + 1]) for i, (start, end) in enumerate(places)]
    rest = iter(texts)
    text = re.sub(re.escape(placeholder), lambda m: m[0] if m.start() in typed else next(rest), passage.text)
    trained = without(moved(passage.trained), holes)
    return replace(passage, text=text, trained=trained, literal=moved(passage.literal), runs=runs)
