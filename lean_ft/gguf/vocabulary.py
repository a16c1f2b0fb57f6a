"""Convert a tokenizer to GGUF: tokens, their types and scores, merges, and the name of the splitting rule.

llama.cpp has two tokenizers for these families:

- `gpt2`, byte-level BPE: merges in order, over text that is split by a named rule from a fixed list. The rule of a
  tokenizer.json is looked up by its steps. A rule without a name is rejected, since llama.cpp would split differently.
- `llama`, SentencePiece BPE: repeatedly joins the two neighbors whose joined piece has the highest score. Scores come from
  tokenizer.model, or from the order of the merges, which is the same order.

llama.cpp does not normalize text. For a tokenizer that composes characters first (NFC, as Qwen's), uncomposed text gets
other ids. Source: llama.cpp, docs and src/llama-vocab.cpp.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.sentencepiece_model import WORD_START
from lean_ft.tokenizers.tiktoken_model import LLAMA3_PATTERN, QWEN2_PATTERN, is_rank_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
ADDED_TOKEN_SCORE = -1000.0
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_PROBE = "a  b ﬁ½ ™"  # decodes differently if the tokenizer changes spaces or letters
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = _GPT4O.replace(f"{_ENGLISH}?", "").replace("{1,3}", "")
_KIMI = r"[\p{Han}]+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"\n/]", r"\n]")
_QWEN35 = QWEN2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}", r" ?[^\s\p{L}\p{M}")
_UP_TO_3, _CJK = r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_SPARK = _DEEPSEEK.replace(r"+[\r\n]*", "+").replace(r"\s*[\r\n]+", r"[\r\n]")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_JAIS = LLAMA3_PATTERN.replace(
    r"\s+(?!\S)|\s+", "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"\s{1}"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_PUNCTUATION = r"[\p{P}!-/:-@\[-`{-~]"  # the library's Punctuation step
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ"
    "-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits in groups of 3, from the right
_AFMOE_DIGITS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # llama.cpp joins the first group and the text before

_LIKE_LLAMA3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
ADD_BOS = f"{_LIKE_LLAMA3} tekken chameleon".split()  # rules where llama.cpp adds bos unless the file says otherwise

Rule = tuple[tuple[str, Any], ...]


def _rule(*steps: str | bool, use_regex: bool = False, ignore_merges: bool = False) -> Rule:
    """Splits by patterns or into (single) digits, one after the other, and then into bytes."""
    splits = (("Digits" if isinstance(step, bool) else "Split", step) for step in steps)
    return (*splits, ("ByteLevel", use_regex), ("ignore_merges", ignore_merges))


# The steps before BPE, as `_splitting_rule` returns them -> llama.cpp's names. An export writes the first one.
PRE_TOKENIZERS: dict[Rule, str] = {
    _rule(LLAMA3_PATTERN, ignore_merges=True): f"{_LIKE_LLAMA3} glm4 glm5",
    _rule(LLAMA3_PATTERN): "dbrx smaug-bpe chatglm-bpe",
    _rule(QWEN2_PATTERN): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    _rule(_QWEN35): "qwen35",
    _rule(QWEN2_PATTERN.removeprefix(f"{_ENGLISH}|")): "ufakzeka",
    _rule(r"[^\n]+|[\n]+", QWEN2_PATTERN): "laguna",
    _rule(_UP_TO_3, LLAMA3_PATTERN.replace("{1,3}", "+"), ignore_merges=True): "minicpm5",
    _rule(_GPT4O): "gpt-4o llama4 kanana2 talkie minimax-m2",
    _rule(_GPT4O, ignore_merges=True): "granite-embed-multi-97m",
    _rule(_FROM_RIGHT, _GPT4O): "tiny_aya cohere2moe",
    _rule(_YOUTU, _GPT4O.replace("{1,3}", ""), ignore_merges=True): "youtu",
    _rule(_KIMI): "kimi-k2",
    _rule(_TEKKEN, ignore_merges=True): "tekken",
    _rule(_UP_TO_3, _CJK, _DEEPSEEK): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    _rule(_UP_TO_3, _CJK, _SPARK, r"\p{N}"): "spark2_5",
    _rule(_AFMOE_DIGITS, _ASIAN, _DEEPSEEK): "afmoe",
    _rule(*_DEEPSEEK_LLM, r"\p{N}+"): "deepseek-llm",
    _rule(*_DEEPSEEK_LLM, True): "deepseek-llm",  # as published; no merge of such a vocabulary joins digits
    _rule(*_DEEPSEEK_CODER, True): "deepseek-coder",
    _rule(_BAILING): "bailingmoe bailingmoe2 llada-moe",
    _rule(_SEED): "seed-coder",
    _rule(_JAIS): "jais-2",
    _rule(r"\p{N}+", r"(?=(\d{3})+(?!\d))"): "superbpe",
    _rule(_BLOOM): "bloom poro-chat gpt3-finnish",
    _rule(_BLOOM, True): "viking",
    _rule(
        *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"([\t\n]|    |  )", True, _PUNCTUATION),
        use_regex=True,
    ): "chameleon",
    _rule(f"{_PUNCTUATION}+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (
        *(("Split", f"{_PUNCTUATION}+"), ("ByteLevel", True), ("Digits", False), ("Split", "[0-9][0-9][0-9]")),
        ("ignore_merges", False),
    ): "falcon",  # as published; no merge of such a vocabulary joins spaces and digits
    _rule(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    _rule(True, use_regex=True): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _rule(use_regex=True): (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4 roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code"
    ),
}

# Rules that llama.cpp has only in part -> where it splits otherwise
APPROXIMATED = {
    **dict.fromkeys(
        ("gpt-4o", "granite-embed-multi-97m", "tekken"), "at combining marks and at capital letters outside ASCII"
    ),
    **dict.fromkeys(("youtu", "kimi-k2"), "at combining marks and at capital letters"),
    "tiny_aya": "at combining marks, at capital letters and around numbers",
}

RULES = {name: rule for rule, names in reversed(PRE_TOKENIZERS.items()) for name in names.split()}


@dataclass
class GGUFVocabulary:
    """Values for `tokenizer.ggml.*`. Lists have one entry per id."""

    model: str  # gpt2 or llama
    tokens: list[str]
    types: list[int]
    pre: str = "default"
    scores: list[float] = field(default_factory=list)  # for `llama`
    merges: list[str] = field(default_factory=list)  # for `gpt2`: "left right"
    add_space_prefix: bool | None = None  # for `llama`


def gguf_vocabulary(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> GGUFVocabulary:
    """Return the tokenizer of a model folder, filled up to `vocab_size` entries.

    Raises ValueError if no tokenizer of llama.cpp gives the same ids.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model only {vocab_size} embeddings. Use the "
            "tokenizer that belongs to the model."
        )
    pieces = folder / "tokenizer.model"
    if pieces.is_file() and is_rank_file(pieces):
        pieces = folder / "absent"
    spec = _read(folder / "tokenizer.json")
    if spec is None and not pieces.is_file():
        raise ValueError(f"{folder} has no tokenizer.json and no SentencePiece model. GGUF needs one of them.")
    if spec is None or spec["model"].get("byte_fallback"):
        vocabulary = _from_sentencepiece(pieces) if pieces.is_file() else _from_byte_fallback(spec or {}, folder)
        first = tokenizer.token_text(tokenizer.encode("a")[0])
        vocabulary.add_space_prefix = first.startswith(WORD_START)
        if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
            raise ValueError(f"{folder}: the tokenizer changes spaces or letters, which llama.cpp does not do.")
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
    if model["type"] != "BPE" or rule not in PRE_TOKENIZERS or normalizer != "NFC":
        known = ", ".join(sorted({names.split()[0] for names in PRE_TOKENIZERS.values()}))
        raise ValueError(
            f"{folder / 'tokenizer.json'}: llama.cpp would give other ids, because it does not have this file's rule for "
            f"splitting text (supported: {known})."
        )
    # llama.cpp drops bytes without a token. So does the `tokenizers` library, unless the file has an unknown token.
    missing = [byte for byte, letter in _byte_letters().items() if letter not in model["vocab"]]
    if missing and model.get("unk_token") is not None:
        raise ValueError(
            f"{folder / 'tokenizer.json'} encodes {len(missing)} bytes (the first is 0x{missing[0]:02X}) as {model['unk_token']!r}, "
            "and llama.cpp would drop them."
        )
    tokens, types = _listed(model["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return GGUFVocabulary("gpt2", tokens, types, PRE_TOKENIZERS[rule].split()[0], merges=merges)


def _byte_letters() -> dict[int, str]:
    """Return GPT-2's letter for each byte that occurs in UTF-8: the byte itself if printable, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return {byte: letters[byte] for byte in range(0xF5) if byte not in (0xC0, 0xC1)}


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
        case {"type": "Punctuation", "behavior": "Isolated" | "Contiguous" as behavior}:
            return [("Split", _PUNCTUATION + "+" * (behavior == "Contiguous"))]
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
    # Scores of a BPE model are negated ranks of the merges; scores of a unigram model are logarithms.
    if any(score != int(score) for score, kind in zip(scores, types, strict=True) if kind == NORMAL):
        raise ValueError(f"{path} is a unigram model, which llama.cpp does not support for these families.")
    return GGUFVocabulary("llama", [processor.id_to_piece(i) for i in ids], types, scores=scores)


def _from_byte_fallback(spec: dict[str, Any], folder: Path) -> GGUFVocabulary:
    """Convert a tokenizer.json like Llama 2's or Gemma's, without the tokenizer.model that it was made from."""
    model, normalizer, splitter = spec["model"], spec.get("normalizer") or {}, spec.get("pre_tokenizer") or {}
    if model["type"] != "BPE":
        raise ValueError(f"{folder / 'tokenizer.json'} is a {model['type']} tokenizer; expected BPE.")
    steps = [step.get("type") for step in normalizer.get("normalizers", [normalizer])]
    finds_nothing = splitter.get("pattern") == {"String": " "}  # Gemma's, because the normalizer replaces spaces
    if (splitter and not finds_nothing) or steps not in (["Prepend", "Replace"], ["Replace"]):
        raise ValueError(
            f"{folder / 'tokenizer.json'} marks the start of words with a pre-tokenizer, but llama.cpp marks the start of every "
            "text. Put the model's tokenizer.model into the folder."
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
    return GGUFVocabulary("llama", tokens, types, scores=[scores.get(token, 0.0) for token in tokens])


def _listed(vocab: dict[str, int]) -> tuple[list[str], list[int]]:
    """Return the tokens in order of id, and their types. Missing ids are unused."""
    size = max(vocab.values()) + 1
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, token_id in vocab.items():
        tokens[token_id], types[token_id] = token, NORMAL
    return tokens, types


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
