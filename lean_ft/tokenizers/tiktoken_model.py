"""tiktoken rank files named `tokenizer.model`, the layout of Meta's Llama 3 release.

Each line holds a token's bytes in base64 and its rank. The file has no control tokens and no pattern. Both are Llama
3's, unless tokenizer_config.json lists other control tokens.
"""

import base64
import binascii
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import AddedToken

from lean_ft.gguf.splitting import LLAMA3_PATTERN
from lean_ft.system.whole_files import read_bounded
from lean_ft.tokenizers.file_limits import MAX_ID, MAX_TOKENS
from lean_ft.tokenizers.vocabulary import AddedTokensFirst, Encoding, any_of

NUM_LLAMA3_CONTROL_TOKENS = 256


def llama3_control_tokens() -> list[str]:
    """The 256 control tokens that follow the ranks, in order of id, named as in Llama 3.1's tokenizer.json."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(NUM_LLAMA3_CONTROL_TOKENS))
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    return [named.get(i) or next(reserved) for i in range(NUM_LLAMA3_CONTROL_TOKENS)]


def is_rank_file(path: Path) -> bool:
    """Whether the file's first line is base64, a space and a number."""
    with path.open("rb") as file:
        first = file.readline(1000).split()
    try:
        return len(first) == 2 and first[1].isdigit() and len(base64.b64decode(first[0], validate=True)) > 0
    except binascii.Error:
        return False


class TiktokenModel(AddedTokensFirst):
    """A rank file and the control tokens that follow its ranks."""

    adds_bos = True
    adds_eos = False

    def __init__(self, path: Path, added_tokens: list[tuple[int | None, AddedToken]]):
        ranks: dict[bytes, int] = {}
        lines = read_bounded(path).splitlines()
        if len(lines) > MAX_TOKENS:
            raise ValueError(f"{path} has {len(lines):,} lines; expected at most {MAX_TOKENS:,}.")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:  # binascii.Error is one
                raise ValueError(
                    f"{path}, line {number}: expected a token in base64 and its rank, found {line[:60]!r}."
                ) from None
        declared = {token.content: token_id for token_id, token in added_tokens if token_id is not None}
        ids = [*ranks.values(), *declared.values()]
        has_all_bytes = all(bytes([i]) in ranks for i in range(256))
        if not has_all_bytes or len({*ids}) < len(ids) or not 0 <= min(ids) <= max(ids) <= MAX_ID:
            raise ValueError(f"{path} is damaged: expected a different rank, of at most {MAX_ID:,}, for every token.")
        first_free = max(ranks.values()) + 1
        self.added = declared or {token: first_free + i for i, token in enumerate(llama3_control_tokens())}
        self._ids = frozenset((*ranks.values(), *self.added.values()))
        plain = {token.content for _, token in added_tokens if not token.special}
        self.control = frozenset(self.added) - plain
        self.size = max(*self.added.values(), first_free - 1) + 1
        self._tiktoken = tiktoken.Encoding(
            name=str(path), pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=self.added
        )
        self._contents = {token_id: content for content, token_id in self.added.items()}
        self._any_added = any_of(self.added)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        ids = [token_id for token_id in ids if token_id in self._ids]  # a model may have more embeddings than tokens
        if skip_special_tokens:
            ids = [token_id for token_id in ids if self._contents.get(token_id) not in self.control]
        return self._tiktoken.decode(ids)

    def token_id(self, token: str) -> int | None:
        if token in self.added:
            return self.added[token]
        try:
            return self._tiktoken.encode_single_token(token)
        except KeyError:
            return None

    def id_token(self, token_id: int) -> str | None:
        try:
            return self._tiktoken.decode_single_token_bytes(token_id).decode("utf-8", errors="replace")
        except KeyError:
            return None

    def _encode_piece(self, piece: str, start: int) -> Encoding:
        ids = self._tiktoken.encode_ordinary(piece)
        lengths = np.array([len(token) for token in self._tiktoken.decode_tokens_bytes(ids)])
        byte_ends = np.cumsum(lengths)
        # Index of each byte's character: a character begins at every byte that is not 10xxxxxx.
        utf8 = np.frombuffer(piece.encode("utf-8"), dtype=np.uint8)
        character = np.cumsum((utf8 & 0xC0) != 0x80) - 1
        starts = start + character[byte_ends - lengths]
        ends = start + character[byte_ends - 1] + 1
        return Encoding(np.asarray(ids, dtype=np.int32), starts.astype(np.int32), ends.astype(np.int32))
