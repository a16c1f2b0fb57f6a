"""A tokenizer in the words of GGUF: tokens, their types and scores, merges, and the name of the splitting rule.

llama.cpp has two tokenizers for these families and knows them by what it would otherwise have to run:

- `gpt2`, byte-level BPE: merges in order, over text split by one of a fixed list of rules, told by name. The rule of a
  tokenizer.json is looked up by what it does; one that is not in the list is refused, since llama.cpp would split
  by another and give other ids.
- `llama`, SentencePiece BPE: joins the two neighbours whose joined piece has the highest score. Scores come from
  tokenizer.model, or from the order of the merges, which is the same order.

llama.cpp normalises nothing: text that is not in Unicode's form NFC gets other ids there from tokenizers that compose
it first, as Qwen's. Source: llama.cpp, docs and src/llama-vocab.cpp.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.sentencepiece_model import WORD_START
from lean_ft.tokenizers.tiktoken_model import LLAMA3_PATTERN, is_rank_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
ADDED_TOKEN_SCORE = -1000.0
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# A text that tells a tokenizer that changes text before it splits it.
_PROBE = "a  b ﬁ½ ™"

_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# What a tokenizer.json does before BPE, as `_splitting_rule` writes it down, with llama.cpp's name for it.
_PRE_TOKENIZERS = {
    (("Split", LLAMA3_PATTERN), ("ByteLevel", False), ("ignore_merges", True)): "llama-bpe",
    (("Split", _QWEN2_PATTERN), ("ByteLevel", False), ("ignore_merges", False)): "qwen2",
    (("Digits", True), ("ByteLevel", True), ("ignore_merges", False)): "smollm",
    (("ByteLevel", True), ("ignore_merges", False)): "gpt-2",
}


@dataclass
class GGUFVocabulary:
    """What goes into the file's `tokenizer.ggml.*`, one entry of the lists an id."""

    model: str  # gpt2 or llama
    tokens: list[str]
    types: list[int]
    pre: str = "default"
    scores: list[float] = field(default_factory=list)  # of `llama`
    merges: list[str] = field(default_factory=list)  # of `gpt2`, "left right"
    add_space_prefix: bool | None = None  # of `llama`


