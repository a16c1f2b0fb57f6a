"""SentencePiece models named `tokenizer.model`: Llama 2, Mistral 7B and other models of 2023.

SentencePiece computes the ids of text. Control tokens are matched first, as in transformers. If `legacy` is true in
tokenizer_config.json (default: false), text after a control token gets the word-start mark again. If `add_prefix_space`
is false there, no text gets it.
"""

import re
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from lean_ft.system.whole_files import read_bounded
from lean_ft.tokenizers.file_limits import MAX_TOKENS
from lean_ft.tokenizers.vocabulary import AddedTokensFirst, Encoding, Span

WORD_START = "▁"
# A protobuf message may repeat a field: the later value wins, and sub-messages merge. These bytes, appended to a model,
# mean `normalizer_spec { add_dummy_prefix: false }` in every version of the library.
WITHOUT_WORD_START = b"\x1a\x02\x18\x00"


class SentencePieceModel(AddedTokensFirst):
    """A SentencePiece model and the tokens that `tokenizer_config.json` adds to it."""

    def __init__(
        self,
        path: Path,
        added_tokens: list[tuple[int | None, AddedToken]],
        adds_bos: bool,
        adds_eos: bool,
        legacy: bool,
        add_prefix_space: bool | None = None,
    ):
        """add_prefix_space: whether the start of a text gets the word-start mark; None: as the model says."""
        model = read_bounded(path)
        try:
            as_stored = SentencePieceProcessor(model_proto=model)
            inside = SentencePieceProcessor(model_proto=model + WITHOUT_WORD_START)
            self._processor = inside if add_prefix_space is False else as_stored
            self._inside = self._processor if legacy else inside
            self._marks_words = self._processor.encode("a", out_type=str)[0].startswith(WORD_START)
        except Exception as error:  # RuntimeError in some versions of the library, ValueError in others
            raise ValueError(f"{path}: not a SentencePiece model: {error}") from None
        if add_prefix_space and not self._marks_words:
            raise ValueError(
                f"{path} does not mark the start of a text, and tokenizer_config.json has add_prefix_space=true. Take "
                "both files from the same model, or save a tokenizer.json with transformers."
            )
        self.adds_bos, self.adds_eos = adds_bos, adds_eos
        if (num_pieces := self._processor.get_piece_size()) > MAX_TOKENS:
            raise ValueError(f"{path} has {num_pieces:,} pieces; expected at most {MAX_TOKENS:,}.")
        is_marker = [i for i in range(num_pieces) if self._processor.is_control(i) or self._processor.is_unknown(i)]
        self.added = {self._processor.id_to_piece(i): i for i in is_marker}
        control = set(self.added)
        next_id = num_pieces
        patterns = {content: re.escape(content) for content in self.added}
        for declared_id, token in added_tokens:
            content = token.content
            if content not in self.added:
                piece_id = self._piece_id(content)
                self.added[content] = piece_id if piece_id is not None else next_id
                next_id = max(next_id, self.added[content] + 1)
            if declared_id is not None and self.added[content] != declared_id:
                raise ValueError(
                    f"{path}: tokenizer_config.json gives {content!r} the id {declared_id}, but in this model its id "
                    f"is {self.added[content]}. Take both files from the same model."
                )
            if token.special:
                control.add(content)
            left, right = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
            patterns[content] = left + re.escape(content) + right
        self.control = frozenset(control)
        self.size = next_id
        self._contents = {token_id: content for content, token_id in self.added.items()}
        longest_first = sorted(patterns, key=len, reverse=True)
        self._any_added = re.compile("|".join(patterns[content] for content in longest_first) or r"(?!)")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: list[str] = []
        pending = bytearray()

        def flush() -> None:
            text.append(pending.decode("utf-8", errors="replace"))
            pending.clear()

        for token_id in ids:
            if token_id in self._contents:
                flush()
                if not (skip_special_tokens and self._contents[token_id] in self.control):
                    text.append(self._contents[token_id])
            elif token_id >= self._processor.get_piece_size():  # a model may have more embeddings than tokens
                continue
            elif self._processor.is_byte(token_id):
                pending.append(int(self._processor.id_to_piece(token_id)[3:-1], 16))  # "<0x0A>"
            else:
                flush()
                piece = self._processor.id_to_piece(token_id).replace(WORD_START, " ")
                at_start = not any(text) and piece.startswith(" ") and self._marks_words
                text.append(piece[1:] if at_start else piece)
        flush()
        return "".join(text)

    def token_id(self, token: str) -> int | None:
        return self.added[token] if token in self.added else self._piece_id(token)

    def id_token(self, token_id: int) -> str | None:
        if token_id in self._contents:
            return self._contents[token_id]
        return self._processor.id_to_piece(token_id) if token_id < self._processor.get_piece_size() else None

    def _piece_id(self, piece: str) -> int | None:
        token_id = self._processor.piece_to_id(piece)
        return token_id if self._processor.id_to_piece(token_id) == piece else None

    def _encode_piece(self, piece: str, start: int) -> Encoding:
        ids, spans = _pieces(self._processor if start == 0 else self._inside, piece)
        return Encoding.of(ids, [(start + first, start + last) for first, last in spans])


def _pieces(processor: Any, text: str) -> tuple[list[int], list[Span]]:
    """Return ids and character spans. The call differs between versions of the library."""
    if hasattr(processor, "encode_as_offset_mapping"):
        mapping = processor.encode(text, out_type="offset_mapping")
        return list(mapping["ids"]), list(mapping["offsets"])
    proto = processor.encode(text, out_type="immutable_proto")
    return [piece.id for piece in proto.pieces], [(piece.begin, piece.end) for piece in proto.pieces]
