"""Convert a tokenizer to GGUF: tokens, their types and scores, merges, and the name of the splitting rule.

llama.cpp has two tokenizers for these families:

- `gpt2`, byte-level BPE: merges in order, over text that is split by a named rule from a fixed list. The rule of a
  tokenizer.json is looked up by its steps. A rule without a name is rejected, since llama.cpp would split differently.
- `llama`, SentencePiece BPE: repeatedly joins the two neighbors whose joined piece has the highest score. Scores come
  from tokenizer.model, or from the order of the merges, which is the same order.

llama.cpp does not normalize text. For a tokenizer that composes characters first (NFC, as Qwen's), uncomposed text gets
other ids. Source: llama.cpp, docs and src/llama-vocab.cpp.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from lean_ft.gguf.splitting import PRE_TOKENIZERS
from lean_ft.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, WORD_START
from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.chat_template import without_generation_tags
from lean_ft.tokenizers.tiktoken_model import is_rank_file

_NOT_IN_UTF8 = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}  # the letters of bytes are printable
_ADDED_TOKEN_SCORE = -1000.0
# Kinds of special tokens besides bos and eos, and llama.cpp's names for them, as it spells them.
_SPECIAL = {"unk": "unknown", "sep": "seperator", "pad": "padding", "cls": "cls", "mask": "mask"}
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_PROBE = "a  b ﬁ½ ™"  # decodes differently if the tokenizer changes spaces or letters


def tokenizer_metadata(
    tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a tokenizer, filled up to `vocab_size` tokens. `ends`: ids that end an answer, beside eos.
    `config`: the model's config.json, whose special tokens are used if the tokenizer names none.

    Raises ValueError if no tokenizer of llama.cpp gives the same ids.
    """
    folder = tokenizer.folder
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model only {vocab_size} embeddings. Use "
            "the tokenizer that belongs to the model."
        )
    pieces = folder / "tokenizer.model"
    has_pieces = pieces.is_file() and not is_rank_file(pieces)
    spec = read_json(folder / "tokenizer.json")
    if not spec and not has_pieces:
        raise ValueError(f"{folder} has no tokenizer.json and no SentencePiece model. GGUF needs one of them.")
    found: dict[str, Any] = {"model": "gpt2"}
    if not spec or spec["model"].get("byte_fallback"):
        tokens, types, scores = _from_sentencepiece(pieces) if has_pieces else _from_byte_fallback(spec, folder)
        if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
            raise ValueError(f"{folder}: the tokenizer changes spaces or letters, which llama.cpp does not do.")
        starts_word = tokenizer.token_text(tokenizer.encode("a")[0]).startswith(WORD_START)
        scores += [_ADDED_TOKEN_SCORE] * (vocab_size - len(scores))
        found, more = {"model": "llama", "pre": "default"}, {"scores": scores, "add_space_prefix": starts_word}
    else:
        tokens, types, found["pre"], merges = _from_byte_level(spec, folder)
        more = {"merges": merges}
    types += [UNUSED] * (vocab_size - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    for token, token_id in tokenizer.added_tokens.items():
        tokens[token_id] = token
        if types[token_id] != UNKNOWN:
            types[token_id] = CONTROL if token in tokenizer.control_tokens else USER_DEFINED
    found |= {"tokens": tokens, "token_type": types}
    found |= {"add_bos_token": tokenizer.adds_bos, "add_eos_token": tokenizer.adds_eos, **more}
    ids = _special_ids(tokenizer, vocab_size, config)
    # llama.cpp stops at three tokens. Those that end a turn in the chat template come first.
    ends = sorted({*ends} - {ids.get("eos")}, key=lambda end: (end not in tokenizer.turn_ends, end))
    ids |= dict(zip(("eot", "eom"), ends, strict=False))
    found |= {f"{kind}_token_id": token_id for kind, token_id in ids.items()}
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    named = [name for name in tokenizer.chat_templates if name != "default"]
    for name, template in tokenizer.chat_templates.items():
        key = f"tokenizer.chat_template.{name}" if name in named else "tokenizer.chat_template"
        metadata[key] = without_generation_tags(template)
    return metadata | ({"tokenizer.chat_templates": named} if named else {})


def _special_ids(tokenizer: Tokenizer, vocab_size: int, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens by llama.cpp's names. Without an eos id, llama.cpp uses token 11 of a byte-level
    tokenizer."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for kind in _SPECIAL:  # not tokenizer.pad_id, which may be any token if the tokenizer names none
        token = tokenizer.special_tokens.get(f"{kind}_token")
        ids[kind] = None if token is None else tokenizer.token_id(token)
    found = {}
    for kind, token_id in ids.items():
        if token_id is None:
            token_id = config.get(f"{kind}_token_id")
        if type(token_id) is int and 0 <= token_id < vocab_size:
            found[_SPECIAL.get(kind, kind)] = token_id
    return found


def _from_byte_level(spec: dict[str, Any], folder: Path) -> tuple[list[str], list[int], str, list[str]]:
    """Return the tokens, their types, the name of the splitting rule, and merges such as "left right"."""
    model = spec["model"]
    rule = (*_splitting_rule(spec.get("pre_tokenizer")), ("ignore_merges", bool(model.get("ignore_merges"))))
    normalizer = (spec.get("normalizer") or {}).get("type", "NFC")
    if model["type"] != "BPE" or rule not in PRE_TOKENIZERS or normalizer != "NFC":
        known = ", ".join(sorted({names.split()[0] for names in PRE_TOKENIZERS.values()}))
        raise ValueError(
            f"{folder / 'tokenizer.json'}: llama.cpp would give other ids, because it does not have this file's rule "
            f"for splitting text (supported: {known})."
        )
    # llama.cpp drops bytes without a token. So does the `tokenizers` library, unless the file has an unknown token.
    missing = sorted({*ByteLevel.alphabet()} - model["vocab"].keys() - _NOT_IN_UTF8)
    if missing and model.get("unk_token") is not None:
        raise ValueError(
            f"{folder / 'tokenizer.json'} encodes {len(missing)} bytes (the first is {missing[0]!r}) as "
            f"{model['unk_token']!r}, and llama.cpp would drop them."
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return *_listed(model["vocab"]), PRE_TOKENIZERS[rule].split()[0], merges


def _splitting_rule(pre_tokenizer: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the steps of a pre-tokenizer with their relevant setting: (("Split", regex), ("ByteLevel", use_regex))."""
    kind = (pre_tokenizer or {}).get("type")
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return [entry for step in steps for entry in _splitting_rule(step)]
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False} | {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Removed",
            "invert": True,
        }:  # what the pattern does not match is kept or removed, but these patterns match everything
            return [("Split", regex.replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t"))]
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return [("Digits", individual)]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [("ByteLevel", pre_tokenizer.get("use_regex", True))]
    return [("unknown", kind)]


def _from_sentencepiece(path: Path) -> tuple[list[str], list[int], list[float]]:
    """Return the tokens, their types and their scores."""
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
    # Scores of a BPE model are negated ranks of the merges; scores of a unigram model are logarithms.
    if any(score != int(score) for score, kind in zip(scores, types, strict=True) if kind == NORMAL):
        raise ValueError(f"{path} is a unigram model, which llama.cpp does not support for these families.")
    return [processor.id_to_piece(i) for i in ids], types, scores


def _from_byte_fallback(spec: dict[str, Any], folder: Path) -> tuple[list[str], list[int], list[float]]:
    """Convert a tokenizer.json like Llama 2's or Gemma's, without the tokenizer.model that it was made from."""
    model, normalizer, splitter = spec["model"], spec.get("normalizer") or {}, spec.get("pre_tokenizer") or {}
    if model["type"] != "BPE":
        raise ValueError(f"{folder / 'tokenizer.json'} is a {model['type']} tokenizer; expected BPE.")
    steps = [step.get("type") for step in normalizer.get("normalizers", [normalizer])]
    finds_nothing = splitter.get("pattern") == {"String": " "}  # Gemma's, because the normalizer replaces spaces
    if (splitter and not finds_nothing) or steps not in (["Prepend", "Replace"], ["Replace"]):
        raise ValueError(
            f"{folder / 'tokenizer.json'} marks the start of words with a pre-tokenizer, but llama.cpp marks the start "
            "of every text. Put the model's tokenizer.model into the folder."
        )
    tokens, types = _listed(model["vocab"])
    types = [BYTE if _BYTE_PIECE.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]
    if model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = UNKNOWN
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(rank))
    # Single characters never result from a merge, so their score is never used.
    return tokens, types, [scores.get(token, 0.0) for token in tokens]


def _listed(vocab: dict[str, int]) -> tuple[list[str], list[int]]:
    """Return the tokens in order of id, and their types. Missing ids are unused."""
    size = max(vocab.values()) + 1
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, token_id in vocab.items():
        tokens[token_id], types[token_id] = token, NORMAL
    return tokens, types