def gguf_vocabulary(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> GGUFVocabulary:
    """Returns the tokenizer of a model folder with `vocab_size` entries; ids that no text has are filled up.

    Raises ValueError where llama.cpp has no tokenizer that gives the same ids.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model {vocab_size}; llama.cpp needs an "
            "embedding for each. The tokenizer is of another model, or was extended without the model."
        )
    pieces = folder / "tokenizer.model"
    if pieces.is_file() and is_rank_file(pieces):
        pieces = folder / "absent"
    spec = _read(folder / "tokenizer.json")
    if spec is None and not pieces.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; GGUF is written from one, or from a SentencePiece model.")
    if spec is None or spec["model"].get("byte_fallback"):
        vocabulary = _from_sentencepiece(pieces) if pieces.is_file() else _from_byte_fallback(spec or {}, folder)
        first = tokenizer.token_text(tokenizer.encode("a")[0])
        vocabulary.add_space_prefix = first.startswith(WORD_START)
        if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
            raise ValueError(f"{folder}: the tokenizer changes spaces or letters, which llama.cpp would not do.")
    else:
        vocabulary = _from_byte_level(spec, folder)
    size = max(vocab_size, len(vocabulary.tokens))
    vocabulary.types += [UNUSED] * (size - len(vocabulary.tokens))
    vocabulary.tokens += [f"[PAD{i}]" for i in range(len(vocabulary.tokens), size)]
    if vocabulary.model == "llama":
        vocabulary.scores += [ADDED_TOKEN_SCORE] * (size - len(vocabulary.scores))
    for token, token_id in tokenizer.added_tokens.items():
        vocabulary.tokens[token_id] = token
        if vocabulary.types[token_id] != UNKNOWN:
            vocabulary.types[token_id] = CONTROL if token in tokenizer.control_tokens else USER_DEFINED
    return vocabulary


def _from_byte_level(spec: dict[str, Any], folder: Path) -> GGUFVocabulary:
    model = spec["model"]
    rule = (*_splitting_rule(spec.get("pre_tokenizer")), ("ignore_merges", bool(model.get("ignore_merges"))))
    normalizer = (spec.get("normalizer") or {}).get("type", "NFC")
    if model["type"] != "BPE" or rule not in _PRE_TOKENIZERS or normalizer != "NFC":
        known = ", ".join(sorted(set(_PRE_TOKENIZERS.values())))
        raise ValueError(
            f"{folder / 'tokenizer.json'}: llama.cpp would not give this tokenizer's ids. It splits text by rules that "
            f"have a name there; this file's is none of those known here ({known})."
        )
    # A byte without a token is dropped by llama.cpp, as by `tokenizers`, unless this file names a token for unknown text.
    missing = [byte for byte, letter in _byte_letters().items() if letter not in model["vocab"]]
    if missing and model.get("unk_token") is not None:
        raise ValueError(
            f"{folder / 'tokenizer.json'} has no token for {len(missing)} bytes (the first is 0x{missing[0]:02X}) and writes "
            f"{model['unk_token']!r} for them; llama.cpp would drop them."
        )
    tokens, types = _listed(model["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return GGUFVocabulary("gpt2", tokens, types, _PRE_TOKENIZERS[rule], merges=merges)


def _byte_letters() -> dict[int, str]:
    """The letters that byte-level BPE writes for the bytes that UTF-8 has: themselves, or from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return {byte: letters[byte] for byte in range(0xF5) if byte not in (0xC0, 0xC1)}


def _splitting_rule(pre_tokenizer: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """The steps of a pre-tokenizer with what matters of each: (("Split", regex), ("ByteLevel", splits by itself))."""
    kind = (pre_tokenizer or {}).get("type")
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return [entry for step in steps for entry in _splitting_rule(step)]
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            return [("Split", regex)]
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return [("Digits", individual)]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [("ByteLevel", pre_tokenizer.get("use_regex", True))]
    return [("unknown", kind)]


def _from_sentencepiece(path: Path) -> GGUFVocabulary:
    from sentencepiece import SentencePieceProcessor

    processor: Any = SentencePieceProcessor(model_file=str(path))
    ids = range(processor.get_piece_size())
    scores = [float(processor.get_score(i)) for i in ids]
    kinds = {
        BYTE: processor.is_byte,
        UNKNOWN: processor.is_unknown,
        CONTROL: processor.is_control,
        UNUSED: processor.is_unused,
    }
    types = [next((kind for kind, is_kind in kinds.items() if is_kind(i)), NORMAL) for i in ids]
    # A BPE model's score is the piece's place among the merges, negated; a unigram model's is a logarithm.
    if any(score != int(score) for score, kind in zip(scores, types, strict=True) if kind == NORMAL):
        raise ValueError(f"{path} is a unigram model, which llama.cpp does not read for these families.")
    return GGUFVocabulary("llama", [processor.id_to_piece(i) for i in ids], types, scores=scores)


def _from_byte_fallback(spec: dict[str, Any], folder: Path) -> GGUFVocabulary:
    """Llama 2's kind of tokenizer.json, without the tokenizer.model that it was made from."""
    model = spec["model"]
    if model["type"] != "BPE":
        raise ValueError(f"{folder / 'tokenizer.json'} is a {model['type']} tokenizer; expected BPE.")
    steps = [step["type"] for step in (spec.get("normalizer") or {}).get("normalizers", [])]
    if spec.get("pre_tokenizer") is not None or steps not in (["Prepend", "Replace"], ["Replace"]):
        raise ValueError(
            f"{folder / 'tokenizer.json'} marks where words begin by a rule of its own (a pre-tokenizer), and llama.cpp "
            "puts the mark before every text. Put the model's tokenizer.model beside it."
        )
    tokens, types = _listed(model["vocab"])
    types = [BYTE if _BYTE_PIECE.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]
    if model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = UNKNOWN
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(rank))
    # Single characters are never the result of a merge, and so never chosen by their score.
    return GGUFVocabulary("llama", tokens, types, scores=[scores.get(token, 0.0) for token in tokens])


def _listed(vocab: dict[str, int]) -> tuple[list[str], list[int]]:
    """Tokens in order of id with their types; ids that the file leaves out are unused."""
    size = max(vocab.values()) + 1
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, token_id in vocab.items():
        tokens[token_id], types[token_id] = token, NORMAL
    return tokens, types


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
