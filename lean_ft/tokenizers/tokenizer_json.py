"""`tokenizer.json`: the format of the `tokenizers` library, which almost every model on the hub ships."""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers.ascii_words import AsciiWords
from lean_ft.tokenizers.file_limits import check_limits
from lean_ft.tokenizers.vocabulary import Encoding, Span, any_of, split_at_tokens

# While literal control tokens are encoded, a private-use character stands for each real one.
FIRST_STAND_IN = 0x100000
_PROBES = ("a", "1", "的", ".")  # texts that have ids in some vocabulary


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the library's plain `Exception`, and its panic (not an `Exception` at all), into a ValueError."""

    @wraps(method)
    def call(self: "TokenizerJson", *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{self._path}: the `tokenizers` library failed: {str(error)[:300]}") from None

    return call


class TokenizerJson:
    """A `tokenizer.json` with the tokens that `tokenizer_config.json` adds to it."""

    @_explained
    def __init__(self, path: Path, added_tokens: list[tuple[int | None, AddedToken]], bos: str | None, eos: str | None):
        """Read `path` and add the `added_tokens` that it lacks. Only this file decides about bos and eos around a text:
        as in transformers 5, `add_bos_token` in tokenizer_config.json has no effect."""
        self._path = path
        try:
            spec = read_json(path)
            check_limits(spec)
            _keep_whole_offsets(spec.get("post_processor"))
            self._tokenizer = HFTokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises plain Exceptions
            of_python = isinstance(error, AttributeError | KeyError | IndexError | TypeError)
            reason = "a value is missing, or has another type than the library writes" if of_python else error
            raise ValueError(
                f"{path}: not a tokenizer.json that the installed `tokenizers` library can read: {reason}"
            ) from error
        # A file that was saved with padding or truncation would silently pad or truncate training rows.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

        present = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        new = [entry for entry in added_tokens if entry[1].content not in present and not present.add(entry[1].content)]
        self._tokenizer.add_tokens([token for _, token in new])  # at once: a call takes time for all tokens so far
        for declared_id, token in new:
            got = self._tokenizer.token_to_id(token.content)
            if declared_id is not None and got != declared_id:
                raise ValueError(
                    f"{path}: tokenizer_config.json gives {token.content!r} the id {declared_id}, but in this file it "
                    f"gets the id {got}. Take both files from the same model."
                )

        decoder = self._tokenizer.get_added_tokens_decoder()
        self.added = {token.content: token_id for token_id, token in decoder.items()}
        self.control = frozenset(token.content for token in decoder.values() if token.special)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        probe = self._tokenizer.encode("a", add_special_tokens=True).ids
        self.adds_bos = bos is not None and probe[:1] == [self.token_id(bos)]
        self.adds_eos = eos is not None and probe[-1:] == [self.token_id(eos)]
        self._any_added = any_of(self.added)
        self._ascii_words = AsciiWords.of(self._tokenizer, json.loads(self._tokenizer.to_str()))
        self._with_stand_ins: tuple[HFTokenizer, dict[str, str], np.ndarray] | None = None

    @_explained
    def encode(self, texts: list[str], literals: list[list[Span]]) -> list[Encoding]:
        words = self._ascii_words
        encodings = [
            self._encode_with_literals(text, literal) if literal else words.encode(text) if words is not None else None
            for text, literal in zip(texts, literals, strict=True)
        ]
        remaining = [text for text, encoding in zip(texts, encodings, strict=True) if encoding is None]
        batch = self._tokenizer.encode_batch(remaining, add_special_tokens=False)
        by_library = iter([Encoding.of(result.ids, result.offsets) for result in batch])
        return [next(by_library) if encoding is None else encoding for encoding in encodings]

    @_explained
    def encode_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @_explained
    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of `text` with the special tokens that the file's post-processor adds."""
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    @_explained
    def around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the file's post-processor writes before and after every text.

        Raises ValueError if it changes the text's own ids."""
        for text in _PROBES:
            if bare := self.encode_ids(text):
                full = self._tokenizer.encode(text, add_special_tokens=True)
                first = next((i for i, is_special in enumerate(full.special_tokens_mask) if not is_special), 0)
                last = first + len(bare)
                if full.ids[first:last] == bare and all(full.special_tokens_mask[last:]):
                    return full.ids[:first], full.ids[last:]
        raise ValueError(
            f"{self._path}: its post_processor does not write a text between tokens that are the same for all texts. "
            "Save the tokenizer with transformers again."
        )

    @_explained
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def _encode_with_literals(self, text: str, literal: list[Span]) -> Encoding:
        """Encode with a copy of the tokenizer in which private-use characters spell the control tokens.

        The template's control tokens are respelled in the text, so the literal ones match nothing. The text is encoded
        whole, so its splitting, normalization and prefix spaces stay the same.
        """
        copy, stand_ins, true_ids = self._copy_with_stand_ins()
        respelled: list[str] = []
        origin: list[int] = []  # position in `text` of each respelled character
        for start, end, is_token in split_at_tokens(text, self._any_added, literal):
            piece = text[start:end]
            if is_token and piece in stand_ins:
                respelled.append(stand_ins[piece])
                origin.append(start)
            else:
                if any(FIRST_STAND_IN <= ord(character) < FIRST_STAND_IN + len(stand_ins) for character in piece):
                    raise ValueError(
                        "a text contains a control token and private-use characters of plane 16. Remove one of them."
                    )
                respelled.append(piece)
                origin.extend(range(start, end))
        origin.append(len(text))
        encoding = copy.encode("".join(respelled), add_special_tokens=False)
        position = np.asarray(origin, dtype=np.int32)
        spans = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        ids = true_ids[np.asarray(encoding.ids, dtype=np.int64)]
        return Encoding(ids.astype(np.int32), position[spans[:, 0]], position[spans[:, 1]])

    def _copy_with_stand_ins(self) -> tuple[HFTokenizer, dict[str, str], np.ndarray]:
        if self._with_stand_ins is None:
            spec = json.loads(self._tokenizer.to_str())
            controls = [token for token in spec["added_tokens"] if token["special"]]
            stand_ins = {token["content"]: chr(FIRST_STAND_IN + i) for i, token in enumerate(controls)}
            for token in controls:
                token["content"] = stand_ins[token["content"]]
            copy = HFTokenizer.from_str(json.dumps({**spec, "post_processor": None}))
            # The library renumbers added tokens: id in the copy -> id in the file.
            largest = max(copy.get_vocab(with_added_tokens=True).values())
            true_ids = np.arange(largest + 1)
            for content, token_id in self.added.items():
                true_ids[copy.token_to_id(stand_ins.get(content, content))] = token_id
            self._with_stand_ins = copy, stand_ins, true_ids
        return self._with_stand_ins


def _keep_whole_offsets(post_processor: dict[str, Any] | None) -> None:
    """Count spaces as part of their token, so that spans cover the text without gaps. Ids do not change."""
    if post_processor is None:
        return
    if "trim_offsets" in post_processor:
        post_processor["trim_offsets"] = False
    for inner in post_processor.get("processors", []):
        _keep_whole_offsets(inner)
