"""Images of prompts: where a prompt has them, and what they add to its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lean_ft.data.columns import Document
from lean_ft.data.foreign_fields import is_given
from lean_ft.data.images import IMAGE_FIELDS, Messages, images_of, read_image, with_columns, with_sizes
from lean_ft.data.kinds import PromptMedium
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.passages import Passage


class ImageMedium(PromptMedium):
    """Images in content parts of a prompt's messages, or in its field `images` or `image`."""

    def check_text(self, row: Mapping[str, Any]) -> None:
        if any(is_given(row.get(name)) for name in IMAGE_FIELDS):
            raise ValueError(
                "a prompt has an image, which needs a chat template. Remove chat=false, or use a chat model."
            )

    def split(self, messages: Messages, row: Mapping[str, Any]) -> tuple[Messages, list[Any]]:
        return images_of(messages, row)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if tokenizer.image_rules is None:
            raise ValueError(
                "a prompt has an image, and the model reads texts alone. Use a vision model with model.images=frozen."
            )

    def written(self, passage: Passage, values: Sequence[Any], tokenizer: Tokenizer, folder: Path) -> Passage:
        return with_sizes(replace(passage, images=values), folder, tokenizer.image_rules)

    def with_columns(self, document: Document, passage: Passage | None, tokenizer: Tokenizer) -> Document:
        rules, images = tokenizer.image_rules, () if passage is None else passage.images
        return document if rules is None else with_columns(document, images, rules, tokenizer.token_id(rules.token))


def image_part(path: str, tokenizer: Tokenizer) -> tuple[dict[str, Any], int]:
    """Return an image file as a content part of a message, and its number of tokens. Raises ValueError if it cannot be
    read."""
    if tokenizer.image_rules is None:
        raise ValueError("the model reads texts alone, or was loaded with model.images=none.")
    file = str(Path(path.strip("'\"")).expanduser().resolve())  # terminals write dropped files in quotes
    return {"type": "image", "path": file}, sum(read_image(file, Path(), tokenizer.image_rules).layout.runs)
