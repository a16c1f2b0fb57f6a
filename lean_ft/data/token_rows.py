"""Rows that were tokenised elsewhere."""

from typing import Any

import numpy as np

from lean_ft.data.chats import parse_if_json
from lean_ft.data.rows import Document, kind

IGNORED = -100


def read_token_row(fields: dict[str, Any], vocab_size: int) -> Document:
    """The ids in `input_ids`, trained where `labels` repeat them; all of them without labels.

    Labels are Hugging Face's: at the position of their own token, -100 where nothing is trained. Positions at either
    end whose `attention_mask` is 0 are padding and left out. Raises ValueError for labels that are something else.
    """
    ids = _integers(fields["input_ids"], "input_ids")
    labels = _integers(fields["labels"], "labels") if "labels" in fields else ids
    attended = _integers(fields["attention_mask"], "attention_mask") if "attention_mask" in fields else ids * 0 + 1
    for name, values in (("labels", labels), ("attention_mask", attended)):
        if len(values) != len(ids):
            raise ValueError(f"`{name}` has {len(values)} values for {len(ids)} `input_ids`; expected as many.")
    inside = np.flatnonzero(attended)
    first, last = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    if len(inside) != last - first:
        raise ValueError("`attention_mask` has zeros between ones; expected them at the ends alone, over padding.")
    ids, labels = ids[first:last], labels[first:last]
    unknown = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(unknown):
        raise ValueError(
            f"`input_ids` has {ids[unknown[0]]} at position {first + unknown[0]}; this tokenizer's ids are 0 to "
            f"{vocab_size - 1}. Was the row tokenised with another?"
        )
    trained = labels != IGNORED
    differing = np.flatnonzero(trained & (labels != ids))
    if len(differing):
        i = differing[0]
        raise ValueError(
            f"`labels` has {labels[i]} at position {first + i}, where `input_ids` has {ids[i]}; expected the same id, "
            "or -100 for a token that is not trained. Labels are not shifted here."
        )
    return ids.astype(np.int32), trained


def _integers(value: Any, name: str) -> np.ndarray:
    value = parse_if_json(value, name)
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is {kind(value)}; expected a list of whole numbers.")
    wrong = next((item for item in value if not isinstance(item, int) or abs(item) >= 1 << 31), None)
    if wrong is not None or None in value:
        raise ValueError(f"`{name}` holds {wrong!r}; expected whole numbers below 2**31.")
    return np.array(value, dtype=np.int64)
