"""How byte-level BPE splits a text before it joins bytes: the patterns of published tokenizers, by llama.cpp's names.

Rules of tokenizers whose models lean_ft cannot load are left out. Source: llama.cpp, src/llama-vocab.cpp.
"""

from typing import Any

Rule = tuple[tuple[str, Any], ...]
"""Steps of a pre-tokenizer with their setting, as `lean_ft.gguf.vocabulary` reads them from a tokenizer.json."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # digits one by one
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
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
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ"
    "-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits in groups of 3, from the right

_LIKE_LLAMA3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
ADD_BOS = f"{_LIKE_LLAMA3} tekken".split()  # rules where llama.cpp adds bos unless the file says otherwise


def _rule(*steps: str | bool, use_regex: bool = False, ignore_merges: bool = False) -> Rule:
    """Splits by patterns or into single digits, one after the other, and then into bytes."""
    splits = (("Digits" if isinstance(step, bool) else "Split", step) for step in steps)
    return (*splits, ("ByteLevel", use_regex), ("ignore_merges", ignore_merges))


# The steps before BPE -> llama.cpp's names. An export writes the first one.
PRE_TOKENIZERS: dict[Rule, str] = {
    _rule(LLAMA3_PATTERN, ignore_merges=True): f"{_LIKE_LLAMA3} glm4 glm5",
    _rule(LLAMA3_PATTERN): "dbrx smaug-bpe chatglm-bpe",
    _rule(QWEN2_PATTERN): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    _rule(_QWEN35): "qwen35",
    _rule(QWEN2_PATTERN.removeprefix(f"{_ENGLISH}|")): "ufakzeka",
    _rule(_UP_TO_3, LLAMA3_PATTERN.replace("{1,3}", "+"), ignore_merges=True): "minicpm5",
    _rule(_GPT4O): "gpt-4o llama4 kanana2 talkie minimax-m2",
    _rule(_FROM_RIGHT, _GPT4O): "tiny_aya cohere2moe",
    _rule(_KIMI): "kimi-k2",
    _rule(_TEKKEN, ignore_merges=True): "tekken",
    _rule(_UP_TO_3, _CJK, _DEEPSEEK): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    _rule(*_DEEPSEEK_LLM, r"\p{N}+"): "deepseek-llm",
    _rule(*_DEEPSEEK_LLM, True): "deepseek-llm",  # as published; no merge of such a vocabulary joins digits
    _rule(*_DEEPSEEK_CODER, True): "deepseek-coder",
    _rule(_SEED): "seed-coder",
    _rule(r"\p{N}+", r"(?=(\d{3})+(?!\d))"): "superbpe",
    _rule(r" ?[^(\s|[.,!?…。，、।۔،])]+", True): "viking",
    _rule(r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    _rule(True, use_regex=True): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _rule(use_regex=True): (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4 roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code"
    ),
}
# Rules that llama.cpp has only in part -> where it splits otherwise
APPROXIMATED = {
    **dict.fromkeys(("gpt-4o", "tekken"), "at combining marks and at capital letters outside ASCII"),
    "kimi-k2": "at combining marks and at capital letters",
    "tiny_aya": "at combining marks, at capital letters and around numbers",
}
RULES = {name: rule for rule, names in reversed(PRE_TOKENIZERS.items()) for name in names.split()}
